"""ExpertBalance: keeps the experts of a model about equally busy, exactly, and measures how busy they are.

Legend: T tokens of this rank, L layers with experts, E experts, K experts per token.

Switch's loss is a product of two means over a batch: the share of tokens that an expert gets, and its mean probability.
Its value depends on how the batch is cut into micro-batches and ranks. Here the shares are those of the *last step*,
counted over all ranks: constants of this step. So the loss is a sum over tokens, which neither micro-batches nor ranks
nor the order of tokens change. The selection bias (aux-free balancing) is updated from the same counts.

The gradient of a loss is added where the router returns its scores, so `forward_step` and its loss stay as they are.
Only real tokens count, once: not those of dummies and evaluations, and not those of the forward that activation
checkpointing repeats. That forward finds the state of its own micro-batch by `block_context.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.config.schema import Experts
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed.sequence_parallel import UlyssesShard
from mvp_engine.errors import UserError
from mvp_engine.hf.experts import moe_layers as local_experts
from mvp_engine.hf.model.input_hooks import BlockContext

_BIAS = "e_score_correction_bias"  # of routers that choose experts by score + bias


@dataclass
class Routing:
    """What routers need to know of one forward."""

    is_real: Tensor | None  # of each token of this rank; None: every token is
    scale: Tensor | None  # of the loss, in fp16
    counted: set[int] = field(default_factory=set)  # layers


class ExpertBalance(BlockContext):
    current: Routing | None

    def __init__(
        self, model: nn.Module, model_type: str, settings: Experts, device: torch.device
    ) -> None:
        super().__init__("expert_routing")
        self.settings = settings
        self.is_active = False  # a training forward runs, on data that counts
        self.loss_scale: Tensor | None = None
        self.routers = routers_of(model, model_type)
        self.sizes = [size for _, size in self.routers]
        shape = (len(self.sizes), max(self.sizes))
        self.counts_LE = torch.zeros(shape, dtype=torch.float64, device=device)  # of this rank
        self.last_LE = torch.zeros_like(self.counts_LE)  # of all ranks, in the step before
        self.last_weight = torch.zeros((), dtype=torch.float64, device=device)
        # Made once: a copy from the host in every step would be a host sync.
        self._sizes_L = self.last_LE.new_tensor(self.sizes)
        self._top_k_L = self.last_LE.new_tensor([top_k(router) for router, _ in self.routers])
        self._coefficients()
        if settings.balance == "bias":
            for router, _ in self.routers:
                if not isinstance(getattr(router, _BIAS, None), Tensor):
                    raise UserError(
                        f"experts.bias_update_rate: the routers of {model_type} choose by their scores alone, without "
                        f"a bias ({_BIAS}) that could balance them. Set experts.aux_loss_coef=0.01 instead"
                    )
        for layer, (router, _) in enumerate(self.routers):
            router.register_forward_hook(functools.partial(self._after_router, layer))
        self.add_to_blocks(model, {router for router, _ in self.routers})

    # ---- A forward ------------------------------------------------------------------------------------------------

    @contextmanager
    def routing(self, batch: PackedBatch, shard: UlyssesShard | None) -> Iterator[None]:
        """While a packed batch runs."""
        if not self.is_active or not torch.is_grad_enabled():
            yield
            return
        real = getattr(batch, "num_real_tokens", batch.num_tokens)
        is_real_T = None
        if real < batch.num_tokens:
            is_real_T = torch.arange(batch.num_tokens, device=batch.input_ids.device) < real
            is_real_T = is_real_T if shard is None else shard.cut(is_real_T)
        with self.running(Routing(is_real_T, self.loss_scale)):
            yield

    @torch.compiler.disable
    def _after_router(self, layer: int, router: nn.Module, args: Any, output: Any) -> Any:
        logits, scores, index, *rest = self._checked(layer, router, output)
        routing = self.current
        if routing is None:
            return None
        index_TK = index.reshape(-1, index.shape[-1])
        if layer not in routing.counted:
            routing.counted.add(layer)
            self._count(layer, index_TK, routing.is_real)
        if logits.requires_grad:
            of_layer = (self.coefficients_LE[layer, : self.sizes[layer]], self.z_L[layer])
            scores = _RouterLoss.apply(scores, logits, *of_layer, routing.is_real, routing.scale)
        return logits, scores, index, *rest

    def _checked(self, layer: int, router: nn.Module, output: Any) -> Any:
        is_triple = isinstance(output, tuple) and len(output) >= 3
        if not is_triple or output[0].shape[-1] != self.sizes[layer]:
            raise UserError(
                f"experts: {type(router).__name__} does not return logits, scores and indices, so its experts cannot "
                "be balanced. Leave out the section experts"
            )
        return output

    def _count(self, layer: int, index_TK: Tensor, is_real_T: Tensor | None) -> None:
        size = self.sizes[layer]
        if is_real_T is not None:
            index_TK = index_TK.masked_fill(~is_real_T[:, None], size)  # not counted
        self.counts_LE[layer, :size] += local_experts.counts(index_TK.reshape(-1), size)

    # ---- A step ---------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        self.counts_LE.zero_()

    def update(self, counts: Tensor, weight: Tensor, skip: Tensor) -> dict[str, Tensor]:
        """Take over the counts and the loss weight of a step, those of all ranks, unless it was skipped.

        Returns metrics: the load of the busiest expert over the mean, on average over layers, and of the worst layer.
        """
        counts_LE = counts.view_as(self.last_LE)
        keep = skip | (counts_LE.sum() == 0)
        self.last_LE = torch.where(keep, self.last_LE, counts_LE)
        self.last_weight = torch.where(keep, self.last_weight, weight)
        self._coefficients()
        mean_L = counts_LE.sum(1) / self._sizes_L
        rate = self.settings.bias_update_rate
        if rate is not None:
            for layer, (router, size) in enumerate(self.routers):
                bias: Any = getattr(router, _BIAS)
                if bias.is_meta:  # another pipeline stage holds it
                    continue
                step_E = rate * (mean_L[layer] - counts_LE[layer, :size]).sign()
                bias += torch.where(keep, 0.0, step_E).to(bias.dtype)
        load_L = counts_LE.amax(1) / mean_L
        return {"expert_load": load_L.mean(), "expert_load_max": load_L.max()}

    def _coefficients(self) -> None:
        """The constants of the losses of a step, from the counts of the last one.

        The engine divides all gradients by the loss weight of the step. A loss that is a mean over tokens has to be
        multiplied by weight / tokens, for which the last step's ratio stands.
        """
        total_L = self.last_LE.sum(1)
        seen_L = total_L > 0
        ratio_L = torch.where(seen_L, self.last_weight * self._top_k_L / total_L, 1.0)
        factor_L = torch.where(seen_L, self._sizes_L * ratio_L / total_L, 0.0)
        weight = self.settings.aux_loss_coef or 0.0
        self.coefficients_LE = (weight * factor_L[:, None] * self.last_LE).float()
        self.z_L = (self.settings.router_z_loss_coef * ratio_L).float()

    # ---- State ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {"counts": self.last_LE.tolist(), "weight": float(self.last_weight)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.last_LE = self.last_LE.new_tensor(state["counts"])
        self.last_weight = self.last_weight.new_tensor(state["weight"])
        self._coefficients()


def routers_of(model: nn.Module, model_type: str) -> list[tuple[nn.Module, int]]:
    """The router of each layer with experts, and its number of experts."""
    found = []
    for name, experts in local_experts.modules(model).items():
        around = dict(model.get_submodule(name.rpartition(".")[0]).named_children())
        routers = [around[key] for key in local_experts.ROUTERS if key in around]
        if len(routers) != 1:
            raise UserError(
                f"experts: no router next to {name} of {model_type}, so its experts cannot be balanced. "
                "Leave out the section experts"
            )
        found.append((routers[0], local_experts.num_experts(experts)))
    if not found:
        raise UserError(
            f"experts: {model_type} has no experts to balance. Leave out the section experts"
        )
    return found


def top_k(router: nn.Module) -> int:
    """The number of experts per token; routers without it route to one."""
    return int(getattr(router, "top_k", 1))


class _RouterLoss(torch.autograd.Function):
    """The identity on scores; its backward adds the gradients of the balance loss and of the z-loss to the logits.

    Balance: sum over tokens and experts of coefficient x probability. z: sum of the squared log-sum-exp of the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        logits: Tensor,
        coefficients_E: Tensor,
        z: Tensor,
        is_real_T: Tensor | None,
        scale: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(logits, coefficients_E, z, is_real_T, scale)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, coefficients_E, z, is_real_T, scale = ctx.saved_tensors
        logits_TE = logits.float().reshape(-1, logits.shape[-1])
        prob_TE = logits_TE.softmax(-1)
        mean_T1 = (prob_TE * coefficients_E).sum(-1, keepdim=True)
        of_z_T1 = 2.0 * z * logits_TE.logsumexp(-1, keepdim=True)
        own_TE = prob_TE * (coefficients_E - mean_T1 + of_z_T1)
        if is_real_T is not None:
            own_TE = own_TE * is_real_T[:, None]
        if scale is not None:
            own_TE = own_TE * scale
        return grad, own_TE.view_as(logits).to(logits.dtype), None, None, None, None
