"""Audio in an assistant's turn is a target, never an input: how such rows are read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mvp_engine.kit.data.read.row_types import BadRow, Codes, RowFormat
from mvp_engine.kit.data.read.rows import read_row
from mvp_engine.kit.speech.row_part import SpeechPart

SPEECH = RowFormat(targets=("audio",))
TEXT = {"type": "text", "text": "seven"}
AUDIO = {"type": "audio", "audio": "a.wav", "speaker": "anna"}


def row(*answer, user="Say seven.", **options):
    assistant = {"role": "assistant", "content": list(answer), **options}
    return {"messages": [{"role": "user", "content": user}, assistant]}


def test_speech_row_audio_in_assistant_turn_is_no_input():
    message = read_row(row(TEXT, AUDIO), SPEECH).messages[1]
    assert [part.kind for part in message.parts] == ["text"]
    assert message.target is not None
    assert message.target.value == "a.wav"
    assert message.target.options == {"speaker": "anna"}


def test_speech_row_without_setting_is_bad_and_never_read_as_input():
    with pytest.raises(BadRow, match=r"message 1 \(assistant\) has audio.*data\.speech") as error:
        read_row(row(TEXT, AUDIO))
    assert error.value.reason == "speech_target"


def test_speech_row_audio_from_column_for_assistant_is_bad_without_setting():
    raw = {**row(TEXT, {"type": "audio"}), "audio": "a.wav"}
    with pytest.raises(BadRow, match="speech_target"):
        read_row(raw)
    spoken = read_row(raw, SPEECH).messages[1].target
    assert spoken is not None
    assert spoken.value == "a.wav"


def test_speech_row_user_audio_stays_input():
    asked = [{"type": "audio", "audio": "q.wav"}, {"type": "text", "text": "Answer."}]
    found = read_row(row(TEXT, AUDIO, user=asked), SPEECH)
    assert [part.value for part in found.media()] == ["q.wav"]


def test_speech_row_codes_are_taken_as_given():
    spoken = (
        read_row(row(TEXT, {"type": "audio", "codes": [[1, 2], [3, 4]]}), SPEECH).messages[1].target
    )
    assert spoken is not None
    assert spoken.value == Codes([[1, 2], [3, 4]])


@pytest.mark.parametrize(
    "raw, reason",
    [
        (row(AUDIO), "speech_text"),
        (row(TEXT, AUDIO, AUDIO), "speech_count"),
        (row(TEXT, user=[{"type": "audio", "codes": [[1]]}]), "bad_media"),
    ],
    ids=["no text", "two sounds", "codes of a user"],
)
def test_speech_row_that_cannot_be_spoken_is_bad(raw, reason):
    with pytest.raises(BadRow) as error:
        read_row(raw, SPEECH)
    assert error.value.reason == reason


def test_speech_row_turn_without_loss_keeps_its_sound_for_talkers_that_read_answers():
    raw = row(TEXT, AUDIO, loss=False)
    raw["messages"] += [
        {"role": "user", "content": "Again."},
        {"role": "assistant", "content": "eight"},
    ]
    message = read_row(raw, SPEECH).messages[1]
    assert message.text == "seven"
    assert message.target is not None
    for reads, sound in ((True, message.target), (False, None)):
        targets: Any = SimpleNamespace(protocol=SimpleNamespace(reads_answers=reads))
        assert SpeechPart.sound(targets, message) is sound
