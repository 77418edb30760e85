"""`mvp doctor --models`: every model type of transformers, what it supports here, and the reason for each "no".

The data are files next to this one, made by scripts from sweeps over tiny random models: `models_text.json`
(`scripts/model_matrix.py`) and `models_media.json` (models with encoders for images, video or audio). Each holds

    {"transformers": "5.22.2",    # the version that the sweep ran with
     "models": [{"name": "llama",       # the model type
                 "kind": "text",        # text, image-text, audio-text, encoder or encoder-decoder
                 "packed": true,        # log-probs and gradients, packed, equal those of transformers alone
                 "data_kit": true,      # rows of the data kit through the model's own tokenizer or processor
                 "lora": true, "ulysses": true, "tensor": true, "export": true,
                 "note": "GQA"}, ...]}  # optional: what is special about it

A column is `true`, or a string: the reason why it is not supported. For text types the data kit follows from `packed`:
it reads rows with a tokenizer, whatever the type. This module imports neither torch nor transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mvp_engine.errors import UserError, did_you_mean

COLUMNS = {"packed": "packed", "data_kit": "data kit", "lora": "LoRA", "ulysses": "Ulysses"}
COLUMNS |= {"tensor": "tensor parallel", "export": "export"}
KINDS = ("text", "image-text", "audio-text", "text-speech", "encoder", "encoder-decoder")


def read_models(folder: Path = Path(__file__).parent) -> dict[str, dict[str, Any]]:
    """The entries of all files, by model type."""
    entries: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("models_*.json"), reverse=True):
        for entry in json.loads(file.read_text())["models"]:
            entries.setdefault(entry["name"], entry)
    return dict(sorted(entries.items()))


def print_models(name: str | None, *, as_json: bool) -> None:
    models = read_models()
    if name is not None:
        models = {name: _entry(models, name)}
    if as_json:
        print(json.dumps(list(models.values()), indent=2))
    elif name is not None:
        print(_description(models[name]))
    else:
        print(table(models))


def _entry(models: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    known = {key.lower().replace("-", "_"): entry for key, entry in models.items()}
    if entry := known.get(name.lower().replace("-", "_")):
        return entry
    raise UserError(
        f"no model type {name!r} among the {len(models)} that were tried (config.json of a model names its type as "
        f"model_type).{did_you_mean(name, models)} A newer type may still work: mvp check tries it with its config"
    )


def _description(entry: dict[str, Any]) -> str:
    lines = [f"{entry['name']} ({entry['kind']})"]
    reasons = {entry[key] for key in COLUMNS}
    if len(reasons) == 1 and isinstance(entry["packed"], str):
        lines.append(f"  not supported: {entry['packed']}")
    else:
        for key, title in COLUMNS.items():
            reason = f": {entry[key]}" if isinstance(entry[key], str) else ""
            lines.append(f"  {title:<16} {yes_or_no(entry[key])}{reason}")
    if entry.get("note"):
        lines.append(f"  {entry['note']}")
    return "\n".join(lines)


def table(models: dict[str, dict[str, Any]]) -> str:
    """One line per type, and the counts. The reasons are in `mvp doctor --models NAME`."""
    width = max(len(name) for name in models)
    lines = [f"{'model type':<{width}}  {'kind':<15}  {'  '.join(COLUMNS.values())}"]
    for name, entry in models.items():
        answers = [yes_or_no(entry[key]).ljust(len(title)) for key, title in COLUMNS.items()]
        lines.append(f"{name:<{width}}  {entry['kind']:<15}  {'  '.join(answers).rstrip()}")
    packed = sum(entry["packed"] is True for entry in models.values())
    lines.append(
        f"{packed} of {len(models)} types train packed and exact. mvp doctor --models NAME prints reasons."
    )
    return "\n".join(lines)


def yes_or_no(value: bool | str) -> str:
    return "yes" if value is True else "no"
