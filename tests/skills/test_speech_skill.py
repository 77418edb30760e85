"""The speech skill's check passes on the kit and fails on plans with common errors."""

from dataclasses import replace

import pytest
import torch
from conftest import ROOT

from mvp_engine.imports import import_file
from mvp_engine.kit.speech.rows import FIRST_CODE, FRAME_COUNTS, TEXT

check = import_file(ROOT / "skills" / "speech" / "check.py")
problems, KIT = check.problems, check.kit_plan


def changed(media, change):
    values = media.values.clone()
    frames = int(media.fields[FRAME_COUNTS][0])
    change(values, frames)
    return replace(media, values=values)


def shifted_text(protocol, ids, positions, turns):
    """The text one frame late."""

    def change(values, frames):
        values[-frames:, TEXT] = torch.cat([torch.tensor([check.PAD]), values[-frames:-1, TEXT]])

    return changed(KIT(protocol, ids, positions, turns), change)


def without_end(protocol, ids, positions, turns):
    return KIT(protocol, ids, positions, [turn._replace(ends=False) for turn in turns])


def first_code_alone(protocol, ids, positions, turns):
    """Frames with the sum of one embedding, not of all codebooks."""

    def change(values, frames):
        values[-frames:, FIRST_CODE + 1 :] = 0

    return changed(KIT(protocol, ids, positions, turns), change)


def another_speaker(protocol, ids, positions, turns):
    return KIT(protocol, ids, positions, [turn._replace(speaker=None) for turn in turns])


def with_earlier_answers(protocol, ids, positions, turns):
    """All tokens before the answer, as a language model reads them: also earlier answers."""
    ids = ids.clone()
    answers = (ids == check.ASSISTANT).nonzero()[:, 0].tolist()
    for place in answers[:-1]:
        ids[place] = check.USER
    return KIT(protocol, ids, positions, [turn._replace(turn=0) for turn in turns])


def test_check_of_the_kit_passes():
    assert problems(KIT) == []


@pytest.mark.parametrize(
    "plan, said",
    [
        (shifted_text, "differ from those of transformers' generate"),
        (without_end, "the end of speech is not learnt"),
        (first_code_alone, "differ from those of transformers' generate"),
        (another_speaker, "differ from those of transformers' generate"),
        (with_earlier_answers, "two turns: log-probs of the first codebook differ"),
    ],
)
def test_check_of_a_wrong_plan_names_the_error(plan, said):
    assert any(said in problem for problem in problems(plan))
