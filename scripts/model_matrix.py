"""Writes `mvp_engine/tools/models_text.json`, the data of `mvp doctor --models`, and the table in docs/models.md.

    python scripts/model_matrix.py             # sweep all text model types (about three minutes on one core)
    python scripts/model_matrix.py qwen3 bloom # only these; others keep their entries
    python scripts/model_matrix.py --page      # only write the page from the JSON files

The sweep itself is tests/hf/model_sweep.py.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "hf")]

FILE = ROOT / "mvp_engine" / "tools" / "models_text.json"
PAGE = ROOT / "docs" / "models.md"
BEGIN = "<!-- matrix -->\n"
END = "\n<!-- /matrix -->"
REASONS = {
    "encoder": "an encoder: its tokens see later ones, so it has no next-token loss",
    "encoder-decoder": "the decoder of an encoder-decoder model; only decoder-only language models are supported",
}

PADDED = "on padded rows, one sequence per row: slower than packed ones"
NO_ULYSSES = "parallel.ulysses > 1: it runs on padded rows, which have no tokens to share between ranks"

NO_PLAN = "parallel.tensor > 1: its code fails with the tensor-parallel plan of transformers"


def main(words: list[str]) -> None:
    if words != ["--page"]:
        write_entries(words)
    write_page()


def write_entries(names: list[str]) -> None:
    import transformers
    from model_sweep import causal_types
    from ranks import RankPool

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    known = json.loads(FILE.read_text())["models"] if FILE.exists() and names else []
    entries = {entry["name"]: entry for entry in known}
    pool = RankPool(2)
    for name in names or causal_types():
        entries[name] = measure_entry(name, pool)
        print(json.dumps(entries[name]), flush=True)
    pool.close()
    counts = Counter((entry["kind"], entry["packed"] is True) for entry in entries.values())
    print({f"{kind}, {'exact' if packed else 'refused'}": count for (kind, packed), count in sorted(counts.items())})
    models = [entries[name] for name in sorted(entries)]
    lines = ",\n".join(json.dumps(entry) for entry in models)
    FILE.write_text(f'{{"transformers": "{transformers.__version__}", "models": [\n{lines}\n]}}\n')


def measure_entry(name: str, pool: Any) -> dict[str, Any]:
    import sweep_columns
    from families import FAMILIES
    from model_sweep import kind_of, measure

    kind = kind_of(name)
    entry: dict[str, Any] = {"name": name, "kind": kind}
    result = measure(name)
    assert result.verdict != "wrong", f"{name} passes the preflight and is not exact: {result.reason}"
    if result.verdict == "refused":
        reason = REASONS.get(kind) or short(name, result.reason)
        return entry | dict.fromkeys(("packed", "data_kit", "lora", "ulysses", "tensor", "export"), reason)
    entry |= {"packed": True, "data_kit": True}
    entry["lora"] = short(name, sweep_columns.lora(name))
    for column in ("ulysses", "tensor"):
        answer = sweep_columns.on_two_ranks(name, pool, **{column: 2})
        if result.padded_rows and column == "ulysses":
            assert answer is not True, name
            answer = NO_ULYSSES
        if isinstance(answer, str) and "its code fails" in answer:
            answer = NO_PLAN if column == "tensor" else answer
        entry[column] = short(name, answer)
    entry["export"] = short(name, sweep_columns.export(name))
    note = FAMILIES[name][0] if name in FAMILIES else ""
    note = PADDED if result.padded_rows else note
    return entry | ({"note": note} if note else {})


def short(name: str, reason: bool | str) -> bool | str:
    """A reason without the name of the type, so that types with the same one share it."""
    if isinstance(reason, bool):
        return reason
    reason = re.sub(rf"^{re.escape(name)} (cannot be trained on packed sequences: )?", "", reason)
    reason = re.sub(r"^parallel\.(\w+)=2", r"parallel.\1 > 1", reason)
    reason = re.sub(rf"^{re.escape(name)}: the forward on a row with \w+ fails: (parallel\.)", r"\1", reason)
    reason = re.sub(r"\b[\w-]+ has no tensor-parallel plan", "it has no tensor-parallel plan", reason)
    reason = re.sub(rf"\b({re.escape(name)}(?:_text)?|gpt2):? (has|runs|keeps)", r"it \2", reason)
    return reason.replace(f"{name}: log-probs", "log-probs")


def write_page() -> None:
    from mvp_engine.tools.models import read_models

    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + markdown_table(read_models()) + END + after)


def markdown_table(models: dict[str, dict[str, Any]]) -> str:
    """The table of docs/models.md: one row per type, with the reasons below it."""
    from mvp_engine.tools.models import COLUMNS, yes_or_no

    reasons: dict[str, int] = {}
    lines = [
        f"| model type | kind | {' | '.join(COLUMNS.values())} | |",
        "| --- " * (len(COLUMNS) + 3) + "|",
    ]
    for name, entry in models.items():
        answers = []
        for key in COLUMNS:
            answer = yes_or_no(entry[key])
            if isinstance(entry[key], str):
                answer += f" ({reasons.setdefault(entry[key], len(reasons) + 1)})"
            answers.append(answer)
        lines.append(f"| `{name}` | {entry['kind']} | {' | '.join(answers)} | {entry.get('note', '')} |")
    lines += ["", "Reasons:", ""]
    lines += [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
