"""Items that several sequences share: encoded once, with the outputs and gradients of repeated items, to 1e-5."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from conftest import user_error
from families import VISION
from tiny_engines import (
    ALONE,
    assert_close,
    engine_of,
    gradients,
    scores_of,
    share_of,
)
from tiny_models import build_model, close, run, samples, shared_model
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from mvp_engine.data.batch import IGNORE, Media, PackedBatch
from mvp_engine.distributed.sequence_parallel import UlyssesShard
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.media import shared_media
from mvp_engine.hf.model.auto_model import media_inputs
from mvp_engine.kit import MFUKit
from mvp_engine.kit.decoding import with_completion

AUDIO = "input_features"


def answered(prompt, answer):
    """The prompt, which the result shares its media with, and an answer with labels."""
    row = with_completion(prompt, None, answer)
    labels = torch.cat([row.input_ids[1:], torch.tensor([IGNORE])])
    return dataclasses.replace(row, labels=labels)


def group(model, name):
    """Two answers to a prompt with two items, a row of text, three answers to a prompt with one item."""
    text, one, two = samples(model, name)
    rows = [answered(two, [5, 6, 7]), answered(two, [8]), answered(text, [9])]
    return [*rows, *(answered(one, answer) for answer in ([11, 12], [13], [14, 15, 16]))]


@pytest.mark.parametrize("name", VISION)
def test_shared_media_equal_repeated_media_with_gradients(name):
    model = shared_model(LanguageModel, name)
    rows = group(model, name)
    shared = PackedBatch.concat(rows)
    repeated = PackedBatch.concat([row.select([0]) for row in rows])
    for kind, media in shared.media.items():
        if kind != AUDIO:
            uses = repeated.media[kind]
            assert media_inputs(model.base(), shared)[kind] is media.values
            assert len(media.values) < len(uses.values)
            assert uses.shared_with is None
            assert torch.equal(media.select(list(range(6)), share=False).values, uses.values)
    names = ["log_probs", "entropy"]
    outputs, grads = run(model, shared, names)
    expected, expected_grads = run(model, repeated, names)
    assert all(map(close, outputs, expected))
    assert_close(grads, expected_grads)


@pytest.mark.parametrize("name", ["qwen3_vl", "llava_next"])
def test_shared_media_select_and_split_keep_the_items_of_every_sequence(name):
    model = shared_model(LanguageModel, name)
    shared = PackedBatch.concat(group(model, name))
    (expected,), _ = run(model, shared, ["log_probs"])
    order = [5, 1, 3, 0, 2]
    (found,), _ = run(model, shared.select(order), ["log_probs"])
    by_sequence = expected.split(shared.lengths.tolist())
    assert close(found, torch.cat([by_sequence[sequence] for sequence in order]))
    split = shared.split(shared.max_seqlen)
    assert len(split.parts) > 3
    parts = [run(model, part, ["log_probs"])[0][0] for part in split.parts]
    assert close(split.merge_tokens(parts), expected)
    group_tokens = [int(part.sum()) for part in shared.lengths.split([2, 1, 3])]
    together = shared.split(max(group_tokens), together=[0, 0, 1, 2, 2, 2])
    by_default = shared.split(4 * max(group_tokens))
    for parts in (together.parts, by_default.parts):
        rows = [len(part.media["pixel_values"].values) for part in parts]
        assert sum(rows) == len(shared.media["pixel_values"].values)


def trained(layout, name, is_shared):
    """Gradients of one step over two groups of answers and a text, a micro-batch each, and inferred log-probs."""
    model = build_model(LanguageModel, name)
    rows = group(model, name)
    if not is_shared:
        rows = [row.select([0]) for row in rows]
    batches = [PackedBatch.concat(part) for part in (rows[:2], rows[2:3], rows[3:])]
    assert (batches[0].media["pixel_values"].shared_with is not None) == is_shared
    engine = engine_of(model, layout)
    engine.train_batch(share_of(layout, batches), scores_of(engine, entropy=0.0))
    whole = PackedBatch.concat(batches)
    outputs = engine.infer_batch(whole, ["log_probs"], budget=whole.max_seqlen + 20)
    return gradients(engine.model) | outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, sizes",
    [("qwen3_vl", {"shard": 2}), ("internvl", {"shard": 2}), ("qwen3_vl", {"ulysses": 2})],
)
def test_shared_media_on_ranks_equal_repeated_media_on_one(on_ranks, name, sizes):
    """On two shards, one rank has a text and a dummy with images while the other has a group of answers."""
    expected = trained(ALONE, name, is_shared=False)
    for found in on_ranks(sizes, trained, name, True):
        assert_close(found, expected)


def test_shared_media_flops_count_the_encoder_once():
    for name in ("qwen3_vl", "llava"):  # by grids, and by rows and placeholder tokens
        model = shared_model(LanguageModel, name)
        text, one, _ = samples(model, name)
        mfu = MFUKit(model)
        encoder = float(mfu.flops(one)) - float(mfu.flops(dataclasses.replace(one, media={})))
        shared = PackedBatch.concat([one, text, one, one])
        repeated = PackedBatch.concat([one, text, one.select([0]), one.select([0])])
        more = float(mfu.flops(repeated) - mfu.flops(shared))
        assert more == pytest.approx(2 * encoder, rel=1e-9)
        assert encoder > 0


def test_shared_media_features_by_neither_item_nor_row_raise(monkeypatch):
    model = shared_model(LanguageModel, "llava")
    shared = PackedBatch.concat(group(model, "llava"))
    kind = type(model.base())
    original = kind.get_image_features

    def flat(self, *args, **kwargs):
        outputs = original(self, *args, **kwargs)
        outputs.pooler_output = torch.cat(outputs.pooler_output)
        return outputs

    monkeypatch.setattr(kind, "get_image_features", flat)
    with user_error("give each sequence its own media"):
        model(shared, ["log_probs"])


class Unmasked(nn.Module):
    """An encoder of sounds that sees all frames of a row, so padding would change its features."""

    dtype = torch.float32

    def get_audio_features(self, input_features):
        assert input_features.ndim == 3
        return SimpleNamespace(
            pooler_output=input_features[:, ::2] + input_features.mean(1, keepdim=True)
        )


def test_sounds_without_a_mask_of_frames_are_encoded_one_at_a_time():
    model = Unmasked()
    shared_media.apply_shared_features(model)
    sounds = [torch.randn(frames, 3) for frames in (4, 7, 5)]
    alone = [model.get_audio_features(sound[None]).pooler_output[0] for sound in sounds]
    longer = [*alone, torch.zeros(6)]  # a sound of another row, which is not in this batch
    rows = [torch.ones(len(one), dtype=torch.bool) for one in longer]
    fields = {"input_features_mask": pad_sequence(rows, batch_first=True)[:3]}
    ids = torch.tensor([0, 0, 1])
    media = Media(torch.cat(sounds), torch.tensor([4, 7, 5]), ids, fields)
    inputs = shared_media.encoder_inputs(model, "input_features", media)
    features = model.get_audio_features(inputs["input_features"]).pooler_output
    assert torch.equal(features[inputs["input_features_mask"]], torch.cat(alone))


class TilesAsFrames(nn.Module):
    """One method for images and videos, which takes (items, tiles or frames, ...)."""

    dtype = torch.float32

    def get_image_features(self, pixel_values):
        return SimpleNamespace(pooler_output=pixel_values.flatten(0, 1).flatten(2).transpose(1, 2))

    def forward(self, pixel_values, pixel_values_videos): ...


def test_tiles_of_images_are_frames_where_one_method_takes_images_and_videos():
    base = TilesAsFrames()
    shared_media.apply_shared_features(base)
    values = torch.arange(5 * 3 * 4.0).view(5, 3, 2, 2)
    media = Media(values, torch.tensor([3, 2]), torch.tensor([0, 1]))
    for kind in ("pixel_values", "pixel_values_videos"):
        (given,) = shared_media.encoder_inputs(base, kind, media).values()
        features = base.get_image_features(given).pooler_output
        assert torch.equal(features[0], values.flatten(2).transpose(1, 2).flatten(0, 1))


@pytest.mark.parametrize("has_newlines", [False, True])
def test_items_with_learned_newlines_are_encoded_on_every_rank(has_newlines):
    """Their number of features is not a multiple of their number of patches."""
    base = TilesAsFrames()
    if has_newlines:
        base.image_newline = nn.Parameter(torch.zeros(3))
    shared_media.apply_shared_features(base)
    grid = {"image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 2]])}
    media = Media(torch.zeros(8, 3), torch.tensor([4, 4]), torch.tensor([0, 1]), grid)
    shard = UlyssesShard(None, 0, (5, 5))
    shared_media.encoder_inputs(base, "pixel_values", media, shard)
    assert (media.values in shared_media._SHARES) is not has_newlines
