"""Talker and code predictor in one teacher-forced pass: what transformers' `generate` computes step by step."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from omni_models import (
    ASSISTANT,
    BOOKS,
    CODEC,
    CODES,
    FIRST_TEXT,
    IM_END,
    NEWLINE,
    batch_of,
    qwen3_omni,
    qwen3_omni_settings,
    spoken_row,
)
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.kit.speech import rows as speech_rows
from mvp_engine.kit.speech.omni_model import OmniModel
from mvp_engine.kit.speech.rows import SPEECH, TEXT

FRAMES = 6
ROWS = {
    "text": {"seed": 1},
    "image": {"media": "image", "seed": 2},
    "audio": {"media": "audio", "seed": 3},
    "video": {"media": "video", "seed": 11},
    "two turns": {"turns": 2, "seed": 4},
    "two turns, image and audio": {"turns": 2, "media": "image audio", "seed": 5},
}


@cache
def whole():
    model = qwen3_omni()
    # transformers' positions of a talker's row with images and audio read it there, where no config has it.
    model.talker.config.audio_config = model.thinker.config.audio_config
    return model


def config():
    from transformers import Qwen3OmniMoeConfig

    return Qwen3OmniMoeConfig(**qwen3_omni_settings())


@cache
def omni():
    theirs = whole()
    model = OmniModel.from_config(config())
    model.hf.load_state_dict(theirs.thinker.state_dict())
    model.talker.load_state_dict(theirs.talker.state_dict())
    return model.eval()


def generated(row):
    """transformers' `generate`: the text, the codes (F, K), and the logits of each codebook, (F or F + 1, V) each."""
    model = whole()
    logits: list[list[Tensor]] = [[] for _ in range(BOOKS)]
    codes: list[Tensor] = []
    handles = [
        model.talker.codec_head.register_forward_hook(
            lambda m, a, out: logits[0].append(out[0, -1])
        )
    ]
    for book, head in enumerate(model.talker.code_predictor.lm_head, 1):
        handles.append(
            head.register_forward_hook(lambda m, a, out, book=book: logits[book].append(out[0, -1]))
        )
    handles.append(model.code2wav.register_forward_pre_hook(lambda m, args: codes.append(args[0])))
    specials = [i for i in range(CODES, 48) if i != CODEC["eos"]]
    media = dict(row["media"])
    try:
        sequences, _ = model.generate(
            row["ids"][None],
            speaker="Chelsie",
            thinker_max_new_tokens=4,
            thinker_min_new_tokens=4,
            thinker_do_sample=False,
            thinker_eos_token_id=IM_END,
            thinker_suppress_tokens=list(range(FIRST_TEXT)),
            talker_do_sample=False,
            talker_max_new_tokens=FRAMES + 1,
            talker_min_new_tokens=FRAMES + 1,
            talker_suppress_tokens=specials,
            talker_repetition_penalty=1.0,
            **media,
        )
    finally:
        for handle in handles:
            handle.remove()
    return sequences[0, len(row["ids"]) :], codes[0][0].T, [torch.stack(one) for one in logits]


def teacher_forced(batch, monkeypatch):
    """The logits of each codebook in one pass of OmniModel."""
    found: list[Tensor] = []
    first = speech_rows.linear_log_probs
    rest = speech_rows.batched_log_probs

    def of_first(hidden, weight, labels, **options):
        found.append(hidden @ weight.T)
        return first(hidden, weight, labels, **options)

    def of_rest(hidden, weight, labels):
        found.extend(torch.bmm(hidden, weight.transpose(1, 2)))
        return rest(hidden, weight, labels)

    monkeypatch.setattr(speech_rows, "linear_log_probs", of_first)
    monkeypatch.setattr(speech_rows, "batched_log_probs", of_rest)
    with torch.no_grad():
        omni()(batch, ["speech_loss"])
    return found


def spoken_batch(row):
    """The row with what `generate` wrote and spoke as its last answer, and the logits of `generate`."""
    text, codes, logits = generated(row)
    # The last token that the thinker wrote is never read by anybody.
    ids = torch.cat([row["ids"], text[:-1], torch.tensor([IM_END, NEWLINE])])
    turn = int((row["ids"] == ASSISTANT).sum()) - 1
    batch = batch_of(config(), {**row, "ids": ids, "codes": {turn: codes}}, speaker="chelsie")
    return batch, logits


def differences(batch, steps, monkeypatch):
    """The largest difference of the logits of each codebook."""
    found = teacher_forced(batch, monkeypatch)
    assert len(found) == len(steps) == BOOKS
    assert min(map(len, steps)) >= FRAMES
    return [
        float((one[: len(step)] - step).abs().max()) for one, step in zip(found, steps, strict=True)
    ]


@pytest.mark.parametrize("name", ROWS)
def test_one_pass_has_the_logits_of_step_by_step_generation(name, monkeypatch):
    row = spoken_row(**ROWS[name], spoken=(), prompt_only=True)
    batch, steps = spoken_batch(row)
    assert max(differences(batch, steps, monkeypatch)) < 1e-5


