"""Columns of rows: renamed, dropped, read as numbers, or listed because nothing reads them."""

import pytest
from test_rows import ANSWER, EXPECTED_TURNS, QUESTION, reason, roles_and_texts, text_part

from mvp_engine.kit.data.read.row_types import BadRow, RowFormat
from mvp_engine.kit.data.read.rows import read_row


def test_read_row_columns_are_renamed_and_dropped_first():
    form = RowFormat(columns={"subject": "prompt", "reply": "completion", "label": None})
    row = read_row({"subject": "Why?", "reply": "So.", "label": False, "id": 3, "url": None}, form)
    assert roles_and_texts(row.messages) == EXPECTED_TURNS
    assert (row.format, row.unused) == ("prompt_completion", ("id",))
    with pytest.raises(BadRow, match="another column to 'prompt'"):
        read_row({"subject": "Why?", "prompt": "So.", "completion": "x"}, form)


def test_read_row_unused_columns_and_message_keys_are_listed():
    row = read_row(
        {
            "messages": [QUESTION, {**ANSWER, "mood": "good"}],
            "text": "t",
            "label": "spam",
            "url": "u",
        }
    )
    assert row.unused == ("text", "label", "url", "assistant.mood")
    assert read_row({"messages": [QUESTION, ANSWER], "system": "S", "label": True}).unused == ()


def test_read_row_newer_preference_columns_give_the_pair():
    rejected = [QUESTION, {**ANSWER, "content": "No."}]
    rows = [
        {"messages": [QUESTION, ANSWER], "rejected_messages": rejected},
        {"chosen_messages": [QUESTION, ANSWER], "rejected_messages": rejected},
        {"messages": [QUESTION, ANSWER], "rejected_response": "No."},
        {"query": "Why?", "response": "So.", "rejected_response": "No."},
    ]
    for raw in rows:
        row = read_row(raw)
        assert roles_and_texts(row.messages) == EXPECTED_TURNS
        assert roles_and_texts(row.rejected) == [("user", "Why?"), ("assistant", "No.")]
        assert row.messages[0].loss is False
        assert row.unused == ()


def test_read_row_reasoning_and_tool_call_blocks_become_fields_of_the_message():
    call = '{"name": "f", "arguments": {}}'
    blocks = [
        {"type": "reasoning", "value": "hm"},
        {"type": "tool_call", "value": call},
        {"type": "text", "value": "a"},
    ]
    row = read_row({"messages": [QUESTION, {"role": "assistant", "content": blocks}]})
    assert row.messages[1].parts == (text_part("a"),)
    assert row.messages[1].extra["reasoning_content"] == "hm"
    assert row.messages[1].extra["tool_calls"][0]["function"]["name"] == "f"


def test_read_row_fields_are_numbers_and_mean_nothing_else():
    form = RowFormat(fields={"score": "float", "label": "int"}, prompt_only=True)
    row = read_row({"prompt": "Why?", "completion": "So.", "score": "0.5", "label": False}, form)
    assert (row.fields, row.unused) == ({"score": 0.5, "label": 0}, ())
    answer = read_row(
        {"question": "1+1?", "answer": 2}, RowFormat(fields={"answer": "int"}, prompt_only=True)
    )
    assert (roles_and_texts(answer.messages), answer.prompt_only) == ([("user", "1+1?")], True)
    for value, why in (
        (None, "missing_field"),
        ("high", "bad_field"),
        (float("nan"), "bad_field"),
        ([1], "bad_field"),
    ):
        assert reason({"text": "t", "score": value, "label": 1}, form) == why
    assert reason({"text": "t", "score": 1, "label": 0.5}, form) == "bad_field"


@pytest.mark.parametrize("key", ["loss", "weight", "loss_weight", "loss_scale", "train"])
def test_read_row_loss_flag_of_a_message_in_every_spelling(key):
    row = read_row({"messages": [QUESTION, {**ANSWER, key: 0}, QUESTION, {**ANSWER, key: 1}]})
    assert [message.loss for message in row.messages] == [None, False, None, True]
    assert row.unused == ()
    weighted = read_row({"messages": [QUESTION, {**ANSWER, key: 0.5}]})
    assert weighted.messages[-1].loss == 0.5
    assert reason({"messages": [QUESTION, {**ANSWER, key: "no"}]}) == "wrong_type"
