"""A run folder with everything that the report reads, without a training."""

import json

from mvp_engine.runs import Run

PERF = {
    "step_s": 0.5,
    "samples_per_s": 12.0,
    "tokens_per_s": 48238.0,
    "mfu": 0.535,
    "data_wait": 0.01,
}
PARTS = [
    {"part": "vision", "parameters": 4000, "trained": 0, "rates": [], "adapters": 0},
    {"part": "all", "parameters": 9000, "trained": 5000, "rates": [0.001], "adapters": 7},
]
SETUP = {
    "device": "NVIDIA H200",
    "ranks": 8,
    "precision": "bf16",
    "global_batch": "64 packs",
    "total_steps": 40,
}


def run_folder(folder, **info):
    """A finished run of 40 steps with two sources, four bad rows and an over-long one."""
    setup = {**SETUP, "parts": PARTS, "versions": {"torch": "2.15.0"}}
    entries = {"name": "cats", "status": "finished", "ended": 0.0, "setup": setup, **info}
    (folder / "run.json").write_text(json.dumps(entries))
    records = []
    for step in (1, 10, 20, 30, 40):
        train = {
            "step": step,
            "split": "train",
            "loss": 40 / step,
            "loss_web": 1.5,
            "loss_own": 0.5,
            "fill": 0.97,
        }
        perf = {**PERF, "tokens_per_s": 7.0} if step == 1 else PERF  # the first step compiles
        records.append(
            {**train, "lr": 1e-3, "grad_norm": 2.0, "perf": {**perf, "memory_gib": step}}
        )
    for step, loss in ((20, 0.25), (40, 0.75)):
        shares = {"exact_web": 0.125, "exact_own": 0.9}
        records.append(
            {
                "step": step,
                "split": "eval",
                "loss": loss,
                "loss_web": 2.5,
                "loss_own": 3.5,
                **shares,
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    bad = [{"source": "web", "where": f"rows:{i}", "reason": "corrupt"} for i in range(4)]
    (folder / "bad_rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bad))
    long = {"source": "own", "where": "rows:9", "reason": "too long"}
    (folder / "overlong_rows.jsonl").write_text(json.dumps(long) + "\n")
    (folder / "config.yaml").write_text("train: {max_steps: 40}\n")
    (folder / "processor").mkdir()
    return Run(folder)
