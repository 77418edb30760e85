"""The loss of ranks that share sequences: the quick way, with the gradients of one rank."""

from unittest.mock import patch

import pytest
from tiny_engines import ALONE, assert_close, counting, engine_of, gradients

from mvp_engine.hf.model import language_model

BATCHES = [counting(7, 3, 11, 2, modulus=17), counting(1), counting(2)]


def stepped(layout, names):
    """Outputs of batches, one of them with fewer tokens than ranks, the gradients, and calls of the quick way."""
    engine = engine_of("qwen3", layout, seed=5)
    outs = []

    def step(batch):
        outs.append(engine.model(batch, names))
        return outs[-1]["loss"], batch.num_loss_tokens

    linear_loss = language_model.linear_loss
    with patch.object(language_model, "linear_loss", side_effect=linear_loss) as quick:
        engine.forward_backward_batch(BATCHES, step)
    detached = [{name: value.detach() for name, value in out.items()} for out in outs]
    return detached, gradients(engine.model, layout.data_size), quick.call_count


@pytest.mark.slow
def test_ulysses_ranks_compute_head_gradients_in_forward(on_ranks):
    for names, calls in ((["loss"], 3), (["loss", "losses"], 3), (["loss", "entropy"], 0)):
        outs, grads, _ = stepped(ALONE, names)
        for found, found_grads, count in on_ranks({"ulysses": 2}, stepped, names):
            assert count == calls, names
            for ours, theirs in zip(found, outs, strict=True):
                assert_close(ours, theirs)
            assert_close(found_grads, grads)
