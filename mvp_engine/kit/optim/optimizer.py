"""KitOptimizer: one optimizer for all parameters, AdamW or Muon by group, with low-precision states and an EMA.

All that it keeps is state of its parameters, sharded like them. The engine sets `grad_scale` and `found_inf` before a
step, as it does for torch's fused optimizers (see `update.DeviceFlags`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mvp_engine.checkpoint.state import EMA
from mvp_engine.distributed.dtensor import empty_sharded_like, local_tensor
from mvp_engine.errors import UserError
from mvp_engine.kit.optim import state_stream
from mvp_engine.kit.optim.adamw import AdamWParam, adamw_
from mvp_engine.kit.optim.chunks import flat_offset, has_whole_blocks, rows_of
from mvp_engine.kit.optim.host_states import check_host_memory, host_copy, host_zeros_like
from mvp_engine.kit.optim.muon import MuonParam, muon_
from mvp_engine.kit.optim.rounding import rounding_salt
from mvp_engine.kit.optim.state_stream import Bucket, StagedSlice, StateStream, make_buckets
from mvp_engine.kit.optim.state_tensor import SCALES, StateSpec, StateTensor, storage_dtype
from mvp_engine.kit.optim.update import DeviceFlags
from mvp_engine.model_engine.ema import swap_ema_, update_ema_
from mvp_engine.ops.host_memory import GIB

LOGGER = logging.getLogger("mvp_engine")
STATE_KEYS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum",)}
NEVER_NEGATIVE = ("exp_avg_sq",)


@dataclass(frozen=True)
class _Updated:
    """A parameter, or rows of this rank's part of it, with its states on the device."""

    param: Tensor
    step: Tensor
    state: dict[str, Any]
    rows: slice | None = None  # None: all


