"""A recipe's engine under check, and what a check asks it after its steps.

The engine trains a few steps, saves nothing, and looks at every loss. Then: which parameters got no gradient, which
kinds of media did no step have, and does the optimizer come back from a checkpoint bit by bit?

The same rows in two splits into micro-batches: loss, weight and gradients must not depend on the split.

A loss that does is trained on other numbers with every change of the number of ranks or of the micro-batch size, in
silence. Randomness is no such dependence: the first split runs twice, and if the two results differ, again without
dropout. If the loss is random even so, some more runs measure how far it varies. If the losses of these runs are equal
and only gradients differ, also with the same seed, nothing is random: the gradients have a wrong part.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from mvp_engine.checkpoint import state
from mvp_engine.data import derived_seed, keep_rng_state, seed_everything
from mvp_engine.distributed import World
from mvp_engine.distributed.dtensor import local_tensor
from mvp_engine.distributed.world import raise_on_all_ranks
from mvp_engine.engine import Engine, StepContext
from mvp_engine.errors import UserError, count
from mvp_engine.hf.model.model_parts import names_by_part
from mvp_engine.kit.data.pack.costs import MEDIA_BITS
from mvp_engine.kit.data.pack.packs import PackLoader
from mvp_engine.kit.row_checks import Parts, merge_pairs, split_each
from mvp_engine.model_engine.fsdp.base_engine import FSDPBaseEngine
from mvp_engine.model_engine.fsdp.lockstep import media_kinds
from mvp_engine.tools.check.record import CheckRecord

if TYPE_CHECKING:
    pass

STEPS = 4  # the first is not timed: it allocates, compiles and starts the loader workers
MAX_IDS = 5  # names that a message lists
LORA_A = (".lora_A.weight", ".lora_A")  # ends of names


class CheckedEngine(Engine):
    """A mixin that comes before a recipe's engine in the method resolution order."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.nonfinite_losses: list[str] = []  # one message per micro-batch
        # Some of the first step, before hooks change them.
        self.first_micro_batches: list[Any] | None = None
        self.media_seen: set[str] = set()  # kinds of media in the micro-batches of this rank
        # Parameters with a gradient other than 0 in some step.
        self._with_gradient: set[str] = set()
        # Losses and weights of the current step's micro-batches.
        self._losses: list[tuple[Tensor, Tensor | float]] = []

    @property
    def done(self) -> bool:
        return super().done or self.step >= STEPS

    def save(self) -> None:
        """A check writes no checkpoint."""

    def train_pre_step(self, ctx: StepContext) -> None:
        if self.first_micro_batches is None:
            self.first_micro_batches = copy.deepcopy(ctx.micro_batches[:MAX_MICRO_BATCHES])
        self.media_seen.update(*map(media_kinds, ctx.micro_batches))
        super().train_pre_step(ctx)

    def forward_step(self, ctx: StepContext, micro_batch: Any) -> tuple[Tensor, Tensor | float]:
        result = super().forward_step(ctx, micro_batch)
        # The model engine reports anything else.
        is_pair = isinstance(result, tuple) and len(result) == 2
        if ctx.split == "train" and not ctx.is_dummy and is_pair:
            self._losses.append((result[0].detach(), result[1]))
        return result

    def train_post_step(self, ctx: StepContext) -> None:
        super().train_post_step(ctx)
        losses = self.take_losses()
        first = self.feed.used - len(losses)
        for number, (loss, _) in enumerate(losses):
            if not np.isfinite(loss):
                micro_batches = [first + number, first + number + 1]
                ids = self.feed.sample_ids({"micro_batches": micro_batches})
                self.nonfinite_losses.append(
                    f"step {ctx.step}, rank {self.world.rank}, micro-batch {number + 1} of {len(losses)}: "
                    f"the loss is {loss}{_listed(ids)}"
                )
        self._note_gradients()

    def take_losses(self) -> list[tuple[float, float]]:
        """Loss sum and weight of each micro-batch of this rank since the last call."""
        taken = [(float(loss), float(weight)) for loss, weight in self._losses]
        self._losses = []
        return taken

    def _note_gradients(self) -> None:
        named = {}
        for name, param in self.model.named_parameters():
            if param.requires_grad and param.grad is not None and name not in self._with_gradient:
                named[name] = local_tensor(param.grad)
        if named:
            norms = torch.stack(torch._foreach_norm(list(named.values()))).tolist()
            pairs = zip(named, norms, strict=True)
            self._with_gradient |= {name for name, norm in pairs if norm != 0}

    def without_gradient(self) -> list[str]:
        """Parameters that train, but had no gradient, or one of 0, in all steps. All ranks call it."""
        with_gradient = set().union(*self.world.all_gather(self._with_gradient))
        return [name for name in _trained_names(self.model) if name not in with_gradient]


