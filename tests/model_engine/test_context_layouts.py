"""Context parallel on real ranks: outputs and every gradient of one rank, to 1e-5."""

import functools

import pytest
import torch
from conftest import CAMPAIGN
from tiny_engines import ALONE, assert_close, engine_of, gradients
from tiny_models import build_model, packs_of

from mvp_engine.hf import LanguageModel

OUTPUTS = ["log_probs", "entropy", "hidden_states"]

# Sequences of one token; those that end at a cut of zigzag (16 = 8 chunks of 2) or of an equal slice (4, 4, 4, 4); a
# long one with short ones, packs of fewer tokens than would give every rank a share, and as many tokens as ranks.
LENGTHS = [(16, 1, 11, 1), (4, 4, 4, 4), (37, 2, 3, 1, 1, 5), (1, 2, 1), (4,)]


def stepped(name, layout):
    """Outputs of each pack, which all data ranks have, and the gradients of a step on all packs."""
    model = build_model(LanguageModel, name)
    batches = packs_of(model, name, [[2, 1], [1], [0, 2, 2, 1]], LENGTHS)
    engine = engine_of(model, layout)
    engine.model.eval()
    outs = []

    def loss(batch):
        out = engine.model(batch, OUTPUTS)
        outs.append({key: value.detach() for key, value in out.items()})
        # Uneven weights: a gradient that reached another token would show.
        weights = torch.linspace(0.5, 1.5, batch.num_tokens)
        total = -(weights * out["log_probs"]).sum() - 0.1 * out["entropy"].sum()
        return total, batch.num_loss_tokens

    engine.optimizer_zero_grad()
    for batch in batches:
        engine.forward_backward_batch([batch], loss)
    return outs, gradients(engine.model, layout.data_size)


def stepped_all(layout, names):
    return {name: stepped(name, layout) for name in names}


@functools.cache
def expected(name):
    return stepped(name, ALONE)


def assert_outputs_and_gradients(result, name):
    """Those of one rank. Biases of keys have gradients that are rounding alone."""
    outs, grads = expected(name)
    for found, wanted in zip(result[0], outs, strict=True):
        assert_close(found, wanted, what=name)
    of_all = {key: result[1][key] for key in grads}
    assert_close(of_all, grads, floor=0.1, what=name)
    unused = result[1].keys() - grads.keys()  # FSDP has zeros for weights that no forward uses
    assert not any(bool(result[1][key].any()) for key in unused), unused


FEW = ["qwen3", "gemma3_text", "gpt_oss", "qwen3_vl"]
EXPERTS = ["qwen3_moe", "gpt_oss"]
BOTH = {"context": 2, "ulysses": 2}
LONG = [
    ({"context": 4}, FEW),
    (BOTH, ["qwen3", "gemma3_text"]),
    ({"context": 2, "shard": 2}, FEW),
    ({"context": 2, "replicate": 2}, FEW),
    ({"context": 4, "expert": 2}, EXPERTS),
    ({"context": 2, "shard": 2, "expert": 4}, EXPERTS),
    ({**BOTH, "expert": 2}, EXPERTS),
    ({"context": 2, "tensor": 2}, ["qwen3", "gemma2"]),
]


@pytest.mark.parametrize(
    "sizes, names",
    [
        ({"context": 2}, ["qwen3"]),
        pytest.param({"context": 2}, FEW[1:], marks=pytest.mark.slow),
        pytest.param(BOTH, ["gpt_oss", "qwen3_vl"], marks=pytest.mark.slow),
        *(pytest.param(*one, marks=CAMPAIGN) for one in LONG),
    ],
    ids=str,
)
def test_context_gives_the_outputs_and_gradients_of_one_rank(on_ranks, sizes, names):
    for results in on_ranks(sizes, stepped_all, names):
        for name, result in results.items():
            assert_outputs_and_gradients(result, name)
