"""MLLMDataKit from files to training: loss masks, media, over-long rows, bad rows and their counts."""

import pickle
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as hf
from conftest import user_error
from PIL import Image
from run_files import json_lines
from templates.tiny import tokenizer
from tiny_vlm import TEXT, chat, made, model_config, qwen3_vl, with_images, write, write_image

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.hf import LanguageModel
from mvp_engine.kit import MLLMData
from mvp_engine.kit.data.encode import processor_runner
from mvp_engine.kit.data.encode.template import ChatTemplate
from mvp_engine.kit.data.read import decoders
from mvp_engine.kit.data.read.bad_rows import BadRecord, BadRows
from mvp_engine.kit.data.read.rows import read_row


def learns(model, batches, steps=8):
    optimizer, means = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(steps):
        optimizer.zero_grad()
        total = sum(-model(batch, ["log_probs"])["log_probs"].sum() for batch in batches)
        loss = total / sum(batch.num_loss_tokens for batch in batches)
        loss.backward()
        optimizer.step()
        means.append(float(loss.detach()))
    return means


def test_loader_chats_have_the_tokens_and_loss_mask_of_the_template(tmp_path):
    rows = [chat(f"What is {i}?", f"It is {'very ' * (i % 7)}{i}.") for i in range(40)]
    kit = made(write(tmp_path / "chat.jsonl", rows), tokenizer("qwen2_5"))
    template, batches = ChatTemplate(tokenizer("qwen2_5")), list(kit.loader("train"))
    assert all(batch.num_tokens <= 256 for batch in batches)
    for sample, part in rows_of(batches):
        ids, loss, _ = template.tokenize(template.render(read_row(rows[sample])))
        assert part.input_ids.tolist() == ids
        assert part.position_ids.tolist() == list(range(len(ids)))
        expected = [id if has else IGNORE for id, has in zip(ids[1:], loss[1:], strict=True)]
        assert part.labels.tolist() == [*expected, IGNORE]
    assert {sample for batch in batches for sample in samples_of(batch)} == set(range(40))


def zephyr(file, rows, **settings):
    """A data kit over rows of text."""
    return made(write(file, rows), tokenizer("zephyr"), **settings)


def vlm_kit(file, **settings):
    """A data kit over rows with images."""
    return made(file, qwen3_vl(), model_config(), **settings)


def samples_of(batch):
    return batch.sequence_fields["sample"].tolist()


def rows_of(batches):
    """(index in the file, what the batch holds of it) for every row."""
    for batch in batches:
        for place, sample in enumerate(samples_of(batch)):
            yield sample, batch.select([place])


def one_image(folder, size=16):
    """A file with one row, which has an image."""
    name = write_image(folder / "a.png", size, size)
    return write(folder / "one.jsonl", [chat([{"type": "image", "image": name}], "One.")])


def test_loader_plain_text_without_chat_template_trains(tmp_path):
    backend = tokenizer("zephyr").backend_tokenizer
    words = hf.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    rows = [{"text": f"hello world {i % 3}"} for i in range(30)]
    kit = made(write(tmp_path / "text.jsonl", rows), words)
    batches = list(kit.loader("train"))
    torch.manual_seed(0)
    means = learns(LanguageModel.from_config(hf.Qwen3Config(**TEXT)), batches)
    assert means[-1] < 0.5 * means[0]
    assert kit.summary("train").startswith("train: 30 rows an epoch (text: 30)")


@pytest.mark.slow
def test_loader_images_equal_the_processor_outputs_and_train(tmp_path):
    rows = with_images(tmp_path)
    batches = list(vlm_kit(write(tmp_path / "images.jsonl", rows)).loader("train", num_workers=1))
    torch.manual_seed(0)
    model = LanguageModel.from_config(model_config())
    for sample, part in rows_of(batches):
        check_against_processor(part, rows[sample], tmp_path, model)
    assert sum(len(batch.media["pixel_values"].row_counts) for batch in batches) == 12
    means = learns(model, batches)
    assert means[-1] < 0.7 * means[0]