def skipped_steps(folder: Path) -> list[str]:
    """Messages for the steps of a run that the guard skipped."""
    file = folder / "skipped_steps.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    messages = []
    for entry in map(json.loads, lines):
        ids = _listed(entry["sample_ids"])
        messages.append(f"step {entry['step']} was skipped: {entry['reason']}{ids}")
    return messages


def _listed(ids: list[Any] | None) -> str:
    if not ids:
        return ""
    more = f" and {len(ids) - MAX_IDS} more" if len(ids) > MAX_IDS else ""
    return f"; its samples: {', '.join(map(str, ids[:MAX_IDS]))}{more}"


# ---- Media and gradients -----------------------------------------------------------------------------------------


def check_rare_media(engine: CheckedEngine) -> None:
    """Raise if the model fails on a kind of media that the steps did not have, such as one video in many images.

    The training would find that out in its first step with such a row. All ranks call it.
    """
    loader = engine.feed.loader
    if not isinstance(loader, PackLoader):
        return
    dataset = loader.dataset
    bits = int(np.bitwise_or.reduce(np.concatenate([costs.media for costs in dataset.costs])))
    kinds = dataset.row_encoder.media_names(kind for kind, bit in MEDIA_BITS.items() if bits & bit)
    missing = kinds.difference(*engine.world.all_gather(engine.media_seen))
    for index in range(len(dataset)):
        if not missing:
            return
        if dataset.media_kinds(index) & missing:
            batch, _ = dataset[index]
            engine.model_engine.adapter.preflight_media(engine.model_engine, [batch])  # type: ignore[attr-defined]
            missing -= media_kinds(batch)


def report_unused_parameters(record: CheckRecord, engine: CheckedEngine) -> None:
    # A model may have parameters that some trainings leave as they are.
    optional = getattr(engine.model, "text_parameters", ())
    names = [name for name in engine.without_gradient() if name not in optional]
    if engine.step == 1:  # LoRA begins with B = 0, so that A has no gradient in the first step
        names = [name for name in names if not name.endswith(LORA_A)]
    record.facts.without_gradient = names
    if names:
        where = names_by_part(engine.model, names, MAX_IDS)
        record.warning(
            f"{len(names)} of {len(_trained_names(engine.model))} parameters that train got no gradient in "
            f"{engine.step} steps: {where}. Is the loss computed without them, or do the rows of these steps lack "
            "their data (images, ...)? model.freeze freezes them"
        )


def _trained_names(model: nn.Module) -> list[str]:
    return [name for name, param in model.named_parameters() if param.requires_grad]


def check_optimizer_state(record: CheckRecord, engine: CheckedEngine) -> None:
    """Does the optimizer come back from a checkpoint bit by bit? All ranks call it."""
    model_engine: Any = engine.model_engine
    if not isinstance(model_engine, FSDPBaseEngine):
        return
    trained = model_engine.optimizer
    loaded = engine.prepare_optimizer(engine.model)
    try:
        differences = optimizer_round_trip(
            engine.model,
            trained,
            loaded,
            engine.run.dir / "optimizer",
            engine.world,
            initial_groups=model_engine.initial_groups,
            whole_groups=not isinstance(model_engine.scheduler, LambdaLR),
        )
    except UserError as error:
        record.problem(str(error))
        return
    kind = type(trained).__name__
    if differences:
        record.problem(
            f"{kind} does not come back from a checkpoint as it was: {'; '.join(differences[:MAX_IDS])}. A resume "
            "would not be exact: does its load_state_dict or its state_dict change states? See docs/optim.md, Your own "
            "optimizer"
        )
    if attributes := changed_attributes(trained, loaded):
        record.warning(
            f"{kind} changes its {count(len(attributes), 'attribute')} {', '.join(attributes)} in training, which a "
            "checkpoint does not save: keep this in param_groups"
        )


