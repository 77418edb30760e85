"""The task: transcribe speech. Sentences of a few words, spoken by several voices at several speeds.

The words alone decide whether a sentence is held out, so no held-out sentence is trained on, by any voice. Two kinds
are evaluated: new sentences by training voices, and new sentences by new voices.
"""

import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from mvp_engine.kit import build_once, load_processor
from mvp_engine.kit.data.read.media_source import require_package
from mvp_engine.kit.speech.demo import Speaker
from mvp_engine.kit.tiny_processors import train_tokenizer

WORDS = "zero one two three four five six seven eight nine red green blue yellow black white go stop left right up down"
QUESTION = "Write down what is said."
VOICES = ["en-us", "en-us+m3", "en-us+m7", "en-us+f2", "en-us+f4", "en-gb-x-rp", "en-gb-scotland+f1", "en-029+m1"]
NEW_VOICES = ["en-us+f3", "en-gb-x-rp+m2"]
# Ranges: from, to (exclusive).
LENGTHS = (1, 5)  # words
SPEEDS = (150, 221)  # words per minute
PITCHES = (30, 71)  # eSpeak's 0 to 99
# The model's config depends on these two.
SECONDS = 2  # every clip is padded to this length
MELS = 40  # bands of the spectrogram
AUDIO_TOKENS = ("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")


def prepare(folder: str, sentences: int, held_out: int) -> Any:
    """Build the folder if it is missing, and load its processor."""

    def build(target: Path) -> None:
        (target / "sounds").mkdir()
        speaker = Speaker()
        _write_rows(target, "train", VOICES, sentences, speaker)
        _write_rows(target, "eval_sentences", VOICES, held_out, speaker)
        _write_rows(target, "eval_voices", NEW_VOICES, held_out, speaker)
        make_processor().save_pretrained(target / "processor")

    parameters = {"sentences": sentences, "held_out": held_out, "version": 1}
    return load_processor(build_once(folder, parameters, build, "speech.folder") / "processor")


def _write_rows(folder: Path, name: str, voices: list[str], count: int, speaker: Speaker) -> None:
    soundfile = require_package("soundfile", "speech")
    random = np.random.default_rng(zlib.crc32(name.encode()))
    with (folder / f"{name}.jsonl").open("w") as rows:
        for i in range(count):
            text = sentence(random, held_out=name != "train")
            speed = int(random.integers(*SPEEDS))
            pitch = int(random.integers(*PITCHES))
            voice = voices[random.integers(len(voices))]
            file = f"sounds/{name}_{i:05d}.flac"
            soundfile.write(folder / file, speaker.say(text, voice, speed, pitch), speaker.rate)
            rows.write(json.dumps(_row(file, text)) + "\n")


def sentence(random: np.random.Generator, *, held_out: bool) -> str:
    """Words in any order. Single words are for training; one in ten of the longer sentences is held out."""
    while True:
        words = random.choice(WORDS.split(), size=random.integers(*LENGTHS)).tolist()
        text = " ".join(words)
        if (len(words) > 1 and zlib.crc32(text.encode()) % 10 == 0) == held_out:
            return text


def _row(audio: str, text: str) -> dict[str, Any]:
    content = [{"type": "audio", "audio": audio}, {"type": "text", "text": QUESTION}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": text}]}


def make_processor() -> Any:
    """Qwen2-Audio's processor with a few hundred tokens: bytes, and the words of this task."""
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    # Each word twice: after a space, and at the beginning of an answer.
    first_words = "\n".join(WORDS.split())
    texts = [f"user\n{QUESTION} assistant\n {WORDS}\n{first_words}"] * 2
    tokenizer = train_tokenizer(texts, 400, AUDIO_TOKENS, audio="<|audio_bos|><|AUDIO|><|audio_eos|>")
    feature_extractor = WhisperFeatureExtractor(feature_size=MELS, chunk_length=SECONDS)
    return Qwen2AudioProcessor(feature_extractor, tokenizer, tokenizer.chat_template)


def words_of(text: str) -> list[str]:
    """The words of a transcript, in lower case and without punctuation."""
    return re.findall(r"[\w']+", text.lower())
