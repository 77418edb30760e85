"""Optimizer states on the host, streamed in buckets: bit-equal updates, checkpoints, and what is on the device."""

from __future__ import annotations

import contextlib
import gc
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from conftest import user_error
from families import parallel
from test_optim import IDS, contents, loss_of, net, same, settings, train
from test_optim_ranks import ONE_RANK, engine, gathered, steps
from torch import nn

from mvp_engine.checkpoint.format import Reader
from mvp_engine.distributed import Layout, World
from mvp_engine.kit import OptimKit
from mvp_engine.kit.optim import state_stream
from mvp_engine.kit.optim.state_stream import (
    ALIGNED_ELEMENTS,
    SLOTS,
    Bucket,
    StateStream,
    make_buckets,
)
from mvp_engine.model_engine import FSDPEngine, Settings
from mvp_engine.model_engine.fsdp.base_engine import move_optimizer
from mvp_engine.ops import host_memory

KINDS = [
    {"state_dtype": "float32"},
    {"state_dtype": "bfloat16"},
    {"state_dtype": "int8"},
    {"name": "muon"},
]


class Watched(StateStream):
    """A stream that notes loads and stores, and overwrites a buffer as soon as it may be reused."""

    log: ClassVar[
        list[tuple[str, int, int]]
    ] = []  # (what, number of the bucket, address of its buffer)
    seen: ClassVar[list[Bucket]] = []

    def _load(self, bucket, slot):
        self.seen.append(bucket)
        self.log.append(("load", len(self.seen), slot.buffer.data_ptr()))
        staged = super()._load(bucket, slot)
        object.__setattr__(staged, "number", len(self.seen))
        return staged

    def _store(self, staged):
        super()._store(staged)
        self.log.append(("store", staged.number, staged.slot.buffer.data_ptr()))
        staged.slot.buffer.fill_(255)


def use_tiny_buckets():
    """Let a CPU be a device with a host: states are copied, and everything is larger than a bucket."""
    state_stream.is_host = lambda device: False
    state_stream.SMALL = 12
    state_stream.BUCKET_BYTES = 2048


@pytest.fixture
def on_host(monkeypatch):
    for name in ("is_host", "SMALL", "BUCKET_BYTES"):
        monkeypatch.setattr(state_stream, name, getattr(state_stream, name))
    use_tiny_buckets()


def trained(num_steps, **options):
    model = net()
    optimizer = OptimKit(settings(**options), seed=5).build_optimizer(model)
    train(model, optimizer, num_steps)
    return model, optimizer


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("options", KINDS, ids=lambda options: "-".join(options.values()))
def test_offloaded_states_give_bit_equal_weights_and_states(options, monkeypatch):
    monkeypatch.setattr("mvp_engine.kit.optim.optimizer.StateStream", Watched)
    monkeypatch.setattr(Watched, "log", [])
    monkeypatch.setattr(Watched, "seen", [])
    expected = trained(4, ema=0.9, **options)
    assert not Watched.log
    found = trained(4, ema=0.9, offload=True, **options)
    assert same(contents(*expected), contents(*found))
    optimizer = found[1]
    on_host = [param for param in optimizer.state if optimizer.is_offloaded(param)]
    states = [(name, value) for param in on_host for name, value in optimizer.state[param].items()]
    counted = [value.nbytes for name, value in states if not name.endswith(("step", "_scales"))]
    assert optimizer.host_bytes == sum(counted) > 0
    assert len(Watched.seen) > 4 * SLOTS  # several buckets in each step
    held = {}  # the bucket in each buffer
    for what, number, buffer in Watched.log:
        if what == "load":
            assert buffer not in held, "a buffer is loaded before its bucket is stored"
            held[buffer] = number
            # One is updated, one is loaded; the third is being stored.
            assert len(held) <= SLOTS - 1
        else:
            assert held.pop(buffer) == number
    assert not held


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("options", KINDS[::3], ids=lambda options: "-".join(options.values()))
def test_offloaded_states_on_streams_that_are_late_are_waited_for(options, lazy_streams):
    expected, found = (trained(4, ema=0.9, offload=late, **options) for late in (False, True))
    assert same(contents(*expected), contents(*found))
    assert len(lazy_streams) == 2
    assert all(stream.done > 100 for stream in lazy_streams)
    assert not any(stream.queue for stream in lazy_streams)  # the step has waited for all of them


