"""For demos of speech: synthesis by eSpeak NG, a library of a few megabytes, and the word errors of a transcript."""

import ctypes
import ctypes.util
import importlib.util
from typing import Any

import numpy as np

from mvp_engine.errors import UserError

# Constants of its header, speak_lib.h.
AUDIO_OUTPUT_SYNCHRONOUS = 2
INITIALIZE_DONT_EXIT = 0x8000
CHARS_UTF8 = 1
POS_CHARACTER = 1
RATE = 1
PITCH = 3


def library() -> tuple[str, str | None]:
    """The library's file and the folder of its voices (None: the library's own default)."""
    if importlib.util.find_spec("espeakng_loader"):  # a wheel with the library and its voices
        import espeakng_loader

        return espeakng_loader.get_library_path(), espeakng_loader.get_data_path()
    name = ctypes.util.find_library("espeak-ng")
    if name:
        return name, None
    raise UserError(
        "synthetic speech needs eSpeak NG: pip install 'mvp-engine[demo]' (or apt install espeak-ng)"
    )


class Speaker:
    """A speech synthesizer. A process can have one: the library has global state."""

    def __init__(self) -> None:
        file, voices = library()
        self._lib = ctypes.CDLL(file)
        folder = None if voices is None else voices.encode()
        self.rate = int(
            self._lib.espeak_Initialize(AUDIO_OUTPUT_SYNCHRONOUS, 0, folder, INITIALIZE_DONT_EXIT)
        )
        if self.rate <= 0:
            raise UserError(
                f"eSpeak NG ({file}) cannot be started: is it complete? pip install 'mvp-engine[demo]'"
            )
        # Missing in version 1.50. Without it, the breath noise differs from call to call.
        if hasattr(self._lib, "espeak_ng_SetRandSeed"):
            self._lib.espeak_ng_SetRandSeed(ctypes.c_long(1))
        self._chunks: list[bytes] = []
        callback_type = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
        )
        # Referenced here, because the library calls it later.
        self._callback = callback_type(self._append)
        self._lib.espeak_SetSynthCallback(self._callback)

    def say(self, text: str, voice: str, speed: int, pitch: int) -> np.ndarray:
        """int16 samples at `rate`; `speed` in words per minute, `pitch` from 0 to 99."""
        self._chunks.clear()
        if self._lib.espeak_SetVoiceByName(voice.encode()):
            raise UserError(f"eSpeak NG has no voice {voice!r}")
        self._lib.espeak_SetParameter(RATE, speed, 0)
        self._lib.espeak_SetParameter(PITCH, pitch, 0)
        data = text.encode()
        size = ctypes.c_size_t(len(data) + 1)
        code = self._lib.espeak_Synth(data, size, 0, POS_CHARACTER, 0, CHARS_UTF8, None, None)
        if code or not self._chunks:
            raise UserError(f"eSpeak NG made no audio of {text!r} (code {code})")
        return np.frombuffer(b"".join(self._chunks), "<i2")

    def _append(self, samples: Any, count: int, _: Any) -> int:
        if samples and count > 0:
            self._chunks.append(ctypes.string_at(samples, 2 * count))
        return 0


def word_errors(written: list[str], expected: list[str]) -> int:
    """The Levenshtein distance: how many words must be inserted, deleted or replaced."""
    row = list(range(len(expected) + 1))
    for i, word in enumerate(written, 1):
        diagonal = row[0]
        row[0] = i
        for j, other in enumerate(expected, 1):
            cost = min(row[j] + 1, row[j - 1] + 1, diagonal + (word != other))
            diagonal = row[j]
            row[j] = cost
    return row[-1]
