"""Models and datasets of the Hugging Face Hub as local files, and the commits that a run uses.

A model's path that is no local folder and looks like `org/name` or `org/name@revision` is a repository of the Hub; a
dataset's path is `hf://org/name[:config][:split][@revision]`. `huggingface_hub` downloads into its cache (`HF_HOME`),
needs no request for a commit that is there, and no network for what is there.

The files of a dataset are the parquet files of its repository, by the `configs` of its README.md or by their names,
else those that the Hub converted it to. The package `datasets` is not needed. A dataset that is a folder of a kit, such
as LeRobot's, is downloaded as a whole.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import importlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel

from mvp_engine import plugins
from mvp_engine.config.schema import Config
from mvp_engine.distributed import World
from mvp_engine.distributed.world import raise_on_all_ranks
from mvp_engine.errors import UserError, did_you_mean
from mvp_engine.files import is_url, url_of
from mvp_engine.hf.weights.load import HEADS, INDEX, SINGLE
from mvp_engine.runs import Run

LOGGER = logging.getLogger("mvp_engine")
SCHEME = "hf://"
ADAPTER_CONFIG = "adapter_config.json"
# Everything at the top of a repository but weights: configs, tokenizer, processor, chat template.
SIDE_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
README = "README.md"
MODEL_KEYS = ("model.path", "processor")
_NAME = r"[A-Za-z0-9_][\w.-]*"
_REPO = rf"(?P<repo>{_NAME}/{_NAME})"
_URL = "https://huggingface.co/"  # people paste the address of a model's page
_MODEL = re.compile(rf"(?P<scheme>{SCHEME}|{_URL})?{_REPO}(@(?P<revision>\S+))?")
_DATASET = re.compile(
    rf"{SCHEME}(datasets/)?{_REPO}(?P<words>(:[^:@]+){{,2}})(@(?P<revision>\S+))?"
)
_SNAPSHOT = re.compile(r"models--(?P<org>.+?)--(?P<name>.+)")  # the cache's folder of a repository
AnyConfig = TypeVar("AnyConfig", bound=Config)


@dataclass(frozen=True)
class HubRepo:
    """A repository of the Hub at a revision: a branch, a tag or a commit."""

    name: str
    revision: str | None = None
    kind: Literal["model", "dataset"] = "model"
    words: tuple[str, ...] = ()  # of a dataset's path: config and split, or one of them

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit: its files never change."""
        return re.fullmatch(r"[0-9a-f]{40}", self.revision or "") is not None

    @property
    def download_command(self) -> str:
        kind = " --repo-type dataset" if self.kind == "dataset" else ""
        revision = f" --revision {self.revision}" if self.revision else ""
        return f"hf download {self.name}{kind}{revision}"

    def __str__(self) -> str:
        name = ":".join([self.name, *self.words])
        name = f"{SCHEME}{name}" if self.kind == "dataset" else name
        return f"{name}@{self.revision}" if self.revision else name


def hub_model(path: str | Path | None) -> HubRepo | None:
    """The repository that `path` names; None for local paths.

    `org/name` is local if a folder `org` is here: then `hf://org/name` names the repository.
    """
    match = _MODEL.fullmatch(str(path)) if path is not None else None
    if match is None or Path(str(path)).is_dir():
        return None
    repo = HubRepo(match["repo"], match["revision"])
    is_explicit = match["scheme"] or match["revision"]
    return repo if is_explicit or not Path(repo.name).parent.is_dir() else None


def hub_dataset(path: str) -> HubRepo:
    """The dataset that a path with `hf://` names."""
    match = _DATASET.fullmatch(path)
    if match is None:
        raise UserError(
            f"{path}: write hf://org/name, hf://org/name:split or hf://org/name:config:split; a local folder without "
            "hf://"
        )
    words = tuple(match["words"].split(":")[1:])
    return HubRepo(match["repo"], match["revision"], "dataset", words)


