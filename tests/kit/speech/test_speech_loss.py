"""The loss of recipes/qwen_omni: one sum and one weight of text and speech, and what is logged."""

from __future__ import annotations

import pytest
import torch
from omni_models import batch_of, speech_step, spoken_row
from test_talker import config, omni

from mvp_engine.data.batch import PackedBatch
from mvp_engine.kit.speech.settings import SpeechLoss


class Log:
    """Keeps what a step logs: a mean as (sum, weight)."""

    def __init__(self):
        self.means: dict[str, tuple[float, float]] = {}
        self.counts: dict[str, float] = {}

    def log(self, name, value, weight):
        self.means[name] = (float(value), float(weight))

    def count(self, name, value):
        self.counts[name] = float(value)


def test_speech_loss_is_the_sum_and_the_weight_of_all_target_positions():
    rows = [spoken_row(seed=6, spoken=()), spoken_row(turns=2, spoken=(0, 1), seed=8)]
    batch = PackedBatch.concat([batch_of(config(), row) for row in rows])
    frames = [len(codes) for row in rows for codes in row["codes"].values()]
    with torch.no_grad():
        outputs = omni()(batch, ["loss", "speech_loss"])
    text, (first, rest) = float(outputs["loss"]), outputs["speech_loss"].tolist()
    settings = SpeechLoss(weight=0.7, residual_weight=0.3)
    for with_text in (True, False):
        log = Log()
        with torch.no_grad():
            loss, weight = speech_step(omni(), settings, with_text, log)(batch)
        labels = int(batch.num_loss_tokens) if with_text else 0
        assert float(loss) == pytest.approx(
            0.7 * (first + 0.3 * rest) + (text if with_text else 0), rel=1e-5
        )
        assert float(weight) == labels + sum(frames) + 2  # tokens, frames, ends of speech
        assert log.means["speech_first"] == pytest.approx((first, sum(frames) + 2), rel=1e-5)
        assert log.means["speech_rest"] == pytest.approx((rest, sum(frames)), rel=1e-5)
        assert log.counts == {"tokens": batch.num_tokens, "frames": sum(frames)}
        assert ("text_loss" in log.means) == with_text
        assert not with_text or log.means["text_loss"] == pytest.approx((text, labels), rel=1e-5)
