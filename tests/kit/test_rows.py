"""Row formats: every format is read into the same `Row`; junk is a BadRow with a reason code, never a crash."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mvp_engine.errors import UserError
from mvp_engine.kit.data.read.row_format import RowFormat
from mvp_engine.kit.data.read.row_types import BadRow, Message, Part, Row
from mvp_engine.kit.data.read.rows import FORMATS, detect_format, read_row

QUESTION, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}


def text_part(text: str) -> Part:
    return Part("text", text)


def roles_and_texts(messages: tuple[Message, ...]) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in messages]


def reason(raw: Any, format: RowFormat | str | None = None) -> str:
    with pytest.raises(BadRow) as caught:
        read_row(raw, format)
    return caught.value.reason


def media_values(row: Row) -> list[Any]:
    return [part.value for part in row.media()]


EXPECTED_TURNS = [("user", "Why?"), ("assistant", "So.")]
SAME_ROWS = {
    "messages": {"messages": [QUESTION, ANSWER]},
    "messages, typed": {
        "messages": [{**QUESTION, "content": [{"type": "text", "text": "Why?"}]}, ANSWER]
    },
    "messages, null fields": {
        "messages": [{**QUESTION, "tool_calls": None, "name": None}, ANSWER],
        "images": None,
    },
    "sharegpt": {
        "conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
    },
    "alpaca": {"instruction": "Why?", "input": "", "output": "So.", "text": "all of it"},
    "prompt and completion": {"prompt": "Why?", "completion": "So."},
    "prompt and completion, messages": {"prompt": [QUESTION], "completion": [ANSWER]},
    "preference": {"prompt": "Why?", "chosen": "So.", "rejected": "No."},
    "preference, messages": {
        "prompt": [QUESTION],
        "chosen": [ANSWER],
        "rejected": [{**ANSWER, "content": "No."}],
    },
    "preference, one message": {
        "conversations": [QUESTION],
        "chosen": ANSWER,
        "rejected": {**ANSWER, "content": "No."},
    },
    "preference, implicit": {
        "chosen": [QUESTION, ANSWER],
        "rejected": [QUESTION, {**ANSWER, "content": "No."}],
    },
    "preference, implicit in strings": {"chosen": "Why? So.", "rejected": "Why? No."},
    "preference, prompt twice": {
        "prompt": "Why?",
        "chosen": [QUESTION, ANSWER],
        "rejected": [QUESTION, {**ANSWER, "content": "No."}],
        "messages": [QUESTION, ANSWER],
    },
    "preference, alpaca": {"instruction": "Why?", "chosen": "So.", "rejected": "No."},
}


@pytest.mark.parametrize("name", SAME_ROWS)
def test_read_row_every_format_gives_the_same_conversation(name: str) -> None:
    row = read_row(SAME_ROWS[name])
    assert roles_and_texts(row.messages) == EXPECTED_TURNS
    if name.startswith("preference"):
        assert roles_and_texts(row.rejected) == [("user", "Why?"), ("assistant", "No.")]
        assert detect_format(SAME_ROWS[name]) == "preference"
    else:
        assert not row.rejected


def test_read_row_plain_text_keeps_the_text_unchanged() -> None:
    assert read_row({"text": " Once upon \n"}) == Row(text=" Once upon \n")


def test_read_row_alpaca_history_input_and_system_become_turns() -> None:
    row = read_row(
        {
            "instruction": "Add",
            "input": "1 2",
            "output": "3",
            "history": [["Hi", "Ho"]],
            "system": "Be brief",
        }
    )
    turns = [("user", "Hi"), ("assistant", "Ho"), ("user", "Add\n1 2"), ("assistant", "3")]
    assert roles_and_texts(row.messages) == [("system", "Be brief"), *turns]


def test_read_row_prompt_has_no_loss_unless_a_message_sets_it() -> None:
    shared = [QUESTION, ANSWER, QUESTION]
    row = read_row({"prompt": shared, "completion": [ANSWER]})
    assert [message.loss for message in row.messages] == [False, False, False, None]
    row = read_row(
        {"chosen": [*shared, ANSWER], "rejected": [*shared, {**ANSWER, "content": "No."}]}
    )
    assert [message.loss for message in row.messages] == [False, False, False, None]
    assert [message.loss for message in row.rejected] == [False, False, False, None]
    row = read_row({"prompt": [QUESTION, {**ANSWER, "loss": True}], "completion": "So."})
    assert [message.loss for message in row.messages] == [False, True, None]
    row = read_row(
        {
            "messages": [
                QUESTION,
                {**ANSWER, "loss": False},
                {**QUESTION, "loss": True},
                {**ANSWER, "weight": 1},
                ANSWER,
            ]
        }
    )
    assert [message.loss for message in row.messages] == [None, False, True, True, None]


def test_read_row_tool_calls_and_results_pass_through_unchanged() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns += [{"role": "tool", "content": "2", "tool_call_id": "1", "name": "add"}, ANSWER]
    tool = {"type": "function", "function": {"name": "add"}}
    row = read_row({"messages": turns, "tools": [tool]})
    assert row.messages[1] == Message("assistant", (), extra={"tool_calls": [call]})
    assert row.messages[2] == Message(
        "tool", (text_part("2"),), extra={"tool_call_id": "1", "name": "add"}
    )
    assert row.tools == (tool,)
    assert read_row({"messages": turns, "tools": json.dumps([tool])}).tools == (tool,)
    assert read_row({"messages": turns, "tools": ""}).tools == ()


def test_read_row_sharegpt_calls_and_observations_become_tool_turns() -> None:
    turns = [("system", "S"), ("human", "Q"), ("function_call", '{"name": "f", "arguments": {}}')]
    turns += [("observation", "4"), ("gpt", "A")]
    row = read_row(
        {"conversations": [{"from": who, "value": what} for who, what in turns], "tools": "[]"}
    )
    assert [message.role for message in row.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert row.messages[2].extra["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": {}}}
    ]
    assert not row.messages[2].parts


BLOCKS = [
    ({"type": "image_url", "value": "a.png"}, Part("image", "a.png")),
    (
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}},
        Part("image", "data:image/*;base64,AA"),
    ),
    ({"type": "text", "value": "t"}, text_part("t")),
    ({"type": "image", "image": "a.png"}, Part("image", "a.png")),
    (
        {"type": "image", "path": "a.png", "max_pixels": 9},
        Part("image", "a.png", {"max_pixels": 9}),
    ),
    (
        {"type": "image", "url": "data:image/png;base64,AA"},
        Part("image", "data:image/png;base64,AA"),
    ),
    ({"type": "image", "base64": "AA"}, Part("image", "data:image/*;base64,AA")),
    ({"type": "image", "bytes": b"x", "path": None}, Part("image", b"x")),
    (
        {"type": "image", "image": {"bytes": b"x", "path": None}},
        Part("image", {"bytes": b"x", "path": None}),
    ),
    (
        {"type": "image_url", "image_url": {"url": "u", "detail": "low"}},
        Part("image", "u", {"detail": "low"}),
    ),
    ({"type": "image_url", "image_url": "u"}, Part("image", "u")),
    ({"image": "a.png"}, Part("image", "a.png")),
    (
        {"type": "video", "video": ["1.png", b"2"], "fps": 2},
        Part("video", ["1.png", b"2"], {"fps": 2}),
    ),
    ({"type": "video_url", "video_url": {"url": "v"}}, Part("video", "v")),
    ({"type": "audio", "audio": "a.wav"}, Part("audio", "a.wav")),
    (
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
        Part("audio", "data:audio/*;base64,AA", {"format": "wav"}),
    ),
    ({"type": "text", "text": "t"}, text_part("t")),
    ("t", text_part("t")),
]


@pytest.mark.parametrize(("block", "part"), BLOCKS, ids=lambda value: str(value)[:50])
def test_read_row_typed_block_in_every_spelling_gives_the_part(block: Any, part: Part) -> None:
    row = read_row(
        {"messages": [{"role": "user", "content": [block, {"type": "text", "text": "?"}]}, ANSWER]}
    )
    assert row.messages[0].parts == (part, text_part("?"))


def test_read_row_pil_images_and_arrays_pass_through_unchanged() -> None:
    image, frames = Image.new("RGB", (2, 2)), np.zeros((3, 4, 4, 3), np.uint8)
    content = [{"type": "image", "image": image}, {"type": "video", "video": frames}]
    row = read_row({"messages": [{"role": "user", "content": content}, ANSWER]})
    assert row.media()[0].value is image
    assert row.media()[1].value is frames


def chat(question: Any, answer: Any = "So.", **columns: Any) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ],
        **columns,
    }


def test_read_row_text_with_media_is_a_caption() -> None:
    for raw in (
        {"image": b"x", "text": "A cat"},
        {"images": [b"x"], "caption": "A cat", "url": "u"},
    ):
        row = read_row(raw)
        assert row.messages == (
            Message("user", (Part("image", b"x"),)),
            Message("assistant", (text_part("A cat"),)),
        )
    assert read_row({"text": "A cat", "image": None}) == Row(text="A cat")


def test_read_row_unknown_format_names_found_and_wanted_keys() -> None:
    with pytest.raises(BadRow) as caught:
        read_row({"question": "Q", "messages": None})
    assert caught.value.reason == "unknown_format"
    assert "'question', 'messages' (null)" in caught.value.detail
    assert all(key in caught.value.detail for keys in FORMATS.values() for key in keys)
    with pytest.raises(BadRow, match="wanted: instruction and output"):
        read_row({"messages": [QUESTION, ANSWER]}, "alpaca")
    with pytest.raises(UserError, match="mesages"):
        read_row({}, "mesages")


@pytest.mark.parametrize(
    ("raw", "columns"),
    [
        ({"message": []}, "{message: messages}"),
        ({"Question": "Q", "Answer": "A", "id": 1}, "{Question: question, Answer: answer}"),
        ({"prompt": "Q", "chosen_response": "a", "rejected": "b"}, "{chosen_response: chosen}"),
    ],
)
def test_read_row_similar_columns_are_named_in_the_error(raw: dict[str, Any], columns: str) -> None:
    with pytest.raises(BadRow, match=re.escape(f"Did you mean `columns: {columns}`")):
        read_row(raw)


@pytest.mark.parametrize(
    ("column", "value", "kind"),
    [
        ("image_path", "a.png", "image"),
        ("picture", {"bytes": b"x", "path": None}, "image"),
        ("frames", ["1.jpg", "2.jpg"], "image"),
        ("audio_filepath", "a.wav", "audio"),
    ],
)
def test_read_row_media_in_a_column_that_nothing_reads_is_refused(
    column: str, value: Any, kind: str
) -> None:
    raw = {"question": "Q", "answer": "A", column: value}
    with pytest.raises(BadRow, match=re.escape(f"columns: {{{column}: {kind}}}")):
        read_row(raw)
    assert read_row(raw, RowFormat(columns={column: kind})).media()
    assert not read_row(raw, RowFormat(columns={column: None})).media()
    assert read_row(raw | {"images": ["b.png"]}).unused == (column,)  # the row has its media
    assert read_row(raw | {column: "png"}).unused == (column,)  # no file


def test_read_row_given_format_overrides_detection() -> None:
    raw = {"messages": [QUESTION, ANSWER], "chosen": "a", "rejected": "b", "text": "t"}
    assert roles_and_texts(read_row(raw, "messages").messages) == EXPECTED_TURNS
    assert read_row(raw, "text") == Row(text="t")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (None, "wrong_type"),
        ({}, "unknown_format"),
        ({"messages": []}, "empty"),
        ({"messages": "hello"}, "bad_json"),
        ({"messages": [QUESTION]}, "no_answer"),
        ({"messages": [QUESTION, {**ANSWER, "content": " \n"}]}, "no_answer"),
        ({"messages": [QUESTION, {**ANSWER, "content": "", "tool_calls": []}]}, "no_answer"),
        ({"messages": [QUESTION, ANSWER, QUESTION, {**ANSWER, "content": ""}]}, "empty_answer"),
        ({"messages": [{**QUESTION, "images": ["a.png"]}, ANSWER]}, "bad_media"),
        ({"segments": [{"label": False, "text": "x"}]}, "no_answer"),
        ({"segments": [{"label": True, "text": "x"}], "image": "a.png"}, "bad_media"),
        ({"messages": [QUESTION, ANSWER], "rejected_response": "So."}, "equal_pair"),
        ({"messages": [QUESTION, {"role": "assistant"}]}, "missing_key"),
        ({"messages": [{"content": "x"}, ANSWER]}, "unknown_role"),
        ({"messages": [{"role": "narrator", "content": "x"}, ANSWER]}, "unknown_role"),
        ({"messages": [{"role": 3, "content": "x"}, ANSWER]}, "unknown_role"),
        (chat(3), "wrong_type"),
        (chat(0), "wrong_type"),
        (chat(False), "wrong_type"),
        (chat([["nested"]]), "wrong_type"),
        (chat([{"type": "hologram"}]), "unknown_block"),
        (chat([{"type": ["image"]}]), "unknown_block"),
        (chat([{"type": "text", "text": None}]), "wrong_type"),
        (chat([{"type": "image", "image": 3}]), "bad_media"),
        (chat([{"type": "image", "image": ""}]), "bad_media"),
        (chat([{"type": "image", "image": ["a", "b"]}]), "bad_media"),
        (chat([{"type": "image", "image": {"size": 3}}]), "bad_media"),
        (chat([{"type": "image", "image": "a\0b"}]), "bad_media"),
        (chat([{"type": "video", "video": []}]), "bad_media"),
        (chat([{"type": "video", "video": ["a", 3]}]), "bad_media"),
        (chat([{"type": "input_audio", "input_audio": {"data": 3}}]), "wrong_type"),
        (chat("<image>", images=[None]), "bad_media"),
        (chat("<image>", image="a", images=["a"]), "bad_media"),
        (chat("half a pair \ud800"), "bad_text"),
        (chat("x", system=["S"]), "wrong_type"),
        (chat("x", tools="{"), "bad_json"),
        (chat("x", tools="[" * 100_000), "bad_json"),
        (chat("x", tools=[b"x"]), "wrong_type"),
        (chat("x", tools=[{"x": b"x"}]), "wrong_type"),
        ({"messages": [{**QUESTION, "loss": "yes"}, ANSWER]}, "wrong_type"),
        ({"messages": [{**QUESTION, "weight": 0.5}, ANSWER]}, "wrong_type"),
        (
            {"messages": [QUESTION, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "wrong_type",
        ),
        ({"messages": [QUESTION, {"role": "assistant", "tool_calls": "call"}]}, "wrong_type"),
        (
            {
                "conversations": [
                    {"from": "human", "value": "x"},
                    {"from": "function_call", "value": "f()"},
                ]
            },
            "bad_json",
        ),
        (
            {"messages": [{"role": "system", "content": "S"}, QUESTION, ANSWER], "system": "S"},
            "two_systems",
        ),
        ({"text": ""}, "empty"),
        ({"text": 3}, "wrong_type"),
        ({"instruction": "x", "output": ""}, "no_answer"),
        ({"instruction": "x", "output": "y", "history": [["only a question"]]}, "wrong_type"),
        ({"prompt": "x", "completion": None, "text": None}, "unknown_format"),
        ({"prompt": [QUESTION, ANSWER], "completion": ""}, "no_answer"),
        ({"prompt": "x", "chosen": "same", "rejected": "same"}, "equal_pair"),
        ({"prompt": "x", "chosen": "a", "rejected": ""}, "no_answer"),
        ({"chosen": "quite", "rejected": "different"}, "no_prompt"),
        (
            {"prompt": "other", "chosen": [QUESTION, ANSWER], "rejected": [QUESTION, ANSWER]},
            "prompt_mismatch",
        ),
    ],
)
def test_read_row_each_mistake_has_its_reason_code(raw: Any, expected: str) -> None:
    assert reason(raw) == expected


def test_bad_row_names_the_place_and_pickles() -> None:
    with pytest.raises(BadRow) as caught:
        read_row(
            {
                "messages": [
                    QUESTION,
                    {
                        "role": "assistant",
                        "content": [{"type": "text", "text": "a"}, {"type": "text"}],
                    },
                ]
            }
        )
    assert str(caught.value) == "wrong_type: messages[1].content[1].text is null, wanted a string"
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.reason, again.detail, str(again)) == (
        caught.value.reason,
        caught.value.detail,
        str(caught.value),
    )


# Junk made of the keys and values that the reader looks for, so that it passes the first checks.
WORDS = [
    "role",
    "from",
    "content",
    "value",
    "loss",
    "weight",
    "type",
    "text",
    "image",
    "images",
    "videos",
    "video",
]
WORDS += [
    "audio",
    "audios",
    "path",
    "url",
    "bytes",
    "base64",
    "data",
    "image_url",
    "input_audio",
    "tool_calls",
]
WORDS += [
    "function",
    "name",
    "arguments",
    "tools",
    "system",
    "history",
    "caption",
    "array",
    "user",
    "assistant",
]
WORDS += [
    "function_call",
    "tool",
    "<image>",
    "<video><audio>",
    "",
    " ",
    "\ud83d",
    "\0",
    "[]",
    "{",
    '{"name": "f"}',
]
WORDS += [key for keys in FORMATS.values() for key in keys]
LEAVES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    1.5,
    float("nan"),
    10**400,
    b"",
    b"x",
    np.zeros(3),
    np.array("x"),
    {1},
]


def junk(rng: random.Random, depth: int) -> Any:
    kind = rng.random()
    if depth == 0 or kind < 0.3:
        return rng.choice(LEAVES) if rng.random() < 0.3 else rng.choice(WORDS)
    if kind < 0.65:
        return [junk(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {
        rng.choice([*WORDS, *WORDS, *WORDS, 3, None]): junk(rng, depth - 1)
        for _ in range(rng.randrange(6))
    }


def mutated(rng: random.Random, value: Any) -> Any:
    """`value` with one of its inner values replaced by junk."""
    if rng.random() < 0.15 or not isinstance(value, dict | list) or not value:
        return junk(rng, 2)
    key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = mutated(rng, value[key])
    return copy


def test_read_row_mutated_rows_give_a_row_or_a_bad_row() -> None:
    rng = random.Random(0)
    good = [
        *SAME_ROWS.values(),
        *(chat([block]) for block, _ in BLOCKS),
        chat("<image><video>", images=["1"], video="v"),
    ]
    good += [
        {
            "messages": [
                QUESTION,
                {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
            ],
            "tools": [{"a": 1}],
        }
    ]
    reasons: dict[str, int] = {}
    for number in range(20_000):
        raw = junk(rng, 5) if number % 4 == 0 else rng.choice(good)
        for _ in range(number % 4):
            raw = mutated(rng, raw)
        try:
            row = read_row(raw, rng.choice([*[None] * 30, *FORMATS]))
            assert row.text or any(message.role == "assistant" for message in row.messages)
            reasons["good"] = reasons.get("good", 0) + 1
        except BadRow as bad:
            str(bad).encode()  # can be written to bad_rows.jsonl
            reasons[bad.reason] = reasons.get(bad.reason, 0) + 1
    wanted = {
        "good",
        "wrong_type",
        "unknown_format",
        "unknown_role",
        "bad_media",
        "media_count",
        "unknown_block",
        "empty",
    }
    assert wanted <= set(reasons), reasons


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(WORDS) | st.text(), inner, max_size=5)
    ),
    max_leaves=20,
)


@settings(max_examples=120, deadline=None, database=None)
@given(raw=JSON, format=st.sampled_from([None, *FORMATS]))
def test_read_row_arbitrary_json_gives_a_row_or_a_bad_row(raw: Any, format: str | None) -> None:
    with contextlib.suppress(BadRow):
        assert isinstance(read_row(raw, format), Row)


def test_prompt_only_conversation_that_ends_with_the_user_carries_no_loss() -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c")]
    raw = {"messages": [{"role": role, "content": text} for role, text in turns]}
    row = read_row(raw, RowFormat(prompt_only=True))
    assert row.prompt_only
    assert [message.loss for message in row.messages] == [False, False, False]
    assert not read_row(raw, None).prompt_only
