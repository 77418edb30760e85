"""MLLMDataKit from files to training: loss masks, media, over-long rows, bad rows and their counts."""

from __future__ import annotations

import json
import logging
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from templates.tiny import tokenizer
from tiny_vlm import TEXT, chat, made, model_config, qwen3_vl, with_images, write, write_image

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel
from mvp_engine.kit import MLLMData
from mvp_engine.kit.data.encode import processor_runner
from mvp_engine.kit.data.encode.template import ChatTemplate
from mvp_engine.kit.data.read import decode_image
from mvp_engine.kit.data.read.bad_rows import BadRecord, BadRows
from mvp_engine.kit.data.read.rows import read_row


def learns(model: LanguageModel, batches: list[PackedBatch], steps: int = 8) -> list[float]:
    optimizer, means = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(steps):
        optimizer.zero_grad()
        total = torch.stack(
            [-model(batch, ["log_probs"])["log_probs"].sum() for batch in batches]
        ).sum()
        loss = total / torch.stack([batch.num_loss_tokens for batch in batches]).sum()
        loss.backward()
        optimizer.step()
        means.append(float(loss.detach()))
    return means


def test_loader_chats_have_the_tokens_and_loss_mask_of_the_template(tmp_path: Path) -> None:
    rows = [chat(f"What is {i}?", f"It is {'very ' * (i % 7)}{i}.") for i in range(40)]
    kit = made(write(tmp_path / "chat.jsonl", rows), tokenizer("qwen2_5"))
    template, seen = ChatTemplate(tokenizer("qwen2_5")), set()
    for batch in kit.loader("train"):
        assert batch.num_tokens <= 256
        for s, sample in enumerate(batch.sequence_fields["sample"].tolist()):
            ids, loss, _ = template.tokenize(template.render(read_row(rows[sample])))
            part = batch.select([s])
            assert part.input_ids.tolist() == ids
            assert part.position_ids.tolist() == list(range(len(ids)))
            expected = [id if has else IGNORE for id, has in zip(ids[1:], loss[1:], strict=True)]
            assert part.labels.tolist() == [*expected, IGNORE]
            seen.add(sample)
    assert seen == set(range(40))


def test_loader_plain_text_without_chat_template_trains(tmp_path: Path) -> None:
    words = hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer("zephyr").backend_tokenizer, eos_token="</s>"
    )
    kit = made(
        write(tmp_path / "text.jsonl", [{"text": f"hello world {i % 3}"} for i in range(30)]), words
    )
    batches = list(kit.loader("train"))
    torch.manual_seed(0)
    means = learns(LanguageModel.from_config(hf.Qwen3Config(**TEXT)), batches)
    assert means[-1] < 0.5 * means[0]
    assert kit.summary("train").startswith("train: 30 rows an epoch (text: 30)")


def test_loader_images_equal_the_processor_outputs_and_train(tmp_path: Path) -> None:
    rows, processor, config = with_images(tmp_path), qwen3_vl(), model_config()
    kit = made(write(tmp_path / "images.jsonl", rows), processor, config)
    batches = list(kit.loader("train", num_workers=1))
    torch.manual_seed(0)
    model = LanguageModel.from_config(config)
    for batch in batches:
        for s, sample in enumerate(batch.sequence_fields["sample"].tolist()):
            check_against_processor(batch.select([s]), rows[sample], tmp_path, model)
    assert sum(len(batch.media["pixel_values"].row_counts) for batch in batches) == 12
    means = learns(model, batches)
    assert means[-1] < 0.7 * means[0]


def check_against_processor(
    one: PackedBatch, row: dict[str, Any], folder: Path, model: LanguageModel
) -> None:
    """Tokens, pixels and positions equal those of transformers for the row."""
    names = [block["image"] for block in row["messages"][0]["content"] if block["type"] == "image"]
    text = qwen3_vl().apply_chat_template(row["messages"], tokenize=False)
    images = [Image.open(folder / name) for name in names] or None
    expected = qwen3_vl()(
        text=[text], images=images, return_tensors="pt", return_mm_token_type_ids=True
    )
    assert torch.equal(one.input_ids, expected["input_ids"][0])
    grids = {"image_grid_thw": expected["image_grid_thw"]} if names else {}
    base: Any = model.base()
    positions, _ = base.get_rope_index(
        expected["input_ids"], expected["mm_token_type_ids"], **grids
    )
    assert torch.equal(one.position_ids, positions[:, 0])
    if names:
        assert torch.equal(one.media["pixel_values"].values, expected["pixel_values"])
        assert torch.equal(
            one.media["pixel_values"].fields["image_grid_thw"], expected["image_grid_thw"]
        )


