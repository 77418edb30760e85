"""The actions skill's check passes on the kit and fails on kits with common errors."""

import importlib.util

import numpy as np
import pytest
from conftest import ROOT

from mvp_engine.kit.actions import ActionDataKit
from mvp_engine.kit.actions.act import Normalization
from mvp_engine.kit.actions.rows import FrameRow, FrameRows
from mvp_engine.kit.actions.stats import merged_stats


@pytest.fixture(scope="module")
def problems():
    spec = importlib.util.spec_from_file_location(
        "actions_check", ROOT / "skills" / "actions" / "check.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.problems


@pytest.mark.slow
def test_check_of_the_action_kit_passes(problems):
    assert problems() == []


def test_check_of_images_one_frame_late_fails(problems, monkeypatch):
    correct = FrameRows.image
    monkeypatch.setattr(
        FrameRows, "image", lambda self, index, camera: correct(self, max(0, index - 1), camera)
    )
    assert any("shows the image of another time" in problem for problem in problems())


def test_check_of_chunks_that_cross_the_episode_fails(problems, monkeypatch):
    def crossing(self):
        steps = np.minimum(self.index + np.arange(self.rows.chunk), len(self.rows.actions) - 1)
        return self.rows.actions[steps], np.ones(self.rows.chunk, bool)

    monkeypatch.setattr(FrameRow, "action_chunk", crossing)
    assert any("after the end of an episode carry loss" in problem for problem in problems())


def test_check_of_absolute_statistics_for_relative_actions_fails(problems):
    class Absolute(ActionDataKit):
        def statistics(self):
            rows, used = self.train_folders()[0]
            return {
                "state": merged_stats([rows.states[used]]),
                "action": merged_stats([rows.actions[used]]),
            }

    found = problems(Absolute)
    assert any(
        "normalized relative actions have the standard deviation" in problem for problem in found
    )
    assert not any("absolute actions" in problem for problem in found)


def test_check_of_actions_that_stay_normalized_fails(problems, monkeypatch):
    def lost(self, chunk, state):
        return np.asarray(chunk[..., : self.action_size])

    monkeypatch.setattr(Normalization, "unnormalize_actions", lost)
    assert any("do not come back to their units" in problem for problem in problems())
