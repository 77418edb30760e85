"""Frames of speech by generation, one after the other with a KV cache, for all families of talkers.

Legend: B prompts, L positions of the longest prompt, K codebooks, D hidden size, F frames, V codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mvp_engine.hf.speech_sampling import Draw, Spoken


class SpeakingPasses(Protocol):
    """What a family of talkers computes for a frame."""

    @property
    def decoder(self) -> Any:
        """Reads text and frames, and predicts first codes."""

    @property
    def predictor(self) -> Any:
        """Reads the decoder's hidden state and the codes of a frame, and predicts the others."""

    @property
    def first_head(self) -> Tensor: ...

    def rest_heads(self) -> Tensor: ...

    def embedding(self, codes_B: Tensor, book: int) -> Tensor: ...


class Start(NamedTuple):
    """What the decoder reads first, for each prompt."""

    inputs: list[Tensor]  # (L, D)
    positions: list[Tensor]  # (L,) or (3, L)


class Frames(NamedTuple):
    """How a family goes from frame to frame."""

    next_inputs: Callable[[Tensor, int], Tensor]  # codes (B, K) and the number of a frame -> (B, D)
    are_ends: Callable[[Tensor], Tensor]  # codes (B, K) -> (B,) bool
    suppressed: list[int]  # first codes that are never drawn


def decode_frames(
    passes: SpeakingPasses, start: Start, frames: Frames, max_frames: int, draw: Draw
) -> list[Spoken]:
    """The codes of all prompts, up to the frame that ends each. Prompts are padded on the left."""
    from transformers import DynamicCache

    longest = max(map(len, start.inputs))
    missing = [longest - len(one) for one in start.inputs]
    pairs = list(zip(start.inputs, missing, strict=True))
    inputs_BLD = torch.stack([F.pad(one, (0, 0, count, 0)) for one, count in pairs])
    mask_BL = torch.stack([F.pad(torch.ones_like(one[:, 0]), (count, 0)) for one, count in pairs])
    mask_BL = mask_BL.long()
    padded = [F.pad(one, (longest - one.shape[-1], 0)) for one in start.positions]
    positions = torch.stack(padded, dim=-2)  # (B, L) or (3, B, L)
    cache = DynamicCache(config=passes.decoder.config)
    heads_KVD = passes.rest_heads()
    codes: list[Tensor] = []  # (B, K) each
    ended_B = mask_BL.new_zeros(len(mask_BL), dtype=torch.bool)
    lengths_B = mask_BL.new_full((len(mask_BL),), max_frames)
    for frame in range(max_frames + 1):  # the last one says whether speech ends there
        out = passes.decoder(
            inputs_embeds=inputs_BLD,
            attention_mask=mask_BL,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        hidden_BD = out.last_hidden_state[:, -1]
        seen_BF = torch.stack([one[:, 0] for one in codes], 1) if codes else None
        logits_BV = (hidden_BD @ passes.first_head.T).float()
        first_B = draw.first(logits_BV, seen_BF, frames.suppressed)
        codes.append(_frame(passes, heads_KVD, hidden_BD, first_B, draw))
        ends_B = frames.are_ends(codes[-1]) & ~ended_B
        lengths_B = torch.where(ends_B, frame, lengths_B)
        ended_B |= ends_B
        if bool(ended_B.all()):
            break
        inputs_BLD = frames.next_inputs(codes[-1], frame)[:, None].to(inputs_BLD.dtype)
        mask_BL = F.pad(mask_BL, (0, 1), value=1)
        positions = positions[..., -1:] + 1
    found = torch.stack(codes, 1).cpu()
    results = zip(found, lengths_B.tolist(), ended_B.tolist(), strict=True)
    return [Spoken(one[:length], ended) for one, length, ended in results]


def _frame(
    passes: SpeakingPasses, heads_KVD: Tensor, hidden_BD: Tensor, first_B: Tensor, draw: Draw
) -> Tensor:
    """(B, K): the first code, and those that the predictor adds, one after the other."""
    from transformers import DynamicCache

    cache = DynamicCache(config=passes.predictor.config)
    codes = [first_B]
    inputs_BLD = torch.stack([hidden_BD, passes.embedding(first_B, 0).to(hidden_BD.dtype)], 1)
    for book, head_VD in enumerate(heads_KVD, 1):
        out = passes.predictor(inputs_embeds=inputs_BLD, past_key_values=cache, use_cache=True)
        codes.append(draw.rest((out.last_hidden_state[:, -1] @ head_VD.T).float()))
        inputs_BLD = passes.embedding(codes[-1], book)[:, None].to(hidden_BD.dtype)
    return torch.stack(codes, 1)