def test_one_pass_with_text_shifted_by_a_frame_differs_from_generation(
    monkeypatch,
):
    batch, steps = spoken_batch(spoken_row(seed=1, spoken=(), prompt_only=True))
    values = batch.media[SPEECH].values
    values[-FRAMES:, TEXT] = values[-FRAMES:, TEXT].roll(1)
    assert min(differences(batch, steps, monkeypatch)) > 1e-3


# ---- Packs ------------------------------------------------------------------------------------------------------

PACK = [
    spoken_row(seed=6, spoken=()),
    spoken_row(seed=7),
    spoken_row(turns=2, spoken=(0, 1), media="image", seed=8),
    spoken_row(turns=2, spoken=(1,), media="audio", seed=9),
    spoken_row(seed=10, spoken=(), media="image video audio"),
]


def losses(outputs):
    return outputs["loss"] + outputs["speech_loss"][0] + 0.3 * outputs["speech_loss"][1]


def test_pack_of_spoken_and_silent_rows_equals_each_alone_with_every_gradient():
    model = omni()
    batches = [batch_of(config(), row) for row in PACK]
    names = ["log_probs", "speech_log_probs", "speech_entropy"]
    model.requires_grad_(True)
    gradients, found = [], []
    for group in ([PackedBatch.concat(batches)], batches):
        model.zero_grad()
        for batch in group:
            losses(model(batch, ["loss", "speech_loss"])).backward()
        gradients.append({name: param.grad for name, param in model.named_parameters()})
        outputs = [model(batch, names) for batch in group]
        found.append({name: torch.cat([one[name] for one in outputs]) for name in names})
    model.zero_grad()
    for name in names:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=0, atol=1e-5)
    assert len(found[0]["speech_log_probs"]) == 6 + 6 + 7 + 7
    for name, packed in gradients[0].items():
        alone = gradients[1][name]
        assert packed is not None, name
        assert alone is not None, name
        torch.testing.assert_close(
            packed, alone, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_speech_outputs_fit_to_each_other():
    model = omni()
    batch = PackedBatch.concat([batch_of(config(), row) for row in PACK])
    with torch.no_grad():
        found = model(batch, ["speech_log_probs", "speech_loss", "speech_entropy"])
    table = found["speech_log_probs"]
    assert (table[:, 0] < 0).all()
    ends = (table[:, 1:] == 0).all(1)
    assert ends.sum() == 4  # one for each spoken turn
    assert (found["speech_entropy"][ends][:, 1:] == 0).all()
    torch.testing.assert_close(found["speech_loss"][0], -table[:, 0].sum())
    torch.testing.assert_close(found["speech_loss"][1], -table[:, 1:].mean(1).sum())


# ---- Work that is skipped ---------------------------------------------------------------------------------------


def calls(model, batch, outputs):
    """How often blocks of thinker, encoders and talker run in a forward."""
    layers: Any = model.decoder().layers
    blocks = {
        "thinker": layers,
        "vision": model.hf.model.visual.blocks,
        "audio": model.hf.model.audio_tower.layers,
        "talker": model.talker.model.layers,
        "predictor": model.talker.code_predictor.model.layers,
    }
    count = dict.fromkeys(blocks, 0)
    handles = []
    for part, modules in blocks.items():
        for module in modules:

            def add(*_, part=part):
                count[part] += 1

            handles.append(module.register_forward_hook(add))
    try:
        with torch.no_grad():
            model(batch, outputs)
    finally:
        for handle in handles:
            handle.remove()
    return count


def test_forward_on_speech_alone_runs_no_thinker_block_on_text_rows():
    text = PackedBatch.concat([batch_of(config(), PACK[0]), batch_of(config(), PACK[1])])
    media = batch_of(config(), PACK[2])
    silent = batch_of(config(), PACK[0])
    speaks = {"talker": 2, "predictor": 2}
    nothing = {"thinker": 0, "vision": 0, "audio": 0, "talker": 0, "predictor": 0}
    assert calls(omni(), text, ["speech_loss"]) == {**nothing, **speaks}
    assert calls(omni(), text, ["loss", "speech_loss"]) == {**nothing, **speaks, "thinker": 3}
    # The talker reads the output of layer 2 of 3.
    assert calls(omni(), media, ["speech_loss"]) == {**nothing, **speaks, "thinker": 2, "vision": 2}
    assert calls(omni(), silent, ["speech_loss"]) == nothing
    assert calls(omni(), text, ["loss"]) == {**nothing, "thinker": 3}


def test_forward_without_speech_has_a_loss_of_zero_that_can_run_backward():
    model = omni()
    found = model(batch_of(config(), PACK[0]), ["speech_loss", "speech_log_probs"])
    assert found["speech_loss"].tolist() == [0, 0]
    assert found["speech_log_probs"].shape == (0, BOOKS)
    found["speech_loss"].sum().backward()
    assert float(model.talker.codec_head.weight.grad.abs().sum()) == 0
    model.zero_grad()
