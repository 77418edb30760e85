"""The config section of the data kit (`data:` in recipes): its sources, and the sizes of packs and rows."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, field_validator, model_validator

from mvp_engine import plugins
from mvp_engine.config.schema import Count, Data, Fraction, Positive, Section, if_auto
from mvp_engine.errors import UserError, similar_path
from mvp_engine.files import is_inside
from mvp_engine.kit.data.cpus import default_num_workers
from mvp_engine.kit.data.read.row_types import ROLES, FieldType, Limits, RowFormat, column_name
from mvp_engine.kit.data.read.rows import TOKENS, known_columns

HUB = "hf://"
_HUB_CACHE = re.compile(r"/datasets--[^/]+/snapshots/")
DATA_KIT_FIX = (
    "give the recipe's engine a classmethod data_kit(config) that returns its MLLMDataKit"
)
MIN_STALL_SECONDS = 300.0
GLOBAL_BATCH_TOKENS = 16384  # what global_batch_tokens=auto stands for with many rows
DEFAULT_PACK_TOKENS = 4096  # what pack_tokens=auto stands for without a GPU
MANIFEST = "prepared.json"  # of a folder that `mvp data prepare` wrote
RESERVED_FIELDS = ("source", "sample", "media_end", "side")  # other `sequence_fields` of batches


Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Weight = float | list[list[float]]


@dataclass(frozen=True)
class Mixing:
    """The value of `data.mixture`: how sources share a training."""

    by: Literal["tokens", "rows"] = "tokens"
    temperature: Positive = 1.0
    max_epochs: Positive | dict[str, Positive] | None = None

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def cap(self) -> float:
        """The most epochs of a source that `caps` does not name."""
        is_number = isinstance(self.max_epochs, int | float)
        return float(self.max_epochs) if is_number else math.inf  # type: ignore[arg-type]

    @property
    def caps(self) -> dict[str, float]:
        return self.max_epochs if isinstance(self.max_epochs, dict) else {}


class DataSource(Section):
    """One named source of rows."""

    path: str | list[str]
    """A file, a folder, a glob, or a list; `hf://org/dataset[:config][:split][@revision]` of the Hub, or a local
    `FOLDER[:config][:split]` in that layout; or LLaMA-Factory's `dataset_info.json:NAME`. Files, folders and globs may
    be URLs, as s3://bucket/rows/*.parquet (docs/stores.md)."""
    name: str | None = None
    """The name in metrics and messages; null: the name of the file."""
    split: str = "train"
    """The split that these rows belong to: train, or the name of a held-out split such as eval."""
    hold_out: Fraction | None = None
    """The share of the rows that split eval gets instead of train, such as 0.02. Which rows: docs/data.md."""
    columns: dict[str, str | None] = Field(default_factory=dict)
    """Columns under other names: {theirs: ours}, such as {reply: completion}; null drops a column: {label: null}.
    With a question mark, rows may lack it where others have it: {image: image?, prompt: prompt?}."""
    media_tags: bool = True
    """Whether <image>, <video> and <audio> in the texts stand for media; false: they are text."""
    repeats: Positive | None = None
    """How often each row comes in an epoch; null: once."""
    weight: Positive | list[list[Share]] | None = None
    """Instead of `repeats`: the source's share of the rows (with data.mixture, of the tokens), relative to the other
    weights. All sources of a split have it, or none. By progress of the training, with data.mixture: [[0, 3],
    [0.9, 1]]; lines in between, and a jump where two have the same progress."""
    tokenized_by: str | None = None
    """The tokenizer (a folder, or an id of the Hub) that made the rows' `input_ids`; it must be the model's own. The
    loss of `labels` or of `loss_mask` counts; without them, all tokens carry loss."""
    root: str | None = None
    """The folder of relative media paths; null: the folder of the file."""
    stream: bool = False
    """Read rows sequentially. Only then may `path` be a pipe ("-"), a .gz file or `file.py:function`."""

    @field_validator("weight")
    @classmethod
    def _in_order(cls, value: Any) -> Any:
        if isinstance(value, list):
            is_pairs = value and all(len(pair) == 2 and pair[0] <= 1 for pair in value)
            in_order = is_pairs and value == sorted(value, key=lambda pair: pair[0])
            if not in_order or not any(weight for _, weight in value):
                raise ValueError(
                    "weight: pairs of [progress, weight], in the order of the progress, from 0 to 1; one weight is "
                    "above 0"
                )
        return value

    @model_validator(mode="after")
    def _can_hold_out(self) -> DataSource:
        if not self.hold_out:
            return self
        if self.stream or self.split != "train":
            raise ValueError("hold_out is for sources of split train that are not streams")
        if self.hold_out > 0.5:
            raise ValueError("hold_out is at most 0.5: the rest of the rows is trained on")
        return self

    @property
    def label(self) -> str:
        """The name, or that of the first file, of the function, or stdin."""
        if self.name is not None:
            return self.name
        text = self.path if isinstance(self.path, str) else self.path[0]
        first = Path(text)
        if text.startswith(HUB):
            return first.name.partition("@")[0].replace(":", "_")
        if ":" in first.name and not first.exists():
            return first.name.rpartition(":")[2]
        return "stdin" if first.name == "-" else Path(first.name.removesuffix(".gz")).stem

    def row_format(self, data: MLLMData) -> RowFormat:
        """How the rows of this source are read."""
        return RowFormat(
            name=TOKENS if self.tokenized_by else None,
            columns=self.columns,
            media_tags=self.media_tags,
            fields=data.fields,
            prompt_only=data.prompt_only,
            targets=data.targets,
            downloaded=data.limits.allow_outside is None and self.is_downloaded,
        )

    @property
    def is_downloaded(self) -> bool:
        """Whether the files are those of a dataset of the Hub: others made them."""
        paths = [self.path] if isinstance(self.path, str) else self.path
        return any(path.startswith(HUB) or _HUB_CACHE.search(path) for path in paths)


