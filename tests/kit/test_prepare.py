"""Prepared rows: batches and losses of the rows themselves, the same bytes however they are made, and no others."""

import json
import shlex
import signal
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, mvp, read_metrics, spawn, user_error
from run_files import json_lines
from templates.tiny import tokenizer
from tiny_vlm import chat, made, model_config, qwen3_vl, with_images, write, write_image

from mvp_engine.kit import MLLMData, MLLMDataKit
from mvp_engine.kit.data.read.row_files import MANIFEST
from mvp_engine.launch import launch
from mvp_engine.tools import prepare
from mvp_engine.tools.prepare import Preparation

DIGITS = ROOT / "recipes" / "digits_vlm" / "configs" / "train.yaml"


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(prepare, "MIN_SHARD_ROWS", 5)


def prepared(kit, out):
    preparation = Preparation(kit, out)
    preparation.begin()
    for job in preparation.jobs:
        preparation.make(job)
    preparation.finish()
    return out


def reads(kit, out, **settings):
    """A kit with the settings and the processor of another one, whose rows are those of the folder `out`."""
    given = {**kit.settings.model_dump(), "sources": [{"path": str(out)}], **settings}
    given = {**given, "cache": str(out.parent / "not_used")}
    config = model_config() if kit.row_encoder.positions else None
    return MLLMDataKit(MLLMData.model_validate(given), kit.processor, model_config=config)


def bytes_of(folder):
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def assert_same_batches(kit, other, split="train"):
    loaders = kit.loader(split, seed=3), other.loader(split, seed=3)
    assert loaders[0].plan_id() == loaders[1].plan_id()  # so a run can continue on prepared rows
    compared = 0
    for epoch in range(2):
        for loader in loaders:
            loader.set_epoch(epoch)
        for one, two in zip(*loaders, strict=True):
            compared += 1
            for name in ("input_ids", "labels", "position_ids", "cu_seqlens"):
                assert torch.equal(getattr(one, name), getattr(two, name)), name
            assert one.sequence_fields.keys() == two.sequence_fields.keys()
            for name, value in one.sequence_fields.items():
                assert torch.equal(value, two.sequence_fields[name]), name
            for name, media in one.media.items():
                assert torch.equal(media.values, two.media[name].values)
    assert compared > 1


def vlm_rows(folder):
    rows = with_images(folder, 20)
    rows += [chat("How long? " + "word " * 120, "Long."), {"messages": []}, {"text": "A text."}]
    write_image(folder / "large.png", 640, 640)
    rows.append(
        chat([{"type": "image", "image": "large.png"}, {"type": "text", "text": "?"}], "Yes.")
    )
    rows.append(
        chat([{"type": "image", "image": "none.png"}, {"type": "text", "text": "?"}], "No.")
    )
    return write(folder / "rows.jsonl", rows)


@pytest.mark.parametrize("overlong", ["drop", "truncate", "shrink"])
def test_prepared_rows_give_the_batches_of_the_rows(tmp_path, small_shards, overlong):
    file = vlm_rows(tmp_path)
    source = {"path": str(file), "hold_out": 0.1}
    settings = {"overlong": overlong, "sources": [source], "pack_tokens": 128, "max_bad_rows": 1.0}
    kit = made(file, qwen3_vl(), model_config(), **settings)
    other = reads(kit, prepared(kit, tmp_path / "out"))
    for split in ("train", "eval"):
        assert_same_batches(kit, other, split)
        assert other.bad_rows(split) == kit.bad_rows(split)
        assert other.overlong_rows(split) == kit.overlong_rows(split)
        assert other.summary(split) == kit.summary(split)
    assert len(kit.bad_rows()) >= 2
    assert kit.overlong_rows() or overlong != "drop"
    assert not (tmp_path / "not_used").exists()  # nothing was measured


