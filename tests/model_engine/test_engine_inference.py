"""infer_batch on several ranks: batches smaller than the group, and weights that change between calls."""

import pytest
import torch
from conftest import CAMPAIGN
from families import overrides_of
from tiny_engines import ALONE, counting, engine_of


def log_probs(layout):
    shape = overrides_of("qwen3") | {"num_key_value_heads": 4}
    engine = engine_of(shape, layout, optimizer=None, seed=5)
    return [engine.infer_batch(counting(n), ["log_probs"])["log_probs"] for n in (1, 3, 5)]


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"ulysses": 4}, marks=pytest.mark.slow),
        {"context": 2, "ulysses": 2},
        pytest.param({"context": 4}, marks=CAMPAIGN),
        pytest.param({"ulysses": 2, "shard": 2}, marks=CAMPAIGN),
    ],
    ids=str,
)
def test_infer_batch_fewer_tokens_than_sequence_ranks_equals_one_rank(on_ranks, sizes):
    expected = log_probs(ALONE)
    for of_rank in on_ranks(sizes, log_probs):
        for found, wanted in zip(of_rank, expected, strict=True):
            assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)


def infer_load_infer(layout, folder):
    """FSDP keeps some weights gathered after a forward; loading a checkpoint must not leave them in use."""
    engine, other = (engine_of("qwen3", layout, seed=seed) for seed in (1, 2))
    other.save_checkpoint(folder / "saved")
    outputs = [engine.infer_batch(counting(9), ["log_probs"])]
    engine.load_checkpoint(folder / "saved")
    outputs += [each.infer_batch(counting(9), ["log_probs"]) for each in (engine, other)]
    return [output["log_probs"] for output in outputs]


def test_load_checkpoint_after_inference_on_shards_changes_outputs(on_ranks, tmp_path):
    for before, after, fresh in on_ranks({"shard": 2}, infer_load_infer, tmp_path):
        assert not torch.allclose(before, after)
        assert torch.equal(after, fresh)
