"""Rows that are left out: those unlike the rest of their file, and errors for splits without a row to train on."""

import contextlib
import json

import pytest
from conftest import user_error
from templates.tiny import tokenizer
from tiny_vlm import chat, made, qwen3_vl, write, write_image

from mvp_engine.kit.data.measured_sources import no_rows, refuse_no_pairs
from mvp_engine.kit.data.read.bad_rows import BadRecord
from mvp_engine.kit.data.read.row_types import BadRow, RowFormat
from mvp_engine.kit.data.read.rows import read_row
from mvp_engine.kit.data.read.sources import open_source
from mvp_engine.tools.inspect_rows import inspect_file

BAD = BadRecord("photos", "photos.jsonl:1", "missing_file", "image: no such file")


def test_no_rows_error_with_bad_rows_names_the_first_and_not_the_pack_size():
    text = str(no_rows("train", "Bad rows: 1 missing_file", [BAD], [], 16))
    assert "Such as photos.jsonl:1: missing_file: image: no such file" in text
    assert "data.pack_tokens" not in text


def test_no_rows_error_with_over_long_rows_names_the_keys():
    text = str(no_rows("train", "Bad rows: none", [], [BAD], 16))
    assert "more than 16 tokens: raise data.pack_tokens" in text
    assert "Such as" not in text


def test_missing_eval_split_error_names_hold_out(tmp_path):
    kit = made(write(tmp_path / "rows.jsonl", [chat("hi", "there")]), tokenizer("zephyr"))
    with user_error(
        r"no source has split: eval. To fix it, .* hold_out.*eval.steps=null",
    ):
        kit.loader("eval", global_batch_size=1)


def test_refuse_no_pairs_names_a_row_unless_one_is_a_pair_or_all_are_bad(tmp_path):
    chat = {"prompt": "q", "completion": "a"}
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    for name, rows in {"none": [{}, chat], "one": [chat, pair], "bad": [{}, {}]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = open_source(tmp_path / f"{name}.jsonl")
        refused = user_error(r"such as none.jsonl:2: rows need chosen")
        with refused if name == "none" else contextlib.nullcontext():
            refuse_no_pairs("train", [source], [RowFormat()])


def pictures(folder, rows=6):
    return [
        {"prompt": "What?", "completion": f"{i}", "image": write_image(folder / f"{i}.png", 16, 16)}
        for i in range(rows)
    ]


def reasons(file, processor, **source):
    """Reasons by place: those of a kit, which are those of an inspection without a model."""
    kit = made(file, processor, sources=[{"path": str(file), **source}])
    found = {record.where: record.reason for record in kit.bad_rows()}
    if not source:
        assert {
            row["where"]: row["reason"] for row in inspect_file(str(file))["bad"]["rows"]
        } == found
    assert made(file, processor, sources=[{"path": str(file), **source}]).summary(
        "train"
    ) == kit.summary("train")
    return found


def test_null_image_among_rows_with_images_is_a_bad_row_unless_the_column_is_optional(
    tmp_path,
):
    rows = pictures(tmp_path)
    rows.insert(2, {**rows[2], "image": None})
    file = write(tmp_path / "rows.jsonl", rows)
    assert reasons(file, qwen3_vl()) == {"rows.jsonl:3": "null_media"}
    assert reasons(file, qwen3_vl(), columns={"image": "image?"}) == {}


def test_null_image_in_a_mixture_or_an_absent_column_is_a_row_of_text(tmp_path):
    rows = pictures(tmp_path)
    mixed = [*rows[:3], *({**row, "image": None} for row in rows[3:])]
    assert reasons(write(tmp_path / "mixed.jsonl", mixed), qwen3_vl()) == {}
    absent = [*rows, {"prompt": "Hi", "completion": "Ho"}]
    assert reasons(write(tmp_path / "absent.jsonl", absent), qwen3_vl()) == {}


def test_null_prompt_of_a_pair_is_a_bad_row_where_other_pairs_have_one(tmp_path):
    pairs = [
        {"prompt": f"What is {i}?", "chosen": "It is a.", "rejected": "It is b."} for i in range(4)
    ]
    pairs.append({"prompt": None, "chosen": "It is a.", "rejected": "It is b."})
    file = write(tmp_path / "pairs.jsonl", pairs)
    assert reasons(file, tokenizer("zephyr")) == {"pairs.jsonl:5": "null_prompt"}
    assert reasons(file, tokenizer("zephyr"), columns={"prompt": "prompt?"}) == {}
    rows = [{"prompt": "q", "completion": "a", "text": "t"}] * 3 + [
        {"prompt": None, "completion": "a", "text": "t"}
    ]
    assert reasons(write(tmp_path / "rows.jsonl", rows), tokenizer("zephyr")) == {
        "rows.jsonl:4": "null_prompt"
    }


@pytest.mark.parametrize(
    "row, columns",
    [
        ({"prompt": "", "completion": "a"}, {"prompt": "prompt?"}),
        ({"instruction": " ", "input": "\n", "output": "a"}, {"instruction": "instruction?"}),
        (chat(" \n", "a"), {"messages": "messages?"}),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, {"prompt": "prompt?"}),
    ],
)
def test_empty_prompt_is_a_bad_row_unless_the_column_is_optional(row, columns):
    with pytest.raises(BadRow, match=r"empty_prompt: .*keeps such rows"):
        read_row(row)
    read_row(row, RowFormat(columns=columns))


def test_image_of_one_pixel_is_a_bad_row(tmp_path):
    rows = pictures(tmp_path, 3)
    write_image(tmp_path / "1.png", 1, 1)
    kit = made(write(tmp_path / "rows.jsonl", rows), qwen3_vl())
    assert [(one.where, one.reason) for one in kit.bad_rows()] == [("rows.jsonl:2", "too_small")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "a", "rejected": "a "},
        {"chosen": "q a\n", "rejected": "q a"},
        {**chat("q", "a"), "rejected_response": " a"},
        {
            "prompt": chat([{"type": "image", "image": "a.png"}], "")["messages"][:1],
            "chosen": "a",
            "rejected": "a\n",
        },
    ],
)
def test_pair_whose_answers_differ_in_blanks_only_is_a_bad_row(row):
    with pytest.raises(BadRow, match="equal_pair"):
        read_row(row)
