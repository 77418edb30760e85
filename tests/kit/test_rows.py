"""Row formats: every format is read into the same `Row`; junk is a BadRow with a reason code, never a crash."""

import copy
import json
import pickle
import re

import numpy as np
import pytest
from conftest import user_error
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mvp_engine.kit.data.read.row_types import BadRow, Message, Part, Row, RowFormat
from mvp_engine.kit.data.read.rows import FORMATS, detect_format, read_row

QUESTION = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "So."}
OTHER = {"role": "assistant", "content": "No."}
TURNS = [QUESTION, ANSWER]


def text_part(text):
    return Part("text", text)


def reason(raw, format=None):
    with pytest.raises(BadRow) as caught:
        read_row(raw, format)
    return caught.value.reason


def media_values(row):
    return [part.value for part in row.media()]


def roles_and_texts(messages):
    return [(message.role, message.text) for message in messages]


EXPECTED_TURNS = [("user", "Why?"), ("assistant", "So.")]
SAME_ROWS = {
    "messages": {"messages": TURNS},
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
        "rejected": [OTHER],
    },
    "preference, one message": {
        "conversations": [QUESTION],
        "chosen": ANSWER,
        "rejected": OTHER,
    },
    "preference, implicit": {
        "chosen": TURNS,
        "rejected": [QUESTION, OTHER],
    },
    "preference, implicit in strings": {"chosen": "Why? So.", "rejected": "Why? No."},
    "preference, prompt twice": {
        "prompt": "Why?",
        "chosen": TURNS,
        "rejected": [QUESTION, OTHER],
        "messages": TURNS,
    },
    "preference, alpaca": {"instruction": "Why?", "chosen": "So.", "rejected": "No."},
}


@pytest.mark.parametrize("name", SAME_ROWS)
def test_read_row_every_format_gives_the_same_conversation(name):
    row = read_row(SAME_ROWS[name])
    assert roles_and_texts(row.messages) == EXPECTED_TURNS
    if name.startswith("preference"):
        assert roles_and_texts(row.rejected) == [("user", "Why?"), ("assistant", "No.")]
        assert detect_format(SAME_ROWS[name]) == "preference"
    else:
        assert not row.rejected


def test_read_row_plain_text_keeps_the_text_unchanged():
    assert read_row({"text": " Once upon \n"}) == Row(text=" Once upon \n")


def test_read_row_alpaca_history_input_and_system_become_turns():
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


def test_read_row_prompt_has_no_loss_unless_a_message_sets_it():
    shared = [*TURNS, QUESTION]
    row = read_row({"prompt": shared, "completion": [ANSWER]})
    assert [message.loss for message in row.messages] == [False, False, False, None]
    row = read_row({"chosen": [*shared, ANSWER], "rejected": [*shared, OTHER]})
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


def test_read_row_tool_calls_and_results_pass_through_unchanged():
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


def test_read_row_sharegpt_calls_and_observations_become_tool_turns():
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


@pytest.mark.parametrize("block, part", BLOCKS, ids=lambda value: str(value)[:50])
def test_read_row_typed_block_in_every_spelling_gives_the_part(block, part):
    row = read_row(
        {"messages": [{"role": "user", "content": [block, {"type": "text", "text": "?"}]}, ANSWER]}
    )
    assert row.messages[0].parts == (part, text_part("?"))


def test_read_row_pil_images_and_arrays_pass_through_unchanged():
    image, frames = Image.new("RGB", (2, 2)), np.zeros((3, 4, 4, 3), np.uint8)
    content = [{"type": "image", "image": image}, {"type": "video", "video": frames}]
    row = read_row({"messages": [{"role": "user", "content": content}, ANSWER]})
    assert row.media()[0].value is image
    assert row.media()[1].value is frames


def chat(question, answer="So.", **columns):
    return {
        "messages": [{**QUESTION, "content": question}, {**ANSWER, "content": answer}],
        **columns,
    }


def test_read_row_text_with_media_is_a_caption():
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


