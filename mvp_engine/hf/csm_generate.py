"""Speech of CSM by generation: codes frame by frame with a KV cache, those of transformers' `generate`.

Legend: B prompts, L positions of the longest prompt, K codebooks, D hidden size, F frames.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.data.speech import FIRST_CODE, SPEECH, TEXT
from mvp_engine.errors import UserError
from mvp_engine.hf import attention
from mvp_engine.hf.csm import CsmModel, CsmPasses
from mvp_engine.hf.speech_sampling import Draw, Spoken


def csm_codes(
    model: CsmModel,
    prompts: list[PackedBatch],
    speakers: list[str | None],
    max_frames: int,
    draw: Draw,
) -> list[Spoken]:
    """The codes of the last turn of each prompt. Sounds of earlier turns are in its speech."""
    named = next((name for name in speakers if name is not None), None)
    if named is not None:
        raise UserError(f"CSM has no list of speakers: write {named!r} into the text, as [0]")
    csm: Any = model.hf
    config: Any = csm.config
    passes = CsmPasses(csm)
    device = csm.lm_head.weight.device
    inputs = [_inputs(passes, prompt, device) for prompt in prompts]
    longest = max(map(len, inputs))
    inputs_BLD = inputs[0].new_zeros(len(inputs), longest, inputs[0].shape[-1])
    mask_BL = torch.zeros(len(inputs), longest, dtype=torch.long, device=device)
    for index, one in enumerate(inputs):
        inputs_BLD[index, longest - len(one) :] = one
        mask_BL[index, longest - len(one) :] = 1
    with attention.eager_attention(config), attention.eager_attention(csm.depth_decoder.config):
        return _decode(passes, inputs_BLD, mask_BL, max_frames, draw)


def _inputs(passes: CsmPasses, prompt: PackedBatch, device: torch.device) -> Tensor:
    """(L, D): the rows of a prompt up to the end of its text; frames after that are what is to be spoken."""
    csm = passes.csm
    speech = prompt.media.get(SPEECH)
    ids_T = prompt.input_ids.to(device)
    if speech is None or not len(speech.row_counts):
        return csm.embed_text_tokens(ids_T)
    rows_RC = speech.values.cpu()
    is_text_R = rows_RC[:, -1] < 0
    num_read = int(is_text_R.sum())
    if num_read == len(ids_T):  # otherwise the rows end with the last spoken turn, and text follows
        end = int(is_text_R.nonzero()[-1]) + 1
        rows_RC, is_text_R = rows_RC[:end], is_text_R[:end]
    rows_RC = rows_RC.to(device)
    text_RD = csm.embed_text_tokens(rows_RC[:, TEXT].clamp(min=0))
    frames_RD = passes.frame_inputs(rows_RC[:, FIRST_CODE:].clamp(min=0))
    read_RD = torch.where(is_text_R[:, None].to(device), text_RD, frames_RD.to(text_RD.dtype))
    return torch.cat([read_RD, csm.embed_text_tokens(ids_T[num_read:])])


def _decode(
    passes: CsmPasses, inputs_BLD: Tensor, mask_BL: Tensor, max_frames: int, draw: Draw
) -> list[Spoken]:
    from transformers import DynamicCache

    csm = passes.csm
    config = csm.config
    cache = DynamicCache(config=config)
    positions_BL = (mask_BL.cumsum(1) - 1).clamp(min=0)
    codes: list[Tensor] = []  # (B, K) each
    ended_B = mask_BL.new_zeros(len(mask_BL), dtype=torch.bool)
    lengths_B = mask_BL.new_full((len(mask_BL),), max_frames)
    for frame in range(max_frames):
        out = csm.backbone_model(
            inputs_embeds=inputs_BLD,
            attention_mask=mask_BL,
            position_ids=positions_BL,
            past_key_values=cache,
            use_cache=True,
        )
        hidden_BD = out.last_hidden_state[:, -1]
        seen_BF = torch.stack([one[:, 0] for one in codes], 1) if codes else None
        first_B = draw.first(csm.lm_head(hidden_BD).float(), seen_BF, [])
        codes_BK = _other_codes(passes, hidden_BD, first_B, draw)
        codes.append(codes_BK)
        # transformers does not look at the last codebook either.
        ends_B = (codes_BK[:, :-1] == config.codebook_eos_token_id).all(1) & ~ended_B
        lengths_B = torch.where(ends_B, frame, lengths_B)
        ended_B |= ends_B
        if bool(ended_B.all()):
            break
        inputs_BLD = passes.frame_inputs(codes_BK)[:, None].to(inputs_BLD.dtype)
        mask_BL = torch.cat([mask_BL, torch.ones_like(mask_BL[:, :1])], 1)
        positions_BL = positions_BL[:, -1:] + 1
    found = torch.stack(codes, 1).cpu()
    pairs = zip(found, lengths_B.tolist(), ended_B.tolist(), strict=True)
    return [Spoken(one[:length], ended) for one, length, ended in pairs]


def _other_codes(passes: CsmPasses, hidden_BD: Tensor, first_B: Tensor, draw: Draw) -> Tensor:
    """(B, K): the first code and those that the depth decoder adds, one after the other."""
    from transformers import DynamicCache

    decoder = passes.csm.depth_decoder.model
    cache = DynamicCache(config=decoder.config)
    codes = [first_B]
    inputs_BLD = torch.stack([hidden_BD, passes.embedding(first_B, 0).to(hidden_BD.dtype)], 1)
    for book, head_VD in enumerate(passes.rest_heads(), 1):
        out = decoder(inputs_embeds=inputs_BLD, past_key_values=cache, use_cache=True)
        codes.append(draw.rest((out.last_hidden_state[:, -1] @ head_VD.T).float()))
        inputs_BLD = passes.embedding(codes[-1], book)[:, None].to(hidden_BD.dtype)
    return torch.stack(codes, 1)
