"""SpeechProtocol: how a talker reads text and codes, as rows of numbers that loader workers plan.

Qwen3-Omni's talker reads the user turns, a header of nine positions, and then the frames of speech: at each the sum of
the embeddings of a frame's codes and of *one token of text*, until the text ends. It has no forward for training; these
rows are what `generate` would feed step by step (`tests/kit/speech/test_talker.py` compares them).

A protocol holds numbers of a config alone: it is pickled to workers, and needs no weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mvp_engine.data.batch import IGNORE, Media
from mvp_engine.errors import UserError
from mvp_engine.kit.speech.rows import (
    CODES,
    FIRST_CODE,
    FRAME_COUNTS,
    LABEL,
    POSITION_UNITS,
    POSITIONS,
    SOURCE,
    SOURCE_COUNTS,
    TEXT,
    TURN_COUNTS,
)

ROLE_TOKENS = 3  # <|im_start|>, the role, a line break
HEADER = 9  # role tokens, four pads, the begin of speech, the first token of the text
SPEAKER_FROM_FRAMES = 3  # rows from the speaker's to the first frame
VOCODER_RATE = 24_000  # of Qwen3-Omni; its config does not say


class SpeechError(Exception):
    """A turn that cannot be spoken: a reason code such as "speech_text", and a detail."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class SpokenTurn(NamedTuple):
    """The sound of one assistant turn."""

    turn: int  # counts the assistant turns of the row, spoken or not
    codes: Tensor  # (frames, books)
    speaker: str | None = None  # None: the first one of the model
    ends: bool = True  # False: the sound is cut off, so its end is not learnt
    learnt: bool = True  # False: what later turns read, without a loss


class _Turn(NamedTuple):
    """Where the tokens of an assistant turn are: its role tokens from `start`, its text from `text` to `end`."""

    start: int
    text: int
    end: int


