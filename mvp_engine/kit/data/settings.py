"""The settings of a kit, for a recipe's config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, TypeAdapter, field_validator, model_validator

from mvp_engine.config.schema import Count, Fraction, Positive, Section
from mvp_engine.kit.data.encode.limits import Limits
from mvp_engine.kit.data.read.rows import FORMATS


class DataSource(Section):
    path: str | list[str]  # a file, a folder, a glob, or several
    name: str | None = None  # in metrics and messages; None: that of the file
    split: str = "train"
    format: str | None = None  # of its rows; None: recognised
    repeats: Positive | None = None  # how often an epoch has its rows; None: once
    weight: Positive | None = None  # instead: its share of the rows; for all sources or none
    root: str | None = None  # the folder that media paths are in; None: the file's
    stream: bool = (
        False  # read one row after the other: also pipes ("-"), .gz files, and `file.py:function`
    )

    @field_validator("format")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is not None and value not in FORMATS:
            raise ValueError(f"choose one of {', '.join(FORMATS)}")
        return value


class MLLMData(Section):
    """The settings of a kit, for a recipe's config."""

    sources: list[DataSource] = Field(
        min_length=1
    )  # or a mapping by name, which configs add to, change or set to null
    micro_batch_tokens: Count  # of a pack, which is a micro-batch
    packs_per_step: Count | None = None  # in a step, over all ranks; or ...
    global_batch_tokens: Count | None = (
        None  # ... a multiple of micro_batch_tokens. With an engine neither is needed
    )
    row_tokens: Count | None = (
        None  # the longest row (the two sides of a pair together); None: a whole pack
    )
    overlong: Literal["drop", "truncate", "shrink", "error"] = "drop"
    pairs: bool = False  # both sides of preference rows, side by side in a pack; false: the chosen one, like any chat
    limits: Limits = Limits()
    template: dict[str, Any] = Field(default_factory=dict)  # options for the chat template
    max_bad_fraction: Fraction = 0.01  # of the rows; with more bad ones the run stops
    max_bad_rows: int | None = Field(default=None, ge=0)
    media_dtype: Literal["auto", "float32", "bfloat16"] = (
        "auto"  # in which media travel; auto: as the loop's precision
    )
    stream_window: Count = 64  # packs that are filled together, where sources are streams
    stream_lanes: Count = (
        4  # packers of each rank that share the streams; at most so many workers help
    )
    stall_seconds: Positive = (
        300.0  # workers that give nothing for so long, twice, and are at the same rows: an error
    )
    cache: str | None = None  # where costs are kept; None: in the user's cache folder

    @field_validator("sources", mode="before")
    @classmethod
    def _read_sources(cls, value: Any) -> Any:
        """Of a mapping the keys are names: where a config inherits, mappings are merged and lists replaced."""
        if not isinstance(value, Mapping):
            return value
        if wrong := [name for name, one in value.items() if not isinstance(one, Mapping | None)]:
            raise ValueError(f"{wrong[0]} is no source: write {wrong[0]}: {{path: FILE}}")
        return [{"name": name, **one} for name, one in value.items() if one is not None]

    @field_validator("limits", mode="before")
    @classmethod
    def _read_limits(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        known = [field.name for field in dataclasses.fields(Limits)]
        if unknown := [name for name in value if name not in known]:
            raise ValueError(f"there is no limit {unknown[0]}; there are {', '.join(known)}")
        return TypeAdapter(Limits).validate_python(dict(value))

    @model_validator(mode="after")
    def _agree(self) -> MLLMData:
        total = self.global_batch_tokens
        if total is not None and (
            self.packs_per_step is not None or total % self.micro_batch_tokens
        ):
            raise ValueError(
                "give packs_per_step, or global_batch_tokens as a multiple of micro_batch_tokens"
            )
        for split in {source.split for source in self.sources}:
            mixed = [source for source in self.sources if source.split == split]
            weighed = [source.weight is not None for source in mixed]
            if any(weighed) and (
                not all(weighed) or any(source.repeats is not None for source in mixed)
            ):
                raise ValueError(
                    f"give all sources of {split} a weight, or none: repeats and weights do not mix"
                )
            flows = [source.stream for source in mixed]
            if any(flows) and (
                not all(flows) or any(source.repeats is not None for source in mixed)
            ):
                raise ValueError(
                    f"all sources of {split} must be streams, or none; and streams take no repeats"
                )
        return self

    @property
    def step_packs(self) -> int | None:
        return (
            self.global_batch_tokens // self.micro_batch_tokens
            if self.global_batch_tokens
            else self.packs_per_step
        )