@pytest.mark.parametrize("swallows", [False, True])
def test_loader_video_equals_the_processor_output_of_the_whole_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swallows: bool
) -> None:
    """Some versions of transformers take the tokens around a video's placeholder away with it."""
    frames = [write_image(tmp_path / f"{i}.png", 16, 16, i) for i in range(4)]
    row = {**chat("<video>What?", "A video."), "videos": [frames]}
    shown = [
        {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "What?"}]},
        row["messages"][1],
    ]
    text, token = qwen3_vl().apply_chat_template(shown, tokenize=False), "<|video_pad|>"
    whole = f"<|vision_start|>{token}<|vision_end|>"
    if swallows:
        call, text = processor_runner.call_processor, text.replace(whole, token)
        monkeypatch.setattr(
            processor_runner,
            "call_processor",
            lambda p, a, t, *more, **m: call(p, a, token if t == whole else t, *more, **m),
        )
    batch = next(
        iter(
            made(write(tmp_path / "videos.jsonl", [row]), qwen3_vl(), model_config()).loader(
                "train"
            )
        )
    )
    video = torch.stack(
        [
            torch.from_numpy(np.array(Image.open(tmp_path / name))).permute(2, 0, 1)
            for name in frames
        ]
    )
    about = {"total_num_frames": 4, "fps": 2.0, "duration": 2.0, "frames_indices": [0, 1, 2, 3]}
    given = {
        "videos": [[video]],
        "videos_kwargs": {"video_metadata": [[about]], "do_sample_frames": False},
    }
    expected = qwen3_vl()(text=[text], **given, return_tensors="pt")
    assert batch.input_ids.tolist() == expected["input_ids"][0].tolist()
    assert torch.equal(batch.media["pixel_values_videos"].values, expected["pixel_values_videos"])


@pytest.mark.parametrize("overlong", ["drop", "truncate", "shrink", "error"])
def test_loader_overlong_rows_are_dropped_truncated_shrunk_or_refused(
    tmp_path: Path, overlong: str
) -> None:
    wide = write_image(tmp_path / "wide.png", 32, 32)
    blocks = [{"type": "image", "image": wide}] * 4
    rows = [
        chat("Hi", "Yes"),
        chat("Hi", "long " * 200),
        chat([*blocks, {"type": "text", "text": "?"}], "Four."),
    ]
    kit = made(
        write(tmp_path / "long.jsonl", rows),
        qwen3_vl(),
        model_config(),
        row_tokens=90,
        overlong=overlong,
        max_bad_fraction=0.7,
    )
    if overlong == "error":
        with pytest.raises(
            UserError, match=r"2 rows of more than 90 tokens, such as long.jsonl:2, long.jsonl:3"
        ):
            kit.loader("train")
        return
    batches = {
        s: b.select([i])
        for b in kit.loader("train")
        for i, s in enumerate(b.sequence_fields["sample"].tolist())
    }
    assert all(batch.num_tokens <= 90 for batch in batches.values())
    assert all(int(batch.num_loss_tokens) > 0 for batch in batches.values())
    lost = kit.summary("train")
    if overlong == "drop":
        assert batches.keys() == {0}
        assert "Bad rows: none. Over-long rows dropped: 2" in lost
    elif overlong == "truncate":  # the question of the third is all that would be left
        assert batches.keys() == {0, 1}
        assert batches[1].num_tokens == 90
        assert (
            "Bad rows: 1 nothing_to_learn. Over-long rows truncated: 1 (long.jsonl:2), dropped: 0"
            in lost
        )
    else:
        assert batches.keys() == {0, 2}
        assert len(batches[2].media["pixel_values"].row_counts) == 4
        assert (
            "Bad rows: none. Over-long rows shrunk: 1 (long.jsonl:3), dropped: 1 (long.jsonl:2)"
            in lost
        )
        assert [one.where for one in kit.overlong_rows("train")] == ["long.jsonl:2"]


