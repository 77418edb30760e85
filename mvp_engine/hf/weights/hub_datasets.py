"""Datasets of the Hugging Face Hub as local parquet files: `hf://org/name[:config][:split][@revision]`.

The files are those of the repository, by the `configs` of its README.md or by their names, else those that the Hub
converted the dataset to (the branch `refs/convert/parquet`). The package `datasets` is not needed. A local folder in
that layout is read alike (`folder_files`).
"""

from __future__ import annotations

import contextlib
import glob
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import yaml

from mvp_engine.errors import UserError, did_you_mean
from mvp_engine.hf.weights.hub import NAME, SCHEME, HubRepo, NoRevision, download, list_files

LOGGER = logging.getLogger("mvp_engine")
CONVERTED = "refs/convert/parquet"
README = "README.md"
SMALL_FILES = [README, ".gitattributes"]
DEFAULT = "default"
ROW_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".arrow")
_DATASET = re.compile(
    rf"{SCHEME}(datasets/)?(?P<repo>{NAME}/{NAME})(:(?P<first>[^:@]+))?(:(?P<second>[^:@]+))?(@(?P<revision>\S+))?"
)
_SHARD = re.compile(r"(?P<split>.+)-\d{5}-of-\d{5}.*")
# Words in file and folder names by the split that they mean, as in the package `datasets`.
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}

Configs = dict[str, dict[str, list[str]]]  # the files of each split of each config


@dataclass(frozen=True)
class HubDataset:
    """One split of one config of a dataset; None: the default one."""

    repo: HubRepo
    words: tuple[str, ...] = ()  # of the path: config and split, or one of them

    def __str__(self) -> str:
        revision = f"@{self.repo.revision}" if self.repo.revision else ""
        return SCHEME + ":".join([self.repo.name, *self.words]) + revision


def hub_dataset(path: str) -> HubDataset:
    """The dataset that a path with `hf://` names."""
    found = _DATASET.fullmatch(path)
    if found is None:
        raise UserError(
            f"{path}: write hf://org/name, hf://org/name:split or hf://org/name:config:split; a local folder without "
            "hf://"
        )
    words = tuple(word for word in (found["first"], found["second"]) if word)
    return HubDataset(HubRepo(found["repo"], found["revision"], "dataset"), words)


def pin_dataset(dataset: HubDataset, split: str) -> HubDataset:
    """The dataset at a commit: of the repository, or of the Hub's conversion if the repository has no parquet files."""
    repo = _with_parquet(dataset.repo)
    _choose_files(_listing(dataset, repo), split)  # raises if there is no such split
    return replace(dataset, repo=repo)


def dataset_files(path: str, split: str = "train") -> list[str]:
    """The local parquet files of a dataset's split, downloaded if needed. `split`: the one to read if none is named."""
    dataset = hub_dataset(path)
    repo = _with_parquet(dataset.repo)
    names = _choose_files(_listing(dataset, repo), split)
    folder = download(repo, [*map(glob.escape, names)], show_progress=True)
    return [str(folder / name) for name in names]


