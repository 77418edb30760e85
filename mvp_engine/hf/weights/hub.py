"""Models of the Hugging Face Hub as local folders: the one resolver behind every key that names a model.

A path that is no local folder and looks like `org/name` or `org/name@revision` is a repository of the Hub. Its files
are downloaded into the cache of `huggingface_hub` (`HF_HOME`), which also works without a network once they are there.
Datasets are in `hub_datasets.py`, the revisions of a run in `hub_pins.py`.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import importlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, Literal

from mvp_engine.errors import UserError, did_you_mean
from mvp_engine.hf.weights.load import HEADS, INDEX, SINGLE

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


# Errors of the Hugging Face Hub as user errors: what is wrong, and the command that fixes it.


class NoRevision(UserError):
    """The repository has no such branch, tag or commit."""


@contextlib.contextmanager
def hub_errors(repo: HubRepo) -> Iterator[None]:
    """A context in which an error of the Hub about `repo`, or of the way to it, is raised as a `UserError`."""
    errors: Any = importlib.import_module("huggingface_hub.errors")

    try:
        yield
    except errors.GatedRepoError:
        raise UserError(
            f"{repo} is gated: accept its terms at {_page(repo)}, then run `hf auth login` with a token of that "
            "account, or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise NoRevision(
            f"{repo}: {repo.name} has no revision {repo.revision}; see {_page(repo)}"
        ) from None
    except errors.HFValidationError as error:
        raise UserError(f"{repo} is no name that the Hub allows: {_first_line(error)}") from None
    except errors.RepositoryNotFoundError:
        raise UserError(_not_found(repo)) from None
    except errors.LocalEntryNotFoundError as error:
        raise UserError(_unreachable(repo, error.__cause__)) from None
    except errors.HfHubHTTPError as error:
        is_refused = error.response is not None and error.response.status_code == 401
        hint = (
            ". The token is not valid: run `hf auth login`, or set HF_TOKEN" if is_refused else ""
        )
        raise UserError(f"{repo}: the Hub answers {_first_line(error)}{hint}") from None
    except (errors.HTTPError, errors.OfflineModeIsEnabled, errors.XetDownloadError) as error:
        raise UserError(_unreachable(repo, error)) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise UserError(
                f"{repo} cannot be stored in {_cache()}: {error.strerror}. Set HF_HOME to another folder"
            ) from None
        raise


def _unreachable(repo: HubRepo, cause: BaseException | None) -> str:
    from huggingface_hub import constants

    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub cannot be reached"
    if cause is not None and not constants.HF_HUB_OFFLINE:
        reason += f" ({_first_line(cause)})"
    local = "neither a folder here nor" if repo.kind == "model" else "not"
    return (
        f"{repo} is {local} complete in the cache {_cache()}, and {reason}: run "
        f"`{repo.download_command}` where there is a network, with HF_HOME as here"
    )


def _not_found(repo: HubRepo) -> str:
    what = "neither a folder here nor a model" if repo.kind == "model" else "not a dataset"
    return (
        f"{repo} is {what} of the Hub that you may read.{_similar(repo)} "
        "For a private one, run `hf auth login` or set HF_TOKEN"
    )


def _similar(repo: HubRepo) -> str:
    """A repository of the same owner with a similar name."""
    from huggingface_hub import HfApi

    errors: Any = importlib.import_module("huggingface_hub.errors")

    owner = repo.name.partition("/")[0]
    with contextlib.suppress(errors.HTTPError, OSError):
        api = HfApi()
        found: Any = (api.list_models if repo.kind == "model" else api.list_datasets)(
            author=owner, limit=1000
        )
        return did_you_mean(repo.name, [one.id for one in found])
    return ""


def _page(repo: HubRepo) -> str:
    from huggingface_hub import constants

    folder = "datasets/" if repo.kind == "dataset" else ""
    return f"{constants.ENDPOINT}/{folder}{repo.name}"


def _cache() -> str:
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
