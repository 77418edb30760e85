"""ProcessorRunner: trial calls and calls for single items of one Hugging Face processor."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mvp_engine.data.batch import Media
from mvp_engine.errors import UserError
from mvp_engine.kit.data.encode import processor_calls
from mvp_engine.kit.data.encode.expansion_context import ExpansionContext
from mvp_engine.kit.data.encode.item_padding import check_padding, has_bare_frames, shapes_of
from mvp_engine.kit.data.encode.processor_calls import blank_item
from mvp_engine.kit.data.encode.processor_limits import (
    SUB_PROCESSORS,
    pixel_budget,
    set_pixel_budget,
)
from mvp_engine.kit.data.encode.processor_outputs import (
    FRAMES,
    TILES,
    extra_names,
    has_mixed_fields,
    split_extra,
    to_media,
)
from mvp_engine.kit.data.encode.prompt_format import PROBE, PromptFormat
from mvp_engine.kit.data.read.media_info import MediaInfo

MAX_CACHED = 512  # processors of single items in memory
BILINEAR = 2  # PIL's number
# What a processor raises for inputs that it does not support; OSError: a file that it needs, such as a font.
TRIAL_ERRORS = (
    TypeError,
    LookupError,
    AttributeError,
    ValueError,
    RuntimeError,
    OSError,
    StopIteration,
)
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
        self._enclosed: dict[str, Any] = {}  # tokens that must enclose a placeholder
        self._blank_device = dict.fromkeys(kinds, "cpu")  # "pil" where tensors are not accepted
        self.refused: dict[str, str] = {}  # kinds that cannot be used, and why
        self.numbered: set[str] = set()  # kinds whose expansions hold the number of the item
        self.can_batch_images = True  # in one call; until one fails
        self.layouts: dict[str, str] = {}  # of the rows of items, by kind: see `to_media`
        self.extra_names: set[str] = set()  # outputs that are media of their own
        self.value_names: dict[str, str] = {}  # keys of PackedBatch.media, by media kind
        self.prompt_format: PromptFormat | None = None  # of a processor that adds text to prompts
        self.contexts: dict[str, ExpansionContext] = {}  # expansions that depend on neighbours
        self.types_are_turns = False  # token types: 0 the prompt, 1 the answer
        self._item_processors: dict[tuple[str, int | None, int | None], Any] = {}

    def placeholder(self, kind: str) -> str:
        """The token that stands for one item in a rendered conversation."""
        # Some processors have another token in rendered conversations than in their expansions.
        other = getattr(self.processor, f"{kind}_placeholder_token", None)
        return other or getattr(self.processor, f"{kind}_token")

    def call(self, items: Items) -> tuple[list[str], Outputs]:
        """The expansion of each item, and the model's inputs. All items have one pixel budget."""
        return self._call(self._processor_for(items[0][0]), items)

    def _call(
        self, processor: Any, items: Items, short_audio: bool = False
    ) -> tuple[list[str], Outputs]:
        kind = items[0][0].kind
        before, after = self._enclosed.get(kind, ("", ""))
        texts, outputs = processor_calls.call_processor(
            processor,
            items,
            before + self.placeholder(kind) + after,
            self.sampling_rate,
            short_audio,
        )
        if self.prompt_format is not None:
            texts[-1] = self.prompt_format.strip(texts[-1])
        if kind in self.contexts:
            gap = self.contexts[kind].gap(processor_calls.ITEM_SEPARATOR)
            texts = [text.removesuffix(gap) for text in texts[:-1]] + texts[-1:]
        return [text.removeprefix(before).removesuffix(after) for text in texts], outputs

    def call_blank(self, info: MediaInfo) -> tuple[list[str], Outputs]:
        """The outputs for an item of this size, without its data where the processor allows that."""
        processor = copy.copy(self._processor_for(info))
        if info.kind != "audio":
            name = SUB_PROCESSORS[info.kind]
            part = copy.copy(getattr(processor, name))
            # The filter does not change sizes, and not all filters work on meta tensors.
            part.resample = BILINEAR
            setattr(processor, name, part)
        device = "meta" if self._uses_meta[info.kind] else self._blank_device[info.kind]
        blank = blank_item(info, device)
        return self._call(processor, [(info, blank)], short_audio=True)

    def expansions_together(self, infos: Sequence[MediaInfo]) -> list[str]:
        """The expansions of several items of one kind in one sequence."""
        blanks = [(info, blank_item(info, self._blank_device[info.kind])) for info in infos]
        return self.call(blanks)[0]

    def trial_expansion(self, kind: str, text: str) -> str:
        """The processor's expansion of a text with one placeholder, for a small item."""
        info = _small_info(kind, self.sampling_rate)
        if kind in self._enclosed and text == self.placeholder(kind):
            return self.call([(info, blank_item(info, self._blank_device[kind]))])[0][0]
        expansions, _ = processor_calls.call_processor(
            self.processor,
            [(info, blank_item(info, self._blank_device[kind]))],
            text,
            self.sampling_rate,
        )
        return self.prompt_format.strip(expansions[0]) if self.prompt_format else expansions[0]

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

        Kinds that cannot be packed go to `refused`: items of different shapes, or items that change with others in
        the same call. Raises a UserError if no kind is left.
        """
        empty: dict[str, Media] = {}
        for kind in self.kinds:
            try:
                found = self._empty_media_of(kind)
            except TRIAL_ERRORS as error:
                problem = str(error)
                if not isinstance(error, UserError):
                    detail = f" ({error})" if str(error) else ""
                    problem = f"its code fails for a text that is a placeholder alone{detail}"
                self.refused[kind] = (
                    f"{type(self.processor).__name__} cannot be called for one {kind} at a time: {problem}"
                )
                continue
            for name, media in found.items():
                if name in empty and shapes_of(empty[name]) != shapes_of(media):
                    self.refused[kind] = f"its {name} have other shapes than those of other media"
                else:
                    empty[name] = media
        if len(self.refused) == len(self.kinds):
            raise UserError("; ".join(self.refused.values()))
        return empty

    def _empty_media_of(self, kind: str) -> dict[str, Media]:
        """The media of one kind without items, under the name of their values."""
        known = inspect.signature(type(self.processor).__call__).parameters
        if not {kind, f"{kind}s"} & known.keys():
            raise UserError(
                f"it takes {kind} in its own conversations alone (apply_chat_template), not as an argument, so no loss "
                "mask can be made. Choose another model"
            )
        small = _small_info(kind, self.sampling_rate)
        tall = replace(small, width=96, height=200, num_samples=self.sampling_rate)
        self._find_blank_device(small)
        device = self._blank_device[kind]
        trials = [(info, blank_item(info, device)) for info in (small, tall)]
        first_text, first_outputs = self.call(trials[:1])
        second_text, second_outputs = self.call(trials[1:])
        both_outputs: Outputs | None = None
        try:
            both_texts, both_outputs = self.call(trials)
        except ValueError as error:
            # Some processors take one audio clip per text, others images with equal numbers of tiles.
            if kind == "audio":
                both_texts, both_outputs = self._call_with_own_texts(trials)
            elif self._expands_equal_items(trials[0], first_text[0]):
                self.can_batch_images = False
                both_texts = first_text + second_text
            else:
                first_line = str(error).partition("\n")[0]
                raise UserError(
                    f"it cannot be called for two items of different sizes either: {first_line}"
                ) from None
        if first_text + second_text != both_texts and kind == "image":
            prompt = self.trial_expansion(kind, self.placeholder(kind) + PROBE)
            self.prompt_format = PromptFormat.find(first_text + second_text, both_texts, prompt)
            self.contexts.update(self._context_of(kind, first_text + second_text, both_texts))
        if kind in self.contexts:
            pass  # expansions of items alone are changed by their neighbours in a row
        elif self.prompt_format is not None:
            first_text = [self.prompt_format.strip(first_text[0])]
        elif first_text + second_text != both_texts:
            # An expansion may hold the number of its item, and depend on nothing else around it.
            if (
                both_texts[:1] != first_text
                or self.expansions_together([tall, small])[:1] != second_text
            ):
                raise UserError("it expands two items differently than each alone")
            self.numbered.add(kind)
        bos = self.processor.tokenizer.bos_token
        if bos and first_text[0].startswith(bos) and not self.placeholder(kind).startswith(bos):
            raise UserError(f"it writes {bos} in front of any text, not only at the start of a row")
        self._uses_meta[kind] = self._can_use_meta(small, first_text)
        # Small items may lack an output, such as tiles.
        extra = extra_names(first_outputs) | extra_names(second_outputs)
        extra |= first_outputs.keys() ^ second_outputs.keys()
        self.extra_names |= extra
        first_outputs, first_extra = split_extra(first_outputs, extra)
        second_outputs, second_extra = split_extra(second_outputs, extra)
        for field in first_extra.keys() & second_extra.keys():
            if shapes_of(first_extra[field]) != shapes_of(second_extra[field]):
                raise UserError(f"its {field} has other shapes for items of other sizes")
        # Of two tiles a size of the whole looks like a field of the tiles.
        if has_mixed_fields(first_outputs) or has_mixed_fields(second_outputs):
            self.layouts[kind] = TILES
        name, first = to_media(first_outputs, self.layouts.get(kind, ""))
        other_name, second = to_media(second_outputs, self.layouts.get(kind, ""))
        self.value_names[kind] = name
        if name != other_name:
            raise UserError(f"it returns {name} for one item and {other_name} for another one")
        if kind == "audio" and has_bare_frames(first, second):
            self.layouts[kind] = FRAMES
            first = to_media(first_outputs, FRAMES)[1]
            second = to_media(second_outputs, FRAMES)[1]
        if shapes_of(first) != shapes_of(second):
            check_padding(name, first, second, both_outputs)
        found = {name: first, **second_extra, **first_extra}
        # Not a view of the item's values, which would be pickled with it.
        return {
            key: replace(media.select([]), values=media.values[:0].clone())
            for key, media in found.items()
        }

    def _call_with_own_texts(self, items: Items) -> tuple[list[str], Outputs]:
        """One call for items of one kind, each with a text of its own."""
        return processor_calls.call_processor(
            self.processor,
            items,
            self.placeholder(items[0][0].kind),
            self.sampling_rate,
            separator=None,
        )

    def _expands_equal_items(self, item: tuple[MediaInfo, Any], text: str) -> bool:
        """Whether two equal items in one call have the expansion of one alone."""
        try:
            return self.call([item, item])[0] == [text, text]
        except ValueError:
            return False

    def _context_of(
        self, kind: str, alone: list[str], together: list[str]
    ) -> dict[str, ExpansionContext]:
        """How expansions depend on their neighbours, where nothing else explains two texts that differ."""
        if self.prompt_format is not None:
            return {}
        info = _small_info(kind, self.sampling_rate)
        items = [(info, blank_item(info, self._blank_device[kind]))] * 2
        own = self.placeholder(kind)
        row, _ = processor_calls.call_processor(
            self.processor, items, own, self.sampling_rate, separator=""
        )
        context = ExpansionContext.find(partial(self._trial_before, kind), row[0])
        if context is None:
            return {}
        gap = context.gap(processor_calls.ITEM_SEPARATOR)
        return {kind: context} if together == [alone[0] + gap, alone[1]] else {}

    def _trial_before(self, kind: str, text: str) -> str:
        return self.trial_expansion(kind, self.placeholder(kind) + text)

    def _find_blank_device(self, info: MediaInfo) -> None:
        """Find what trials need: PIL images where tensors are not accepted, tokens around a placeholder."""
        if info.kind != "image":
            return
        tokens = [getattr(self.processor, f"image_{end}_token", None) for end in ("start", "end")]
        enclosed = {"image": tuple(tokens)} if all(tokens) else {}
        for device, around in (("cpu", {}), ("pil", {}), ("cpu", enclosed), ("pil", enclosed)):
            self._blank_device["image"] = device
            self._enclosed = around
            try:
                self.call([(info, blank_item(info, device))])
            except (ValueError, TypeError, AttributeError):
                continue
            return
        self._enclosed = {}

    def token_type_names(self) -> list[str]:
        """The per-token types that the processor returns by default, for a text or, where it needs one, an item."""
        try:
            outputs = self.processor(text=["x"], return_tensors="pt")
        except TRIAL_ERRORS:
            kind = next(kind for kind in self.kinds if kind not in self.refused)
            info = _small_info(kind, self.sampling_rate)
            outputs = processor_calls.default_outputs(
                self.processor,
                [(info, blank_item(info, self._blank_device[kind]))],
                self.placeholder(kind),
                self.sampling_rate,
            )
        self.types_are_turns = "labels" in outputs
        return [name for name in processor_calls.TOKEN_TYPE_NAMES if name in outputs]

    def _can_use_meta(self, info: MediaInfo, expected: list[str]) -> bool:
        self._uses_meta[info.kind] = info.kind != "audio"
        try:
            return self.call_blank(info)[0] == expected
        except (RuntimeError, TypeError, ValueError):  # the processor reads the data
            return False


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
