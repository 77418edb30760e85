"""KitOptimizer: one optimizer for all parameters, AdamW or Muon by group, with low-precision states and an EMA.

All that it keeps is state of its parameters, sharded like them. The engine sets `grad_scale` and `found_inf` before a
step, as it does for torch's fused optimizers (see `update.DeviceFlags`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mvp_engine.checkpoint.state import EMA
from mvp_engine.distributed.dtensor import empty_sharded_like, local_tensor
from mvp_engine.errors import UserError
from mvp_engine.kit.optim.adamw import AdamWParam, adamw_
from mvp_engine.kit.optim.chunks import has_whole_blocks
from mvp_engine.kit.optim.ema import create_ema, swap_ema_, update_ema_
from mvp_engine.kit.optim.muon import MuonParam, muon_
from mvp_engine.kit.optim.rounding import rounding_salt
from mvp_engine.kit.optim.state_tensor import SCALES, StateSpec, StateTensor, storage_dtype
from mvp_engine.kit.optim.update import DeviceFlags

LOGGER = logging.getLogger("mvp_engine")
STATE_KEYS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum",)}
NEVER_NEGATIVE = ("exp_avg_sq",)


class KitOptimizer(Optimizer):
    """AdamW or Muon, by the `kind` of a parameter group.

    `names`: the name of each parameter, which the random bits of its stochastic rounding depend on.
    `state_dtype`: float32, bfloat16 or int8. `ema`: the decay of the EMA; without it none is kept.
    """

    # The engine then leaves gradient scaling and skipped steps to this class, without a host sync.
    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(
        self,
        groups: list[dict[str, Any]],
        names: dict[Tensor, str],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float = 0.95,
        state_dtype: str = "float32",
        ema: float | None = None,
        seed: int = 0,
    ) -> None:
        self.names = names
        self.state_dtype = state_dtype
        self.ema = ema
        self.seed = seed
        self._ema_is_swapped_in = False
        self._specs: dict[Tensor, list[StateSpec]] = {}
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "momentum": momentum,
            "kind": "adamw",
            "fused": True,  # step counts are on the device: for code that moves an optimizer
        }
        super().__init__(groups, defaults)
        for param, group in self._params_with_groups():
            self._state_specs(param, group)  # raises for layouts that are not supported

    def _params_with_groups(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for group in self.param_groups:
            for param in group["params"]:
                yield param, group

    # ---- A step ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self._ema_is_swapped_in:
            raise RuntimeError(
                "the EMA weights are swapped in: leave averaged() before the next step"
            )
        flags = DeviceFlags(self.grad_scale, self.found_inf)
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                self._create_state(param, group)
            if group["kind"] == "muon":
                muon_([self._muon_param(param, group) for param in params], group, flags)
            else:
                adamw_([self._adamw_param(param, group) for param in params], group, flags)
            if self.ema is not None:
                for param in params:
                    update_ema_(param, self.state[param], self.ema, self.found_inf)

    def _create_state(self, param: Tensor, group: dict[str, Any]) -> None:
        """The state of a parameter at its first step."""
        state = self.state[param]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=local_tensor(param).device)
            for state_tensor in self._state_tensors(param, group, state):
                state_tensor.create()
        if self.ema is not None and EMA not in state:
            create_ema(param, state)

    def _adamw_param(self, param: Tensor, group: dict[str, Any]) -> AdamWParam:
        state = self.state[param]
        exp_avg, exp_avg_sq = self._state_tensors(param, group, state)
        return AdamWParam(param, state["step"], exp_avg, exp_avg_sq)

    def _muon_param(self, param: Tensor, group: dict[str, Any]) -> MuonParam:
        state = self.state[param]
        (momentum,) = self._state_tensors(param, group, state)
        return MuonParam(param, state["step"], momentum)

    def _state_tensors(
        self, param: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> list[StateTensor]:
        """What the optimizer of this group keeps of a parameter, stored in `state`."""
        return [StateTensor(param, state, spec) for spec in self._state_specs(param, group)]

    def _state_specs(self, param: Tensor, group: dict[str, Any]) -> list[StateSpec]:
        """How the states of a parameter are stored. Computed once: it would cost 1 us per parameter in every step."""
        if param not in self._specs:
            name = self.names[param]
            specs: list[StateSpec] = []
            for key in STATE_KEYS[group["kind"]]:
                is_signed = key not in NEVER_NEGATIVE
                dtype = storage_dtype(param, name, self.state_dtype, is_signed)
                specs.append(StateSpec(key, dtype, rounding_salt(self.seed, name, key)))
            self._specs[param] = specs
        return self._specs[param]

    # ---- EMA ------------------------------------------------------------------------------------------------------

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which the model has its EMA weights, for an evaluation or an export."""
        if self.ema is None:
            raise UserError("no EMA of the weights is kept: set optim.ema, such as 0.999")
        self._swap_ema()
        try:
            yield
        finally:
            self._swap_ema()

    def _swap_ema(self) -> None:
        swap_ema_(self.state)
        self._ema_is_swapped_in = not self._ema_is_swapped_in

    # ---- Checkpoints ----------------------------------------------------------------------------------------------

    def empty_state(self, param: Tensor, key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor to load a state of a checkpoint into."""
        if shape == param.shape:
            return torch.empty_like(param.detach(), dtype=dtype)
        if key.endswith(SCALES) and has_whole_blocks(param):
            return empty_sharded_like(param, shape, dtype)
        return torch.empty(shape, dtype=dtype)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states of any dtype. States of another kind of optimizer are not used: these start from zero."""
        saved_states = state_dict["state"]
        super().load_state_dict({**state_dict, "state": {}})
        not_loaded: list[str] = []
        for i, (param, group) in enumerate(self._params_with_groups()):
            if i in saved_states and not self._load_state(param, group, saved_states[i]):
                not_loaded.append(self.names[param])
        if not_loaded:
            LOGGER.warning(
                "the optimizer states of %d parameters start from zero, such as of %s",
                len(not_loaded),
                not_loaded[0],
            )

    @torch.no_grad()
    def _load_state(self, param: Tensor, group: dict[str, Any], saved: dict[str, Any]) -> bool:
        """Load the state of one parameter; False if `saved` lacks any of it except the EMA."""
        state = self.state[param]
        device = local_tensor(param).device
        if self.ema is not None and EMA in saved:
            state[EMA] = saved[EMA].to(device)
        if "step" not in saved:
            return False
        step = saved["step"].to(device, torch.float32)
        loaded: dict[str, Any] = {"step": step}
        for state_tensor in self._state_tensors(param, group, loaded):
            if not state_tensor.load(saved, state_tensor.rounding_key(step)):
                return False
        state.update(loaded)
        return True
