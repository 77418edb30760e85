"""The config keys of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from mvp_engine.config import Section
from mvp_engine.kit.speech import SpeechConfig, SpeechLoss


class Spoken(Section):
    """Synthetic speech."""

    folder: str
    """Audio files, rows, codec and tokenizer are built into it, once."""
    sentences: int
    """Training sentences."""
    held_out: int
    """Held-out sentences."""


class OmniConfig(SpeechConfig):
    spoken: Spoken | None = None  # synthetic speech with a small codec; null: rows, processor and codec of your own
    speech_loss: SpeechLoss = SpeechLoss()
    """The loss of speech, next to that of text."""
