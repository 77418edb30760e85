"""Preflight of talkers: working ones pass, broken protocols and leaks are refused by name; layouts without support."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import user_error
from test_csm import csm
from test_talker import omni

from mvp_engine.kit.speech import csm as csm_module
from mvp_engine.kit.speech import omni_model as talker_module
from mvp_engine.kit.speech.csm import CsmPasses
from mvp_engine.kit.speech.omni_model import OmniAdapter, Qwen3Talker, _Trial, check_speech
from mvp_engine.kit.speech.protocol import SpeechProtocol
from mvp_engine.kit.speech.rows import TEXT, packed_hidden

MODELS: dict[str, Any] = {"qwen3_omni_moe": omni, "csm": csm}


def test_preflight_of_csm_draws_words_of_its_text_vocabulary():
    model = csm()
    protocol = SpeechProtocol.for_config(model.whole.config)
    ids = {
        token
        for seed in range(5)
        for one in _Trial(model, protocol, seed).ids
        for token in one.tolist()
    }
    assert 35 <= max(ids - {57, 58, 59}) < 57  # 35 codes, 60 tokens of text


@pytest.mark.parametrize("name", MODELS)
def test_preflight_of_a_working_talker_passes_in_float32_and_bfloat16(name):
    check_speech(MODELS[name](), exact=True, group=None)
    with torch.autocast("cpu", torch.bfloat16):
        check_speech(MODELS[name](), exact=False, group=None)


def text_a_frame_late(monkeypatch):
    make = SpeechProtocol._item

    def shifted(self, *args):
        rows = make(self, *args)
        rows[-5:, TEXT] = rows[-5:, TEXT].roll(1)
        return rows

    monkeypatch.setattr(SpeechProtocol, "_item", shifted)


def one_sequence(monkeypatch):
    def joined(decoder, rows, *args):
        ends = torch.tensor([0, sum(rows.lengths)], dtype=torch.int32)
        return packed_hidden(decoder, replaced(rows, ends), *args)

    def replaced(rows, ends):
        from dataclasses import replace

        return replace(rows, cu_seqlens=ends, lengths=[int(ends[1])])

    monkeypatch.setattr(talker_module, "packed_hidden", joined)
    monkeypatch.setattr(csm_module, "packed_hidden", joined)


def codes_too_early(monkeypatch):
    for passes in (Qwen3Talker, CsmPasses):
        own = passes.rest_hidden

        def early(self, hidden, embeds, own=own):
            return own(self, hidden, embeds.roll(-1, 1))

        monkeypatch.setattr(passes, "rest_hidden", early)


def first_codes_alone(monkeypatch):
    for passes in (Qwen3Talker, CsmPasses):
        own = passes.inputs

        def without_rest(self, rows, embeds, hidden, own=own):
            return own(self, rows, embeds * (torch.arange(embeds.shape[1]) == 0)[:, None], hidden)

        monkeypatch.setattr(passes, "inputs", without_rest)


BROKEN: list[tuple[Any, str]] = [
    (one_sequence, "two spoken turns in one pack change each other by"),
    (codes_too_early, "distributions depend on codes that are spoken later, or on the code itself"),
    (first_codes_alone, "the codes of a frame do not change what is spoken after it"),
]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("broken, message", BROKEN, ids=lambda one: getattr(one, "__name__", ""))
def test_preflight_refuses_a_broken_talker_by_name(name, broken, message, monkeypatch):
    model = MODELS[name]()
    broken(monkeypatch)
    with user_error(f"the talker of {name} cannot be trained: ({message})"):
        check_speech(model, exact=True, group=None)


def test_preflight_refuses_another_protocol_than_that_of_generate(monkeypatch):
    text_a_frame_late(monkeypatch)
    with user_error("does not read what transformers' generate feeds it: inputs differ by"):
        check_speech(omni(), exact=True, group=None)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "call, key",
    [
        (lambda adapter: adapter.apply_tensor_parallel(None), "parallel.tensor > 1"),
        (lambda adapter: adapter.apply_expert_parallel(None), "parallel.expert > 1"),
        (lambda adapter: adapter.cut_stage(None, None), "parallel.pipeline > 1"),
        (
            lambda adapter: adapter.balance_experts(None, None),
            "experts.aux_loss_coef, experts.bias_update_rate or experts.router_z_loss_coef",
        ),
    ],
)
def test_omni_model_unsupported_setting_is_a_user_error(name, call, key):
    with user_error(f"omni_model does not support {key}: .* Set {key.split()[0].strip(',')}="):
        call(OmniAdapter(MODELS[name]()))
