"""Preflight probes: run a few random tokens before training, and reject models that fail.

`check_packing` compares packed with single sequences, `check_gradients` compares gradients between
tensor-parallel ranks. Both run the model as it is placed on its layout, so all ranks must call
them; results are reduced over ranks, so that all of them raise or none.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed.pipeline import recorded
from mvp_engine.distributed.world import raise_on_all_ranks
from mvp_engine.errors import UserError
from mvp_engine.hf.experts.fp8_layers import run_in_bf16
from mvp_engine.hf.model import attention
from mvp_engine.hf.model.auto_model import needed_media
from mvp_engine.hf.model.packed_model import PackedModel

LOGGER = logging.getLogger("mvp_engine")
TRIALS = 3  # one may fail by chance: rounding can switch an expert router between two experts
LENGTHS = (9, 6)  # of the two sequences
EXACT = 1e-5  # the largest relative difference that float32 rounding explains


@dataclass(frozen=True)
class Differences:
    """Relative differences that one trial measured."""

    neighbour: float  # of a sequence when the other one in its pack is replaced; maximum
    packing: float  # of packed sequences from the same ones alone; mean
    reference: float  # of log-probs from those of transformers' own forward; mean
    noise: float  # bound for rounding errors of this model; 0 in float32
    causal: float  # of the first half of a sequence when the second half is replaced; mean; 0 in float32

    @classmethod
    def measure(cls, model: PackedModel, seed: int, *, exact: bool, reference: bool) -> Differences:
        first, second = _sequences(model, LENGTHS, seed)
        other_first, other_second = _sequences(model, LENGTHS, seed + TRIALS)
        split = LENGTHS[0]
        packed = _hidden(model, first, second)
        noise = 0.0 if exact else 4 * _rounding_noise(model, first)
        causal = 0.0 if exact else _later_tokens(model, first, other_first)
        neighbour = max(
            max_difference(packed[split:], _hidden(model, other_first, second)[split:]),
            max_difference(packed[:split], _hidden(model, first, other_second)[:split]),
        )
        alone = torch.cat([_hidden(model, first), _hidden(model, second)])
        packing = mean_difference(packed, alone)
        from_reference = _reference_difference(model, [first, second]) if reference else 0.0
        return cls(neighbour, packing, from_reference, noise, causal)

    def max_over_ranks(self, group: dist.ProcessGroup | None) -> Differences:
        """The largest of all ranks, so that all ranks decide alike. NaN counts as infinite."""
        largest = torch.tensor(astuple(self), dtype=torch.float64).nan_to_num(nan=torch.inf)
        if group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        return Differences(*largest.tolist())

    def neighbour_ok(self) -> bool:
        return self.neighbour <= max(EXACT, min(0.1, self.noise))

    def causal_ok(self) -> bool:
        # The bound is not the noise alone: a model that is not causal has much of that.
        return self.causal <= max(EXACT, min(1e-2, self.noise))

    def packing_ok(self, exact: bool) -> bool:
        return self.packing <= (EXACT if exact else min(0.1, max(1e-4, self.noise)))

    def reference_ok(self, exact: bool) -> bool:
        return self.reference <= (EXACT if exact else 3e-2)


def check_packing(
    model: PackedModel,
    *,
    exact: bool = True,
    reference: bool = True,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Raise unless the model is exact on packed sequences, or else on padded rows, which it then uses.

    The arguments are those of `probe`.
    """
    options: dict[str, Any] = {"exact": exact, "reference": reference, "group": group}
    if not model.padded_rows:
        try:
            return probe(model, **options)
        except UserError as error:
            if model.sequence_groups is not None and model.decoder() is model.base():
                hint = f"Set {model.sequence_groups.keys}=1: it then runs on padded rows, if they are exact"
                raise UserError(f"{error} {hint}") from error
            if not _may_use_padded_rows(model, error):
                raise
            packing_error = error
        model.use_padded_rows(_short_reason(packing_error))
        try:
            probe(model, **options)
        except UserError as error:
            model.use_padded_rows("")
            also = f"On padded rows it is not exact either: {_short_reason(error)}."
            raise UserError(f"{str(packing_error).rstrip('.')}. {also}") from None
    else:
        probe(model, **options)
    LOGGER.warning(
        "%s: each sequence runs in a padded row of its own with transformers' own attention, because packing is not "
        "exact: %s. Rows are as long as the longest sequence of a micro-batch, so steps are slower and need more "
        "memory than packed ones.",
        model.hf.config.model_type,  # type: ignore[union-attr]
        model.padded_rows,
    )
    return None


