"""Packed and encoder attention: who sees whom; on a GPU the fast kernel gives what the plain one gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mvp_engine.ops import attention
from mvp_engine.ops import cudnn_attention as ragged_attention
from mvp_engine.ops.attention import boundaries, encoder_attention, packed_attention

LENGTHS = [5, 1, 40, 17]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_cudnn = pytest.mark.skipif(
    not (torch.cuda.is_available() and ragged_attention.INSTALLED), reason="needs a GPU and nvidia-cudnn-frontend"
)


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


def test_masks_are_honoured_or_refused_by_name() -> None:
    from transformers import LlamaConfig
    from transformers import masking_utils as masks

    config = LlamaConfig(attn_implementation=attention.register(), attention_chunk_size=4)
    made: dict[str, Any] = {"config": config, "inputs_embeds": torch.zeros(1, 63, 8), "past_key_values": None}
    assert masks.create_causal_mask(**made, attention_mask=None) is None
    images = torch.where((torch.arange(63) >= 50) & (torch.arange(63) < 55), 0, -1)[None]
    overlay = masks.create_causal_mask(**made, attention_mask=None, block_sequence_ids=images)
    tensors = inputs("cpu", torch.float32)
    ends = boundaries(torch.tensor([0, 5, 6, 46, 63], dtype=torch.int32), 40)
    out = packed_attention(nn.Identity(), *tensors, overlay, **ends)[0]
    with torch.no_grad():
        for tensor in tensors:
            tensor[:, :, 54] += 1.0  # the last token of the image, in the last sequence
    seen = (out != packed_attention(nn.Identity(), *tensors, overlay, **ends)[0]).flatten(2).any(-1)[0]
    assert seen.nonzero()[:, 0].tolist() == list(range(50, 63))
    with pytest.raises(NotImplementedError, match=" has chunked_overlay"):
        masks.create_chunked_causal_mask(**made, attention_mask=None)
    with pytest.raises(NotImplementedError, match=" has bidirectional_mask_function"):
        masks.create_bidirectional_mask(**made, attention_mask=None)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_an_encoder_may_have_an_item_per_row_a_mask_or_boundaries(device: str) -> None:
    dtype, tolerance = (torch.float32, 1e-6) if device == "cpu" else (torch.bfloat16, 2e-2)
    q, k, v = (x.detach() for x in inputs(device, dtype, kv_heads=8))
    rows = [x.reshape(8, 9, 7, 32).transpose(0, 1) for x in (q[0], k[0], v[0])]  # nine items of seven tokens
    per_row, _ = encoder_attention(nn.Identity(), *rows, None)
    ends = torch.arange(0, 64, 7, dtype=torch.int32, device=device)
    together, _ = encoder_attention(nn.Identity(), q, k, v, None, **boundaries(ends, 7), is_causal=False)
    assert torch.allclose(per_row.reshape(1, 63, 8, 32), together, atol=tolerance)
    short = (torch.arange(7, device=device) < 5).expand(9, 1, 7, 7)
    masked, _ = encoder_attention(nn.Identity(), *rows, short)
    cut, _ = encoder_attention(nn.Identity(), *(x[:, :, :5] for x in rows), None)
    assert torch.allclose(masked[:, :5], cut, atol=tolerance)


def test_what_an_encoder_cannot_do_is_refused_by_name() -> None:
    tensors = inputs("cpu", torch.float32, kv_heads=8)
    ends = torch.tensor([0, 30], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="Identity asks attention for softcap"):
        encoder_attention(nn.Identity(), *tensors, None, softcap=2.0)
    with pytest.raises(NotImplementedError, match="has a mask of shape"):
        encoder_attention(nn.Identity(), *tensors, torch.ones(1, 63))
    with pytest.raises(NotImplementedError, match="has boundaries and also a batch"):
        encoder_attention(nn.Identity(), *(x.expand(2, -1, -1, -1) for x in tensors), None, **boundaries(ends, 30))
    with pytest.raises(RuntimeError, match="was given boundaries that are not its own"):
        encoder_attention(nn.Identity(), *tensors, None, **boundaries(ends, 30))


@needs_gpu
@pytest.mark.parametrize("options", [{}, {"sliding_window": 4}, {"is_causal": False}, {"scaling": 0.3}], ids=str)
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_fast_kernel_gives_what_the_plain_one_gives(monkeypatch, options: dict[str, Any], kv_heads: int) -> None:
    fast = attend(inputs("cuda", torch.bfloat16, kv_heads=kv_heads), **options)
    monkeypatch.setattr(attention, "_flash_can", lambda *_: False)
    plain = attend(inputs("cuda", torch.float32, kv_heads=kv_heads), **options)
    for a, b in [(fast[0], plain[0]), *zip(fast[1], plain[1], strict=True)]:
        assert float((a.float() - b).norm() / b.norm()) < 1e-2


@needs_gpu
def test_fast_kernel_does_not_wait_for_the_gpu() -> None:
    tensors = inputs("cuda", torch.bfloat16)
    attend(tensors)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int().cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed_attention(nn.Identity(), *tensors, None, **boundaries(ends, max(LENGTHS)))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_packs_of_all_sizes_need_few_plans() -> None:
    """A plan takes a tenth of a second and more; as many as packs would be slower than any kernel is fast."""
    g = torch.Generator().manual_seed(0)
    plans = set()
    for _ in range(500):
        lengths = torch.randint(64, 4097, (int(torch.randint(4, 33, (), generator=g)),), generator=g)
        q = torch.empty(int(lengths.sum()), 16, 128, device="meta")
        plan = ragged_attention._plan(q, q[:, :8], len(lengths), int(lengths.max()), 0.1, True, 0)
        assert plan.sequences >= len(lengths)
        assert plan.longest >= int(lengths.max())
        assert plan.tokens >= len(q)
        plans.add(plan)
    assert len(plans) < 30


@needs_cudnn
@pytest.mark.parametrize("way", ["plain", "compiled", "recomputed"])
@pytest.mark.parametrize(
    ("options", "heads", "size"),
    [
        ({}, (8, 2), 128),
        ({"sliding_window": 50}, (8, 4), 64),
        ({"is_causal": False}, (4, 4), 80),
        ({"scaling": 0.3}, (8, 8), 32),
    ],
    ids=str,
)
def test_cudnn_gives_what_varlen_gives(monkeypatch, way: str, options: dict[str, Any], heads: Any, size: int) -> None:
    calls, run = [], ragged_attention._run
    monkeypatch.setattr(ragged_attention, "_run", lambda *how: (calls.append(1), run(*how)))
    lengths = [5, 1, 140, 70, 300]
    ends = boundaries(torch.tensor([0, *lengths]).cumsum(0).int().cuda(), max(lengths))
    g = torch.Generator().manual_seed(0)
    given = [torch.randn(1, h, sum(lengths), size, generator=g).cuda().bfloat16() for h in (*heads, heads[1])]
    weight = torch.randn(1, sum(lengths), heads[0], size, generator=g).cuda().bfloat16()

    def once(kind: str) -> list[Tensor]:
        tensors = [x.clone().requires_grad_() for x in given]

        def attended(*qkv: Tensor) -> Tensor:
            return packed_attention(nn.Identity(), *qkv, None, **ends, **options)[0]

        if kind == "compiled":
            out = torch.compile(attended, fullgraph=True, dynamic=True)(*tensors)
        elif kind == "recomputed":
            out = checkpoint(attended, *tensors, use_reentrant=False)
        else:
            out = attended(*tensors)
        return [out.detach(), *torch.autograd.grad(out, tensors, weight)]

    ours = once(way)
    assert len(calls) == (3 if way == "recomputed" else 2)
    monkeypatch.setattr(ragged_attention, "INSTALLED", False)
    for mine, theirs in zip(ours, once("plain"), strict=True):
        assert float((mine.float() - theirs.float()).norm() / theirs.float().norm()) < 1e-2


@needs_cudnn
@pytest.mark.parametrize(
    ("heads", "size", "causal"), [((32, 8), 128, True), ((16, 16), 64, False), ((16, 16), 80, False)], ids=str
)
def test_nothing_around_the_tensors_comes_through(monkeypatch, heads: tuple[int, int], size: int, causal: bool) -> None:
    """NaN before and behind them, in the outputs and in the room to work in; lengths around those of tiles."""

    def inside(*shape: int, dtype: torch.dtype = torch.bfloat16, fill: float | None = None) -> Tensor:
        values = torch.randn(shape, device="cuda") if fill is None else torch.full(shape, fill, device="cuda")
        around = torch.full((values.numel() + (2 << 20),), torch.nan, device="cuda", dtype=dtype)
        found = around[1 << 20 : -1 << 20].view(shape)
        return found.copy_(values)

    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *a, **k: empty(*a, **k).fill_(255) if k.get("dtype") == torch.uint8 else empty(*a, **k)
    )
    for lengths in ([1, 129, 64, 700], [2000], [63, 65, 127, 128, 1, 300, 2]):
        total = sum(lengths)
        ends = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
        q, do = (inside(total, heads[0], size) for _ in "qo")
        k, v = (inside(total, heads[1], size) for _ in "kv")
        made = {n: inside(*x.shape, fill=torch.nan) for n, x in {"o": q, "dq": q, "dk": k, "dv": v}.items()}
        made["stats"] = inside(total, heads[0], 1, dtype=torch.float32, fill=torch.nan)
        plan = ragged_attention._plan(q, k, len(lengths), max(lengths), 0.1, causal, 0)
        for backward, names in ((False, ("o", "stats")), (True, ("o", "stats", "dq", "dk", "dv"))):
            given = {"q": q, "k": k, "v": v} | ({"do": do} if backward else {}) | {n: made[n] for n in names}
            ragged_attention._run(plan, ends, backward, given)
        assert all(bool(x.isfinite().all()) for x in made.values()), lengths


@needs_cudnn
def test_cudnn_is_deterministic_when_asked() -> None:
    ends = torch.tensor([0, 500, 700, 2000], dtype=torch.int32).cuda()
    q, k, v = (torch.randn(2000, h, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (8, 4, 4))
    torch.use_deterministic_algorithms(True)
    try:
        out = [ragged_attention.ragged_attention(q, k, v, ends, 1300, None, True, None) for _ in "ab"]
        grads = [torch.autograd.grad(o.float().square().sum(), (q, k, v)) for o in out]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
