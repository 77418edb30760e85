"""`mvp push`: upload the model of a run to the Hugging Face Hub, with a model card that is made from the run."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from mvp_engine.errors import UserError
from mvp_engine.hf.weights.hub import HubRepo, hub_errors
from mvp_engine.hf.weights.merge import merge
from mvp_engine.report.facts import writes_text
from mvp_engine.runs import Run, trained_run
from mvp_engine.tools.chat import model_folders
from mvp_engine.tools.merge import build_model, model_checkpoint
from mvp_engine.tools.model_card import base_model, model_card

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
    base = base_model(_config(run))
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
    facts = {"repository": name, "public": public, "url": url, "files": sizes, "card": card}
    facts["chats"] = writes_text(run)
    print(json.dumps(facts, indent=2) if as_json else _page(facts))


def _page(facts: dict[str, Any]) -> str:
    sizes: dict[str, int] = facts["files"]
    if facts["url"]:
        total = f"{len(sizes)} files, {sum(sizes.values()) / 1e6:,.1f} MB"
        talk = f" Talk to it: mvp chat {facts['repository']}" if facts["chats"] else ""
        return f"{facts['url']}: {total}.{talk}"
    visibility = "public" if facts["public"] else "private"
    lines = [f"would upload to {facts['repository']} ({visibility}):", ""]
    lines += [f"  {size / 1e6:10,.2f} MB  {name}" for name, size in sizes.items()]
    return "\n".join([*lines, "", facts["card"]])


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
        HfApi().create_commit(name, contents, commit_message=f"Upload {run.id} with mvp push")
    return f"{constants.ENDPOINT}/{name}"


@contextmanager
def _upload_errors(name: str) -> Iterator[None]:
    errors: Any = importlib.import_module("huggingface_hub.errors")
    with hub_errors(HubRepo(name)):
        try:
            yield
        except (errors.OfflineModeIsEnabled, errors.HTTPError) as error:
            if not isinstance(error, errors.HfHubHTTPError):
                raise UserError(
                    f"{name}: nothing was uploaded, since the Hub cannot be reached ({error})"
                ) from None
            status = error.response.status_code
            if status not in (401, 403):
                raise
            owner = name.partition("/")[0]
            raise UserError(
                f"{name}: the Hub refuses to write ({status}): run `hf auth login` with a token that may write to "
                f"{owner}, or set HF_TOKEN"
            ) from None


def _config(run: Run) -> dict[str, Any]:
    file = run.dir / "config.yaml"
    config: dict[str, Any] = yaml.safe_load(file.read_text()) if file.is_file() else {}
    return config


def _license(base: str | None) -> str | None:
    """The license of the model that the training started from, which the trained one inherits."""
    from huggingface_hub import HfApi

    errors: Any = importlib.import_module("huggingface_hub.errors")
    if base is None:
        return None
    with contextlib.suppress(errors.HTTPError, errors.OfflineModeIsEnabled):
        card = HfApi().model_info(base).card_data
        return card.license if card else None
    return None
