"""Writes `mvp_engine/tools/models_media.json`: models with encoders, for `mvp models` and docs/models.md.

    python scripts/media_matrix.py             # sweep all types (about five minutes on one core)
    python scripts/media_matrix.py qwen3_5     # only these; others keep their entries

The sweep itself is tests/kit/vlm_sweep.py. `python scripts/model_matrix.py --page` then writes the page.
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
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("", "kit", "hf")), str(ROOT / "scripts")]

FILE = ROOT / "mvp_engine" / "tools" / "models_media.json"
UNTRIED = None  # with media; the engine compares packed rows at start, and refuses what differs


def main(names: list[str]) -> None:
    import transformers
    from vlm_sweep import types

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    known = json.loads(FILE.read_text())["models"] if FILE.exists() and names else []
    entries = {entry["name"]: entry for entry in known}
    for name in names or types():
        entries[name] = measure_entry(name)
        print(json.dumps(entries[name]), flush=True)
    counts = Counter((entry["kind"], entry["data_kit"] is True) for entry in entries.values())
    print({f"{kind}, {'exact' if exact else 'refused'}": count for (kind, exact), count in sorted(counts.items())})
    lines = ",\n".join(json.dumps(entries[name]) for name in sorted(entries))
    FILE.write_text(f'{{"transformers": "{transformers.__version__}", "models": [\n{lines}\n]}}\n')


def measure_entry(name: str) -> dict[str, Any]:
    from model_matrix import short
    from vlm_sweep import lora, try_type

    trial = try_type(name)
    assert trial.outcome in ("exact", "refused", "no tiny model"), f"{name} is neither exact nor refused: {trial}"
    entry: dict[str, Any] = {"name": name, "kind": kind_of(name)}
    if trial.outcome != "exact":
        reason = short(name, " ".join(trial.reason.split()))
        reason = re.sub(
            r"\s*\([\w.]+:\d+[^)]*\)$|:\s*$", "", re.sub(r"\b\w+(?:Error|Iteration|Exception): ?", "", reason)
        )
        if trial.outcome == "no tiny model":
            reason = f"not tried, for want of a tiny model: {reason}"
        return entry | dict.fromkeys(("packed", "data_kit", "lora", "ulysses", "tensor", "export"), reason)
    entry |= {"packed": True, "data_kit": True, "lora": short(name, lora(name))}
    return entry | {"ulysses": UNTRIED, "tensor": UNTRIED, "export": UNTRIED, "note": trial.kinds}


def kind_of(name: str) -> str:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    config_class = CONFIG_MAPPING[name]
    if getattr(config_class, "is_encoder_decoder", False) is True:
        return "encoder-decoder"
    return "image-text" if name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES else "audio-text"


if __name__ == "__main__":
    main(sys.argv[1:])
