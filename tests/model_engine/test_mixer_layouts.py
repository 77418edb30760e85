"""Models with mixers on all layouts, with activation checkpointing and compiled: gradients to 1e-5."""

import pytest
import tiny_models
import torch
from conftest import CAMPAIGN, user_error
from families import parallel
from mixer_families import MIXERS, VISION_MIXERS, mixer_config, mixer_model
from tiny_engines import ALONE, assert_close, engine_of, packed
from tiny_engines import gradients as gradients_of

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout

# By a kernel's function, by a convolution alone, by sequence
QUICK = ["qwen3_5_text", "lfm2_moe", "mamba"]
OTHERS = [name for name in [*MIXERS, *VISION_MIXERS] if name not in QUICK]
HOW = {
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "compiled": {"compile": "aot_eager"},
    "compiled, full": {"compile": "aot_eager", "activation_checkpointing": "full"},
    "compiled, attention": {"compile": "aot_eager", "activation_checkpointing": "attention"},
}


def batches(name, model):
    """Two of the same size with other boundaries: those of the first must not be used for the second."""
    if name in VISION_MIXERS:  # rows with images and videos
        tiny_models.VISION.setdefault(name, ("", {}, "patches frame"))
        ones = tiny_models.samples(model, name)
        return [PackedBatch.concat(ones), PackedBatch.concat(ones[::-1])]
    return [packed(7, 3, 11, 2), packed(2, 9, 12, seed=4)]


def gradients(name, layout, **how):
    """Of both batches. Both forwards come before the backwards, so that a forward which is repeated comes late.

    Not if compiled: torch may compile a block again for the second, and repeat the first with that.
    """
    model = mixer_model(name)
    given = batches(name, model)
    engine = engine_of(model, layout, seed=5, **how)
    engine.model.eval()

    def loss(batch):
        log_probs = engine.model(batch, ["log_probs"])["log_probs"]
        return (torch.linspace(0.5, 1.5, len(log_probs)) * log_probs).sum(), batch.num_loss_tokens

    def loss_of_both(_):
        (first, count), (second, _) = map(loss, given)
        return first + second, count

    engine.optimizer_zero_grad()
    if "compile" in how:
        engine.forward_backward_batch(given, loss)
    else:
        engine.forward_backward_batch(given[:1], loss_of_both)
    return gradients_of(engine.model, layout.data_size)


def has_plan(name):
    """Whether this transformers has a tensor-parallel plan for the layers; newer ones have more."""
    plan = mixer_config(name).get_text_config().base_model_tp_plan or {}
    return any("layers" in key for key in plan)


def on_every_layout(first, names):
    found = []
    for kind in ("shard", "ulysses", "context", "tensor"):
        layout = Layout.of(first.world, parallel(**{kind: 2}))
        chosen = [name for name in names if kind != "tensor" or has_plan(name)]
        found += [(name, gradients(name, layout)) for name in chosen]
    with user_error("mamba has no tensor-parallel plan in transformers"):
        gradients("mamba", layout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("names", [QUICK, pytest.param(OTHERS, marks=CAMPAIGN)], ids=len)
def test_mixers_on_shards_sequence_and_tensor_parallel_have_the_gradients_of_one_rank(
    on_ranks, names
):
    expected = {name: gradients(name, ALONE) for name in names}
    for found in on_ranks({"shard": 2}, on_every_layout, names):
        for name, grads in found:
            assert_close(grads, expected[name], what=name)


QUICK_CASES = [
    ("qwen3_5_text", "full"),
    ("qwen3_5_text", "selective"),
    ("mamba", "full"),
]
SLOW = [pytest.param("mamba2", "compiled", marks=pytest.mark.slow)]
CASES = [(name, how) for name in [*MIXERS, *VISION_MIXERS] for how in HOW]
KNOWN = [*QUICK_CASES, ("mamba2", "compiled")]
LONG = [pytest.param(*case, marks=CAMPAIGN) for case in CASES if case not in KNOWN]


@pytest.mark.slow
@pytest.mark.parametrize("name, how", [*QUICK_CASES, *SLOW, *LONG])
def test_mixers_with_activation_checkpointing_or_compiled_have_the_same_gradients(name, how):
    torch._dynamo.reset()
    assert_close(gradients(name, ALONE, **HOW[how]), gradients(name, ALONE))
