"""Packed and encoder attention with transformers' signatures: which tokens attend to which, and what is refused."""

import pytest
import torch
from tiny_engines import no_host_sync
from torch import nn

from mvp_engine.hf.model import attention
from mvp_engine.hf.model.attention import boundaries, encoder_attention, packed_attention
from mvp_engine.ops import attention as attention_ops

LENGTHS = [5, 1, 40, 17]


def inputs(device="cpu", dtype=torch.float32, heads=8, kv_heads=2):
    g = torch.Generator().manual_seed(0)
    shapes = [(1, h, sum(LENGTHS), 32) for h in (heads, kv_heads, kv_heads)]
    return [torch.randn(s, generator=g).to(device, dtype).requires_grad_() for s in shapes]


def attend(tensors, **options):
    """The output, and the gradients of q, k and v."""
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int().to(tensors[0].device)
    options |= boundaries(cu_seqlens, max(LENGTHS))
    out, _ = packed_attention(nn.Identity(), *tensors, None, **options)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    (out.float() * weights).sum().backward()
    return out.detach(), [t.grad for t in tensors if t.grad is not None]


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 4}, {"softcap": 3.0}, {"is_causal": False}], ids=str
)
def test_packed_attention_changed_sequence_changes_no_other_sequence(options):
    changed = inputs()
    with torch.no_grad():
        for tensor in changed:
            tensor[:, :, 6:46] += 1.0  # the third sequence
    outs = [attend(tensors, **options)[0] for tensors in (inputs(), changed)]
    same = (outs[0] == outs[1]).flatten(2).all(-1)[0]
    assert same.tolist() == [True] * 6 + [False] * 40 + [True] * 17


def test_packed_attention_window_of_longest_sequence_equals_full_attention():
    full = attend(inputs())[0]
    assert torch.equal(full, attend(inputs(), sliding_window=40)[0])
    assert not torch.equal(full, attend(inputs(), sliding_window=39)[0])


def test_packed_attention_unsupported_argument_raises_its_name():
    tensors = inputs()
    with pytest.raises(NotImplementedError, match="Identity passes bias_of_love to attention"):
        attend(tensors, bias_of_love=1)
    with pytest.raises(NotImplementedError, match="received no sequence boundaries"):
        packed_attention(nn.Identity(), *tensors, None)
    with pytest.raises(NotImplementedError, match="passes its own attention mask tensor"):
        packed_attention(nn.Identity(), *tensors, torch.ones(1))


def test_packed_mask_of_transformers_is_applied_or_refused_by_name():
    from transformers import LlamaConfig
    from transformers import masking_utils as masks

    config = LlamaConfig(attn_implementation=attention.register(), attention_chunk_size=4)
    options = {
        "config": config,
        "inputs_embeds": torch.zeros(1, 63, 8),
        "past_key_values": None,
    }
    assert masks.create_causal_mask(**options, attention_mask=None) is None
    images = torch.where((torch.arange(63) >= 50) & (torch.arange(63) < 55), 0, -1)[None]
    overlay = masks.create_causal_mask(**options, attention_mask=None, block_sequence_ids=images)
    tensors = inputs()
    where = boundaries(torch.tensor([0, 5, 6, 46, 63], dtype=torch.int32), 40)

    def out():
        return packed_attention(nn.Identity(), *tensors, overlay, **where)[0]

    before = out()
    with torch.no_grad():
        for tensor in tensors:
            tensor[:, :, 54] += 1.0  # the last token of the image, in the last sequence
    assert (before != out()).flatten(2).any(-1)[0].nonzero()[:, 0].tolist() == list(range(50, 63))
    with pytest.raises(NotImplementedError, match=" contains chunked_overlay"):
        masks.create_chunked_causal_mask(**options, attention_mask=None)
    with pytest.raises(NotImplementedError, match=" contains bidirectional_mask_function"):
        masks.create_bidirectional_mask(**options, attention_mask=None)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_encoder_attention_rows_masks_and_boundaries_agree(device):
    dtype, tolerance = (torch.float32, 1e-6) if device == "cpu" else (torch.bfloat16, 2e-2)
    packed = [x.detach() for x in inputs(device, dtype, kv_heads=8)]
    rows = [x[0].reshape(8, 9, 7, 32).transpose(0, 1) for x in packed]  # nine items of seven tokens
    per_row, _ = encoder_attention(nn.Identity(), *rows, None)
    cu_seqlens = torch.arange(0, 64, 7, dtype=torch.int32, device=device)
    in_one_row, _ = encoder_attention(
        nn.Identity(), *packed, None, **boundaries(cu_seqlens, 7), is_causal=False
    )
    assert torch.allclose(per_row.reshape(1, 63, 8, 32), in_one_row, atol=tolerance)
    first_five = (torch.arange(7, device=device) < 5).expand(9, 1, 7, 7)
    masked, _ = encoder_attention(nn.Identity(), *rows, first_five)
    shortened, _ = encoder_attention(nn.Identity(), *(x[:, :, :5] for x in rows), None)
    assert torch.allclose(masked[:, :5], shortened, atol=tolerance)


def test_encoder_attention_unsupported_argument_raises_its_name():
    tensors = inputs(kv_heads=8)
    cu_seqlens = torch.tensor([0, 30], dtype=torch.int32)
    batch = [x.expand(2, -1, -1, -1) for x in tensors]
    with pytest.raises(NotImplementedError, match="Identity passes softcap to attention"):
        encoder_attention(nn.Identity(), *tensors, None, softcap=2.0)
    with pytest.raises(NotImplementedError, match="passes a mask of shape"):
        encoder_attention(nn.Identity(), *tensors, torch.ones(1, 63))
    with pytest.raises(NotImplementedError, match="passes boundaries together with a batch"):
        encoder_attention(nn.Identity(), *batch, None, **boundaries(cu_seqlens, 30))
    with pytest.raises(RuntimeError, match="boundaries that do not end at its number of tokens"):
        encoder_attention(nn.Identity(), *tensors, None, **boundaries(cu_seqlens, 30))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 4}, {"is_causal": False}, {"scaling": 0.3}], ids=str
)
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_varlen_kernel_on_gpu_equals_reference(monkeypatch, options, kv_heads):
    fast = attend(inputs("cuda", torch.bfloat16, kv_heads=kv_heads), **options)
    monkeypatch.setattr(attention_ops, "_torch_varlen_is_supported", lambda *_: False)
    plain = attend(inputs("cuda", torch.float32, kv_heads=kv_heads), **options)
    for a, b in [(fast[0], plain[0]), *zip(fast[1], plain[1], strict=True)]:
        assert float((a.float() - b).norm() / b.norm()) < 1e-2


@pytest.mark.gpu
def test_varlen_kernel_on_gpu_makes_no_host_sync():
    tensors = inputs("cuda", torch.bfloat16)
    attend(tensors)
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int().cuda()
    with no_host_sync():
        packed_attention(nn.Identity(), *tensors, None, **boundaries(cu_seqlens, max(LENGTHS)))
