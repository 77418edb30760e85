"""How codes of speech are drawn from logits, and what generation returns.

Legend: B prompts, K codebooks, F frames, V codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How codes are drawn; the defaults are those of transformers' `generate` for Qwen3-Omni."""

    do_sample: bool = True  # False: the most likely codes
    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05  # of the first codebook
    residual_top_k: int = 50
    residual_top_p: float = 0.8


class Spoken(NamedTuple):
    """The codes of one answer, (F, K), and whether the talker ended it by itself."""

    codes: Tensor
    ended: bool


class Draw:
    """Draws codes from logits, through transformers' logits processors in their order."""

    def __init__(self, sampling: Sampling, generator: torch.Generator | None) -> None:
        self.sampling = sampling
        self.generator = generator

    def first(self, logits_BV: Tensor, seen_BF: Tensor | None, suppressed: list[int]) -> Tensor:
        from transformers import RepetitionPenaltyLogitsProcessor

        sampling = self.sampling
        if seen_BF is not None and sampling.repetition_penalty != 1.0:
            penalty: Any = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
            logits_BV = penalty(seen_BF, logits_BV)
        logits_BV[:, suppressed] = float("-inf")
        return self._draw(logits_BV, sampling.temperature, sampling.top_k, sampling.top_p)

    def rest(self, logits_BV: Tensor) -> Tensor:
        return self._draw(
            logits_BV, 1.0, self.sampling.residual_top_k, self.sampling.residual_top_p
        )

    def _draw(self, logits_BV: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
        from transformers import TopKLogitsWarper, TopPLogitsWarper

        if not self.sampling.do_sample:
            return logits_BV.argmax(-1)
        scores: Any = logits_BV / temperature
        unused: Any = None
        if top_k:
            scores = TopKLogitsWarper(top_k)(unused, scores)
        if top_p < 1.0:
            scores = TopPLogitsWarper(top_p)(unused, scores)
        return torch.multinomial(scores.softmax(-1), 1, generator=self.generator)[:, 0]
