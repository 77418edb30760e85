"""The table of docs/plan.md: what `mvp plan` predicted, and what an H200 measured.

    python benchmarks/plan.py            # write the table into docs/plan.md

`results/plan.json` has the predictions, each with the file and the row of its measurement. Rows that trained with
`auto` have the prediction themselves, as the log printed it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "plan.md"
MARKS = ("<!-- measured -->\n", "<!-- /measured -->")
HEAD = "| training | memory, measured | predicted | ratio | step, measured | predicted | row of `benchmarks/results` |"


def comparisons() -> list[dict[str, Any]]:
    """The rows of the table: `training`, measured and predicted `gib` and `ms` (None: no prediction), `source`."""
    rows = []
    for one in json.loads((RESULTS / "plan.json").read_text())["rows"]:
        row = json.loads((RESULTS / f"{one['file']}.json").read_text())["rows"][one["row"]]
        gib, ms = one.get("predicted_gib"), one.get("predicted_ms")
        if gib is None:
            [(gib, seconds)] = re.findall(r"([\d.]+) of \d+ GiB and ([\d.]+) s by the estimate", row["auto"])
            ms = ms or 1e3 * float(seconds)
        step_ms = row.get("step_ms") or 1e3 * row["step_s"]
        rows.append(
            {
                "training": one["training"],
                "gib": row.get("memory_gib") or row["peak_gib"],
                "predicted_gib": float(gib),
                "ms": step_ms if ms else None,
                "predicted_ms": ms,
                "source": f"{one['file']}.json, {one['row']}",
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [HEAD, "| --- | ---: | ---: | ---: | ---: | ---: | --- |"]
    for row in rows:
        memory = f"{row['gib']:.1f} GiB | {row['predicted_gib']:.1f} GiB | {row['predicted_gib'] / row['gib']:.2f}"
        step = " | " if row["ms"] is None else f"{row['ms']:,.0f} ms | {row['predicted_ms']:,.0f} ms"
        lines.append(f"| {row['training']} | {memory} | {step} | `{row['source']}` |")
    return "\n".join(lines) + "\n"


def main() -> None:
    text = PAGE.read_text()
    before, rest = text.split(MARKS[0])
    PAGE.write_text(f"{before}{MARKS[0]}{table(comparisons())}{MARKS[1]}{rest.split(MARKS[1])[1]}")


if __name__ == "__main__":
    main()
