"""The MFU skill's check passes on the kit and fails on kits with common errors."""

import copy
import importlib.util

import pytest
from conftest import ROOT

from mvp_engine.hf.model import flop_costs
from mvp_engine.kit import MFUKit, mfu


@pytest.fixture(scope="module")
def problems():
    spec = importlib.util.spec_from_file_location("mfu_check", ROOT / "skills" / "mfu" / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.problems


def test_check_of_the_kit_passes(problems):
    assert problems() == []


def test_check_with_a_wrong_head_size_fails(problems, monkeypatch):
    correct = flop_costs.attention_flops
    monkeypatch.setattr(
        flop_costs, "attention_flops", lambda module, config: correct(module, config) / 2
    )
    assert any("off torch's counter" in problem for problem in problems())


def test_check_with_frozen_blocks_counted_as_trained_fails(problems):
    class Six(MFUKit):
        def __init__(self, model):
            super().__init__(copy.deepcopy(model).requires_grad_(True))

    assert any("2 of 4 blocks frozen" in problem for problem in problems(Six))


def test_check_with_a_pack_counted_as_one_sequence_fails(problems, monkeypatch):
    monkeypatch.setattr(
        mfu, "causal_pairs", lambda lengths, window: lengths.sum(0, keepdim=True).square()
    )
    found = problems()
    assert any("packed" in problem for problem in found)
    assert any("window" in problem for problem in found)
