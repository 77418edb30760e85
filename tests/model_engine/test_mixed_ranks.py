"""Ranks with text, images, videos, sounds or nothing side by side: no hang, and the gradients of one rank."""

import pytest
import torch
from conftest import CAMPAIGN
from families import is_supported, mean_of_copies
from tiny_engines import (
    ALONE,
    adamw,
    assert_close,
    counting,
    engine_of,
    gradients,
    loss_of,
    scores_of,
    shares_of,
)
from tiny_models import ENCODERS, build_model, media_packs

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf import LanguageModel

NAMES = ["qwen3_vl", "qwen2_5_vl", "llava", "internvl", "gemma3", "smolvlm", "qwen2_audio"]
NAMES = [name for name in [*NAMES, "qwen2_5_omni_thinker"] if is_supported(name)]
# What each of four ranks has: [], or micro-batches of samples 0 (text), 1 (one item), 2 (two, of two kinds if any)
SHARES = [[[0], [0]], [[1]], [], [[2, 0], [0], [1]]]


def trained(layout, name, is_frozen):
    """Gradients and evaluated log-probs after one step in which rank r has share r of the data."""
    model = build_model(LanguageModel, name)
    names = [name for name, _ in model.named_parameters()]
    parts = [part for part in ENCODERS if is_frozen and any(part in name for name in names)]
    mine = media_packs(model, name, shares_of(layout, SHARES))
    engine = engine_of(model, layout, freeze=tuple(f"*{part}*" for part in parts))
    engine.model.eval()
    engine.train_batch(mine, scores_of(engine))
    found = gradients(engine.model)
    with engine.eval_mode():
        losses = [loss_sum for loss_sum, _ in engine.infer_micro_batches(mine, scores_of(engine))]
    return {**found, "evaluated": mean_of_copies(layout, sum(losses, torch.zeros(())))}


SHARD = {"shard": 4}
SPLIT = {"shard": 2, "ulysses": 2}
# Each kind of encoder on shards or on Ulysses, with trained or with frozen encoders.
CASES = [
    (SHARD, "gemma3", False),
    (SHARD, "qwen3_vl", True),
    (SPLIT, "qwen3_vl", False),
    (SPLIT, "qwen2_audio", False),
]
MORE = [
    *((SHARD, name, False) for name in NAMES if name != "gemma3"),
    *((SHARD, name, True) for name in ("llava", "qwen2_audio")),
    *((SPLIT, name, False) for name in NAMES if name not in ("qwen3_vl", "qwen2_audio")),
    ({"shard": 2}, "qwen3_vl", False),
    ({"shard": 2, "replicate": 2}, "qwen3_vl", False),
    ({"tensor": 2, "shard": 2}, "llava", False),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, name, is_frozen", [*CASES, *(pytest.param(*one, marks=CAMPAIGN) for one in MORE)]
)
def test_ranks_with_different_media_give_the_gradients_of_one(on_ranks, sizes, name, is_frozen):
    expected = trained(ALONE, name, is_frozen)
    of_encoders = [key for key in expected if any(part in key for part in ENCODERS)]
    assert bool(of_encoders) != is_frozen
    for found in on_ranks(sizes, trained, name, is_frozen):
        assert_close(found, expected)


def encoders_alone(layout):
    """Gradients, losses and gradient norm of two steps in which only encoders train, the first one of text."""
    model = build_model(LanguageModel, "qwen3_vl")
    steps = [shares_of(layout, one) for one in ([[[0]], [[0], [0]]], SHARES)]
    packs = [media_packs(model, "qwen3_vl", members) for members in steps]
    engine = engine_of(model, layout, lambda model: adamw(model, 0.1), freeze=("llm",))
    found = []
    for batches in packs:
        norm = engine.train_batch(batches, loss_of(engine)).grad_norm.float().cpu()
        loss = torch.tensor(engine.step_status()[0].loss)
        found.append({**gradients(engine.model), "norm": norm, "loss": loss})
    return found


@pytest.mark.parametrize("sizes", [{"shard": 2}, {"replicate": 2}], ids=str)
def test_text_trains_nothing_where_only_encoders_train(on_ranks, sizes):
    expected = encoders_alone(ALONE)
    assert set(expected[0]) == {"norm", "loss"}
    assert expected[0]["norm"] == 0 < expected[1]["norm"]
    assert any("visual.merger" in name for name in expected[1])
    for result in on_ranks(sizes, encoders_alone):
        for found, of_step in zip(result, expected, strict=True):
            assert_close(found, of_step)


def norm_after_inference(layout):
    """Of a step in which the last rank alone has data."""
    engine = engine_of("qwen3", layout, seed=1)
    engine.infer_batch(counting(17, start=3), ["log_probs"])
    fields = {"advantage": [torch.ones(17)]}
    batch = PackedBatch.from_sequences([torch.arange(3, 20)], token_fields=fields)

    def loss(batch):
        log_probs = engine.model(batch, ["log_probs"])["log_probs"]
        return -(log_probs * batch.token_fields["advantage"]).sum(), batch.num_loss_tokens

    is_last = layout.world.rank == layout.world.size - 1
    return float(engine.train_batch([batch] if is_last else [], loss).grad_norm)


def test_rank_without_data_runs_a_dummy_of_the_same_call(on_ranks):
    """One of an earlier call, here of an inference, may lack what the step reads."""
    one, two = on_ranks({"shard": 2}, norm_after_inference)
    assert one == two == pytest.approx(norm_after_inference(ALONE), rel=1e-5)
