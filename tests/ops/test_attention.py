"""Kernel dispatch of varlen_attention, and the independence of `ops` from transformers."""

import pytest
import torch

from mvp_engine.ops import attention, cudnn_attention, flash_attention, flex_attention
from mvp_engine.ops.attention import AttnSpec, reference_attention, varlen_attention
from mvp_engine.ops.attn_spec import KeySpec, round_up_to_bucket

CU_SEQLENS = torch.tensor([0, 4, 9], dtype=torch.int32)


def attends_to_the_past(batch, head, query, key):
    return key <= query


EXTRAS = [
    {"softcap": 3.0},
    {"sinks": torch.zeros(2)},
    {"mask_function": attends_to_the_past},
]


def qkv():
    g = torch.Generator().manual_seed(0)
    return [torch.randn(heads, 9, 8, generator=g) for heads in (2, 1, 1)]


@pytest.fixture
def chosen(monkeypatch):
    """The kernels that were called, where all of them report that they support everything."""
    calls = []

    def kernel(name):
        return lambda q, *_: (calls.append(name), q)[1]

    kernels = {
        "flash": (flash_attention, "flash_attention", flash_attention, "is_supported"),
        "cudnn": (cudnn_attention, "cudnn_attention", cudnn_attention, "is_supported"),
        "varlen": (attention, "_torch_varlen", attention, "_torch_varlen_is_supported"),
        "flex": (attention, "untraced_flex_attention", flex_attention, "is_supported"),
    }
    for name, (module, function, asked, question) in kernels.items():
        monkeypatch.setattr(asked, question, lambda *_: True)
        monkeypatch.setattr(module, function, kernel(name))
    monkeypatch.setattr(attention, "_has_kernels", lambda *_: True)
    monkeypatch.setattr(attention, "untraced_reference_attention", kernel("reference"))
    return calls


def test_varlen_attention_plain_spec_prefers_flash_then_cudnn_then_varlen(chosen, monkeypatch):
    spec = AttnSpec(CU_SEQLENS, 5, scale=0.2, window=3)
    varlen_attention(*qkv(), spec)
    for module in (flash_attention, cudnn_attention):
        monkeypatch.setattr(module, "is_supported", lambda *_: False)
        varlen_attention(*qkv(), spec)
    assert chosen == ["flash", "cudnn", "varlen"]


@pytest.mark.parametrize(
    "extra, kernel",
    [*((extra, "flex") for extra in EXTRAS), ({"dropout": 0.1}, "reference")],
    ids=["softcap", "sinks", "mask_function", "dropout"],
)
def test_varlen_attention_extra_option_uses_another_kernel(chosen, extra, kernel):
    varlen_attention(*qkv(), AttnSpec(CU_SEQLENS, 5, **extra))
    assert chosen == [kernel]


def test_varlen_attention_values_narrower_than_queries_leave_out_cudnn(chosen):
    """As latent attention has them (DeepSeek): a plan of cuDNN has one head size. So has FlashAttention's kernel."""
    q, k, v = qkv()
    varlen_attention(q, k, v[..., :4], AttnSpec(CU_SEQLENS, 5))
    assert chosen == ["varlen"]  # which reports here that it supports everything


@pytest.mark.parametrize("extra", [{}, *EXTRAS], ids=lambda extra: next(iter(extra), "plain"))
def test_varlen_attention_on_cpu_equals_reference(extra):
    spec = AttnSpec(CU_SEQLENS, 5, **extra)
    assert torch.equal(varlen_attention(*qkv(), spec), reference_attention(*qkv(), spec))


def test_round_up_to_bucket_returns_the_smallest_bucket():
    buckets = [round_up_to_bucket(n, 4) for n in range(1, 26)]
    assert sorted(set(buckets)) == [4, 6, 8, 12, 16, 24, 32]
    assert all(n <= bucket for n, bucket in zip(range(1, 26), buckets, strict=True))


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 2}, {"scale": 0.3}], ids=str)
@pytest.mark.parametrize("keys", [4, 6])
def test_reference_attention_of_equal_sequences_is_bit_equal_to_one_at_a_time(options, keys):
    g = torch.Generator().manual_seed(0)
    sizes = ((4, 4 * 5), (2, keys * 5), (2, keys * 5))
    q, k, v = (torch.randn(heads, tokens, 8, generator=g) for heads, tokens in sizes)
    for tensor in (q, k, v):
        tensor.requires_grad_()

    def spec(count):
        ends = torch.arange(count + 1, dtype=torch.int32)
        key_spec = None if keys == 4 else KeySpec(ends * keys, keys, ends, ends)
        return AttnSpec(ends * 4, 4, keys=key_spec, **options)

    together = reference_attention(q, k, v, spec(5))
    parts = zip(q.split(4, 1), k.split(keys, 1), v.split(keys, 1), strict=True)
    alone = torch.cat([reference_attention(*part, spec(1)) for part in parts], 1)
    assert torch.equal(together, alone)
    grads = [torch.autograd.grad(out.square().sum(), [q, k, v]) for out in (together, alone)]
    assert all(map(torch.equal, *grads))