def test_read_row_unknown_format_names_found_and_wanted_keys():
    with pytest.raises(BadRow) as caught:
        read_row({"question": "Q", "messages": None})
    assert caught.value.reason == "unknown_format"
    assert "'question', 'messages' (null)" in caught.value.detail
    assert all(key in caught.value.detail for keys in FORMATS.values() for key in keys)
    with pytest.raises(BadRow, match="wanted: instruction and output"):
        read_row({"messages": TURNS}, "alpaca")
    with user_error("mesages"):
        read_row({}, "mesages")


@pytest.mark.parametrize(
    "raw, columns",
    [
        ({"message": []}, "{message: messages}"),
        ({"Question": "Q", "Answer": "A", "id": 1}, "{Question: question, Answer: answer}"),
        ({"prompt": "Q", "chosen_response": "a", "rejected": "b"}, "{chosen_response: chosen}"),
    ],
)
def test_read_row_similar_columns_are_named_in_the_error(raw, columns):
    with pytest.raises(BadRow, match=re.escape(f"Did you mean `columns: {columns}`")):
        read_row(raw)


@pytest.mark.parametrize(
    "column, value, kind",
    [
        ("image_path", "a.png", "image"),
        ("picture", {"bytes": b"x", "path": None}, "image"),
        ("frames", ["1.jpg", "2.jpg"], "image"),
        ("audio_filepath", "a.wav", "audio"),
    ],
)
def test_read_row_media_in_a_column_that_nothing_reads_is_refused(column, value, kind):
    raw = {"question": "Q", "answer": "A", column: value}
    with pytest.raises(BadRow, match=re.escape(f"columns: {{{column}: {kind}}}")):
        read_row(raw)
    assert read_row(raw, RowFormat(columns={column: kind})).media()
    assert not read_row(raw, RowFormat(columns={column: None})).media()
    assert read_row(raw | {"images": ["b.png"]}).unused == (column,)  # the row has its media
    assert read_row(raw | {column: "png"}).unused == (column,)  # no file


def test_read_row_given_format_overrides_detection():
    raw = {"messages": TURNS, "chosen": "a", "rejected": "b", "text": "t"}
    assert roles_and_texts(read_row(raw, "messages").messages) == EXPECTED_TURNS
    assert read_row(raw, "text") == Row(text="t")


def image(value, **options):
    return chat([{"type": "image", "image": value, **options}])


def calls(*tool_calls):
    return {"messages": [QUESTION, {"role": "assistant", "tool_calls": [*tool_calls]}]}


MISTAKES = {
    "wrong_type": [
        None,
        chat(3),
        chat(0),
        chat(False),
        chat([["nested"]]),
        chat([{"type": "text", "text": None}]),
        chat([{"type": "input_audio", "input_audio": {"data": 3}}]),
        chat("x", system=["S"]),
        chat("x", tools=[b"x"]),
        chat("x", tools=[{"x": b"x"}]),
        {"messages": [{**QUESTION, "loss": "yes"}, ANSWER]},
        {"messages": [{**QUESTION, "weight": [1]}, ANSWER]},
        {"messages": [QUESTION, {"role": "assistant", "tool_calls": "call"}]},
        calls({"function": {}}),
        {"text": 3},
        {"instruction": "x", "output": "y", "history": [["only a question"]]},
    ],
    "unknown_format": [{}, {"prompt": "x", "completion": None, "text": None}],
    "empty": [{"messages": []}, {"text": ""}],
    "bad_json": [
        {"messages": "hello"},
        chat("x", tools="{"),
        chat("x", tools="[" * 100_000),
        {
            "conversations": [
                {"from": "human", "value": "x"},
                {"from": "function_call", "value": "f()"},
            ]
        },
    ],
    "no_answer": [
        {"messages": [QUESTION]},
        chat("x", " \n"),
        {"messages": [QUESTION, {**ANSWER, "content": "", "tool_calls": []}]},
        {"segments": [{"label": False, "text": "x"}]},
        {"instruction": "x", "output": ""},
        {"prompt": TURNS, "completion": ""},
        {"prompt": "x", "chosen": "a", "rejected": ""},
    ],
    "empty_answer": [{"messages": [*TURNS, QUESTION, {**ANSWER, "content": ""}]}],
    "bad_media": [
        {"messages": [{**QUESTION, "images": ["a.png"]}, ANSWER]},
        {"segments": [{"label": True, "text": "x"}], "image": "a.png"},
        image(3),
        image(""),
        image(["a", "b"]),
        image({"size": 3}),
        image("a\0b"),
        chat([{"type": "video", "video": []}]),
        chat([{"type": "video", "video": ["a", 3]}]),
        chat("<image>", images=[None]),
        chat("<image>", image="a", images=["a"]),
    ],
    "equal_pair": [
        {"messages": TURNS, "rejected_response": "So."},
        {"prompt": "x", "chosen": "same", "rejected": "same"},
    ],
    "missing_key": [{"messages": [QUESTION, {"role": "assistant"}]}],
    "unknown_role": [
        {"messages": [{"content": "x"}, ANSWER]},
        {"messages": [{"role": "narrator", "content": "x"}, ANSWER]},
        {"messages": [{"role": 3, "content": "x"}, ANSWER]},
    ],
    "unknown_block": [chat([{"type": "hologram"}]), chat([{"type": ["image"]}])],
    "bad_text": [chat("half a pair \ud800")],
    "two_systems": [{"messages": [{"role": "system", "content": "S"}, *TURNS], "system": "S"}],
    "no_prompt": [{"chosen": "quite", "rejected": "different"}],
    "prompt_mismatch": [{"prompt": "other", "chosen": TURNS, "rejected": TURNS}],
}


