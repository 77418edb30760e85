"""Speech: models that answer aloud (Qwen3-Omni's talker, CSM), their data, loss, codecs and generation."""

from typing import TYPE_CHECKING

from mvp_engine.imports import lazy_exports

if TYPE_CHECKING:
    from mvp_engine.kit.speech.codec import Codec, ResidualKMeans, open_codec
    from mvp_engine.kit.speech.csm import CsmModel
    from mvp_engine.kit.speech.generate import (
        Player,
        Sound,
        SpokenAnswer,
        save_answers,
        speak,
        speak_completions,
    )
    from mvp_engine.kit.speech.omni_model import OmniModel, trains_text
    from mvp_engine.kit.speech.rows import num_positions, num_speech_frames, num_speech_labels
    from mvp_engine.kit.speech.settings import SpeechConfig, SpeechLoss
else:  # sections of configs are here too, and `mvp config show` imports no torch
    __getattr__ = lazy_exports(__name__)


__all__ = [
    "Codec",
    "CsmModel",
    "OmniModel",
    "Player",
    "ResidualKMeans",
    "Sound",
    "SpeechConfig",
    "SpeechLoss",
    "SpokenAnswer",
    "num_positions",
    "num_speech_frames",
    "num_speech_labels",
    "open_codec",
    "save_answers",
    "speak",
    "speak_completions",
    "trains_text",
]
