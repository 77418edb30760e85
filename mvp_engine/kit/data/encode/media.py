"""Images, videos and sounds of a row through the model's own Hugging Face processor, for any family.

The processor itself is asked, one item at a time: it is given the item's placeholder as the text, and what it hands to
its tokenizer is what the item becomes in a conversation. A plan asks in the same way with tensors that have a size but
no data, so what it counts is what training gets. No family has a file here; what differs is found in the answers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mvp_engine.data.batch import Media
from mvp_engine.errors import UserError
from mvp_engine.kit.data.encode import processor_calls as asking
from mvp_engine.kit.data.encode.limits import (
    PARTS,
    Info,
    Limits,
    asked_for,
    full_limits,
    limited_processor,
    most_pixels,
    pixels_asked_for,
    set_pixels,
)
from mvp_engine.kit.data.encode.processor_calls import TYPES
from mvp_engine.kit.data.read import decode as reading
from mvp_engine.kit.data.read.rows import BadRow, Part

PLANS = 512  # remembered answers; one may be a text of 100 kB
STEPS = 80  # of shrinking, each by a factor of 2 ** (1 / 4) in pixels


@dataclass(frozen=True)
class Cost:
    tokens: int  # in the text
    encoder: int  # numbers that an encoder reads


def probe(part: Part, limits: Limits, root: Path) -> Info:
    """The cheap look at an item."""
    return reading.within(
        limits.timeout, lambda: _look(part, limits, root), f"looking at {reading.name_of(part)}"
    )


def _look(part: Part, limits: Limits, root: Path) -> Info:
    if part.kind == "image":
        return Info(
            "image", *reading.image_size(part.value, limits, root), **pixels_asked_for(part)
        )
    return (
        _look_at_video(part, limits, root)
        if part.kind == "video"
        else _look_at_audio(part, limits, root)
    )


def _look_at_video(part: Part, limits: Limits, root: Path) -> Info:
    fps = asked_for(part, "fps") or limits.fps or 2.0
    size, frames, own = reading.video_size(part.value, limits, root, fps)
    if frames / own > limits.video_seconds:
        raise BadRow(
            "too_long", f"video of {frames / own:.0f} seconds; {limits.video_seconds:g} are allowed"
        )
    if size[0] * size[1] > limits.image_pixels:
        raise BadRow(
            "too_large", f"video of {size[0]}x{size[1]}; {limits.image_pixels} pixels are allowed"
        )
    wanted = int(asked_for(part, "num_frames", "nframes") or frames / own * fps)
    most = min(int(asked_for(part, "max_frames") or frames), limits.max_frames or frames)
    take = max(2, min(max(wanted, limits.min_frames or 1), most, frames))
    if not isinstance(part.value, np.ndarray | list | tuple):
        scale = min(1.0, math.sqrt(limits.clip_pixels / (take * size[0] * size[1])))
        size = max(1, int(size[0] * scale)), max(1, int(size[1] * scale))
    return Info("video", *size, frames, own, take, **pixels_asked_for(part))


def _look_at_audio(part: Part, limits: Limits, root: Path) -> Info:
    samples, rate = reading.audio_size(part, limits, root)
    if (
        samples < 1 or not 100 <= rate <= 1_000_000
    ):  # resampling from anything else would take for ever
        raise BadRow("corrupt", f"audio with {samples} samples at {rate} Hz")
    if samples / rate > limits.audio_seconds:
        raise BadRow(
            "too_long",
            f"audio of {samples / rate:.0f} seconds; {limits.audio_seconds:g} are allowed",
        )
    return Info("audio", samples=samples, rate=rate)


class MediaHandler:
    """One processor under limits. Text alone is the case of a tokenizer, or of rows without media."""

    def __init__(self, processor: Any, limits: Limits | None = None) -> None:
        self.tokenizer = getattr(processor, "tokenizer", processor)
        if not getattr(self.tokenizer, "is_fast", False):
            raise UserError(
                f"{type(self.tokenizer).__name__} does not say which text a token stands for: use a fast one"
            )
        limits = limits or Limits()
        self.kinds = [
            kind
            for kind, part in PARTS.items()
            if getattr(processor, part, None) is not None
            and getattr(processor, f"{kind}_token", None) is not None
        ]
        self.processor = limited_processor(processor, limits) if self.kinds else processor
        self.limits = full_limits(self.processor, limits)
        self.rate = (
            int(self.processor.feature_extractor.sampling_rate) if "audio" in self.kinds else 0
        )
        self._plans: dict[Info, tuple[str, int]] = {}
        self._limited: dict[tuple[str, int | None, int | None], Any] = {}
        self._blind = dict.fromkeys(self.kinds, False)  # whether it can be asked without data
        self._together = True  # whether it can be asked for several images at once
        ids = [self.tokenizer.convert_tokens_to_ids(self.placeholder(kind)) for kind in self.kinds]
        self._pieces = set(ids).union(
            *(getattr(processor, f"{kind}_token_ids", []) for kind in self.kinds)
        ) - {None}
        self._types, self._empty = list[str](), dict[str, Media]()
        if not self.kinds:
            return
        try:
            self._types = [name for name in TYPES if name in self.processor(text=["x"])]
            self._empty = self._try_out()
        except (TypeError, LookupError, AttributeError, ValueError, RuntimeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"{type(processor).__name__} cannot be asked for one item at a time: {error}"
            ) from error
        self._types = [name for name in self._types if name not in self.tokenizer(["x"])]

    def placeholder(self, kind: str) -> str:
        """What stands for an item in a rendered conversation, once."""
        return getattr(self.processor, f"{kind}_token")

    def probe(self, part: Part, root: Path) -> Info:
        return self._taken(part, lambda: probe(part, self.limits, root))

    def fetch(self, part: Part, root: Path) -> tuple[Info, Any]:
        """What `probe` and `decode` give, in one go."""

        def both() -> tuple[Info, Any]:
            info = self._taken(part, lambda: _look(part, self.limits, root))
            return info, reading.read(part, info, self.limits, root, self.rate)

        return reading.within(self.limits.timeout, both, f"reading {reading.name_of(part)}")

    def _taken(self, part: Part, look: Callable[[], Info]) -> Info:
        """What a look at an item says, if the processor takes it."""
        if part.kind not in self.kinds:
            raise BadRow("unsupported", f"{type(self.processor).__name__} takes no {part.kind}")
        info = look()
        most = (
            getattr(self.processor.feature_extractor, "n_samples", math.inf)
            if part.kind == "audio"
            else math.inf
        )
        if part.kind == "audio" and info.length(self.rate) > most:  # it would be cut without a word
            heard = f"the processor hears {most / self.rate:g} (limits.chunk_seconds, where the encoder takes more)"
            raise BadRow("too_long", f"audio of {info.seconds:.1f} seconds; {heard}")
        return info

    def decode(self, part: Part, info: Info, root: Path) -> Any:
        return reading.decode(part, info, self.limits, root, self.rate)

    def expansion(self, info: Info) -> str:
        """The text that takes the place of the item's placeholder."""
        return self._plan(info)[0]

    def cost(self, info: Info) -> Cost:
        text, encoder = self._plan(info)
        return Cost(len(self.tokenizer(text, add_special_tokens=False)["input_ids"]), encoder)

    def shrink(self, info: Info, tokens: int) -> Info | None:
        """The item with fewer pixels and frames, at most `tokens` in the text; None where that cannot be."""
        if info.kind == "audio":
            return None
        most = info.max_pixels or most_pixels(getattr(self.processor, PARTS[info.kind]))

        def smaller(step: int) -> Info:
            scale = 2 ** (-step / 4)
            take = info.take and max(2, round(info.take * math.sqrt(scale)))
            high = most and max(1, int(most * scale))
            low = info.min_pixels and high and min(info.min_pixels, high)
            return replace(info, take=take, min_pixels=low, max_pixels=high)

        fits, fails = STEPS, 0
        if self.cost(smaller(STEPS)).tokens > tokens:
            return None
        while fits - fails > 1:
            middle = (fits + fails) // 2
            fits, fails = (
                (middle, fails) if self.cost(smaller(middle)).tokens <= tokens else (fits, middle)
            )
        return smaller(fits)

    def collate(
        self, infos: Sequence[Info], items: Sequence[Any]
    ) -> tuple[list[str], dict[str, Media]]:
        """What was decoded for one sequence: the text that each item becomes, and media for a PackedBatch."""
        alike = {(info.kind, info.min_pixels, info.max_pixels) for info in infos}
        if self._together and len(infos) > 1 and len(alike) == 1 and infos[0].kind == "image":
            asked = list(zip(infos, items, strict=True))
            texts, answer = asking.ask(
                self._under(infos[0]), asked, self.placeholder("image"), self.rate
            )
            if several := asking.as_several(answer, len(infos)):
                return texts, {**self._empty, several[0]: several[1]}
            self._together = False
        texts, found = [], {name: [none] for name, none in self._empty.items()}
        for info, item in zip(infos, items, strict=True):
            text, answer = asking.ask(
                self._under(info), [(info, item)], self.placeholder(info.kind), self.rate
            )
            name, media = asking.as_media(answer)
            texts += text
            found[name].append(media)
        return texts, {name: asking.joined(ones) for name, ones in found.items()}

    def token_types(self, input_ids: Tensor) -> dict[str, Tensor]:
        """What else forwards of this family want of each token, by name: for the `tokens` of a PackedBatch."""
        types = (
            self.processor.create_mm_token_type_ids([input_ids.tolist()])[0] if self._types else []
        )
        return {name: torch.tensor(types, dtype=torch.long) for name in self._types}

    def empty(self) -> dict[str, Media]:
        """The media of a sequence that has none."""
        return dict(self._empty)

    def _plan(self, info: Info) -> tuple[str, int]:
        if (
            info.kind == "audio"
        ):  # as many as there are hops at the extractor's rate; what is between changes nothing
            hop = getattr(self.processor.feature_extractor, "hop_length", 1)
            info = Info("audio", samples=-(-info.length(self.rate) // hop) * hop, rate=self.rate)
        if info not in self._plans:
            if len(self._plans) >= PLANS:
                self._plans.clear()
            self._plans[info] = self._plan_afresh(info)
        return self._plans[info]

    def _plan_afresh(self, info: Info) -> tuple[str, int]:
        """A size that the processor refuses is a bad row: others were tried out."""
        try:
            (text,), answer = self._ask_of_size(info)
        except (ValueError, ArithmeticError, RuntimeError) as error:
            who = type(self.processor).__name__
            raise BadRow(
                "refused", f"{who} refuses {info.kind} of this size: {error} ({info})"
            ) from None
        if not text:
            raise BadRow(
                "too_short", f"{info.kind} of {info.seconds:.3f} seconds becomes no token at all"
            )
        return text, asking.as_media(answer)[1].values.numel()

    def _ask_of_size(self, info: Info) -> tuple[list[str], dict[str, Any]]:
        """What would be made of such an item, from nothing but its size if the processor can do that."""
        processor = copy.copy(self._under(info))
        if info.kind != "audio":
            part = copy.copy(getattr(processor, PARTS[info.kind]))
            part.resample = 2  # bilinear: the filter has no say in sizes, and not all of them can do without data
            setattr(processor, PARTS[info.kind], part)
        blank = asking.blank(info, "meta" if self._blind[info.kind] else "cpu")
        return asking.ask(
            processor, [(info, blank)], self.placeholder(info.kind), self.rate, short=True
        )

    def _can_be_blind(self, info: Info, text: list[str]) -> bool:
        self._blind[info.kind] = info.kind != "audio"
        try:
            return self._ask_of_size(info)[0] == text
        except (RuntimeError, TypeError, ValueError):  # it looks into the data on the way
            return False

    def _under(self, info: Info) -> Any:
        """The processor under the item's own limits."""
        if info.min_pixels is None and info.max_pixels is None:
            return self.processor
        key = (info.kind, info.min_pixels, info.max_pixels)
        if key not in self._limited:
            if len(self._limited) >= PLANS:
                self._limited.clear()
            name = PARTS[info.kind]
            new, part = copy.copy(self.processor), copy.deepcopy(getattr(self.processor, name))
            most = most_pixels(part) or math.inf  # which a row cannot raise
            set_pixels(part, info.min_pixels, info.max_pixels and int(min(info.max_pixels, most)))
            setattr(new, name, part)
            self._limited[key] = new
        return self._limited[key]

    def _try_out(self) -> dict[str, Media]:
        """No items, in the shapes of this family.

        Refused are families whose items cannot lie in one tensor, or change with the items beside them.
        """
        who, found = type(self.processor).__name__, dict[str, Media]()
        for kind in self.kinds:
            infos = [Info(kind, 64, 48, 4, 2.0, 4, self.rate // 2, self.rate)]
            infos += [Info(kind, 96, 200, 4, 2.0, 4, self.rate, self.rate)]
            asked = [(info, asking.blank(info, "cpu")) for info in infos]
            tries = [asked[:1], asked[1:], asked]
            texts, answers = zip(
                *(asking.ask(self.processor, a, self.placeholder(kind), self.rate) for a in tries),
                strict=True,
            )
            if texts[0] + texts[1] != texts[2]:
                raise UserError(
                    f"{who} makes something else of two {kind}s than of each: it is not supported"
                )
            self._blind[kind] = self._can_be_blind(infos[0], texts[0])
            for name, media in map(asking.as_media, answers[:2]):
                none = media.select([])
                none = replace(
                    none, values=none.values.clone()
                )  # not a view of what it was, which would travel with it
                other = found.setdefault(name, none)
                shapes = [
                    {n: v.shape for n, v in {**one.fields, "": one.values}.items()}
                    for one in (none, other)
                ]
                if shapes[0] != shapes[1]:
                    differ = [list(map(tuple, some.values())) for some in shapes]
                    raise UserError(
                        f"{who} gives {kind}s of different sizes shapes that cannot be packed: {differ}"
                    )
        return found