def check_against_processor(batch, row, folder, model):
    """Tokens, pixels and positions equal those of transformers for the row."""
    names = [block["image"] for block in row["messages"][0]["content"] if block["type"] == "image"]
    text = qwen3_vl().apply_chat_template(row["messages"], tokenize=False)
    images = [Image.open(folder / name) for name in names] or None
    options = {"return_tensors": "pt", "return_mm_token_type_ids": True}
    expected = qwen3_vl()(text=[text], images=images, **options)
    ids = expected["input_ids"]
    assert torch.equal(batch.input_ids, ids[0])
    grids = {"image_grid_thw": expected["image_grid_thw"]} if names else {}
    base = model.base()
    positions, _ = base.get_rope_index(ids, expected["mm_token_type_ids"], **grids)
    assert torch.equal(batch.position_ids, positions[:, 0])
    if names:
        pixels = batch.media["pixel_values"]
        assert torch.equal(pixels.values, expected["pixel_values"])
        assert torch.equal(pixels.fields["image_grid_thw"], expected["image_grid_thw"])


@pytest.mark.parametrize("swallows", [False, True])
def test_loader_video_equals_the_processor_output_of_the_whole_conversation(
    tmp_path, monkeypatch, swallows
):
    """Some versions of transformers take the tokens around a video's placeholder away with it."""
    frames = [write_image(tmp_path / f"{i}.png", 16, 16, i) for i in range(4)]
    row = {**chat("<video>What?", "A video."), "videos": [frames]}
    content = [{"type": "video"}, {"type": "text", "text": "What?"}]
    shown = [{"role": "user", "content": content}, row["messages"][1]]
    text, token = qwen3_vl().apply_chat_template(shown, tokenize=False), "<|video_pad|>"
    whole = f"<|vision_start|>{token}<|vision_end|>"
    if swallows:
        call, text = processor_runner.call_processor, text.replace(whole, token)

        def swallow(processor, kinds, text, *more, **options):
            return call(processor, kinds, token if text == whole else text, *more, **options)

        monkeypatch.setattr(processor_runner, "call_processor", swallow)
    kit = vlm_kit(write(tmp_path / "videos.jsonl", [row]))
    batch = next(iter(kit.loader("train")))
    pixels = [np.array(Image.open(tmp_path / name)) for name in frames]
    video = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
    about = {"total_num_frames": 4, "fps": 2.0, "duration": 2.0, "frames_indices": [0, 1, 2, 3]}
    options = {"video_metadata": [[about]], "do_sample_frames": False}
    expected = qwen3_vl()(text=[text], videos=[[video]], videos_kwargs=options, return_tensors="pt")
    assert batch.input_ids.tolist() == expected["input_ids"][0].tolist()
    assert torch.equal(batch.media["pixel_values_videos"].values, expected["pixel_values_videos"])


OVERLONG = {  # What is left, and what the summary says.
    "drop": ({0}, "Bad rows: none. Over-long rows dropped: 2"),
    "truncate": (  # the question of the third row is all that would be left
        {0, 1},
        "Bad rows: 1 nothing_to_learn. Over-long rows truncated: 1 (long.jsonl:2), dropped: 0",
    ),
    "shrink": (
        {0, 2},
        "Bad rows: none. Over-long rows shrunk: 1 (long.jsonl:3), dropped: 1 (long.jsonl:2)",
    ),
}


@pytest.mark.parametrize("overlong", [*OVERLONG, "error"])
def test_loader_overlong_rows_are_dropped_truncated_shrunk_or_refused(tmp_path, overlong):
    wide = write_image(tmp_path / "wide.png", 32, 32)
    content = [*[{"type": "image", "image": wide}] * 4, {"type": "text", "text": "?"}]
    rows = [chat("Hi", "Yes"), chat("Hi", "long " * 200), chat(content, "Four.")]
    settings = {"max_length": 90, "overlong": overlong, "max_bad_rows": 0.7}
    kit = vlm_kit(write(tmp_path / "long.jsonl", rows), **settings)
    if overlong == "error":
        with user_error(r"2 rows of more than 90 tokens, such as long.jsonl:2, long.jsonl:3"):
            kit.loader("train")
        return
    left = dict(rows_of(kit.loader("train")))
    expected, summary = OVERLONG[overlong]
    assert left.keys() == expected
    assert summary in kit.summary("train")
    assert all(batch.num_tokens <= 90 for batch in left.values())
    assert all(int(batch.num_loss_tokens) > 0 for batch in left.values())
    if overlong == "truncate":
        assert left[1].num_tokens == 90
    if overlong == "shrink":
        assert len(left[2].media["pixel_values"].row_counts) == 4
        assert [row.where for row in kit.overlong_rows("train")] == ["long.jsonl:2"]


