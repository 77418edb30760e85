"""Parameters of 0 dimensions (CLIP's `logit_scale`), which FSDP2 cannot shard, on sharded layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import parallel
from ranks import RankPool
from torch import Tensor

from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.model_engine import FSDPEngine, Settings

ALONE = World(0, 1, 0, 1, torch.device("cpu"))
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def clip_engine(world: World, shard: int) -> FSDPEngine:
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(2)
    text = {
        **TOWER,
        "vocab_size": 32,
        "max_position_embeddings": 8,
        "bos_token_id": 30,
        "eos_token_id": 31,
    }
    vision = {**TOWER, "image_size": 8, "patch_size": 4}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    made = FSDPEngine(model, Layout.of(world, parallel(shard=shard)), Settings(clip_grad_norm=1.0))
    made.initialize(
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, fused=True)
    )
    return made


def train(made: FSDPEngine, steps: int) -> list[float]:
    """The gradient norms of a few steps; every rank has its part of three pairs."""
    generator = torch.Generator().manual_seed(3)
    norms = []
    for _ in range(steps):
        images = torch.randn(3, 3, 8, 8, generator=generator)
        tokens = torch.randint(30, (3, 5), generator=generator)
        pairs = [(images[i : i + 1], tokens[i : i + 1]) for i in range(3)]
        mine = pairs[made.layout.data_rank :: made.layout.data_size]
        norms.append(float(made.train_batch(mine, forward_step(made)).grad_norm))
    return norms


def forward_step(made: FSDPEngine) -> Any:
    def step(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        image, tokens = pair
        return made.model(input_ids=tokens, pixel_values=image).logits_per_image.square().sum(), 1

    return step


def train_sharded(shard: int, folder: str) -> tuple[list[float], dict[str, Tensor], float]:
    world = World.join("cpu")
    made = clip_engine(world, shard)
    norms = train(made, 2)
    made.save_checkpoint(folder)
    weights = {
        name: full_tensor(param.detach()).clone() for name, param in made.model.named_parameters()
    }
    norms += train(made, 1)
    local = float(made.model.logit_scale.detach())
    world.close()
    return norms, weights, local


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks", ["ranks2", pytest.param("ranks4", marks=pytest.mark.campaign(only=True))]
)
def test_clip_with_a_scalar_parameter_on_replicas_of_two_shards_equals_one_rank(
    request: pytest.FixtureRequest, ranks: str, tmp_path: Path
) -> None:
    pool: RankPool = request.getfixturevalue(ranks)
    one = clip_engine(ALONE, 1)
    expected = train(one, 2)
    weights = {name: param.detach().clone() for name, param in one.model.named_parameters()}
    expected += train(one, 1)
    for norms, sharded, scale in pool.run(train_sharded, 2, str(tmp_path / "saved")):
        assert norms == pytest.approx(expected, rel=1e-4)
        assert sharded.keys() == weights.keys()
        for name, weight in weights.items():
            assert torch.allclose(sharded[name], weight, rtol=1e-4, atol=1e-6), name
        assert scale == pytest.approx(float(one.model.logit_scale.detach()), rel=1e-5)
    again = clip_engine(ALONE, 1)
    again.load_checkpoint(tmp_path / "saved")
    assert torch.equal(again.model.logit_scale, sharded["logit_scale"])
    assert train(again, 1) == pytest.approx(expected[2:], rel=1e-4)
