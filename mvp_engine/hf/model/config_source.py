"""The transformers config that a model is built from: `model.path`, `model.config`, or both.

`model.path` names a folder with a config.json, or a model of the Hub, and `model.config` changes
single settings of it. Without a folder, `model.config.model_type` selects a config class with its defaults.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import json
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from mvp_engine import plugins
from mvp_engine.errors import UserError, did_you_mean, similar_path
from mvp_engine.hf.model.attention import config_tree
from mvp_engine.hf.weights.hub import model_folder

LOGGER = logging.getLogger("mvp_engine")
# Keys of multimodal rotary positions: transformers reads them, and warns of them in each config that declares none.
_MROPE_KEYS = {"mrope_section", "mrope_interleaved", "interleaved"}


def _is_no_false_alarm(record: logging.LogRecord) -> bool:
    unknown = set(re.findall(r"'(\w+)'", record.getMessage().rpartition(":")[2]))
    return not unknown or not unknown <= _MROPE_KEYS


logging.getLogger("transformers.modeling_rope_utils").addFilter(_is_no_false_alarm)


def read_config(path: str | Path | None, overrides: dict[str, Any]) -> Any:
    """A config object of transformers. Remote code is never executed."""
    _restore_types()
    settings: dict[str, Any] = {}
    if path is None:
        known = _default_config(str(overrides.get("model_type")))
    else:
        known = _config_of_folder(path)
        settings = known.to_dict()
    _complete(known)
    changes = {key: value for key, value in overrides.items() if key != "model_type"}
    undeclared = {k: changes.pop(k) for k in list(changes) if k in plugins.model_settings()}
    _merge(known, settings, changes, "model.config")
    settings |= undeclared
    try:
        config = type(known).from_dict(settings)
    except Exception as error:  # noqa: BLE001 - any error: the settings are the user's
        raise UserError(f"model.config does not fit {known.model_type}: {error}") from None
    _complete(config)
    return config


def _complete(config: Any) -> None:
    for folder_type in plugins.model_folders():
        folder_type.complete_config(config)


def _restore_types() -> None:
    """Give names back to transformers that the models of flash-linear-attention take where installed."""
    if "fla.models" not in sys.modules:
        return
    from transformers import CONFIG_MAPPING, AutoConfig, BitNetConfig, Mamba2Config, MambaConfig

    for config_class in (BitNetConfig, MambaConfig, Mamba2Config):
        if CONFIG_MAPPING[config_class.model_type] is not config_class:
            AutoConfig.register(config_class.model_type, config_class, exist_ok=True)


def _default_config(model_type: str) -> Any:
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        similar = difflib.get_close_matches(model_type, list(CONFIG_MAPPING), 3)
        hint = f". Similar names: {', '.join(similar)}" if similar else ""
        raise UserError(
            "without model.path, model.config needs a model_type of transformers, "
            f"not {model_type}{hint}"
        )
    return CONFIG_MAPPING[model_type]()


def _config_of_folder(path: str | Path) -> Any:
    from transformers import AutoConfig

    folder = model_folder(path)
    if not (folder / "config.json").is_file():
        raise UserError(f"model.path={path} {_no_config(folder)}")
    try:
        settings = json.loads((folder / "config.json").read_text())
        for folder_type in plugins.model_folders():
            config = folder_type.read_config(folder / "config.json", settings)
            if config is not None:
                return config
        known = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - any error: the file is the user's
        first_line = str(error).strip().split("\n")[0]
        raise UserError(
            f"{folder / 'config.json'} cannot be read: {type(error).__name__}: {first_line}"
        ) from None
    warn_of_custom_code(folder / "config.json")
    if getattr(known, "quantization_config", None) is not None:
        raise UserError(
            f"model.path={path} holds quantized weights, which cannot be trained; "
            "use the original checkpoint"
        )
    if getattr(known, "transformers_weights", None) is not None:
        raise UserError(
            f"model.path={path} sets transformers_weights (other names for weight files), "
            "which is not supported"
        )
    return known


@functools.cache  # one warning for each file
def warn_of_custom_code(file: Path) -> None:
    """Warn if a config of a folder names code of its own (`auto_map`), which is never run."""
    try:
        settings = json.loads(file.read_bytes())
    except (OSError, ValueError):  # no such file, or one that transformers has not read
        return
    if isinstance(settings, dict) and settings.get("auto_map"):
        LOGGER.warning(
            "%s names code of its own (auto_map), which is not run: transformers' own classes are used, "
            "and exports leave auto_map out",
            file,
        )


def _no_config(folder: Path) -> str:
    if folder.is_dir():
        return "has no config.json; it must be a Hugging Face folder, or a model of the Hub"
    return (
        f"is not a folder.{similar_path(folder)} It must be a Hugging Face folder, or a model of the Hub as org/name "
        "(hf://org/name, if org is a folder here)"
    )


def _merge(known: Any, settings: dict[str, Any], overrides: dict[str, Any], key: str) -> None:
    """Write `overrides` into `settings`; names that the config `known` lacks are user errors."""
    for name, value in overrides.items():
        if not _has_setting(known, name):
            raise UserError(
                f"{key}.{name}: {known.model_type} has no such setting.{_hint(known, name, key)}"
            )
        if not isinstance(value, dict):
            settings[name] = value
        elif name in known.sub_configs:
            sub_settings = settings.setdefault(name, {})
            _merge(getattr(known, name), sub_settings, value, f"{key}.{name}")
        else:
            before = settings.get(name, getattr(known, name))
            is_dict = isinstance(before, dict)
            settings[name] = _merge_dict(before, value, f"{key}.{name}") if is_dict else value


def _merge_dict(before: dict[str, Any], value: dict[str, Any], key: str) -> dict[str, Any]:
    """Merge into a dict such as `rope_parameters`, which may hold one dict per layer type."""
    layer_types = [name for name, part in before.items() if isinstance(part, dict)]
    merged = dict(before)
    for name, part in value.items():
        if layer_types and name not in before:
            raise UserError(
                f"{key}.{name}: this is set per layer type ({', '.join(layer_types)}); "
                f"write {key}.{layer_types[0]}.{name}"
            )
        both_dicts = name in layer_types and isinstance(part, dict)
        merged[name] = _merge_dict(before[name], part, f"{key}.{name}") if both_dicts else part
    return merged


def _has_setting(config: Any, name: str) -> bool:
    if name.startswith("_"):
        return False
    try:
        return not callable(getattr(config, name))
    except AttributeError:
        if any(_has_setting(part, name) for part in _sub_configs(config)):
            return False  # the code that reads it gets the sub-config
        return name in _optional_settings(type(config).__module__)
    except Exception:  # noqa: BLE001 - it exists, but reading it fails: it differs by layer
        return True


def _sub_configs(config: Any) -> list[Any]:
    found = [getattr(config, name, None) for name in config.sub_configs]
    return [part for part in found if part is not None]


@functools.cache
def _optional_settings(config_module: str) -> frozenset[str]:
    """Names that the model code of a config reads with `getattr(config, NAME, ...)`.

    The config class does not declare them, though folders may have them: `head_dim` of Qwen3-MoE.
    """
    package, _, name = config_module.rpartition(".")
    code = importlib.util.find_spec(f"{package}.{name.replace('configuration_', 'modeling_')}")
    if not package or code is None or code.origin is None:
        return frozenset()
    pattern = r"""getattr\(\s*[\w.]*config,\s*["'](\w+)["']"""
    return frozenset(re.findall(pattern, Path(code.origin).read_text()))


def _hint(config: Any, name: str, key: str) -> str:
    """Where the setting exists: in a sub-config (text first), a dict, or under a similar name."""
    for part in sorted(config.sub_configs, key=lambda part: "text" not in part):
        sub_config = getattr(config, part, None)
        if sub_config is not None and _has_setting(sub_config, name):
            return f" Did you mean {key}.{part}.{name}?"
    settings = config.to_dict()
    for part, value in settings.items():
        if isinstance(value, dict) and name in value:
            return f" Did you mean {key}.{part}.{name}?"
    return did_you_mean(name, settings)


def with_vocabulary(
    path: str | Path | None, overrides: dict[str, Any], num_rows: int
) -> dict[str, Any]:
    """The overrides of a config with at least so many rows in the embeddings of its text layers."""
    config = read_config(path, overrides)
    text = config.get_text_config()
    if text.vocab_size >= num_rows:
        return overrides
    changes: dict[str, Any] = {"vocab_size": num_rows}
    names = _path_to(config, text)
    if names is None:
        raise UserError(
            f"data.new_tokens: it is not known where {config.model_type} keeps the size of its vocabulary. Add the "
            "tokens to the model's folder yourself"
        )
    for name in reversed(names):
        changes = {name: changes}
    return _merge_deep(overrides, changes)


def _path_to(config: Any, part: Any) -> list[str] | None:
    """The names of the sub-configs from a config to one inside of it."""
    if config is part:
        return []
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        below = None if inner is None else _path_to(inner, part)
        if below is not None:
            return [name, *below]
    return None


def _merge_deep(before: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(before)
    for name, value in changes.items():
        is_dict = isinstance(value, dict)
        merged[name] = _merge_deep(merged.get(name) or {}, value) if is_dict else value
    return merged


# Facts about a model that follow from its transformers config alone.


def num_heads(config: Any) -> tuple[int, int]:
    """Numbers of query heads and of key/value heads of a text config; minima if layers differ.

    Both are 0 for a model without attention (Mamba, RWKV).
    """
    layers = [config]
    per_layer = getattr(config, "per_layer_config", None)
    if per_layer is not None:
        layers = [per_layer[index] for index in range(config.num_hidden_layers)]
    layers = [layer for layer in layers if getattr(layer, "num_attention_heads", None)]
    query_heads = [layer.num_attention_heads for layer in layers]
    kv_heads = [
        getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads for layer in layers
    ]
    return min(query_heads, default=0), min(kv_heads, default=0)


def placeholder_tokens(config: Any, vocab_size: int) -> list[int]:
    """Tokens that a model replaces by features of its encoders; without media they have no meaning.

    With them those around a video, where a config names them: to GLM and ERNIE all images between them are frames.
    """
    names = ["video_start_token_id", "video_end_token_id"]
    for kind in ("image", "video", "audio"):
        names += [f"{kind}_token_id", f"{kind}_token_index"]
    found: set[int] = set()
    for part in config_tree(config):
        for name in names:
            token = getattr(part, name, None)
            if isinstance(token, int) and 0 <= token < vocab_size:
                found.add(token)
    return sorted(found)


def packed_length_limit(config: Any) -> int | None:
    """The sequence length up to which rotary frequencies are constant; None without such a limit.

    `longrope` and `dynamic` scaling switch frequencies for a whole batch when its longest
    sequence passes this length, so a longer sequence would change the others of its pack.
    """
    limits = []
    for part in config_tree(config):
        for rope in _rope_settings(part):
            if rope.get("rope_type") in ("longrope", "dynamic"):
                limits.append(_original_length(rope, part))
    return min(limits, default=None)


def _rope_settings(config: Any) -> list[dict[str, Any]]:
    """`rope_parameters` of a text config, and those of its layer types where they differ."""
    rope_parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in rope_parameters.values() if isinstance(value, dict)]
    return [rope_parameters, *by_layer_type]


def _original_length(rope: dict[str, Any], config: Any) -> int:
    length = rope.get("original_max_position_embeddings")
    length = length or getattr(config, "original_max_position_embeddings", None)
    return int(length or config.max_position_embeddings)


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The declaration of a tool for chat templates, from the type hints and the docstring of its function.

    Of a method the argument `self` is no part of it.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        if next(iter(inspect.signature(function).parameters), None) == "self":
            function = MethodType(function, object())
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # noqa: BLE001 - several of its own, which are not public
        name = getattr(function, "__name__", function)
        raise UserError(
            f"tool {name}: {error} A tool needs a type hint for each argument, and a docstring with a line about it "
            'and a section "Args:" with a line "NAME: TEXT" for each argument'
        ) from None
    return schema


def declare_interleaved_mrope(config: Any, model: Any) -> None:
    """Write `mrope_interleaved` into `config` where the code of `model` interleaves the axes of positions.

    transformers ignores the key: a model type always interleaves them or never does. vLLM reads it and takes a config
    without it as not interleaved, so its log-probs of images would differ. Asking the code, not the type, is right
    for new types too: some config classes whose code interleaves do not know the key.
    """
    interleaved = {type(module.config) for module in model.modules() if _interleaves(module)}
    for part in config_tree(config):
        if type(part) in interleaved:
            for rope in _rope_settings(part):
                if "mrope_section" in rope:
                    rope["mrope_interleaved"] = True


def _interleaves(module: nn.Module) -> bool:
    """Whether frequency i of a rotary embedding turns with axis i % 3, up to the section of each axis."""
    sections = getattr(module, "mrope_section", None)
    if not sections or not hasattr(module, "recomposition_frequencies"):
        return False
    layer_type = next(iter(sections)) if isinstance(sections, dict) else None
    section = sections if layer_type is None else sections[layer_type]
    # Built again, since that of an export is on the meta device. Token i has position 1 on axis i, 0 on the others.
    rotary: Any = type(module)(module.config)
    if len(getattr(rotary, f"{layer_type}_inv_freq" if layer_type else "inv_freq")) != sum(section):
        return False  # it raises when it is called
    positions = torch.eye(len(section))[:, None]
    _, sin = rotary(torch.zeros(1), positions, *([layer_type] if layer_type else []))
    axes = sin[0, :, : sin.shape[-1] // 2].ne(0).long().argmax(0)
    expected = torch.zeros_like(axes)
    for axis, length in enumerate(section):
        expected[axis : 3 * length : 3] = axis
    return torch.equal(axes, expected)