def with_held_out(sources: list[DataSource]) -> list[DataSource]:
    """The sources, then the rows that they hold out as sources of split eval."""
    held_out = {"split": "eval", "weight": None, "repeats": None}
    return sources + [one.model_copy(update=held_out) for one in sources if one.hold_out]


def read_manifest(folder: str | Path) -> dict[str, Any] | None:
    """The manifest of a folder that `mvp data prepare` wrote; None for other folders."""
    file = Path(folder).expanduser() / MANIFEST
    if not file.is_file():
        return None
    manifest: dict[str, Any] = json.loads(file.read_bytes())
    if not manifest["complete"]:
        raise UserError(
            f"data: {folder} is not complete: start the same mvp data prepare again, which continues it"
        )
    return manifest


def resolve_sources(source: DataSource) -> list[DataSource]:
    """The source with local files (`resolve_source`); of a folder of prepared data, all of its sources."""
    manifest = read_manifest(source.path) if isinstance(source.path, str) else None
    if manifest is None:
        return [resolve_source(source)]
    names = ", ".join(f"{source.path}/{one['folder']}" for one in manifest["sources"])
    if others := sorted(source.model_fields_set - {"path", "name"}):
        raise UserError(
            f"data.sources: {source.path} has the sources that were prepared, with their splits, weights and "
            f"repeats, so it takes no {others[0]}: remove it, or name the sources one by one ({names})"
        )
    keys = ("name", "split", "weight", "repeats")
    return [
        DataSource(path=f"{source.path}/{one['folder']}", **{key: one[key] for key in keys})
        for one in manifest["sources"]
    ]


def resolve_source(source: DataSource) -> DataSource:
    """The source with local files in place of datasets of the Hub, or with the file and columns of a
    dataset_info.json, if its path names one."""
    paths = [source.path] if isinstance(source.path, str) else source.path
    if any(path.startswith(HUB) for path in paths):
        files = _local_files(paths, source.split)
        # A folder of a kit is one path, as a local one is.
        path = files[0] if len(files) == 1 and Path(files[0]).is_dir() else files
        return source.model_copy(update={"path": path, "name": source.label})
    info = read_dataset_info(source.path)
    if info is None:
        return _with_layout(source)
    update = {
        "path": info.path,
        "name": source.name or info.name,
        "root": source.root or info.root,
        "columns": {**info.columns, **source.columns},
    }
    return source.model_copy(update=update)


