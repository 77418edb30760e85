"""The loss kit: equal to cross-entropy on full logits, for any split into micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.engine.hooks import StepContext
from mvp_engine.hf import LanguageModel
from mvp_engine.kit import TokenLoss, TokenNormedLossKit

TINY = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip


class Logged(StepContext):
    def __init__(self):
        self.logged: dict[str, float] = {}

    def log(self, name, value, weight=1.0):
        self.logged[name] = self.logged.get(name, 0.0) + float(value) / float(weight)

    def count(self, name, amount):
        self.logged[name] = self.logged.get(name, 0.0) + float(amount)


def batch():
    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(50, (n,), generator=g) for n in (9, 4, 7)]
    return PackedBatch.from_sequences(ids, [torch.rand(len(i), generator=g) < 0.7 for i in ids])


def model():
    torch.manual_seed(1)
    made = LanguageModel.from_config(Qwen3Config(**TINY), chunk=6)
    with torch.no_grad():
        made.hf.lm_head.weight *= 20
    return made


@pytest.mark.parametrize(
    "settings",
    [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"label_smoothing": 0.2, "z_loss": 1e-3}],
)
def test_loss_kit_loss_and_gradients_equal_cross_entropy_on_full_logits(
    settings,
):
    ours, theirs, packed = model(), model(), batch()
    kit, ctx = TokenNormedLossKit(TokenLoss(**settings)), Logged()
    loss, weight = kit(ctx, ours, packed)
    (loss / weight).backward()
    logits = theirs(packed, ["hidden_states"])["hidden_states"] @ theirs.hf.lm_head.weight.T
    kept = packed.labels != IGNORE
    expected = cross_entropy(
        logits, packed.labels, label_smoothing=settings.get("label_smoothing", 0.0)
    )
    expected = expected + settings.get("z_loss", 0.0) * logits[kept].logsumexp(-1).square().mean()
    expected.backward()
    assert float((loss / weight).detach()) == pytest.approx(float(expected), rel=1e-5)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine.grad, other.grad, rtol=1e-5, atol=1e-6), name
    plain = float(cross_entropy(logits, packed.labels))
    assert ctx.logged == {"tokens": 20.0} | (
        {"nll": pytest.approx(plain, rel=1e-5)} if settings else {}
    )


def test_loss_kit_any_micro_batch_split_gives_the_same_sum():
    kit, net, packed = (
        TokenNormedLossKit(TokenLoss(label_smoothing=0.1, z_loss=1e-3)),
        model(),
        batch(),
    )
    whole, weight = kit(Logged(), net, packed)
    parts = [kit(Logged(), net, part) for part in packed.split(11).parts]
    assert float(sum(loss for loss, _ in parts)) == pytest.approx(float(whole), rel=1e-5)
    assert sum(float(w) for _, w in parts) == float(weight)


def test_loss_kit_token_weights_scale_loss_and_weight():
    kit, net, packed = TokenNormedLossKit(), model(), batch()
    packed.token_fields["weight"] = torch.linspace(0, 2, packed.num_tokens)
    loss, weight = kit(Logged(), net, packed)
    log_probs = net(packed, ["log_probs"])["log_probs"]
    assert float(loss) == pytest.approx(
        float(-(log_probs * packed.token_fields["weight"]).sum()), rel=1e-5
    )
    assert float(weight) == pytest.approx(
        float(packed.token_fields["weight"][packed.labels != IGNORE].sum())
    )
