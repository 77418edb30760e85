"""The task: write down what is said. Sentences of a few words, spoken by several voices, quickly and slowly.

Which sentences are held out is decided by their words alone, so none of them is ever trained on, by whomever it is
spoken. Two kinds are kept apart: new sentences by voices of the training, and by voices that are new as well.
"""

import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from mvp_engine.kit import build_once, load_processor
from mvp_engine.kit.data.read.media_source import require_package
from mvp_engine.kit.tiny_processors import train_tokenizer

from .speech import Speaker

WORDS = "zero one two three four five six seven eight nine red green blue yellow black white go stop left right up down"
QUESTION = "Write down what is said."
VOICES = ["en-us", "en-us+m3", "en-us+m7", "en-us+f2", "en-us+f4", "en-gb-x-rp", "en-gb-scotland+f1", "en-029+m1"]
NEW_VOICES = ["en-us+f3", "en-gb-x-rp+m2"]
LENGTHS, SPEEDS, PITCHES = (1, 5), (150, 221), (30, 71)  # words, words a minute, eSpeak's 0 to 99: from, to (exclusive)
SECONDS, MELS = 2, 40  # what every sound is padded to, and bands of its spectrogram; the config's sizes follow
HEARD = ("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")


def prepare(folder: str, sentences: int, held_out: int) -> Any:
    """Make the folder, if it is not there; gives its processor."""

    def make(beside: Path) -> None:
        (beside / "sounds").mkdir()
        speaker = Speaker()
        for name, voices, count in (
            ("train", VOICES, sentences),
            ("eval_sentences", VOICES, held_out),
            ("eval_voices", NEW_VOICES, held_out),
        ):
            _write_rows(beside, name, voices, count, speaker)
        make_processor().save_pretrained(beside / "processor")

    about = {"sentences": sentences, "held_out": held_out, "version": 1}
    return load_processor(build_once(folder, about, make, "speech.folder") / "processor")


def _write_rows(folder: Path, name: str, voices: list[str], count: int, speaker: Speaker) -> None:
    soundfile = require_package("soundfile", "speech")
    random = np.random.default_rng(zlib.crc32(name.encode()))
    with (folder / f"{name}.jsonl").open("w") as rows:
        for i in range(count):
            text = sentence(random, held_out=name != "train")
            speed, pitch = int(random.integers(*SPEEDS)), int(random.integers(*PITCHES))
            wave = speaker.say(text, voices[random.integers(len(voices))], speed, pitch)
            sound = f"sounds/{name}_{i:05d}.flac"
            soundfile.write(folder / sound, wave, speaker.rate)
            rows.write(json.dumps(_row(sound, text)) + "\n")


def sentence(random: np.random.Generator, *, held_out: bool) -> str:
    """Words in any order. Single words are for training; of longer sentences, one in ten is held out."""
    while True:
        words = random.choice(WORDS.split(), size=random.integers(*LENGTHS)).tolist()
        text = " ".join(words)
        if (len(words) > 1 and zlib.crc32(text.encode()) % 10 == 0) == held_out:
            return text


def _row(sound: str, text: str) -> dict[str, Any]:
    content = [{"type": "audio", "audio": sound}, {"type": "text", "text": QUESTION}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": text}]}


def make_processor() -> Any:
    """Qwen2-Audio's own classes around a vocabulary of a few hundred tokens: bytes, and the words of this task."""
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    first = "\n".join(WORDS.split())  # a word at the beginning of an answer, and one behind a space
    texts = [f"user\n{QUESTION} assistant\n {WORDS}\n{first}"] * 2
    tokenizer = train_tokenizer(texts, 400, HEARD, audio="<|audio_bos|><|AUDIO|><|audio_eos|>")
    ears = WhisperFeatureExtractor(feature_size=MELS, chunk_length=SECONDS)
    return Qwen2AudioProcessor(ears, tokenizer, tokenizer.chat_template)


def words_of(text: str) -> list[str]:
    """What counts: not upper and lower case, not punctuation."""
    return re.findall(r"[\w']+", text.lower())


def edits(written: list[str], expected: list[str]) -> int:
    """How many words have to be put in, taken out or replaced (Levenshtein's distance)."""
    row = list(range(len(expected) + 1))
    for i, word in enumerate(written, 1):
        above, row[0] = row[0], i
        for j, other in enumerate(expected, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (word != other))
    return row[-1]
