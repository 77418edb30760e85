"""Safetensors files: writing one durably, reading slices of many with bounded memory.

Checkpoints and Hugging Face folders share this module; what the entries mean is the business of their own formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mvp_engine.files import fsync_path


def write_safetensors(
    tensors: Mapping[str, Tensor], file: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors of any device to one file and flush it to disk. CPU tensors that are contiguous are not copied."""
    data = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(data, file, metadata)
    file.chmod(file.parent.stat().st_mode & 0o666)  # safetensors creates files as 0600
    fsync_path(file)


class SafetensorsReader:
    """Reads slices of safetensors files, which are memory-mapped.

    The pages that were read of a mapped file count as resident memory until it is closed, so all files are closed
    after `MAX_MAPPED_BYTES`.
    """

    MAX_MAPPED_BYTES = 64 * 2**20

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}
        self._mapped_bytes = 0

    def read(self, path: Path, key: str, index: tuple[slice, ...]) -> Tensor:
        """The slice `index` of one entry; an empty index reads all of it."""
        if self._mapped_bytes > self.MAX_MAPPED_BYTES:
            self._files = {}
            self._mapped_bytes = 0
        if path not in self._files:
            self._files[path] = safe_open(path, "pt")
        value: Tensor = self._files[path].get_slice(key)[index or ...]
        self._mapped_bytes += value.nbytes
        return value
