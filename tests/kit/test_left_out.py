"""Errors for splits without a row to train on: they name a row and the fix."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from templates.tiny import tokenizer
from tiny_vlm import chat, made, write

from mvp_engine.errors import UserError
from mvp_engine.kit.data.left_out import no_rows, refuse_no_pairs
from mvp_engine.kit.data.read.bad_rows import BadRecord
from mvp_engine.kit.data.read.row_format import RowFormat
from mvp_engine.kit.data.read.sources import open_source

BAD = BadRecord("photos", "photos.jsonl:1", "missing_file", "image: no such file")


def test_no_rows_error_with_bad_rows_names_the_first_and_not_the_pack_size() -> None:
    text = str(no_rows("train", "Bad rows: 1 missing_file", [BAD], [], 16))
    assert "Such as photos.jsonl:1: missing_file: image: no such file" in text
    assert "mllm.micro_batch_tokens" not in text


def test_no_rows_error_with_over_long_rows_names_the_keys() -> None:
    text = str(no_rows("train", "Bad rows: none", [], [BAD], 16))
    assert "more than 16 tokens: raise mllm.micro_batch_tokens" in text
    assert "Such as" not in text


def test_missing_eval_split_error_names_hold_out(tmp_path: Path) -> None:
    kit = made(write(tmp_path / "rows.jsonl", [chat("hi", "there")]), tokenizer("zephyr"))
    with pytest.raises(UserError, match=r"no source has split: eval. To fix it, .* hold_out.*loop.eval_interval=null"):
        kit.loader("eval", global_batch_size=1)


def test_refuse_no_pairs_names_a_row_unless_one_is_a_pair_or_all_are_bad(tmp_path: Path) -> None:
    chat = {"prompt": "q", "completion": "a"}
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    for name, rows in {"none": [{}, chat], "one": [chat, pair], "bad": [{}, {}]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = open_source(tmp_path / f"{name}.jsonl")
        refused = pytest.raises(UserError, match=r"such as none.jsonl:2: rows need chosen")
        with refused if name == "none" else contextlib.nullcontext():
            refuse_no_pairs("train", [source], [RowFormat()])
