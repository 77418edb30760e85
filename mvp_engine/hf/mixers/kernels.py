"""Kernels for mixers: which of the optional packages are installed, and what each of them is for.

flash-linear-attention needs Triton only, so it runs wherever torch does on a GPU; `fla-core` is the part of it that has
the kernels. `causal-conv1d` and `mamba-ssm` are compiled against one torch and CUDA; where installed they are used for
what they are faster at.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor

INSTALL = "pip install 'mvp-engine[linear]'"


class Kernel(NamedTuple):
    package: str  # the distribution that has it
    module: str
    function: str
    has_decay_per_channel: bool = False  # where the mixer has one per head


FLA = "fla-core"


# What a mixer computes -> kernels that restart at sequence boundaries, best first.
KERNELS: dict[str, tuple[Kernel, ...]] = {
    "short convolution": (
        Kernel("causal-conv1d", "causal_conv1d", "causal_conv1d_fn"),
        Kernel(FLA, "fla.modules.causal_conv1d", "causal_conv1d"),
    ),
    "gated delta rule": (
        Kernel(FLA, "fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
        Kernel(FLA, "fla.ops.kda", "chunk_kda", has_decay_per_channel=True),
    ),
    "Kimi delta attention": (Kernel(FLA, "fla.ops.kda", "chunk_kda"),),
    "Mamba 2 scan": (
        Kernel("mamba-ssm", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"),
        Kernel(FLA, "fla.ops.simple_gla", "chunk_simple_gla"),
        Kernel(FLA, "fla.ops.gla", "chunk_gla", has_decay_per_channel=True),
    ),
}


class Loaded(NamedTuple):
    kernel: Kernel
    call: Callable[..., Any]  # ignores keyword arguments that the installed version does not know


@functools.cache
def load(operation: str) -> Loaded | None:
    """The best installed kernel for an operation of `KERNELS`; None without one."""
    for kernel in KERNELS[operation]:
        if kernel.function in _MISCOMPILED and _is_miscompiled():
            continue
        try:
            function = getattr(importlib.import_module(kernel.module), kernel.function)
        except (ImportError, OSError, AttributeError, RuntimeError):
            continue  # not installed, or built for another torch: then the next one
        return Loaded(kernel, _with_known_arguments(function))
    return None


# Kernels of flash-linear-attention whose backward raises where Triton would compile it wrongly. Those with a decay per
# channel compute the same by other code.
_MISCOMPILED = {"chunk_gated_delta_rule", "chunk_simple_gla"}
_FIX = "Triton 3.7.1 (torch 2.12) or newer has faster ones"


def _is_miscompiled() -> bool:
    """On Hopper, from Triton 3.4 to 3.7.0."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    release = tuple(int(part) for part in re.findall(r"\d+", _version("triton"))[:3])
    return (3, 4) <= release < (3, 7, 1)


def _with_known_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    known = inspect.signature(inspect.unwrap(function)).parameters

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {name: value for name, value in kwargs.items() if name in known}
        return function(*args, **given)

    return call


_reference_only = False


@contextmanager
def reference_only() -> Iterator[None]:
    """Without kernels, to compare them with."""
    global _reference_only
    before, _reference_only = _reference_only, True
    try:
        yield
    finally:
        _reference_only = before


def kernel_for(operation: str, tensor: Tensor) -> Loaded | None:
    """The kernel for tensors like this one. All kernels are for GPUs."""
    return load(operation) if tensor.is_cuda and not _reference_only else None


def describe(operation: str, device: torch.device) -> str:
    """What computes an operation on this device, and what would be faster."""
    if device.type != "cuda":
        return "torch (reference)"
    loaded = load(operation)
    if loaded is not None:
        kernel = loaded.kernel
        slower = f" (one decay per channel: {_FIX})" if kernel.has_decay_per_channel else ""
        return f"{kernel.package} {_version(kernel.package)}{slower}"
    return f"torch (reference, slow): {INSTALL}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # on PYTHONPATH, without metadata
        return ""
