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
from itertools import groupby
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from mvp_engine.checkpoint.state import EMA
from mvp_engine.distributed.dtensor import (
    empty_sharded_like,
    full_tensor,
    local_tensor,
    shard_offsets,
    shard_slices,
)
from mvp_engine.errors import UserError
from mvp_engine.kit.optim import state_stream
from mvp_engine.kit.optim.state_stream import (
    Bucket,
    StagedSlice,
    StateStream,
    check_host_memory,
    host_copy,
    host_zeros_like,
    make_buckets,
)
from mvp_engine.kit.optim.state_tensor import (
    SCALES,
    DeviceFlags,
    StateSpec,
    StateTensor,
    advance_step_,
    advance_steps_,
    apply_update_,
    chunks,
    flat_offset,
    gradient_chunk,
    has_whole_blocks,
    rounding_salt,
    rows_of,
    storage_dtype,
)
from mvp_engine.model_engine.base import swap_ema_, update_ema_
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
            states = [(param, self.state[param]) for param in resident]
            self._update(group, [_Updated(param, state["step"], state) for param, state in states])
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

    def _update(self, group: dict[str, Any], updated: list[_Updated]) -> None:
        """Update parameters of a group, or rows of them, whose states are on the device."""
        flags = DeviceFlags(self.grad_scale, self.found_inf)
        if group["kind"] == "muon":
            muon_([self._muon_param(one, group) for one in updated], group, flags)
        else:
            params = []
            for one in updated:
                exp_avg, exp_avg_sq = self._state_tensors(one.param, group, one.state)
                params.append(AdamWParam(one.param, one.step, exp_avg, exp_avg_sq, one.rows))
            adamw_(params, group, flags)
        if self.ema is not None:
            for one in updated:
                weight = rows_of(one.param, one.rows)
                ema = local_tensor(one.state[EMA])
                update_ema_(weight, ema, one.step, self.ema, self.found_inf)

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


# Muon: updates that are the momentum of a matrix with all singular values brought near 1.
#
# The full matrix is needed (`orthogonalize`); everything else here works on this rank's shards.


@dataclass(frozen=True)
class MuonParam:
    """A matrix, or a stack of matrices, with its step count and its state."""

    param: Tensor
    step: Tensor
    momentum: StateTensor


def muon_(params: list[MuonParam], group: dict[str, Any], flags: DeviceFlags) -> None:
    """Update the parameters of a group in place; a collective of the ranks that shard them."""
    lr = group["lr"]
    skip = flags.skip
    momenta: list[Tensor] = []
    for item in params:
        advance_step_(item.step, skip)
        momenta.append(_nesterov_momentum(item, group["momentum"], flags))
    for i, direction in orthogonalize_all(momenta):
        param = params[i].param
        update = direction.float() * (lr * update_scale(param.shape))
        apply_update_(local_tensor(param), update, lr * group["weight_decay"], skip)


def _nesterov_momentum(item: MuonParam, mu: float, flags: DeviceFlags) -> Tensor:
    """Update the momentum; returns what it will be after one more step with this gradient (Nesterov)."""
    key = item.momentum.rounding_key(item.step)
    lookahead = torch.empty_like(item.param, dtype=torch.float32)
    for chunk in chunks(item.param):
        grad = gradient_chunk(item.param, chunk, flags.grad_scale)
        momentum = item.momentum.read(chunk).mul_(mu).add_(grad)
        local_tensor(lookahead)[chunk.index] = grad + mu * momentum
        item.momentum.write(chunk, momentum, key, flags.skip)
    return lookahead


def update_scale(shape: torch.Size) -> float:
    """Brings the update to the size of AdamW's (RMS 0.2), so that its learning rate and weight decay fit."""
    return 0.2 * max(shape[-2:]) ** 0.5


# Newton-Schulz orthogonalisation of matrices, also of matrices that several ranks shard.
#
# It needs the full matrix. Ranks that shard matrices split the work by matrix: of as many matrices as there are ranks,
# each rank gathers and orthogonalises one, and broadcasts the result. A stack of matrices (experts) that is sharded by
# whole matrices needs no communication.

STEPS = 5
# Coefficients of the quintic polynomial, steep at zero: singular values above 0.01 end between 0.68 and 1.13.
A = 3.4445
B = -4.7750
C = 2.0315