def _with_layout(source: DataSource) -> DataSource:
    """The source with the files of its split, if its path is a local folder in the layout of the Hub."""
    layout = None if source.stream else _hub_layout(source.path)
    if layout is None:
        return source
    # Here: it imports torch, which a config does not need.
    from mvp_engine.hf.weights.hub import folder_files

    files = folder_files(*layout, source.split)
    update = {"path": files, "name": source.label, "root": source.root or str(layout[0])}
    return source.model_copy(update=update) if files else source


def _hub_layout(path: str | list[str]) -> tuple[Path, list[str]] | None:
    """A local folder in the layout of a repository of the Hub, with the config and split after it; None for others."""
    if not isinstance(path, str):
        return None
    name = path
    words: list[str] = []
    while ":" in name[1:] and len(words) < 2 and not Path(name).expanduser().is_dir():
        name, _, word = name.rpartition(":")
        words.insert(0, word)
    folder = Path(name).expanduser()
    if not folder.is_dir() or any((folder / one).exists() for one in FOLDER_FILES):
        return None
    if plugins.data_folder(folder) is not None:
        return None
    readme = folder / "README.md"
    is_named = readme.is_file() and "\nconfigs:" in readme.read_text("utf-8", "replace")
    has_parquet = any(True for pattern in ("*", "*/*") for _ in folder.glob(f"{pattern}.parquet"))
    return (folder.absolute(), words) if is_named or has_parquet else None


def _local_files(paths: list[str], split: str) -> list[str]:
    # Here: it imports torch, which a config does not need.
    from mvp_engine.hf.weights.hub import dataset_files

    found: list[str] = []
    for path in paths:
        found += dataset_files(path, split) if path.startswith(HUB) else [path]
    return found


