"""The skill's check passes on the kit as it is, and fails on kits that are wrong in the ways that people are."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
from conftest import ROOT

from mvp_engine.kit import MFUKit
from mvp_engine.kit import mfu as kit_file


@pytest.fixture(scope="module")
def problems() -> Any:
    spec = importlib.util.spec_from_file_location("mfu_check", ROOT / "skills" / "mfu" / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.problems


def test_the_kit_passes(problems: Any) -> None:
    assert problems() == []


def test_a_wrong_head_size_fails(problems: Any, monkeypatch) -> None:
    right = kit_file._pair
    monkeypatch.setattr(kit_file, "_pair", lambda module, config: right(module, config) / 2)  # hidden / heads
    assert any("off torch's counter" in problem for problem in problems())


def test_frozen_parts_counted_as_trained_fail(problems: Any) -> None:
    class Six(MFUKit):
        def __init__(self, model: Any) -> None:
            super().__init__(copy.deepcopy(model).requires_grad_(True))

    assert any("2 of 4 blocks frozen" in problem for problem in problems(Six))


def test_one_long_sequence_for_a_pack_fails(problems: Any, monkeypatch) -> None:
    monkeypatch.setattr(kit_file, "_seen", lambda lengths, window: lengths.sum(0, keepdim=True).square())
    found = problems()
    assert any("packed" in problem for problem in found)
    assert any("window" in problem for problem in found)