def orthogonalize(matrix: Tensor) -> Tensor:
    """The nearest orthonormal matrix, approximately, by five Newton-Schulz steps; of a stack, each matrix."""
    x = matrix.to(_work_dtype(matrix))
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:  # the Gram matrix of the short side is the smaller one
        x = x.mT
    norm = x.norm(dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        polynomial = B * gram + C * gram @ gram
        x = A * x + polynomial @ x
    return x.mT if is_tall else x


def _work_dtype(matrix: Tensor) -> torch.dtype:
    """bfloat16 on a GPU, where matmuls are fast and the result is approximate anyway; float32 on the CPU."""
    return torch.bfloat16 if matrix.is_cuda else torch.float32


def orthogonalize_all(matrices: list[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield the position of each matrix in the list and this rank's part of the orthogonalised matrix, in any order.

    A collective: ranks that shard matrices call it with the same list and iterate to the end.
    """
    sharded: list[int] = []
    for i, matrix in enumerate(matrices):
        if not _has_whole_matrices(matrix):
            sharded.append(i)
            continue
        local = local_tensor(matrix)
        yield i, orthogonalize(local) if local.numel() else local
    # Sorted by size, so that the ranks of one round have about equal work.
    sharded.sort(key=lambda i: (_ranks(matrices[i]), -matrices[i].numel(), i))
    for ranks, members in groupby(sharded, key=lambda i: _ranks(matrices[i])):
        own_index = ranks.index(dist.get_rank())
        positions = list(members)
        while positions:
            this_round = positions[: len(ranks)]
            yield from _one_matrix_per_rank(matrices, this_round, own_index)
            del positions[: len(ranks)]


def _has_whole_matrices(matrix: Tensor) -> bool:
    """Whether this rank holds whole matrices: an unsharded one, or some of a stack."""
    if not isinstance(matrix, DTensor):
        return True
    sharded_dims = [getattr(placement, "dim", -1) for placement in matrix.placements]
    return matrix.ndim > 2 and max(sharded_dims) < matrix.ndim - 2


def _ranks(matrix: Tensor) -> list[int]:
    """The ranks that shard or replicate a matrix."""
    assert isinstance(matrix, DTensor)
    return [int(rank) for rank in matrix.device_mesh.mesh.flatten()]


def _one_matrix_per_rank(
    matrices: list[Tensor], positions: list[int], own_index: int
) -> Iterator[tuple[int, Tensor]]:
    """The matrices of one round: the rank with index n of their mesh orthogonalises the n-th of them."""
    results: dict[int, Tensor] = {}  # of this rank: one, or none in the last round
    for owner, i in enumerate(positions):
        # Gathered in the dtype of the work: half of the traffic on a GPU.
        matrix = matrices[i].to(_work_dtype(matrices[i]))
        full = full_tensor(matrix)
        if owner == own_index:
            results[i] = orthogonalize(full).contiguous()
    for owner, i in enumerate(positions):
        matrix = matrices[i]
        assert isinstance(matrix, DTensor)
        dtype = _work_dtype(matrix)
        local = torch.empty_like(local_tensor(matrix), dtype=dtype)
        full = results[i] if i in results else local.new_empty(matrix.shape)
        _broadcast(full, owner, matrix.device_mesh)
        for offset, index in shard_offsets(matrix):
            shard = local[index]
            shard.copy_(full[shard_slices(offset, shard)])
        yield i, local


def _broadcast(tensor: Tensor, owner: int, mesh: DeviceMesh) -> None:
    """Broadcast from the rank with this index to all of a mesh: along its first dimension, then along the next."""
    coordinate = torch.unravel_index(torch.tensor(owner), mesh.shape)
    source = [int(index) for index in coordinate]
    own = list(mesh.get_coordinate() or ())
    for axis in range(mesh.ndim):
        # The ranks that differ from the source only along this axis and those before it.
        if own[axis + 1 :] == source[axis + 1 :]:
            group = mesh.get_group(axis)
            dist.broadcast(tensor, group=group, group_src=source[axis])


# AdamW by dtype of its states: torch's fused kernel for float32, this kit's own updates for low precision.
#
# A low-precision update is one Triton kernel on a GPU, without float32 copies of the states: 7.3 ms for a billion
# weights on an H200, where torch's fused AdamW in float32 takes 9.6 ms. Some 70 plain tensor operations do the same on
# the CPU and for parameters that are no contiguous range on this rank.


@dataclass(frozen=True)
class AdamWParam:
    """A parameter with its step count and its two states, or some rows of this rank's part of it."""

    param: Tensor
    step: Tensor
    exp_avg: StateTensor
    exp_avg_sq: StateTensor
    rows: slice | None = None  # None: all

    @property
    def weight(self) -> Tensor:
        return rows_of(self.param, self.rows)

    @property
    def grad(self) -> Tensor:
        assert self.param.grad is not None
        return rows_of(self.param.grad, self.rows)

    @property
    def offset(self) -> int | None:
        """The position of the first element in the full parameter, if these are one contiguous range of it."""
        first = flat_offset(self.param)
        if first is None or self.rows is None:
            return first
        return first + self.rows.start * prod(self.param.shape[1:])


def adamw_(params: list[AdamWParam], group: dict[str, Any], flags: DeviceFlags) -> None:
    """Update the parameters of a group in place, each by the way that fits its states and its layout."""
    float32: list[AdamWParam] = []
    for_kernel: list[AdamWParam] = []
    offsets: list[int] = []
    for item in params:
        if item.exp_avg.dtype is torch.float32:
            float32.append(item)
            continue
        offset = item.offset if local_tensor(item.param).is_cuda else None
        if offset is None:
            chunked_adamw_(item, group, flags)
        else:
            for_kernel.append(item)
            offsets.append(offset)
    if for_kernel:
        kernel_adamw_(for_kernel, offsets, group, flags)
    if float32:
        fused_adamw_(float32, group, flags)


def fused_adamw_(params: list[AdamWParam], group: dict[str, Any], flags: DeviceFlags) -> None:
    """torch's fused kernel, for float32 states."""
    beta1, beta2 = group["betas"]
    adamw(
        params=[item.weight for item in params],
        grads=[item.grad for item in params],
        exp_avgs=[item.exp_avg.stored for item in params],
        exp_avg_sqs=[item.exp_avg_sq.stored for item in params],
        max_exp_avg_sqs=[],
        state_steps=[item.step for item in params],
        fused=True,
        grad_scale=flags.grad_scale,
        found_inf=flags.found_inf,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def kernel_adamw_(
    params: list[AdamWParam], offsets: list[int], group: dict[str, Any], flags: DeviceFlags
) -> None:
    """The Triton kernel, for low-precision states of parameters that are one contiguous range on this rank.

    `offsets`: the position of that range in each full parameter.
    """
    from mvp_engine.kit.optim.adamw_kernel import StepScalars, launch_adamw  # needs Triton

    steps = [item.step for item in params]
    found_inf = torch.zeros_like(steps[0]) if flags.found_inf is None else flags.found_inf
    grad_scale = torch.ones_like(steps[0]) if flags.grad_scale is None else flags.grad_scale
    advance_steps_(steps, found_inf)

    # The scalars of all parameters at once: a few launches per group instead of ten per parameter.
    stacked_steps = torch.stack(steps)
    beta1, beta2 = group["betas"]
    corrections1 = (1 - beta1 ** stacked_steps.double()).float()
    corrections2_sqrt = (1 - beta2 ** stacked_steps.double()).sqrt().float()
    for i, item in enumerate(params):
        weight = item.weight
        if weight.numel() == 0:
            continue
        launch_adamw(
            weight,
            item.grad.contiguous(),
            item.exp_avg,
            item.exp_avg_sq,
            offsets[i],
            StepScalars(
                stacked_steps[i], corrections1[i], corrections2_sqrt[i], found_inf, grad_scale
            ),
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )


def chunked_adamw_(item: AdamWParam, group: dict[str, Any], flags: DeviceFlags) -> None:
    """Plain tensor operations on chunks, for low-precision states on any device and layout; of all rows."""
    lr = group["lr"]
    beta1, beta2 = group["betas"]
    skip = flags.skip
    advance_step_(item.step, skip)
    key = item.exp_avg.rounding_key(item.step)
    key_sq = item.exp_avg_sq.rounding_key(item.step)
    # In float64: of 1 - 0.999 ** 1, float32 would keep four digits.
    correction1 = 1 - beta1 ** item.step.double()
    correction2_sqrt = (1 - beta2 ** item.step.double()).sqrt()
    for chunk in chunks(item.param):
        weight = local_tensor(item.param)[chunk.index]
        grad = gradient_chunk(item.param, chunk, flags.grad_scale)
        exp_avg = item.exp_avg.read(chunk)
        exp_avg.add_((grad - exp_avg).mul_(1 - beta1))
        exp_avg_sq = item.exp_avg_sq.read(chunk)
        exp_avg_sq.mul_(beta2).add_(grad.square().mul_(1 - beta2))

        denominator = exp_avg_sq.sqrt().div_(correction2_sqrt).add_(group["eps"])
        update = (exp_avg / denominator).mul_(lr / correction1)
        apply_update_(weight, update, lr * group["weight_decay"], skip)
        item.exp_avg.write(chunk, exp_avg, key, skip)
        item.exp_avg_sq.write(chunk, exp_avg_sq, key_sq, skip)
