"""RouterReplay: the experts that tokens were routed to in generation, chosen again when the same tokens are trained.

Legend: T tokens of this rank, L layers with experts, K experts per token; -1: not known, the router chooses.

Sampler and trainer compute the logits of a router up to rounding. Where two experts are nearly equal, half precision
chooses another one in the trainer, and the probability of the token jumps. With the sampler's choice it does not (R3:
Ma et al., 2025, "Stabilizing MoE reinforcement learning by aligning training and inference routers").

A router chooses by one `topk` over its experts. While it runs, that call returns the given indices and the values at
them. So scores follow from the trainer's own logits, with gradients, by the router's own rule: a softmax before or
after the choice, a sigmoid, normed, scaled. Before the first use this is tested on each router with its own inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed.sequence_parallel import UlyssesShard
from mvp_engine.errors import UserError
from mvp_engine.hf.experts import moe_layers
from mvp_engine.hf.experts.expert_balance import routers_of, top_k
from mvp_engine.hf.model.input_hooks import BlockContext

if TYPE_CHECKING:
    from mvp_engine.hf.model.packed_model import PackedModel

LOGGER = logging.getLogger("mvp_engine")
FIELD = "experts"  # the token field with the choices, (T, L, K) int16


@dataclass
class Routes:
    """What routers need to know of one forward."""

    given: Tensor | None  # (T, L, K)
    recorded: dict[int, Tensor] | None  # by layer, (T, K) each; None: nothing is recorded


class _Choice(TorchFunctionMode):
    """A context in which the router's `topk` of K out of all experts chooses the given indices.

    `place`: the last such call is the choice, after those that score groups of experts; None: only count them.
    """

    def __init__(self, given_TK: Tensor, experts: int, place: int | None) -> None:
        super().__init__()
        self.given_TK = given_TK
        self.experts = experts
        self.place = place
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return found
        values = args[0] if args else kwargs["input"]
        index = found.indices
        if values.shape[-1] != self.experts or index.shape[-1] != self.given_TK.shape[-1]:
            return found
        self.calls += 1
        if self.calls != self.place:
            return found
        given = self.given_TK.view_as(index)
        index = torch.where(given < 0, index, given)
        return torch.return_types.topk((values.gather(-1, index), index))


class RouterReplay(BlockContext):
    current: Routes | None

    def __init__(self, model: nn.Module, model_type: str) -> None:
        super().__init__("router_replay")
        self.refused: str | None = None  # why this model's choices cannot be given
        self.recorded: Tensor | None = None  # (T, L, K) int16, of the last forward in `recording`
        self._is_recording = False
        self._places: dict[int, int] = {}  # of the call that chooses, by layer, once it is tested
        routers = routers_of(model, model_type)
        numbers = [re.search(r"\.(\d+)\.", name) for name in moe_layers.modules(model)]
        self._block_of_layer = [int(found[1]) for found in numbers if found]
        for layer, (router, experts) in enumerate(routers):
            router.forward = functools.partial(self._route, layer, router, experts, router.forward)
        self.add_to_blocks(model, {router for router, _ in routers})
        self.layers = len(routers)

    @classmethod
    def of(cls, model: PackedModel) -> RouterReplay | None:
        """For a model whose experts have routers; None for others."""
        if not moe_layers.modules(model) or model.padded_rows:
            return None
        try:
            return cls(model, str(model.hf.config.model_type))  # type: ignore[union-attr]
        except UserError as error:
            LOGGER.info("router replay is off: %s", error)
            return None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While forwards of generation run; each leaves its choices in `recorded`."""
        self._is_recording = self.refused is None
        self.recorded = None
        try:
            yield
        finally:
            self._is_recording = False

    @contextmanager
    def routing(self, batch: PackedBatch, shard: UlyssesShard | None) -> Iterator[None]:
        """While a packed batch runs, whose token field `experts` may have choices."""
        given = batch.token_fields.get(FIELD)
        if given is None and not self._is_recording:
            yield
            return
        if given is not None:
            given = self._of_layers(given)
            given = given if shard is None else shard.cut(given)
        routes = Routes(given, {} if self._is_recording else None)
        with self.running(routes):
            yield
        recorded = routes.recorded or {}
        if len(recorded) == self.layers:  # a pipeline stage has some of them
            index_TLK = torch.stack([recorded[layer] for layer in range(self.layers)], 1)
            if shard is not None:
                index_TLK = shard.gather(index_TLK.int())
            real = getattr(batch, "num_real_tokens", batch.num_tokens)
            self.recorded = index_TLK[:real].to(torch.int16)

    def _of_layers(self, given: Tensor) -> Tensor:
        """The choices of layers with experts; a server may send a row for every block."""
        if given.shape[1] == self.layers:
            return given
        if len(self._block_of_layer) < self.layers or given.shape[1] <= max(self._block_of_layer):
            raise UserError(
                f"the token field {FIELD} has {given.shape[1]} layers, and the model has {self.layers} with experts: "
                "the sampler has another model"
            )
        return given[:, self._block_of_layer]

    def _route(
        self,
        layer: int,
        router: nn.Module,
        experts: int,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self.current is None:
            return forward(*args, **kwargs)
        return self._routed(layer, router, experts, functools.partial(forward, *args, **kwargs))

    @torch.compiler.disable
    def _routed(self, layer: int, router: nn.Module, experts: int, run: Callable[[], Any]) -> Any:
        routes = self.current
        assert routes is not None
        if layer not in self._places and self.refused is None:
            with torch.no_grad():
                self._places[layer] = self._test(router, experts, run)
        if self.refused is not None:
            if routes.given is not None:
                raise UserError(
                    f"the token field {FIELD}: {self.refused}. Leave the field out of the batch"
                )
            routes.recorded = None
            return run()
        if routes.given is None:
            output = run()
        else:
            given_TK = routes.given[:, layer]
            if given_TK.shape[-1] != top_k(router):
                raise UserError(
                    f"the token field {FIELD} has {given_TK.shape[-1]} experts of each token, and the model uses "
                    f"{top_k(router)}: the sampler has another model"
                )
            with _Choice(given_TK.long(), experts, self._places[layer]):
                output = run()
        if routes.recorded is not None:
            index = output[2]
            routes.recorded[layer] = index.reshape(-1, index.shape[-1]).to(torch.int16)
        return output

    def _test(self, router: nn.Module, experts: int, run: Callable[[], Any]) -> int:
        """The call of `topk` that chooses. Sets `refused` unless its choice can be given, on the inputs of now."""
        own = run()
        place = 0
        if isinstance(own, tuple) and len(own) >= 3 and own[0].shape[-1] == experts:
            index_TK = own[2].reshape(-1, own[2].shape[-1]).long()
            with _Choice(index_TK, experts, None) as counted:
                run()
            place = counted.calls
            with _Choice(index_TK, experts, place):
                again = run()
            other_TK = index_TK.roll(1, 0)
            with _Choice(other_TK, experts, place):
                changed = run()
            # Scores of a router that masks experts before it chooses would be 0.
            has_scores = bool((changed[1].isfinite() & (changed[1] != 0)).all())
            is_same = torch.equal(again[1], own[1]) and torch.equal(again[2], own[2])
            is_changed = torch.equal(changed[2].reshape(other_TK.shape), other_TK)
            if place and is_same and is_changed and has_scores:
                return place
        self.refused = (
            f"{type(router).__name__} does not choose by one topk of its experts, so the sampler's choice cannot be "
            "given to it"
        )
        LOGGER.warning("router replay is off: %s", self.refused)
        return place


def add_routes(batches: list[PackedBatch], routes: Sequence[Tensor | None]) -> list[PackedBatch]:
    """The batches with the token field, if some of `routes` are known: (T, L, K), of the first tokens or of all."""
    known = next((one for one in routes if one is not None), None)
    if known is None:
        return batches
    added = []
    for batch, of_batch in zip(batches, routes, strict=True):
        field = known.new_full((batch.num_tokens, *known.shape[1:]), -1)
        if of_batch is not None:
            rows = min(len(of_batch), batch.num_tokens)
            field[:rows] = of_batch[:rows]
        fields = {**batch.token_fields, FIELD: field}
        added.append(dataclasses.replace(batch, token_fields=fields))
    return added


def without_routes(batch: PackedBatch) -> PackedBatch:
    """The batch for another model than the policy: its routers choose for themselves."""
    fields = {name: value for name, value in batch.token_fields.items() if name != FIELD}
    return dataclasses.replace(batch, token_fields=fields)
