"""The Hugging Face config that a model is built from: a folder's, a made-up one, or the first changed by the second."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from mvp_engine.errors import UserError


def read_config(path: str | Path | None, overrides: dict[str, Any]) -> Any:
    """A config object of transformers. Remote code is never run."""
    from transformers import CONFIG_MAPPING

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
            raise UserError(
                f"model.path={path} {what}; it must be a Hugging Face folder on this machine"
            )
        known = _folders_config(Path(path))
        settings = known.to_dict()
    _merge(
        known,
        settings,
        {key: value for key, value in overrides.items() if key != "model_type"},
        "model.config",
    )
    try:
        return type(known).from_dict(settings)
    except Exception as error:  # noqa: BLE001 - of whatever kind: it is the user who gave these settings
        raise UserError(f"model.config does not fit {known.model_type}: {error}") from None


def _folders_config(path: Path) -> Any:
    from transformers import AutoConfig

    try:
        known = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - of whatever kind: it is the file
        first = str(error).strip().split("\n")[0]
        raise UserError(
            f"{path / 'config.json'} cannot be read: {type(error).__name__}: {first}"
        ) from None
    if getattr(known, "quantization_config", None) is not None:
        raise UserError(
            f"model.path={path} holds quantised weights, which cannot be trained; take the original"
        )
    if getattr(known, "transformers_weights", None) is not None:
        raise UserError(
            f"model.path={path} names its weights itself (transformers_weights), which is not known here"
        )
    return known


def _merge(known: Any, settings: dict[str, Any], overrides: dict[str, Any], key: str) -> None:
    for name, value in overrides.items():
        if not _has(known, name):
            raise UserError(
                f"{key}.{name}: {known.model_type} has no such setting.{_hint(known, name, key)}"
            )
        if isinstance(value, dict) and name in known.sub_configs:
            _merge(getattr(known, name), settings.setdefault(name, {}), value, f"{key}.{name}")
        elif isinstance(value, dict) and isinstance(
            before := settings.get(name, getattr(known, name)), dict
        ):
            settings[name] = _over(before, value, f"{key}.{name}")
        else:
            settings[name] = value


def _over(before: dict[str, Any], value: dict[str, Any], key: str) -> dict[str, Any]:
    """Settings over those of a dict, such as a number of `rope_parameters`; some have a dict for each kind of layer."""
    parts = [name for name, part in before.items() if isinstance(part, dict)]
    for name in value:
        if parts and name not in before:
            raise UserError(
                f"{key}.{name}: there is one for each of {', '.join(parts)}; write {key}.{parts[0]}.{name}"
            )
    both = {**before, **value}
    return {
        name: _over(before[name], part, f"{key}.{name}")
        if name in parts and isinstance(part, dict)
        else part
        for name, part in both.items()
    }


def _has(config: Any, name: str) -> bool:
    try:
        return not name.startswith("_") and not callable(getattr(config, name))
    except AttributeError:
        return False
    except Exception:  # noqa: BLE001 - it is there, but asking for it is not wanted: layers may differ in it
        return True


def _hint(config: Any, name: str, key: str) -> str:
    for part in sorted(config.sub_configs, key=lambda part: "text" not in part):
        if (below := getattr(config, part, None)) is not None and _has(below, name):
            return f" Did you mean {key}.{part}.{name}?"
    for part, value in config.to_dict().items():
        if isinstance(value, dict) and name in value:
            return f" Did you mean {key}.{part}.{name}?"
    near = difflib.get_close_matches(name, list(config.to_dict()), 1)
    return f" Did you mean {near[0]}?" if near else ""
