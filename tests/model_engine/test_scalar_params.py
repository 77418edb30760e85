"""Parameters of 0 dimensions (CLIP's `logit_scale`), which FSDP2 cannot shard, on sharded layouts."""

import pytest
import torch
from conftest import CAMPAIGN
from tiny_engines import ALONE, engine_of, share_of, weights

from mvp_engine.model_engine import FSDPEngine

TOWER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def clip_engine(layout):
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
    return engine_of(model, layout, fused_adamw, FSDPEngine, clip_grad_norm=1.0)


def fused_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, fused=True)


def train(made, steps):
    """The gradient norms of a few steps; every rank has its part of three pairs."""

    def step(pair):
        image, tokens = pair
        return made.model(input_ids=tokens, pixel_values=image).logits_per_image.square().sum(), 1

    generator = torch.Generator().manual_seed(3)
    norms = []
    for _ in range(steps):
        images = torch.randn(3, 3, 8, 8, generator=generator)
        tokens = torch.randint(30, (3, 5), generator=generator)
        pairs = list(zip(images.split(1), tokens.split(1), strict=True))
        norms.append(float(made.train_batch(share_of(made.layout, pairs), step).grad_norm))
    return norms


def trained(layout, folder):
    """Norms, weights after the second step, which are saved, and this rank's scale after the third."""
    made = clip_engine(layout)
    norms = train(made, 2)
    made.save_checkpoint(folder)
    state = weights(made.model)
    norms += train(made, 1)
    return norms, state, float(made.model.logit_scale.detach())


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"shard": 2},
        pytest.param({"shard": 2, "replicate": 2}, marks=CAMPAIGN),
    ],
    ids=str,
)
def test_clip_with_a_scalar_parameter_on_replicas_of_two_shards_equals_one_rank(
    on_ranks, sizes, tmp_path
):
    expected, state, its_scale = trained(ALONE, tmp_path / "one")
    for norms, sharded, scale in on_ranks(sizes, trained, tmp_path / "saved"):
        assert norms == pytest.approx(expected, rel=1e-4)
        assert sharded.keys() == state.keys()
        for name, weight in state.items():
            assert torch.allclose(sharded[name], weight, rtol=1e-4, atol=1e-6), name
        assert scale == pytest.approx(its_scale, rel=1e-5)
    again = clip_engine(ALONE)
    again.load_checkpoint(tmp_path / "saved")
    assert torch.equal(again.model.logit_scale, sharded["logit_scale"])
    assert train(again, 1) == pytest.approx(expected[2:], rel=1e-4)
