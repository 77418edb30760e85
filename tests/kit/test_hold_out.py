"""hold_out: a share of a source's rows becomes the split eval."""

import numpy as np
import pytest
from conftest import user_error
from run_files import json_lines
from templates.tiny import tokenizer
from tiny_vlm import chat, made, write

from mvp_engine.kit import MLLMData
from mvp_engine.kit.data.read.sources import open_source, split_rows


@pytest.mark.parametrize(
    "size, fraction, held_out",
    [(1000, 0.02, 20), (1049, 0.02, 20), (7, 0.02, 1), (2, 0.5, 1)],
)
def test_split_rows_holds_out_the_fraction_and_keeps_every_row_once(size, fraction, held_out):
    held, rest = split_rows(size, fraction)
    assert len(held) == held_out
    assert sorted([*held, *rest]) == list(range(size))


def test_split_rows_of_an_appended_file_moves_no_row():
    held, _ = split_rows(1000, 0.05)
    longer, _ = split_rows(5000, 0.05)
    assert longer[longer < 1000].tolist() == held.tolist()
    for period in (
        2,
        4,
        5,
        10,
        20,
    ):  # rows of several kinds in turn: all kinds are held out about equally
        counts = np.bincount(longer % period, minlength=period)
        assert counts.min() > 0.5 * counts.mean()


def test_subset_of_a_source_has_its_rows_places_and_a_fingerprint_of_its_own(
    tmp_path,
):
    rows = [{"text": str(i)} for i in range(10)]
    source = open_source([write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", rows)])
    subset = source.subset(np.array([3, 12]))
    assert [subset[i] for i in range(len(subset))] == [rows[3], rows[2]]
    assert subset.where(1) == "b.jsonl:3"
    assert (
        len({source.fingerprint, subset.fingerprint, source.subset(np.array([3])).fingerprint}) == 3
    )
    with pytest.raises(IndexError):
        subset[2]


def test_hold_out_divides_a_source_between_train_and_eval(tmp_path):
    rows = [chat(f"What is {i}?", f"It is {i}.") for i in range(40)]
    file = write(tmp_path / "chat.jsonl", rows)
    kit = made(file, tokenizer("qwen2_5"), sources=[{"path": str(file), "hold_out": 0.1}])
    questions = {}
    for split in ("train", "eval"):
        texts = set()
        for batch in kit.loader(split):
            for sample in batch.sequence_fields["sample"].tolist():
                texts.add(kit.row(split, sample)[1]["messages"][0]["content"])
        questions[split] = texts
    assert len(questions["eval"]) == 4
    assert len(questions["train"]) == 36
    assert not questions["train"] & questions["eval"]


@pytest.mark.parametrize(
    "source, expected",
    [
        ({"hold_out": 0.1, "split": "eval"}, "hold_out is for sources of split train"),
        ({"hold_out": 0.1, "stream": True}, "hold_out is for sources of split train"),
        ({"hold_out": 0.6}, "hold_out is at most 0.5"),
    ],
)
def test_hold_out_that_cannot_be_is_an_error(source, expected):
    with pytest.raises(ValueError, match=expected):
        MLLMData.model_validate({"sources": [{"path": "rows.jsonl", **source}], "pack_tokens": 64})


def test_hold_out_of_a_single_row_is_an_error(tmp_path):
    file = write(tmp_path / "chat.jsonl", [chat("What?", "This.")])
    kit = made(file, tokenizer("qwen2_5"), sources=[{"path": str(file), "hold_out": 0.1}])
    with user_error("has one row, and hold_out needs two"):
        kit.loader("train")


def test_hold_out_rows_are_listed_in_the_run_folder(tmp_path):
    rows = [chat(f"What is {i}?", f"It is {i}.") for i in range(20)]
    file = write(tmp_path / "chat.jsonl", rows)
    kit = made(file, tokenizer("qwen2_5"), sources=[{"path": str(file), "hold_out": 0.1}])
    kit.loader("train", folder=tmp_path / "run")
    listed = json_lines(tmp_path / "run" / "held_out.jsonl")
    held = kit.mixture("eval").sources[0]
    assert listed == [{"source": "chat", "where": held.where(row)} for row in range(2)]
    made(file, tokenizer("qwen2_5")).loader("train", folder=tmp_path / "whole")
    assert not (tmp_path / "whole" / "held_out.jsonl").exists()
