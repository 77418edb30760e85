"""ProcessorRunner: trial calls and calls for single items of one Hugging Face processor."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mvp_engine.data.batch import Media
from mvp_engine.errors import UserError
from mvp_engine.kit.data.encode.processor import (
    FRAMES,
    SUB_PROCESSORS,
    TILES,
    audio_extractor,
    concat_media,
    extra_names,
    has_mixed_fields,
    pixel_budget,
    set_pixel_budget,
    split_extra,
    to_media,
)
from mvp_engine.kit.data.encode.template_marks import Span
from mvp_engine.kit.data.encode.tokenization import PlaceholderToken, fast_encode
from mvp_engine.kit.data.read.decoders import MediaInfo

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

    def call(
        self, items: Items, processor: Any = None, short_audio: bool = False
    ) -> tuple[list[str], Outputs]:
        """The expansion of each item, and the model's inputs. All items have one pixel budget."""
        kind = items[0][0].kind
        if processor is None:
            processor = self._processor_for(items[0][0])
        before, after = self._enclosed.get(kind, ("", ""))
        texts, outputs = call_processor(
            processor,
            items,
            before + self.placeholder(kind) + after,
            self.sampling_rate,
            short_audio,
        )
        if self.prompt_format is not None:
            texts[-1] = self.prompt_format.strip(texts[-1])
        if kind in self.contexts:
            gap = self.contexts[kind].gap(ITEM_SEPARATOR)
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
        return self.call([(info, blank)], processor, short_audio=True)

    def expansions_together(self, infos: Sequence[MediaInfo]) -> list[str]:
        """The expansions of several items of one kind in one sequence."""
        blanks = [(info, blank_item(info, self._blank_device[info.kind])) for info in infos]
        return self.call(blanks)[0]

    def trial_expansion(self, kind: str, text: str) -> str:
        """The processor's expansion of a text with one placeholder, for a small item."""
        info = _small_info(kind, self.sampling_rate)
        if kind in self._enclosed and text == self.placeholder(kind):
            return self.call([(info, blank_item(info, self._blank_device[kind]))])[0][0]
        expansions, _ = call_processor(
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
        return call_processor(
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
        row, _ = call_processor(self.processor, items, own, self.sampling_rate, separator="")
        context = ExpansionContext.find(partial(self._trial_before, kind), row[0])
        if context is None:
            return {}
        gap = context.gap(ITEM_SEPARATOR)
        return {kind: context} if together == [alone[0] + gap, alone[1]] else {}

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

    def _trial_before(self, kind: str, text: str) -> str:
        return self.trial_expansion(kind, self.placeholder(kind) + text)

    def token_type_names(self) -> list[str]:
        """The per-token types that the processor returns by default, for a text or, where it needs one, an item."""
        try:
            outputs = self.processor(text=["x"], return_tensors="pt")
        except TRIAL_ERRORS:
            kind = next(kind for kind in self.kinds if kind not in self.refused)
            info = _small_info(kind, self.sampling_rate)
            items = [(info, blank_item(info, self._blank_device[kind]))]
            token = self.placeholder(kind)
            arguments = _arguments(self.processor, items, token, self.sampling_rate, True)
            outputs = self.processor(**arguments)
        self.types_are_turns = "labels" in outputs
        return [name for name in TOKEN_TYPE_NAMES if name in outputs]

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


# ExpansionContext: a processor that changes the expansion of an item by what stands next to it (Idefics 2).
#
# It writes the token between two items in a row once, and a space between an item and a word. Both are found by calling
# the processor: for two items side by side, and for an item with each character that comes after one.

# (text after the placeholder of a small item) -> the processor's text
Trial = Callable[[str], str]


class ExpansionContext:
    """The rules of one kind of media."""

    def __init__(self, trial: Trial, overlap: int) -> None:
        self._trial = trial
        self._alone = trial("")
        self._gaps: dict[str, str] = {}
        self.overlap = overlap  # characters that two expansions in a row share

    @classmethod
    def find(cls, trial: Trial, in_a_row: str) -> ExpansionContext | None:
        """`in_a_row`: the text of two small items side by side. None: it is more than an overlap."""
        alone = trial("")
        overlap = 2 * len(alone) - len(in_a_row)
        fits = 0 <= overlap < len(alone) and in_a_row == alone + alone[overlap:]
        return cls(trial, overlap) if fits else None

    def gap(self, character: str) -> str:
        """What the processor writes between an item and this character."""
        if character not in self._gaps:
            text = self._trial(character)
            self._gaps[character] = text.removeprefix(self._alone).removesuffix(character)
        return self._gaps[character]

    def apply(self, text: str, places: Sequence[Span], expansions: Sequence[str]) -> list[str]:
        """The expansions of items at these places of a text, from those of the items alone."""
        found = []
        before = -1  # where the item before ends
        starts = {start for start, _ in places}
        for (start, end), expansion in zip(places, expansions, strict=True):
            own = expansion[self.overlap :] if start == before else expansion
            after = text[end : end + 1]
            found.append(own + self.gap(after) if after and end not in starts else own)
            before = end
        return found


# Items of different sizes in one batch: whether a processor pads the smaller ones as a pack does.


def shapes_of(media: Media) -> dict[str, tuple[int, ...]]:
    """The shapes of rows and of the fields of items."""
    shapes = {name: tuple(value.shape[1:]) for name, value in media.fields.items()}
    return {**shapes, "": tuple(media.values.shape[1:])}


def has_bare_frames(first: Media, second: Media) -> bool:
    """Whether audio, (1, frames, features), is as long as it takes, and has no mask of frames."""
    values = first.values
    if values.ndim != 3 or len(values) != 1 or values.shape[2] != second.values.shape[2]:
        return False
    masks = [mask for field, mask in first.fields.items() if field.endswith("_mask")]
    has_mask = any(mask.shape[1:2] == values.shape[1:2] for mask in masks)
    return not has_mask and values.shape[1] != second.values.shape[1]


def check_padding(name: str, first: Media, second: Media, both: dict[str, Any] | None) -> None:
    """Raise unless the processor itself pads the smaller of two items when it gets both: with zeros, or masked.

    A processor may pad waveforms: the spectrogram of silence is not zero, and masked. Of the frames at the end of a
    waveform some see the padding, and only then are valid. Encoders must not see what is masked, which the start of a
    training tests.
    """
    together = {**(both or {})}
    padded = concat_media([first, first, second])
    expected = {**padded.fields, name: padded.values}
    if len(first.values) > 1:  # a row for each frame: values are not padded
        together[name] = expected[name]
    if more := sorted(together.keys() - expected.keys()):
        raise UserError(f"it returns {more} for items of different sizes, not for one alone")
    masks = {field: mask for field, mask in padded.fields.items() if field.endswith("_mask")}
    for mask in masks.values():
        for values in (together, expected):
            values[name] = _masked(values.get(name), mask)
    for field, value in expected.items():
        given = together.get(field)
        if field in masks and isinstance(given, Tensor) and given.shape == value.shape:
            given = given.logical_and(value)
            value = value.bool()
        if not _equal(value, given):
            shapes = [list(shapes_of(media).values()) for media in (first, second)]
            raise UserError(f"items of different sizes have shapes that cannot be packed: {shapes}")


def _masked(values: Any, mask_IF: Tensor) -> Any:
    """The values of items with zeros for frames that are masked; all of them if the mask is not one of frames."""
    if not isinstance(values, Tensor) or values.ndim != 3 or mask_IF.ndim != 2:
        return values
    if mask_IF.shape == values.shape[:2]:
        return values * mask_IF[..., None].to(values)
    return values * mask_IF[:, None].to(values) if mask_IF.shape[1] == values.shape[2] else values


def _equal(one: Any, other: Any) -> bool:
    """Whether two tensors hold the same values; the processor may return them with a batch dimension."""
    if not isinstance(other, Tensor):
        return False
    return one.numel() == other.numel() and bool((one.flatten() == other.flatten()).all())


# Calls of a Hugging Face processor for media alone, without a conversation.
#
# The processor gets the placeholders of some items as its text. What it passes on to its tokenizer is the expansion of
# these placeholders in any conversation; what it returns are the model's inputs.

TOKEN_TYPE_NAMES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
ITEM_SEPARATOR = "\ufdd3"  # between two placeholders; a noncharacter, which no text may hold

# Items with the same number of tokens have the same expansion, so most calls are repeated.
_cached_encode = lru_cache(maxsize=512)(fast_encode)


@dataclass(eq=False)
class _RecordingTokenizer:
    """Stands in for a processor's tokenizer, and keeps the text that the processor made."""

    tokenizer: Any
    texts: list[str]

    def __call__(self, text: list[str], **options: Any) -> Any:
        from transformers import BatchEncoding

        self.texts = list(text)
        if len(text) > 1:
            return self.tokenizer(text, **{**options, "padding": True})
        encoding = _cached_encode(self.tokenizer, text[0])
        ids = torch.tensor([encoding.ids], dtype=torch.long)
        tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return BatchEncoding(tensors, encoding=encoding)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def call_processor(
    processor: Any,
    items: Sequence[tuple[MediaInfo, Any]],
    placeholder: str,
    sampling_rate: int,
    short_audio: bool = False,
    separator: str | None = ITEM_SEPARATOR,
) -> tuple[list[str], dict[str, Any]]:
    """The expansion of each item's placeholder, and the model's inputs, for items of one kind.

    With `short_audio`, audio is not padded to the processor's full length, which may be minutes.
    `separator`: between placeholders in one text; None: each item has a text of its own.
    """
    copied = copy.copy(processor)
    recorder = _RecordingTokenizer(processor.tokenizer, [])
    copied.tokenizer = recorder
    arguments = _arguments(processor, items, placeholder, sampling_rate, short_audio)
    placeholders = [placeholder] * len(items)
    arguments["text"] = placeholders if separator is None else [separator.join(placeholders)]
    arguments["return_mm_token_type_ids"] = False  # would be computed for nothing
    outputs = dict(copied(**arguments))
    for name in ("input_ids", "attention_mask", "video_metadata", *TOKEN_TYPE_NAMES):
        outputs.pop(name, None)
    texts = recorder.texts if separator is None else recorder.texts[0].split(ITEM_SEPARATOR)
    return texts, outputs


def _arguments(
    processor: Any,
    items: Sequence[tuple[MediaInfo, Any]],
    placeholder: str,
    sampling_rate: int,
    short_audio: bool,
) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "text": [ITEM_SEPARATOR.join([placeholder] * len(items))],
        "return_tensors": "pt",
        "text_kwargs": {"add_special_tokens": False},
    }
    infos = [info for info, _ in items]
    values = [value for _, value in items]
    if infos[0].kind == "image":
        arguments["images"] = values
    elif infos[0].kind == "video":
        arguments |= _video_arguments(infos, values)
    else:
        arguments |= _audio_arguments(processor, values, sampling_rate, short_audio)
    return arguments


def _video_arguments(infos: Sequence[MediaInfo], values: Sequence[Any]) -> dict[str, Any]:
    metadata = []
    for info in infos:
        metadata.append(
            {
                "total_num_frames": info.total_frames,
                "frames_indices": info.frame_indices(),
                "fps": info.fps,
                "duration": info.seconds,
            }
        )
    options = {
        "video_metadata": [metadata],
        "do_sample_frames": False,
        "return_metadata": True,  # most need it for the times in their expansions
        # Qwen2.5-Omni takes this for the frame rate of the given frames.
        "fps": infos[0].num_frames / infos[0].seconds,
    }
    videos = [_channels_first(value) for value in values]
    return {"videos": [videos], "videos_kwargs": options}


def _channels_first(frames: Any) -> Tensor:
    """(frames, 3, H, W): processors guess the other layout wrong where a frame is 3 pixels high."""
    if isinstance(frames, Tensor):
        return frames
    return torch.from_numpy(frames).permute(0, 3, 1, 2)


def _audio_arguments(
    processor: Any,
    values: Sequence[Any],
    sampling_rate: int,
    short_audio: bool,
) -> dict[str, Any]:
    defaults = getattr(processor.valid_processor_kwargs, "_defaults", {}).get("audio_kwargs", {})
    options: dict[str, Any] = {"sampling_rate": sampling_rate, "padding": "max_length"}
    if getattr(audio_extractor(processor), "n_samples", None) is None:
        options["padding"] = True  # to the longest: it has no length of its own
    # Encoders see the padding at the end of audio, so it is that of the processor.
    options["padding"] = defaults.get("padding", options["padding"])
    hop_length = getattr(audio_extractor(processor), "hop_length", None)
    if short_audio and hop_length is not None and options["padding"] == "max_length":
        options["max_length"] = max(map(len, values)) + 8 * hop_length
    return {"audio": values, "audio_kwargs": options}


def blank_item(info: MediaInfo, device: str) -> Any:
    """An item of zeros with the size of `info`; on the meta device it has no data, on "pil" it is a PIL image."""
    if info.kind == "audio":
        return np.zeros(info.num_samples, dtype=np.float32)
    if device == "pil":
        return Image.new("RGB", (info.width, info.height))
    shape = [3, info.height, info.width]
    if info.kind == "video":
        shape = [info.num_frames, *shape]
    return torch.zeros(shape, dtype=torch.uint8, device=device)


# PromptFormat: what a processor adds to the text of a prompt that has media (PaliGemma).
#
# Such a processor gets a prompt with placeholders and an answer. It writes a text behind the last placeholder and
# another one at the end of the prompt, so neither belongs to the expansion of an item. It comes without a chat
# template: here is one that writes the same text.

PROBE = "x"  # a prompt


@dataclass(frozen=True)
class PromptFormat:
    """The texts around the prompt."""

    before: str  # behind the last placeholder
    after: str  # at the end

    @classmethod
    def find(
        cls, alone: Sequence[str], together: Sequence[str], prompt: str
    ) -> PromptFormat | None:
        """From the texts of two items, of both in one text, and of the first item followed by PROBE.

        None: the processor does something else to its text.
        """
        expansion, last = together
        if not prompt.startswith(expansion) or PROBE not in prompt[len(expansion) :]:
            return None
        before, _, after = prompt[len(expansion) :].partition(PROBE)
        found = cls(before, after)
        added = before + after
        return found if [*alone] == [expansion + added, last] and last.endswith(added) else None

    def strip(self, text: str) -> str:
        """The text without what was added to it."""
        start, _, end = text.removesuffix(self.after).rpartition(self.before)
        return start + end

    def chat_template(self, placeholder: str) -> str:
        """For one prompt and its answer: placeholders, the prompt, the answer and the end token."""
        texts = [repr(text) for text in (placeholder, self.before, self.after)]
        return (
            TEMPLATE.replace("PLACEHOLDER", texts[0])
            .replace("BEFORE", texts[1])
            .replace("AFTER", texts[2])
        )


TEMPLATE = """\
{%- if messages | length > 2 or messages[0].role != 'user' %}
{{- raise_exception('this model has one prompt and one answer: a user message, and one of the assistant') }}
{%- endif %}
{%- for message in messages %}
{%- set content = message.content %}
{%- set parts = [{'type': 'text', 'text': content}] if content is string else content %}
{%- if message.role == 'assistant' %}
{%- generation %}{%- for part in parts %}{{- part.text }}{%- endfor %}{{- eos_token }}{%- endgeneration %}
{%- else %}
{%- for part in parts if part.type != 'text' %}{{- PLACEHOLDER }}{%- endfor %}{{- BEFORE }}
{%- for part in parts if part.type == 'text' %}{{- part.text }}{%- endfor %}{{- AFTER }}
{%- endif %}
{%- endfor %}"""


def expands_outer(runner: ProcessorRunner, kind: str, written: PlaceholderToken) -> bool:
    """Whether the processor's expansion already has the tokens that a chat template writes around it.

    Some processors add these tokens where they are missing, or replace them with the placeholder, so
    both texts are tried.
    """
    name = type(runner.processor).__name__
    around = written.before + written.token + written.after
    alone = runner.trial_expansion(kind, written.token)
    own = runner.placeholder(kind)
    # Some templates write another token, which the processor replaces first.
    if written.token != own and alone != runner.trial_expansion(kind, own):
        raise UserError(
            f"the chat template writes {written.token!r} for {kind}, but {name} looks for {own!r}"
        )
    inside = runner.trial_expansion(kind, around)
    if inside not in (written.before + alone + written.after, alone):
        raise UserError(
            f"cannot use the expansion of {around!r} by {name}, which is {inside[:200]!r}"
        )
    return around != written.token and inside == alone
