"""A hybrid model (Qwen3.5-2B's shape, random weights) on one GPU: training speed, and the kernels' rounding errors.

    PYTHONPATH=. python benchmarks/hybrid.py --out benchmarks/results/hybrid.json
    PYTHONPATH=. python benchmarks/hybrid.py --shape tiny_hybrid --steps 10 --longest 128   # tries it on a CPU

Speed: `sft/compare.py` with this engine and Hugging Face's Trainer in one run, on the same rows of `mix`; its head says
how. Both use flash-linear-attention where it is installed; the Trainer pads.

Errors: log-probs and gradients of one pack, by four of the model's layers (three gated delta nets and one attention).
`reference` runs the torch functions of transformers by sequence; `kernels` are those of flash-linear-attention with
sequence boundaries. Both in fp32 (TF32 off) and under bf16 autocast, against the reference in fp32. `neighbour` is the
largest change of a sequence when all others in its pack are replaced: it must be 0 or rounding.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.mixers import kernels

SFT = Path(__file__).parent / "sft"
sys.path.insert(0, str(SFT))
from data import rows, shape  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def compare(args: argparse.Namespace) -> dict[str, Any]:
    out = args.out.with_suffix(".speed.json")
    words = ["--shape", args.shape, "--mixes", "mix", "--sides", *args.sides, "--steps", str(args.steps)]
    words += ["--longest", str(args.longest), "--batch", str(args.batch), "--out", str(out)]
    words += ["--limit", str(args.limit)] if args.limit else []
    subprocess.run([sys.executable, str(SFT / "compare.py"), *words], check=True)
    found = json.loads(out.read_text())
    out.unlink()
    return found


class Errors:
    """One pack through a model with four layers."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        overrides = {**shape(args.shape), "num_hidden_layers": 4}
        from transformers import AutoConfig

        with DEVICE:
            self.model = LanguageModel.from_config(AutoConfig.for_model(**overrides))
        every = rows("mix", 1, args.longest)
        self.pack = self._pack([row.ids for row in every[:8]])
        other = [every[0].ids, *(row.ids.roll(1) for row in every[1:8])]
        self.other_pack = self._pack(other)
        self.first = len(every[0].ids)

    def _pack(self, ids: list[Tensor]) -> PackedBatch:
        return PackedBatch.from_sequences(ids).to(DEVICE)

    def log_probs(self, pack: PackedBatch, dtype: torch.dtype, use_kernels: bool) -> Tensor:
        autocast = torch.autocast(DEVICE.type, dtype) if dtype != torch.float32 else nullcontext()
        with autocast, nullcontext() if use_kernels else kernels.reference_only():
            return self.model(pack, ["log_probs"])["log_probs"].float()

    def run(self, dtype: torch.dtype, use_kernels: bool) -> tuple[Tensor, dict[str, Tensor], float]:
        """Log-probs, gradients of their mean, and how much the other sequences change the first one."""
        self.model.zero_grad()
        log_probs = self.log_probs(self.pack, dtype, use_kernels)
        log_probs.mean().backward()
        gradients = {
            name: param.grad.clone() for name, param in self.model.named_parameters() if param.grad is not None
        }
        with torch.no_grad():
            alike = self.log_probs(self.pack, dtype, use_kernels)
            changed = self.log_probs(self.other_pack, dtype, use_kernels)
        end = self.first - 1
        return log_probs.detach(), gradients, float((alike[:end] - changed[:end]).abs().max())

    def table(self, precisions: list[str]) -> list[dict[str, Any]]:
        expected, expected_gradients, _ = self.run(torch.float32, use_kernels=False)
        lines = []
        for dtype in [getattr(torch, precision) for precision in precisions]:
            for use_kernels in (False, True):
                named = {
                    "precision": str(dtype).removeprefix("torch."),
                    "path": "kernels" if use_kernels else "reference",
                }
                try:
                    log_probs, gradients, neighbour = self.run(dtype, use_kernels)
                except Exception as error:  # noqa: BLE001 - such as a kernel that asks for too much shared memory
                    lines.append({**named, "why": str(error).splitlines()[0]})
                    print(lines[-1], file=sys.stderr, flush=True)
                    continue
                difference = (log_probs - expected).abs()
                of_gradients = {
                    name: float((value - expected_gradients[name]).norm() / expected_gradients[name].norm())
                    for name, value in gradients.items()
                    if expected_gradients[name].norm() > 0
                }
                worst = max(of_gradients, key=lambda name: of_gradients[name])
                lines.append(
                    {
                        **named,
                        "log_probs_mean": float(difference.mean()),
                        "log_probs_max": float(difference.max()),
                        "gradients_median": float(torch.tensor(list(of_gradients.values())).median()),
                        "gradients_worst": of_gradients[worst],
                        "worst": worst,
                        "neighbour": neighbour,
                    }
                )
                print(lines[-1], file=sys.stderr, flush=True)
        return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("hybrid.json"), help="write everything as JSON")
    parser.add_argument("--shape", default="qwen3_5_2b")
    parser.add_argument("--sides", nargs="*", default=["ours", "Trainer"])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4, help="sequences that the Trainer takes at once")
    parser.add_argument("--limit", type=float, help="seconds of the Trainer")
    parser.add_argument("--only", choices=["speed", "errors"])
    every = ["float32", "bfloat16"]
    parser.add_argument("--precisions", nargs="*", default=every, choices=every, help="of the errors")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    result: dict[str, Any] = {}
    if args.only != "speed":
        model = Errors(args)
        used = {name: kernels.describe(name, DEVICE) for name in sorted(model.model.mixers.operations)}
        print(f"kernels: {used}", file=sys.stderr)
        result |= {"kernels": used, "errors": model.table(args.precisions)}
        del model
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    if args.only != "errors":
        result |= compare(args)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
