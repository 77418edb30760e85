"""How a batch is cut and ordered changes nothing: loss, gradients and log-probs stay the same, to 1e-5."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from families import config_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.hf import LanguageModel

MANY = settings(max_examples=50, deadline=None)


@cache
def model():
    torch.manual_seed(0)
    return LanguageModel.from_config(config_of("qwen3"), chunk=7).eval()


@st.composite
def batches(draw: st.DrawFn) -> PackedBatch:
    """Sequences of any length; each token carries loss or not, and has a weight of its own."""
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=8))
    share = draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    return PackedBatch.from_sequences(
        [torch.randint(99, (n,), generator=g) for n in lengths],
        [torch.rand(n, generator=g) < share for n in lengths],
        token_fields={"advantages": [torch.randn(n, generator=g) for n in lengths]},
    )


def train(parts):
    """Loss and gradients, summed over the parts and divided once by their common weight; log-probs of each part."""
    language_model = model()
    language_model.zero_grad()
    total, outputs = torch.zeros(()), []
    for part in parts:
        out = language_model(part, ["log_probs", "entropy"])
        exploring = torch.where(part.labels == IGNORE, 0.0, out["entropy"])
        loss_sum = -(out["log_probs"] * part.token_fields["advantages"] + 0.1 * exploring).sum()
        loss_sum.backward()
        total += loss_sum.detach()
        outputs.append(out["log_probs"].detach())
    weight = max(1, sum(int(part.num_loss_tokens) for part in parts))
    gradients = {
        n: p.grad / weight for n, p in language_model.named_parameters() if p.grad is not None
    }
    assert len(gradients) == len(list(language_model.parameters()))
    return total / weight, gradients, outputs


def same(one, other):
    """Differences are measured against the largest entry of each gradient: small ones count as much as big ones.

    Some gradients are nothing but rounding (a query that sees only itself), so the largest of all sets a floor.
    """
    assert torch.allclose(one[0], other[0], rtol=1e-5, atol=1e-5)
    largest = {name: float(gradient.abs().max()) for name, gradient in one[1].items()}
    for name, gradient in one[1].items():
        allowed = 1e-5 * largest[name] + 1e-6 * max(largest.values())
        assert float((gradient - other[1][name]).abs().max()) <= allowed, name


@given(batches(), st.data())
@MANY
def test_split_budget_and_order_change_neither_loss_nor_gradients(batch, data):
    order = data.draw(st.permutations(range(batch.num_sequences)))
    budget = data.draw(st.integers(batch.max_seqlen, batch.num_tokens))
    shuffled = batch.select(order)
    split = shuffled.split(budget)
    whole, parts = train([batch]), train(split.parts)
    same(whole, parts)
    shuffled.token_fields["log_probs"] = split.merge_tokens(parts[2])
    restored = shuffled.select([order.index(s) for s in range(batch.num_sequences)])
    assert torch.allclose(restored.token_fields["log_probs"], whole[2][0], rtol=1e-5, atol=1e-5)


@given(batches(), st.data())
@MANY
def test_concatenated_selections_give_the_gradients_of_the_batch(batch, data):
    order = data.draw(st.permutations(range(batch.num_sequences)))
    cut = data.draw(st.integers(0, batch.num_sequences))
    pieces = [batch.select(piece) for piece in (order[:cut], order[cut:]) if piece]
    same(train([batch]), train([PackedBatch.concat(pieces)]))


def test_comparison_with_one_misplaced_token_fails():
    batch = PackedBatch.from_sequences(
        [torch.arange(5), torch.arange(9)],
        token_fields={"advantages": [torch.ones(5), torch.ones(9)]},
    )
    moved = batch.select([0, 1])
    moved.position_ids[9] += 1
    (loss, whole, _), (_, other, _) = train([batch]), train([moved])
    with pytest.raises(AssertionError):
        same((loss, whole, []), (loss, other, []))