@dataclass(frozen=True)
class SpeechProtocol:
    """Qwen3-Omni's protocol."""

    books: int
    codebook_size: int  # codes that the talker reads
    codec_size: int  # codes of its codec
    speakers: dict[str, int]  # lower-case name -> codec id
    frame_rate: float | None
    sampling_rate: int | None
    im_start: int
    im_end: int
    user: int
    assistant: int
    tts: tuple[int, int, int]  # begin, end, pad: tokens of the text channel
    media_tokens: tuple[int, ...]
    # Four codec ids before the speaker and two after; the speaker is None's place.
    header_codes: tuple[int, ...]
    codec_eos: int
    name: str = field(default="")
    reads_answers = False  # whether earlier answers are read as sounds

    @classmethod
    def for_config(cls, config: Any) -> SpeechProtocol | None:
        """The protocol of a model's config; None if it has no talker."""
        model_type = getattr(config, "model_type", "")
        if model_type.startswith("qwen2_5_omni") and getattr(config, "talker_config", None):
            raise UserError(
                "data.speech: Qwen2.5-Omni's codec encoder was never released, so nobody can make codes of speech for "
                "its talker: fine-tune its thinker (model.type=language_model), or use Qwen3-Omni"
            )
        if model_type == "csm":
            from mvp_engine.kit.speech.csm import CsmProtocol

            return CsmProtocol.of(config)
        if model_type != "qwen3_omni_moe" or not getattr(config, "enable_audio_output", True):
            return None
        talker = config.talker_config
        thinker = config.thinker_config
        speakers = {str(name).lower(): int(id) for name, id in (talker.speaker_id or {}).items()}
        if not speakers:
            raise UserError(
                "the talker's config has no speaker: set talker_config.speaker_id: {NAME: a free codec id}"
            )
        vocoder = config.code2wav_config
        upsampling = math.prod(vocoder.upsample_rates) * math.prod(vocoder.upsampling_ratios)
        return cls(
            books=talker.num_code_groups,
            codebook_size=talker.code_predictor_config.vocab_size,
            codec_size=talker.code_predictor_config.vocab_size,
            speakers=speakers,
            frame_rate=VOCODER_RATE / upsampling,
            sampling_rate=VOCODER_RATE,
            im_start=config.im_start_token_id,
            im_end=config.im_end_token_id,
            user=config.user_token_id,
            assistant=config.assistant_token_id,
            tts=(config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id),
            media_tokens=(thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id),
            header_codes=(
                talker.codec_nothink_id,
                talker.codec_think_bos_id,
                talker.codec_think_eos_id,
                talker.codec_pad_id,
                talker.codec_bos_id,
            ),
            codec_eos=talker.codec_eos_token_id,
            name=model_type,
        )

    def empty(self) -> Media:
        """No spoken turn."""
        values = torch.zeros(0, FIRST_CODE + self.books, dtype=torch.long)
        nothing = torch.zeros(0, dtype=torch.long)
        names = (FRAME_COUNTS, TURN_COUNTS, SOURCE_COUNTS)
        return Media(
            values,
            nothing,
            nothing.clone(),
            {name: nothing.clone() for name in names},
            label_column=LABEL,
        )

    def num_answers(self, ids_T: Tensor) -> int:
        """The assistant turns of a sequence, spoken or not."""
        starts = self._segments(ids_T)[:-1]
        return sum(self._role(ids_T, start) == self.assistant for start in starts)

    def num_text_tokens(self, ids_T: Tensor, turn: int) -> int:
        """The tokens of an answer that are spoken."""
        place = self._turn(ids_T, self._segments(ids_T), turn)
        return place.end - place.text

    def num_rows(self, ids_T: Tensor, turns: Sequence[tuple[int, int]]) -> int:
        """The talker positions of (turn, frames) pairs of a sequence."""
        segments = self._segments(ids_T)
        total = 0
        for turn, frames in turns:
            start = self._turn(ids_T, segments, turn).start
            total += len(self._user_tokens(ids_T, segments, start)) + HEADER + frames
        return total

    def plan(self, ids_T: Tensor, position_ids: Tensor, turns: Sequence[SpokenTurn]) -> Media:
        """The spoken turns of one sequence as media, one item each."""
        if not turns:
            return self.empty()
        segments = self._segments(ids_T)
        positions_3T = position_ids.expand(3, -1) if position_ids.ndim == 1 else position_ids[-3:]
        items = [self._item(ids_T, positions_3T, segments, turn) for turn in turns]
        return media_of(items, torch.ones(len(items), dtype=torch.long))

    def speaker_of(self, rows: Tensor, num_frames: int) -> str | None:
        """The speaker of one item."""
        id = int(rows[-num_frames - SPEAKER_FROM_FRAMES, FIRST_CODE])
        return next((name for name, known in self.speakers.items() if known == id), None)

    def _item(
        self, ids_T: Tensor, positions_3T: Tensor, segments: list[int], spoken: SpokenTurn
    ) -> Tensor:
        turn = self._turn(ids_T, segments, spoken.turn)
        users = self._user_tokens(ids_T, segments, turn.start)
        codes_FK = self._checked_codes(spoken)
        num_frames = len(codes_FK)
        bos, eos, pad = self.tts
        text = ids_T[turn.text : turn.end]
        rows = torch.full((len(users) + HEADER + num_frames, FIRST_CODE + self.books), -1)
        # The text channel: one token per frame, then its end, then pads.
        rest = torch.cat([text[1:], torch.tensor([eos]), torch.full((num_frames,), pad)])
        role = ids_T[turn.start : turn.start + ROLE_TOKENS]
        header = torch.cat([role, torch.tensor([pad] * 4 + [bos]), text[:1]])
        rows[:, TEXT] = torch.cat([ids_T[users], header, rest[:num_frames]])
        # The codec channel: nothing for the role, special ids, then the frames.
        rows[len(users) + ROLE_TOKENS : -num_frames, FIRST_CODE] = self._header_ids(spoken.speaker)
        rows[-num_frames:, CODES] = codes_FK
        # The row before a frame predicts its first code.
        rows[:, LABEL] = IGNORE
        rows[-num_frames - 1 : -1, LABEL] = codes_FK[:, 0]
        rows[-1, LABEL] = self.codec_eos if spoken.ends else IGNORE
        is_media = torch.isin(ids_T[users], torch.tensor(self.media_tokens))
        rows[: len(users), SOURCE] = torch.where(is_media, users, -1)
        positions_3R = _positions(positions_3T, users, segments, HEADER + num_frames)
        rows[:, POSITIONS] = (positions_3R.T * POSITION_UNITS).round().long()
        return rows

    def _header_ids(self, speaker: str | None) -> Tensor:
        name = next(iter(self.speakers)) if speaker is None else speaker.lower()
        if name not in self.speakers:
            raise SpeechError(
                "speech_speaker",
                f"the model has no speaker {speaker!r}; it has {', '.join(self.speakers)} (talker_config.speaker_id)",
            )
        before = self.header_codes[:3]
        after = self.header_codes[3:]
        return torch.tensor([*before, self.speakers[name], *after])

    def _checked_codes(self, spoken: SpokenTurn) -> Tensor:
        codes_FK = spoken.codes.long()
        if codes_FK.ndim != 2 or codes_FK.shape[1] != self.books or not len(codes_FK):
            shape = tuple(codes_FK.shape)
            raise SpeechError(
                "speech_codes", f"codes of shape {shape}, wanted (frames, {self.books})"
            )
        low, high = int(codes_FK.min()), int(codes_FK.max())
        if low < 0 or high >= self.codebook_size:
            raise SpeechError(
                "speech_codes",
                f"codes are {low} to {high}; the codebooks have 0 to {self.codebook_size - 1}",
            )
        return codes_FK

    def _segments(self, ids_T: Tensor) -> list[int]:
        """The first token of each turn, whatever its role, and the end of the sequence."""
        return [*(ids_T == self.im_start).nonzero()[:, 0].tolist(), len(ids_T)]

    def _turn(self, ids_T: Tensor, segments: list[int], turn: int) -> _Turn:
        """Where the tokens of an assistant turn are."""
        starts = [start for start in segments[:-1] if self._role(ids_T, start) == self.assistant]
        if turn >= len(starts):
            raise SpeechError(
                "speech_turn",
                f"answer {turn} is not in the tokens of the row, which have {len(starts)} answers",
            )
        start = starts[turn]
        first = start + ROLE_TOKENS
        after = segments[segments.index(start) + 1]
        stops = (ids_T[first:after] == self.im_end).nonzero()[:, 0]
        end = first + int(stops[0]) if len(stops) else after
        if end <= first:
            raise SpeechError("speech_text", f"answer {turn} has no text that could be spoken")
        return _Turn(start, first, end)

    def _user_tokens(self, ids_T: Tensor, segments: list[int], before: int) -> Tensor:
        """The tokens of the user turns before token `before`."""
        found = [torch.zeros(0, dtype=torch.long)]
        for start, end in itertools.pairwise(segments):
            if end <= before and self._role(ids_T, start) == self.user:
                found.append(torch.arange(start, end))
        return torch.cat(found)

    def _role(self, ids_T: Tensor, start: int) -> int:
        return int(ids_T[start + 1]) if start + 1 < len(ids_T) else -1