def test_prepared_pairs_with_numbers_give_the_batches_of_the_rows(tmp_path, small_shards):
    rows = []
    for i in range(12):
        image = write_image(tmp_path / f"{i}.png", 32, 32, i)
        question = [{"type": "image", "image": image}, {"type": "text", "text": f"{i}?"}]
        answers = [
            [{"role": "assistant", "content": text}] for text in (f"{i}!", "no " * (1 + i % 3))
        ]
        prompt = [{"role": "user", "content": question}]
        rows.append(
            {"prompt": prompt, "chosen": answers[0], "rejected": answers[1], "score": i / 3}
        )
    file = write(tmp_path / "rows.jsonl", rows)
    kit = made(file, qwen3_vl(), model_config(), pairs=True, fields={"score": "float"})
    other = reads(kit, prepared(kit, tmp_path / "out"))
    assert_same_batches(kit, other)
    other.require_pairs("train")


def test_prepared_media_of_a_shard_are_kept_as_bytes(tmp_path):
    import tarfile

    for i in range(3):
        write_image(tmp_path / f"{i}.png", 32, 24 + 8 * i, i)
        (tmp_path / f"{i}.txt").write_text(f"picture {i}")
    with tarfile.open(tmp_path / "rows.tar", "w") as tar:
        for file in sorted([*tmp_path.glob("*.png"), *tmp_path.glob("*.txt")]):
            tar.add(file, file.name)
    kit = made(tmp_path / "rows.tar", qwen3_vl(), model_config())
    other = reads(kit, prepared(kit, tmp_path / "out"))
    assert_same_batches(kit, other)


def texts(folder, rows=40):
    return write(folder / "rows.jsonl", [{"text": "word " * (1 + 7 * i % 30)} for i in range(rows)])


def test_interrupted_preparation_continues_and_writes_the_same_bytes(tmp_path, small_shards):
    kit = made(texts(tmp_path), tokenizer("zephyr"))
    whole = bytes_of(prepared(kit, tmp_path / "whole"))
    first = Preparation(kit, tmp_path / "parts")
    assert first.begin()
    for job in first.jobs[:3]:
        first.make(job)
    with user_error("is not complete: start the same mvp data prepare again"):
        reads(kit, tmp_path / "parts")
    written = {
        name: file.stat().st_mtime_ns
        for name in whole
        if (file := tmp_path / "parts" / name).exists()
    }
    second = Preparation(made(texts(tmp_path), tokenizer("zephyr")), tmp_path / "parts")
    assert second.begin()
    left = [job for job in second.jobs if not second.file(job).exists()]
    assert len(left) == len(second.jobs) - 3
    assert sorted(second.make_all(left)) == sorted(left)  # in processes
    second.finish()
    assert bytes_of(tmp_path / "parts") == whole
    for name, time_ns in written.items():
        if name != MANIFEST:
            assert (tmp_path / "parts" / name).stat().st_mtime_ns == time_ns
    assert not second.begin()  # nothing is left to do


def test_folder_of_other_rows_or_settings_is_refused(tmp_path):
    kit = made(texts(tmp_path), tokenizer("zephyr"))
    out = prepared(kit, tmp_path / "out")
    with user_error("prepared from other files, or with other settings"):
        Preparation(made(texts(tmp_path), tokenizer("zephyr"), max_length=20), out).begin()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    with user_error("is not empty, and was not prepared"):
        Preparation(kit, tmp_path / "other").begin()
    with user_error("is prepared already"):
        Preparation(reads(kit, out), tmp_path / "again")


@pytest.mark.parametrize(
    "family, settings, error",
    [
        ("qwen2_5", {}, "another tokenizer than that of this training"),
        (
            "zephyr",
            {"pairs": True},
            "another template than that of this training: restore data.template",
        ),
        ("zephyr", {"overlong": "truncate", "max_length": 100}, "set data.max_length=256"),
    ],
)
def test_rows_prepared_for_another_model_or_length_are_refused(tmp_path, family, settings, error):
    kit = made(texts(tmp_path), tokenizer("zephyr"))
    out = prepared(kit, tmp_path / "out")
    settings = {**kit.settings.model_dump(), "sources": [{"path": str(out)}], **settings}
    with user_error(error):
        MLLMDataKit(MLLMData.model_validate(settings), tokenizer(family)).loader()


def test_rows_prepared_with_other_limits_of_media_are_refused(tmp_path):
    file = vlm_rows(tmp_path)
    kit = made(file, qwen3_vl(), model_config(), max_bad_rows=1.0)
    other = reads(kit, prepared(kit, tmp_path / "out"), limits={"max_pixels": 512})
    with user_error("another processor than that of this training: restore data.limits"):
        other.loader()


