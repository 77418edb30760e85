"""Speech from text by eSpeak NG, a synthesizer of a few megabytes: through its library, in this process."""

import ctypes
import ctypes.util
import importlib.util
from typing import Any

import numpy as np

from mvp_engine.errors import UserError

SYNCHRONOUS, NO_EXIT, UTF8, CHARACTERS, SPEED, PITCH = 2, 0x8000, 1, 1, 1, 3  # of its header, speak_lib.h


def library() -> tuple[str, str | None]:
    """The library's file and the folder of its voices (None: where the library itself looks for them)."""
    if importlib.util.find_spec("espeakng_loader"):  # a wheel that is nothing but the library and its voices
        import espeakng_loader

        return espeakng_loader.get_library_path(), espeakng_loader.get_data_path()
    if name := ctypes.util.find_library("espeak-ng"):
        return name, None
    raise UserError("this recipe's speech is made by eSpeak NG: pip install espeakng-loader (or apt install espeak-ng)")


class Speaker:
    """One in a process: the library has one state."""

    def __init__(self) -> None:
        file, voices = library()
        self._lib = ctypes.CDLL(file)
        folder = None if voices is None else voices.encode()
        self.rate = int(self._lib.espeak_Initialize(SYNCHRONOUS, 0, folder, NO_EXIT))
        if self.rate <= 0:
            raise UserError(f"eSpeak NG ({file}) cannot be started: is it whole? pip install espeakng-loader")
        if hasattr(
            self._lib, "espeak_ng_SetRandSeed"
        ):  # not in 1.50; without it, the noise in breath differs each time
            self._lib.espeak_ng_SetRandSeed(ctypes.c_long(1))
        self._heard: list[bytes] = []
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        self._hear = kind(self._take)  # kept, since the library calls it
        self._lib.espeak_SetSynthCallback(self._hear)

    def say(self, text: str, voice: str, speed: int, pitch: int) -> np.ndarray:
        """A wave of int16 at `rate`: `speed` in words a minute, `pitch` from 0 to 99."""
        self._heard.clear()
        if self._lib.espeak_SetVoiceByName(voice.encode()):
            raise UserError(f"eSpeak NG has no voice {voice!r}")
        self._lib.espeak_SetParameter(SPEED, speed, 0)
        self._lib.espeak_SetParameter(PITCH, pitch, 0)
        data = text.encode()
        failed = self._lib.espeak_Synth(data, ctypes.c_size_t(len(data) + 1), 0, CHARACTERS, 0, UTF8, None, None)
        if failed or not self._heard:
            raise UserError(f"eSpeak NG said nothing for {text!r} (code {failed})")
        return np.frombuffer(b"".join(self._heard), "<i2")

    def _take(self, wave: Any, samples: int, _: Any) -> int:
        if wave and samples > 0:
            self._heard.append(ctypes.string_at(wave, 2 * samples))
        return 0