@pytest.mark.parametrize("expected", MISTAKES)
def test_read_row_each_mistake_has_its_reason_code(expected):
    for raw in MISTAKES[expected]:
        assert reason(raw) == expected, raw


def test_bad_row_names_the_place_and_pickles():
    answer = {**ANSWER, "content": [{"type": "text", "text": "a"}, {"type": "text"}]}
    with pytest.raises(BadRow) as caught:
        read_row({"messages": [QUESTION, answer]})
    text = "wrong_type: messages[1].content[1].text is null, wanted a string"
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(caught.value) == str(again) == text
    assert (again.reason, again.detail) == (caught.value.reason, caught.value.detail)


# Keys and values that the reader looks for, so that junk made of them passes the first checks.
KEYS = """
role from content value loss weight type text image images videos video audio audios path url bytes base64 data
image_url input_audio tool_calls function name arguments tools system history caption array user assistant
function_call tool <image> <video><audio> [] {
"""
WORDS = [*KEYS.split(), "", " ", "\ud83d", "\0", '{"name": "f"}']
WORDS += [key for keys in FORMATS.values() for key in keys]
JUNK = [10**400, b"x", {1}, np.zeros(3), np.array("x"), Image.new("RGB", (2, 2))]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(WORDS)
    | st.sampled_from(JUNK),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(WORDS) | st.text(), inner, max_size=5)
    ),
    max_leaves=20,
)


def test_prompt_only_conversation_that_ends_with_the_user_carries_no_loss():
    turns = [("user", "a"), ("assistant", "b"), ("user", "c")]
    raw = {"messages": [{"role": role, "content": text} for role, text in turns]}
    row = read_row(raw, RowFormat(prompt_only=True))
    assert row.prompt_only
    assert [message.loss for message in row.messages] == [False, False, False]
    assert not read_row(raw, None).prompt_only


@st.composite
def damaged_rows(draw):
    """A good row with up to three of its inner values replaced by junk."""
    blocks = [chat([block]) for block, _ in BLOCKS]
    row = copy.deepcopy(draw(st.sampled_from([*SAME_ROWS.values(), *blocks])))
    for _ in range(draw(st.integers(1, 3))):
        inner = row
        while True:
            key = draw(
                st.sampled_from(list(inner) if isinstance(inner, dict) else range(len(inner)))
            )
            if not isinstance(inner[key], dict | list) or not inner[key] or draw(st.booleans()):
                break
            inner = inner[key]
        inner[key] = draw(JSON)
    return row


@pytest.mark.slow
@settings(max_examples=500, deadline=None, database=None)
@given(raw=JSON | damaged_rows(), format=st.sampled_from([None, None, *FORMATS]))
def test_read_row_junk_gives_a_row_or_a_bad_row(raw, format):
    try:
        row = read_row(raw, format)
        assert row.text or any(message.role == "assistant" for message in row.messages)
    except BadRow as bad:
        str(bad).encode()  # can be written to bad_rows.jsonl
