"""Sizes that differ between packs: one graph for all of them from the first pack on."""

import pytest
import torch
from torch import nn

from mvp_engine.hf.model.input_hooks import mark_sizes


class Block(nn.Module):
    """Arguments as transformers' decoder layers have them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, hidden, rotary, **kwargs):
        boundaries = kwargs["cu_seq_lens_q"]
        longest = kwargs["max_length_q"]
        mixed = self.linear(hidden) * rotary[0] + rotary[1]
        return mixed / boundaries.diff().sum() + longest


@pytest.mark.parametrize("marked, graphs", [(False, 2), (True, 1)])
def test_block_with_marked_sizes_compiles_one_graph_for_all_packs(marked, graphs):
    import torch._dynamo as dynamo
    from torch._dynamo.testing import CompileCounter

    dynamo.reset()
    block, counter = Block(), CompileCounter()
    before = torch.compiler.config.dynamic_sources
    block.compile(backend=counter)
    if marked:
        mark_sizes(block)
    try:
        for lengths in [
            (4, 7),
            (5, 3, 9),
            (4, 2),
            (8, 6, 2, 3),
        ]:  # the third has as many tokens as features
            tokens = sum(lengths)
            hidden = torch.randn(1, tokens, 6)
            rotary = torch.randn(1, tokens, 6), torch.randn(1, tokens, 6)
            boundaries = torch.tensor([0, *lengths]).cumsum(0)
            named = {"cu_seq_lens_q": boundaries, "max_length_q": max(lengths)}
            expected = block.forward(hidden.clone(), rotary, **named)
            assert torch.equal(block(hidden, rotary, **named), expected)
    finally:
        torch.compiler.config.dynamic_sources = before
        dynamo.reset()
    assert counter.frame_count == graphs


def test_mark_sizes_marks_one_dimension_of_a_tensor():
    """That of the tokens; others may be of the same size."""
    block = nn.Identity()
    block._compiled_call_impl = lambda *_, **__: None
    mark_sizes(block)
    hidden, rotary, heads = torch.ones(6, 6, 6), torch.ones(1, 6, 6), torch.ones(1, 6, 1, 6)
    ids, boundaries, other = torch.ones(3, 1, 6), torch.ones(4), torch.ones(2, 5)
    block(hidden, (rotary, heads), ids=ids, boundaries=boundaries, other=other)
    tensors = (hidden, rotary, heads, ids, boundaries, other)
    found = [getattr(one, "_dynamo_weak_dynamic_indices", set()) for one in tensors]
    assert found == [{1}, {1}, {1}, {2}, {0}, set()]
