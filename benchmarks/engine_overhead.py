"""What the engine costs over a bare PyTorch loop with the same maths, per step, measured side by side in one process.

    python benchmarks/engine_overhead.py [--rounds 7] [--steps 100] [key=value ...]

Both sides train magic_transformer from the same weights on the same samples in the same order; the final losses are
compared. Rounds alternate between the two, so that a slow moment of the machine hits both. The engine runs with its
defaults: logging every 10 steps to all local backends, finite checks, clipping. Writes results/engine_overhead.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mvp_engine.config import compose
from mvp_engine.data import derived_seed, seed_everything
from mvp_engine.distributed import World
from mvp_engine.model_engine.optim import lr_factor
from mvp_engine.runs import Run

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "recipes" / "magic_transformer" / "configs" / "train.yaml"


def bare(config: Any, rows: torch.Tensor, order: list[int], model: torch.nn.Module) -> tuple[float, float]:
    """The loop a good engineer would write by hand, data included; gives seconds and the last loss."""
    decay = [p for p in model.parameters() if p.ndim >= 2 and p is not model.token.weight]
    decay = [p for p in decay if p is not model.position.weight]
    rest = [p for p in model.parameters() if not any(p is q for q in decay)]
    groups = [{"params": decay, "weight_decay": config.optim.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, config.optim.lr, tuple(config.optim.betas), config.optim.eps, fused=True)
    total = config.train.max_steps
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: lr_factor(s, config.optim, total))
    answer, size = config.task.digits, config.data.global_batch_size
    model.train()
    started = time.perf_counter()
    for step in range(1, total + 1):
        batch = rows[order[(step - 1) * size : step * size]]
        logits = model(batch[:, :-1])[:, -answer:].flatten(0, 1)
        loss = F.cross_entropy(logits, batch[:, -answer:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm)
        optimizer.step()
        scheduler.step()
        if step % config.log.interval == 0:
            print(f"{step} {loss.item():.4f}", file=sys.stderr)
    return time.perf_counter() - started, loss.item()


def timed(engine_class: type) -> type:
    class Timed(engine_class):  # type: ignore[misc]
        def do_train(self) -> None:
            started = time.perf_counter()
            super().do_train()
            self.seconds = time.perf_counter() - started

        def train_post_step(self, ctx: Any) -> None:
            self.last = ctx.numbers

    return Timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100)
    args, words = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(prefix="overhead-"))
    words = [f"train.max_steps={args.steps}", "eval.steps=null", "checkpoint.interval=null", *words]
    composed = compose(CONFIG, [*words, f"output_dir={folder}"])
    world = World.join(composed.config.device)
    engine_class = timed(composed.engine_class)
    times: dict[str, list[float]] = {"bare": [], "engine": []}
    losses: dict[str, float] = {}
    for number in range(args.rounds + 1):  # the first round warms both up and does not count
        engine = engine_class(composed.config, world, Run.create(folder, "overhead", f"round{number}"))
        seed_everything(derived_seed(composed.config.seed, "model"))
        loader = engine.prepare_dataloader("train")
        order = loader.sample_ids(0, args.steps)
        seconds, losses["bare"] = bare(composed.config, loader.dataset.rows, order, engine.prepare_model())
        with engine:
            engine.train()
        losses["engine"] = float(engine.last.loss_sum / engine.last.weight)
        if number:
            times["bare"].append(seconds / args.steps)
            times["engine"].append(engine.seconds / args.steps)
    assert abs(losses["bare"] - losses["engine"]) <= 1e-5 * abs(losses["bare"]), losses
    ratios = [e / b for e, b in zip(times["engine"], times["bare"], strict=True)]
    result = {
        "bare_ms": round(1e3 * statistics.median(times["bare"]), 3),
        "engine_ms": round(1e3 * statistics.median(times["engine"]), 3),
        "overhead_percent": round(100 * (statistics.median(ratios) - 1), 2),
        "overhead_percent_of_each_round": [round(100 * (r - 1), 2) for r in ratios],
        "final_loss": losses,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "command": "python benchmarks/engine_overhead.py " + " ".join(sys.argv[1:]),
    }
    text = json.dumps(result, indent=2)
    (ROOT / "benchmarks" / "results").mkdir(exist_ok=True)
    (ROOT / "benchmarks" / "results" / "engine_overhead.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
