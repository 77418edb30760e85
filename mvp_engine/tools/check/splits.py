"""The same rows in two splits into micro-batches: loss, weight and gradients must not depend on the split.

A loss that does is trained on other numbers with every change of the number of ranks or of the micro-batch size, in
silence. Randomness is no such dependence: the first split runs twice, and if the two results differ, again without
dropout. If the loss is random even so, some more runs measure how far it varies.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mvp_engine.data import derived_seed, rng_state, seed_everything, set_rng_state
from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.engine import StepContext
from mvp_engine.engine.meter import peak_memory
from mvp_engine.kit.row_checks import leading_sizes, row_groups, select_rows
from mvp_engine.model_engine.fsdp.grad_norm import local_grad

if TYPE_CHECKING:
    from mvp_engine.tools.check.checked_engine import CheckedEngine

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

    def is_finite(self) -> bool:
        return self.weight > 0 and math.isfinite(self.loss)


@dataclass(frozen=True)
class Difference:
    loss: float
    weight: float
    grad: float
    scale: float

    def exceeds(self, exact: bool, noise: Difference | None = None) -> bool:
        spare = NOISE_FACTOR * noise.grad if noise else 0.0
        loss_spare = NOISE_FACTOR * noise.loss if noise else 0.0
        bound = LOSS_BOUNDS[exact]
        too_far = self.loss > max(bound * self.scale, 0.1 * bound) + loss_spare
        return too_far or self.grad > GRAD_BOUNDS[exact] + spare or self.other_weight(noise)

    def other_weight(self, noise: Difference | None = None) -> bool:
        return self.weight > 1e-5 and (noise is None or self.weight > NOISE_FACTOR * noise.weight)


@dataclass(frozen=True)
class SplitComparison:
    configured: SplitResult
    other: SplitResult
    difference: Difference
    is_random: bool  # the loss differs by chance in two runs of the same split
    exceeds: bool

    def facts(self) -> dict[str, Any]:
        results = (self.configured, self.other)
        return {
            "micro_batches": [one.num_micro_batches for one in results],
            "loss": [one.loss for one in results],
            "weight": [one.weight for one in results],
            "grad_difference": self.difference.grad,
            "random": self.is_random,
        }

    def summary(self) -> str:
        one, two = self.configured, self.other
        text = (
            f"the same rows in {one.num_micro_batches} and {two.num_micro_batches} micro-batches: "
            f"loss {one.loss:.5g} and {two.loss:.5g}, gradients differ by {_percent(self.difference.grad)}"
        )
        return f"{text}; the loss is random" if self.is_random else text


def compare_splits(engine: CheckedEngine, micro_batches: list[Any]) -> SplitComparison | str:
    """Compare the micro-batches as configured with others of the same rows; a reason if that cannot be done."""
    exact = engine.model_engine.settings.precision == "fp32"
    outside = rng_state()
    with _without_batch_norm_statistics(engine.model):
        other = _other_split(engine, micro_batches)
        if not any(engine.world.any(other is not None)):
            return "not compared: " + _why_not(micro_batches)
        first, noise = _run_repeatedly(engine, micro_batches, 2)
        if noise.exceeds(exact):
            engine.model.eval()  # dropout and the like
            first, noise = _run_repeatedly(engine, micro_batches, 2)
        if noise.exceeds(exact):  # two losses may be close by chance
            first, noise = _run_repeatedly(engine, micro_batches, RANDOM_RUNS)
        second = _run(engine, other if other is not None else micro_batches, seed=RANDOM_RUNS)
    set_rng_state(outside)
    if not first.is_finite() or not second.is_finite():
        return f"not compared: the loss is {first.loss} and {second.loss} in the two splits"
    is_random = noise.exceeds(exact)
    difference = _difference(engine, first, second)
    exceeds = difference.exceeds(exact, noise if is_random else None)
    return SplitComparison(first, second, difference, is_random, exceeds)


def explain(found: SplitComparison) -> str:
    """The problem, its likely cause and the fix, for a comparison that exceeds its bounds."""
    one, two = found.configured, found.other
    counts = f"{one.num_micro_batches} and in {two.num_micro_batches} micro-batches"
    text = (
        f"the loss depends on how rows are split into micro-batches: it is {one.loss:.5g} and {two.loss:.5g} for the "
        f"same rows in {counts}, and the gradients differ by {_percent(found.difference.grad)}. "
    )
    if found.difference.other_weight():
        text += (
            f"The weight of these rows is {one.weight:g} and {two.weight:g}: this is a mean of means. forward_step "
            'must return the sum of its losses (reduction="sum") and the number of its terms'
        )
    elif _is_mean(one, two):
        text += (
            "forward_step returns the mean of its micro-batch with the number of its terms as the weight: return the "
            'sum (reduction="sum")'
        )
    else:
        text += (
            "Rows are compared with other rows of their micro-batch only (in-batch negatives, statistics of a batch), "
            "or the loss is divided inside of forward_step: it needs the whole step"
        )
    return f"{text}. See {PAGE}"


# ---- Runs ----------------------------------------------------------------------------------------------------------


def _run_repeatedly(
    engine: CheckedEngine, micro_batches: list[Any], times: int
) -> tuple[SplitResult, Difference]:
    """The first result, and the largest differences of runs with other seeds from it."""
    first = _run(engine, micro_batches, seed=0)
    others = [_run(engine, micro_batches, seed) for seed in range(1, times)]
    found = [astuple(_difference(engine, first, other)) for other in others]
    return first, Difference(*(max(each) for each in zip(*found, strict=True)))


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
    loss_sum, weight, scale, count = (
        sum(one) for one in zip(*engine.world.all_gather(own), strict=True)
    )
    grads = _sampled_grads(engine.model, weight)
    model_engine.optimizer_zero_grad()
    divisor = weight if weight > 0 else math.nan
    same = engine.layout.model_parallel_size
    scale *= engine.layout.pipeline  # only the last stage has losses of micro-batches
    return SplitResult(
        int(count) // same, loss_sum / divisor, weight / same, scale / divisor, grads, parts
    )


def _sampled_grads(model: nn.Module, weight: float) -> dict[str, Tensor]:
    """Evenly spaced entries: copies of all gradients would need the memory of another model."""
    found = {}
    for name, param in model.named_parameters():
        if param.grad is not None:
            grad = local_grad(param).flatten()
            found[name] = grad[:: max(1, grad.numel() // ENTRIES)].double() / weight
    return found


def _difference(engine: CheckedEngine, one: SplitResult, two: SplitResult) -> Difference:
    squares = [0.0, 0.0, 0.0]
    for name in {*one.grads, *two.grads}:
        a, b = one.grads.get(name), two.grads.get(name)
        first = torch.zeros_like(b) if a is None and b is not None else a
        second = torch.zeros_like(a) if b is None and a is not None else b
        assert first is not None
        assert second is not None
        for place, value in enumerate((first - second, first, second)):
            squares[place] += float(value.square().sum())
    apart, norm, other_norm = (
        sum(each) for each in zip(*engine.world.all_gather(squares), strict=True)
    )
    largest = max(norm, other_norm)
    return Difference(
        loss=abs(one.loss - two.loss),
        weight=abs(one.weight - two.weight) / max(one.weight, two.weight, 1e-12),
        grad=math.sqrt(apart / largest) if largest else 0.0,
        scale=max(one.scale, two.scale),
    )


# ---- Splits --------------------------------------------------------------------------------------------------------


def _other_split(engine: CheckedEngine, micro_batches: list[Any]) -> list[Any] | None:
    """More micro-batches on this rank; where each has one row, fewer, if the memory is there."""
    parts = split_each(micro_batches, getattr(engine, "split_micro_batch", None))
    if parts is not None:
        return parts
    device = engine.device
    if device.type == "cuda" and 2 * peak_memory(device) > torch.cuda.mem_get_info(device)[1]:
        return None
    return merge_pairs(micro_batches)


def _why_not(micro_batches: list[Any]) -> str:
    kinds = {type(one).__name__ for one in micro_batches}
    return (
        f"no micro-batch of the first step ({', '.join(sorted(kinds))}) can be split into rows or merged with "
        "another one; define split_micro_batch (docs/check.md)"
    )


def _is_mean(one: SplitResult, two: SplitResult) -> bool:
    """Would the sums of both splits agree, if the losses of this rank's micro-batches were means of their terms?"""
    sums = [sum(loss * weight for loss, weight in result.parts) for result in (one, two)]
    return math.isclose(*sums, rel_tol=1e-2)


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
    norms = [
        module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    return [module for module in norms if module.training]


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2g} %" if fraction > 1e-3 else "less than 0.1 %"