class KitOptimizer(Optimizer):
    """AdamW or Muon, by the `kind` of a parameter group.

    `names`: the name of each parameter, which the random bits of its stochastic rounding depend on.
    `state_dtype`: float32, bfloat16 or int8. `ema`: the decay of the EMA; without it none is kept.
    `offload`: states are on the host, and on the GPU only while their bucket is updated (`StateStream`).
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
        offload: bool = False,
    ) -> None:
        self.names = names
        self.state_dtype = state_dtype
        self.ema = ema
        self.seed = seed
        self._ema_is_swapped_in = False
        self.offload = offload
        self._specs: dict[Tensor, list[StateSpec]] = {}
        self._offloaded: dict[Tensor, bool] = {}
        self._known_buckets: dict[tuple[int, ...], list[Bucket]] = {}
        self._stream: StateStream | None = None  # made in the first step
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
        if offload:
            size = self.host_bytes
            check_host_memory(size)
            LOGGER.info(
                "optim.offload: %.1f GiB of optimizer states per rank on the host", size / GIB
            )

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
        buckets: list[Bucket] = []
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                self._create_state(param, group)
            resident = [param for param in params if not self.is_offloaded(param)]
            self._update(group, [self._all_rows(param) for param in resident])
            if len(resident) < len(params):
                buckets += self._buckets(group, [p for p in params if self.is_offloaded(p)])
        if buckets:
            if self._stream is None:
                device = local_tensor(buckets[0].slices[0].param).device
                self._stream = StateStream(device)
            self._stream.run(buckets, self._update_staged)

    def _create_state(self, param: Tensor, group: dict[str, Any]) -> None:
        """The state of a parameter at its first step."""
        state = self.state[param]
        on_host = self.is_offloaded(param)
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=local_tensor(param).device)
            for state_tensor in self._state_tensors(param, group, state):
                state_tensor.create(on_host=on_host)
        if self.ema is not None and EMA not in state:
            if on_host:
                state[EMA] = host_zeros_like(param, torch.float32)
                local_tensor(state[EMA]).copy_(local_tensor(param.detach()))
            else:
                state[EMA] = param.detach().to(torch.float32, copy=True)

    def _all_rows(self, param: Tensor) -> _Updated:
        state = self.state[param]
        return _Updated(param, state["step"], state)

    def _update(self, group: dict[str, Any], updated: list[_Updated]) -> None:
        """Update parameters of a group, or rows of them, whose states are on the device."""
        flags = DeviceFlags(self.grad_scale, self.found_inf)
        if group["kind"] == "muon":
            muon_([self._muon_param(one, group) for one in updated], group, flags)
        else:
            adamw_([self._adamw_param(one, group) for one in updated], group, flags)
        if self.ema is not None:
            for one in updated:
                weight = rows_of(one.param, one.rows)
                ema = local_tensor(one.state[EMA])
                update_ema_(weight, ema, one.step, self.ema, self.found_inf)

    def _adamw_param(self, one: _Updated, group: dict[str, Any]) -> AdamWParam:
        exp_avg, exp_avg_sq = self._state_tensors(one.param, group, one.state)
        return AdamWParam(one.param, one.step, exp_avg, exp_avg_sq, one.rows)

    def _muon_param(self, one: _Updated, group: dict[str, Any]) -> MuonParam:
        (momentum,) = self._state_tensors(one.param, group, one.state)
        return MuonParam(one.param, one.step, momentum)

    # ---- States on the host ---------------------------------------------------------------------------------------

    def is_offloaded(self, param: Tensor) -> bool:
        """Whether the states of a parameter are on the host: equal on all ranks that share it."""
        if not self.offload:
            return False
        if param not in self._offloaded:
            local = local_tensor(param.detach())
            is_large = param.numel() >= state_stream.SMALL and param.ndim > 0
            on_device = not state_stream.is_host(local.device)
            self._offloaded[param] = is_large and on_device and local.is_contiguous()
        return self._offloaded[param]

    def _buckets(self, group: dict[str, Any], params: list[Tensor]) -> list[Bucket]:
        """The buckets of these parameters, which are the same in every step as long as the same ones have gradients."""
        key = tuple(id(param) for param in params)
        if key not in self._known_buckets:
            states = [(param, _without_step(self.state[param])) for param in params]
            can_slice = partial(self._can_slice, group)
            self._known_buckets[key] = list(make_buckets(group, states, can_slice=can_slice))
        return self._known_buckets[key]

    def _can_slice(self, group: dict[str, Any], param: Tensor) -> bool:
        """Whether rows can be updated alone: not those of a matrix of Muon, nor by `chunked_adamw_`."""
        if group["kind"] == "muon":
            return False
        if self._state_specs(param, group)[0].dtype is torch.float32:
            return True
        return local_tensor(param).is_cuda and flat_offset(param) is not None

    def _update_staged(self, group: dict[str, Any], slices: list[StagedSlice]) -> None:
        updated: list[_Updated] = []
        for one in slices:
            origin = one.origin
            step = self.state[origin.param]["step"]
            # Each update advances a step count; that of the parameter is for its last slice.
            step = step if origin.is_last else step.clone()
            updated.append(_Updated(origin.param, step, one.states, origin.rows))
        self._update(group, updated)

    @property
    def host_bytes(self) -> int:
        """Bytes of all states on the host of this rank, without the scales of int8 states, 3 % of them."""
        total = 0
        for param, group in self._params_with_groups():
            if self.is_offloaded(param):
                size = sum(spec.dtype.itemsize for spec in self._state_specs(param, group))
                size += 4 * (self.ema is not None)
                total += size * local_tensor(param).numel()
        return total

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
        swap_ema_({param: state[EMA] for param, state in self.state.items() if EMA in state})
        self._ema_is_swapped_in = not self._ema_is_swapped_in

    # ---- Checkpoints ----------------------------------------------------------------------------------------------

    def empty_state(self, param: Tensor, key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor to load a state of a checkpoint into."""
        on_host = self.is_offloaded(param)
        if shape == param.shape:
            if on_host:
                return host_zeros_like(param, dtype)
            return torch.empty_like(param.detach(), dtype=dtype)
        if key.endswith(SCALES) and has_whole_blocks(param):
            scales = empty_sharded_like(param, shape, dtype)
            return host_zeros_like(scales, dtype) if on_host else scales
        return torch.empty(shape, dtype=dtype)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states of any dtype. States of another kind of optimizer are not used: these start from zero."""
        saved_states = state_dict["state"]
        super().load_state_dict({**state_dict, "state": {}})
        self._known_buckets.clear()
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
        on_host = self.is_offloaded(param)
        if self.ema is not None and EMA in saved:
            ema = saved[EMA]
            state[EMA] = host_copy(ema) if on_host else ema.to(device)
        if "step" not in saved:
            return False
        step = saved["step"].to(device, torch.float32)
        loaded: dict[str, Any] = {"step": step}
        for state_tensor in self._state_tensors(param, group, loaded):
            key = state_tensor.rounding_key(step)
            if not state_tensor.load(saved, key, on_host=on_host):
                return False
        state.update(loaded)
        return True


def _without_step(state: dict[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if key != "step"}