def test_loader_bad_rows_are_listed_counted_and_left_out(tmp_path):
    rows = [chat("Hi", f"Yes {i}") for i in range(20)]
    rows[3], rows[7] = "{broken", {"question": "?"}
    for row, name in ((11, "gone.png"), (15, "../../etc/passwd")):
        rows[row] = chat([{"type": "image", "image": name}], "None.")
    file = write(tmp_path / "rows.jsonl", rows)
    out = tmp_path / "run"
    kit = vlm_kit(file, max_bad_rows=0.2)
    for rank in (1, 0, 0):  # the last is a resume
        loader = kit.loader("train", rank=rank, world_size=2, folder=out)
    listed = json_lines(out / "bad_rows.jsonl")
    expected = {"rows.jsonl:4": "bad_json", "rows.jsonl:8": "unknown_format"}
    expected |= {"rows.jsonl:12": "missing_file", "rows.jsonl:16": "missing_file"}
    assert {line["where"]: line["reason"] for line in listed} == expected
    assert len(listed) == 4
    assert loader.bad_rows.counts["rows", "missing_file"] == 2
    samples = sorted(sample for batch in kit.loader("train") for sample in samples_of(batch))
    assert samples == sorted({*range(20)} - {3, 7, 11, 15})
    for settings in ({"max_bad_rows": 0.15}, {"max_bad_rows": 3}):
        with user_error(r"4 of 20 rows are bad, and 3 are allowed .*1 bad_json.*rows.jsonl:4"):
            vlm_kit(file, **settings).loader("train")


def test_loader_bad_row_with_fixed_file_is_used_again(tmp_path):
    rows = [chat("Hi", "Yes"), chat([{"type": "image", "image": "late.png"}], "None.")]
    file = write(tmp_path / "rows.jsonl", rows)
    assert "1 missing_file" in made(file, qwen3_vl()).summary("train")
    write_image(tmp_path / "late.png", 16, 16)
    assert "Bad rows: none" in made(file, qwen3_vl()).summary("train")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_loader_image_truncated_after_planning_drops_only_its_row(tmp_path, workers, logged):
    warnings = logged()
    file = write(tmp_path / "images.jsonl", with_images(tmp_path))

    def kit(**settings):
        return vlm_kit(file, pack_tokens=128, **settings)

    lenient = kit(max_bad_rows=0.2)
    lenient.dataset("train")
    cut_off = tmp_path / "4_0.png"
    cut_off.write_bytes(cut_off.read_bytes()[:100])
    for _ in range(2):
        loader = lenient.loader("train", folder=tmp_path, num_workers=workers)
        samples = sorted(sample for batch in loader for sample in samples_of(batch) if sample >= 0)
    [line] = json_lines(tmp_path / "bad_rows.jsonl")
    assert (line["where"], line["reason"]) == ("images.jsonl:5", "corrupt")
    assert samples == sorted({*range(12)} - {4})
    words = "bad row, left out: images.jsonl:5: corrupt"
    assert sum(words in warning for warning in warnings) == 2  # of two loaders
    assert "left out 1 bad row (images: 1 corrupt)" in str(loader.end_report())
    with user_error("0 are allowed"):
        list(kit(max_bad_rows=0).loader("train", num_workers=workers))


def test_loader_dropped_overlong_rows_are_named(tmp_path):
    rows = [chat("Hi", "long " * 200 if i % 2 else "short") for i in range(8)]
    kit = zephyr(tmp_path / "rows.jsonl", rows)
    dropped = "Over-long rows dropped: 4 (rows.jsonl:2, rows.jsonl:4, rows.jsonl:6, ...)"
    assert dropped in kit.summary()
    for _ in range(2):
        assert kit.loader(folder=tmp_path).end_report() is None
    listed = json_lines(tmp_path / "overlong_rows.jsonl")
    assert [line["where"] for line in listed] == [f"rows.jsonl:{line}" for line in (2, 4, 6, 8)]
    assert listed[0]["detail"] == "more than 256 tokens"


