"""FlexAttention for packs: what plain attention gives, without waiting for the GPU, from a few compiled graphs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as theirs
from torch.utils.checkpoint import checkpoint

from mvp_engine.ops import flex_attention as flex
from mvp_engine.ops.attention import Overlay, boundaries, packed_attention
from mvp_engine.ops.reference_attention import reference_attention

LENGTHS = [1, 700, 5, 129, 128, 1, 64, 300, 33, 1900]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def ends_of(lengths: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().to(device)


def images(tokens: int, window: int | None, device: str = "cpu") -> Any:
    """Blocks of 40 tokens in every 100, some of them cut by the end of a sequence, that see each other."""
    from transformers import masking_utils as masks

    index = torch.arange(tokens, device=device)
    blocks = masks.blockwise_overlay(torch.where(index % 100 < 40, index // 100, -1)[None])
    both = masks.or_masks(masks.causal_mask_function, blocks)
    return both if window is None else masks.and_masks(both, masks.sliding_window_overlay(window))


SEEN: list[dict[str, Any]] = [
    {"causal": True},
    {"causal": False},
    {"causal": True, "window": 130},
    {"causal": False, "window": 3},
    {"causal": True, "images": True},
    {"causal": True, "images": True, "window": 50},
]


@pytest.mark.parametrize("kind", SEEN, ids=str)
def test_blocks_have_all_that_plain_attention_sees(monkeypatch, kind: dict[str, Any]) -> None:
    """Each pair of tokens by name: values are one-hot, so what comes out of plain attention says who was seen."""
    monkeypatch.setattr(flex, "_AT_ONCE", 1 << 18)  # in several goes
    lengths, window = [5, 1, 300, 128, 150, 0, 37], kind.get("window")
    tokens, ends = sum(lengths), ends_of(lengths)
    allows = images(tokens, window) if "images" in kind else None
    zeros = torch.zeros(1, tokens, 16)
    plain = reference_attention(
        zeros, zeros, torch.eye(tokens)[None], ends, allows, None, 0.0, kind["causal"], window, None, None
    )
    seen_PP = torch.zeros(1024, 1024, dtype=torch.bool)
    seen_PP[:tokens, :tokens] = plain[0] > 0
    mask = flex._mask(ends, tokens, allows, kind["causal"], window)
    index = torch.arange(1024)
    assert torch.equal(mask.mask_mod(0, 0, index[:, None], index[None, :]), seen_PP)  # type: ignore[arg-type]
    blocks = seen_PP.view(8, 128, 8, 128)
    assert torch.equal(mask.to_dense()[0, 0] > 0, blocks.any(3).any(1))
    full = [
        set(row[:n].tolist()) for row, n in zip(mask.full_kv_indices[0, 0], mask.full_kv_num_blocks[0, 0], strict=True)
    ]
    assert full == [set(row.nonzero()[:, 0].tolist()) for row in blocks.all(3).all(1)]


HOW: list[dict[str, Any]] = [
    {"causal": False, "window": 50, "softcap": 3.0, "scale": 0.3},
    {"causal": True, "images": True, "sinks": True},
]


def both(flexible: Any, how: dict[str, Any], ends: Tensor, tensors: list[Tensor], weight: Tensor) -> list[list[Tensor]]:
    """Outputs and gradients of q, k, v (and sinks), ours and those of plain float32 attention."""
    found = []
    rules = (how.get("scale"), how["causal"], how.get("window"), how.get("softcap"))
    allows = images(weight.shape[1], how.get("window"), str(weight.device)) if "images" in how else None
    for plain in (False, True):
        given = [x.detach().clone().float() if plain else x.detach().clone() for x in tensors]
        q, k, v, sinks = (x.requires_grad_() for x in given)
        if plain:
            scale, *others = rules
            out = reference_attention(q, k, v, ends, allows, scale, 0.0, *others, sinks if "sinks" in how else None)
        else:
            out = flexible(q, k, v, ends, allows, *rules, sinks if "sinks" in how else None)
        wanted = (q, k, v, sinks) if "sinks" in how else (q, k, v)
        found.append([out.detach(), *torch.autograd.grad(out, wanted, weight.to(out.dtype))])
    return found


def test_outputs_and_gradients_are_those_of_plain_attention(monkeypatch) -> None:
    """torch has no gradients of FlexAttention on CPUs, but its own dense formulas for them, which this allows."""
    graphs: list[Any] = []

    def counted(graph: Any, examples: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, examples)

    monkeypatch.setattr(theirs, "_validate_device", lambda *_: None)
    compiled = torch.compile(flex._attend, dynamic=False, fullgraph=True, backend=counted)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    for lengths in ([5, 1, 300, 17], [60, 128, 9], [900, 124]):  # of which the last need no padding
        g = torch.Generator().manual_seed(len(lengths))
        shapes = [(sum(lengths), 2, 8), (sum(lengths), 1, 8), (sum(lengths), 1, 8)]
        tensors = [torch.randn(shape, generator=g).transpose(0, 1) for shape in shapes]  # as layers have them
        tensors.append(torch.randn(2, generator=g))
        weight = torch.randn(2, sum(lengths), 8, generator=g)
        for how in HOW:
            mine, plain = both(flex.flex, how, ends_of(lengths), tensors, weight)
            assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(mine, plain, strict=True)), how
    assert len(graphs) == len(HOW)  # whatever the lengths


def test_a_mask_is_made_once_for_a_pack_and_goes_with_it(monkeypatch) -> None:
    made, blocks = [], flex._blocks
    monkeypatch.setattr(flex, "_blocks", lambda *how: (made.append(1), blocks(*how))[1])
    gc.collect()
    before = len(flex._MASKS)
    ends, allows = ends_of([4, 6]), images(10, None)
    first = flex._mask(ends, 10, None, True, None)
    assert flex._mask(ends, 10, None, True, None) is first
    kinds = [(None, True, 3), (None, False, None), (allows, True, None), (images(10, None), True, None)]
    assert len({id(flex._mask(ends, 10, *kind)) for kind in kinds}) == 4
    assert len(made) == 5
    ends[1] = 5  # another pack in the same memory
    assert bool(first.mask_mod(0, 0, torch.tensor(4), torch.tensor(4)))  # type: ignore[arg-type]
    changed = flex._mask(ends, 10, None, True, None).mask_mod
    assert not bool(first.mask_mod(0, 0, torch.tensor(4), torch.tensor(3)))  # type: ignore[arg-type]
    assert bool(changed(0, 0, torch.tensor(4), torch.tensor(3)))  # type: ignore[arg-type]
    del ends, allows
    gc.collect()
    assert len(flex._MASKS) == before


def test_a_mask_that_inference_made_serves_training() -> None:
    ends = ends_of([4, 6])
    with torch.inference_mode():
        mask = flex._mask(ends, 10, None, True, None)
        made = ends_of([4, 6])
        assert flex._mask(made, 10, None, True, None) is flex._mask(made, 10, None, True, None)
    assert not mask.kv_indices.is_inference()


def layer(how: dict[str, Any], way: str = "plain") -> Any:
    """What a model's layer calls, as `flex.flex`."""

    def attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, allows: Any, *more: Any) -> Tensor:
        scale, causal, window, softcap, sinks = more
        tokens = q.shape[1]
        mask = None if allows is None else Overlay(allows, (1, 1, tokens, tokens))
        named: dict[str, Any] = {"scaling": scale, "is_causal": causal, "softcap": softcap, "s_aux": sinks}
        named |= {"sliding_window": window, **boundaries(ends, max(LENGTHS))}

        def inner(*qkv: Tensor) -> Tensor:
            return packed_attention(nn.Identity(), *qkv, mask, **named)[0][0].transpose(0, 1)

        inputs = (q[None], k[None], v[None])
        return checkpoint(inner, *inputs, use_reentrant=False) if way == "recomputed" else inner(*inputs)

    return attend