def test_prepared_rows_too_long_for_a_training_are_dropped(tmp_path):
    kit = made(texts(tmp_path), tokenizer("zephyr"))
    other = reads(kit, prepared(kit, tmp_path / "out"), max_length=12)
    again = made(texts(tmp_path), tokenizer("zephyr"), max_length=12)
    assert_same_batches(again, other)
    assert other.overlong_rows() == again.overlong_rows() != []


def test_source_of_prepared_rows_is_one_of_a_mixture(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    kit = made(texts(folder), tokenizer("zephyr"))
    out = prepared(kit, tmp_path / "out")
    more = write(tmp_path / "more.jsonl", [{"text": f"more {i}"} for i in range(10)])
    sources = [{"path": f"{out}/train/rows", "weight": 3}, {"path": str(more), "weight": 1}]
    both = made(more, tokenizer("zephyr"), sources=sources)
    assert both.mixture("train").shares() == pytest.approx({"rows": 0.75, "more": 0.25}, abs=0.02)
    assert len(list(both.loader())) > 1
    with user_error("so it takes no weight: remove it, or name the sources one by one"):
        made(more, tokenizer("zephyr"), sources=[{"path": str(out), "weight": 3}])


def pieces_of(kit, out):
    other = reads(kit, prepared(kit, out))
    found = {}
    for batch in other.loader(shuffle=False):
        start = 0
        for sample, length in zip(
            batch.sequence_fields["sample"].tolist(), batch.lengths.tolist(), strict=True
        ):
            found[sample] = batch.input_ids[start : start + length].tolist()
            start += length
    return [found[sample] for sample in sorted(found)], other


@pytest.mark.parametrize("how", ["split", "concat"])
def test_documents_are_cut_so_that_each_token_is_predicted_once(tmp_path, how):
    file = texts(tmp_path)
    whole = made(file, tokenizer("zephyr"), pack_tokens=512)
    documents, _ = pieces_of(whole, tmp_path / "whole")
    eos = whole.row_encoder.media.tokenizer.eos_token_id
    assert all(document[-1] == eos for document in documents)
    kit = made(file, tokenizer("zephyr"), overlong=how, max_length=16)
    pieces, _ = pieces_of(kit, tmp_path / how)
    assert max(map(len, pieces)) == 16
    entry = json.loads((tmp_path / how / MANIFEST).read_bytes())["sources"][0]
    assert entry["tokens"] == sum(map(len, pieces))
    predicted = [token for piece in pieces for token in piece[1:]]
    expected = [token for document in documents for token in document[1:]]
    if how == "concat":  # the first token of each document but one is predicted, too
        assert all(len(piece) == 16 for piece in pieces[:-1])
        expected = [token for document in documents for token in document][1:]
    assert predicted == expected
    assert entry["learnt"] == len(expected)
    with user_error(f"data.overlong={how}: rows has rows that are not prepared"):
        kit.loader()


# ---- Token ids of a named tokenizer ------------------------------------------------------------------


@pytest.fixture
def zephyr(tmp_path):
    tokenizer("zephyr").save_pretrained(tmp_path / "zephyr")
    return str(tmp_path / "zephyr")


def test_token_ids_of_the_models_tokenizer_train_as_their_text(tmp_path, zephyr):
    words = [f"{i} words " * (1 + i % 5) for i in range(20)]
    text = made(
        write(tmp_path / "rows.jsonl", [{"text": one} for one in words]), tokenizer("zephyr")
    )
    ids = [text.row_encoder.encode({"text": one}, None, tmp_path)[0].ids for one in words]
    labels = [[-100, -100, *one[2:]] for one in ids]
    folder = tmp_path / "ids"
    folder.mkdir()
    file = write(folder / "rows.jsonl", [{"input_ids": one} for one in ids])
    source = {"path": str(file), "tokenized_by": zephyr}
    kit = made(file, tokenizer("zephyr"), sources=[source])
    for one, two in zip(text.loader(seed=1), kit.loader(seed=1), strict=True):
        assert torch.equal(one.input_ids, two.input_ids)
        assert torch.equal(one.labels, two.labels)
    masks = [
        {
            "input_ids": [*one, 0, 0],
            "labels": [*label, -100, -100],
            "attention_mask": [1] * len(one) + [0, 0],
        }
        for one, label in zip(ids, labels, strict=True)
    ]
    masks[0] = {"input_ids": ids[0], "loss_mask": [0, 0, *[1] * (len(ids[0]) - 2)]}
    masked = made(write(file, masks), tokenizer("zephyr"), sources=[source])
    for i, one in enumerate(ids):
        (side,) = masked.row_encoder.encode(masks[i], masked.row_formats()[0], tmp_path)
        assert side.ids == one
        assert side.loss == [place > 1 for place in range(len(one))]


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "bad_labels"),
        ({"input_ids": [1, 2, 3], "loss_mask": [1, 1]}, "wrong_type"),
        ({"input_ids": ["a"]}, "wrong_type"),
        ({"input_ids": [1, 10**6]}, "bad_token"),
        ({"input_ids": [1, 2], "labels": [-100, -100]}, "nothing_to_learn"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": [1, 2], "image": "a.png"}, "bad_media"),
        ({"text": "no ids"}, "unknown_format"),
    ],
)
def test_token_ids_that_cannot_be_trained_on_are_bad_rows(tmp_path, zephyr, row, reason):
    file = write(tmp_path / "rows.jsonl", [row, {"input_ids": [3, 4, 5]}])
    kit = made(
        file,
        tokenizer("zephyr"),
        sources=[{"path": str(file), "tokenized_by": zephyr}],
        max_bad_rows=1.0,
    )
    assert [bad.reason for bad in kit.bad_rows()] == [reason]