def local_folder(path: str | Path, *, weights: bool = False) -> Path:
    """The local folder of a model, processor or adapter; a repository of the Hub is downloaded if needed.

    Without `weights` it has everything but the weights, which is a matter of megabytes.
    """
    repo = hub_model(path)
    if repo is None and is_url(path):
        from mvp_engine import stores

        return stores.local_folder(path, None if weights else SIDE_FILES)
    if repo is None:
        return Path(path).expanduser()
    folder = download(repo)
    return fetch_weights(folder) if weights else folder


def base_of_adapter(folder: Path, *, weights: bool = False) -> Path | None:
    """The local folder of the model that the LoRA adapter in `folder` was trained on; None for other folders."""
    file = folder / ADAPTER_CONFIG
    if not file.is_file() or (folder / "config.json").is_file():
        return None
    config = json.loads(file.read_text())
    base = config.get("base_model_name_or_path")
    if base and hub_model(base) and config.get("revision"):
        base = f"{base}@{config['revision']}"
    model = local_folder(base, weights=weights) if base else None
    if model is None or not (model / "config.json").is_file():
        raise UserError(
            f"{file}: base_model_name_or_path={base} is not a model's folder, nor a model of the Hub; "
            "write its path there"
        )
    return model


def model_folder(path: str | Path, *, weights: bool = False) -> Path:
    """Like `local_folder`, with the base model's folder in place of a LoRA adapter's."""
    folder = local_folder(path, weights=weights)
    return base_of_adapter(folder, weights=weights) or folder


def fetch_weights(folder: Path) -> Path:
    """Download the weights of a folder that `local_folder` returned, if it is a repository's; returns `folder`."""
    repo = repo_of(folder)
    if repo is None:
        url = url_of(folder)
        return folder if url is None else local_folder(url, weights=True)
    names = [SINGLE]
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
        names = ["adapter_model.safetensors"]
    elif (folder / INDEX).is_file():
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    is_new = not all((folder / name).is_file() for name in names)
    download(repo, [*map(glob.escape, names), HEADS], show_progress=is_new)
    for name in names:
        if not (folder / name).is_file():
            raise UserError(
                f"{repo} has no {name}: weights are read from safetensors files only. "
                "If the repository has others, save them again with save_pretrained()"
            )
    return folder


def download(
    repo: HubRepo, patterns: Sequence[str] | None = None, *, show_progress: bool = False
) -> Path:
    """Download the files of a repository that match; returns the folder of its commit in the cache.

    Of a model, only files at the top may match; the default patterns leave out weights and rows.
    """
    from huggingface_hub import HfApi, snapshot_download

    errors: Any = importlib.import_module("huggingface_hub.errors")
    tqdm: Any = importlib.import_module("huggingface_hub.utils").tqdm
    no_bar = type("NoBar", (tqdm,), {"__init__": partialmethod(tqdm.__init__, disable=True)})
    place: Any = {"repo_type": repo.kind, "revision": repo.revision}
    is_model = repo.kind == "model"
    patterns = patterns or (SIDE_FILES if is_model else [README, ".gitattributes"])
    snapshot = partial(
        snapshot_download,
        repo.name,
        allow_patterns=list(patterns),
        ignore_patterns=["*/*"] if is_model else None,
        tqdm_class=None if show_progress else no_bar,
        **place,
    )
    with hub_errors(repo):
        if repo.is_pinned and list_files(repo) is not None:
            with contextlib.suppress(errors.LocalEntryNotFoundError):
                return Path(snapshot(local_files_only=True))
            # Without a network one request fails at once: each download would be tried five times.
            HfApi().repo_info(repo.name, **place)
        return Path(snapshot())


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
    return repo if repo.is_pinned else replace(repo, revision=download(repo).name)


def repo_of(folder: Path) -> HubRepo | None:
    """The repository and commit of a model's folder in the cache; None for other folders."""
    match = _SNAPSHOT.fullmatch(folder.parent.parent.name)
    if match is None or folder.parent.name != "snapshots":
        return None
    return HubRepo(f"{match['org']}/{match['name']}", folder.name)


def portable_name(folder: Path) -> str:
    """The name to record for a model's folder: `org/name@commit` if it is in the cache, which may lie elsewhere on
    the next machine; else the absolute path."""
    return str(repo_of(folder) or url_of(folder) or folder.resolve())


