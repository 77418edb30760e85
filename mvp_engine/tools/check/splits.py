"""The same rows in two splits into micro-batches: loss, weight and gradients must not depend on the split.

A loss that does is trained on other numbers with every change of the number of ranks or of the micro-batch size, in
silence. Randomness is no such dependence: the first split runs twice, and if the two results differ, again without
dropout. If the loss is random even so, some more runs measure how far it varies.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mvp_engine.data import derived_seed, rng_state, seed_everything, set_rng_state
from mvp_engine.engine import StepContext
from mvp_engine.errors import count
from mvp_engine.kit.row_checks import Parts, merge_pairs, split_each
from mvp_engine.model_engine.fsdp.step_status import local_grad
from mvp_engine.tools.check.record import CheckRecord

if TYPE_CHECKING:
    from mvp_engine.tools.check.engine import CheckedEngine

PAGE = "docs/whole_step_loss.md"
MAX_MICRO_BATCHES = 4  # of each rank
ENTRIES = 2**14  # of each gradient that are compared
# The largest differences that rounding explains, relative to gradient and loss: fp32, half precision.
GRAD_BOUNDS = {True: 5e-3, False: 0.1}
LOSS_BOUNDS = {True: 1e-3, False: 2e-2}
RANDOM_RUNS = 6  # of one split, to learn how far a random loss varies
NOISE_FACTOR = 3  # another split may be this factor further away


@dataclass(frozen=True)
class SplitResult:
    """One forward and backward of all rows, in one split. All but `parts` are of all ranks."""

    num_micro_batches: int
    loss: float  # mean
    weight: float
    scale: float  # the mean of absolute losses of micro-batches: losses of both signs may cancel
    grads: dict[str, Tensor]  # some entries of this rank's shards, of the mean loss
    parts: list[tuple[float, float]]  # loss sum and weight of this rank's micro-batches


@dataclass(frozen=True)
class Difference:
    loss: float = 0.0
    weight: float = 0.0
    grad: float = 0.0
    scale: float = 0.0

    def exceeds(self, exact: bool, noise: Difference) -> bool:
        """Is it more than rounding and `noise`, the difference between two runs of the same split, explain?"""
        bound = LOSS_BOUNDS[exact]
        loss_bound = max(bound * self.scale, 0.1 * bound) + NOISE_FACTOR * noise.loss
        grad_bound = GRAD_BOUNDS[exact] + NOISE_FACTOR * noise.grad
        is_other_weight = self.has_other_weight and self.weight > NOISE_FACTOR * noise.weight
        return self.loss > loss_bound or self.grad > grad_bound or is_other_weight

    @property
    def has_other_weight(self) -> bool:
        return self.weight > 1e-5

    @property
    def grad_text(self) -> str:
        return f"{100 * self.grad:.2g} %" if self.grad > 1e-3 else "less than 0.1 %"


NO_NOISE = Difference()


def split_stage(record: CheckRecord, engine: CheckedEngine) -> None:
    """Does the loss depend on how the rows of a step are split into micro-batches?"""
    record.begin_stage("split")
    micro_batches = engine.first_micro_batches or []
    exact = engine.model_engine.settings.precision == "fp32"
    outside = rng_state()
    if norms := batch_norms(engine.model):
        kind = f"{type(norms[0]).__name__} module"
        record.warning(
            f"{count(len(norms), kind)} with statistics of one micro-batch of one rank: "
            f"results depend on data.micro_batch_size and the number of ranks. See {PAGE}"
        )
    with _without_batch_norm_statistics(engine.model):
        other = _other_split(engine, micro_batches)
        if not any(engine.world.any(other is not None)):
            kinds = {type(micro_batch).__name__ for micro_batch in micro_batches}
            record.end_stage(
                f"not compared: no micro-batch of the first step ({', '.join(sorted(kinds))}) can be split into rows "
                "or merged with another one; define split_micro_batch (docs/check.md)"
            )
            return
        first, noise = _run_repeatedly(engine, micro_batches, 2)
        if noise.exceeds(exact, NO_NOISE):
            engine.model.eval()  # dropout and the like
            first, noise = _run_repeatedly(engine, micro_batches, 2)
        if noise.exceeds(exact, NO_NOISE):  # two losses may be close by chance
            first, noise = _run_repeatedly(engine, micro_batches, RANDOM_RUNS)
        second = _run(engine, other if other is not None else micro_batches, seed=RANDOM_RUNS)
    set_rng_state(outside)
    results = [first, second]
    if not all(result.weight > 0 and math.isfinite(result.loss) for result in results):
        record.end_stage(
            f"not compared: the loss is {first.loss} and {second.loss} in the two splits"
        )
        return
    is_random = noise.exceeds(exact, NO_NOISE)
    difference = _difference(engine, first, second)
    exceeds = difference.exceeds(exact, noise if is_random else NO_NOISE)
    record.facts.split = {
        "micro_batches": [result.num_micro_batches for result in results],
        "loss": [result.loss for result in results],
        "weight": [result.weight for result in results],
        "grad_difference": difference.grad,
        "random": is_random,
    }
    if exceeds:
        record.problem(explain(first, second, difference))
    text = (
        f"the same rows in {first.num_micro_batches} and {second.num_micro_batches} micro-batches: "
        f"loss {first.loss:.5g} and {second.loss:.5g}, gradients differ by {difference.grad_text}"
    )
    record.end_stage(f"{text}; the loss is random" if is_random else text, ok=not exceeds)


def explain(first: SplitResult, second: SplitResult, difference: Difference) -> str:
    """The problem, its likely cause and the fix, for a difference that exceeds its bounds."""
    # Would the sums of both splits agree, if the losses of micro-batches were means of their terms?
    sums = [sum(loss * weight for loss, weight in result.parts) for result in (first, second)]
    if difference.has_other_weight:
        cause = (
            f"The weight of these rows is {first.weight:g} and {second.weight:g}: this is a mean of means. "
            'forward_step must return the sum of its losses (reduction="sum") and the number of its terms'
        )
    elif math.isclose(*sums, rel_tol=1e-2):
        cause = (
            "forward_step returns the mean of its micro-batch with the number of its terms as the weight: return the "
            'sum (reduction="sum")'
        )
    else:
        cause = (
            "Rows are compared with other rows of their micro-batch only (in-batch negatives, statistics of a batch), "
            "or the loss is divided inside of forward_step: it needs the whole step"
        )
    return (
        f"the loss depends on how rows are split into micro-batches: it is {first.loss:.5g} and {second.loss:.5g} for "
        f"the same rows in {first.num_micro_batches} and in {second.num_micro_batches} micro-batches, and the "
        f"gradients differ by {difference.grad_text}. {cause}. See {PAGE}"
    )


def _run_repeatedly(
    engine: CheckedEngine, micro_batches: list[Any], times: int
) -> tuple[SplitResult, Difference]:
    """The first result, and the largest differences of runs with other seeds from it."""
    first = _run(engine, micro_batches, seed=0)
    others = [_run(engine, micro_batches, seed) for seed in range(1, times)]
    differences = [astuple(_difference(engine, first, other)) for other in others]
    return first, Difference(*map(max, zip(*differences, strict=True)))


def _run(engine: CheckedEngine, micro_batches: list[Any], seed: int) -> SplitResult:
    seed_everything(derived_seed(engine.config.seed, "split", seed, engine.layout.dropout_rank))
    copies = copy.deepcopy(micro_batches)  # hooks may change them
    ctx = StepContext(engine.step, engine.epoch, "train", engine._metric_store(), copies)
    engine.train_pre_step(ctx)
    model_engine = engine.model_engine
    model_engine.optimizer_zero_grad()
    forward = partial(engine._forward_step, ctx)
    totals = model_engine.forward_backward_batch(ctx.micro_batches, forward)
    parts = engine.take_losses()
    own = [*totals.tolist(), sum(abs(loss) for loss, _ in parts), len(parts)]
    loss_sum, weight, scale, num_parts = _sums(engine, own)
    # Evenly spaced entries: copies of all gradients would need the memory of another model.
    grads = {}
    for name, param in engine.model.named_parameters():
        if param.grad is not None:
            grad = local_grad(param).flatten()
            grads[name] = grad[:: max(1, grad.numel() // ENTRIES)].double() / weight
    model_engine.optimizer_zero_grad()
    divisor = weight if weight > 0 else math.nan
    same = engine.layout.model_parallel_size
    scale *= engine.layout.pipeline  # only the last stage has losses of micro-batches
    return SplitResult(
        int(num_parts) // same, loss_sum / divisor, weight / same, scale / divisor, grads, parts
    )


def _sums(engine: CheckedEngine, values: list[float]) -> list[float]:
    """Each value summed over the ranks."""
    return [sum(of_ranks) for of_ranks in zip(*engine.world.all_gather(values), strict=True)]


def _difference(engine: CheckedEngine, first: SplitResult, second: SplitResult) -> Difference:
    squares = [0.0, 0.0, 0.0]
    zero = torch.zeros(())
    for name in {*first.grads, *second.grads}:
        a = first.grads.get(name, zero)
        b = second.grads.get(name, zero)
        for place, value in enumerate((a - b, a, b)):
            squares[place] += float(value.square().sum())
    apart, norm, other_norm = _sums(engine, squares)
    largest = max(norm, other_norm)
    return Difference(
        loss=abs(first.loss - second.loss),
        weight=abs(first.weight - second.weight) / max(first.weight, second.weight, 1e-12),
        grad=math.sqrt(apart / largest) if largest else 0.0,
        scale=max(first.scale, second.scale),
    )


def _other_split(engine: CheckedEngine, micro_batches: list[Any]) -> Parts:
    """More micro-batches on this rank; where each has one row, fewer, if the memory is there."""
    parts = split_each(micro_batches, getattr(engine, "split_micro_batch", None))
    if parts is not None:
        return parts
    device = engine.device
    if device.type == "cuda" and 2 * engine.meter.peak() > torch.cuda.mem_get_info(device)[1]:
        return None
    return merge_pairs(micro_batches)


@contextmanager
def _without_batch_norm_statistics(model: nn.Module) -> Iterator[None]:
    """Batch norm depends on the micro-batch by design, and is reported on its own: here it uses running statistics."""
    modes = [(module, module.training) for module in model.modules()]
    for module in batch_norms(model):
        module.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Modules that normalize by statistics of the micro-batch in training."""
    batch_norm = nn.modules.batchnorm._BatchNorm
    return [
        module for module in model.modules() if isinstance(module, batch_norm) and module.training
    ]
