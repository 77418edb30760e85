"""The task: say what is asked for, in text and aloud. "say red seven stop" is answered with these words, spoken.

One in ten sentences is held out, chosen by its words alone, so no held-out sentence is ever trained on, by any speaker.
The codec is fitted to the first sounds of the training.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from mvp_engine.kit import build_once, load_processor
from mvp_engine.kit.data.read.media_source import require_package
from mvp_engine.kit.speech import ResidualKMeans
from mvp_engine.kit.speech.demo import Speaker
from mvp_engine.kit.tiny_processors import word_tokenizer

WORDS = "zero one two three four five six seven eight nine red green blue yellow black white go stop left right up down"
# Speaker -> eSpeak's voice. The names are those of the model's config (talker_config.speaker_id).
VOICES = {"ann": "en-us+f2", "bob": "en-us"}
MAX_WORDS = 4
SPEED = 180  # words per minute
PITCH = 50  # eSpeak's 0 to 99
SILENCE = 0.005  # quieter samples at both ends are cut off
# Special tokens of the talker's text channel. With the tokenizer's own they come first: ids 3, 4 and 5.
TTS_TOKENS = ("<tts_pad>", "<tts_bos>", "<tts_eos>")
# The model's config depends on these.
BOOKS = 4
CODES = 128  # of a codebook
FITTED_SOUNDS = 500


def prepare(folder: str, sentences: int, held_out: int) -> Any:
    """Build the folder if it is missing, and load its tokenizer."""

    def build(target: Path) -> None:
        (target / "sounds").mkdir()
        speaker = Speaker()
        sounds = _write_rows(target, "train", sentences, speaker)
        _write_rows(target, "eval", held_out, speaker)
        codec = ResidualKMeans.fit(sounds[:FITTED_SOUNDS], speaker.rate, books=BOOKS, size=CODES)
        codec.save(target / "codec")
        make_tokenizer().save_pretrained(target / "tokenizer")

    parameters = {"sentences": sentences, "held_out": held_out, "version": 1}
    return load_processor(build_once(folder, parameters, build, "spoken.folder") / "tokenizer")


def make_tokenizer() -> Any:
    return word_tokenizer(["say", *WORDS.split()], TTS_TOKENS)


def _write_rows(folder: Path, name: str, count: int, speaker: Speaker) -> list[np.ndarray]:
    soundfile = require_package("soundfile", "speech")
    random = np.random.default_rng(zlib.crc32(name.encode()))
    sounds = []
    with (folder / f"{name}.jsonl").open("w") as rows:
        for i in range(count):
            text = sentence(random, held_out=name != "train")
            voice = list(VOICES)[random.integers(len(VOICES))]
            waveform = say(speaker, text, voice)
            file = f"sounds/{name}_{i:05d}.flac"
            soundfile.write(folder / file, waveform, speaker.rate)
            rows.write(json.dumps(_row(text, file, voice)) + "\n")
            sounds.append(waveform)
    return sounds


def sentence(random: np.random.Generator, *, held_out: bool) -> str:
    """Words in any order. Single words are for training; one in ten of the longer sentences is held out."""
    while True:
        words = random.choice(WORDS.split(), size=random.integers(1, MAX_WORDS + 1)).tolist()
        text = " ".join(words)
        if (len(words) > 1 and zlib.crc32(text.encode()) % 10 == 0) == held_out:
            return text


def say(speaker: Speaker, text: str, voice: str) -> np.ndarray:
    """The waveform of a text, without the silence around it."""
    waveform = speaker.say(text, VOICES[voice], SPEED, PITCH).astype(np.float32) / 2**15
    loud = np.flatnonzero(np.abs(waveform) > SILENCE)
    margin = speaker.rate // 100
    return waveform[max(0, loud[0] - margin) : loud[-1] + 2 * margin]


def _row(text: str, audio: str, speaker: str) -> dict[str, Any]:
    answer = [{"type": "text", "text": text}, {"type": "audio", "audio": audio, "speaker": speaker}]
    return {"messages": [{"role": "user", "content": f"say {text}"}, {"role": "assistant", "content": answer}]}
