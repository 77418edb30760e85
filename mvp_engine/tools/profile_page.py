"""Where the time of a step goes: from the profiler's kernels to one page.

A trace has every kernel; the page has what one looks for first: how long the device was idle, what kinds of work it
did, which kernels took longest, and what the memory holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

TALK, COPIES = "communication", "copies"
# The first pattern that a kernel's name fits tells its kind.
KINDS = {
    "fused blocks (norms, activations, rotary positions)": r"^triton_(?!tem_.*attention)",  # that is FlexAttention
    TALK: r"nccl|gloo|c10d",
    "attention": r"sdpa|flash|fmha|attention|cudnn_generated|ragged",
    COPIES: r"memcpy|memset|copy_|catarray",
    "matrix products": r"gemm|nvjet|xmma|cublas|splitk|addmm|\bmm\b|bmm|matmul|linear",
    "loss over logits": r"row_numbers|to_gradient|log_softmax|nll_loss",
    "optimizer": r"adam|multi_tensor|foreach|lpnorm|clip",
    "convolutions": r"conv|winograd|im2col",
    "embeddings and indexing": r"index|gather|scatter|embedding|radix|sort|masked",
}


@dataclass(frozen=True)
class Kernel:
    name: str
    start: float  # microseconds
    length: float

    @property
    def kind(self) -> str:
        name = self.name.lower()
        return next(
            (kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "everything else"
        )


def kernels_of(profiler: Any, device: str) -> list[Kernel]:
    """What ran on the GPU; on a CPU the operations, without the time of those that they call. Names that somebody gave
    to stretches of time, such as that of an optimizer's step, are no work of their own."""
    found = []
    for event in profiler.events():
        if event.is_user_annotation and device == "cuda":
            continue
        if str(event.device_type).endswith("CUDA") == (device == "cuda"):
            length = (
                event.time_range.elapsed_us() if device == "cuda" else event.self_cpu_time_total
            )
            found.append(Kernel(event.name, event.time_range.start, length))
    return found


def collectives_of(profiler: Any, kernels: Iterable[Kernel]) -> list[Kernel]:
    """When ranks exchanged data: NCCL's kernels, or what gloo did on the host."""
    host = [event for event in profiler.events() if event.name.startswith("gloo:")]
    found = [
        Kernel(event.name, event.time_range.start, event.time_range.elapsed_us()) for event in host
    ]
    return found + [kernel for kernel in kernels if kernel.kind == TALK]


def busy_time(kernels: Iterable[Kernel]) -> float:
    """Microseconds in which at least one was running."""
    total, end = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda k: k.start):
        total += max(0.0, kernel.start + kernel.length - max(end, kernel.start))
        end = max(end, kernel.start + kernel.length)
    return total


def gaps(kernels: Iterable[Kernel]) -> dict[str, list[float]]:
    """Idle microseconds between kernels, by what ended the wait: that is what the device was waiting for."""
    found: dict[str, list[float]] = {}
    end = None
    for kernel in sorted(kernels, key=lambda k: k.start):
        if end is not None and kernel.start > end:
            found.setdefault(kernel.name, []).append(kernel.start - end)
        end = (
            kernel.start + kernel.length if end is None else max(end, kernel.start + kernel.length)
        )
    return found


def summary(
    kernels: Sequence[Kernel],
    seconds: float,
    steps: int,
    memory: dict[str, float],
    talks: Sequence[Kernel] = (),
) -> dict[str, Any]:
    """Of so many steps that took so long: figures for a program, and for `page`. `memory` is in GiB, by kind."""
    work = [kernel for kernel in kernels if kernel.kind not in (TALK, COPIES)]  # gloo copies, too
    alone = busy_time([*work, *talks]) - busy_time(work)
    kinds: dict[str, list[float]] = {}
    names: dict[str, list[float]] = {}
    for kernel in kernels:
        kinds.setdefault(kernel.kind, []).append(kernel.length)
        names.setdefault(kernel.name, []).append(kernel.length)

    def told(groups: dict[str, list[float]]) -> list[dict[str, Any]]:
        rows = [
            {"name": n, "ms": sum(t) / steps / 1e3, "calls": len(t) / steps}
            for n, t in groups.items()
        ]
        return sorted(rows, key=lambda row: -row["ms"])

    return {
        "steps": steps,
        "step_ms": 1e3 * seconds / steps,
        "idle": max(0.0, 1 - busy_time(kernels) / 1e6 / seconds),
        "comm_ms": busy_time(talks) / steps / 1e3,
        "exposed_comm_ms": alone / steps / 1e3,
        "kinds": told(kinds),
        "kernels": told(names)[:20],
        "gaps": told(gaps(kernels))[:10],
        "memory_gib": memory,
    }


def page(facts: dict[str, Any], title: str) -> str:
    """As Markdown."""
    step = facts["step_ms"]

    def rows(groups: list[dict[str, Any]]) -> list[str]:
        return [
            f"| {_short(g['name'])} | {g['ms']:.2f} | {g['ms'] / step:.1%} | {g['calls']:.0f} |"
            for g in groups
        ]

    head = "| ms a step | of it | calls |\n| --- | ---: | ---: | ---: |"
    lines = [
        f"# {title}",
        f"\n{facts['steps']} steps of {step:.1f} ms, {facts['step_ms_alone']:.1f} ms without the profiler. "
        f"Nothing ran on the device for {facts['idle']:.1%} of the time."
        + (_talk(facts) if facts["comm_ms"] else ""),
        f"\n| kind {head}",
        *rows(facts["kinds"]),
        f"\n| kernel {head}",
        *rows(facts["kernels"]),
        f"\n| idle before {head}",
        *rows(facts["gaps"]),
        "\n| memory | GiB |\n| --- | ---: |",
        *(f"| {kind} | {size:.2f} |" for kind, size in facts["memory_gib"].items()),
    ]
    return "\n".join(lines) + "\n"


def _talk(facts: dict[str, Any]) -> str:
    talked, alone = facts["comm_ms"], facts["exposed_comm_ms"]
    return (
        f" Ranks exchanged data for {talked:.1f} ms of a step; for {alone:.1f} ms of that "
        f"({alone / talked:.0%}) nothing else was computed."
    )


def _short(name: str) -> str:
    return re.sub(r"\s+", " ", name).replace("|", "/")[:90]
