"""Speech of a model: codes by generation, and a waveform by the model's vocoder or by a codec.

player = Player.of_folder("Qwen/Qwen3-Omni-30B-A3B-Instruct")   # or Player.of_codec(open_codec(FOLDER))
(sound,) = speak(model, [prompt], player)
sound.save(Path("answer.wav"))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.files import atomic_path
from mvp_engine.kit.decoding import with_completion
from mvp_engine.kit.examples import wav_file
from mvp_engine.kit.generation import Prompt
from mvp_engine.kit.speech.codec import Codec
from mvp_engine.kit.speech.generate import Spoken, generate_codes, load_vocoder
from mvp_engine.kit.speech.layout import FRAME_COUNTS, SPEECH
from mvp_engine.kit.speech.protocol import SpeechProtocol
from mvp_engine.kit.speech.settings import SpeechGeneration

TOGETHER = 64  # prompts that are spoken in one batch


@dataclass(frozen=True)
class Sound:
    """Generated speech."""

    codes: Tensor  # (frames, books)
    waveform: np.ndarray  # float32
    sampling_rate: int
    ended: bool  # by the model itself, not by the limit of frames
    speaker: str | None = None  # None: the model's first one

    @property
    def seconds(self) -> float:
        return len(self.waveform) / self.sampling_rate

    def save(self, file: Path) -> None:
        """Write a WAV file of 16 bits."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(file) as temporary:
            temporary.write_bytes(wav_file(self.waveform, self.sampling_rate))


@dataclass(frozen=True)
class Player:
    """Codes (frames, books) to a waveform."""

    play: Callable[[Tensor], np.ndarray]
    sampling_rate: int
    books: int
    codebook_size: int
    name: str = "the codec"

    @classmethod
    def of_codec(cls, codec: Codec) -> Player:
        def play(codes: Tensor) -> np.ndarray:
            return codec.decode(codes.cpu().numpy())

        return cls(play, codec.sampling_rate, codec.books, codec.codebook_size)

    @classmethod
    def of_folder(cls, folder: str | Path) -> Player:
        """The vocoder of an Omni folder, or the codec of a CSM folder."""
        vocoder: Any = load_vocoder(folder)

        def play(codes: Tensor) -> np.ndarray:
            with torch.inference_mode():
                return vocoder(codes).float().cpu().numpy()

        return cls(play, vocoder.sampling_rate, vocoder.books, vocoder.codebook_size, "the vocoder")

    def check(self, protocol: SpeechProtocol) -> None:
        """Raise if a talker speaks codes that cannot be played."""
        if self.books < protocol.books or self.codebook_size < protocol.codec_size:
            raise UserError(
                f"{self.name} has {self.books} codebooks of {self.codebook_size} entries, and the talker speaks "
                f"{protocol.books} of {protocol.codec_size}: play with the codec of the model's training "
                "(mllm.speech.codec, mvp chat --codec)"
            )


def speak(
    model: Any,
    prompts: Sequence[PackedBatch],
    player: Player,
    speakers: Sequence[str | None] | None = None,
    settings: SpeechGeneration | None = None,
) -> list[Sound]:
    """The sound of each prompt: one sequence that ends with the text of the assistant's turn, and its media.

    `model` is an OmniModel or a CsmModel that is not sharded. CSM also reads the sounds of earlier turns of a prompt.
    """
    settings = settings or SpeechGeneration()
    protocol = SpeechProtocol.for_config(model.whole.config)
    assert protocol is not None, "a model that speaks"
    player.check(protocol)
    names = list(speakers or [None] * len(prompts))
    found: list[Spoken] = []
    for first in range(0, len(prompts), TOGETHER):
        some = list(prompts[first : first + TOGETHER])
        if not protocol.reads_answers:
            some = [prompt.without_targets() for prompt in some]
        found += generate_codes(
            model,
            some,
            names[first : first + TOGETHER],
            max_frames=settings.max_frames,
            do_sample=settings.temperature > 0,
            temperature=settings.temperature or 1.0,
            repetition_penalty=settings.repetition_penalty,
        )
    sounds = []
    for spoken, name in zip(found, names, strict=True):
        waveform = np.zeros(0, np.float32)
        if len(spoken.codes):
            waveform = np.asarray(player.play(spoken.codes), np.float32)
        sounds.append(Sound(spoken.codes.cpu(), waveform, player.sampling_rate, spoken.ended, name))
    return sounds


def speak_completions(
    model: Any,
    completions: Sequence[tuple[Prompt, list[int]]],
    player: Player,
    protocol: SpeechProtocol,
    settings: SpeechGeneration,
) -> list[Sound]:
    """The sounds of the completions of rows, each by the speaker of the row's own last sound, if it has one.

    A completion without text has an empty sound that did not end.
    """
    speakers = [_speaker(prompt.batch, protocol) for prompt, _ in completions]
    nothing = torch.zeros(0, protocol.books, dtype=torch.long)
    silence = Sound(nothing, np.zeros(0, np.float32), player.sampling_rate, ended=False)
    sounds = [replace(silence, speaker=speaker) for speaker in speakers]
    texts = [spoken_tokens(tokens, protocol) for _, tokens in completions]
    with_text = [index for index, text in enumerate(texts) if text]
    prompts = [with_completion(completions[i][0].batch, None, texts[i]) for i in with_text]
    found = speak(model, prompts, player, [speakers[i] for i in with_text], settings)
    for index, sound in zip(with_text, found, strict=True):
        sounds[index] = sound
    return sounds


def spoken_tokens(tokens: Sequence[int], protocol: SpeechProtocol) -> list[int]:
    """The text of a completion: its tokens up to the first that ends or starts a turn."""
    turns = {protocol.im_start, protocol.im_end}
    return list(takewhile(lambda token: token not in turns, tokens))


def _speaker(prompt: PackedBatch, protocol: SpeechProtocol) -> str | None:
    speech = prompt.media.get(SPEECH)
    if speech is None or not len(speech.row_counts):
        return None
    rows = int(speech.row_counts[-1])
    return protocol.speaker_of(speech.values[-rows:], int(speech.fields[FRAME_COUNTS][-1]))