# ---- Errors of the Hub as user errors: what is wrong, and the command that fixes it -------------------


class NoRevision(UserError):
    """The repository has no such branch, tag or commit."""


@contextlib.contextmanager
def hub_errors(repo: HubRepo) -> Iterator[None]:
    """A context in which an error of the Hub about `repo`, or of the way to it, is raised as a `UserError`."""
    from huggingface_hub import constants

    errors: Any = importlib.import_module("huggingface_hub.errors")
    page = f"{constants.ENDPOINT}/{'datasets/' if repo.kind == 'dataset' else ''}{repo.name}"
    try:
        yield
    except errors.GatedRepoError:
        raise UserError(
            f"{repo} is gated: accept its terms at {page}, then run `hf auth login` with a token of that "
            "account, or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise NoRevision(
            f"{repo}: {repo.name} has no revision {repo.revision}; see {page}"
        ) from None
    except errors.HFValidationError as error:
        raise UserError(f"{repo} is no name that the Hub allows: {_first_line(error)}") from None
    except errors.RepositoryNotFoundError:
        kind = "neither a folder here nor a model" if repo.kind == "model" else "not a dataset"
        raise UserError(
            f"{repo} is {kind} of the Hub that you may read.{_similar(repo)} "
            "For a private one, run `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.LocalEntryNotFoundError as error:
        raise UserError(_unreachable(repo, error.__cause__)) from None
    except (errors.HTTPError, errors.OfflineModeIsEnabled, errors.XetDownloadError) as error:
        raise UserError(_unreachable(repo, error)) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        raise UserError(
            f"{repo} cannot be stored in {constants.HF_HUB_CACHE}: {error.strerror}. Set HF_HOME to another folder"
        ) from None


def _unreachable(repo: HubRepo, cause: BaseException | None) -> str:
    from huggingface_hub import constants

    errors: Any = importlib.import_module("huggingface_hub.errors")
    if isinstance(cause, errors.HfHubHTTPError):
        is_refused = cause.response is not None and cause.response.status_code == 401
        hint = (
            ". The token is not valid: run `hf auth login`, or set HF_TOKEN" if is_refused else ""
        )
        return f"{repo}: the Hub answers {_first_line(cause)}{hint}"
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub cannot be reached"
    if cause is not None and not constants.HF_HUB_OFFLINE:
        reason += f" ({_first_line(cause)})"
    local = "neither a folder here nor" if repo.kind == "model" else "not"
    return (
        f"{repo} is {local} complete in the cache {constants.HF_HUB_CACHE}, and {reason}: run "
        f"`{repo.download_command}` where there is a network, with HF_HOME as here"
    )


def _similar(repo: HubRepo) -> str:
    """A repository of the same owner with a similar name."""
    from huggingface_hub import HfApi

    errors: Any = importlib.import_module("huggingface_hub.errors")
    api = HfApi()
    list_repos: Any = api.list_models if repo.kind == "model" else api.list_datasets
    with contextlib.suppress(errors.HTTPError, OSError):
        repos = list_repos(author=repo.name.partition("/")[0], limit=1000)
        return did_you_mean(repo.name, [entry.id for entry in repos])
    return ""


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# ---- Datasets -----------------------------------------------------------------------------------------

CONVERTED = "refs/convert/parquet"  # the branch with the Hub's conversion
DEFAULT = "default"
ROW_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".arrow")
_SHARD = re.compile(r"(?P<split>.+)-\d{5}-of-\d{5}.*")
# Words in file and folder names by the split that they mean, as in the package `datasets`.
_SPLIT_WORDS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
Splits = dict[str, list[str]]  # the files of each split


class Listing(NamedTuple):
    """The files of a dataset, and the words of the path that named it: config and split, or one of them."""

    named: str
    path: str  # without words and revision
    words: tuple[str, ...]
    files: list[str]
    readme: Path


def dataset_files(path: str, split: str = "train") -> list[str]:
    """The local parquet files of a dataset's split, downloaded if needed. `split`: the one to read if none is named.

    Of a dataset that a kit reads as a folder: the folder.
    """
    dataset, names = _pinned_files(hub_dataset(path), split)
    folder = download(dataset, [*map(glob.escape, names)], show_progress=True)
    return [str(folder)] if plugins.data_folder(folder) else [str(folder / name) for name in names]