class MLLMData(Data):
    """The settings of an `MLLMDataKit`, and the keys of every `data` section."""

    micro_batch_size: Annotated[Count, if_auto(lambda: 1)] = 1
    global_batch_size: Count | None = None
    num_workers: Annotated[int, Field(ge=0), if_auto(default_num_workers)] = 0
    sources: list[DataSource] = Field(min_length=1)
    """A list; or a mapping from name to source, which a config that inherits can add to, change or set to null; or the
    folder that `mvp data prepare` wrote."""
    mixture: dict[str, Any] | None = None
    """How the sources of split train share it: {by: tokens} keeps to the weights in tokens, at each point of the
    training; `temperature: T` gives a source of n tokens the weight n^(1/T); `max_epochs`: a number, or {NAME:
    number}, that no source is read more often than (docs/data.md). null: by rows, as `repeats` and `weight` say."""
    pack_tokens: Count | Literal["auto"]
    """The most tokens of a pack. One pack is one micro-batch. auto: the size that trains fastest in the memory of the
    GPU, at least max_length; it needs max_length and global_batch_tokens (docs/performance.md)."""
    global_batch_tokens: Count | Literal["auto"] | None = None
    """The global batch in tokens, a multiple of pack_tokens; null: data.global_batch_size, in packs. auto:
    16,384, or fewer, so that an epoch of few rows has 30 steps where its longest row allows it."""
    max_length: Count | None = None
    """The most tokens of a row (of a preference pair: of both sides together); null: pack_tokens."""
    overlong: Literal["drop", "truncate", "shrink", "error", "split", "concat"] = "drop"
    """What happens to a longer row: dropped, truncated, its images shrunk, or an error. A row that still does not fit
    is dropped. split and concat are for documents that mvp data prepare cuts: long ones, or all of them end to end."""
    fields: dict[str, FieldType] = Field(default_factory=dict)
    """Columns of numbers, as {score: float, target: int}: each is one of a batch's `sequence_fields`."""
    prompt_only: bool | Literal["always"] = False
    """Also accept rows without an answer, for recipes that need none: they carry no loss. `always`: leave out the last
    answer of other rows, too, as prompts of rollouts need it; all columns reach the reward."""
    pairs: bool = False
    """Pack both sides of preference rows next to each other; false: only the chosen side, as an ordinary chat."""
    limits: Limits = Limits()
    """Budgets for media as the model sees them, and guards against media that are too large."""
    template: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the chat template."""
    new_tokens: dict[str, str] = Field(default_factory=dict)
    """Tokens to add to the vocabulary, whose embeddings train: a list, or {token: a text whose embeddings' mean it
    starts from} (docs/graft.md)."""
    max_bad_rows: Annotated[int, Field(ge=0)] | Fraction = 0.01
    """The run stops when more rows than this are bad; a number with a decimal point is a share of all rows."""
    stream_lanes: Count = 4
    """Independent packers of each rank that share the streams; at most this many workers are used."""
    cache: str | None = None
    """The folder of the cached row costs; null: mvp_engine/data in the user's cache folder."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Kinds of media in assistant turns that the model learns to predict; in other turns they are inputs."""
        return ()

    def row_part(self, model_config: Any, cache: Path) -> Any:
        """The `RowPart` of a kit, which encodes targets for a model; None without any."""
        return None

    @field_validator("sources", mode="before")
    @classmethod
    def _read_sources(cls, value: Any) -> Any:
        """Turn a mapping from name to source into a list: inheritance merges mappings and replaces lists.

        A text is the folder of prepared data, which has all sources.
        """
        if isinstance(value, str):
            return [{"path": value}]
        if not isinstance(value, Mapping):
            names = (
                [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
            )
            if names:
                raise ValueError(f"write a source as {{path: {names[0]}}}")
            return value
        sources = []
        for name, source in value.items():
            if source is None:
                continue
            if not isinstance(source, Mapping):
                raise ValueError(
                    f"the source {name} needs a path: {name}: {{path: FILE}}, or sources.{name}.path=FILE"
                )
            sources.append({"name": name, **source})
        return sources

    @field_validator("mixture")
    @classmethod
    def _read_mixture(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        known = [field.name for field in dataclasses.fields(Mixing)]
        for name in value:
            if name not in known:
                raise ValueError(f"mixture has no {name}; choose from {', '.join(known)}")
        return TypeAdapter(Mixing).validate_python(value).plain()

    @property
    def mixing(self) -> Mixing | None:
        return None if self.mixture is None else Mixing(**self.mixture)

    @field_validator("new_tokens", mode="before")
    @classmethod
    def _read_new_tokens(cls, value: Any) -> Any:
        """A list is short for tokens that start as the mean of all embeddings."""
        if not isinstance(value, list):
            return {token: text or "" for token, text in value.items()} if value else {}
        if len({*map(str, value)}) < len(value) or not all(str(token).strip() for token in value):
            raise ValueError("new_tokens: each token once, and none of spaces alone")
        return dict.fromkeys(value, "")

    @field_validator("limits", mode="before")
    @classmethod
    def _read_limits(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        known = [field.name for field in dataclasses.fields(Limits)]
        for name in value:
            if name not in known:
                raise ValueError(f"unknown limit {name}; choose from {', '.join(known)}")
        return TypeAdapter(Limits).validate_python(dict(value))

    @field_validator("fields")
    @classmethod
    def _free_names(cls, value: dict[str, FieldType]) -> dict[str, FieldType]:
        taken = [name for name in value if name in RESERVED_FIELDS]
        if taken:
            raise ValueError(f"{taken[0]} has a meaning already: rename the column with `columns`")
        return value

    @model_validator(mode="after")
    def _check(self) -> MLLMData:
        known = known_columns() | self.fields.keys()
        for source in self.sources:
            for old, new in source.columns.items():
                if new is not None and column_name(new) not in known:
                    raise ValueError(
                        f"columns: {{{old}: {new}}}: nothing reads a column {new}; "
                        f"choose one of {', '.join(sorted(known))}"
                    )
        if self.pack_tokens == "auto":
            self._check_auto()
        elif isinstance(self.global_batch_tokens, int) and (
            self.global_batch_tokens % self.pack_tokens
        ):
            raise ValueError("data.global_batch_tokens must be a multiple of data.pack_tokens")
        check_splits(with_held_out(self.sources))
        self.check_mixture(self.sources)
        return self

    def check_mixture(self, sources: list[DataSource]) -> None:
        """Raise for weights that `mixture` gives no meaning, or another one."""
        weights = [source.weight for source in sources if source.split == "train"]
        mixing = self.mixing
        by_progress = any(isinstance(weight, list) for weight in weights)
        if any(isinstance(source.weight, list) for source in sources if source.split != "train"):
            raise ValueError("a weight by progress is for sources of split train")
        if mixing is None:
            if by_progress:
                raise ValueError("a weight by progress needs data.mixture={by: tokens}")
            return
        if mixing.by == "rows" and (by_progress or mixing.max_epochs is not None):
            raise ValueError(
                "weights by progress and max_epochs count tokens: set data.mixture.by=tokens"
            )
        if mixing.temperature != 1 and any(weight is not None for weight in weights):
            raise ValueError(
                "data.mixture.temperature is for sources without a weight: leave one of them out"
            )
        if any(source.stream for source in sources if source.split == "train"):
            raise ValueError(
                "data.mixture needs the tokens of all rows, and streams are read in order: remove it, or stream: true"
            )

    def _check_auto(self) -> None:
        """Neither the rows that are left out nor the global batch may depend on the GPU."""
        if self.max_length is None or self.global_batch_tokens is None:
            raise ValueError(
                "data.pack_tokens=auto needs data.max_length, the most tokens of a row, and "
                "data.global_batch_tokens, the tokens of an optimizer step: set both"
            )
        if self.global_batch_tokens != "auto" and self.global_batch_tokens < self.max_length:
            raise ValueError(
                f"data.global_batch_tokens={self.global_batch_tokens} is less than one row may have: raise it to "
                f"data.max_length={self.max_length}, or more"
            )

    @property
    def default_pack_tokens(self) -> int:
        """What auto stands for without a GPU; `max_length` is set then."""
        return max(DEFAULT_PACK_TOKENS, self.max_length or 0)

    @property
    def stall_seconds(self) -> float:
        """The run stops when workers return nothing, and stay at the same rows, for twice this long."""
        return max(MIN_STALL_SECONDS, 10 * self.limits.timeout)

    @property
    def tokens_per_pack(self) -> int:
        """`pack_tokens` as a number, after the engine has chosen it."""
        if self.pack_tokens == "auto":
            raise UserError(
                "data.pack_tokens=auto is a choice of MLLMEngine and its subclasses for training: set a number"
            )
        return self.pack_tokens

    def check_global_batch(self, global_batch_size: int | None) -> None:
        if self.global_batch_tokens is not None and global_batch_size is not None:
            raise UserError(
                "data.global_batch_size (in packs) and data.global_batch_tokens both set the global batch: "
                "remove one of them"
            )

    def global_batch_packs(self, global_batch_size: int | None) -> int | None:
        """The packs of one optimizer step over all ranks, from whichever config key sets them.

        `global_batch_size` is the value of `data.global_batch_size`. None if neither key is set.
        """
        self.check_global_batch(global_batch_size)
        if self.global_batch_tokens is None:
            return global_batch_size
        if self.global_batch_tokens == "auto":
            raise UserError(
                "data.global_batch_tokens=auto is a choice of MLLMEngine and its subclasses for training: set a number"
            )
        return self.global_batch_tokens // self.tokens_per_pack


def check_splits(sources: list[DataSource]) -> None:
    """Raise for sources of one split that do not go together."""
    for split in {source.split for source in sources}:
        _check_split(split, [source for source in sources if source.split == split])


def _check_split(split: str, sources: list[DataSource]) -> None:
    repeated = any(source.repeats is not None for source in sources)
    weighted = [source.weight is not None for source in sources]
    if any(weighted) and (repeated or not all(weighted)):
        raise ValueError(
            f"give all sources of {split} a weight, or none: repeats and weights do not mix"
        )
    streams = [source.stream for source in sources]
    if any(streams) and (repeated or not all(streams)):
        raise ValueError(
            f"all sources of {split} must be streams, or none; and streams take no repeats"
        )


def data_section(config: Any) -> tuple[str, MLLMData]:
    """The section of a config that sets the data kit, with its name."""
    for name, value in config:
        if isinstance(value, MLLMData):
            return name, value
    raise UserError(f"the config has no section of type MLLMData: {DATA_KIT_FIX}")


# LLaMA-Factory's dataset_info.json: the file, the columns and the media folder of one of its datasets.

METADATA_FILES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
# Files at the top of a folder that is not in the layout of a repository of the Hub.
FOLDER_FILES = (*METADATA_FILES, "state.json", "dataset_dict.json")
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
