"""ActionAdapter: an action model as model engines see it, with a preflight of its own head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.distributed import Layout
from mvp_engine.distributed.collective_errors import raise_on_all_ranks
from mvp_engine.distributed.pipeline import StageLink
from mvp_engine.errors import UserError
from mvp_engine.hf.model.adapter import HFAdapter
from mvp_engine.hf.model.preflight import EXACT, _eager_eval
from mvp_engine.kit.actions.action_model import CHUNK, MASK, NOISE, STATE, TIMES, ActionModel
from mvp_engine.kit.actions.pi0 import Pi0Policy

if TYPE_CHECKING:
    from torch import nn

HALF_PRECISION = 0.1  # the largest relative difference that bf16 rounding explains
NEIGHBOUR = 0.05  # of equal shapes, so nearly all of rounding is equal


class ActionAdapter(HFAdapter):
    model: ActionModel

    def __init__(self, model: ActionModel) -> None:
        super().__init__(model)
        if isinstance(model, Pi0Policy):
            self.extra_forwards = (*HFAdapter.extra_forwards, "reference_velocity")

    def apply_tensor_parallel(self, mesh: DeviceMesh) -> None:
        raise UserError(
            "parallel.tensor > 1 does not support model.type=action_model: set parallel.tensor=1 and parallel.shard"
        )

    def cut_stage(self, link: StageLink, skeleton: nn.Module | None) -> None:
        raise UserError(
            "parallel.pipeline > 1 does not support model.type=action_model: set parallel.pipeline=1 and parallel.shard"
        )

    def preflight(self, layout: Layout, exact: bool) -> None:
        if not isinstance(self.model, Pi0Policy):
            super().preflight(layout, exact)
            return
        with raise_on_all_ranks(layout.world.host_group):
            check_velocities(self.model, exact)

    def preflight_media(self, engine: Any, batches: Iterable[Any]) -> None:
        if not isinstance(self.model, Pi0Policy):  # `preflight` had images
            super().preflight_media(engine, batches)


@torch.no_grad()
def check_velocities(model: Pi0Policy, exact: bool) -> None:
    """Raise unless packed velocities are those of each sequence alone and of transformers' own forward."""
    device = next(model.parameters()).device
    rows = [probe_batch(model, cameras, words, seed=words) for cameras, words in ((1, 3), (2, 6))]
    other = probe_batch(model, 2, 6, seed=1)
    with _eager_eval(model):
        packed = _velocity(model, PackedBatch.concat(rows).to(device))
        moved = [row.to(device) for row in rows]
        changed = _velocity(model, PackedBatch.concat([rows[0], other]).to(device))
        alone = torch.cat([_velocity(model, row) for row in moved])
        reference = torch.cat([model.reference_velocity(row) for row in moved])
    if not bool(packed.isfinite().all()):
        raise UserError("pi0 returns non-finite velocities: check its weights for NaN and infinity")
    bound = EXACT if exact else HALF_PRECISION
    for found, wanted, what, limit in (
        (packed[:1], changed[:1], "another neighbour in the pack", EXACT if exact else NEIGHBOUR),
        (packed, alone, "the same sequences alone", bound),
        (packed, reference, "transformers' own forward", bound),
    ):
        difference = float((found - wanted).abs().mean() / wanted.abs().mean().clamp(min=1e-6))
        if not difference <= limit:
            raise UserError(
                f"pi0 cannot be trained on packed sequences: its velocities differ from those with {what} by "
                f"{difference:.1e}. Is its config one that transformers' pi0 has other code for?"
            )


def _velocity(model: Pi0Policy, batch: PackedBatch) -> Tensor:
    output: Tensor = model(batch, ["velocity"])["velocity"]
    return output


def probe_batch(
    model: Pi0Policy, cameras: int, words: int, seed: int, draws: int = 2
) -> PackedBatch:
    """One random sequence: `cameras` images and a prompt of `words` tokens, with state, actions and noise."""
    config: Any = model.hf.config
    spec = model.action_spec
    vision = config.vlm_config.vision_config
    image_token = config.vlm_config.image_token_id
    patches = (vision.image_size // vision.patch_size) ** 2
    g = torch.Generator().manual_seed(seed)
    vocab_size = config.vlm_config.text_config.vocab_size
    prompt = torch.randint(min(vocab_size, image_token), (words,), generator=g)
    prompt = torch.where(prompt == image_token, 0, prompt)
    ids = torch.cat([torch.full((cameras * patches,), image_token), prompt])
    side = vision.image_size
    pixels = torch.randn(cameras, vision.num_channels, side, side, generator=g)
    chunk = (1, spec.chunk, spec.action_dim)
    fields = {
        STATE: torch.randn(1, spec.state_dim, generator=g),
        CHUNK: torch.randn(chunk, generator=g),
        MASK: torch.ones(chunk, dtype=torch.bool),
        NOISE: torch.randn(1, draws, *chunk[1:], generator=g),
        TIMES: torch.rand(1, draws, generator=g),
    }
    ones = torch.ones(cameras, dtype=torch.long)
    media = {"pixel_values": Media(pixels, ones, torch.zeros(cameras, dtype=torch.long))}
    no_loss = torch.zeros_like(ids, dtype=torch.bool)
    return PackedBatch.from_sequences([ids], [no_loss], sequence_fields=fields, media=media)