def test_token_ids_of_another_or_of_no_named_tokenizer_are_refused(tmp_path, zephyr):
    file = write(tmp_path / "rows.jsonl", [{"input_ids": [1, 2, 3]}])
    with user_error("tokenized_by: FOLDER` of the source"):
        made(file, tokenizer("zephyr")).loader()
    kit = made(file, tokenizer("qwen2_5"), sources=[{"path": str(file), "tokenized_by": zephyr}])
    with user_error("is not the tokenizer of the model"):
        kit.loader()


# ---- The command -------------------------------------------------------------------------------------


def words_of(folder, *more):
    return [f"output_dir={folder}", "digits.count=40", "digits.drawings=1", *more]


@pytest.mark.slow
def test_training_on_prepared_digits_has_the_losses_of_their_rows(workspace, capsys):
    short = "train.max_steps=4 eval.steps=4 log.interval=1 log.backends=[jsonl] data.num_workers=0"
    short = [*short.split(), "eval.generation=null", "checkpoint.interval=2", "export_link=null"]
    assert mvp(f"data prepare {DIGITS} prepared", *words_of(workspace)) == 0
    assert "train on it with data.sources=" in capsys.readouterr().out
    found = []
    for name, more in (("rows", []), ("prepared", ["data.sources=prepared"])):
        words = words_of(workspace, f"run_id={name}", *short, *more)
        assert launch(str(DIGITS), words) == 0
        found.append([json_lines(workspace / name / "metrics.jsonl")])
    losses = [[(record["split"], record["loss"]) for record in records] for (records,) in found]
    assert losses[0] == losses[1]
    # A run that began on rows continues on prepared ones.
    more = ["data.sources=prepared", "train.max_steps=6", "eval.steps=null"]
    assert (
        launch(str(DIGITS), words_of(workspace, "run_id=rows", *short, *more, "resume=auto")) == 0
    )
    assert mvp("data inspect prepared") == 0
    assert "prepared" in capsys.readouterr().out
    words = shlex.join(["data.sources=prepared", *words_of(workspace)])
    assert mvp(f"data inspect {DIGITS} {words} --json --decode") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["sample"]["formats"] == {"prepared": sum(one["rows"] for one in facts["sources"])}
    assert facts["rows"][0]["sequences"][0]["text"]
    assert json_lines(workspace / "rows" / "metrics.jsonl")[-1]["step"] == 6