def folder_files(folder: Path, words: Sequence[str], split: str) -> list[str]:
    """The files of a split of a local folder in the layout of a repository; `words` are config and split, as in a path.

    Its parquet files, or those of other types that its README.md names and that the Hub would convert; or none.
    """
    readme = folder / README
    files = [file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*"))]
    names = [name for name in files if name.endswith(".parquet")]
    if not names and _readme_configs(readme):
        names = [name for name in files if name.endswith(ROW_SUFFIXES)]
    if not names:
        return []
    named = ":".join([str(folder), *words])
    listing = Listing(named, str(folder), tuple(words), names, readme)
    return [str(folder / name) for name in _choose_files(listing, split)]


class Listing(NamedTuple):
    """The files of a dataset, and the words of the path that named it: config and split, or one of them."""

    named: str
    path: str  # without words and revision
    words: tuple[str, ...]
    files: list[str]
    readme: Path


def _listing(dataset: HubDataset, repo: HubRepo) -> Listing:
    """`repo` is the dataset's repository at a commit."""
    readme = download(repo, SMALL_FILES) / README
    path = f"{SCHEME}{dataset.repo.name}"
    return Listing(str(dataset), path, dataset.words, _parquet_files(repo), readme)


# ---- Files of a repository ------------------------------------------------------------------------


def _with_parquet(repo: HubRepo) -> HubRepo:
    """The repository at a commit that has parquet files: its own, or the Hub's conversion."""
    pinned = replace(repo, revision=download(repo, SMALL_FILES).name)
    names = _list_files(pinned)
    if _parquet_files(pinned):
        return pinned
    if repo.revision is None:
        with contextlib.suppress(NoRevision):
            branch = replace(repo, revision=CONVERTED)
            converted = replace(repo, revision=download(branch, SMALL_FILES).name)
            if _parquet_files(converted):
                return converted
    shown = ", ".join([name for name in names if not name.startswith(".")][:5])
    raise UserError(
        f"{repo} has no parquet files, and the Hub has not converted it. It has {shown}: run "
        f"`{repo.download_command} --local-dir DIR`, and give a file of DIR as the path"
    )


def _list_files(repo: HubRepo) -> list[str]:
    """The files of a commit; without its listing and without a network, those that were downloaded."""
    names = list_files(repo)
    if names is None:
        folder = download(repo, SMALL_FILES)
        files = [file for file in folder.rglob("*") if file.is_file()]
        names = sorted(file.relative_to(folder).as_posix() for file in files)
    return names


def _parquet_files(repo: HubRepo) -> list[str]:
    return [name for name in _list_files(repo) if name.endswith(".parquet")]


# ---- Configs and splits ---------------------------------------------------------------------------


def _choose_files(listing: Listing, split: str) -> list[str]:
    """The files of the config and split that a path names, else of the default config and of `split`."""
    configs = _configs(listing)
    words = list(listing.words)
    config = next(iter(configs))
    if words and (len(words) == 2 or words[0] in configs):
        config = words.pop(0)
        if config not in configs:
            raise UserError(_unknown(listing, "config", config, configs))
    elif len(configs) > 1 and config != DEFAULT:
        raise UserError(f"{listing.named} has several configs: {_choices(listing, list(configs))}")
    splits = configs[config]
    named = [config] if len(configs) > 1 else []
    if words and words[0] not in splits:
        raise UserError(_unknown(listing, "split", words[0], splits))
    if words:
        return splits[words[0]]
    if split in splits:
        return splits[split]
    if len(splits) == 1 and split == "train":
        return next(iter(splits.values()))
    choices = _choices(listing, [":".join([*named, name]) for name in splits])
    raise UserError(f"{listing.named} has no split {split}: name one of its splits, {choices}")


def _choices(listing: Listing, words: list[str]) -> str:
    shown = ", ".join(f"{listing.path}:{word}" for word in words[:8])
    return f"{shown}, ..." if len(words) > 8 else shown


def _unknown(listing: Listing, what: str, name: str, known: dict[str, Any]) -> str:
    shown = ", ".join(list(known)[:8])
    return f"{listing.named}: no {what} {name}.{did_you_mean(name, known)} It has: {shown}"


def _configs(listing: Listing) -> Configs:
    """The configs of a dataset, the default one first, by its README.md or by the names of its files."""
    configs: Configs = {}
    for entry in _readme_configs(listing.readme):
        name = str(entry.get("config_name", DEFAULT))
        splits = _readme_splits(entry, listing.files)
        if splits and (entry.get("default") or name == DEFAULT):
            configs = {DEFAULT: splits, **configs}
        if splits:
            configs[name] = splits
    return configs or _configs_by_name(listing)


def _readme_configs(file: Path) -> list[dict[str, Any]]:
    """The list `configs` in the front matter of README.md."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    _, _, rest = text.partition("---\n")
    try:
        front_matter = yaml.safe_load(rest.partition("\n---")[0]) if text.startswith("---") else {}
    except yaml.YAMLError:
        return []
    entries = front_matter.get("configs") if isinstance(front_matter, dict) else None
    return [entry for entry in entries or [] if isinstance(entry, dict)]


def _readme_splits(entry: dict[str, Any], files: list[str]) -> dict[str, list[str]]:
    """The files of each split of one entry: `data_files` is a pattern, a list of them, or patterns by split.

    Without it the splits are those of the file names in `data_dir`, as in the package `datasets`.
    """
    folder = PurePosixPath(str(entry.get("data_dir") or "."))
    given = entry.get("data_files")
    splits: dict[str, list[str]] = {}
    if given is None:
        for file in map(PurePosixPath, files):
            if file.is_relative_to(folder):
                *folders, name = file.relative_to(folder).with_suffix("").parts
                split = _split_by_name([name, *reversed(folders)])
                splits.setdefault(split, []).append(str(file))
        return splits
    if isinstance(given, dict):
        given = [{"split": split, "path": path} for split, path in given.items()]
    for item in given if isinstance(given, list) else [given]:
        split, patterns = (
            (item["split"], item["path"]) if isinstance(item, dict) else ("train", item)
        )
        for pattern in patterns if isinstance(patterns, list) else [patterns]:
            expression = _glob(str(folder / pattern))
            found = [file for file in files if expression.fullmatch(file)]
            splits[split] = [*splits.get(split, []), *found]
    return {split: found for split, found in splits.items() if found}


def _glob(pattern: str) -> re.Pattern[str]:
    """A pattern in which `*` stays inside of a folder and `**` does not; `[0-9]`, `[!0-9]` and `{a,b}` are choices."""
    text = re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*\*", ".*")
    text = re.sub(r"\\\[(!?)(.+?)\\\]", _character_set, text)
    text = re.sub(r"\\\{(.+?)\\\}", lambda found: f"({found[1].replace(',', '|')})", text)
    return re.compile(text.replace(r"\*", "[^/]*").replace(r"\?", "[^/]"))


def _character_set(found: re.Match[str]) -> str:
    negation = "^" if found[1] else ""
    inside = found[2].replace(r"\-", "-")
    return f"[{negation}{inside}]"


def _configs_by_name(listing: Listing) -> Configs:
    """Configs and splits by the names of files and folders: `config/split/0000.parquet` in the Hub's conversion,
    else `[config/]split-00000-of-00002.parquet`, or a word such as train in a name."""
    configs: Configs = {}
    for file in listing.files:
        *folders, name = PurePosixPath(file).with_suffix("").parts
        if len(folders) == 2 and name.isdigit():
            config, split = folders
            if split.startswith("partial-"):
                LOGGER.warning(
                    "%s: the Hub converted only the first part of %s", listing.path, split
                )
        else:
            split = _split_by_name([name, *reversed(folders)])
            is_config = folders and folders[0] != "data" and _split_word(folders[0]) is None
            config = folders[0] if is_config else DEFAULT
        splits = configs.setdefault(config, {})
        splits.setdefault(split.removeprefix("partial-"), []).append(file)
    return dict(sorted(configs.items(), key=lambda item: item[0] != DEFAULT))


def _split_by_name(names: list[str]) -> str:
    shard = _SHARD.fullmatch(names[0])
    if shard is not None:
        return shard["split"]
    found = [_split_word(name) for name in names]
    return next((split for split in found if split), "train")


def _split_word(name: str) -> str | None:
    """The split that a word in a name stands for."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    for split, known in _SPLIT_WORDS.items():
        if any(word in known for word in words):
            return split
    return None