CAPPED = {"causal": True, "window": 100, "softcap": 3.0, "heads": (8, 2), "sizes": (64, 64)}


@needs_gpu
@pytest.mark.parametrize(
    "how",
    [
        CAPPED,
        {"causal": True, "sinks": True, "heads": (8, 1), "sizes": (64, 64), "way": "recomputed"},
        {"causal": True, "images": True, "window": 300, "heads": (4, 4), "sizes": (80, 80)},
        {"causal": False, "window": 50, "softcap": 20.0, "sinks": True, "heads": (4, 2), "sizes": (256, 256)},
        {"causal": True, "heads": (4, 4), "sizes": (192, 128), "scale": 0.1, "dtype": torch.float16},
        {"causal": True, "softcap": 30.0, "heads": (2, 1), "sizes": (512, 512)},
    ],
    ids=str,
)
def test_on_a_gpu_it_gives_what_plain_float32_gives(monkeypatch, how: dict[str, Any]) -> None:
    calls, compiled = [], flex._compiled
    monkeypatch.setattr(flex, "_compiled", lambda: (calls.append(1), compiled())[1])
    (heads, kv_heads), (size, v_size) = how["heads"], how["sizes"]
    g, dtype = torch.Generator().manual_seed(0), how.get("dtype", torch.bfloat16)
    shapes = [(heads, sum(LENGTHS), size), (kv_heads, sum(LENGTHS), size), (kv_heads, sum(LENGTHS), v_size)]
    tensors = [torch.randn(shape, generator=g).to("cuda", dtype) for shape in shapes]
    tensors.append(torch.randn(heads, generator=g).cuda())
    weight = torch.randn(heads, sum(LENGTHS), v_size, generator=g).cuda().bfloat16().float()
    mine, plain = both(layer(how, how.get("way", "plain")), how, ends_of(LENGTHS, "cuda"), tensors, weight)
    apart = [float((a.float() - b).norm() / b.norm()) for a, b in zip(mine, plain, strict=True)]
    print("apart", how, [f"{one:.1e}" for one in apart])
    assert len(calls) == (2 if "way" in how else 1)
    assert all(one < 1e-2 for one in apart)


@needs_gpu
def test_on_a_gpu_packs_of_all_sizes_need_few_graphs_and_never_wait() -> None:
    g = torch.Generator().manual_seed(1)
    packs = []
    for _ in range(20):
        lengths = [1, *torch.randint(100, 300, (int(torch.randint(12, 18, (), generator=g)),), generator=g).tolist()]
        shapes = [(h, sum(lengths), 64) for h in (8, 2, 2)]
        tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        packs.append((tensors, ends_of(lengths, "cuda")))
    sizes = {flex.round_up(tensors[0].shape[1], 1024) for tensors, _ in packs}
    assert 1 < len(sizes) < 4

    def both_ways() -> None:
        for tensors, ends in packs:
            out = layer(CAPPED)(*tensors, ends, None, None, True, 100, 3.0, None)
            torch.autograd.grad(out.sum(), tensors)

    torch._dynamo.utils.counters.clear()
    both_ways()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= len(sizes)
    flex._MASKS.clear()
    torch.cuda.set_sync_debug_mode("error")
    try:
        both_ways()
    finally:
        torch.cuda.set_sync_debug_mode("default")