def test_loader_image_enlarged_after_planning_keeps_the_pack_within_budget(tmp_path):
    file = one_image(tmp_path)
    tokens = int(made(file, qwen3_vl()).dataset("train").plan.tokens[0])
    loaders = []
    for room in (0, 20):
        kit = made(file, qwen3_vl(), max_bad_rows=1.0, pack_tokens=tokens + room)
        loaders.append(kit.loader("train", folder=tmp_path / str(room)))
    one_image(tmp_path, 32)
    lost, grown = (next(iter(loader)) for loader in loaders)
    assert (lost.num_tokens, grown.num_tokens) == (1, tokens + 12)
    assert '"reason": "overlong"' in (tmp_path / "0" / "bad_rows.jsonl").read_text()


def test_loader_pack_without_good_rows_has_no_loss_tokens(tmp_path):
    kit = vlm_kit(one_image(tmp_path), max_bad_rows=1.0)
    good = next(iter(kit.loader("train")))
    (tmp_path / "a.png").unlink()
    (batch,) = list(kit.loader("train"))
    assert int(batch.num_loss_tokens) == 0
    assert batch.num_tokens == 1
    assert PackedBatch.concat([good, batch]).num_sequences == 2  # of the same kind
    LanguageModel.from_config(model_config())(batch, ["log_probs"])


def test_loader_exception_while_loading_names_the_row(tmp_path, monkeypatch):
    kit = zephyr(tmp_path / "a.jsonl", [{"text": "hello"}])
    loader = kit.loader("train")

    def broken(*_):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(kit.row_encoder.media, "collate", broken)
    with pytest.raises(ZeroDivisionError, match="a bug") as caught:
        list(loader)
    assert "while reading a.jsonl:1" in caught.value.__notes__


def test_source_losses_sum_the_loss_of_each_source(tmp_path):
    sources = []
    for name in "ab":
        path = write(tmp_path / f"{name}.jsonl", [{"text": f"{name} {i}"} for i in range(9)])
        sources.append({"path": str(path), "name": name * 2})
    kit = made(tmp_path / "a.jsonl", tokenizer("zephyr"), sources=sources)
    batch = next(iter(kit.loader("train")))
    log_probs = torch.where(batch.labels != IGNORE, -torch.arange(batch.num_tokens).float(), 0.0)
    losses = kit.source_losses(log_probs, batch)
    assert list(losses) == ["loss_aa", "loss_bb"]
    source_T = batch.sequence_fields["source"].repeat_interleave(batch.lengths)
    for source, (total, weight) in enumerate(losses.values()):
        is_own_T = source_T == source
        assert float(total) == -float(log_probs[is_own_T].sum())
        assert int(weight) == int((batch.labels[is_own_T] != IGNORE).sum()) > 0


def test_settings_invalid_values_raise_with_a_fix(tmp_path):
    def kit(**settings):
        return zephyr(file, [{"text": "hello"}], **settings)

    file = tmp_path / "a.jsonl"
    tries = [
        ({"limits": {"pixels": 3}}, "unknown limit pixels"),
        ({"global_batch_tokens": 300}, "multiple of data.pack_tokens"),
        ({"sources": {"a": str(file)}}, r"the source a needs a path: a: {path: FILE}"),
    ]
    for settings, words in tries:
        with pytest.raises(ValueError, match=words):
            kit(**settings)
    loader = kit(global_batch_tokens=None).loader
    with user_error(r"give global_batch_size=PACKS, or set data.global_batch"):
        loader("train")
    with user_error("no source has split: eval"):
        loader("eval", global_batch_size=1)
    limits = kit(limits={"max_pixels": 64 * 64}).settings
    assert limits.model_dump()["limits"]["max_pixels"] == 4096
    assert MLLMData.model_validate(limits.model_dump()) == limits
    named = {"a": {"path": "a"}, "held": {"name": "b", "path": "c", "split": "eval"}, "gone": None}
    sources = MLLMData.model_validate({"sources": named, "pack_tokens": 9}).sources
    named_sources = [(source.name, source.path, source.split) for source in sources]
    assert named_sources == [("a", "a", "train"), ("b", "c", "eval")]