def folder_files(folder: Path, words: Sequence[str], split: str) -> list[str]:
    """The files of a split of a local folder in the layout of a repository; `words` are config and split, as in a path.

    Its parquet files, or those of other types that its README.md names and that the Hub would convert; or none.
    """
    readme = folder / README
    suffixes: tuple[str, ...] = (".parquet",)
    files = [file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*"))]
    if not any(name.endswith(suffixes) for name in files) and _readme_configs(readme):
        suffixes = ROW_SUFFIXES
    names = [name for name in files if name.endswith(suffixes)]
    named = ":".join([str(folder), *words])
    listing = Listing(named, str(folder), tuple(words), names, readme)
    return [str(folder / name) for name in _choose_files(listing, split)] if names else []


def _pinned_files(dataset: HubRepo, split: str) -> tuple[HubRepo, list[str]]:
    """The dataset at a commit that has parquet files, its own or the Hub's conversion, and those of a split.

    Of a dataset that a kit reads as a folder: all of its files.
    """
    pinned = pin(dataset)
    files = _repo_files(pinned)
    if not {folder.marker for folder in plugins.load_all("data_folder").values()}.isdisjoint(files):
        if dataset.words:
            raise UserError(
                f"{dataset}: it is one folder, without configs and splits. Write {SCHEME}{dataset.name}, and hold_out "
                "for a held-out part"
            )
        return pinned, files
    parquet = [name for name in files if name.endswith(".parquet")]
    if not parquet and dataset.revision is None:
        with contextlib.suppress(NoRevision):
            pinned = pin(replace(dataset, revision=CONVERTED))
            parquet = [name for name in _repo_files(pinned) if name.endswith(".parquet")]
    if parquet:
        readme = download(pinned) / README
        path = f"{SCHEME}{dataset.name}"
        listing = Listing(str(dataset), path, dataset.words, parquet, readme)
        return pinned, _choose_files(listing, split)
    shown = ", ".join([name for name in files if not name.startswith(".")][:5])
    raise UserError(
        f"{dataset} has no parquet files, and the Hub has not converted it. It has {shown}: run "
        f"`{dataset.download_command} --local-dir DIR`, and give a file of DIR as the path"
    )


def _repo_files(repo: HubRepo) -> list[str]:
    """The files of a commit; without its listing and without a network, those that were downloaded."""
    folder = download(repo)
    files = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    return list_files(repo) or sorted(files)


def _choose_files(listing: Listing, split: str) -> list[str]:
    """The files of the config and split that a path names, else of the default config and of `split`."""
    configs = _readme_splits(listing) or _splits_by_name(listing)
    words = list(listing.words)
    config = next(iter(configs))
    if words and (len(words) == 2 or words[0] in configs):
        config = words.pop(0)
        if config not in configs:
            raise UserError(_unknown(listing, "config", config, configs))
    elif len(configs) > 1 and config != DEFAULT:
        raise UserError(f"{listing.named} has several configs: {_choices(listing, configs)}")
    splits = configs[config]
    if words and words[0] not in splits:
        raise UserError(_unknown(listing, "split", words[0], splits))
    if words or split in splits:
        return splits[words[0] if words else split]
    if len(splits) == 1 and split == "train":
        return next(iter(splits.values()))
    prefix = f"{config}:" if len(configs) > 1 else ""
    choices = _choices(listing, [f"{prefix}{name}" for name in splits])
    raise UserError(f"{listing.named} has no split {split}: name one of its splits, {choices}")


def _choices(listing: Listing, words: Sequence[str] | dict[str, Splits]) -> str:
    shown = ", ".join(f"{listing.path}:{word}" for word in list(words)[:8])
    return f"{shown}, ..." if len(words) > 8 else shown


def _unknown(listing: Listing, kind: str, name: str, known: dict[str, Any]) -> str:
    shown = ", ".join(list(known)[:8])
    return f"{listing.named}: no {kind} {name}.{did_you_mean(name, known)} It has: {shown}"


def _readme_configs(file: Path) -> list[dict[str, Any]]:
    """The list `configs` in the front matter of README.md."""
    from huggingface_hub import metadata_load

    try:
        metadata = metadata_load(file) if file.is_file() else None
    except (ValueError, yaml.YAMLError):
        return []
    entries = (metadata or {}).get("configs")
    return [entry for entry in entries or [] if isinstance(entry, dict)]


def _readme_splits(listing: Listing) -> dict[str, Splits]:
    """The splits of each config by README.md, the default config first."""
    configs: dict[str, Splits] = {}
    for entry in _readme_configs(listing.readme):
        name = str(entry.get("config_name", DEFAULT))
        if splits := _splits_of_entry(entry, listing.files):
            if entry.get("default") or name == DEFAULT:
                configs = {DEFAULT: splits, **configs}
            configs[name] = splits
    return configs


def _splits_of_entry(entry: dict[str, Any], files: list[str]) -> Splits:
    """The files of each split: `data_files` is a pattern, a list of them, or patterns by split.

    Without it the splits are those of the file names in `data_dir`, as in the package `datasets`.
    """
    folder = PurePosixPath(str(entry.get("data_dir") or "."))
    given = entry.get("data_files")
    splits: Splits = {}
    if given is None:
        for file in map(PurePosixPath, files):
            if file.is_relative_to(folder):
                split = _split_by_name(file.relative_to(folder))
                splits.setdefault(split, []).append(str(file))
        return splits
    if isinstance(given, dict):
        given = [{"split": split, "path": path} for split, path in given.items()]
    for item in given if isinstance(given, list) else [given]:
        item = item if isinstance(item, dict) else {"split": "train", "path": item}
        patterns = item["path"] if isinstance(item["path"], list) else [item["path"]]
        for expression in [_glob(str(folder / pattern)) for pattern in patterns]:
            names = [file for file in files if expression.fullmatch(file)]
            splits[item["split"]] = [*splits.get(item["split"], []), *names]
    return {split: names for split, names in splits.items() if names}


def _glob(pattern: str) -> re.Pattern[str]:
    """A pattern in which `*` stays inside of a folder and `**` does not; `[0-9]`, `[!0-9]` and `{a,b}` are choices."""
    from fsspec.utils import glob_translate

    def choices(match: re.Match[str]) -> str:
        return f"({match[1].replace(',', '|')})"

    return re.compile(re.sub(r"\\\{(.+?)\\\}", choices, glob_translate(pattern)))


def _splits_by_name(listing: Listing) -> dict[str, Splits]:
    """The splits of each config by the names of files and folders: `config/split/0000.parquet` in the Hub's conversion,
    else `[config/]split-00000-of-00002.parquet`, or a word such as train in a name."""
    configs: dict[str, Splits] = {}
    for file in map(PurePosixPath, listing.files):
        *folders, name = file.with_suffix("").parts
        if len(folders) == 2 and name.isdigit():
            config, split = folders
            if split.startswith("partial-"):
                text = "%s: the Hub converted only the first part of %s"
                LOGGER.warning(text, listing.path, split)
        else:
            split = _split_by_name(file)
            is_config = folders and folders[0] != "data" and not _split_of_word(folders[0])
            config = folders[0] if is_config else DEFAULT
        splits = configs.setdefault(config, {})
        splits.setdefault(split.removeprefix("partial-"), []).append(str(file))
    return dict(sorted(configs.items(), key=lambda item: item[0] != DEFAULT))


def _split_by_name(file: PurePosixPath) -> str:
    names = file.with_suffix("").parts[::-1]
    if shard := _SHARD.fullmatch(names[0]):
        return shard["split"]
    return next(filter(None, map(_split_of_word, names)), "train")


def _split_of_word(name: str) -> str | None:
    """The split that a word in a name stands for."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    return next((split for split, known in _SPLIT_WORDS.items() if words & known), None)


# ---- The revisions of a run: pinned to commits when it starts, recorded in run.json, kept on resume ---
# A branch such as `main` moves. The config of a run therefore names commits: `org/name@<commit>`.


class Reference(NamedTuple):
    """A repository of the Hub in a config."""

    key: str
    text: str
    split: str  # of the source, for datasets

    def pinned(self) -> str:
        if _is_stored(self.text):
            return self.text
        try:
            if self.key not in MODEL_KEYS:
                return str(_pinned_files(hub_dataset(self.text), self.split)[0])
            if repo := hub_model(self.text):
                return str(pin(repo))
            fix = "write org/name or hf://org/name, or a local folder without hf://"
            raise UserError(f"{self.text}: {fix}")
        except UserError as error:
            raise UserError(f"{self.key}={error}") from None


def pin_config(config: AnyConfig, world: World, run: Run) -> AnyConfig:
    """The config with commits in place of branches and tags. One rank of each node downloads the files."""
    references: list[Reference] = []

    def collect(reference: Reference) -> str:
        references.append(reference)
        return reference.text

    _map_references(config, "", config, collect)
    if not references:
        return config
    pins = _agree_on_pins(references, world, run)

    def download_all() -> None:
        for key, text, split in references:
            if _is_stored(text):
                _fetch_stored(key, text)
            elif key in MODEL_KEYS:
                model_folder(pins[text], weights=key == "model.path")
            else:
                dataset_files(pins[text], split)

    world.once_per_node(download_all, f"hub/{run.id}")
    return _map_references(config, "", config, lambda reference: pins[reference.text])


def _is_stored(text: str) -> bool:
    """Whether it is the URL of a store other than the Hub."""
    return is_url(text) and hub_model(text) is None and not text.startswith(SCHEME)


def _fetch_stored(key: str, text: str) -> None:
    from mvp_engine import stores

    try:
        if key in MODEL_KEYS:
            local_folder(text, weights=key == "model.path")
        else:
            stores.local_paths(text)
    except UserError as error:
        raise UserError(f"{key}={stores.redacted(text)}: {error}") from None


def _agree_on_pins(references: list[Reference], world: World, run: Run) -> dict[str, str]:
    """Rank 0 takes the recorded commits, looks the others up, and records them. The key is what the config has."""
    pins: dict[str, str] = {}
    with raise_on_all_ranks(world.host_group):
        if world.is_main:
            recorded = _recorded_pins(run)
            pins = {ref.text: recorded.get(ref.text) or ref.pinned() for ref in references}
            new = {text: pin for text, pin in pins.items() if pin != text}
            if new:
                LOGGER.info("revisions of the Hub: %s", ", ".join(dict.fromkeys(new.values())))
            if not new.items() <= run.info.get("hub", {}).items():
                run.note(hub={**recorded, **new})
    agreed: dict[str, str] = world.broadcast(pins)
    return agreed


def _recorded_pins(run: Run) -> dict[str, str]:
    """The commits of a run, by what its config named; those of the run that it was started from are kept."""
    pins: dict[str, str] = run.info.get("hub", {})
    parent = run.info.get("parent")
    origin = Path(parent).parent.parent / "run.json" if parent else None
    if origin is not None and origin.is_file():
        pins = {**json.loads(origin.read_text()).get("hub", {}), **pins}
    return pins


def _map_references(value: Any, key: str, owner: Any, replace: Callable[[Reference], str]) -> Any:
    """A copy of a config in which `replace` gives the text of each reference to the Hub."""
    if isinstance(value, BaseModel):
        prefix = f"{key}." if key else ""
        parts = {name: _map_references(v, prefix + name, value, replace) for name, v in value}
        return value.model_copy(update=parts)
    if isinstance(value, list):
        return [_map_references(item, key, owner, replace) for item in value]
    is_model = key in MODEL_KEYS and isinstance(value, str) and hub_model(value) is not None
    is_read = key in MODEL_KEYS or (key.endswith(".path") and not getattr(owner, "stream", False))
    is_stored = is_read and isinstance(value, str) and _is_stored(value)
    if is_model or is_stored or (isinstance(value, str) and value.startswith(SCHEME)):
        return replace(Reference(key, value, getattr(owner, "split", "train")))
    return value
