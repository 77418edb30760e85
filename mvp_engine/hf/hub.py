"""Models of the Hugging Face Hub as local folders: the one resolver behind every key that names a model.

A path that is no local folder and looks like `org/name` or `org/name@revision` is a repository of the Hub. Its files
are downloaded into the cache of `huggingface_hub` (`HF_HOME`), which also works without a network once they are there.
Datasets are in `hub_datasets.py`, the revisions of a run in `hub_pins.py`.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import json
import re
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, Literal

from mvp_engine.errors import UserError
from mvp_engine.hf.hub_errors import hub_errors
from mvp_engine.hf.weight_files import HEADS, INDEX, SINGLE

SCHEME = "hf://"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# Everything at the top of a repository but weights: configs, tokenizer, processor, chat template.
SIDE_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
NAME = r"[A-Za-z0-9_][\w.-]*"
_URL = "https://huggingface.co/"  # people paste the address of a model's page
_MODEL = re.compile(rf"({SCHEME}|{_URL})?(?P<repo>{NAME}/{NAME})(@(?P<revision>\S+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r"models--(?P<org>.+?)--(?P<name>.+)")  # the cache's folder of a repository


@dataclass(frozen=True)
class HubRepo:
    """A repository of the Hub at a revision: a branch, a tag or a commit."""

    name: str
    revision: str | None = None
    kind: Literal["model", "dataset"] = "model"

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit: its files never change."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    @property
    def download_command(self) -> str:
        words = ["hf download", self.name]
        if self.kind == "dataset":
            words.append("--repo-type dataset")
        if self.revision:
            words.append(f"--revision {self.revision}")
        return " ".join(words)

    def __str__(self) -> str:
        name = f"{SCHEME}{self.name}" if self.kind == "dataset" else self.name
        return f"{name}@{self.revision}" if self.revision else name


def hub_model(path: str | Path | None) -> HubRepo | None:
    """The repository that `path` names; None for local paths.

    `org/name` is local if a folder `org` is here: then `hf://org/name` names the repository.
    """
    found = _MODEL.fullmatch(str(path)) if path is not None else None
    if found is None or Path(str(path)).is_dir():
        return None
    repo = HubRepo(found["repo"], found["revision"])
    is_explicit = str(path).startswith((SCHEME, _URL)) or repo.revision is not None
    return repo if is_explicit or not Path(repo.name).parent.is_dir() else None


def local_folder(path: str | Path, *, weights: bool = False) -> Path:
    """The local folder of a model, processor or adapter; a repository of the Hub is downloaded if needed.

    Without `weights` it has everything but the weights, which is a matter of megabytes.
    """
    repo = hub_model(path)
    if repo is None:
        return Path(path).expanduser()
    folder = download(repo, SIDE_FILES)
    return fetch_weights(folder) if weights else folder


def fetch_weights(folder: Path) -> Path:
    """Download the weights of a folder that `local_folder` returned, if it is a repository's; returns `folder`."""
    repo = repo_of(folder)
    if repo is None:
        return folder
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
        names = [ADAPTER_WEIGHTS]
    elif (folder / INDEX).is_file():
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    else:
        names = [SINGLE]
    is_new = not all((folder / name).is_file() for name in names)
    download(repo, [*map(glob.escape, names), HEADS], show_progress=is_new)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"{repo} has no {missing[0]}: weights are read from safetensors files only. "
            "If the repository has others, save them again with save_pretrained()"
        )
    return folder


def download(repo: HubRepo, patterns: list[str], *, show_progress: bool = False) -> Path:
    """Download the files at the top of a repository that match; returns the folder of its commit in the cache.

    Of a dataset, the files of all folders may match. Files that are in the cache are not downloaded again, and are all
    that is needed without a network.
    """
    from huggingface_hub import HfApi, snapshot_download

    errors: Any = importlib.import_module("huggingface_hub.errors")
    snapshot = partial(
        snapshot_download,
        repo.name,
        repo_type=repo.kind,
        revision=repo.revision,
        allow_patterns=patterns,
        ignore_patterns=["*/*"] if repo.kind == "model" else None,
    )
    with hub_errors(repo):
        if repo.is_pinned and list_files(repo) is not None:
            with contextlib.suppress(errors.LocalEntryNotFoundError):
                return Path(snapshot(local_files_only=True))
        try:
            # One request, which fails at once: each download would be tried five times.
            HfApi().repo_info(repo.name, repo_type=repo.kind, revision=repo.revision)
        except (errors.HTTPError, errors.OfflineModeIsEnabled) as error:
            try:
                return Path(snapshot(local_files_only=True))
            except errors.LocalEntryNotFoundError:
                raise error from None
        return Path(snapshot(tqdm_class=None if show_progress else _no_bar()))


def _no_bar() -> Any:
    tqdm: Any = importlib.import_module("huggingface_hub.utils").tqdm
    return type("NoBar", (tqdm,), {"__init__": partialmethod(tqdm.__init__, disable=True)})


def list_files(repo: HubRepo) -> list[str] | None:
    """The names of the files of a commit, if its listing is in the cache, where each download leaves it."""
    from huggingface_hub import errors, get_cached_repo_tree

    try:
        tree = get_cached_repo_tree(repo.name, repo_type=repo.kind, revision=repo.revision)
    except errors.CachedRepoTreeNotFoundError:
        return None
    return sorted(file.path for file in tree)


def pin(repo: HubRepo) -> HubRepo:
    """The repository at the commit that its revision means now, or, without a network, meant when it was cached."""
    return repo if repo.is_pinned else replace(repo, revision=download(repo, SIDE_FILES).name)


def repo_of(folder: Path) -> HubRepo | None:
    """The repository and commit of a model's folder in the cache; None for other folders."""
    found = _SNAPSHOT.fullmatch(folder.parent.parent.name)
    if found is None or folder.parent.name != "snapshots":
        return None
    return HubRepo(f"{found['org']}/{found['name']}", folder.name)


def portable_name(folder: Path) -> str:
    """The name to record for a model's folder: `org/name@commit` if it is in the cache, which may lie elsewhere on
    the next machine; else the absolute path."""
    repo = repo_of(folder)
    return str(repo or folder.resolve())
