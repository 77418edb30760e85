"""Writes `mvp_engine/tools/models_media.json`: models with encoders, for `mvp models` and docs/models.md.

    python scripts/media_matrix.py             # sweep all types (about five minutes on one core)
    python scripts/media_matrix.py qwen3_5     # only these; others keep their entries

The sweep itself is tests/kit/vlm_sweep.py; talkers and whole folders of Omni models are in
tests/hf/speech_sweep.py. `python scripts/model_matrix.py --page` then writes the page.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("", "kit", "hf")), str(ROOT / "scripts")]

FILE = ROOT / "mvp_engine" / "tools" / "models_media.json"
UNTRIED = None  # with media; the engine compares packed rows at start, and refuses what differs


def main(names: list[str]) -> None:
    import transformers
    from vlm_sweep import types
    from vlm_tiny import special_of

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    before = {entry["name"]: entry for entry in json.loads(FILE.read_text())["models"]}
    entries = dict(before) if names else {}
    for name in names or [*types(), "csm"]:
        needs = special_of(name).needs
        if name in before and needs and find_spec(needs) is None:
            entries[name] = before[name]  # cannot be tried here
            continue
        entries[name] = measure_csm() if name == "csm" else measure_entry(name)
        print(json.dumps(entries[name]), flush=True)
    counts = Counter((entry["kind"], entry["data_kit"] is True) for entry in entries.values())
    print({f"{kind}, {'exact' if exact else 'refused'}": count for (kind, exact), count in sorted(counts.items())})
    lines = ",\n".join(json.dumps(entries[name]) for name in sorted(entries))
    FILE.write_text(f'{{"transformers": "{transformers.__version__}", "models": [\n{lines}\n]}}\n')


def measure_entry(name: str) -> dict[str, Any]:
    from model_matrix import short
    from vlm_sweep import lora, try_type
    from vlm_tiny import special_of

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
        entry |= dict.fromkeys(("packed", "data_kit", "lora", "ulysses", "tensor", "export"), reason)
        return entry | ({"note": "actions: trains with model.type=action_model"} if name == "pi0" else {})
    entry |= {"packed": True, "data_kit": True, "lora": short(name, lora(name))}
    needs = special_of(name).needs
    note = f"{trial.kinds}; needs {needs}" if needs else trial.kinds
    entry |= {"ulysses": UNTRIED, "tensor": UNTRIED, "export": UNTRIED, "note": note}
    return with_speech(entry) if name in ("qwen2_5_omni", "qwen3_omni_moe") else entry


def with_speech(entry: dict[str, Any]) -> dict[str, Any]:
    """Of a whole Omni folder: the export, and whether its talker trains."""
    from model_matrix import short
    from speech_sweep import export, talker

    name = entry["name"]
    trains = talker(name) is True
    about = "the talker trains with model.type=omni_model" if trains else "its talker cannot be trained"
    return entry | {"export": short(name, export(name)), "note": f"{entry['note']}; {about}"}


def measure_csm() -> dict[str, Any]:
    """CSM is no language model: what it does with spoken rows."""
    from model_matrix import short
    from speech_sweep import data_kit, export, lora, talker

    found = {"packed": talker, "data_kit": data_kit, "lora": lora, "export": export}
    tried = {column: short("csm", check("csm")) for column, check in found.items()}
    untried = dict.fromkeys(("ulysses", "tensor"), UNTRIED)
    entry = {"name": "csm", "kind": "text-speech", **untried, **tried, "note": "speech out, model.type=omni_model"}
    order = ("name", "kind", "packed", "data_kit", "lora", "ulysses", "tensor", "export", "note")
    return {column: entry[column] for column in order}


def kind_of(name: str) -> str:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    config_class = CONFIG_MAPPING[name]
    if getattr(config_class, "is_encoder_decoder", False) is True:
        return "encoder-decoder"
    return "image-text" if name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES else "audio-text"


if __name__ == "__main__":
    main(sys.argv[1:])
