"""`mvp export --push`: upload the model of a run to the Hugging Face Hub, with a model card that is made from the run.

The card has no paths of this machine: data that is not of the Hub is named by its source alone.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from mvp_engine.checkpoint.state import HF
from mvp_engine.errors import UserError
from mvp_engine.hf.weights.hub import (
    ADAPTER_CONFIG,
    SCHEME,
    HubRepo,
    hub_dataset,
    hub_errors,
    hub_model,
)
from mvp_engine.hf.weights.merge import merge
from mvp_engine.report.facts import training_facts, writes_text
from mvp_engine.runs import Run, best_checkpoint, checkpoint_step, flat_keys, trained_run
from mvp_engine.tools.chat import model_folders
from mvp_engine.tools.merge import build_model, model_checkpoint

CARD = "README.md"


def push(
    target: str,
    name: str,
    *,
    root: str,
    public: bool,
    adapter: bool,
    license: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Upload a run's newest export, or its newest checkpoint as a Hugging Face folder, to the repository `name`."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UserError(f"{name} is not the name of a repository: write org/name or user/name")
    run = trained_run(target, Path(root))
    base = base_model(run.config)
    if adapter and base is None:
        raise UserError(
            f"{run.id} started from a local folder, which others cannot load with the adapter: push the merged model "
            "(without --adapter)"
        )
    if not dry_run:
        _create(name, public)  # before the merge: an error of the account comes at once
    with _folder(run, adapter) as folder:
        card = model_card(run, folder, name, license=license or _license(base))
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        sizes = {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
        sizes[CARD] = len(card.encode())
        url = None if dry_run else _upload(name, folder, list(sizes), card, run)
    if as_json:
        facts = {"repository": name, "public": public, "url": url, "files": sizes, "card": card}
        print(json.dumps({**facts, "chats": writes_text(run)}, indent=2))
    elif url:
        talk = f" Talk to it: mvp chat {name}" if writes_text(run) else ""
        print(f"{url}: {len(sizes)} files, {sum(sizes.values()) / 1e6:,.1f} MB.{talk}")
    else:
        print(f"would upload to {name} ({'public' if public else 'private'}):\n")
        for file, size in sizes.items():
            print(f"  {size / 1e6:10,.2f} MB  {file}")
        print(f"\n{card}")


@contextmanager
def _folder(run: Run, adapter: bool) -> Iterator[Path]:
    if not adapter:
        with model_folders(str(run.dir), run.dir.parent) as (folder, _):
            yield folder
        return
    with tempfile.TemporaryDirectory(prefix="mvp_push_") as temporary:
        checkpoint = model_checkpoint(run.dir)
        folder = Path(temporary) / "adapter"
        merge(checkpoint, build_model(checkpoint), folder, adapter_only=True)
        yield folder


def _create(name: str, public: bool) -> None:
    """Create the repository, or check that it may be written to as it is."""
    from huggingface_hub import HfApi

    api = HfApi()
    with _upload_errors(name):
        api.create_repo(name, private=not public, exist_ok=True)
        if not public and api.repo_info(name).private is False:
            raise UserError(
                f"{name} exists on the Hub and is public: add --public, or choose another name"
            )


def _upload(name: str, folder: Path, files: list[str], card: str, run: Run) -> str:
    """Upload all files in one commit; returns the address of the repository."""
    from huggingface_hub import CommitOperationAdd, HfApi, constants

    contents: list[Any] = []
    for file in files:
        content = card.encode() if file == CARD else str(folder / file)
        contents.append(CommitOperationAdd(file, content))
    with _upload_errors(name):
        HfApi().create_commit(
            name, contents, commit_message=f"Upload {run.id} with mvp export --push"
        )
    return f"{constants.ENDPOINT}/{name}"


@contextmanager
def _upload_errors(name: str) -> Iterator[None]:
    errors: Any = importlib.import_module("huggingface_hub.errors")
    with hub_errors(HubRepo(name)):
        try:
            yield
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            if status not in (401, 403):
                raise
            raise UserError(
                f"{name}: the Hub refuses to write ({status}): run `hf auth login` with a token that may write to "
                f"{name.partition('/')[0]}, or set HF_TOKEN"
            ) from None
        except (errors.OfflineModeIsEnabled, errors.HTTPError) as error:
            raise UserError(
                f"{name}: nothing was uploaded, since the Hub cannot be reached ({error})"
            ) from None


def _license(base: str | None) -> str | None:
    """The license of the model that the training started from, which the trained one inherits."""
    from huggingface_hub import HfApi

    errors: Any = importlib.import_module("huggingface_hub.errors")
    with contextlib.suppress(errors.HTTPError, errors.OfflineModeIsEnabled):
        card = HfApi().model_info(base).card_data if base else None
        return card.license if card else None
    return None


# ---- The model card: the data, the settings and the results of the training, and how to use the model -------------

# The config keys of the table, in its order. Keys that a run does not have are left out.
SHOWN_KEYS = [
    "optim.lr", "optim.lr_by_part", "optim.schedule", "optim.warmup",
    "optim.weight_decay", "train.epochs", "train.max_steps", "train.precision", "data.global_batch_size",
    "data.pack_tokens", "data.global_batch_tokens", "lora.rank", "lora.alpha",
    "lora.target_modules", "model.freeze", "seed",
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
    config = run.config
    sources = _sources(config)
    base = base_model(config)
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    datasets = [hub_dataset(path).name for source in sources for path in _hub_paths(source)]
    metadata = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": None if is_adapter else _pipeline_tag(_model_config(folder)),
        "license": license,
        "base_model": base,
        "base_model_relation": ("adapter" if is_adapter else "finetune") if base else None,
        "datasets": list(dict.fromkeys(datasets)) or None,
        "tags": ["mvp-engine", *(["lora"] if config.get("lora") else [])],
    }
    metadata = {key: value for key, value in metadata.items() if value is not None}
    described = model_checkpoint(run.dir) / HF if is_adapter else folder
    snippet = (ADAPTER_SNIPPET if is_adapter else SNIPPET).format(
        model_class=(_model_config(described).get("architectures") or ["AutoModel"])[0],
        name=name,
        base=base or "BASE_MODEL",
    )
    chat = f"Or, in a terminal: `mvp chat {name}`\n" if writes_text(run) else ""
    rows = "\n".join(map(_source_line, sources)) or "Not recorded."
    parts = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n",
        f"# {name.rpartition('/')[2]}\n",
        _summary(run, config, base, is_adapter),
        f"## Use\n\n{snippet}\n{chat}",
        _table("## Results", "metric", "value", results) if (results := _results(run)) else "",
        f"## Data\n\n{rows}\n",
        _table("## Training", "setting", "value", _settings(run, config)),
    ]
    of_export = folder / CARD  # of a model with heads that transformers has no class for
    if of_export.is_file():
        parts.append(of_export.read_text())
    return "\n".join(filter(None, parts))


def base_model(config: dict[str, Any]) -> str | None:
    """The model of the Hub that the training started from."""
    repo = hub_model((config.get("model") or {}).get("path"))
    return repo.name if repo else None


def _summary(run: Run, config: dict[str, Any], base: str | None, is_adapter: bool) -> str:
    path = (config.get("model") or {}).get("path") or ""
    origin = f"[{base}](https://huggingface.co/{base})" if base else "a local model"
    if base and "@" in path:
        origin += f" (commit `{path.partition('@')[2][:12]}`)"
    if not path:
        origin = "random weights"
    method = "fine-tuning of all weights"
    if config.get("lora"):
        method = "LoRA, as an adapter" if is_adapter else "LoRA, merged"
    if template := training_facts(run).get("method"):
        method = template.format(how=method)
    return f"Trained from {origin} by {method}, with MVP Engine (run `{run.id}`).\n"


def _model_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def _pipeline_tag(config: dict[str, Any]) -> str:
    if str((config.get("architectures") or [""])[0]).endswith("ForSequenceClassification"):
        return "text-classification"
    tags = {"thinker_config": "any-to-any", "vision_config": "image-text-to-text"}
    tags["audio_config"] = "audio-text-to-text"
    return next((tag for key, tag in tags.items() if key in config), "text-generation")


def _results(run: Run) -> dict[str, str]:
    """The evaluation of the model, else the last one, and the last training loss, or what stands for it."""
    values: dict[str, str] = {}
    used = best_checkpoint(run.checkpoints)
    for split, name in (("train", "training"), ("eval", "held-out")):
        records = list(run.records(split))
        if split == "eval" and used is not None:
            records = [r for r in records if r["step"] == checkpoint_step(used)] or records
        last = records[-1] if records else {}
        shown = training_facts(run).get("headline", "loss")
        for key, value in last.items():
            if isinstance(value, float) and (split == "eval" or key == shown):
                values[f"{name} {key}"] = f"{value:.4g}"
    return values


def _settings(run: Run, config: dict[str, Any]) -> dict[str, Any]:
    """Config keys, and the versions of the last launch, which need not be those that are installed here."""
    flat = flat_keys(config)
    if keys := training_facts(run).get("keys", []):
        flat.pop("data.global_batch_size", None)  # the kind of training has keys of its own for it
    keys = [key for key in [*SHOWN_KEYS, *keys] if flat.get(key) not in (None, [], {}, "")]
    shown = {f"`{key}`": flat[key] for key in keys}
    return {**shown, **run.info.get("setup", {}).get("versions", {})}


def _table(title: str, left: str, right: str, rows: Mapping[str, Any]) -> str:
    lines = [f"{title}\n\n| {left} | {right} |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(lines) + "\n"


def _sources(config: dict[str, Any]) -> list[dict[str, Any]]:
    sources = (config.get("data") or {}).get("sources") or []
    return [source for source in sources if isinstance(source, dict)]


def _hub_paths(source: dict[str, Any]) -> list[str]:
    path = source.get("path") or []
    return [p for p in ([path] if isinstance(path, str) else path) if p.startswith(SCHEME)]


def _source_line(source: dict[str, Any]) -> str:
    where = ", ".join(f"`{path}`" for path in _hub_paths(source)) or "local rows"
    role = "training" if source.get("split", "train") == "train" else "held-out"
    return f"- {source.get('name') or 'rows'} ({role}): {where}"
