"""LockstepScheduler: dummies keep ranks in lockstep, and a planned loader needs no host all-gather for them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from conftest import CAMPAIGN, ROOT, TINY
from tiny_engines import ALONE, adamw, engine_of, message_of
from transformers.modeling_outputs import BaseModelOutput

from mvp_engine.checkpoint.format import from_bytes, to_bytes
from mvp_engine.data.batch import IGNORE, Media, PackedBatch
from mvp_engine.data.loader import StepPlan
from mvp_engine.model_engine.fsdp.lockstep import (
    LockstepScheduler,
    _cut,
    append_dummies,
    media_kinds,
)

IMAGE, SOUND = "pixel_values", "input_features"


def packed(length, *kinds, axes=0):
    """One sequence with one item of each kind."""
    media = {kind: Media(torch.ones(2, 3), torch.tensor([2]), torch.tensor([0])) for kind in kinds}
    positions = torch.arange(length).expand(axes, -1) if axes else torch.arange(length)
    return PackedBatch.from_sequences(
        [torch.arange(3, 3 + length)], position_ids=[positions], media=media
    )


def test_lockstep_batch_join_appends_dummies_on_the_axes_of_the_batch():
    batch = append_dummies(packed(6, axes=4), [packed(3)])
    assert batch.join().position_ids.shape == (4, 9)
    assert batch.num_tokens == 6


def test_lockstep_batch_select_and_replace_keep_the_dummies():
    dummy = packed(3, IMAGE)
    batch = append_dummies(PackedBatch.concat([packed(4), packed(5)]), [dummy])
    assert batch.select([1]).dummies == [dummy]
    without_labels = dataclasses.replace(batch, labels=torch.full_like(batch.labels, IGNORE))
    assert without_labels.dummies == [dummy]


def test_lockstep_batch_moved_to_a_device_was_joined_on_the_host():
    batch = append_dummies(PackedBatch.concat([packed(3), packed(2)]), [packed(4)])
    moved = batch.to("meta")  # like a GPU whose values must not be read
    joined = moved.join()
    assert (joined.num_tokens, joined.max_seqlen, joined.input_ids.device.type) == (9, 4, "meta")
    assert joined.host_input_ids is not None
    assert joined.host_input_ids.equal(batch.join().input_ids)


def test_lockstep_batch_changed_after_the_copy_is_joined_again():
    batch = append_dummies(PackedBatch.concat([packed(3), packed(2)]), [packed(4)])
    replaced = batch.to("cpu", non_blocking=True)
    replaced.input_ids = replaced.input_ids.clone().fill_(1)
    assert replaced.join().input_ids[:5].tolist() == [1] * 5
    in_place = batch.to("cpu")
    in_place.labels[:] = IGNORE
    assert in_place.join().labels[:5].tolist() == [IGNORE] * 5


def test_engine_state_has_the_dummies_so_that_a_resumed_step_is_of_the_same_size():
    """Of another size, experts and GEMMs would round differently."""
    first, second = (engine_of("qwen3", optimizer=adamw) for _ in "12")
    pack = PackedBatch.concat([packed(40, IMAGE, axes=3), packed(5, IMAGE, axes=3)])
    first.lockstep.dummies = {IMAGE: pack.select([1])}
    second.load_state_dict(from_bytes(to_bytes(first.state_dict())))
    given, found = (engine.lockstep.dummies[IMAGE] for engine in (first, second))
    assert torch.equal(found.input_ids, given.input_ids)
    assert torch.equal(found.position_ids, given.position_ids)
    assert found.media.keys() == given.media.keys()
    assert torch.equal(found.media[IMAGE].values, given.media[IMAGE].values)
    before = first.state_dict()
    del before["dummies"]  # a checkpoint of an earlier version
    second.load_state_dict(before)
    assert second.lockstep.dummies == {}


def test_cut_keeps_the_type_of_outputs():
    class Pair(NamedTuple):
        tokens: torch.Tensor
        scalar: torch.Tensor

    pair = _cut(Pair(torch.arange(5), torch.tensor(1.0)), {5: 3})
    assert isinstance(pair, Pair)
    assert pair.tokens.tolist() == [0, 1, 2]
    output = _cut(BaseModelOutput(last_hidden_state=torch.zeros(5, 2)), {5: 3})
    assert output.last_hidden_state.shape == (3, 2)
    per_token, per_sequence = torch.zeros(5), torch.zeros(2, 4)
    both = _cut({"tokens": per_token, "actions": per_sequence}, {2: 1, 5: 3})
    assert [len(value) for value in both.values()] == [3, 1]


def test_scheduler_adds_one_token_dummies_without_placeholders_for_ulysses_ranks():
    layout = dataclasses.replace(ALONE)
    object.__setattr__(layout, "sequence_size", 6)  # as seen by the scheduler alone
    batch = packed(4, IMAGE)
    (scheduled,) = LockstepScheduler(layout).step([batch])
    dummies = scheduled.micro_batch.dummies
    assert [dummy.input_ids.tolist() for dummy in dummies] == [[6], [6]]  # the last token
    assert all(int(dummy.num_loss_tokens) == 0 and not media_kinds(dummy) for dummy in dummies)


def dummies_of(scheduled):
    dummies = getattr(scheduled.micro_batch, "dummies", [])
    return [sorted(media_kinds(dummy)) for dummy in dummies]


HELD = [
    [packed(5, IMAGE), packed(4)],
    [packed(7)],
    [],
    [packed(6, SOUND), packed(3, IMAGE), packed(8)],
]


def schedule(layout, planned):
    scheduler = LockstepScheduler(layout)
    plan = StepPlan(tuple(tuple(media_kinds(one) for one in of_rank) for of_rank in HELD))
    found = []
    for _ in range(2):  # in the second step the dummies are known
        for one in scheduler.step(HELD[layout.world.rank], plan if planned else None):
            found.append((one.is_dummy, one.micro_batch.input_ids.tolist(), dummies_of(one)))
    return found


def test_scheduler_with_a_plan_schedules_what_it_schedules_by_all_gather(on_ranks):
    gathered = on_ranks({"shard": 4}, schedule, False)
    assert on_ranks({"shard": 4}, schedule, True) == gathered
    assert [len(of_rank) for of_rank in gathered] == [6] * 4
    by_ids = {tuple(one.input_ids.tolist()): one for of_rank in HELD for one in of_rank}
    for step in range(3):  # every rank runs the same encoders in each forward
        kinds = set()
        for rank, of_rank in enumerate(gathered):
            is_dummy, ids, dummies = of_rank[step]
            batch = by_ids[tuple(ids)] if is_dummy else HELD[rank][step]
            kinds.add(frozenset(media_kinds(batch)).union(*dummies))
        assert len(kinds) == 1, kinds


def step_with_other_batches(layout):
    """Rank 1 has two micro-batches, and the plan says one."""
    batches = [packed(4), packed(5)] if layout.world.rank else [packed(3)]
    LockstepScheduler(layout).step(batches, StepPlan(((frozenset(),), (frozenset(),))))


def test_scheduler_with_micro_batches_that_do_not_fit_the_plan_raises(on_ranks):
    fine, wrong = on_ranks({"shard": 2}, message_of, step_with_other_batches)
    assert fine == ""
    assert "set ctx.plan = None there, on all ranks" in wrong


def missing_image(layout, *kinds):
    """Rank 1 planned an image that failed to decode. `kinds`: those of the one dummy with images."""
    scheduler = LockstepScheduler(layout)
    scheduler.dummies = {kind: packed(3, *kinds) for kind in kinds}
    plan = StepPlan(((frozenset([IMAGE]),), (frozenset([IMAGE]),)))
    mine = packed(4) if layout.world.rank else packed(3, IMAGE)
    (one,) = scheduler.step([mine], plan)
    return dummies_of(one), set(media_kinds(one.micro_batch)).union(*dummies_of(one))


def test_scheduler_replaces_planned_media_that_failed_to_decode(on_ranks):
    results = on_ranks({"shard": 2}, missing_image)
    assert [dummies for dummies, _ in results] == [[], [[IMAGE]]]


def test_scheduler_runs_kinds_that_come_with_a_dummy_on_all_ranks(on_ranks):
    results = on_ranks({"shard": 2}, missing_image, IMAGE, SOUND)
    assert [kinds for _, kinds in results] == [{IMAGE, SOUND}] * 2


COLLECTIVES = (
    "all_gather_object",
    "broadcast_object_list",
    "all_reduce",
    "broadcast",
    "barrier",
    "isend",
)


def _host_collectives(config, words, steps):
    """Calls on gloo's host group in a training of `steps` steps."""
    from mvp_engine.engine.monitor import Meter
    from mvp_engine.launch import launch

    calls = Counter()
    keep_slowest = Meter.keep_slowest  # compares the times of 50 steps, or of those at the end
    real = {name: getattr(dist, name) for name in COLLECTIVES}

    def counted(name):
        def call(*args, **kwargs):
            group = kwargs.get("group")
            if group is not None and group is not dist.group.WORLD and name != "barrier":
                calls[name] += 1
            return real[name](*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counted(name))
    try:
        Meter.keep_slowest = lambda self, at_end=False: None
        words = [*words, f"train.max_steps={steps}", f"run_id=r{steps}"]
        assert launch(config, words) == 0
    finally:
        Meter.keep_slowest = keep_slowest
        for name, function in real.items():
            setattr(dist, name, function)
    return sum(calls.values())


DIGITS = ROOT / "recipes" / "digits_vlm" / "configs" / "train.yaml"
SMALL = "digits.drawings=1 digits.count=60 data.num_workers=0 data.global_batch_size=4".split()


@pytest.mark.slow
@pytest.mark.parametrize(
    "config, words",
    [
        (TINY, ["parallel.shard=2"]),
        (TINY, []),
        pytest.param(DIGITS, ["parallel.shard=2", *SMALL], marks=CAMPAIGN),
    ],
    ids=["module-shard", "module-replicate", "images-shard"],
)
def test_step_on_a_planned_loader_has_one_host_collective(ranks2, tmp_path, config, words):
    words = [*words, f"output_dir={tmp_path}", "eval.steps=null", "log.interval=1000"]
    words += ["checkpoint.interval=null", "log.backends=[]"]
    three, eight = (ranks2.run(_host_collectives, str(config), words, steps) for steps in (3, 8))
    assert [many - few for few, many in zip(three, eight, strict=True)] == [5, 5]
