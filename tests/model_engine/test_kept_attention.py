"""`model.activation_checkpointing=attention`: bit-equal results, and attention is computed once."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from tiny_engines import assert_equal, engine_of, fresh_graphs, train
from tiny_engines import gradients as gradients_of
from tiny_models import build_model, packs_of
from torch import Tensor

from mvp_engine.hf import LanguageModel
from mvp_engine.model_engine.fsdp import parallelize
from mvp_engine.ops import attention as attention_ops

CALLS = list[str]()


def scores(q_HTd, k_HTd, cu_seqlens, scale):
    tokens = torch.arange(q_HTd.shape[1])
    of_tokens = torch.searchsorted(cu_seqlens, tokens, right=True)
    allowed = (of_tokens[:, None] == of_tokens) & (tokens[:, None] >= tokens)
    return (scale * q_HTd @ k_HTd.mT).masked_fill(~allowed, -torch.inf)


# An operator as those of GPUs: it returns the log-sum-exp, too, and backward needs both.
@torch.library.custom_op("mvp_tests::ragged_attention", mutates_args=())
def attend(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    CALLS.append("forward")
    scores_HTT = scores(q, k, cu_seqlens, scale)
    stats_HT1 = scores_HTT.logsumexp(-1, keepdim=True)
    return (scores_HTT - stats_HT1).exp() @ v, stats_HT1


@torch.library.custom_op("mvp_tests::ragged_attention_backward", mutates_args=())
def attend_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    stats: Tensor,
    cu_seqlens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    CALLS.append("backward")
    weights_HTT = (scores(q, k, cu_seqlens, scale) - stats).exp()
    d_scores_HTT = scale * weights_HTT * (d_out @ v.mT - (d_out * out).sum(-1, keepdim=True))
    return d_scores_HTT @ k, d_scores_HTT.mT @ q, weights_HTT.mT @ d_out


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(*q.shape[:2], 1)


@attend_backward.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *others) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], *output, inputs[3])
    ctx.scale = inputs[4]


def backward(ctx, d_out, d_stats):
    return *attend_backward(d_out.contiguous(), *ctx.saved_tensors, ctx.scale), None, None


attend.register_autograd(backward, setup_context=save)


def kernel(q_HTd, k_KTd, v_KTd, spec):
    k_HTd, v_HTd = (x.repeat_interleave(len(q_HTd) // len(x), 0) for x in (k_KTd, v_KTd))
    scale = q_HTd.shape[-1] ** -0.5 if spec.scale is None else spec.scale
    return attend(q_HTd.contiguous(), k_HTd, v_HTd, spec.cu_seqlens, scale)[0]


one_operator = patch.multiple(
    attention_ops,
    _has_kernels=lambda *_: True,
    _torch_varlen_is_supported=lambda *_: True,
    _torch_varlen=kernel,
)


def gradients(mode, name="qwen3", **how):
    """Of one step on one pack; `CALLS` are those of this step, without their compilation."""
    model = build_model(LanguageModel, name)
    (batch,) = packs_of(model, name, [[2, 1]], [(7, 3, 11)])
    engine = engine_of(model, activation_checkpointing=mode, **how)
    fresh_graphs()
    with one_operator:
        CALLS.clear()
        train(engine, batch)
    return gradients_of(engine.model)


@pytest.mark.slow
def test_attention_mode_computes_attention_once_with_equal_gradients():
    expected = gradients("none")
    layers = CALLS.count("forward")
    assert layers > 1
    assert CALLS.count("backward") == layers
    ways = [
        ("full", None, 2),
        ("attention", None, 1),
        ({"llm": "attention"}, None, 1),
        ("attention", "aot_eager", 1),
    ]
    for mode, backend, forwards in ways:
        assert_equal(gradients(mode, compile=backend), expected)
        assert CALLS.count("forward") == forwards * layers, (mode, backend)
        assert CALLS.count("backward") == layers


def test_attention_mode_keeps_the_outputs_of_attention_alone(monkeypatch):
    """A policy that kept nothing would count as `full`; one that kept GEMMs, as `selective`."""
    kept = list[str]()

    def policy(kinds, ctx, op, *args, **more):
        found = real_policy(kinds, ctx, op, *args, **more)
        if found == parallelize.CheckpointPolicy.MUST_SAVE and not ctx.is_recompute:
            kept.append(str(op))
        return found

    real_policy = parallelize._policy
    monkeypatch.setattr(parallelize, "_policy", policy)
    gradients("attention", precision="bf16")
    assert kept == ["mvp_tests.ragged_attention.default"] * CALLS.count("forward")


def test_attention_mode_that_keeps_nothing_warns_once(logged):
    """Uncompiled blocks too: of attention with soft caps, no operator is kept."""
    texts = logged()
    parallelize._warn_of_attention.cache_clear()
    for name in ("qwen3", "gemma2"):
        gradients("attention", name)
    mode = "model.activation_checkpointing=attention"
    (text,) = texts  # for all blocks
    assert f"Gemma2DecoderLayer keeps nothing with {mode}, as with full" in text


def test_policies_have_their_own_graphs_in_the_compile_cache():
    names = ("_selective_contexts", "_attention_contexts", "_compiled_attention_contexts")
    assert len({getattr(parallelize, name).cache_hash for name in names}) == 3
