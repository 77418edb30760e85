"""Writes `mvp_engine/tools/models_media.json`: models with encoders, for `mvp doctor --models` and docs/models.md.

    python scripts/media_matrix.py             # sweep all types (about twelve minutes on two cores)
    python scripts/media_matrix.py qwen3_5     # only these; others keep their entries

Types that need a package besides those of this project (timm, torchaudio, librosa) keep their entries where it is
missing. The sweep itself is tests/kit/vlm_sweep.py, its columns are in tests/kit/vlm_columns.py;
talkers and whole folders of Omni models are in tests/kit/speech/speech_sweep.py.
`python scripts/model_matrix.py --page` then writes the page.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("", "kit", "kit/speech", "hf")
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in TESTS), str(ROOT / "scripts")]

FILE = ROOT / "mvp_engine" / "tools" / "models_media.json"


def main(names: list[str]) -> None:
    import transformers
    from ranks import RankPool
    from vlm_sweep import types
    from vlm_tiny import special_of

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    before = {entry["name"]: entry for entry in json.loads(FILE.read_text())["models"]}
    entries = dict(before) if names else {}
    pool = RankPool(2)
    for name in names or [*types(), "csm"]:
        needs = special_of(name).needs
        if name in before and needs and find_spec(needs) is None:
            entries[name] = before[name]  # cannot be tried here
            continue
        entries[name] = measure_csm(pool) if name == "csm" else measure_entry(name, pool)
        print(json.dumps(entries[name]), flush=True)
    pool.close()
    counts = Counter((entry["kind"], entry["data_kit"] is True) for entry in entries.values())
    print({f"{kind}, {'exact' if exact else 'refused'}": count for (kind, exact), count in sorted(counts.items())})
    lines = ",\n".join(json.dumps(entries[name]) for name in sorted(entries))
    FILE.write_text(f'{{"transformers": "{transformers.__version__}", "models": [\n{lines}\n]}}\n')


def measure_entry(name: str, pool: Any) -> dict[str, Any]:
    from model_matrix import NO_PLAN, short
    from vlm_columns import columns
    from vlm_sweep import try_type
    from vlm_tiny import special_of

    trial = try_type(name)
    assert trial.outcome in ("exact", "refused"), f"{name} is neither exact nor refused: {trial}"
    entry: dict[str, Any] = {"name": name, "kind": kind_of(name)}
    if trial.rows is None:
        reason = short(name, " ".join(trial.reason.split()))
        entry |= dict.fromkeys(("packed", "data_kit", "lora", "ulysses", "tensor", "export"), reason)
        return entry | ({"note": "actions: trains with model.type=action_model"} if name == "pi0" else {})
    needs = special_of(name).needs
    note = f"{trial.kinds}; needs {needs}" if needs else trial.kinds
    found = columns(name, trial.rows, pool)
    if "code fails" in str(found["tensor"]):
        found["tensor"] = NO_PLAN
    found = {column: short(name, answer) for column, answer in found.items()}
    entry |= {"packed": True, "data_kit": True, **found, "note": note}
    return with_speech(entry) if name in ("qwen2_5_omni", "qwen3_omni_moe") else entry


def with_speech(entry: dict[str, Any]) -> dict[str, Any]:
    """Of a whole Omni folder: the export, and whether its talker trains."""
    from model_matrix import short
    from speech_sweep import export, talker

    name = entry["name"]
    trains = talker(name) is True
    about = "the talker trains with model.type=omni_model" if trains else "its talker cannot be trained"
    return entry | {"export": short(name, export(name)), "note": f"{entry['note']}; {about}"}


def measure_csm(pool: Any) -> dict[str, Any]:
    """CSM is no language model: what it does with spoken rows."""
    from model_matrix import short
    from speech_sweep import data_kit, export, lora, on_two_ranks, talker

    found = {"packed": talker("csm"), "data_kit": data_kit("csm"), "lora": lora("csm")}
    found |= {column: on_two_ranks("csm", pool, **{column: 2}) for column in ("ulysses", "tensor")}
    found["export"] = export("csm")
    tried = {column: short("csm", answer) for column, answer in found.items()}
    return {"name": "csm", "kind": "text-speech", **tried, "note": "speech out, model.type=omni_model"}


def kind_of(name: str) -> str:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    config_class = CONFIG_MAPPING[name]
    if getattr(config_class, "is_encoder_decoder", False) is True:
        return "encoder-decoder"
    return "image-text" if name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES else "audio-text"


if __name__ == "__main__":
    main(sys.argv[1:])
