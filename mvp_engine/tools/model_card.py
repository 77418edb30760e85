"""The model card of a run for the Hub: what was trained on what, how, with which results, and how to use it.

It has no paths of this machine: data that is not of the Hub is named by its source alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from mvp_engine.checkpoint.state import HF
from mvp_engine.hf.weights.hub import ADAPTER_CONFIG, SCHEME, hub_model
from mvp_engine.hf.weights.hub_datasets import hub_dataset
from mvp_engine.report.facts import training_facts, writes_text
from mvp_engine.runs import Run, best_checkpoint, checkpoint_step, flat_keys
from mvp_engine.tools.merge import model_checkpoint

# The config keys of the table, in its order. Keys that a run does not have are left out.
SHOWN_KEYS = [
    "optim.lr", "optim.lr_by_part", "optim.schedule", "optim.warmup_steps", "optim.warmup_ratio",
    "optim.weight_decay", "loop.epochs", "loop.total_steps", "loop.precision", "data.global_batch_size",
    "mllm.micro_batch_tokens", "mllm.global_batch_tokens", "lora.rank", "lora.alpha",
    "lora.targets", "model.freeze", "seed",
]  # fmt: skip
SNIPPET = """\
```python
from transformers import AutoProcessor, {model_class}

processor = AutoProcessor.from_pretrained("{name}")
model = {model_class}.from_pretrained("{name}", device_map="auto")
```
"""
ADAPTER_SNIPPET = """\
```python
from peft import PeftModel
from transformers import {model_class}

model = PeftModel.from_pretrained({model_class}.from_pretrained("{base}"), "{name}")
```
"""


def model_card(run: Run, folder: Path, name: str, *, license: str | None = None) -> str:
    """The README.md of the repository `name` with the files of `folder`."""
    file = run.dir / "config.yaml"
    config: dict[str, Any] = yaml.safe_load(file.read_text()) if file.is_file() else {}
    base = base_model(config)
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    metadata = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": None if is_adapter else _pipeline_tag(folder),
        "license": license,
        "base_model": base,
        "base_model_relation": ("adapter" if is_adapter else "finetune") if base else None,
        "datasets": _hub_datasets(config) or None,
        "tags": ["mvp-engine", *(["lora"] if config.get("lora") else [])],
    }
    chat = f"Or, in a terminal: `mvp chat {name}`\n" if writes_text(run) else ""
    kept = {key: value for key, value in metadata.items() if value is not None}
    parts = [
        f"---\n{yaml.safe_dump(kept, sort_keys=False)}---\n",
        f"# {name.rpartition('/')[2]}\n",
        _summary(run, config, base, is_adapter),
        f"## Use\n\n{_snippet(run, folder, name, base)}\n{chat}",
        _results(run),
        f"## Data\n\n{_sources(config)}",
        f"## Training\n\n{_settings(run, config)}",
    ]
    own = folder / "README.md"  # of a model with heads that transformers has no class for
    if own.is_file():
        parts.append(own.read_text())
    return "\n".join(part for part in parts if part)


def base_model(config: dict[str, Any]) -> str | None:
    """The model of the Hub that the training started from."""
    repo = hub_model((config.get("model") or {}).get("path"))
    return repo.name if repo else None


def _summary(run: Run, config: dict[str, Any], base: str | None, is_adapter: bool) -> str:
    model = config.get("model") or {}
    origin = f"[{base}](https://huggingface.co/{base})" if base else "a local model"
    if base and "@" in model["path"]:
        origin += f" (commit `{model['path'].partition('@')[2][:12]}`)"
    if model.get("path") is None:
        origin = "random weights"
    how = "fine-tuning of all weights"
    if config.get("lora"):
        how = "LoRA, as an adapter" if is_adapter else "LoRA, merged"
    if method := training_facts(run).get("method"):
        how = method.format(how=how)
    return f"Trained from {origin} by {how}, with MVP Engine (run `{run.id}`).\n"


def _snippet(run: Run, folder: Path, name: str, base: str | None) -> str:
    if (folder / ADAPTER_CONFIG).is_file():
        model_class = _model_class(model_checkpoint(run.dir) / HF)
        return ADAPTER_SNIPPET.format(model_class=model_class, name=name, base=base or "BASE_MODEL")
    return SNIPPET.format(model_class=_model_class(folder), name=name)


def _model_class(folder: Path) -> str:
    classes: list[str] = _config(folder).get("architectures") or ["AutoModel"]
    return classes[0]


def _pipeline_tag(folder: Path) -> str:
    config = _config(folder)
    if str((config.get("architectures") or [""])[0]).endswith("ForSequenceClassification"):
        return "text-classification"
    if "thinker_config" in config:
        return "any-to-any"
    if "vision_config" in config:
        return "image-text-to-text"
    return "audio-text-to-text" if "audio_config" in config else "text-generation"


def _config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def _results(run: Run) -> str:
    """The evaluation of the model, else the last one, and the last training loss, or what stands for it."""
    values: dict[str, float] = {}
    used = best_checkpoint(run.checkpoints)
    for split in ("train", "eval"):
        records = list(run.records(split))
        if split == "eval" and used is not None:
            of_step = [one for one in records if one["step"] == checkpoint_step(used)]
            records = of_step or records
        last = records[-1] if records else {}
        shown = training_facts(run).get("headline", "loss")
        for key, value in last.items():
            if isinstance(value, float) and (split == "eval" or key == shown):
                values[f"{'held-out' if split == 'eval' else 'training'} {key}"] = value
    rows = [f"| {key} | {value:.4g} |" for key, value in values.items()]
    return _table("## Results", "metric", "value", rows) if rows else ""


def _settings(run: Run, config: dict[str, Any]) -> str:
    """Config keys, and the versions of the last launch, which need not be those that are installed here."""
    flat = flat_keys(config)
    if keys := training_facts(run).get("keys", []):
        flat.pop("data.global_batch_size", None)  # the kind of training has keys of its own for it
    flat = {key: flat.get(key) for key in [*SHOWN_KEYS, *keys]}
    shown = {key: value for key, value in flat.items() if value not in (None, [], {}, "")}
    rows = [f"| `{key}` | {value} |" for key, value in shown.items()]
    versions = run.info.get("setup", {}).get("versions", {})
    rows += [f"| {package} | {version} |" for package, version in versions.items()]
    return _table("", "setting", "value", rows)


def _table(title: str, left: str, right: str, rows: list[str]) -> str:
    head = f"{title}\n\n" if title else ""
    return "\n".join([f"{head}| {left} | {right} |", "| --- | --- |", *rows]) + "\n"


def _source_list(config: dict[str, Any]) -> list[dict[str, Any]]:
    sources = (config.get("mllm") or {}).get("sources") or []
    return [source for source in sources if isinstance(source, dict)]


def _paths(source: dict[str, Any]) -> list[str]:
    path = source.get("path") or []
    return [path] if isinstance(path, str) else path


def _hub_datasets(config: dict[str, Any]) -> list[str]:
    paths = [path for source in _source_list(config) for path in _paths(source)]
    names = [hub_dataset(path).repo.name for path in paths if path.startswith(SCHEME)]
    return list(dict.fromkeys(names))


def _sources(config: dict[str, Any]) -> str:
    lines = []
    for source in _source_list(config):
        hub_paths = [path for path in _paths(source) if path.startswith(SCHEME)]
        where = ", ".join(f"`{path}`" for path in hub_paths) or "local rows"
        role = "training" if source.get("split", "train") == "train" else "held-out"
        lines.append(f"- {source.get('name') or 'rows'} ({role}): {where}")
    return "\n".join(lines or ["Not recorded."]) + "\n"
