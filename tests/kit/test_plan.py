"""Packing plan, pack loader and row costs: every row once, within the budget, full packs, equal on every rank."""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import CAMPAIGN, user_error
from templates.tiny import tokenizer
from tiny_vlm import chat, made, qwen3_vl, write

from mvp_engine.kit import MLLMData, MLLMDataKit
from mvp_engine.kit.data.encode import row_encoder
from mvp_engine.kit.data.pack import costs as costing
from mvp_engine.kit.data.pack import packer
from mvp_engine.kit.data.pack import packs as packing
from mvp_engine.kit.data.pack import plan as planning
from mvp_engine.kit.data.pack.packer import make_packs
from mvp_engine.kit.data.pack.packs import PackDataset, PackLoader
from mvp_engine.kit.data.pack.plan import make_plan


def lengths(rows, seed=0, most=4096):
    drawn = np.exp(np.random.default_rng(seed).normal(6, 1, rows))
    return np.clip(drawn, 32, most).astype(np.int64)


def planned(tokens, budget=8192, packs=8, seed=0):
    encoder = (tokens % 7 == 0) * tokens * 500
    sizes = {"budget": budget, "packs_per_step": packs, "first": np.array([0, len(tokens)])}
    shuffle = np.random.default_rng(seed)
    return make_plan(np.arange(len(tokens)), tokens, encoder, **sizes, shuffle=shuffle)


