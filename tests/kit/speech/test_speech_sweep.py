"""Model types that speak, as `mvp doctor --models` lists them: talkers, adapters and exports, tried again."""

import pytest
from conftest import CAMPAIGN, ROOT
from run_files import read_json
from speech_sweep import SPEAKING, export, lora, on_two_ranks, talker


@CAMPAIGN
@pytest.mark.parametrize("name", SPEAKING)
def test_speaking_type_is_as_listed(name, ranks2):
    listed = read_json(ROOT / "mvp_engine" / "tools" / "models_media.json")["models"]
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