# Other micro-batches of the same rows, for the comparison in `splits.py`: one in two parts, or two in one.
#
# Rows of a PackedBatch are its sequences, or all sequences of one sample (the two sides of a preference pair). Rows of
# any other micro-batch are the entries of the first dimension, which all its tensors must have in common. A recipe with
# other rows in its micro-batches defines `split_micro_batch(micro_batch)`, which returns parts, or None.

Parts = list[Any] | None


def split_each(micro_batches: list[Any], own_split: Callable[[Any], Parts] | None) -> Parts:
    """All micro-batches in parts; None if none of them has several rows."""
    split = own_split or split_micro_batch
    parts = []
    for micro_batch in micro_batches:
        parts += split(micro_batch) or [micro_batch]
    return parts if len(parts) > len(micro_batches) else None


def merge_pairs(micro_batches: list[Any]) -> Parts:
    """Each two micro-batches in one; None if no two of them fit together."""
    merged = []
    for first in range(0, len(micro_batches), 2):
        pair = micro_batches[first : first + 2]
        try:
            merged.append(_concat(pair) if len(pair) == 2 else pair[0])
        except (ValueError, TypeError, RuntimeError):  # other fields, shapes or types
            merged += pair
    return merged if len(merged) < len(micro_batches) else None


def split_micro_batch(micro_batch: Any) -> Parts:
    """A third of the rows, those with the fewest labels, and the others; None for a single row.

    Parts of unequal sizes and lengths: a mean of means over equal parts would be the mean.
    """
    is_packed = isinstance(micro_batch, PackedBatch)
    if not is_packed and len(set(leading_sizes(micro_batch))) != 1:
        return None
    groups = row_groups(micro_batch)
    if len(groups) < 2:
        return None
    if is_packed:
        has_label = (micro_batch.labels != IGNORE).split(micro_batch.lengths.tolist())
        labels = [int(one.sum()) for one in has_label]
        groups.sort(key=lambda sequences: sum(labels[s] for s in sequences))
    cut = max(1, len(groups) // 3)
    return [select_rows(micro_batch, sorted(chain(*part))) for part in (groups[:cut], groups[cut:])]


def _concat(pair: list[Any]) -> Any:
    """Two micro-batches as one; raises where they do not fit together."""
    first, second = pair
    if isinstance(first, PackedBatch):
        return PackedBatch.concat(pair)
    if isinstance(first, Tensor):
        return torch.cat(pair) if first.ndim else first
    if isinstance(first, Mapping):
        joined = {name: _concat([first[name], second[name]]) for name in first}
        return joined if type(first) is dict else type(first)(joined)  # type: ignore[call-arg]
    if isinstance(first, list | tuple):
        if not list(leading_sizes(first)):
            return first + second
        joined_list = [_concat([a, b]) for a, b in zip(first, second, strict=True)]
        return type(first)(*joined_list) if hasattr(first, "_fields") else type(first)(joined_list)
    raise TypeError(f"{type(first).__name__} cannot be concatenated")
