"""Model types that speak, as `mvp models` lists them: talkers, adapters and exports of whole folders, tried again."""

from __future__ import annotations

import json

import pytest
from conftest import ROOT
from ranks import RankPool
from speech_sweep import SPEAKING, export, lora, on_two_ranks, talker


@pytest.mark.campaign(only=True)
@pytest.mark.parametrize("name", SPEAKING)
def test_speaking_type_is_as_listed(name: str, ranks2: RankPool) -> None:
    listed = json.loads((ROOT / "mvp_engine" / "tools" / "models_media.json").read_text())["models"]
    (entry,) = [one for one in listed if one["name"] == name]
    assert entry["export"] is export(name) is True
    trains = talker(name)
    assert ("cannot be trained" not in entry["note"]) == (trains is True), trains
    if trains is True:
        assert lora(name) is True
    if name == "csm":  # layouts of others are in tests/kit/test_vlm_sweep.py
        for column in ("ulysses", "tensor"):
            assert (entry[column] is True) == (on_two_ranks(name, ranks2, **{column: 2}) is True), (
                column
            )