@pytest.mark.usefixtures("on_host")
def test_offloaded_states_of_a_skipped_step_do_not_change():
    model, optimizer = trained(2, offload=True, ema=0.9)
    before = contents(model, optimizer)
    optimizer.found_inf = torch.ones(())
    optimizer.grad_scale = torch.ones(())
    optimizer.step()
    assert same(before, contents(model, optimizer))
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    after = contents(model, optimizer)
    assert all(float(after[name]) == 3 for name in after if name.endswith("/step"))


@pytest.mark.usefixtures("on_host")
def test_buckets_hold_all_rows_once_and_slices_are_aligned():
    shapes = [(100, 7), (3, 5, 64), (1000,), (16, 256), (2, 4)]
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    states = [
        (param, {"a": torch.zeros_like(param), "b": torch.zeros_like(param)}) for param in params
    ]
    buckets = list(make_buckets({}, states, can_slice=lambda param: True))
    rows = {param: [] for param in params}
    for bucket in buckets:
        at_least = max(ALIGNED_ELEMENTS * 64 * 8, state_stream.BUCKET_BYTES)
        assert bucket.num_bytes <= state_stream.BUCKET_BYTES or len(bucket.slices) == 1
        assert bucket.num_bytes <= at_least + 2 * state_stream.ALIGNED_BYTES
        for one in bucket.slices:
            row_elements = one.param[0].numel()
            assert one.rows.start * row_elements % ALIGNED_ELEMENTS == 0
            assert one.is_last == (one.rows.stop == len(one.param))
            rows[one.param] += range(one.rows.start, one.rows.stop)
    assert all(found == list(range(len(param))) for param, found in rows.items())
    assert len(buckets) > len(shapes)
    whole = list(make_buckets({}, states, can_slice=lambda param: False))
    assert [one.param for bucket in whole for one in bucket.slices] == params


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("first", [False, True], ids=["resumed with offload", "resumed without"])
def test_checkpoint_of_one_mode_is_that_of_the_other_and_resumes_it(tmp_path, first):
    options = {"ema": 0.9, "state_dtype": "int8"}
    made = {offload: engine(ONE_RANK, {**options, "offload": offload}) for offload in (False, True)}
    for offload, one in made.items():
        steps(one.model, one.optimizer, 0, 3)
        one.save_checkpoint(tmp_path / str(offload))
    without = Reader(tmp_path / "False")
    offloaded = Reader(tmp_path / "True")
    index = "index.jsonl"  # names, dtypes and places of all tensors
    assert (without.folder / index).read_bytes() == (offloaded.folder / index).read_bytes()
    assert all(torch.equal(without.read(name), offloaded.read(name)) for name in without.entries)

    resumed = engine(ONE_RANK, {**options, "offload": not first})
    resumed.load_checkpoint(tmp_path / str(first))
    steps(resumed.model, resumed.optimizer, 3, 5)
    steps(made[first].model, made[first].optimizer, 3, 5)
    expected = gathered(made[first])
    found = gathered(resumed)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.usefixtures("on_host")
def test_offloaded_states_are_loaded_with_another_dtype():
    model, optimizer = trained(2, state_dtype="float32")
    found = []
    for offload in (False, True):
        other = OptimKit(settings(state_dtype="bfloat16", offload=offload)).build_optimizer(model)
        other.load_state_dict(optimizer.state_dict())
        found.append(contents(model, other))
    assert same(*found)


@pytest.mark.usefixtures("on_host")
def test_offloaded_states_with_clipping_and_frozen_parameters_train_alike():
    found = []
    for offload in (False, True):
        options = Settings(clip_grad_norm=0.05, freeze=("layers.0.*",))
        made = FSDPEngine(net(), Layout.of(ONE_RANK, parallel()), options)
        made.initialize(OptimKit(settings(offload=offload)).build_optimizer)
        norms = []
        for _ in range(3):
            numbers = made.train_batch(
                [IDS], lambda ids, model=made.model: (11 * loss_of(model), 11)
            )
            norms.append(float(numbers.grad_norm))
        assert min(norms) > 0.05  # clipped
        found.append(contents(made.model, made.optimizer))
    assert same(*found)


def two_ranks(options):
    use_tiny_buckets()
    world = World.join("cpu")
    found = []
    for offload in (False, True):
        made = engine(world, {**options, "offload": offload})
        steps(made.model, made.optimizer, 0, 3)
        found.append(gathered(made))
    world.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"ema": 0.9}, {"name": "muon"}], ids=["adamw", "muon"])
def test_offloaded_states_on_two_shards_are_bit_equal(ranks2, options):
    for expected, found in ranks2.run(two_ranks, options):
        assert same(expected, found)


