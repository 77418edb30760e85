"""A model that speaks: a Qwen3-Omni learns to answer in text and aloud."""

from functools import cached_property
from typing import Any

from mvp_engine.engine import StepContext
from mvp_engine.kit.data.read.media_source import require_package
from mvp_engine.kit.speech import SpeechEngine
from mvp_engine.kit.speech.demo import word_errors

from .data import prepare
from .judge import Judge
from .settings import OmniConfig


class OmniEngine(SpeechEngine):
    config_class = OmniConfig
    config: OmniConfig
    title = "What a Qwen3-Omni says"

    @classmethod
    def make_processor(cls, config: Any) -> Any:
        spoken = config.spoken
        if spoken is None:
            return super().make_processor(config)
        return prepare(spoken.folder, spoken.sentences, spoken.held_out)

    @cached_property
    def judge(self) -> Judge:
        return Judge()

    def score(self, ctx: StepContext, name: str, answers: list[Any]) -> None:
        """Log the exact answers in text; of synthetic speech, also the share of words that the judge hears right."""
        super().score(ctx, name, answers)
        spoken = [answer for answer in answers if answer.speech]
        if self.config.spoken is None or not spoken:
            return
        soundfile = require_package("soundfile", "speech")
        num_words = 0
        num_errors = 0
        for answer in spoken:
            waveform, _ = soundfile.read(answer.speech, dtype="float32")
            expected = answer.expected.split()
            heard = self.judge.words(waveform, answer.speaker)
            num_words += len(expected)
            num_errors += word_errors(heard, expected)
        ctx.log(f"word_accuracy_{name}", num_words - num_errors, num_words)