def test_loader_bad_rows_are_listed_counted_and_left_out(tmp_path: Path) -> None:
    rows: list[Any] = [chat("Hi", f"Yes {i}") for i in range(20)]
    rows[3], rows[7] = "{broken", {"question": "?"}
    rows[11] = chat([{"type": "image", "image": "gone.png"}], "None.")
    rows[15] = chat([{"type": "image", "image": "../../etc/passwd"}], "None.")
    file = write(tmp_path / "rows.jsonl", rows)
    out = tmp_path / "run"
    kit = made(file, qwen3_vl(), model_config(), max_bad_fraction=0.2)
    for rank in (1, 0, 0):  # the last is a resume
        loader = kit.loader("train", rank=rank, world_size=2, folder=out)
    listed = [json.loads(line) for line in (out / "bad_rows.jsonl").read_text().splitlines()]
    expected = {"rows.jsonl:4": "bad_json", "rows.jsonl:8": "unknown_format"}
    expected |= {"rows.jsonl:12": "missing_file", "rows.jsonl:16": "missing_file"}
    assert {line["where"]: line["reason"] for line in listed} == expected
    assert len(listed) == 4
    assert loader.bad_rows.counts["rows", "missing_file"] == 2
    samples = {s for batch in kit.loader("train") for s in batch.sequence_fields["sample"].tolist()}
    assert samples == set(range(20)) - {3, 7, 11, 15}
    for settings in ({"max_bad_fraction": 0.15}, {"max_bad_fraction": 1.0, "max_bad_rows": 3}):
        with pytest.raises(
            UserError, match=r"4 of 20 rows are bad, and 3 are allowed .*1 bad_json.*rows.jsonl:4"
        ):
            made(file, qwen3_vl(), model_config(), **settings).loader("train")


def test_loader_bad_row_with_fixed_file_is_used_again(tmp_path: Path) -> None:
    rows = [chat("Hi", "Yes"), chat([{"type": "image", "image": "late.png"}], "None.")]
    file = write(tmp_path / "rows.jsonl", rows)
    assert "1 missing_file" in made(file, qwen3_vl()).summary("train")
    write_image(tmp_path / "late.png", 16, 16)
    assert "Bad rows: none" in made(file, qwen3_vl()).summary("train")


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_image_truncated_after_planning_drops_only_its_row(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("mvp_engine"), "warning", lambda text, *args: warnings.append(text % args)
    )
    file = write(tmp_path / "images.jsonl", with_images(tmp_path))
    kit = made(file, qwen3_vl(), model_config(), max_bad_fraction=0.2, micro_batch_tokens=128)
    kit.dataset("train")
    cut_off = tmp_path / "4_0.png"
    cut_off.write_bytes(cut_off.read_bytes()[:100])
    for _ in range(2):
        loader = kit.loader("train", folder=tmp_path, num_workers=workers)
        samples = sorted(
            s for batch in loader for s in batch.sequence_fields["sample"].tolist() if s >= 0
        )
    listed = [json.loads(line) for line in (tmp_path / "bad_rows.jsonl").read_text().splitlines()]
    assert [(line["where"], line["reason"]) for line in listed] == [("images.jsonl:5", "corrupt")]
    assert samples == sorted(set(range(12)) - {4})
    assert (
        sum("bad row, left out: images.jsonl:5: corrupt" in one for one in warnings) == 2
    )  # of two loaders
    assert "left out 1 bad row (images: 1 corrupt)" in str(loader.end_report())
    strict = made(
        file,
        qwen3_vl(),
        model_config(),
        max_bad_rows=0,
        max_bad_fraction=1.0,
        micro_batch_tokens=128,
    )
    with pytest.raises(UserError, match="0 are allowed"):
        list(strict.loader("train", num_workers=workers))


def test_loader_dropped_overlong_rows_are_named(tmp_path: Path) -> None:
    rows = [chat("Hi", "long " * 200 if i % 2 else "short") for i in range(8)]
    kit = made(write(tmp_path / "rows.jsonl", rows), tokenizer("zephyr"))
    assert (
        "Over-long rows dropped: 4 (rows.jsonl:2, rows.jsonl:4, rows.jsonl:6, ...)" in kit.summary()
    )
    for _ in range(2):
        assert kit.loader(folder=tmp_path).end_report() is None
    listed = [
        json.loads(line) for line in (tmp_path / "overlong_rows.jsonl").read_text().splitlines()
    ]
    assert [line["where"] for line in listed] == [f"rows.jsonl:{line}" for line in (2, 4, 6, 8)]
    assert listed[0]["detail"] == "more than 256 tokens"


def test_loader_image_enlarged_after_planning_keeps_the_pack_within_budget(tmp_path: Path) -> None:
    name = write_image(tmp_path / "a.png", 16, 16)
    file = write(tmp_path / "one.jsonl", [chat([{"type": "image", "image": name}], "One.")])
    tokens = int(made(file, qwen3_vl()).dataset("train").plan.tokens[0])
    tight, roomy = (
        made(file, qwen3_vl(), max_bad_fraction=1.0, micro_batch_tokens=n)
        for n in (tokens, tokens + 20)
    )
    loaders = [
        kit.loader("train", folder=tmp_path / str(i)) for i, kit in enumerate((tight, roomy))
    ]
    write_image(tmp_path / name, 32, 32)
    lost, grown = (next(iter(loader)) for loader in loaders)
    assert (lost.num_tokens, grown.num_tokens) == (1, tokens + 12)
    assert '"reason": "overlong"' in (tmp_path / "0" / "bad_rows.jsonl").read_text()


