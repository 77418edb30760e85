"""Prompts of rollouts: rows of the data kit without their answers, each with its raw row for the reward.

The order is the data kit's: sources are mixed and shuffled by (seed, epoch), and the loader's cursor resumes exactly.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from mvp_engine.data import SampleLoader
from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.kit.data import MLLMDataKit
from mvp_engine.kit.data.kit import OVERLONG_ROWS_FILE
from mvp_engine.kit.data.measured_sources import no_rows
from mvp_engine.kit.data.pack.packs import WorkerWatchdog, check_seconds
from mvp_engine.kit.data.read.bad_rows import BadRecord, BadRows, append_new
from mvp_engine.kit.data.read.media_source import open_media
from mvp_engine.kit.data.read.row_types import BadRow, Limits, Message, Part
from mvp_engine.kit.data.settings import MLLMData
from mvp_engine.kit.examples import conversation_text


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt, and the row that it comes from."""

    key: int  # unique in a training: the position of the row in the order of all epochs
    row: dict[str, Any]  # the raw row with all of its columns
    batch: PackedBatch  # one sequence on the CPU, with expanded media, without labels
    text_ids: list[int]  # token ids with one placeholder for each item of media, for servers
    # The items of media in order, for servers: {"type": "image", "path": PATH} or "bytes" for "path"; "value" for
    # what is neither a file nor an image.
    media: list[dict[str, Any]]
    source: str  # the name of the source
    where: str  # file and line
    sample: int  # the index of the row in its split, as in `MLLMDataKit.row`
    text: str = ""  # the conversation as text, for people
    other_columns: tuple[str, ...] = ()  # of the row, which the prompt does not use
    messages: tuple[Message, ...] = ()  # the conversation, without the values of media
    tools: tuple[Any, ...] = ()  # declared in it


def prompt_settings(data: MLLMData, max_new_tokens: int) -> MLLMData:
    """The settings of a data kit for prompts: no answers, and room for a completion in each micro-batch."""
    room = data.tokens_per_pack - max_new_tokens
    if room < 1:
        raise UserError(
            f"generation.max_new_tokens={max_new_tokens} leaves no room for a prompt in data.pack_tokens="
            f"{data.tokens_per_pack}: raise data.pack_tokens"
        )
    max_length = min(data.max_length or room, room)
    return data.model_copy(
        update={"prompt_only": "always", "pairs": False, "max_length": max_length}
    )


class PromptDataset(Dataset[Any]):
    """The prompts of an epoch: item i is a Prompt, or the record of a row that turned out bad."""

    def __init__(
        self, kit: MLLMDataKit, split: str, *, seed: int = 0, shuffle: bool = True
    ) -> None:
        if kit.is_stream(split):
            raise UserError(
                f"data: the sources of {split} are streams, and prompts of rollouts are read by index, so that a run "
                "can resume exactly: write the rows to a file, and remove stream: true"
            )
        self.mixture, costs = kit.measured(split)
        self.formats = kit.row_formats(split)
        self.encoder = kit.row_encoder
        self.seed = seed
        self.shuffle = shuffle
        self.watchdog = WorkerWatchdog()
        self.first = np.cumsum([0, *(len(source) for source in self.mixture.sources)])
        self.is_good = np.concatenate([cost.tokens for cost in costs]) > 0
        self.epoch = -1
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        if epoch == self.epoch:
            return
        self.epoch = epoch
        order = self.mixture.order(self.seed, epoch, self.shuffle)[:, :2]
        samples = self.first[order[:, 0]] + order[:, 1]
        keys = epoch * len(order) + np.arange(len(order))
        good = self.is_good[samples]
        self.rows = np.concatenate([order, keys[:, None]], axis=1)[good]  # (source, row, key)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Prompt | BadRecord:
        which, row, key = self.rows[index].tolist()
        where = self.mixture.sources[which].where(row)
        self.watchdog.set_position(where)
        try:
            return self._prompt(which, row, key)
        except BadRow as error:
            return BadRecord(self.mixture.names[which], where, error.reason, error.detail)
        except Exception as error:
            error.add_note(f"while reading {where}")
            raise

    def _prompt(self, which: int, row: int, key: int) -> Prompt:
        source = self.mixture.sources[which]
        format = self.formats[which]
        raw = source[row]
        sides = self.encoder.encode(raw, format, source.root, decode=True)
        (batch,) = self.encoder.load(sides, source.root, {})
        no_labels = torch.full_like(batch.labels, IGNORE)
        limits = self.encoder.media.limits
        parsed = self.encoder.read(raw, format)
        rendered = self.encoder.template.render(parsed)
        return Prompt(
            key=key,
            row=dict(raw),
            batch=replace(batch, labels=no_labels, sequence_fields={}),
            text_ids=self.encoder.template.tokenize(rendered).ids,
            media=[media_item(part, limits, source.root) for part in sides[0].parts],
            source=self.mixture.names[which],
            where=source.where(row),
            sample=int(self.first[which]) + row,
            text=conversation_text(parsed.messages) if parsed.text is None else parsed.text,
            other_columns=tuple(name for name in parsed.unused if name in raw),
            messages=tuple(map(without_values, parsed.messages)),
            tools=parsed.tools,
        )


