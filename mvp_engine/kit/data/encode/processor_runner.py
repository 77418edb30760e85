"""ProcessorRunner: trial calls and calls for single items of one Hugging Face processor."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mvp_engine.data.batch import Media
from mvp_engine.errors import UserError
from mvp_engine.kit.data.encode import processor_calls
from mvp_engine.kit.data.encode.processor_calls import blank_item
from mvp_engine.kit.data.encode.processor_limits import (
    SUB_PROCESSORS,
    pixel_budget,
    set_pixel_budget,
)
from mvp_engine.kit.data.encode.processor_outputs import to_media
from mvp_engine.kit.data.read.media_info import MediaInfo

MAX_CACHED = 512  # processors of single items in memory
BILINEAR = 2  # PIL's number
Items = Sequence[tuple[MediaInfo, Any]]
Outputs = dict[str, Any]


class ProcessorRunner:
    """One processor that is called for items of one kind at a time."""

    def __init__(self, processor: Any, kinds: Sequence[str], sampling_rate: int) -> None:
        self.processor = processor
        self.kinds = kinds
        self.sampling_rate = sampling_rate
        # Whether a kind can be measured with meta tensors, which have no data: an image of 2000x1500
        # then takes 4 ms instead of 24 ms.
        self._uses_meta = dict.fromkeys(kinds, False)
        self.value_names: dict[str, str] = {}  # keys of PackedBatch.media, by media kind
        self._item_processors: dict[tuple[str, int | None, int | None], Any] = {}

    def placeholder(self, kind: str) -> str:
        """The token that stands for one item in a rendered conversation."""
        return getattr(self.processor, f"{kind}_token")

    def call(self, items: Items) -> tuple[list[str], Outputs]:
        """The expansion of each item, and the model's inputs. All items have one pixel budget."""
        info = items[0][0]
        return processor_calls.call_processor(
            self._processor_for(info),
            items,
            self.placeholder(info.kind),
            self.sampling_rate,
        )

    def call_blank(self, info: MediaInfo) -> tuple[list[str], Outputs]:
        """The outputs for an item of this size, without its data where the processor allows that."""
        processor = copy.copy(self._processor_for(info))
        if info.kind != "audio":
            name = SUB_PROCESSORS[info.kind]
            part = copy.copy(getattr(processor, name))
            # The filter does not change sizes, and not all filters work on meta tensors.
            part.resample = BILINEAR
            setattr(processor, name, part)
        blank = blank_item(info, "meta" if self._uses_meta[info.kind] else "cpu")
        return processor_calls.call_processor(
            processor,
            [(info, blank)],
            self.placeholder(info.kind),
            self.sampling_rate,
            short_audio=True,
        )

    def trial_expansion(self, kind: str, text: str) -> str:
        """The processor's expansion of a text with one placeholder, for a small item."""
        info = _small_info(kind, self.sampling_rate)
        expansions, _ = processor_calls.call_processor(
            self.processor,
            [(info, blank_item(info, "cpu"))],
            text,
            self.sampling_rate,
        )
        return expansions[0]

    def sub_processor(self, kind: str) -> Any:
        return getattr(self.processor, SUB_PROCESSORS[kind])

    def _processor_for(self, info: MediaInfo) -> Any:
        """The processor under the item's own pixel budget, which cannot exceed the processor's."""
        if info.min_pixels is None and info.max_pixels is None:
            return self.processor
        key = (info.kind, info.min_pixels, info.max_pixels)
        if key not in self._item_processors:
            if len(self._item_processors) >= MAX_CACHED:
                self._item_processors.clear()
            self._item_processors[key] = self._limited_for(info)
        return self._item_processors[key]

    def _limited_for(self, info: MediaInfo) -> Any:
        processor = copy.copy(self.processor)
        part = copy.deepcopy(self.sub_processor(info.kind))
        budget = pixel_budget(part) or math.inf
        max_pixels = info.max_pixels and int(min(info.max_pixels, budget))
        set_pixel_budget(part, info.min_pixels, max_pixels)
        setattr(processor, SUB_PROCESSORS[info.kind], part)
        return processor

    def find_empty_media(self) -> dict[str, Media]:
        """Media without items, in the shapes of this family, by the name of their values.

        Raises a UserError for a family that cannot be packed: items of different shapes, or items that
        change with others in the same call.
        """
        empty: dict[str, Media] = {}
        for kind in self.kinds:
            small = _small_info(kind, self.sampling_rate)
            tall = replace(small, width=96, height=200, num_samples=self.sampling_rate)
            trials = [(info, blank_item(info, "cpu")) for info in (small, tall)]
            first_text, first_outputs = self.call(trials[:1])
            second_text, second_outputs = self.call(trials[1:])
            both_texts, _ = self.call(trials)
            if first_text + second_text != both_texts:
                raise UserError(
                    f"{type(self.processor).__name__} expands two {kind}s differently than each "
                    "alone: it is not supported"
                )
            self._uses_meta[kind] = self._can_use_meta(small, first_text)
            for outputs in (first_outputs, second_outputs):
                self._add_empty(kind, outputs, empty)
        return empty

    def _can_use_meta(self, info: MediaInfo, expected: list[str]) -> bool:
        self._uses_meta[info.kind] = info.kind != "audio"
        try:
            return self.call_blank(info)[0] == expected
        except (RuntimeError, TypeError, ValueError):  # the processor reads the data
            return False

    def _add_empty(
        self,
        kind: str,
        outputs: Outputs,
        empty: dict[str, Media],
    ) -> None:
        """Add the outputs' media without items, or compare their shapes with those found before."""
        name, media = to_media(outputs)
        self.value_names[kind] = name
        none = media.select([])
        # Not a view of the item's values, which would be pickled with it.
        none = replace(none, values=none.values.clone())
        other = empty.setdefault(name, none)
        shapes = _shapes(none)
        other_shapes = _shapes(other)
        if shapes != other_shapes:
            differing = [list(shapes.values()), list(other_shapes.values())]
            raise UserError(
                f"{type(self.processor).__name__} gives {kind}s of different sizes shapes that "
                f"cannot be packed: {differing}"
            )


def _shapes(media: Media) -> dict[str, tuple[int, ...]]:
    shapes = {name: tuple(value.shape) for name, value in media.fields.items()}
    return {**shapes, "": tuple(media.values.shape)}


def _small_info(kind: str, sampling_rate: int) -> MediaInfo:
    """A small item of any kind, with half a second of audio."""
    return MediaInfo(
        kind,
        width=64,
        height=48,
        total_frames=4,
        fps=2.0,
        num_frames=4,
        num_samples=sampling_rate // 2,
        sampling_rate=sampling_rate,
    )
