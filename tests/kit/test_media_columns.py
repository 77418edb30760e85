"""Media columns of rows: their items go to typed blocks without value, and to tags in texts."""

import pytest
from test_rows import chat, media_values, reason, text_part

from mvp_engine.kit.data.read.row_types import Part, RowFormat
from mvp_engine.kit.data.read.rows import read_row


def test_fill_placeholders_tags_take_column_items_in_order_and_split_text():
    row = read_row(chat("<image>A<video>B<image>", images=["1", "2"], videos=["v"]))
    assert row.messages[0].parts == (
        Part("image", "1"),
        text_part("A"),
        Part("video", "v"),
        text_part("B"),
        Part("image", "2"),
    )
    llava = {
        "image": "1",
        "conversations": [{"from": "human", "value": "<image>\nQ"}, {"from": "gpt", "value": "A"}],
    }
    assert read_row(llava).messages[0].parts == (Part("image", "1"), text_part("\nQ"))
    assert media_values(read_row({"instruction": "<audio>?", "output": "A", "audios": ["a"]})) == [
        "a"
    ]
    pair = read_row({"prompt": "<image>?", "chosen": "A", "rejected": "B", "images": [b"x"]})
    assert pair.messages[0] == pair.rejected[0]


def test_fill_placeholders_tag_in_answer_stays_text_when_questions_use_up_the_column():
    row = read_row(chat("<image> Which tag?", "Write <image>.", images=["1"]))
    assert row.messages[1].parts == (text_part("Write <image>."),)
    assert media_values(row) == ["1"]
    assert (
        read_row(chat("Which tag?", "Write <image>.", images=[])).messages[1].text
        == "Write <image>."
    )
    # The only place for it.
    assert media_values(read_row(chat("Draw one", "<image>", images=["1"]))) == ["1"]


def test_fill_placeholders_blocks_without_value_take_the_column_before_tags():
    typed = [{"type": "image"}, {"type": "text", "text": "What is <image>?"}]
    row = read_row(chat(typed, images=["1"]))
    assert row.messages[0].parts == (Part("image", "1"), text_part("What is <image>?"))
    assert media_values(read_row(chat(typed, images=["1", "2"]))) == ["1", "2"]
    assert read_row(chat([{"type": "image", "max_pixels": 4}], image="1")).media() == [
        Part("image", "1", {"max_pixels": 4})
    ]


def test_fill_placeholders_without_a_place_items_come_first_in_the_first_user_turn():
    system = {"role": "system", "content": "S"}
    row = read_row(
        {"messages": [system, *chat("Q")["messages"]], "images": ["1", "2"], "video": "v"}
    )
    assert row.messages[1].parts == (
        Part("image", "1"),
        Part("image", "2"),
        Part("video", "v"),
        text_part("Q"),
    )
    pair = read_row({"prompt": "Q", "chosen": "A", "rejected": "B", "image": "1"})
    assert pair.messages[0] == pair.rejected[0]
    assert media_values(pair) == ["1"]


def test_fill_placeholders_html_tags_without_unread_columns_stay_text():
    for columns in ({}, {"videos": None}, {"images": ["1"]}):
        row = read_row(
            chat("Does HTML have <video>?" + "<image>" * len(columns.get("images", [])), **columns)
        )
        assert "<video>" in row.messages[0].text
    assert read_row(chat("Which tag?", "Write <image>.")).messages[1].text == "Write <image>."


def test_fill_placeholders_without_media_tags_are_text():
    row = read_row(chat("What is <image>?", id=3), RowFormat(media_tags=False))
    assert row.messages[0].parts == (text_part("What is <image>?"),)
    row = read_row(chat("What is <image>?", image="1"), RowFormat(media_tags=False))
    assert row.messages[0].parts == (Part("image", "1"), text_part("What is <image>?"))


@pytest.mark.parametrize(
    "raw",
    [
        chat("<image>", images=["1", "2"]),
        chat("<image><image>", images=["1"]),
        chat([{"type": "image", "image": "1"}], images=["1"]),
        {"messages": [{"role": "assistant", "content": "no user turn"}], "images": ["1"]},
        chat("<image>?"),
        chat("<video>?", clip="1.mp4"),
        chat("<image>", images=[]),
        chat("<image>", "<image><image>", images=["1", "2"]),
        chat([{"type": "image"}]),
        chat([{"type": "image"}, {"type": "image"}], images=["1"]),
        {"text": "a <image>", "images": ["1"]},
        {"text": "a <image>", "image_path": "1"},
    ],
)
def test_fill_placeholders_count_mismatch_is_a_bad_row(raw):
    assert reason(raw) == "media_count"


def test_media_columns_list_is_one_video_but_several_images():
    assert media_values(read_row(chat("<video>", video=["1.png", "2.png"]))) == [["1.png", "2.png"]]
    assert media_values(read_row(chat("<video>", videos=[["1.png", "2.png"]]))) == [
        ["1.png", "2.png"]
    ]
    assert media_values(read_row(chat("<image><image>", image=["1.png", "2.png"]))) == [
        "1.png",
        "2.png",
    ]