@pytest.mark.slow
def test_documents_config_prepares_and_trains_in_shares_of_the_tokens(vlm_folder, capsys):
    drawn = np.random.default_rng(0).integers(3, 200, 300)
    write(vlm_folder / "web.jsonl", [{"text": "words " * int(size)} for size in drawn])
    write(vlm_folder / "books.jsonl", [{"input_ids": list(range(20, 60)) * 8} for _ in range(60)])
    words = "model.path=model data.sources.web.path=web.jsonl data.sources.books.path=books.jsonl data.max_length=64"
    words += " data.sources.books.tokenized_by=model"
    words += " data.pack_tokens=128 data.global_batch_tokens=512 train.max_steps=6 data.num_workers=0 export_link=null"
    words += " model.activation_checkpointing=none log.interval=1 eval.steps=6 checkpoint.interval=3 run_id=one"
    words += " data.sources.web.weight=[[0,0.7],[0.5,0.7],[0.5,0]]"
    assert mvp(f"data prepare sft/token_documents out {words}") == 0
    assert mvp(f"train sft/token_documents {words}", "data.sources=out") == 0
    records = read_metrics(vlm_folder / "outputs")
    assert 0.7 > records[2]["share_web"] > 0.45  # of a window of packs that reaches beyond the end
    assert records[5]["share_web"] < 0.4
    run = json.loads((vlm_folder / "outputs" / "one" / "run.json").read_text())
    assert run["seen"]["web"]["tokens"] > 100
    assert "trained on books: " in (vlm_folder / "outputs" / "one" / "log.txt").read_text()
    assert ">epochs<" in (vlm_folder / "outputs" / "one" / "report.html").read_text()
    # Other shares from step 6 on.
    words = words.replace("max_steps=6", "max_steps=9").replace(
        "[[0,0.7],[0.5,0.7],[0.5,0]]", "0.9"
    )
    for name in ("web", "books"):
        words = words.replace(f"{name}.path={name}.jsonl", f"{name}.path=out/train/{name}")
        words += f" data.sources.{name}.hold_out=null"
    words = words.replace("eval.steps=6", "eval.steps=null") + " data.sources.books.weight=0.1"
    assert mvp(f"train sft/token_documents {words} resume=auto") == 0
    assert "the mixture changes after" in (vlm_folder / "outputs" / "one" / "log.txt").read_text()
    last = read_metrics(vlm_folder / "outputs")[-1]
    share = (6 * records[5]["share_web"] + 3 * 0.9) / 9
    assert last["share_web"] == pytest.approx(share, abs=0.06)


@pytest.mark.slow
def test_killed_command_leaves_what_the_next_one_continues(vlm_folder):
    rows = [{"text": "word " * 200} for _ in range(6_000)]
    write(vlm_folder / "rows.jsonl", rows)
    config = ROOT / "recipes" / "sft" / "configs" / "full.yaml"
    words = ["data", "prepare", str(config), "out", "model.path=model"]
    words += [
        "data.sources.rows={path: rows.jsonl}",
        "data.pack_tokens=512",
        "data.global_batch_tokens=512",
    ]
    process = spawn("-m", "mvp_engine.cli", *words, cwd=vlm_folder)
    deadline = time.monotonic() + 120
    while not list(vlm_folder.glob("out/train/rows/*.arrow")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    made_before = len(list(vlm_folder.glob("out/train/rows/*.arrow")))
    assert not json.loads((vlm_folder / "out" / MANIFEST).read_bytes())["complete"]
    assert mvp(shlex.join(words)) == 0
    assert mvp(shlex.join([*words[:3], "whole", *words[4:]])) == 0
    assert bytes_of(vlm_folder / "out") == bytes_of(vlm_folder / "whole")
    assert made_before < len(list(vlm_folder.glob("whole/train/rows/*.arrow"))) == 6


@pytest.mark.slow
def test_preparation_on_two_ray_workers_writes_the_same_bytes(workspace):
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    ray.init(num_cpus=2, include_dashboard=False, logging_level="WARNING", log_to_driver=False)
    try:
        words = words_of(workspace)
        assert mvp(f"data prepare {DIGITS} alone", *words) == 0
        assert mvp(f"data prepare {DIGITS} together --ray auto", *words) == 0
    finally:
        ray.shutdown()
    assert bytes_of(workspace / "together") == bytes_of(workspace / "alone")