def test_loader_pack_without_good_rows_has_no_loss_tokens(tmp_path: Path) -> None:
    name = write_image(tmp_path / "a.png", 16, 16)
    file = write(tmp_path / "one.jsonl", [chat([{"type": "image", "image": name}], "One.")])
    kit = made(file, qwen3_vl(), model_config(), max_bad_fraction=1.0)
    good = next(iter(kit.loader("train")))
    (tmp_path / name).unlink()
    (batch,) = list(kit.loader("train"))
    assert int(batch.num_loss_tokens) == 0
    assert batch.num_tokens == 1
    assert PackedBatch.concat([good, batch]).num_sequences == 2  # of the same kind
    LanguageModel.from_config(model_config())(batch, ["log_probs"])


def test_loader_exception_while_loading_names_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = made(write(tmp_path / "a.jsonl", [{"text": "hello"}]), tokenizer("zephyr"))
    loader = kit.loader("train")

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(kit.row_encoder.media, "collate", broken)
    with pytest.raises(ZeroDivisionError, match="a bug") as caught:
        list(loader)
    assert "while reading a.jsonl:1" in caught.value.__notes__


def test_source_losses_sum_the_loss_of_each_source(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / f"{name}.jsonl", [{"text": f"{name} {i}"} for i in range(9)])
        for name in "ab"
    ]
    kit = made(
        paths[0],
        tokenizer("zephyr"),
        sources=[{"path": str(path), "name": path.stem * 2} for path in paths],
    )
    batch = next(iter(kit.loader("train")))
    log_probs = torch.where(batch.labels != IGNORE, -torch.arange(batch.num_tokens).float(), 0.0)
    found = kit.source_losses(log_probs, batch)
    assert list(found) == ["loss_aa", "loss_bb"]
    for i, (total, weight) in enumerate(found.values()):
        part = [
            s for s, source in enumerate(batch.sequence_fields["source"].tolist()) if source == i
        ]
        spans = [slice(*batch.cu_seqlens[s : s + 2].tolist()) for s in part]
        assert float(total) == -sum(float(log_probs[span].sum()) for span in spans)
        assert int(weight) == sum(int((batch.labels[span] != IGNORE).sum()) for span in spans) > 0


def test_settings_invalid_values_raise_with_a_fix(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"text": "hello"}])
    tries: list[tuple[dict[str, Any], str]] = [
        ({"limits": {"pixels": 3}}, "unknown limit pixels"),
        ({"global_batch_tokens": 300}, "multiple of mllm.micro_batch_tokens"),
        ({"sources": [{"path": str(file), "format": "chatty"}]}, "choose one of"),
        ({"sources": {"a": str(file)}}, r"the source a needs a path: a: {path: FILE}"),
    ]
    for settings, words in tries:
        with pytest.raises(ValueError, match=words):
            made(file, tokenizer("zephyr"), **settings)
    call: Callable[..., Any] = made(file, tokenizer("zephyr"), global_batch_tokens=None).loader
    with pytest.raises(
        UserError, match=r"give global_batch_size=PACKS, or set mllm.global_batch_tokens"
    ):
        call("train")
    with pytest.raises(UserError, match="no source has split: eval"):
        call("eval", global_batch_size=1)
    limits = made(file, tokenizer("zephyr"), limits={"max_pixels": 64 * 64}).settings
    assert limits.model_dump()["limits"]["max_pixels"] == 4096
    assert MLLMData.model_validate(limits.model_dump()) == limits


def test_settings_sources_as_mapping_become_named_sources(tmp_path: Path) -> None:
    named = {"a": {"path": "a"}, "held": {"name": "b", "path": "c", "split": "eval"}, "gone": None}
    found = MLLMData.model_validate({"sources": named, "micro_batch_tokens": 9}).sources
    assert [(one.name, one.path, one.split) for one in found] == [
        ("a", "a", "train"),
        ("b", "c", "eval"),
    ]


