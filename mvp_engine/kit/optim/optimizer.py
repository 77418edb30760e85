"""One optimizer for all parameters: AdamW or Muon by group, moments in few bits, an average of the weights beside them.

All that it keeps is state of its parameters, laid out like them. On a GPU the engine says by numbers on the device what
gradients are to be divided by (`grad_scale`) and whether a step is not to count (`found_inf`): such a step leaves
everything as it was, without the host having to know.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from mvp_engine.checkpoint.state import EMA
from mvp_engine.distributed.dtensor import empty_sharded_like, local_tensor
from mvp_engine.errors import UserError
from mvp_engine.kit.optim import muon
from mvp_engine.kit.optim.moments import (
    CODES,
    SCALES,
    Moment,
    Part,
    blocks_are_whole,
    flat_begin,
    key_of,
    parts,
    salt_of,
)

LOGGER = logging.getLogger("mvp_engine")
_KEYS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum",)}


class KitOptimizer(Optimizer):
    """`names` gives each parameter its name, which its noise depends on; groups have a `kind`, adamw or muon."""

    _step_supports_amp_scaling = (
        True  # so the engine leaves both to us, as to torch's fused optimizers
    )
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
        moments: str = "float32",
        ema: float | None = None,
        seed: int = 0,
    ) -> None:
        self.names, self.moments, self.ema, self.seed = names, moments, ema, seed
        self._swapped = False
        # "fused": the step counts are on the device, for those who move an optimizer.
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "momentum": momentum,
            "kind": "adamw",
            "fused": True,
        }
        super().__init__(groups, defaults)
        for group in self.param_groups:
            for param in group["params"]:
                self._moments_of(param, group, {})  # which refuses what cannot be

    # ---- A step ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self._swapped:
            raise RuntimeError(
                "the averaged weights are in place: no step before they are out again"
            )
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                self._begin(param, group)
            if group["kind"] == "muon":
                self._muon(params, group)
            elif params:
                self._adamw(params, group)
            for param in params if self.ema is not None else ():
                self._average(param)

    def _begin(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=local_tensor(param).device)
            for moment in self._moments_of(param, group):
                moment.create()
        if self.ema is not None and EMA not in state:
            state[EMA] = param.detach().to(torch.float32, copy=True)

    def _moments_of(
        self, param: Tensor, group: dict[str, Any], state: dict[str, Any] | None = None
    ) -> list[Moment]:
        state = self.state[param] if state is None else state
        return [
            Moment(param, state, key, key != "exp_avg_sq", self.moments, self.names[param])
            for key in _KEYS[group["kind"]]
        ]

    def _adamw(self, params: list[Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        if self.moments != "float32":
            few = [
                p
                for p in params
                if not all(m.dtype is torch.float32 for m in self._moments_of(p, group))
            ]
            begins = {
                p: begin
                for p in few
                if local_tensor(p).is_cuda and (begin := flat_begin(p)) is not None
            }
            self._adamw_by_kernel(begins, group)
            for param in few:
                if param not in begins:
                    self._adamw_in_few_bits(param, group)
            done = set(few)
            params = [param for param in params if param not in done]
        states = [self.state[param] for param in params]
        adamw(
            [local_tensor(param) for param in params],
            [local_tensor(param.grad) for param in params if param.grad is not None],
            [local_tensor(state["exp_avg"]) for state in states],
            [local_tensor(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _adamw_by_kernel(self, begins: dict[Tensor, int], group: dict[str, Any]) -> None:
        """Of parameters whose part here is one piece, each with the place in the whole where it begins."""
        if not begins:
            return
        from mvp_engine.kit.optim.kernels import adamw_

        steps = [self.state[param]["step"] for param in begins]
        bad = torch.zeros_like(steps[0]) if self.found_inf is None else self.found_inf
        scale = torch.ones_like(steps[0]) if self.grad_scale is None else self.grad_scale
        torch._foreach_add_(steps, (bad <= 0).float())
        now = torch.stack(steps)
        powers = [1 - beta ** now.double() for beta in group["betas"]]
        corrections = (powers[0].float(), powers[1].sqrt().float())
        how = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
        for i, (param, begin) in enumerate(begins.items()):
            if local_tensor(param).numel() == 0:
                continue
            assert param.grad is not None
            both, state = self._moments_of(param, group), self.state[param]
            kept = [local_tensor(state[m.key + CODES if m.is_coded else m.key]) for m in both]
            scales = (
                [local_tensor(state[m.key + SCALES]) for m in both] if both[0].is_coded else None
            )
            salts = [salt_of(self.seed, self.names[param], m.key) for m in both]
            numbers = [now[i], *(by[i] for by in corrections)]
            adamw_(
                local_tensor(param),
                local_tensor(param.grad).contiguous(),
                kept,
                scales,
                salts,
                begin,
                numbers,
                bad,
                scale,
                **how,
            )

    def _adamw_in_few_bits(self, param: Tensor, group: dict[str, Any]) -> None:
        (beta1, beta2), lr = group["betas"], group["lr"]
        bad, step = self._count(param)
        first, second = self._moments_of(param, group)
        keys = [self._key(param, moment.key) for moment in (first, second)]
        by_first, by_second = 1 - beta1 ** step.double(), (1 - beta2 ** step.double()).sqrt()
        for part in parts(param):
            weight, grad = self._weight_and_grad(param, part)
            m, v = first.read(part), second.read(part)
            m.add_((grad - m).mul_(1 - beta1))
            v.mul_(beta2).add_(grad.square().mul_(1 - beta2))
            change = m / v.sqrt().div_(by_second).add_(group["eps"])
            _move(weight, change.mul_(lr / by_first), lr * group["weight_decay"], bad)
            first.write(part, m, keys[0], bad)
            second.write(part, v, keys[1], bad)

    def _muon(self, params: list[Tensor], group: dict[str, Any]) -> None:
        mu, momenta, bads = group["momentum"], [], []
        for param in params:
            bad, _ = self._count(param)
            (moment,) = self._moments_of(param, group)
            ahead = torch.empty_like(param, dtype=torch.float32)
            for part in parts(param):
                _, grad = self._weight_and_grad(param, part)
                value = moment.read(part).mul_(mu).add_(grad)
                local_tensor(ahead)[part.index] = (
                    grad + mu * value
                )  # where the momentum will be after the next step
                moment.write(part, value, self._key(param, moment.key), bad)
            momenta.append(ahead)
            bads.append(bad)
        for i, direction in muon.directions(momenta):
            change = direction.float() * (group["lr"] * muon.scale(params[i].shape))
            _move(local_tensor(params[i]), change, group["lr"] * group["weight_decay"], bads[i])

    def _count(self, param: Tensor) -> tuple[Tensor | None, Tensor]:
        """Is the step bad, and which one is it? It counts if it is good."""
        step = self.state[param]["step"]
        if self.found_inf is None:
            return None, step.add_(1)
        bad = self.found_inf > 0
        return bad, step.add_((~bad).float())

    def _key(self, param: Tensor, moment: str) -> Tensor:
        return key_of(self.seed, self.names[param], moment, self.state[param]["step"])

    def _weight_and_grad(self, param: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        assert param.grad is not None
        grad = local_tensor(param.grad)[part.index].float()
        return local_tensor(param)[
            part.index
        ], grad if self.grad_scale is None else grad / self.grad_scale

    # ---- The average ----------------------------------------------------------------------------------------------

    def _average(self, param: Tensor) -> None:
        """The average of what a parameter was after each of its updates; young ones weigh more at the beginning."""
        assert self.ema is not None
        state = self.state[param]
        step, mean = state["step"], local_tensor(state[EMA])
        share = 1 - ((1 + step) / (10 + step)).clamp(max=self.ema)
        if self.found_inf is not None:
            share = share * (1 - self.found_inf)
        mean.add_((local_tensor(param) - mean).mul_(share))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The averages are the weights for the time of this context, for an evaluation or an export."""
        if self.ema is None:
            raise UserError("no average of the weights is kept: set optim.ema, such as 0.999")
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for param, state in self.state.items():
            if EMA in state:
                here, mean = local_tensor(param), local_tensor(state[EMA])
                before = here.clone()
                here.copy_(mean)
                mean.copy_(before)
        self._swapped = not self._swapped

    # ---- State ----------------------------------------------------------------------------------------------------

    def empty_state(self, param: Tensor, key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Where a tensor of a checkpoint is to be read into."""
        if shape == param.shape:
            return torch.empty_like(param.detach(), dtype=dtype)
        if key.endswith(SCALES) and blocks_are_whole(param):
            return empty_sharded_like(param, shape, dtype)
        return torch.empty(shape, dtype=dtype)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Moments that were kept in another form are converted; those of another kind of optimizer begin anew."""
        saved = state_dict["state"]
        super().load_state_dict({**state_dict, "state": {}})
        fresh = []
        order = [(param, group) for group in self.param_groups for param in group["params"]]
        for i, (param, group) in enumerate(order):
            if i in saved and not self._take(param, group, saved[i]):
                fresh.append(self.names[param])
        if fresh:
            LOGGER.warning(
                "moments of %d parameters begin anew, such as of %s", len(fresh), fresh[0]
            )

    @torch.no_grad()
    def _take(self, param: Tensor, group: dict[str, Any], saved: dict[str, Any]) -> bool:
        state, device = self.state[param], local_tensor(param).device
        if self.ema is not None and EMA in saved:
            state[EMA] = saved[EMA].to(device)
        if "step" not in saved:
            return False
        step = saved["step"].to(device, torch.float32)
        fresh: dict[str, Any] = {"step": step}
        for moment in self._moments_of(param, group, fresh):
            if not moment.take(saved, key_of(self.seed, self.names[param], moment.key, step)):
                return False
        state.update(fresh)
        return True


def _move(weight: Tensor, change: Tensor, decay: float, bad: Tensor | None) -> None:
    if bad is None:
        weight.mul_(1 - decay).sub_(change)
    else:
        weight.copy_(torch.where(bad, weight, weight * (1 - decay) - change))