@pytest.mark.parametrize("budget", [4096, 8192, 16384])
@pytest.mark.parametrize("rows", [1, 3, 10_000])
def test_make_plan_any_rows_puts_each_row_in_one_pack_within_the_budget(rows, budget):
    tokens = lengths(rows)
    plan = planned(tokens, budget)
    packs = [plan.pack(i)[0][:, 1].tolist() for i in range(len(plan))]
    assert sorted(row for pack in packs for row in pack) == list(range(rows))
    assert all(0 < tokens[pack].sum() <= budget for pack in packs)
    assert all(plan.pack(i)[1].tolist() == tokens[pack].tolist() for i, pack in enumerate(packs))
    assert plan.steps == -(-len(packs) // 8)
    assert rows < 10_000 or plan.fill_ratio >= 0.99


def test_make_plan_300000_rows_takes_seconds_and_fills_packs():
    tokens, begun = lengths(300_000), time.process_time()
    assert planned(tokens).fill_ratio >= 0.99
    assert time.process_time() - begun < 60  # a few, on a machine with nothing else to do


def test_make_packs_row_larger_than_the_budget_raises():
    none = np.zeros(3, np.int64)
    assert sorted(make_packs(np.array([5, 5, 5], np.int64), none, 5)) == [[0], [1], [2]]
    for tokens in ([6], [0]):
        with pytest.raises(ValueError, match="do not fit"):
            make_packs(np.array(tokens, np.int64), none[:1], 5)


def test_make_plan_packs_of_a_step_are_sorted_by_work():
    tokens = lengths(20_000)
    plan = planned(tokens, packs=16)
    encoder = (tokens % 7 == 0) * tokens * 500
    work = np.array(
        [
            (tokens + encoder // planning.ENCODER_VALUES_PER_TOKEN)[plan.pack(i)[0][:, 1]].sum()
            for i in range(len(plan))
        ]
    )
    whole = work[: len(work) // 16 * 16].reshape(-1, 4, 4)  # step, micro-batch, rank
    assert (np.diff(whole.reshape(-1, 16), axis=1) <= 0).all()
    waste = 1 - whole.mean(2).sum() / whole.max(2).sum()
    mixed = np.random.default_rng(0).permutation(work)[: whole.size].reshape(-1, 4)
    # 1.8 % and 3.6 % of the time of all ranks.
    assert waste < 0.6 * (1 - mixed.mean(1).sum() / mixed.max(1).sum())


def realistic(rows, seed=0):
    """Tokens and encoder work: half text; the rest one image, several, or a video of 64 to 6,000 tokens."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(4, rows, p=[0.5, 0.35, 0.1, 0.05])
    several = rng.integers(2, 7, rows) * rng.integers(64, 512, rows)
    seen = np.choose(
        kind, [0 * kind, rng.integers(64, 1024, rows), several, rng.integers(1000, 6000, rows)]
    )
    said = np.exp(rng.normal(np.where(kind == 0, 6, 4.5), np.where(kind == 0, 1, 0.8))).astype(
        np.int64
    )
    return np.clip(said, 16, 8192 - seen) + seen, seen * 6144


def test_make_plan_one_pack_per_rank_balances_encoder_work():
    """Here 8 ranks wait 12 % of the time, and 32 % if packs are filled by size alone. A long video cannot be split."""
    tokens, encoder = realistic(12_000)
    sizes = {"budget": 8192, "packs_per_step": 8, "first": np.array([0, len(tokens)])}
    plan = make_plan(
        np.arange(len(tokens)), tokens, encoder, **sizes, shuffle=np.random.default_rng(0)
    )
    work = tokens + encoder // planning.ENCODER_VALUES_PER_TOKEN
    works = np.array(
        [work[plan.pack(i)[0][:, 1]].sum() for i in range(len(plan) // 8 * 8)]
    ).reshape(-1, 8)
    assert plan.fill_ratio >= 0.99
    assert 1 - works.mean(1).sum() / works.max(1).sum() < 0.15


@pytest.mark.parametrize("media", [0, 40_000])
def test_make_plan_one_pack_per_step_mixes_kinds_of_rows_like_random_order(media):
    """Packs filled by size alone hold rows of one kind: their shares would deviate by 0.30 to 0.38 here."""
    rng = np.random.default_rng(0)
    kind = rng.integers(0, 4, 20_000)
    tokens = np.clip(rng.normal(np.array([60, 90, 150, 300])[kind], 10), 16, 2000).astype(np.int64)
    encoder = (kind == 2) * media
    sizes = {"budget": 2048, "packs_per_step": 1, "first": np.arange(5) * len(kind)}
    samples = kind * len(kind) + np.arange(len(kind))
    shuffle = np.random.default_rng(0)
    plan = make_plan(samples, tokens, encoder, **sizes, shuffle=shuffle)
    whole = [i for i in range(len(plan)) if plan.pack(i)[1].sum() > 1024]
    shares = np.array(
        [np.bincount(plan.pack(i)[0][:, 0], plan.pack(i)[1], minlength=4) for i in whole]
    )
    drawn = np.array_split(rng.permutation(len(kind)), len(plan))
    random = np.array([np.bincount(kind[part], tokens[part], minlength=4) for part in drawn])
    spread, usual = ((one / one.sum(1, keepdims=True)).std(0).mean() for one in (shares, random))
    assert spread < 1.2 * usual
    assert plan.fill_ratio >= 0.99


# With a kit around it

WORDS = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
]


def write_texts(file, rows, seed=0):
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, rng.integers(1, 30))) for _ in range(rows)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def kit(folder, workers=0, **settings):
    given = {"sources": [{"path": str(folder / "a.jsonl")}, {"path": str(folder / "b.jsonl")}]}
    given |= {"pack_tokens": 256, "cache": str(folder / "cache"), **settings}
    given.setdefault("global_batch_tokens", 4 * given["pack_tokens"])
    return MLLMDataKit(MLLMData.model_validate(given), tokenizer("zephyr"), num_workers=workers)


def held_out(folder):
    drawn = np.random.default_rng(0)
    rows = [{"text": f"{i} " + "word " * int(drawn.integers(1, 60))} for i in range(200)]
    return made(write(folder / "a.jsonl", rows), tokenizer("zephyr"))


def test_loader_of_some_packs_draws_the_same_ones_for_any_ranks_seed_and_global_batch(
    tmp_path,
):
    kit = held_out(tmp_path)
    expected = None
    for world, packs, seed in ((1, 1, 0), (2, 8, 0), (3, 3, 5), (4, 32, 0)):
        found: list[int] = []
        for rank in range(world):
            options = {"rank": rank, "world_size": world, "seed": seed, "shuffle": False}
            for batch in kit.loader(global_batch_size=packs, max_packs=5, **options):
                found += batch.sequence_fields["sample"].tolist()
        expected = expected or sorted(found)
        assert sorted(found) == expected
    assert len(kit.dataset(global_batch_size=1)) > 10
    assert max(expected) - min(expected) > 100  # of the whole split


def test_pack_dataset_size_of_an_epoch_is_that_of_its_plan(tmp_path):
    loader = held_out(tmp_path).loader(global_batch_size=1)
    counted = [loader.steps_in_epoch(epoch) for epoch in range(12)]
    planned = []
    for epoch in range(12):
        loader.set_epoch(epoch)
        planned.append(loader.steps_per_epoch)
    assert counted == planned
    assert len(set(counted)) > 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("texts")
    write_texts(made / "a.jsonl", 150)
    write_texts(made / "b.jsonl", 60, seed=1)
    kit(made).dataset("train")
    return made


def steps(loaders, most=None):
    """The samples of each optimizer step, collected from all ranks, in the order of the packs."""
    found: list[list[list[int]]] = []
    for loader in loaders:
        for i, batch in enumerate(loader):
            step = i // loader.accumulation
            if step == most:
                break
            found += [[] for _ in range(step + 1 - len(found))]
            found[step].append(batch.sequence_fields["sample"].tolist())
    return [sorted(sample for pack in packs for sample in pack) for packs in found]


def test_pack_loader_each_epoch_has_every_row_once_in_another_order(folder):
    loader = kit(folder).loader("train", seed=3)
    first = steps([loader])
    loader.set_epoch(1)
    second = steps([loader])
    for epoch in (first, second):
        assert sorted(sample for step in epoch for sample in step) == list(range(210))
    assert len(second) == loader.steps_per_epoch
    assert first != second
    assert first == steps([kit(folder).loader("train", seed=3)])
    assert first != steps([kit(folder).loader("train", seed=4)])
    assert loader.dataset.plan.fill_ratio > 0.9


@pytest.mark.slow
@pytest.mark.parametrize(
    "workers, worlds",
    [
        (0, (1, 2, 4)),
        (0, (2, 1, 4)),
        (0, (4, 2, 1)),
        pytest.param(2, (1, 2, 4), marks=CAMPAIGN),
        pytest.param(2, (2, 1, 4), marks=CAMPAIGN),
        (2, (4, 2, 1)),
    ],
)
def test_pack_loader_resumed_twice_on_other_ranks_gives_the_uninterrupted_order(
    folder, worlds, workers
):
    made = kit(folder)
    straight = made.loader("train")
    straight.set_epoch(2)
    expected, got, state = steps([straight]), list[list[int]](), None
    for world, most in zip(worlds, (2, 1, None), strict=True):
        options: dict[str, Any] = {"world_size": world, "num_workers": workers if world < 4 else 0}
        loaders = [made.loader("train", rank=rank, **options) for rank in range(world)]
        for loader in loaders:
            loader.load_state_dict(state) if state else loader.set_epoch(2)
        if most is None:
            got += steps(loaders)
            break
        taken: list[list[int]] = [[] for _ in range(most)]
        for loader in loaders:
            iterator = iter(loader)
            for i in range(most * loader.accumulation):
                taken[i // loader.accumulation] += next(iterator).sequence_fields["sample"].tolist()
        got += [sorted(step) for step in taken]
        state = json.loads(json.dumps(loaders[-1].state_dict()))
        assert all(loader.state_dict() == state for loader in loaders)
    assert got == expected
    assert sorted(sample for step in got for sample in step) == list(range(210))


@pytest.mark.slow
def test_pack_loader_with_workers_or_resumed_gives_bit_equal_packs(folder):
    made = kit(folder)
    alone = list(made.loader("train"))
    assert all(a.equals(b) for a, b in zip(alone, made.loader("train", num_workers=2), strict=True))
    later = made.loader("train")
    later.load_state_dict({**later.state_dict(), "samples": 4})
    assert all(a.equals(b) for a, b in zip(alone[4:], later, strict=True))


def test_pack_loader_state_of_another_plan_raises(folder):
    state = kit(folder).loader("train").state_dict()
    for changed in (
        {"pack_tokens": 512},
        {"global_batch_tokens": 512},
        {"sources": [{"path": f"{folder}/a.jsonl"}]},
    ):
        with user_error("not what the checkpoint was trained with"):
            kit(folder, **changed).loader("train").load_state_dict(state)
    kit(folder).loader("train").load_state_dict(state)


def test_measure_costs_unchanged_data_uses_the_cache_and_changed_data_does_not(
    tmp_path, monkeypatch
):
    write_texts(tmp_path / "a.jsonl", 150)
    write_texts(tmp_path / "b.jsonl", 60, seed=1)
    measured: list[int] = []
    append = costing.Records.append

    def counted(records, found):
        measured.append(len(found.new_rows))
        append(records, found)

    monkeypatch.setattr(costing.Records, "append", counted)
    first = kit(tmp_path, workers=2).dataset("train").plan
    assert sum(measured) == 208  # two rows are in both files
    measured.clear()
    assert kit(tmp_path, pack_tokens=256).dataset("train").plan.digest == first.digest
    assert not measured
    # One process.
    assert kit(tmp_path, cache=str(tmp_path / "other")).dataset("train").plan.digest == first.digest
    measured.clear()
    write_texts(tmp_path / "b.jsonl", 61, seed=1)
    kit(tmp_path).dataset("train")
    assert sum(measured) == 1
    measured.clear()
    kit(tmp_path, limits={"max_frames": 3}).dataset("train")
    assert sum(measured) == 209


def test_cost_cache_key_changes_with_version_processor_template_and_limits_but_not_with_source_text(
    folder, monkeypatch
):
    def key(name="zephyr", **settings):
        given = {
            "sources": [{"path": str(folder / "a.jsonl")}],
            "pack_tokens": 256,
            **settings,
        }
        return MLLMDataKit(MLLMData.model_validate(given), tokenizer(name)).row_encoder.fingerprint

    first = key()
    for changed in (
        key("qwen2_5"),
        key(limits={"max_frames": 3}),
        key(template={"date": "today"}),
        key(pairs=True),
    ):
        assert changed != first
    with monkeypatch.context() as patched:
        patched.setattr(row_encoder, "ENCODER_VERSION", row_encoder.ENCODER_VERSION + 1)
        assert key() != first
    encoder = kit(folder).row_encoder

    def no_source_text(*_, **__):
        raise AssertionError("a source file was read")

    with monkeypatch.context() as patched:
        for owner, name in (
            (inspect, "getsource"),
            (Path, "read_text"),
            (Path, "read_bytes"),
            (builtins, "open"),
        ):
            patched.setattr(owner, name, no_source_text)
        assert encoder.fingerprint == first


def test_summary_before_the_first_step_has_steps_tokens_and_packs(folder):
    made = kit(folder)
    loader = made.loader("train")
    batches = list(loader)
    summary = made.summary("train")
    assert (
        f"{sum(batch.num_tokens for batch in batches):,} tokens in {len(batches)} packs of 256"
        in summary
    )
    assert f"{loader.steps_per_epoch} steps of 4" in summary
    assert "210 rows an epoch (a: 150, b: 60)" in summary
    assert "Bad rows: none" in summary


def test_mixture_by_repeats_or_weight_gives_the_rows_of_each_source(folder):
    paths = [str(folder / "a.jsonl"), str(folder / "b.jsonl")]
    twice = [{"path": paths[0]}, {"path": paths[1], "repeats": 2.0}]
    samples = [s for step in steps([kit(folder, sources=twice).loader("train")]) for s in step]
    assert np.bincount(samples).tolist() == [1] * 150 + [2] * 60
    halves = [{"path": path, "weight": 1.0} for path in paths]
    loader = kit(folder, sources=halves).loader("train")
    sources = np.concatenate([batch.sequence_fields["source"].numpy() for batch in loader])
    assert np.bincount(sources).tolist() == [105, 105]
    with pytest.raises(ValueError, match="repeats and weights do not mix"):
        kit(folder, sources=[{"path": paths[0], "weight": 1.0}, {"path": paths[1]}])


def test_pack_loader_sample_ids_name_file_and_line(folder):
    loader = kit(folder).loader("train", rank=1, world_size=2)
    batch = next(iter(loader))
    lines = [
        f"a.jsonl:{s + 1}" if s < 150 else f"b.jsonl:{s - 149}"
        for s in batch.sequence_fields["sample"].tolist()
    ]
    assert loader.sample_ids(0, 1) == lines


def test_pack_loader_started_early_gives_the_same_packs_and_ends_workers_that_nobody_takes(
    tmp_path,
):
    kit = made(
        write(tmp_path / "a.jsonl", [chat(f"Say {i}", "yes " * (i % 7 + 1)) for i in range(40)]),
        qwen3_vl(),
    )
    options: dict[str, Any] = {"global_batch_size": 2, "num_workers": 1}
    expected = [batch.input_ids.tolist() for batch in kit.loader("train", **options)]
    early = kit.loader("train", **options)
    with early.started():
        workers = early._first[1]._workers  # type: ignore[index]
        assert [batch.input_ids.tolist() for batch in early] == expected
        assert early._first is None
    workers[0].join(10)
    assert not workers[0].is_alive()
    moved = kit.loader("train", **options)
    with moved.started():  # for another place than that of a checkpoint
        workers = moved._first[1]._workers  # type: ignore[index]
        moved.load_state_dict({**moved.state_dict(), "samples": 2})
        assert [batch.input_ids.tolist() for batch in moved] == expected[2:]
    workers[0].join(10)
    assert not workers[0].is_alive()


# ---- Plans of many rows ----------------------------------------------------------------------------


@pytest.mark.parametrize("media", [False, True])
@pytest.mark.parametrize("window", [4, 32])
def test_windows_packed_together_give_the_packs_of_each_window(monkeypatch, media, window):
    tokens, encoder = realistic(6_000, seed=window) if media else (lengths(6_000), None)
    encoder = 0 * tokens if encoder is None else encoder
    found = []
    for most in (1, 10**9):
        monkeypatch.setattr(packer, "MIN_WINDOWS", most)
        monkeypatch.setattr(packer, "BATCH_ROWS", 2_500)  # several batches
        found.append(packer.packed_rows(tokens, encoder, 8192, window))
    assert len(found[0][1]) > 100
    for one, two in zip(*found, strict=True):
        assert np.array_equal(one, two)


class Counted:
    """An array that counts the bytes that are taken from it."""

    def __init__(self, array):
        self.array = array
        self.bytes = 0

    def __getitem__(self, part):
        found = self.array[part]
        self.bytes += found.nbytes
        return found

    def __len__(self):
        return len(self.array)


def synthetic(folder, rows=50_000):
    """A dataset of rows with costs in a file, and nothing else."""
    file = folder / "costs.npz"
    tokens = lengths(rows)
    tokens[::100] = 0
    encoder = (tokens % 7 == 0) * tokens * 500
    if not file.exists():
        costing.write_costs(file, costing.Costs(tokens, encoder, (encoder > 0).astype(np.uint8)))
    source = type("Rows", (), {"fingerprint": "rows", "__len__": lambda _: rows})()
    encoder = SimpleNamespace(max_tokens=4096, overlong="drop", media_names=frozenset)
    mixture = planning.Mixture([("rows", source, 1.0)])
    options = {"budget": 8192, "packs_per_step": 2048, "cache": folder}
    return PackDataset(mixture, [None], [costing.read_costs(file)], encoder, **options)


def test_stored_plan_is_that_of_memory_and_a_rank_reads_its_slice(tmp_path, monkeypatch):
    in_memory = synthetic(tmp_path)
    assert not list(tmp_path.glob("*.plan"))
    for module in (planning, packing):
        monkeypatch.setattr(module, "LARGE_ROWS", 1000)
    monkeypatch.setattr(costing, "MAPPED_BYTES", 1000)
    stored = synthetic(tmp_path)
    [_] = tmp_path.glob("*.plan")
    assert isinstance(stored.plan.samples, np.memmap)
    assert stored.plan.digest == in_memory.plan.digest
    assert dataclasses.replace(stored.plan, stored_digest=None).digest == in_memory.plan.digest
    for epoch in range(4):
        in_memory.set_epoch(epoch)
        stored.set_epoch(epoch)
        assert len(stored) == stored.epoch_size(epoch) == len(in_memory)
        assert stored.summary() == in_memory.summary()
        for packs in (0, 1, 1024, 1500, len(stored)):
            assert (stored.seen(packs) == in_memory.seen(packs)).all()
        for index in range(0, len(stored), 97):
            for one, two in zip(stored.plan.pack(index), in_memory.plan.pack(index), strict=True):
                assert (one == two).all()
            assert stored.media_kinds(index) == in_memory.media_kinds(index)
    assert len(list(tmp_path.glob("*.plan"))) == 3  # those of epochs that were used are removed
    # Another process makes nothing again, and reads the index and its slice.
    stored.set_epoch(3)
    monkeypatch.setattr(PackDataset, "_make_plan", None)
    rank = synthetic(tmp_path)
    rank.set_epoch(3)
    samples, tokens = Counted(rank.plan.samples), Counted(rank.plan.tokens)
    rank.plan = dataclasses.replace(rank.plan, samples=samples, tokens=tokens)
    size = samples.array.nbytes + tokens.array.nbytes
    loader = PackLoader(rank, None, "data", rank=517, world_size=1024)
    assert samples.bytes + tokens.bytes == 0  # at the start
    loader.step_plan(0)
    packs = [pack for batch in loader._micro_batches() for pack in batch]
    taken = [rank.plan.pack(pack) for pack in packs]
    assert taken
    assert samples.bytes + tokens.bytes < 3 * size / 1024
    state = loader.state_dict()
    assert samples.bytes + tokens.bytes < 3 * size / 1024
    loader.load_state_dict({**state, "samples": 2048})
    assert samples.bytes + tokens.bytes < size / 3  # what was seen since a mark
    # Other costs are another plan.
    costing.write_costs(tmp_path / "costs.npz", costing.read_costs(tmp_path / "costs.npz"))
    monkeypatch.undo()
    monkeypatch.setattr(packing, "LARGE_ROWS", 1000)
    before = len(list(tmp_path.glob("*.plan")))
    synthetic(tmp_path)
    assert len(list(tmp_path.glob("*.plan"))) > before
