"""The Hugging Face config that a model is built from: a folder's, a made-up one, or the first changed by the second."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from mvp_engine.errors import UserError


def read_config(path: str | Path | None, overrides: dict[str, Any]) -> Any:
    """A config object of transformers. Remote code is never run."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if path is None:
        model_type = str(overrides.get("model_type"))
        if model_type not in CONFIG_MAPPING:
            near = difflib.get_close_matches(model_type, list(CONFIG_MAPPING), 3)
            hint = f"; near it are {', '.join(near)}" if near else ""
            raise UserError(
                f"without model.path, model.config needs a model_type of transformers, not {model_type}{hint}"
            )
        known, settings = CONFIG_MAPPING[model_type](), {}
    else:
        if not (Path(path) / "config.json").is_file():
            what = "has no config.json" if Path(path).is_dir() else "is no folder"
            raise UserError(f"model.path={path} {what}; it must be a Hugging Face folder on this machine")
        known = AutoConfig.from_pretrained(str(path))
        if getattr(known, "quantization_config", None) is not None:
            raise UserError(f"model.path={path} holds quantised weights, which cannot be trained; take the original")
        settings = known.to_dict()
    _merge(known, settings, {key: value for key, value in overrides.items() if key != "model_type"}, "model.config")
    try:
        return type(known).from_dict(settings)
    except Exception as error:  # noqa: BLE001 - of whatever kind: it is the user who gave these settings
        raise UserError(f"model.config does not fit {known.model_type}: {error}") from None


def _merge(known: Any, settings: dict[str, Any], overrides: dict[str, Any], key: str) -> None:
    for name, value in overrides.items():
        if not hasattr(known, name):
            near = difflib.get_close_matches(name, list(known.to_dict()), 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise UserError(f"{key}.{name}: {known.model_type} has no such setting.{hint}")
        part = getattr(known, name)
        if isinstance(value, dict) and hasattr(part, "to_dict"):
            _merge(part, settings.setdefault(name, {}), value, f"{key}.{name}")
        else:
            settings[name] = value