@pytest.mark.usefixtures("on_host")
def test_offload_that_exceeds_the_host_memory_is_an_error(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(state_stream, "available_host_memory", lambda: 2**16)
    with user_error(r"optim.offload keeps .* GiB .* for 4 of its ranks"):
        OptimKit(settings(offload=True)).build_optimizer(net())


def test_available_host_memory_is_less_than_that_of_the_machine():
    available = host_memory.available_host_memory()
    assert available is not None
    assert 0 < available <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_available_host_memory_of_a_container_counts_file_cache_as_free(tmp_path):
    cgroup = replace(host_memory.CGROUPS[0], folder=tmp_path)
    assert cgroup.available() is None  # another version
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup.available() is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 100\nfile 600\nshmem 50\n")
    assert cgroup.available() == 1000 - 700 + 600 - 50


def test_pinned_memory_is_registered_exactly_and_unregistered_when_freed(
    monkeypatch,
):
    registered = {}
    codes = [0, 2]

    def register(address, size, flags):
        registered[address] = size
        return codes.pop(0)

    events = []

    def unregister(address):
        events.append("unregister")
        del registered[address]

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    synchronized = []  # devices
    monkeypatch.setattr(
        torch.cuda, "device", lambda device: contextlib.nullcontext(synchronized.append(device))
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("synchronize"))
    zeros = host_memory.pinned_zeros((5, 7), torch.bfloat16, "optim.offload", "")
    assert (zeros.shape, zeros.dtype, registered) == (
        (5, 7),
        torch.bfloat16,
        {zeros.data_ptr(): 70},
    )
    assert not zeros.any()
    view = zeros[1:3]
    view.fill_(2.0)
    assert float(zeros.sum()) == 28
    del zeros
    gc.collect()
    assert registered  # a view needs it
    del view
    gc.collect()
    assert not registered
    assert synchronized == [3]  # of the thread that allocated it
    assert events == ["synchronize", "unregister"]  # a copy may still read it
    with user_error("cannot be pinned"):
        host_memory.pinned_zeros((5, 7), torch.bfloat16, "optim.offload", "")


@pytest.mark.usefixtures("on_host")
def test_move_optimizer_leaves_offloaded_states_where_they_are():
    _, optimizer = trained(1, offload=True)
    before = {param: dict(state) for param, state in optimizer.state.items()}
    move_optimizer(optimizer, torch.device("meta"))
    for param, state in optimizer.state.items():
        for name, value in state.items():
            stays = name != "step" and optimizer.is_offloaded(param)
            assert (value is before[param][name]) == stays
            assert value.device.type == ("cpu" if stays else "meta")


def test_offload_on_a_cpu_keeps_states_as_they_are():
    model, optimizer = trained(2, offload=True)
    assert optimizer._stream is None
    assert same(contents(*trained(2)), contents(model, optimizer))


# ---- On a GPU -----------------------------------------------------------------------------------------------------


def large(device, layers=6, width=3000):
    torch.manual_seed(0)
    model = nn.Module()
    # Blocks, which Muon updates.
    model.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
    return model.to(device)


def updated(model, optimizer, num_steps):
    for step in range(num_steps):
        generator = torch.Generator("cuda").manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator, device="cuda")
        optimizer.grad_scale = torch.full((), 2.0, device="cuda")
        optimizer.found_inf = torch.full((), float(step == 2), device="cuda")
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("options", KINDS, ids=lambda options: "-".join(options.values()))
def test_offload_on_gpu_is_bit_equal_and_needs_less_memory(options, monkeypatch):
    monkeypatch.setattr(state_stream, "BUCKET_BYTES", 2**24)
    peaks = []
    results = []
    for offload in (False, True):
        held = torch.cuda.memory_allocated()
        model = large("cuda")
        optimizer = OptimKit(settings(offload=offload, ema=0.99, **options)).build_optimizer(model)
        updated(model, optimizer, 2)  # creates the states
        torch.cuda.reset_peak_memory_stats()
        updated(model, optimizer, 5)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - held)
        states = [value for state in optimizer.state.values() for value in state.values()]
        results.append([tensor.cpu() for tensor in (*model.parameters(), *states)])
        if offload:
            on_host = [value for value in states if value.numel() >= state_stream.SMALL]
            assert all(value.device.type == "cpu" and value.is_pinned() for value in on_host)
            size = sum(value.nbytes for value in on_host)
        del model, optimizer, states
        gc.collect()
        torch.cuda.empty_cache()
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
    assert peaks[1] < peaks[0] - 0.5 * size, (peaks, size, held)
