"""Speech in, text out: a Qwen2-Audio learns to write down what is said."""

from typing import Any

from mvp_engine.config import Section
from mvp_engine.engine import StepContext
from mvp_engine.kit import Answer, MLLMConfig, MLLMEngine

from .data import edits, prepare, words_of


class Speech(Section):
    folder: str  # where sounds, rows and processor are made, once
    sentences: int  # for training
    held_out: int  # of new sentences by known voices, and as many by new ones


class AudioConfig(MLLMConfig):
    speech: Speech | None = None  # made-up speech, and a small processor for it; None: rows and processor of your own


class AudioEngine(MLLMEngine):
    config_class = AudioConfig
    config: AudioConfig
    title = "What a Qwen2-Audio hears"

    @classmethod
    def make_processor(cls, config: Any) -> Any:
        speech = config.speech
        if speech is None:
            return super().make_processor(config)
        return prepare(speech.folder, speech.sentences, speech.held_out)

    def score(self, ctx: StepContext, name: str, answers: list[Answer]) -> None:
        """Word accuracy: one minus the word error rate, which counts words too many, too few and wrong."""
        pairs = [(words_of(one.written), words_of(one.expected)) for one in answers]
        words = sum(len(expected) for _, expected in pairs)
        ctx.log(f"word_accuracy_{name}", words - sum(edits(*pair) for pair in pairs), words)
        super().score(ctx, name, answers)
