"""Packed attention: on a GPU the fast kernel gives what the plain one gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mvp_engine.ops import attention
from mvp_engine.ops.attention import boundaries, packed_attention

LENGTHS = [5, 1, 40, 17]


def inputs(device: str, dtype: torch.dtype, heads: int = 8, kv_heads: int = 2, size: int = 32) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = [(1, h, sum(LENGTHS), size) for h in (heads, kv_heads, kv_heads)]
    return [torch.randn(s, generator=g).to(device, dtype).requires_grad_() for s in shapes]


def attend(tensors: list[Tensor], **options: Any) -> tuple[Tensor, list[Tensor]]:
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int().to(tensors[0].device)
    out, _ = packed_attention(nn.Identity(), *tensors, None, **boundaries(ends, max(LENGTHS)), **options)
    (out.float() * torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)).sum().backward()
    return out.detach(), [t.grad for t in tensors if t.grad is not None]


@pytest.mark.parametrize("options", [{}, {"sliding_window": 4}, {"softcap": 3.0}, {"is_causal": False}], ids=str)
def test_no_token_sees_another_sequence_or_the_future(options: dict[str, Any]) -> None:
    first, second = inputs("cpu", torch.float32), inputs("cpu", torch.float32)
    with torch.no_grad():
        for tensor in second:
            tensor[:, :, 6:46] += 1.0  # the third sequence
    a, b = attend(first, **options)[0], attend(second, **options)[0]
    same = (a == b).flatten(2).all(-1)[0]
    assert bool(same[:6].all())
    assert bool(same[46:].all())
    assert not bool(same[6:46].any())


def test_window_and_full_attention_agree_when_the_window_is_long() -> None:
    full = attend(inputs("cpu", torch.float32))[0]
    assert torch.equal(full, attend(inputs("cpu", torch.float32), sliding_window=40)[0])
    assert not torch.equal(full, attend(inputs("cpu", torch.float32), sliding_window=39)[0])


def test_what_it_cannot_do_is_refused_by_name() -> None:
    tensors = inputs("cpu", torch.float32)
    with pytest.raises(NotImplementedError, match="Identity asks attention for bias_of_love"):
        attend(tensors, bias_of_love=1)
    with pytest.raises(NotImplementedError, match="was not told where sequences begin"):
        packed_attention(nn.Identity(), *tensors, None)
    with pytest.raises(NotImplementedError, match="brings an attention mask of its own"):
        packed_attention(nn.Identity(), *tensors, torch.ones(1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [{}, {"sliding_window": 4}, {"is_causal": False}, {"scaling": 0.3}], ids=str)
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_fast_kernel_gives_what_the_plain_one_gives(monkeypatch, options: dict[str, Any], kv_heads: int) -> None:
    fast = attend(inputs("cuda", torch.bfloat16, kv_heads=kv_heads), **options)
    monkeypatch.setattr(attention, "_flash_can", lambda *_: False)
    plain = attend(inputs("cuda", torch.float32, kv_heads=kv_heads), **options)
    for a, b in [(fast[0], plain[0]), *zip(fast[1], plain[1], strict=True)]:
        assert float((a.float() - b).norm() / b.norm()) < 1e-2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_fast_kernel_does_not_wait_for_the_gpu() -> None:
    tensors = inputs("cuda", torch.bfloat16)
    attend(tensors)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int().cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed_attention(nn.Identity(), *tensors, None, **boundaries(ends, max(LENGTHS)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