def media_of(items: list[Tensor], turns: Tensor) -> Media:
    """The rows of the talker's sequences of one row of the data; `turns`: those spoken in each."""
    counts = torch.tensor([len(item) for item in items])
    frames = torch.stack([(item[:, -1] >= 0).sum() for item in items])
    owners = torch.zeros(len(items), dtype=torch.long)
    sources = torch.stack([(item[:, SOURCE] >= 0).sum() for item in items])
    fields = {FRAME_COUNTS: frames, TURN_COUNTS: turns, SOURCE_COUNTS: sources}
    return Media(torch.cat(items), counts, owners, fields, label_column=LABEL)


def _positions(positions_3T: Tensor, users: Tensor, segments: list[int], after: int) -> Tensor:
    """(3, rows): the user turns with the language model's positions, moved together, and `after` text positions."""
    found = []
    first = 0.0
    taken = set(users.tolist())
    for start, end in itertools.pairwise(segments):
        if start not in taken:
            continue
        moved = positions_3T[:, start:end].double() - positions_3T[:, start : start + 1] + first
        found.append(moved)
        first = float(moved.max()) + 1
    found.append((torch.arange(after, dtype=torch.double) + first).expand(3, -1))
    return torch.cat(found, dim=1)


def check_talker(config: Any) -> None:
    """Raise `UserError` for a config without a talker that can be trained, or one whose sizes do not fit."""
    model_type = config.model_type
    if model_type.startswith("qwen2_5_omni"):
        raise UserError(
            f"model.type=omni_model: the talker of {model_type} cannot be trained. The encoder of its codec was never "
            "released, so there are no codes to learn from. Train the thinker: model.type=language_model"
        )
    if model_type != "qwen3_omni_moe":
        raise UserError(
            f"model.type=omni_model is for models with a talker (qwen3_omni_moe, csm), not for {model_type}: set "
            "model.type=language_model"
        )
    if not config.enable_audio_output:
        raise UserError(
            "model.type=omni_model: enable_audio_output of the model's config is false, so the folder has no talker. "
            "Set model.type=language_model"
        )
    talker = config.talker_config
    predictor = talker.code_predictor_config
    vocoder = config.code2wav_config
    same = {
        "talker_config.num_code_groups": talker.num_code_groups,
        "talker_config.code_predictor_config.num_code_groups": predictor.num_code_groups,
        "code2wav_config.num_quantizers": vocoder.num_quantizers,
    }
    _check_equal(same, "the number of codebooks")
    same = {
        "talker_config.text_config.hidden_size": talker.text_config.hidden_size,
        "talker_config.code_predictor_config.hidden_size": predictor.hidden_size,
    }
    _check_equal(same, "the hidden size of the talker")
    same = {
        "thinker_config.text_config.hidden_size": config.thinker_config.text_config.hidden_size,
        "talker_config.thinker_hidden_size": talker.thinker_hidden_size,
    }
    _check_equal(same, "the hidden size of the thinker")
    if vocoder.codebook_size < predictor.vocab_size:
        raise UserError(
            f"model.config.code2wav_config.codebook_size={vocoder.codebook_size}: the talker speaks codes up to "
            f"{predictor.vocab_size - 1} (talker_config.code_predictor_config.vocab_size), which the vocoder lacks"
        )
    layers = config.thinker_config.text_config.num_hidden_layers
    if not 0 < talker.accept_hidden_layer <= layers:
        raise UserError(
            f"model.config.talker_config.accept_hidden_layer={talker.accept_hidden_layer}: the thinker has {layers} "
            "layers, and the talker reads media from the output of one of them"
        )


def _check_equal(values: dict[str, int], what: str) -> None:
    if len(set(values.values())) > 1:
        listed = ", ".join(f"model.config.{name}={value}" for name, value in values.items())
        raise UserError(f"{what} must be the same: {listed}")