@torch.no_grad()
def _try_own_forward(model: PackedModel) -> None:
    """Raise if transformers' own forward fails, too: then packing is not to blame."""
    (sequence,) = _sequences(model, LENGTHS[:1], seed=0)
    try:
        with eager_eval(model):
            model.reference_log_probs(sequence)
    except Exception as error:
        if isinstance(error, NotImplementedError | UserError | torch.OutOfMemoryError):
            return  # the probe says why
        name = type(model.hf).__name__
        raise UserError(
            f"transformers' own {name}.forward fails with this config, without any packing ({type(error).__name__}: "
            f"{error}): correct the sizes in model.config or in the config.json of model.path, or use the version of "
            "transformers that the model was made for"
        ) from error


def _may_use_padded_rows(model: PackedModel, error: UserError) -> bool:
    """Text models; not where memory ran out."""
    if isinstance(error.__cause__, torch.OutOfMemoryError) or model.stage is not None:
        return False
    return model.decoder() is model.base()


def _short_reason(error: UserError) -> str:
    """The first sentence, without the name of the model."""
    reason = str(error).partition(" cannot be trained on packed sequences: ")[2] or str(error)
    return reason.partition(". ")[0].rstrip(".")


@torch.no_grad()
def probe(
    model: PackedModel,
    *,
    exact: bool = True,
    reference: bool = True,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Raise unless two packed sequences give what each gives alone and what transformers gives.

    Most of all, a sequence must not change with its neighbour in the pack: shapes are equal
    there, so the results are bit-equal, and a leak in one layer of many shows. The probe rejects
    mixers that `mixers/states.py` does not find, position schemes that ignore `position_ids`, heads
    with unknown steps, and layers that need attention features that packed attention lacks.

    `exact`: the model computes in float32. In half precision the bound is the model's own
    rounding noise: a causal model's first tokens do not depend on later ones, so whatever changes
    when those are cut off is rounding. A model outside of transformers' attention interface may
    not be causal without a mask: later tokens are replaced, which must change no more than rounding.
    `reference`: compare with transformers' forward, which does not know tensor-parallel weights.
    `group`: all ranks.
    """
    model_type = model.hf.config.model_type  # type: ignore[union-attr]
    rejected = f"{model_type} cannot be trained on packed sequences"
    try:
        with eager_eval(model), warnings.catch_warnings():
            # The probe runs once, uncompiled on purpose.
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            for seed in range(TRIALS):
                found = Differences.measure(model, seed, exact=exact, reference=reference)
                found = found.max_over_ranks(group)
                packing_ok = found.packing_ok(exact)
                reference_ok = found.reference_ok(exact)
                if found.neighbour_ok() and packing_ok and reference_ok and found.causal_ok():
                    return
    except Exception as error:
        is_ours = isinstance(error, NotImplementedError | UserError)
        reason = (
            str(error) if is_ours else f"its code fails on them ({type(error).__name__}: {error})"
        )
        needed = needed_media(error)
        if reference and not is_ours and not needed:
            _try_own_forward(model)
        if needed:
            name = type(model.hf).__name__
            reason = f"{name} cannot run without {needed}: rows without media cannot be trained"
        raise UserError(f"{rejected}: {reason}") from error
    if found.packing == float("inf"):
        raise UserError(
            f"{model_type} returns non-finite outputs: check its weights for NaN and infinity"
        )
    if not found.causal_ok():
        raise UserError(
            f"{rejected}: later tokens of a sequence change earlier ones by {found.causal:.1e}. Its layers build "
            "their causal mask outside of transformers' attention interface"
        )
    if packing_ok and not reference_ok:
        raise UserError(
            f"{model_type}: log-probs differ from those of transformers' own forward by "
            f"{found.reference:.1e}. The model has a step between backbone and logits, or in "
            "attention, that is not supported here."
        )
    raise UserError(
        f"{rejected}: two sequences in one batch change each other by {found.neighbour:.1e} and "
        f"differ from the same two alone by {found.packing:.1e}. Its layers look across sequence "
        "boundaries."
    )


def check_gradients(model: PackedModel, mesh: DeviceMesh, group: dist.ProcessGroup | None) -> None:
    """Raise unless replicated parameters get equal gradients on all tensor-parallel ranks.

    A weight that acts on a part of the heads gets a part of its gradient on each rank. If the
    tensor-parallel plan does not sum the parts, training continues with wrong gradients and no
    error. `group`: all ranks of the world.
    """
    try:
        link = None if model.stage is None else model.stage.link
        with eager_eval(model):
            with recorded(link) as calls:
                hidden_TD = _hidden(model, *_sequences(model, (15, 9), seed=0)).float()
            if not hidden_TD.requires_grad:  # all parameters are frozen
                return
            generator = torch.Generator().manual_seed(1)
            direction_TD = torch.randn(hidden_TD.shape, generator=generator).to(hidden_TD.device)
            loss = (hidden_TD * direction_TD).sum()
            loss.backward() if link is None else link.backward(calls, loss)
    except RuntimeError as error:
        model_type = model.hf.config.model_type  # type: ignore[union-attr]
        raise UserError(
            f"parallel.tensor={mesh.size()}: {model_type} cannot be trained with transformers' tensor-parallel plan, "
            f"its code fails ({error}). Set parallel.tensor=1"
        ) from error
    with raise_on_all_ranks(group):
        for name, param in model.named_parameters():
            if param.grad is None or _is_tensor_parallel(param):
                continue
            if not _equal_on_ranks(param.grad, mesh.get_group()):
                raise UserError(
                    f"parallel.tensor={mesh.size()}: {name} gets a different gradient on each "
                    "rank, because transformers' tensor-parallel plan for this model does not "
                    "cover it. Set parallel.tensor=1."
                )
    for param in model.parameters():
        param.grad = None


def _is_tensor_parallel(param: Tensor) -> bool:
    return isinstance(param, DTensor) and "tensor" in (param.device_mesh.mesh_dim_names or ())


def _equal_on_ranks(grad: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether a gradient differs by at most 1 % of its largest entry between ranks."""
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    high = local.clone()
    low = local.clone()
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
    if not high.numel():
        return True
    largest = torch.maximum(high.abs(), low.abs()).max()
    return not float((high - low).max()) > 1e-2 * float(largest)


@contextmanager
def eager_eval(model: PackedModel) -> Iterator[None]:
    """Eval mode without compiled blocks and without FP8; each module is restored afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"), run_in_bf16(model):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _rounding_noise(model: PackedModel, sequence: PackedBatch) -> float:
    """How much the first half of a sequence changes when the second half is cut off."""
    half_ids = sequence.input_ids[: sequence.num_tokens // 2].cpu()
    half = PackedBatch.from_sequences([half_ids]).to(sequence.input_ids.device)
    return mean_difference(_hidden(model, sequence)[: half.num_tokens], _hidden(model, half))


def _later_tokens(model: PackedModel, sequence: PackedBatch, other: PackedBatch) -> float:
    """How much the first half of a sequence changes when the second half is that of another sequence."""
    half = sequence.num_tokens // 2
    ids = torch.cat([sequence.input_ids[:half], other.input_ids[half:]])
    mixed = PackedBatch.from_sequences([ids.cpu()]).to(ids.device)
    return mean_difference(_hidden(model, sequence)[:half], _hidden(model, mixed)[:half])


def _reference_difference(model: PackedModel, sequences: list[PackedBatch]) -> float:
    reference = []
    for sequence in sequences:
        log_probs = model.reference_log_probs(sequence)
        if log_probs is not None:
            reference.append(log_probs)
    if not reference:
        return 0.0
    computed = [model(sequence, ["log_probs"])["log_probs"] for sequence in sequences]
    return mean_difference(torch.cat(computed), torch.cat(reference))


def _hidden(model: PackedModel, *sequences: PackedBatch) -> Tensor:
    """Hidden states of one sequence, or of several packed ones; else the first output provided.

    Without gradients, pipeline stages get those of the last one: all of them must decide alike.
    """
    batch = sequences[0] if len(sequences) == 1 else PackedBatch.concat(list(sequences))
    name = "hidden_states" if "hidden_states" in model.provides else model.provides[0]
    found = model(batch, [name])[name]
    if model.stage is not None and not torch.is_grad_enabled():
        return model.stage.link.result(found)
    return found


def max_difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).float().abs().max() / b.float().abs().max().clamp(min=1e-6))


def mean_difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).float().abs().mean() / b.float().abs().mean().clamp(min=1e-6))


def _sequences(model: PackedModel, lengths: tuple[int, ...], seed: int) -> list[PackedBatch]:
    """Random text without special and placeholder tokens, each sequence in its own batch."""
    config: Any = model.hf.config
    special = special_tokens(config)
    vocab_size = config.get_text_config().vocab_size
    words = torch.tensor([token for token in range(vocab_size) if token not in special])
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    sequences = []
    for length in lengths:
        ids = words[torch.randint(len(words), (length,), generator=generator)]
        sequences.append(PackedBatch.from_sequences([ids]).to(device))
    return sequences


def special_tokens(config: Any) -> set[Any]:
    """Ids that a config or its sub-configs name: end of sequence, image placeholder, and so on."""
    tokens = set()
    for part in attention.config_tree(config):
        for name, value in part.to_dict().items():
            if name.endswith(("token_id", "token_index", "token_ids")):
                tokens |= set(value) if isinstance(value, list) else {value}
    return tokens


# Preflight of media: the first real rows with images, videos or audio, packed, alone, and in transformers' forward.
#
# The probe of `preflight.py` is text only: nothing but the data knows what an encoder accepts. So the rows come from
# the first step that has them, once for each kind of media, before anything is learnt from them.

MAX_REFERENCE_TOKENS = 512  # eager attention needs memory for the square of the length
# The largest mean difference, relative to the mean output, that rounding explains: fp32, half precision.
BOUNDS = {True: 1e-4, False: 0.1}
NEIGHBOUR_BOUNDS = {True: 1e-4, False: 0.05}  # of equal shapes, so nearly all of rounding is equal


class MediaPreflight:
    """Compares rows with media of one model, each kind of media once."""

    def __init__(self, model: PackedModel) -> None:
        self.model = model
        self.checked: set[str] = set()

    def unchecked(self, batches: Iterable[object]) -> dict[str, list[PackedBatch]]:
        """The smallest rows of each kind of media that was not compared yet; empty in nearly every step."""
        packed = [batch for batch in batches if isinstance(batch, PackedBatch)]
        found = {}
        for kind in sorted({kind for batch in packed for kind in _kinds(batch)} - self.checked):
            found[kind] = _smallest_rows(packed, kind)
        return found

    @torch.no_grad()
    def check(self, rows: dict[str, list[PackedBatch]], *, exact: bool, reference: bool) -> None:
        """Raise unless rows give what they give alone and in transformers' forward. On all ranks of a forward.

        `exact`: the model computes in float32. `reference`: compare with transformers, which does not know
        tensor-parallel weights.
        """
        device = next(self.model.parameters()).device
        for kind, found in rows.items():
            moved = [row.to(device) for row in found]
            with eager_eval(self.model):
                if self._check_kind(kind, moved, exact, reference):
                    self.checked |= _kinds(found[0])

    def _check_kind(self, kind: str, rows: list[PackedBatch], exact: bool, reference: bool) -> bool:
        """Whether any rows could be compared. Non-finite ones cannot: the next step has others."""
        model_type = self.model.hf.config.model_type  # type: ignore[union-attr]
        error: str | None = None
        for first in range(0, len(rows), 2):  # one pair may fail by chance: see TRIALS
            row = rows[first]
            neighbour = rows[first + 1] if first + 1 < len(rows) else _other_media(row)
            try:
                found = self._compare(row, neighbour, exact, reference)
            except torch.OutOfMemoryError:
                raise
            except Exception as failure:
                start = f"{model_type}: the forward on a row with {kind} fails"
                if isinstance(failure, NotImplementedError | UserError):
                    raise UserError(f"{start}: {failure}") from failure
                raise UserError(
                    f"{start}: {type(failure).__name__}: {failure}. Are the media encoded by the processor of this "
                    "model? If so, its encoder is not supported: choose another model"
                ) from failure
            if found == "":
                return True
            error = found or error
        if error is None:
            return False
        twice = [_hidden(self.model, *rows[:2]) for _ in range(2)]
        if mean_difference(*twice) > NEIGHBOUR_BOUNDS[exact]:
            error = "two equal forwards differ, because its encoder adds random noise"
        raise UserError(f"{model_type} cannot be trained on packed sequences with {kind}: {error}")

    def _compare(
        self, row: PackedBatch, neighbour: PackedBatch, exact: bool, reference: bool
    ) -> str | None:
        """What is wrong with a row and its neighbour in a pack; empty if nothing is, None if they are non-finite."""
        length = row.num_tokens
        packed = _hidden(self.model, row, neighbour)
        if not bool(packed.isfinite().all()):
            return None
        changed = _hidden(self.model, row, _other_media(neighbour))
        by_neighbour = mean_difference(packed[:length], changed[:length])
        if by_neighbour > NEIGHBOUR_BOUNDS[exact]:
            return f"the media of one row change the outputs of another one by {by_neighbour:.1e}"
        own_changed = _hidden(self.model, _other_media(row), neighbour)
        floats = [one.values for one in row.media.values() if one.values.is_floating_point()]
        has_values = any(bool(values.any()) for values in floats)
        if has_values and torch.equal(packed[:length], own_changed[:length]):
            return "the media of a row do not change its outputs: the model finds no placeholder tokens of them"
        alone = torch.cat([_hidden(self.model, row), _hidden(self.model, neighbour)])
        from_alone = mean_difference(packed, alone)
        if from_alone > BOUNDS[exact]:
            return f"two rows in one pack differ from the same two alone by {from_alone:.1e}"
        if not reference or length > MAX_REFERENCE_TOKENS:
            return ""
        from_reference = mean_difference(alone[:length], self.model.reference_hidden(row))
        if from_reference > BOUNDS[exact]:
            return f"hidden states differ from those of transformers' own forward by {from_reference:.1e}"
        return ""


def _kinds(batch: PackedBatch) -> set[str]:
    """The kinds of media that encoders read."""
    return {
        kind for kind, media in batch.media.items() if len(media.row_counts) and not media.is_target
    }


def _smallest_rows(batches: list[PackedBatch], kind: str) -> list[PackedBatch]:
    """The smallest rows with such media, with equal fields; enough for all trials."""
    rows: list[PackedBatch] = []
    for batch in batches:
        if kind in _kinds(batch):
            sequences = batch.media[kind].sequence_ids.unique().tolist()
            rows += [batch.select([sequence]) for sequence in sequences]
    rows.sort(key=lambda row: (len(_kinds(row)), row.num_tokens))
    names = rows[0].tensors().keys()
    return [row for row in rows if row.tensors().keys() == names][: 2 * TRIALS]


def _other_media(row: PackedBatch) -> PackedBatch:
    """The same row with other images, videos or audio of the same sizes."""
    media = {}
    for kind, one in row.media.items():
        values: Tensor = -one.values if one.values.is_floating_point() else one.values
        media[kind] = dataclasses.replace(one, values=values)
    return dataclasses.replace(row, media=media)
