"""The small state of an FSDP engine in a checkpoint: learning-rate schedule, loss scale, spike statistics, counts
of experts, dummy sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from mvp_engine.data.batch import PackedBatch
from mvp_engine.data.media import Media

if TYPE_CHECKING:
    from mvp_engine.model_engine.fsdp.base_engine import FSDPBaseEngine


def state_dict(engine: FSDPBaseEngine) -> dict[str, Any]:
    schedule = engine.scheduler.state_dict()
    balance = engine.adapter.expert_balance
    schedule.pop("lr_lambdas", None)  # functions of the config, which is read again
    return {
        "scheduler": schedule,
        "scale": engine.loss_scale.state() if engine.loss_scale else None,
        "spikes": engine.spike_detector.state.tolist() if engine.spike_detector else None,
        "experts": balance.state() if balance else None,
        "dummies": saved_dummies(engine.lockstep.dummies),
    }


def load_state_dict(engine: FSDPBaseEngine, state: dict[str, Any]) -> None:
    if isinstance(engine.scheduler, LambdaLR):
        _load_lambda_schedule(engine.scheduler, engine.optimizer, state["scheduler"])
    else:
        engine.scheduler.load_state_dict(state["scheduler"])
    if engine.spike_detector and state.get("spikes"):
        spikes = engine.spike_detector.state.new_tensor(state["spikes"])
        engine.spike_detector.state = spikes
    if engine.adapter.expert_balance and state.get("experts"):
        engine.adapter.expert_balance.load_state(state["experts"])
    if engine.loss_scale and state["scale"]:
        engine.loss_scale.load_state(state["scale"])
    engine.lockstep.dummies = loaded_dummies(state.get("dummies", {}))


def _load_lambda_schedule(scheduler: LambdaLR, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """The position comes from the checkpoint; the learning rates from the config, which may have changed."""
    scheduler.last_epoch = state["last_epoch"]
    scheduler._step_count = state["_step_count"]
    groups = zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    for group, base, factor in groups:
        group["initial_lr"] = base
        group["lr"] = base * factor(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def learning_rates(optimizer: Optimizer) -> dict[str, float]:
    """`lr`, or `lr/<group>` for each parameter group where they differ."""
    groups = enumerate(optimizer.param_groups)
    rates = {str(group.get("name", index)): float(group["lr"]) for index, group in groups}
    if len(set(rates.values())) == 1:
        return {"lr": next(iter(rates.values()))}
    return {f"lr/{name}": rate for name, rate in rates.items()}


# The dummy sequences of a training as plain values, for its checkpoints.
#
# Ranks choose them from the data of the step that needs one first. A resumed run would choose others: routers and GEMMs
# of other sizes round differently.

_OF_BATCHES = "input_ids", "labels", "position_ids", "cu_seqlens", "token_fields", "sequence_fields"
_OF_MEDIA = "values", "row_counts", "sequence_ids", "fields", "shared_with"


def saved_dummies(dummies: Mapping[str, PackedBatch]) -> dict[str, Any]:
    """Tensors and dicts of them, by media kind."""
    saved: dict[str, Any] = {}
    for kind, batch in dummies.items():
        media = {
            name: {**_plain(one, _OF_MEDIA), "label_column": one.label_column}
            for name, one in batch.media.items()
        }
        saved[kind] = {**_plain(batch, _OF_BATCHES), "media": media}
    return saved


def loaded_dummies(saved: Mapping[str, Any]) -> dict[str, PackedBatch]:
    dummies: dict[str, PackedBatch] = {}
    for kind, one in saved.items():
        media = {name: Media(**fields) for name, fields in one["media"].items()}
        dummies[kind] = PackedBatch(**{**one, "media": media})
    return dummies


def _plain(one: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: _copied(getattr(one, name)) for name in names}


def _copied(value: Any) -> Any:
    """Without the rest of a batch, of which a tensor may be a view: it would be saved, too."""
    if isinstance(value, Tensor):
        return value.clone()
    return {name: _copied(one) for name, one in value.items()} if value is not None else None