def test_engine_loader_uses_engine_sizes_and_raises_if_ranks_disagree(tmp_path):
    rows = [{"text": "hello world"} for _ in range(99)]
    kit = zephyr(tmp_path / "a.jsonl", rows, global_batch_tokens=None)
    data = SimpleNamespace(micro_batch_size=1, global_batch_size=4, num_workers=0)
    train = SimpleNamespace(precision="bf16")
    evaluation = SimpleNamespace(batches=None)
    engine = SimpleNamespace(
        config=SimpleNamespace(seed=5, data=data, train=train, eval=evaluation),
        layout=SimpleNamespace(data_rank=1, data_size=2),
        world=SimpleNamespace(all_gather=lambda mine: [mine, mine], is_main=True),
        device=torch.device("cpu"),
        run=SimpleNamespace(dir=tmp_path),
        global_batch_size=4,
    )
    for precision in ("bf16", "fp32", "bf16"):  # of one engine after the other
        train.precision = precision
        loader = kit.engine_loader(engine)
        assert (kit.row_encoder.dtype == torch.bfloat16) == (precision == "bf16")
    same = kit.loader("train", global_batch_size=4, seed=5, rank=1, world_size=2)
    assert all(a.equals(b) for a, b in zip(loader, same, strict=True))
    assert loader.accumulation == 2
    assert pickle.loads(pickle.dumps(loader.dataset))[0][0].equals(loader.dataset[0][0])
    engine.world.all_gather = lambda mine: [mine, "other"]
    with user_error("Do all nodes see the same files"):
        kit.engine_loader(engine)
    data.micro_batch_size = 2
    with user_error(r"a micro-batch is one pack: leave out data.micro_batch_size"):
        kit.engine_loader(engine)


def test_loader_rows_changed_after_planning_name_the_cache_to_remove(tmp_path):
    def loaded():
        return list(vlm_kit(file, pack_tokens=80, max_bad_rows=0.4).loader("train"))

    write_image(tmp_path / "a.png", 8, 8)
    row = chat([{"type": "image", "image": "a.png"}], "a")
    file = write(tmp_path / "rows.jsonl", [row] * 8)
    assert loaded()
    write_image(tmp_path / "a.png", 32, 32)
    with user_error(r"changed: \d+ tokens, but \d+ when it was planned.*data.cache"):
        loaded()


def test_bad_rows_of_all_ranks_count_against_the_limit(tmp_path):
    def corrupt(rank, number):
        return [BadRecord("rows", f"rows.jsonl:{number}", "corrupt", f"of rank {rank}")]

    settings = zephyr(tmp_path / "rows.jsonl", [chat("Hi", "Yes")], max_bad_rows=3).settings
    file = tmp_path / "bad_rows.jsonl"
    BadRows(settings, 1000, ["rows"], file).add(corrupt(0, 900))  # an earlier launch
    one, two, other = (BadRows(settings, 1000, [name], file) for name in ("rows", "rows", "eval"))
    for number in (1, 2):
        one.add(corrupt(0, number))
    other.add([BadRecord("eval", "eval.jsonl:1", "corrupt", "")])
    two.add(corrupt(1, 3))
    assert two.counts.total() == 3  # rows that the other rank listed count once
    one.add(corrupt(0, 3))
    with user_error("4 of 1000 rows are bad, and 3 are allowed .rows: 4 corrupt.*rows.jsonl:4"):
        two.add(corrupt(1, 4))
    alone = BadRows(settings, 1000)
    alone.add(corrupt(1, 4))
    assert alone.counts.total() == other.counts.total() == 1


@pytest.mark.parametrize("overlong", ["drop", "truncate", "shrink"])
def test_loader_opens_each_image_once_an_epoch(tmp_path, monkeypatch, overlong):
    file = write(tmp_path / "rows.jsonl", with_images(tmp_path))
    kit = made(file, qwen3_vl(), overlong=overlong, max_length=256 if overlong == "drop" else 60)
    dataset = kit.dataset("train", global_batch_size=1)
    opened = Counter()
    open_file = decoders.Image.open

    def counted(source, **options):
        opened[source.name] += 1
        return open_file(source, **options)

    monkeypatch.setattr(decoders.Image, "open", counted)
    packs = [dataset[i] for i in range(len(dataset))]
    num_images = sum(len(batch.media["pixel_values"].row_counts) for batch, _ in packs)
    assert set(opened.values()) == {1}
    assert len(opened) >= num_images > 3
