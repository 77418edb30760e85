"""What a check finds out about model and loss after its steps: gradients that are missing, media that no step had, and
losses that depend on the split into micro-batches."""

from __future__ import annotations

import numpy as np
from torch import nn

from mvp_engine.errors import count
from mvp_engine.hf.action_model import ActionModel
from mvp_engine.hf.parts import parts_of
from mvp_engine.kit.data.pack.costs import MEDIA_BITS
from mvp_engine.kit.data.pack.packs import PackLoader
from mvp_engine.model_engine.fsdp.lockstep import media_kinds
from mvp_engine.tools.check.checked_engine import MAX_IDS, CheckedEngine
from mvp_engine.tools.check.record import CheckRecord
from mvp_engine.tools.check.splits import PAGE, batch_norms, compare_splits, explain

LORA_A = (".lora_A.weight", ".lora_A")  # ends of names


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
    names = engine.without_gradient()
    if isinstance(
        engine.model, ActionModel
    ):  # a training on actions alone leaves these as they are
        names = [name for name in names if name not in engine.model.text_parameters]
    if engine.step == 1:  # LoRA begins with B = 0, so that A has no gradient in the first step
        names = [name for name in names if not name.endswith(LORA_A)]
    record["without_gradient"] = names
    if not names:
        return
    total = sum(param.requires_grad for param in engine.model.parameters())
    record.warning(
        f"{len(names)} of {total} parameters that train got no gradient in {engine.step} steps: "
        f"{_by_part(engine.model, names)}. Is the loss computed without them, or do the rows of these steps lack "
        "their data (images, ...)? model.freeze freezes them"
    )


def _by_part(model: nn.Module, names: list[str]) -> str:
    """Parameter names for a message: first parts of the model that are complete, then some names."""
    parts = parts_of(model)
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    kept = {parts.get(name) for name in trained if name not in names}
    affected = {parts.get(name) for name in names}
    whole = [part for part in dict.fromkeys(parts.values()) if part in affected - kept]
    others = [name for name in names if parts.get(name) not in whole]
    more = [f"{len(others) - MAX_IDS} more"] if len(others) > MAX_IDS else []
    return ", ".join([*(f"all of {part}" for part in whole), *others[:MAX_IDS], *more])


def split_stage(record: CheckRecord, engine: CheckedEngine) -> None:
    """Does the loss depend on how the rows of a step are split into micro-batches?"""
    record.begin_stage("split")
    found = compare_splits(engine, engine.first_micro_batches or [])
    if norms := batch_norms(engine.model):
        kind = f"{type(norms[0]).__name__} module"
        record.warning(
            f"{count(len(norms), kind)} with statistics of one micro-batch of one rank: "
            f"results depend on data.micro_batch_size and the number of ranks. See {PAGE}"
        )
    if isinstance(found, str):
        record.end_stage(found)
        return
    record["split"] = found.facts()
    if found.exceeds:
        record.problem(explain(found))
    record.end_stage(found.summary(), ok=not found.exceeds)
