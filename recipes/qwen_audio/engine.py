"""Speech recognition: a Qwen2-Audio learns to transcribe audio."""

from typing import Any

from mvp_engine.engine import StepContext
from mvp_engine.kit import Answer, MLLMEngine
from mvp_engine.kit.speech.demo import word_errors

from .data import prepare, words_of
from .settings import AudioConfig


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

    def score(self, ctx: StepContext, name: str, answers: list[Answer]) -> list[bool]:
        """Log the word error rate: insertions, deletions and substitutions per word of the transcripts."""
        num_words = 0
        errors = list[int]()
        for answer in answers:
            expected = words_of(answer.expected)
            num_words += len(expected)
            errors.append(word_errors(words_of(answer.written), expected))
        ctx.log(f"wer_{name}", sum(errors), num_words)
        super().score(ctx, name, answers)
        return [error == 0 for error in errors]
