"""infer_batch on several ranks: batches smaller than the group, and weights that change between calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import overrides_of, parallel
from torch.optim.lr_scheduler import LambdaLR

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.hf import LanguageModel
from mvp_engine.model_engine import LanguageModelEngine, Settings


@pytest.mark.campaign
def test_infer_batch_fewer_tokens_than_sequence_ranks_equals_one_rank(
    ranks4, campaign_size: Any
) -> None:
    alone = log_probs({})
    layouts = [
        {"ulysses": 4},
        {"context": 2, "ulysses": 2},
        {"context": 4},
        {"ulysses": 2, "shard": 2},
    ]
    for shared in [
        of_rank
        for sizes in layouts[: campaign_size(3, 4)]
        for of_rank in ranks4.run(log_probs, sizes)
    ]:
        for got, expected in zip(shared, alone, strict=True):
            assert torch.allclose(got, expected, rtol=1e-5, atol=1e-5)


def log_probs(sizes: dict[str, int]) -> list[Any]:
    world = World.join("cpu")
    model = LanguageModel.on_meta(None, overrides_of("qwen3") | {"num_key_value_heads": 4})
    engine = LanguageModelEngine(model, Layout.of(world, parallel(**sizes)), Settings(seed=5))
    engine.initialize()
    batches = [PackedBatch.from_sequences([torch.arange(n)]) for n in (1, 3, 5)]
    outs = [engine.infer_batch(batch, ["log_probs"])["log_probs"] for batch in batches]
    world.close()
    return outs


def test_load_checkpoint_after_inference_on_shards_changes_outputs(ranks2, tmp_path) -> None:
    for before, after, fresh in ranks2.run(infer_load_infer, str(tmp_path)):
        assert not torch.allclose(before, after)
        assert torch.equal(after, fresh)


def infer_load_infer(folder: str) -> tuple[Any, Any, Any]:
    """FSDP keeps some weights gathered after a forward; loading a checkpoint must not leave them in use."""
    world = World.join("cpu")
    layout = Layout.of(world, parallel(shard=2))
    engines = [
        LanguageModelEngine(
            LanguageModel.on_meta(None, overrides_of("qwen3")), layout, Settings(seed=seed)
        )
        for seed in (1, 2)
    ]
    for engine in engines:
        engine.initialize(
            lambda m: torch.optim.SGD(m.parameters(), 0.1), lambda sgd: LambdaLR(sgd, lambda _: 1.0)
        )
    batch = PackedBatch.from_sequences([torch.arange(9)])

    def infer(engine: LanguageModelEngine) -> torch.Tensor:
        return engine.infer_batch(batch, ["log_probs"])["log_probs"]

    engines[1].save_checkpoint(Path(folder) / "saved")
    before = infer(engines[0])
    engines[0].load_checkpoint(Path(folder) / "saved")
    outputs = before, infer(engines[0]), infer(engines[1])
    world.close()
    return outputs
