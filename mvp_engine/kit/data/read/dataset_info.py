"""LLaMA-Factory's dataset_info.json: the file, the columns and the media folder of one of its datasets."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mvp_engine.errors import UserError, similar_path
from mvp_engine.files import is_inside
from mvp_engine.kit.data.read.row_types import ROLES

LEROBOT_INFO = "meta/info.json"  # only these datasets have it
METADATA_FILES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
# Files at the top of a folder that is not in the layout of a repository of the Hub.
FOLDER_FILES = (*METADATA_FILES, LEROBOT_INFO, "state.json", "dataset_dict.json")
_FILE = "dataset_info.json"
_PLACES = {"file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"}
_PATH = re.compile(r"(?P<file>.*dataset_info\.json)(:(?P<name>.+))?")
# Their column names -> ours; the others are the same.
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
_SHAREGPT = {"messages": "conversations"}
_SAME = ("history", "system", "tools", "images", "videos", "audios", "chosen", "rejected")
_KEYS = {"file_name", "formatting", "ranking", "columns", "tags"}
_TAG_VALUES = {
    "role_tag": ("role", "from"),
    "content_tag": ("content", "value"),
    "user_tag": ROLES["user"],
    "assistant_tag": ROLES["assistant"],
    "observation_tag": ROLES["tool"],
    "function_tag": ("function_call", "tool_call"),
    "system_tag": ROLES["system"],
}
_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt")


@dataclass(frozen=True)
class DatasetInfo:
    """One entry of the file, in our terms."""

    name: str
    path: list[str]
    columns: dict[str, str]
    root: str


def read_dataset_info(path: str | list[str]) -> DatasetInfo | None:
    """The entry that `FOLDER/dataset_info.json:NAME` names, or the only one of FOLDER; None for any other path."""
    if not isinstance(path, str):
        return None
    found = _PATH.fullmatch(str(Path(path) / _FILE) if _is_folder(Path(path)) else path)
    if found is None:
        return None
    file = Path(found["file"]).expanduser()
    entries = _read_entries(file)
    here = [
        key for key, one in entries.items() if (file.parent / str(one.get("file_name"))).exists()
    ]
    name = found["name"] or (here[0] if len(here) == 1 else None)
    if name not in entries:
        shown = ", ".join(list(entries)[:20])
        raise UserError(
            f"data: {file} is LLaMA-Factory's: write {file}:NAME with one of the datasets in it: {shown}"
        )
    entry = entries[name]
    where = f"data: {file}: {name}"
    unknown = sorted(entry.keys() - _KEYS)
    if "file_name" not in entry or unknown:
        what = unknown[0] if unknown else "file_name"
        raise UserError(
            f"{where} has the keys {', '.join(entry)}. Only local files are read, by "
            f"{', '.join(sorted(_KEYS))}: {'remove' if unknown else 'add'} {what}"
        )
    for tag, value in entry.get("tags", {}).items():
        if value not in _TAG_VALUES.get(tag, ()):
            known = " or ".join(_TAG_VALUES.get(tag, ("no such key",)))
            raise UserError(f"{where}: tags.{tag}={value!r} is not supported, only {known}")
    if not is_inside(entry["file_name"]):
        raise UserError(
            f"{where}: file_name={entry['file_name']!r} is outside of its folder, which is not read. Name that file in "
            "the config instead"
        )
    data = file.parent / entry["file_name"]
    paths = [str(data)]
    if data.is_dir():
        paths = sorted(str(one) for one in data.iterdir() if one.suffix in _SUFFIXES)
    return DatasetInfo(str(name), paths, _columns(entry, where), str(file.parent))


def _is_folder(folder: Path) -> bool:
    """Whether a folder has a dataset_info.json of LLaMA-Factory; `datasets` writes another one of that name."""
    file = folder.expanduser() / _FILE
    if not file.is_file():
        return False
    try:
        entries = json.loads(file.read_bytes())
    except ValueError:
        return False
    values = entries.values() if isinstance(entries, dict) else ()
    return any(isinstance(one, dict) and _PLACES & one.keys() for one in values)


def _read_entries(file: Path) -> dict[str, dict[str, Any]]:
    try:
        entries = json.loads(file.read_bytes())
    except OSError:
        raise UserError(f"data: nothing at {file}.{similar_path(file)}") from None
    except ValueError as error:
        raise UserError(f"data: {file} is not JSON: {error}") from None
    if not isinstance(entries, dict) or not all(isinstance(one, dict) for one in entries.values()):
        raise UserError(
            f"data: {file} is not LLaMA-Factory's, which has an object for each dataset"
        )
    return entries


def _columns(entry: dict[str, Any], where: str) -> dict[str, str]:
    """Their column names in the file -> ours."""
    is_alpaca = entry.get("formatting", "alpaca") == "alpaca"
    given = entry.get("columns", {})
    if is_alpaca and given.keys() == {"prompt"}:
        return {given["prompt"]: "text"}  # for pre-training
    ours = {name: name for name in _SAME}
    ours |= {"kto_tag": "label", **(_ALPACA if is_alpaca else _SHAREGPT)}
    columns = {}
    for theirs, column in given.items():
        if theirs not in ours:
            raise UserError(f"{where}: columns.{theirs} is not supported, only {', '.join(ours)}")
        columns[column] = ours[theirs]
    return columns
