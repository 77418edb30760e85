"""The search for the rows of a step with a non-finite loss or gradient: each micro-batch alone, then halves of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.data import rng_state, set_rng_state
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.engine import Engine, StepContext
from mvp_engine.errors import UserError
from mvp_engine.kit.row_checks import row_groups, row_name, select_rows
from mvp_engine.model_engine.fsdp.grad_norm import first_nonfinite_grad, local_grad_norm_sq

NUM_TRIED = 5  # rows of a micro-batch; if all of them are non-finite, the weights are to blame,
BLAMED_SHARE = 0.25  # or if this share of the rows of a step is, and
BLAMED_ROWS = 3  # at least so many
MAX_ROWS = 20  # rows that are searched for


@dataclass(frozen=True)
class Outcome:
    """Forward and backward on some rows."""

    loss: float | None
    weight: float | None
    parameter: str | None  # the first, in backward order, with a non-finite gradient
    module: str | None  # the first with a non-finite output
    error: str | None

    @property
    def is_bad(self) -> bool:
        numbers = (self.loss, self.weight)
        is_finite = all(number is None or math.isfinite(number) for number in numbers)
        return not is_finite or self.parameter is not None or self.error is not None


class StepSearch:
    """Finds the rows of one step. All ranks search together; in each trial one data-parallel rank has rows."""

    def __init__(self, engine: Engine, ctx: StepContext) -> None:
        self.engine = engine
        self.ctx = ctx
        self.world = engine.world
        self.rng = rng_state()
        self.rows: list[dict[str, Any]] = []
        self.num_rows = 0
        self.num_found = 0  # rows that are non-finite alone
        self.weights_blamed = False

    def run(self) -> dict[str, Any]:
        counts = self.world.all_gather(len(self.ctx.micro_batches))
        layout = self.engine.layout
        owners = dict(zip(self.world.all_gather(layout.data_rank), counts, strict=True))
        losses = []
        for owner, count in sorted(owners.items()):
            for index in range(count):
                micro_batch = self.ctx.micro_batches[index] if layout.data_rank == owner else None
                groups = row_groups(micro_batch) if micro_batch is not None else []
                groups = self._gather(owner, groups)[0]
                self.num_rows += len(groups)
                outcome = self.trial(owner, micro_batch)
                losses.append({"rank": owner, "micro_batch": index + 1, "loss": outcome.loss})
                if outcome.is_bad and self.num_found < MAX_ROWS and not self.weights_blamed:
                    self._search(owner, index, micro_batch, groups, outcome)
        most = self.num_found >= max(BLAMED_ROWS, BLAMED_SHARE * self.num_rows)
        has_error = any(entry["error"] for entry in self.rows)
        return {
            "micro_batches": losses,
            "rows": self.rows,
            "weights_blamed": (self.weights_blamed or most) and not has_error,
            "largest_weight": self._largest_weight(),
            "lr": self.engine.model_engine.optimizer.param_groups[0]["lr"],
        }

    def _search(
        self, owner: int, index: int, micro_batch: Any, groups: list[list[int]], whole: Outcome
    ) -> None:
        chosen = groups[:: max(1, len(groups) // NUM_TRIED)][:NUM_TRIED]
        tried = [self.trial(owner, self._select(micro_batch, [group])) for group in chosen]
        if len(chosen) >= NUM_TRIED and all(outcome.is_bad for outcome in tried):
            self.weights_blamed = True
            found = [([chosen[0]], tried[0])]
        elif groups:
            found = self._bisect(owner, micro_batch, groups)
        else:
            found = []
        for rows, outcome in found or [(groups, whole)]:
            entry = {"step": self.ctx.step, "rank": owner, "micro_batch": index + 1}
            entry["rows"] = self._names(owner, index, micro_batch, rows)
            self.rows.append({**entry, **vars(outcome)})

    def _bisect(
        self, owner: int, micro_batch: Any, groups: list[list[int]]
    ) -> list[tuple[list[list[int]], Outcome]]:
        """The smallest sets of rows that are non-finite; usually single rows."""
        if self.num_found >= MAX_ROWS:
            return []
        outcome = self.trial(owner, self._select(micro_batch, groups))
        if not outcome.is_bad:
            return []
        if len(groups) == 1:
            self.num_found += 1
            return [(groups, outcome)]
        middle = len(groups) // 2
        found = self._bisect(owner, micro_batch, groups[:middle])
        found += self._bisect(owner, micro_batch, groups[middle:])
        return found or [(groups, outcome)]  # only together

    def trial(self, owner: int, micro_batch: Any) -> Outcome:
        """Forward and backward of one micro-batch on rank `owner`; the others compute nothing of their own."""
        model_engine: Any = self.engine.model_engine
        set_rng_state(self.rng)
        model_engine.optimizer_zero_grad()
        mine = [micro_batch] if micro_batch is not None else []
        forward = partial(self.engine._forward_step, self.ctx)
        error: str | None = None
        totals: list[float] = []
        with watch_outputs(model_engine.model) as nonfinite:
            try:
                totals = model_engine.forward_backward_batch(mine, forward).tolist()
            except UserError:
                raise
            except Exception as failure:
                if "CUDA error" in str(failure):
                    raise UserError(
                        f"the GPU cannot compute after this: {str(failure).splitlines()[0]}. Replay on the CPU: add "
                        "device=cpu"
                    ) from failure
                if self.world.size > 1:  # the other ranks wait in a collective
                    failure.add_note("mvp replay RUN --nproc 1 finds the row of such an error")
                    raise
                error = f"{type(failure).__name__}: {failure}"
        params = [param for param in model_engine.params if param.grad is not None]
        _, norms = local_grad_norm_sq(params, self.world.size)
        parameter = first_nonfinite_grad(model_engine.model, norms)
        loss, weight = totals or (None, None)
        module = nonfinite[0] if nonfinite else None
        found = self.world.all_gather(Outcome(loss, weight, parameter, module, error))
        parameters = [one.parameter for one in found if one.parameter]
        owned = found[self.world.all_gather(micro_batch is not None).index(True)]
        return Outcome(
            owned.loss,
            owned.weight,
            None if error else next(iter(parameters), None),
            owned.module,
            owned.error,
        )

    def _select(self, micro_batch: Any, groups: list[list[int]]) -> Any:
        if micro_batch is None:
            return None
        return select_rows(micro_batch, [row for group in groups for row in group])

    def _gather(self, owner: int, value: Any) -> list[Any]:
        """The values of the ranks that hold the owner's rows."""
        pairs = self.world.all_gather((self.engine.layout.data_rank, value))
        return [one for rank, one in pairs if rank == owner]

    def _names(self, owner: int, index: int, micro_batch: Any, groups: list[list[int]]) -> Any:
        names = []
        if micro_batch is not None:
            feed = self.engine.feed
            number = feed.used - len(self.ctx.micro_batches) + index
            for group in groups:
                names.append(row_name(feed.loader, number, group[0], micro_batch))
        return self._gather(owner, names)[0]

    def _largest_weight(self) -> dict[str, Any]:
        """The parameter with the largest value; a non-finite one is the largest."""
        best: dict[str, Any] = {"parameter": None, "value": -1.0}
        for name, param in self.engine.model.named_parameters():
            value = float(full_tensor(param.detach()).abs().max()) if param.numel() else 0.0
            if not math.isfinite(value):
                return {"parameter": name, "value": value}
            if value > best["value"]:
                best = {"parameter": name, "value": value}
        return best


@contextmanager
def watch_outputs(model: nn.Module) -> Iterator[list[str]]:
    """A context that lists the modules without children that have a non-finite output, in the order of the forward."""
    found: list[str] = []

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        values = output if isinstance(output, tuple | list) else [output]
        for value in values:
            is_float = isinstance(value, Tensor) and value.is_floating_point()
            if is_float and not bool(torch.isfinite(value).all()):
                found.append(name)

    handles = []
    for name, module in model.named_modules():
        if not any(module.children()):
            handles.append(module.register_forward_hook(partial(look, name)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