PAGE = "docs/whole_step_loss.md"
MAX_MICRO_BATCHES = 4  # of each rank
ENTRIES = 2**14  # of each gradient that are compared
# The largest differences that rounding explains, relative to gradient and loss: fp32, half precision.
GRAD_BOUNDS = {True: 5e-3, False: 0.1}
LOSS_BOUNDS = {True: 1e-3, False: 2e-2}
EQUAL = 1e-6  # losses that differ less, relative to their scale, are equal; random ones never are
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
    def has_equal_losses(self) -> bool:
        return self.loss <= EQUAL * self.scale and not self.has_other_weight

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
    if norms := batch_norms(engine.model):
        kind = f"{type(norms[0]).__name__} module"
        record.warning(
            f"{count(len(norms), kind)} with statistics of one micro-batch of one rank: "
            f"results depend on data.micro_batch_size and the number of ranks. See {PAGE}"
        )
    with keep_rng_state(), _without_batch_norm_statistics(engine.model):
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
        is_random = noise.exceeds(exact, NO_NOISE)
        if is_random and noise.has_equal_losses:
            again = _run(engine, micro_batches, seed=0)
            if _difference(engine, first, again).exceeds(exact, NO_NOISE):
                record.problem(explain_gradients(engine, first, again))
                record.end_stage("not compared: gradients of the same rows differ", ok=False)
                return
        second = _run(engine, other if other is not None else micro_batches, seed=RANDOM_RUNS)
    results = [first, second]
    if not all(result.weight > 0 and math.isfinite(result.loss) for result in results):
        record.end_stage(
            f"not compared: the loss is {first.loss} and {second.loss} in the two splits"
        )
        return
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