def test_engine_loader_uses_engine_sizes_and_raises_if_ranks_disagree(tmp_path: Path) -> None:
    kit = made(
        write(tmp_path / "a.jsonl", [{"text": "hello world"} for _ in range(99)]),
        tokenizer("zephyr"),
        global_batch_tokens=None,
    )
    answers = [lambda mine: [mine, mine], lambda mine: [mine, "other"]]
    for agrees, gather in zip((True, False), answers, strict=True):
        engine: Any = SimpleNamespace(
            config=SimpleNamespace(
                seed=5,
                data=SimpleNamespace(micro_batch_size=1, global_batch_size=4, num_workers=0),
                loop=SimpleNamespace(precision="bf16"),
            ),
            layout=SimpleNamespace(data_rank=1, data_size=2),
            world=SimpleNamespace(all_gather=gather, is_main=True),
            device=torch.device("cpu"),
            run=SimpleNamespace(dir=tmp_path),
            global_batch_size=4,
        )
        if agrees:
            for precision in ("bf16", "fp32", "bf16"):  # of one engine after the other
                engine.config.loop.precision = precision
                loader = kit.engine_loader(engine)
                assert (kit.row_encoder.dtype == torch.bfloat16) == (precision == "bf16")
            same = kit.loader("train", global_batch_size=4, seed=5, rank=1, world_size=2)
            assert all(a.equals(b) for a, b in zip(loader, same, strict=True))
            assert loader.accumulation == 2
            again = pickle.loads(pickle.dumps(loader.dataset))
            assert again[0][0].equals(loader.dataset[0][0])
            continue
        with pytest.raises(UserError, match="Do all nodes see the same files"):
            kit.engine_loader(engine)
        engine.config.data.micro_batch_size = 2
        with pytest.raises(
            UserError, match=r"a micro-batch is one pack: set data.micro_batch_size=1"
        ):
            kit.engine_loader(engine)


def test_loader_rows_changed_after_planning_name_the_cache_to_remove(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", 8, 8)
    file = write(tmp_path / "rows.jsonl", [chat([{"type": "image", "image": "a.png"}], "a")] * 8)
    options = {"micro_batch_tokens": 80, "max_bad_fraction": 0.4}
    assert len(list(made(file, qwen3_vl(), model_config(), **options).loader("train"))) > 0
    write_image(tmp_path / "a.png", 32, 32)
    with pytest.raises(
        UserError, match=r"changed: \d+ tokens, but \d+ when it was planned.*mllm.cache"
    ):
        list(made(file, qwen3_vl(), model_config(), **options).loader("train"))


def test_bad_rows_of_all_ranks_count_against_the_limit(tmp_path: Path) -> None:
    def found(rank: int, number: int) -> list[BadRecord]:
        return [BadRecord("rows", f"rows.jsonl:{number}", "corrupt", f"of rank {rank}")]

    settings = made(
        write(tmp_path / "rows.jsonl", [chat("Hi", "Yes")]), qwen3_vl(), max_bad_rows=3
    ).settings
    file = tmp_path / "bad_rows.jsonl"
    BadRows(settings, 1000, ["rows"], file).add(found(0, 900))  # an earlier launch
    one, two, other = (BadRows(settings, 1000, [name], file) for name in ("rows", "rows", "eval"))
    for number in (1, 2):
        one.add(found(0, number))
    other.add([BadRecord("eval", "eval.jsonl:1", "corrupt", "")])
    two.add(found(1, 3))
    assert two.counts.total() == 3  # rows that the other rank listed count once
    one.add(found(0, 3))
    with pytest.raises(
        UserError, match=r"4 of 1000 rows are bad, and 3 are allowed .rows: 4 corrupt.*rows.jsonl:4"
    ):
        two.add(found(1, 4))
    alone = BadRows(settings, 1000)
    alone.add(found(1, 4))
    assert alone.counts.total() == other.counts.total() == 1


@pytest.mark.parametrize("overlong", ["drop", "truncate", "shrink"])
def test_loader_opens_each_image_once_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlong: str
) -> None:
    file = write(tmp_path / "rows.jsonl", with_images(tmp_path))
    kit = made(file, qwen3_vl(), overlong=overlong, row_tokens=256 if overlong == "drop" else 60)
    dataset = kit.dataset("train", global_batch_size=1)
    opened = Counter[str]()
    open_file = decode_image.Image.open

    def counted(source: Path, **options: Any) -> Any:
        opened[source.name] += 1
        return open_file(source, **options)

    monkeypatch.setattr(decode_image.Image, "open", counted)
    packs = [dataset[i] for i in range(len(dataset))]
    num_images = sum(len(batch.media["pixel_values"].row_counts) for batch, _ in packs)
    assert set(opened.values()) == {1}
    assert len(opened) >= num_images > 3