class PromptLoader(SampleLoader):
    """Lists of at most `prompts` prompts: one list for each step. Rows that turn out bad are left out of theirs."""

    dataset: PromptDataset

    def __init__(
        self,
        dataset: PromptDataset,
        bad_rows: BadRows,
        data_id: str,
        *,
        prompts: int,
        num_workers: int = 0,
        stall_seconds: float = 300.0,
    ) -> None:
        self.bad_rows = bad_rows
        self.data_id = data_id
        self.stall_seconds = stall_seconds
        super().__init__(
            dataset,
            micro_batch_size=prompts,
            global_batch_size=prompts,
            seed=dataset.seed,
            shuffle=False,
            collate_fn=list,
            num_workers=num_workers,
            timeout=check_seconds(stall_seconds),
        )

    def __iter__(self) -> Iterator[list[Prompt]]:
        for items in super().__iter__():
            prompts = [item for item in items if isinstance(item, Prompt)]
            self.bad_rows.found_in_training([i for i in items if isinstance(i, BadRecord)])
            if prompts:
                yield prompts

    def end_report(self) -> str | None:
        """A line about bad rows for the end of a training; None if there are none."""
        return self.bad_rows.report()

    def with_columns(self, names: Sequence[str]) -> Self:
        """This loader. Raises if the first row of a source lacks one of these columns, which a reward reads."""
        for source, name in zip(
            self.dataset.mixture.sources, self.dataset.mixture.names, strict=True
        ):
            row = source[0] if len(source) else {}
            if missing := [column for column in names if row.get(column) is None]:
                raise UserError(
                    f"data.sources.{name}: the reward reads the column {missing[0]}, and {source.where(0)} has only "
                    f"{', '.join(row)}. Add it to the rows, or give a reward of your own: engine=FILE.py, or mvp grpo "
                    "--engine FILE.py (docs/rl.md)"
                )
        return self

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "order": self.order_id()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state["order"] != self.order_id():
            raise UserError(
                "the prompts are not those that the checkpoint was trained with, so its position in the epoch is not "
                "valid here: restore the data and its settings, set resume_data=restart, or start a new run "
                "(model.path)"
            )

    def order_id(self) -> str:
        """A hash of the data and of the order of this epoch."""
        rows = np.ascontiguousarray(self.dataset.rows, np.int64).tobytes()
        return f"{self.data_id}-{hashlib.blake2b(rows, digest_size=8).hexdigest()}"

    def sample_ids(self, first: int, last: int) -> list[Any]:
        """Where the rows of steps `first` to `last` (exclusive) come from."""
        found = []
        for index in super().sample_ids(first, last):
            which, row, _ = self.dataset.rows[index].tolist()
            found.append(self.dataset.mixture.sources[which].where(row))
        return found

    def _items(self) -> Iterator[Any]:
        return self.dataset.watchdog.iterate(super()._items, self.stall_seconds)


def prompt_loader(
    kit: MLLMDataKit,
    split: str = "train",
    *,
    prompts: int,
    seed: int = 0,
    shuffle: bool | None = None,
    num_workers: int | None = None,
    folder: str | Path | None = None,
) -> PromptLoader:
    """The prompts of a split. `kit` has `prompt_settings`. Only training shuffles.

    Rows that are left out are listed in `folder`.
    """
    dataset = PromptDataset(
        kit, split, seed=seed, shuffle=split == "train" if shuffle is None else shuffle
    )
    bad = kit.bad_rows(split)
    long = kit.overlong_rows(split)
    if not len(dataset):
        raise no_rows(split, kit.left_out(split), bad, long, kit.row_encoder.max_tokens)
    bad_rows = kit.bad_rows_list(split, len(dataset.is_good), folder)
    bad_rows.add(bad)
    if folder is not None:
        append_new(Path(folder) / OVERLONG_ROWS_FILE, long)
        kit.list_held_out(Path(folder))
    return PromptLoader(
        dataset,
        bad_rows,
        kit.data_id(split),
        prompts=prompts,
        num_workers=kit.num_workers if num_workers is None else num_workers,
        stall_seconds=kit.settings.stall_seconds,
    )


def without_values(message: Message) -> Message:
    parts = [part if part.kind == "text" else replace(part, value=None) for part in message.parts]
    return replace(message, parts=tuple(parts))


def media_item(part: Part, limits: Limits, root: Path) -> dict[str, Any]:
    value = part.value
    if isinstance(value, np.ndarray) and part.kind == "image":
        value = Image.fromarray(value.squeeze())
    if isinstance(value, Image.Image):
        file = io.BytesIO()
        value.save(file, "png")
        return {"type": part.kind, "bytes": file.getvalue()}
    is_file = isinstance(value, str | Path | bytes | bytearray | memoryview)
    has_file = isinstance(value, Mapping) and (value.get("bytes") or value.get("path"))
    if not is_file and not has_file:
        return {"type": part.kind, "value": value}
    found = open_media(value, limits, root, part.kind)
    if isinstance(found, Path):
        return {"type": part.kind, "path": str(found)}
    return {"type": part.kind, "bytes": found.getvalue()}