def explain_gradients(engine: CheckedEngine, first: SplitResult, second: SplitResult) -> str:
    """The problem of two runs with equal losses and other gradients; it names parameters. All ranks call it."""
    squares: dict[str, list[float]] = {}
    for of_rank in engine.world.all_gather(_squares(first, second)):
        for name, values in of_rank.items():
            squares[name] = [
                a + b for a, b in zip(squares.get(name, [0.0] * 3), values, strict=True)
            ]
    apart = {name: _relative(values) for name, values in squares.items()}
    worst = sorted(apart, key=lambda name: -apart[name])[:MAX_IDS]
    listed = ", ".join(f"{name} ({100 * apart[name]:.2g} %)" for name in worst)
    return (
        f"two runs of the same rows with the same weights and the same seed have the same loss, {first.loss:.5g}, but "
        f"other gradients: {listed}. So the loss is not random: are gradients added to those of the run before "
        "(zero_grad of the optimizer has to clear them all), or does the engine or a hook change them?"
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
            grad = local_tensor(param.grad).flatten()
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
    squares = [[0.0] * 3, *_squares(first, second).values()]
    total = _sums(engine, [sum(values) for values in zip(*squares, strict=True)])
    return Difference(
        loss=abs(first.loss - second.loss),
        weight=abs(first.weight - second.weight) / max(first.weight, second.weight, 1e-12),
        grad=_relative(total),
        scale=max(first.scale, second.scale),
    )


def _squares(first: SplitResult, second: SplitResult) -> dict[str, list[float]]:
    """Of each gradient of this rank: the sums of squares of the difference, and of the gradient in both runs."""
    found = {}
    zero = torch.zeros(())
    for name in {**first.grads, **second.grads}:
        a = first.grads.get(name, zero)
        b = second.grads.get(name, zero)
        found[name] = [float(value.square().sum()) for value in (a - b, a, b)]
    return found


def _relative(squares: list[float]) -> float:
    apart, *norms = squares
    return math.sqrt(apart / max(norms)) if max(norms) else 0.0


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


def optimizer_round_trip(
    model: nn.Module,
    trained: Optimizer,
    loaded: Any,
    folder: Path,
    world: World,
    *,
    initial_groups: Any,
    whole_groups: bool,
) -> list[str]:
    """Save `trained` into `folder`, load it into a new optimizer of the same model; what differs. All ranks call it.

    It saves and loads one parameter for each kind of state and each parameter group, the smallest.
    """
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    chosen = _one_of_each_kind(trained)
    part = nn.Module()
    parameters: dict[str, Any] = {names[param]: param for param in chosen}
    part._parameters.update(parameters)
    saved: Any = object.__new__(type(trained))  # of the chosen parameters only
    saved.state = {param: trained.state[param] for param in chosen if param in trained.state}
    saved.param_groups = _groups_of(chosen, trained)
    loaded.param_groups = _groups_of(chosen, loaded)
    state.check_ranks_agree(model, trained, world)
    with raise_on_all_ranks(world.host_group):
        tensors = state.collect(part, saved, {}, {}, world.rank, initial_groups=initial_groups)
    state.save(folder, tensors, world)
    state.restore(folder, part, loaded, world.host_group, whole_groups)
    return [*chain(*world.all_gather(optimizer_differences(saved, loaded, names)))]


def changed_attributes(trained: Optimizer, loaded: Optimizer) -> list[str]:
    """Numbers and tensors that training changed on the optimizer itself, which no checkpoint saves."""
    return [
        key
        for key, value in vars(trained).items()
        if type(value) in (int, float) or isinstance(value, Tensor)  # schedulers set flags
        if key not in ("found_inf", "grad_scale")  # of the model engine
        if not _is_same(value, vars(loaded).get(key))
    ]


def _groups_of(chosen: set[Tensor], optimizer: Optimizer) -> list[dict[str, Any]]:
    """The parameter groups with these parameters only."""
    groups = []
    for group in optimizer.param_groups:
        groups.append({**group, "params": [param for param in group["params"] if param in chosen]})
    return groups


def _one_of_each_kind(optimizer: Optimizer) -> set[Tensor]:
    """The smallest parameter of each group, and the smallest with each kind of state."""
    smallest: dict[Any, Tensor] = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in sorted(group["params"], key=lambda param: param.numel()):
            param_state = optimizer.state.get(param, {})
            kind = tuple((key, *_kind(param, value)) for key, value in param_state.items())
            for key in (index, kind):
                if key not in smallest or param.numel() < smallest[key].numel():
                    smallest[key] = param
    return set(smallest.values())


def _kind(param: Tensor, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, Tensor):
        return (type(value),)
    is_contiguous = local_tensor(value).is_contiguous()
    return type(value), value.dtype, value.device.type, value.shape == param.shape, is_contiguous


def optimizer_differences(
    saved: Optimizer, loaded: Optimizer, names: Mapping[Tensor, str]
) -> list[str]:
    """What differs between an optimizer and one that was loaded from its checkpoint: keys, layouts, bits."""
    differences = []
    for group, other in zip(saved.param_groups, loaded.param_groups, strict=True):
        for key in sorted({*group, *other} - {"params"}) if group["params"] else []:
            if not _is_same(group.get(key), other.get(key)):
                differences.append(f"param_groups have another {key!r}")
    for param, param_state in saved.state.items():
        other_state = loaded.state.get(param, {})
        for key in {**param_state, **other_state}:
            if not _is_same(param_state.get(key), other_state.get(key)):
                differences.append(f"{names[param]} has another state {key!r}")
    return differences


def _is_same(value: Any, other: Any) -> bool:
    """Equal in type, layout and bits, also inside of containers."""
    if type(value) is not type(other):
        return False
    if isinstance(value, Mapping):
        same_keys = value.keys() == other.keys()
        return same_keys and all(_is_same(value[key], other[key]) for key in value)
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(_is_same, value, other))
    if not isinstance(value, Tensor):
        return bool(value == other) or repr(value) == repr(other)  # NaN
    a, b = local_tensor(value.detach()), local_tensor(other.detach())
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return _layout(value, a) == _layout(other, b) and torch.equal(*bits)


def _layout(value: Tensor, local: Tensor) -> tuple[Any, ...]:
    placements = getattr(value, "placements", None)  # of a DTensor
    return placements, value.shape, local.dtype, local.device, local.shape, local.stride()
