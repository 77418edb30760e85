"""MediaHandler: images, videos and audio through the model's own Hugging Face processor.

The processor itself is called, one item at a time, with the item's placeholder as the text
(`processor_runner.py`). A packing plan calls it in the same way with tensors that have a size but no
data, so what the plan counts is what training gets. No model family has code here: what differs is
found in the processor's outputs.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import Media
from mvp_engine.errors import UserError
from mvp_engine.kit.data.encode.processor import (
    SUB_PROCESSORS,
    audio_extractor,
    concat_media,
    limited_processor,
    limits_with_defaults,
    pixel_budget,
    split_extra,
    to_media,
    to_media_of_items,
)
from mvp_engine.kit.data.encode.processor_runner import ProcessorRunner
from mvp_engine.kit.data.read import decoders
from mvp_engine.kit.data.read.decoders import (
    MediaInfo,
    decode,
    decode_now,
    run_in_thread,
    run_with_timeout,
)
from mvp_engine.kit.data.read.media_source import describe, file_of
from mvp_engine.kit.data.read.probe import SizeCache, image_info, probe, probe_now
from mvp_engine.kit.data.read.row_types import BadRow, Limits, Part

LOGGER = logging.getLogger("mvp_engine")
MAX_CACHED = 512  # expansions in memory; the text of one may have 100 kB
PARALLEL_READS = 16  # files that are opened at a time for their sizes
SHRINK_STEPS = 80  # each divides the pixels by 2 ** (1 / 4)


@dataclass(frozen=True)
class MediaCost:
    """What one item costs in a pack."""

    tokens: int  # in the text
    encoder: int  # numbers that an encoder reads


class MediaHandler:
    """One processor under limits. A tokenizer is a processor without media."""

    def __init__(self, processor: Any, limits: Limits | None = None) -> None:
        self.tokenizer = getattr(processor, "tokenizer", processor)
        if not getattr(self.tokenizer, "is_fast", False):
            raise UserError(
                f"{type(self.tokenizer).__name__} gives no character offsets of tokens: "
                "use a fast tokenizer"
            )
        limits = limits or Limits()
        self.kinds = [kind for kind in SUB_PROCESSORS if _supports(processor, kind)]
        self.processor = limited_processor(processor, limits) if self.kinds else processor
        self.limits = limits_with_defaults(self.processor, limits)
        self.sampling_rate = 0
        if "audio" in self.kinds:
            self.sampling_rate = int(audio_extractor(self.processor).sampling_rate)
        self.runner = ProcessorRunner(self.processor, self.kinds, self.sampling_rate)
        self._measured: dict[MediaInfo, tuple[str, int]] = {}  # expansion, encoder cost
        self._token_types: list[str] = []
        self._empty: dict[str, Media] = {}
        self.sizes: SizeCache | None = None  # of files that need not be opened; set while measuring
        if self.kinds:
            self._try_processor(processor)

    def _try_processor(self, processor: Any) -> None:
        self._empty = self.runner.find_empty_media()
        for kind, reason in self.runner.refused.items():
            LOGGER.warning("rows with %s are not supported by this model: %s", kind, reason)
        self.kinds = [kind for kind in self.kinds if kind not in self.runner.refused]
        names = self.runner.token_type_names()
        # The tokenizer's own token types are not about media.
        of_tokenizer = self.tokenizer(["x"])
        self._token_types = [name for name in names if name not in of_tokenizer]

    def probe(self, part: Part, root: Path) -> MediaInfo:
        """The item's size and length, if the processor supports it."""
        # Without a thread where nothing is opened.
        find = probe_now if self._has_size(part, root) else probe
        return self._supported_info(part, lambda: find(part, self.limits, root, self.sizes))

    def _has_size(self, part: Part, root: Path) -> bool:
        return self.sizes is not None and self.sizes.knows(part.kind, part.value, self.limits, root)

    def read_sizes(self, parts: Sequence[Part], root: Path) -> None:
        """Put the sizes of many items into `sizes`, several at a time: slow storage has latency, not work.

        An item that fails is left out; probing it alone raises the error.
        """
        files = []
        for part in parts:
            is_file = part.kind in self.kinds and file_of(part.value) is not None
            if is_file and not self._has_size(part, root):
                files.append(part)
        for first in range(0, len(files), PARALLEL_READS):
            futures = []
            for part in files[first : first + PARALLEL_READS]:
                futures.append(
                    run_in_thread(partial(probe_now, part, self.limits, root, self.sizes))
                )
            wait(futures, self.limits.timeout)

    def decode(self, part: Part, info: MediaInfo, root: Path) -> Any:
        return decode(part, info, self.limits, root, self.sampling_rate)

    def probe_and_decode(self, part: Part, root: Path) -> tuple[MediaInfo, Any]:
        """What `probe` and `decode` return, under one timeout: a handover to a thread takes 0.1 ms.

        An image is opened once: its size is that of its pixels.
        """

        def work() -> tuple[MediaInfo, Any]:
            if part.kind == "image":
                self._check_kind(part)
                image = decoders.decode_image(part.value, self.limits, root)
                return image_info(part, *image.size), image
            info = self._supported_info(part, lambda: probe_now(part, self.limits, root))
            return info, decode_now(part, info, self.limits, root, self.sampling_rate)

        return run_with_timeout(self.limits.timeout, work, f"reading {describe(part)}")

    def keep_open(self, part: Part, root: Path) -> Part:
        """An image with its header read as the value, which `probe` and `decode` do not open again."""
        if part.kind != "image" or part.kind not in self.kinds:
            return part
        open_part = partial(decoders.open_image, part.value, self.limits, root)
        image = run_with_timeout(self.limits.timeout, open_part, f"opening {describe(part)}")
        return replace(part, value=image)

    def _supported_info(self, part: Part, find_info: Callable[[], MediaInfo]) -> MediaInfo:
        self._check_kind(part)
        info = find_info()
        if part.kind != "audio":
            return info
        # The extractor would truncate longer audio silently.
        longest = getattr(audio_extractor(self.processor), "n_samples", math.inf)
        if info.num_samples_at(self.sampling_rate) > longest:
            raise BadRow(
                "too_long",
                f"audio of {info.seconds:.1f} seconds; the processor hears "
                f"{longest / self.sampling_rate:g} "
                "(limits.chunk_seconds, where the encoder takes more)",
            )
        return info

    def _check_kind(self, part: Part) -> None:
        if part.kind not in self.kinds:
            name = type(self.processor).__name__
            reason = self.runner.refused.get(part.kind, f"{name} does not support {part.kind}")
            raise BadRow("unsupported", reason)

    def expansion(self, info: MediaInfo) -> str:
        """The text that replaces the item's placeholder."""
        return self._measure(info)[0]

    def expansions(self, infos: Sequence[MediaInfo]) -> list[str]:
        """The texts that replace the placeholders of all items of one sequence."""
        return self._numbered(infos, [self.expansion(info) for info in infos])

    def _numbered(self, infos: Sequence[MediaInfo], texts: list[str]) -> list[str]:
        """The expansions with the numbers of the items in their sequence, where the processor writes these."""
        texts = list(texts)
        for kind in self.runner.numbered:
            places = [place for place, info in enumerate(infos) if info.kind == kind]
            if len(places) > 1:
                blanks = self.runner.expansions_together([infos[place] for place in places])
                for place, text in zip(places, blanks, strict=True):
                    texts[place] = text
        return texts

    def cost(self, info: MediaInfo) -> MediaCost:
        """The item's cost by its size alone; the item is not decoded."""
        text, encoder = self._measure(info)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return MediaCost(len(ids), encoder)

    def shrink(self, info: MediaInfo, max_tokens: int) -> MediaInfo | None:
        """The item with fewer pixels and frames, so that it has at most `max_tokens`.

        None where that is impossible.
        """
        if info.kind == "audio":
            return None
        if self.cost(self._shrunk(info, SHRINK_STEPS)).tokens > max_tokens:
            return None
        fits = SHRINK_STEPS
        fails = 0
        while fits - fails > 1:  # bisection: tokens fall with the pixels
            middle = (fits + fails) // 2
            if self.cost(self._shrunk(info, middle)).tokens <= max_tokens:
                fits = middle
            else:
                fails = middle
        return self._shrunk(info, fits)

    def _shrunk(self, info: MediaInfo, step: int) -> MediaInfo:
        scale = 2 ** (-step / 4)
        num_frames = info.num_frames and max(2, round(info.num_frames * math.sqrt(scale)))
        budget = info.max_pixels or pixel_budget(self.runner.sub_processor(info.kind))
        high = budget and max(1, int(budget * scale))
        low = info.min_pixels and high and min(info.min_pixels, high)
        return replace(info, num_frames=num_frames, min_pixels=low, max_pixels=high)

    def collate(
        self, infos: Sequence[MediaInfo], items: Sequence[Any]
    ) -> tuple[list[str], dict[str, Media]]:
        """The expansion of each decoded item of one sequence, and its media for a PackedBatch."""
        batched = self._collate_batched(infos, items)
        if batched is not None:
            return batched
        texts: list[str] = []
        found = {name: [empty] for name, empty in self._empty.items()}
        for info, item in zip(infos, items, strict=True):
            expansions, outputs = self.runner.call([(info, item)])
            outputs, extra = split_extra(outputs, self.runner.extra_names)
            name, media = to_media(outputs, self.runner.layouts.get(info.kind, ""))
            texts += expansions
            for key, one in {name: media, **extra}.items():
                found[key].append(one)
        if self.runner.numbered:
            texts = self._numbered(infos, texts)
        return texts, {name: concat_media(media) for name, media in found.items()}

    def _collate_batched(
        self, infos: Sequence[MediaInfo], items: Sequence[Any]
    ) -> tuple[list[str], dict[str, Media]] | None:
        """All images of a sequence in one call; None where the processor cannot do that.

        Each call has a fixed cost: 8 images of 64x48 take 7 ms in one call, 23 ms in eight.
        """
        budgets = {(info.kind, info.min_pixels, info.max_pixels) for info in infos}
        is_batch = len(infos) > 1 and len(budgets) == 1 and infos[0].kind == "image"
        if not self.runner.can_batch_images or not is_batch:
            return None
        pairs = list(zip(infos, items, strict=True))
        texts, outputs = self.runner.call(pairs)
        found = None
        if not self.runner.extra_names:
            found = to_media_of_items(outputs, len(infos))
        if found is None:
            self.runner.can_batch_images = False
            return None
        name, media = found
        return texts, {**self._empty, name: media}

    def with_template(self, processor: Any) -> Any:
        """The processor, with a chat template where it formats prompts itself instead of having one."""
        format = self.runner.prompt_format
        owners = (processor, self.tokenizer)
        if format is None or any(getattr(owner, "chat_template", None) for owner in owners):
            return processor
        copied = copy.copy(processor)
        copied.chat_template = format.chat_template(self.runner.placeholder("image"))
        return copied

    def token_types(self, input_ids: Tensor, loss: Tensor) -> dict[str, Tensor]:
        """Further per-token inputs of this family's forward, for a PackedBatch's `token_fields`."""
        if not self._token_types:
            return {}
        if self.runner.types_are_turns:  # from the first token of the answer
            return dict.fromkeys(self._token_types, (loss.cumsum(0) > 0).long())
        found = {}
        for name in self._token_types:
            # token_type_ids are another name of mm_token_type_ids.
            create = getattr(
                self.processor, f"create_{name}", self.processor.create_mm_token_type_ids
            )
            found[name] = torch.tensor(create([input_ids.tolist()])[0], dtype=torch.long)
        return found

    def mm_types(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Which tokens are images, videos or audio, for the positions of models that read it."""
        if not self.kinds:
            return {}
        types = self.processor.create_mm_token_type_ids([input_ids.tolist()])[0]
        return {"mm_token_type_ids": torch.tensor(types, dtype=torch.long)}

    def empty(self) -> dict[str, Media]:
        """The media of a sequence that has none."""
        return dict(self._empty)

    def _measure(self, info: MediaInfo) -> tuple[str, int]:
        """Expansion and encoder cost of an item, cached by its size."""
        if info.kind == "audio":
            info = self._rounded_to_hops(info)
        if info not in self._measured:
            if len(self._measured) >= MAX_CACHED:
                self._measured.clear()
            self._measured[info] = self._measure_uncached(info)
        return self._measured[info]

    def _rounded_to_hops(self, info: MediaInfo) -> MediaInfo:
        """Audio as a whole number of hops: lengths in between have equal costs, and hit the cache."""
        hop_length = getattr(audio_extractor(self.processor), "hop_length", 1)
        hops = -(-info.num_samples_at(self.sampling_rate) // hop_length)
        return MediaInfo("audio", num_samples=hops * hop_length, sampling_rate=self.sampling_rate)

    def _measure_uncached(self, info: MediaInfo) -> tuple[str, int]:
        """A size that the processor refuses is a bad row: other sizes worked at start-up."""
        try:
            expansions, outputs = self.runner.call_blank(info)
        except (ValueError, ArithmeticError, RuntimeError) as error:
            name = type(self.processor).__name__
            raise BadRow(
                "refused", f"{name} refuses {info.kind} of this size: {error} ({info})"
            ) from None
        text = expansions[0]
        if not text:
            raise BadRow(
                "too_short", f"{info.kind} of {info.seconds:.3f} seconds becomes no token at all"
            )
        outputs, extra = split_extra(outputs, self.runner.extra_names)
        _, media = to_media(outputs, self.runner.layouts.get(info.kind, ""))
        return text, sum(one.values.numel() for one in (media, *extra.values()))


def _supports(processor: Any, kind: str) -> bool:
    part = getattr(processor, SUB_PROCESSORS[kind], None)
    has_part = (audio_extractor(processor) if kind == "audio" else part) is not None
    return has_part and getattr(processor, f"{kind}_token", None) is not None
