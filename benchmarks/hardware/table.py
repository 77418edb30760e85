"""Which models can be fine-tuned on which GPUs, by `mvp plan`: the table of docs/hardware.md.

    PYTHONPATH=. python benchmarks/hardware/table.py --out benchmarks/results/hardware.json   # estimate, about a minute
    PYTHONPATH=. python benchmarks/hardware/table.py                                          # print the table

No GPU is needed. A cell is the cheapest setting that fits packs of 4,096 tokens: full fine-tuning if possible, else
with optimizer states on the host, else LoRA. `shapes.yaml` has the models.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "hardware.json"
TOKENS = 4096
GPUS = {"RTX 4090": "24 GB", "H100": "80 GB", "H200": "141 GB"}
COUNTS = (1, 8)


def shapes() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((HERE / "shapes.yaml").read_text())


def estimate_cell(model: str, gpu: str, count: int) -> dict[str, Any]:
    """The cheapest setting of a model on a number of GPUs."""
    from transformers import AutoConfig

    from mvp_engine.kit.plan.planner import Question
    from mvp_engine.tools.plan import make_planner

    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model(**shapes()[model]).save_pretrained(folder)
        # Rows are as long as packs, so that no advice is to leave out long rows.
        planner = make_planner(Question(folder, [f"data.max_length={TOKENS}"], gpu, count, TOKENS))
        return {"model": model, **_cell(planner, gpu, count)}


def _cell(planner: Any, gpu: str, count: int) -> dict[str, Any]:
    from mvp_engine.kit.plan.planner import Change, cheapest, lora_change, offload_change

    config = planner.config
    ways = {"full": Change(), "offload": offload_change(config), "LoRA": lora_change(config)}
    fitting = ((way, found) for way, change in ways.items() if (found := cheapest(planner, count, change)))
    method, found = next(fitting, (None, None))
    cell = {"gpu": gpu, "gpus": count, "method": method}
    if found:
        tokens_per_s = round(found["tokens_per_s"])
        cell |= {"words": found["words"], "peak_gib": round(found["peak_gib"], 1), "tokens_per_s": tokens_per_s}
    return cell


def table(cells: list[dict[str, Any]]) -> str:
    """The cells as a Markdown table."""
    columns = [(gpu, count) for count in COUNTS for gpu in GPUS]
    head = [f"{count} x {GPUS[gpu]}" for gpu, count in columns]
    lines = [f"| | {' | '.join(head)} |", f"| --- |{' --- |' * len(head)}"]
    for model in dict.fromkeys(cell["model"] for cell in cells):
        found = {(cell["gpu"], cell["gpus"]): cell["method"] or "-" for cell in cells if cell["model"] == model}
        lines.append(f"| {model.partition('/')[2]} | {' | '.join(found[column] for column in columns)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="estimate again, and write the JSON file")
    args = parser.parse_args()
    if args.out:
        cells = [estimate_cell(model, gpu, count) for model in shapes() for count in COUNTS for gpu in GPUS]
        command = "PYTHONPATH=. python benchmarks/hardware/table.py --out benchmarks/results/hardware.json"
        args.out.write_text(json.dumps({"command": command, "tokens": TOKENS, "cells": cells}, indent=1) + "\n")
    print(table(json.loads((args.out or RESULTS).read_text())["cells"]), end="")


if __name__ == "__main__":
    main()
