"""OmniAdapter: an Omni model as model engines see it; what its talker does not support is refused by name."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mvp_engine.config.schema import Experts
from mvp_engine.distributed import Layout
from mvp_engine.distributed.collective_errors import raise_on_all_ranks
from mvp_engine.distributed.pipeline import StageLink
from mvp_engine.errors import UserError
from mvp_engine.hf.adapter import HFAdapter
from mvp_engine.hf.language_model import LanguageModel
from mvp_engine.hf.preflight_speech import check_speech


class OmniAdapter(HFAdapter):
    def preflight(self, layout: Layout, exact: bool) -> None:
        if isinstance(self.model, LanguageModel):  # CSM has no text to compare
            super().preflight(layout, exact)
        group = layout.world.host_group
        with raise_on_all_ranks(group):
            check_speech(self.model, exact=exact, group=group)

    def apply_tensor_parallel(self, mesh: DeviceMesh) -> NoReturn:
        raise _unsupported("parallel.tensor > 1", "parallel.tensor=1 and parallel.shard")

    def apply_expert_parallel(self, mesh: DeviceMesh) -> list[nn.Module]:
        raise _unsupported("parallel.expert > 1", "parallel.expert=1 and parallel.shard")

    def cut_stage(self, link: StageLink, skeleton: nn.Module | None) -> NoReturn:
        raise _unsupported("parallel.pipeline > 1", "parallel.pipeline=1 and parallel.shard")

    def balance_experts(self, settings: Experts, device: torch.device) -> NoReturn:
        raise _unsupported("experts.balance or experts.z", "experts.balance=none and experts.z=0")


def _unsupported(key: str, fix: str) -> UserError:
    return UserError(
        f"model.type=omni_model does not support {key}: thinker and talker run on different tokens. Set {fix}"
    )
