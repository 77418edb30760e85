"""Speech: models that answer aloud (Qwen3-Omni's talker, CSM), their data, loss, codecs and generation."""

from typing import TYPE_CHECKING

from mvp_engine.imports import lazy_exports

if TYPE_CHECKING:
    from mvp_engine.kit.speech.codec import Codec, ResidualKMeans, open_codec
    from mvp_engine.kit.speech.csm import CsmModel
    from mvp_engine.kit.speech.engine import SpeechEngine, SpeechLossKit, SpokenAnswer
    from mvp_engine.kit.speech.generate import Player, Sound, speak
    from mvp_engine.kit.speech.omni_model import OmniModel
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
    "SpeechEngine",
    "SpeechLoss",
    "SpeechLossKit",
    "SpokenAnswer",
    "open_codec",
    "speak",
]
