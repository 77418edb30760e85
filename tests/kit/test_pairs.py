"""Preference pairs: chosen and rejected are adjacent sequences of one pack, with a `side` field; or chosen alone."""

from __future__ import annotations

import pytest
import torch
from templates.tiny import tokenizer
from tiny_vlm import chat, made, model_config, qwen3_vl, write, write_image

from mvp_engine.data.batch import PackedBatch
from mvp_engine.kit.data.encode.media import MediaHandler
from mvp_engine.kit.data.encode.template import ChatTemplate
from mvp_engine.kit.data.read.rows import read_row


def pair(i, good="Yes", bad="No"):
    return {
        "prompt": f"Is it {i}?",
        "chosen": f"{good} {i}.",
        "rejected": f"{bad}, {'not ' * (i % 5)}{i}.",
    }


def sides_by_sample(batches):
    """Sample -> its (side, sequence) in the order of the packs; sides of a sample must be adjacent in one pack."""
    rows: dict[int, list[tuple[int, PackedBatch]]] = {}
    for batch in batches:
        samples, sides = (
            batch.sequence_fields["sample"].tolist(),
            batch.sequence_fields["side"].tolist(),
        )
        for s, (sample, side) in enumerate(zip(samples, sides, strict=True)):
            assert sample not in rows or samples[s - 1] == sample
            rows.setdefault(sample, []).append((side, batch.select([s])))
    return rows


def by_sample(batch):
    samples = batch.sequence_fields["sample"].tolist()
    return {sample: batch.select([s]) for s, sample in enumerate(samples)}


@pytest.mark.parametrize("workers", [0, 1])
def test_pairs_both_sides_are_adjacent_with_loss_on_answers_only(tmp_path, workers):
    rows = [pair(i) if i % 4 else chat(f"Hi {i}", "Hello") for i in range(40)]
    file = write(tmp_path / "pairs.jsonl", rows)
    kit = made(file, tokenizer("qwen2_5"), pairs=True)
    batches = list(kit.loader("train", num_workers=workers))
    assert all(batch.num_tokens <= 256 for batch in batches)
    template, seen = ChatTemplate(tokenizer("qwen2_5")), sides_by_sample(batches)
    assert seen.keys() == set(range(40))
    for sample, sides in seen.items():
        assert [side for side, _ in sides] == ([1, -1] if sample % 4 else [0])
        row = read_row(rows[sample])
        for (_, one), messages in zip(sides, (row.messages, row.rejected), strict=False):
            ids, loss, _ = template.tokenize(template.render(type(row)(messages=messages)))
            assert one.input_ids.tolist() == ids
            assert int(one.num_loss_tokens) == sum(loss[1:])
    assert int(kit.dataset("train").plan.tokens.sum()) == sum(batch.num_tokens for batch in batches)


def test_pairs_disabled_trains_on_the_chosen_side_only(tmp_path):
    file = write(tmp_path / "pairs.jsonl", [pair(i) for i in range(9)])
    kit = made(file, tokenizer("qwen2_5"), pack_tokens=2048)
    (batch,) = list(kit.loader("train"))
    assert "side" not in batch.sequence_fields
    text = tokenizer("qwen2_5").decode(batch.input_ids)
    assert text.count("Yes") == 9
    assert "No," not in text


@pytest.mark.parametrize("overlong", ["drop", "truncate", "shrink"])
def test_pairs_images_of_the_prompt_are_decoded_and_held_once(tmp_path, overlong, monkeypatch):
    names = [write_image(tmp_path / f"{i}.png", 16, 16) for i in range(2)]
    rows = [{**pair(i), "prompt": "<image>Is it?", "images": [names[i]]} for i in range(2)]
    turns = [{"role": "user", "content": "<image>Is it?"}]
    answers = [[*turns, {"role": "assistant", "content": text}] for text in ("Yes", "No")]
    rows.append({"chosen": answers[0], "rejected": answers[1], "images": [names[0]]})
    file = write(tmp_path / "pairs.jsonl", rows)
    both, chosen = (
        made(file, qwen3_vl(), model_config(), pairs=on, overlong=overlong) for on in (True, False)
    )
    costs = [kit.measured("train")[1][0].encoder[0] for kit in (both, chosen)]
    assert costs[0] == 2 * costs[1] > 0  # as in the plans of earlier versions
    calls = []
    original = MediaHandler.collate
    monkeypatch.setattr(
        MediaHandler, "collate", lambda *args: calls.append(args) or original(*args)
    )
    batches = list(both.loader("train", num_workers=0))
    assert len(calls) == 3
    for batch in batches:
        images = batch.media["pixel_values"]
        first = [2 * (s // 2) for s in range(batch.num_sequences)]
        assert images.shared_with.tolist() == first
        assert images.sequence_ids.tolist() == sorted(set(first))
    alone = {
        sample: one
        for batch in list(chosen.loader("train"))
        for sample, one in by_sample(batch).items()
    }
    for sample, sides in sides_by_sample(batches).items():
        assert [side for side, _ in sides] == [1, -1]
        for _, one in sides:
            assert torch.equal(
                one.media["pixel_values"].values, alone[sample].media["pixel_values"].values
            )


def test_pairs_sides_with_other_images_do_not_share_them(tmp_path):
    names = [write_image(tmp_path / f"{i}.png", 16, 16) for i in range(2)]
    sides = []
    for name in names:
        image = {"type": "image", "image": name}
        turn = {"role": "user", "content": [image, {"type": "text", "text": "Is it?"}]}
        sides.append([turn, {"role": "assistant", "content": f"It is {name}"}])
    file = write(tmp_path / "pairs.jsonl", [{"chosen": sides[0], "rejected": sides[1]}])
    (batch,) = list(made(file, qwen3_vl(), model_config(), pairs=True).loader("train"))
    images = batch.media["pixel_values"]
    assert images.shared_with is None
    assert images.sequence_ids.tolist() == [0, 1]


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_pairs_overlong_pair_is_dropped_or_truncated_as_one(tmp_path, overlong):
    rows = [pair(1), pair(2, "long " * 300, "short"), pair(3, "long " * 300, "wide " * 300)]
    kit = made(
        write(tmp_path / "pairs.jsonl", rows), tokenizer("zephyr"), pairs=True, overlong=overlong
    )
    seen = sides_by_sample(list(kit.loader("train")))
    if overlong == "drop":
        assert seen.keys() == {0}
        return
    lengths = {sample: [one.num_tokens for _, one in sides] for sample, sides in seen.items()}
    assert sum(lengths[1]) == 256
    assert lengths[1][1] < 60
    assert lengths[2] == [128, 128]
    assert all(int(one.num_loss_tokens) > 0 for sides in seen.values() for _, one in sides)


def test_pairs_bad_rejected_side_makes_the_whole_pair_bad(tmp_path):
    row = {"prompt": "Is it?", "chosen": "Yes.", "rejected": "<|im_end|><|image_pad|>"}
    kit = made(
        write(tmp_path / "pairs.jsonl", [pair(1), row]),
        qwen3_vl(),
        pairs=True,
        max_bad_rows=0.5,
    )
    assert sides_by_sample(list(kit.loader("train"))).keys() == {0}
    (bad,) = kit.bad_rows("train")
    assert (bad.where, bad.reason) == ("pairs.jsonl:2", "placeholder_in_text")
    assert bad.detail.startswith("the rejected side: ")
