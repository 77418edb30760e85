"""Speech of CSM by generation: the codes of transformers' `generate`.

Legend: B prompts, L positions of a prompt, K codebooks, D hidden size, T tokens, R rows of speech.
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
from mvp_engine.hf.frame_decoding import Frames, Start, decode_frames
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
    start = Start(inputs, [torch.arange(len(one), device=device) for one in inputs])

    def are_ends(codes_BK: Tensor) -> Tensor:
        # transformers does not look at the last codebook either.
        return (codes_BK[:, :-1] == config.codebook_eos_token_id).all(1)

    frames = Frames(lambda codes_BK, frame: passes.frame_inputs(codes_BK), are_ends, [])
    with attention.eager_attention(config), attention.eager_attention(csm.depth_decoder.config):
        return decode_frames(passes, start, frames, max_frames, draw)


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
