"""FlexAttention over packed sequences: the results of the reference, without host syncs, from a few compiled graphs."""

import gc
from dataclasses import replace

import pytest
import torch
from tiny_engines import no_host_sync
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as torch_flex
from torch.utils.checkpoint import checkpoint

from mvp_engine.hf.model.attention import Overlay, boundaries, packed_attention
from mvp_engine.ops import flex_attention
from mvp_engine.ops.attention import AttnSpec, reference_attention
from mvp_engine.ops.attn_spec import round_up_to_bucket
from mvp_engine.ops.flex_attention import block_mask_of

LENGTHS = [1, 700, 5, 129, 128, 1, 64, 300, 33, 1900]


def cu_seqlens_of(lengths, device="cpu"):
    return torch.tensor([0, *lengths]).cumsum(0).int().to(device)


def images(tokens, window, device="cpu"):
    """Blocks of 40 tokens in every 100 that attend to each other; the end of a sequence cuts some of them."""
    from transformers import masking_utils as masks

    index = torch.arange(tokens, device=device)
    blocks = masks.blockwise_overlay(torch.where(index % 100 < 40, index // 100, -1)[None])
    both = masks.or_masks(masks.causal_mask_function, blocks)
    return both if window is None else masks.and_masks(both, masks.sliding_window_overlay(window))


def spec_of(options, lengths, device="cpu"):
    """The spec of a test's options, without sinks."""
    window = options.get("window")
    return AttnSpec(
        cu_seqlens_of(lengths, device),
        max(lengths),
        scale=options.get("scale"),
        causal=options["causal"],
        window=window,
        softcap=options.get("softcap"),
        mask_function=images(sum(lengths), window, device) if "images" in options else None,
    )


MASKS = [
    {"causal": True},
    {"causal": False},
    {"causal": True, "window": 130},
    {"causal": False, "window": 3},
    {"causal": True, "images": True},
    {"causal": True, "images": True, "window": 50},
]


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_block_mask_contains_exactly_the_pairs_of_the_reference(monkeypatch, options):
    monkeypatch.setattr(flex_attention, "_PAIRS_PER_CHUNK", 1 << 18)  # several chunks of rows
    lengths = [5, 1, 300, 128, 150, 0, 37]
    tokens, spec = sum(lengths), spec_of(options, lengths)
    mask = block_mask_of(spec, tokens)
    blocks = blocks_of(mask, spec, tokens, tokens)
    rows = zip(mask.full_kv_indices[0, 0], mask.full_kv_num_blocks[0, 0], strict=True)
    full = [set(row[:n].tolist()) for row, n in rows]
    assert full == [set(row.nonzero()[:, 0].tolist()) for row in blocks.all(3).all(1)]


def blocks_of(mask, spec, queries, keys):
    """The pairs that the reference sees, in blocks of 128, after a comparison with those of the mask.

    Values are one-hot, so the reference's output names each visible pair of tokens.
    """
    zeros = torch.zeros(1, keys, 16)
    plain = reference_attention(zeros[:, :queries], zeros, torch.eye(keys)[None], spec)
    rows, columns = mask.seq_lengths
    visible = torch.zeros(rows, columns, dtype=torch.bool)
    visible[:queries, :keys] = plain[0] > 0
    pairs = mask.mask_mod(0, 0, torch.arange(rows)[:, None], torch.arange(columns))
    assert torch.equal(pairs, visible)
    blocks = visible.view(rows // 128, 128, columns // 128, 128)
    assert torch.equal(mask.to_dense()[0, 0] > 0, blocks.any(3).any(1))
    return blocks


OPTIONS = [
    {"causal": False, "window": 50, "softcap": 3.0, "scale": 0.3},
    {"causal": True, "images": True, "sinks": True},
]


def both(attend, options, lengths, tensors, weight):
    """Outputs and gradients of q, k, v (and sinks): of `attend`, and of the reference in float32."""
    found = []
    spec = spec_of(options, lengths, str(weight.device))
    for plain in (False, True):
        given = [x.detach().clone().float() if plain else x.detach().clone() for x in tensors]
        *qkv, sinks = (x.requires_grad_() for x in given)
        with_sinks = replace(spec, sinks=sinks if "sinks" in options else None)
        out = (reference_attention if plain else attend)(*qkv, with_sinks)
        wanted = [*qkv, sinks] if "sinks" in options else qkv
        found.append([out.detach(), *torch.autograd.grad(out, wanted, weight.to(out.dtype))])
    return found


@pytest.mark.slow
def test_flex_attention_on_cpu_equals_reference_with_one_graph_per_kind_of_layer(
    monkeypatch,
):
    """torch has no gradients of FlexAttention on CPUs, but its own dense formulas for them, which the patch allows."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    compiled = torch.compile(flex_attention._attend, dynamic=False, fullgraph=True, backend=counter)
    monkeypatch.setattr(flex_attention, "_compiled", lambda: compiled)
    for lengths in ([5, 1, 300, 17], [60, 128, 9], [900, 124]):  # the last pack needs no padding
        g = torch.Generator().manual_seed(len(lengths))
        tokens = sum(lengths)
        layers = [torch.randn(tokens, heads, 8, generator=g) for heads in (2, 1, 1)]
        tensors = [*(x.transpose(0, 1) for x in layers), torch.randn(2, generator=g)]
        weight = torch.randn(2, tokens, 8, generator=g)
        for options in OPTIONS:
            results = both(flex_attention.flex_varlen_attention, options, lengths, tensors, weight)
            for ours, theirs in zip(*results, strict=True):
                assert torch.allclose(ours, theirs, atol=1e-5), options
    assert counter.frame_count == len(OPTIONS)  # whatever the lengths


def sees(mask, query, key):
    return bool(mask.mask_mod(0, 0, torch.tensor(query), torch.tensor(key)))


def test_block_mask_is_built_once_per_pack_and_freed_with_it(monkeypatch):
    built = []
    build = flex_attention._block_mask
    counted = lambda *args: (built.append(1), build(*args))[1]  # noqa: E731
    monkeypatch.setattr(flex_attention, "_block_mask", counted)
    gc.collect()
    before = len(flex_attention._BLOCK_MASKS)
    cu_seqlens, mask_function = cu_seqlens_of([4, 6]), images(10, None)
    spec = AttnSpec(cu_seqlens, 6)
    first = block_mask_of(spec, 10)
    assert block_mask_of(AttnSpec(cu_seqlens, 6), 10) is first
    specs = [
        replace(spec, window=3),
        replace(spec, causal=False),
        replace(spec, mask_function=mask_function),
        replace(spec, mask_function=images(10, None)),
    ]
    assert len({id(block_mask_of(one, 10)) for one in specs}) == 4
    assert len(built) == 5
    cu_seqlens[1] = 5  # another pack in the same memory
    changed = block_mask_of(spec, 10)
    assert sees(first, 4, 4)
    assert not sees(first, 4, 3)
    assert sees(changed, 4, 3)
    del cu_seqlens, mask_function, spec, specs
    gc.collect()
    assert len(flex_attention._BLOCK_MASKS) == before


def test_block_mask_built_in_inference_mode_is_usable_in_training():
    spec = AttnSpec(cu_seqlens_of([4, 6]), 6)
    with torch.inference_mode():
        mask = block_mask_of(spec, 10)
        made_here = AttnSpec(cu_seqlens_of([4, 6]), 6)
        assert block_mask_of(made_here, 10) is block_mask_of(made_here, 10)
    assert not mask.kv_indices.is_inference()


def layer(way="plain"):
    """What a model's layer calls, with the signature of a kernel."""

    def attend(q, k, v, spec):
        size = (1, 1, q.shape[1], q.shape[1])
        mask = None if spec.mask_function is None else Overlay(spec.mask_function, size)
        named = {
            "scaling": spec.scale,
            "is_causal": spec.causal,
            "softcap": spec.softcap,
            "s_aux": spec.sinks,
            "sliding_window": spec.window,
            **boundaries(spec.cu_seqlens, max(LENGTHS)),
        }

        def inner(*qkv):
            return packed_attention(nn.Identity(), *qkv, mask, **named)[0][0].transpose(0, 1)

        if way == "checkpointed":
            return checkpoint(inner, q[None], k[None], v[None], use_reentrant=False)
        return inner(q[None], k[None], v[None])

    return attend


CAPPED = {"causal": True, "window": 100, "softcap": 3.0, "heads": (8, 2), "sizes": (64, 64)}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        CAPPED,
        {"causal": True, "sinks": True, "heads": (8, 1), "sizes": (64, 64), "way": "checkpointed"},
        {"causal": True, "images": True, "window": 300, "heads": (4, 4), "sizes": (80, 80)},
        {
            "causal": False,
            "window": 50,
            "softcap": 20.0,
            "sinks": True,
            "heads": (4, 2),
            "sizes": (256, 256),
        },
        {
            "causal": True,
            "heads": (4, 4),
            "sizes": (192, 128),
            "scale": 0.1,
            "dtype": torch.float16,
        },
        {"causal": True, "softcap": 30.0, "heads": (2, 1), "sizes": (512, 512)},
    ],
    ids=str,
)
def test_flex_attention_on_gpu_equals_reference_in_float32(monkeypatch, options):
    calls, compiled = [], flex_attention._compiled
    monkeypatch.setattr(flex_attention, "_compiled", lambda: (calls.append(1), compiled())[1])
    (heads, kv_heads), (size, v_size) = options["heads"], options["sizes"]
    g, dtype = torch.Generator().manual_seed(0), options.get("dtype", torch.bfloat16)
    tokens = sum(LENGTHS)
    shapes = [(heads, tokens, size), (kv_heads, tokens, size), (kv_heads, tokens, v_size)]
    tensors = [torch.randn(shape, generator=g).to("cuda", dtype) for shape in shapes]
    tensors.append(torch.randn(heads, generator=g).cuda())
    weight = torch.randn(heads, sum(LENGTHS), v_size, generator=g).cuda().bfloat16().float()
    mine, plain = both(layer(options.get("way", "plain")), options, LENGTHS, tensors, weight)
    errors = [float((a.float() - b).norm() / b.norm()) for a, b in zip(mine, plain, strict=True)]
    print("relative errors", options, [f"{error:.1e}" for error in errors])
    assert len(calls) == (2 if "way" in options else 1)
    assert all(error < 1e-2 for error in errors)


@pytest.mark.gpu
def test_flex_attention_packs_of_all_sizes_compile_few_graphs_without_host_sync():
    g = torch.Generator().manual_seed(1)
    packs = []
    for _ in range(20):
        count = int(torch.randint(12, 18, (), generator=g))
        lengths = [1, *torch.randint(100, 300, (count,), generator=g).tolist()]
        made = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
        tensors = [torch.randn(heads, sum(lengths), 64, **made) for heads in (8, 2, 2)]
        packs.append((tensors, spec_of(CAPPED, lengths, "cuda")))
    sizes = {round_up_to_bucket(tensors[0].shape[1], 1024) for tensors, _ in packs}
    assert 1 < len(sizes) < 4

    def forward_and_backward():
        for tensors, spec in packs:
            out = layer()(*tensors, spec)
            torch.autograd.grad(out.sum(), tensors)

    torch._dynamo.utils.counters.clear()
    forward_and_backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= len(sizes)
    flex_attention._BLOCK_MASKS.clear()
    with no_host_sync():
        forward_and_backward()
