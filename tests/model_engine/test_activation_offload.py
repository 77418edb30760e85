"""`model.activation_checkpointing=offload`: bit-equal to `full`; inputs of blocks on the host, in reused buffers."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from conftest import user_error
from tiny_engines import engine_of, no_host_sync, scores_of, sgd
from tiny_models import build_model, packs_of
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from mvp_engine.distributed import Layout, World
from mvp_engine.hf import LanguageModel
from mvp_engine.model_engine import FSDPEngine
from mvp_engine.model_engine.fsdp import parallelize
from mvp_engine.model_engine.fsdp.parallelize import HostInputs

BLOCKS = 5
WIDTH = 8


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x, scale=1.0):
        return x + scale * self.down(self.up(x).relu())


class Net(nn.Module):
    """Blocks that run twice in a forward, as those of an encoder; `change` is called with the input of each."""

    def __init__(self, width=WIDTH, blocks=BLOCKS, runs=2):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.runs = runs
        self.change = None
        self.by_name = False

    def forward(self, x):
        x = self.embed(x)
        for _ in range(self.runs):
            for layer in self.layers:
                y = layer(x=x) if self.by_name else layer(x)
                if self.change:
                    self.change(x)
                x = y
        return x.square().sum()


class Inputs(HostInputs):
    """Counts the buffers that were allocated and taken."""

    made: list[Inputs] = []  # noqa: RUF012

    def __init__(self, model):
        super().__init__(model)
        self.made.append(self)
        self.allocated = 0
        self.taken = 0

    def take(self, size, device):
        self.allocated += not any(len(one) >= size for one in self.free)
        self.taken += 1
        return super().take(size, device)

    @property
    def all_are_free(self):
        return self.host_bytes == sum(map(len, self.free))

    @property
    def free(self):
        return self._free + self._returned


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(parallelize, "SMALL", 64)
    monkeypatch.setattr(parallelize, "HostInputs", Inputs)
    monkeypatch.setattr(Inputs, "made", [])


def net_engine(mode, net=None, device="cpu", **how):
    layout = Layout(World(0, 1, 0, 1, torch.device(device)))
    settings = {"kind": FSDPEngine, "activation_checkpointing": mode, **how}
    return engine_of(net or Net(), layout, lambda model: sgd(model, 1e-3), **settings)


def rows_of(size, seed=0):
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(seed))


def train(engine, *batches):
    engine.train_batch(list(batches), lambda x: (engine.model(x), len(x)))


def trained(mode, rows, **how):
    """The weights after steps with micro-batches of so many rows."""
    engine = net_engine(mode, **how)
    for step, sizes in enumerate(rows):
        train(engine, *(rows_of(size, step) for size in sizes))
    return [param.detach().clone() for param in engine.model.parameters()]


def same(a, b):
    return all(map(torch.equal, a, b))


def test_offload_is_bit_equal_to_full_and_reuses_its_buffers(
    monkeypatch,
    lazy_streams,  # copies run as late as they may
):
    freed_early = []

    def free(self):
        copied = self.is_copied
        real_free(self)
        freed_early.append(copied.stream.done < copied.place)

    real_free = parallelize._Input.free_on_device
    monkeypatch.setattr(parallelize._Input, "free_on_device", free)
    rows = [[31, 32], [9, 32, 31], [32]]
    gc.disable()  # buffers are free without it
    try:
        assert same(trained("full", rows), trained("offload", rows))
    finally:
        gc.enable()
    inputs = Inputs.made[-1]
    calls = 2 * BLOCKS - 1  # the input of the last block stays
    assert (inputs.taken, inputs.allocated) == (6 * calls, calls)
    assert inputs.all_are_free
    assert freed_early == [False] * 6 * (calls - 1)
    [stream] = lazy_streams
    assert not stream.queue  # backward has waited for all
    trained("offload", [[32], [64]])  # a larger pack takes the place of the smaller one
    assert Inputs.made[-1].allocated == 2 * calls
    assert len(Inputs.made[-1].free) == calls


def test_offload_holds_two_inputs_on_the_device_and_prefetches_the_next(monkeypatch):
    class Counted(parallelize._Input):
        def __init__(self, *args):
            super().__init__(*args)
            alive.add(self)

        def use(self):
            prefetched.append(self.on_device is not None)
            found = super().use()
            count(found)
            return found

    def count(_):
        held.append(sum(one.on_device is not None for one in alive))

    alive = weakref.WeakSet()
    held = []
    prefetched = []
    monkeypatch.setattr(parallelize, "_Input", Counted)
    engine = net_engine("offload")
    engine.model.change = count
    train(engine, *[torch.ones(32, WIDTH)] * 2)
    assert max(held) == 2
    assert prefetched == [True] * 4 * BLOCKS
    assert not alive


@pytest.mark.parametrize("backend, by_name", [(None, False), (None, True), ("aot_eager", False)])
def test_offload_after_forward_has_two_inputs_in_memory(backend, by_name):
    inputs = []
    net = net_engine("offload", compile=backend).model
    net.by_name = by_name
    net.change = lambda x: inputs.append(StorageWeakRef(x.untyped_storage()))
    loss = net(torch.ones(32, WIDTH))
    assert [one.expired() for one in inputs] == [True] * (2 * BLOCKS - 2) + [False] * 2
    loss.backward()


def test_offload_of_compiled_blocks_is_bit_equal_to_full():
    full = trained("full", [[31, 32], [9]], compile="aot_eager")
    assert same(full, trained("offload", [[31, 32], [9]], compile="aot_eager"))
    assert Inputs.made[1].allocated == 2 * BLOCKS - 1


def test_offload_input_passed_by_name_and_evaluation_without_gradients():
    engine = net_engine("offload")
    engine.model.by_name = True
    with engine.eval_mode():
        engine.model(torch.ones(32, WIDTH))
    assert not Inputs.made[0].taken
    train(engine, torch.ones(32, WIDTH))
    assert Inputs.made[0].taken == 2 * BLOCKS - 1
    train(engine, torch.ones(1, WIDTH))  # small inputs stay
    assert Inputs.made[0].taken == 2 * BLOCKS - 1


def several_forwards(mode, loss_of):
    """Gradients where forwards and backwards are not in turn, as of preference pairs."""
    net = net_engine(mode).model
    a, b, c = rows_of(32), rows_of(48, 1), rows_of(16, 2)
    if loss_of == "sum":
        (net(a) + 2 * net(b)).backward()
    elif loss_of == "each":
        losses = [net(a), net(b), net(c)]
        losses[0].backward()
        with torch.no_grad():
            net(b)
        losses[2].backward()
        last = net(a)
        losses[1].backward()
        last.backward()
    else:
        kept = net(a)
        kept.backward(retain_graph=True)
        net(b)  # without backward
        net(c).backward()
        kept.backward()
    return [param.grad for param in net.parameters() if param.grad is not None]


@pytest.mark.parametrize("loss_of", ["sum", "each", "twice"])
def test_offload_of_several_forwards_before_their_backwards_is_bit_equal_to_full(
    loss_of, lazy_streams
):
    assert same(several_forwards("full", loss_of), several_forwards("offload", loss_of))
    assert Inputs.made[-1].all_are_free
    assert not lazy_streams[0].queue


def test_offload_buffers_are_the_smallest_that_fit():
    inputs = Inputs(nn.Module())
    device = torch.device("cpu")
    buffers = {size: inputs.take(size, device) for size in (3072, 1024, 2048)}
    for size in (3072, 1024, 2048):
        inputs.give_back(buffers.pop(size))
    assert [len(inputs.take(size, device)) for size in (2000, 2500, 1000)] == [2048, 3072, 1024]
    assert inputs.host_bytes == 6144


def test_offload_without_host_memory_is_an_error(monkeypatch):
    on_meta = lambda shape, *_: torch.empty(shape, device="meta")  # noqa: E731
    monkeypatch.setattr(parallelize, "available_host_memory", lambda: 5 * 2**30)
    monkeypatch.setattr(parallelize, "pinned_zeros", on_meta)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    device = torch.device("cuda")
    inputs = HostInputs(nn.Module())
    assert len(inputs.take(2**30, device)) == 2**30
    with user_error(r"has 1.0 GiB of inputs .* and 5.0 GiB are left for more on 4 ranks"):
        inputs.take(2**31, device)


def test_offload_after_interrupted_forward_and_backward_has_all_buffers(lazy_streams):
    expected = trained("full", [[32]])
    engine = net_engine("offload")
    net = engine.model
    batch = rows_of(32)
    calls = 0

    def fail(x):
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    for interrupt in (fail, lambda x: x.register_hook(fail)):  # in forward, in backward
        net.change = interrupt
        calls = 0
        with pytest.raises(KeyboardInterrupt):
            engine.forward_backward_batch([batch], lambda x: (net(x), len(x)))
        engine.optimizer_zero_grad()
        gc.collect()
        assert Inputs.made[-1].all_are_free
        assert not lazy_streams[0].queue  # copies were waited for before their memory was freed
    net.change = None
    train(engine, batch)
    assert same(expected, [param.detach() for param in net.parameters()])
    assert Inputs.made[-1].allocated == 2 * BLOCKS - 1


def test_offload_input_saved_in_two_shapes_is_copied_once_per_backward(monkeypatch):
    copies = []
    real = parallelize._Input.copy_to_device

    def copy(self):
        copies.extend([self] * (self.on_device is None))
        real(self)

    monkeypatch.setattr(parallelize._Input, "copy_to_device", copy)
    weight = torch.ones(WIDTH, requires_grad=True)
    product = lambda x: (x * weight + x.view(-1, 2, WIDTH // 2).square().view_as(x)).clone()  # noqa: E731
    block = HostInputs(nn.Module()).offloading(product)  # saves its input with two shapes
    x = torch.ones(32, WIDTH, requires_grad=True).clone()
    for _ in range(4):
        x = block(x)
    x.sum().backward(retain_graph=True)
    assert len(copies) == 2  # the inputs of the last two blocks are still on the device
    x.sum().backward()
    assert len(copies) == 2 + 3  # that of the last block never left


def test_offload_of_blocks_with_two_inputs_in_one_storage_keeps_them_apart():
    """As of blocks with a text and an image stream, which are slices of one tensor."""
    weight = torch.ones(WIDTH, requires_grad=True)
    block = lambda x, y: (x * y * weight).clone()  # noqa: E731
    both = torch.randn(2, 32, WIDTH)
    found = []
    for call in (block, HostInputs(nn.Module()).offloading(block)):
        x, y = both.clone().requires_grad_().clone()
        out = call(x, y)
        for _ in range(2):
            out = call(out, y)
        found.append([*torch.autograd.grad(out.sum(), (x, y, weight))])
    assert same(*found)


def test_offload_input_changed_in_place_raises():
    engine = net_engine("offload")
    engine.model.change = lambda x: x.detach().add_(1)
    message = "input of a block was changed in place after the block had read it"
    with user_error(message):
        train(engine, torch.ones(32, WIDTH))


@pytest.mark.usefixtures("lazy_streams")
def test_offload_of_parts_is_bit_equal_to_full():
    found = []
    for mode in ("full", {"vision": "offload", "llm": "offload"}):
        model = build_model(LanguageModel, "qwen3_vl")
        packs = packs_of(model, "qwen3_vl", [[2, 1], [1, 0, 1]], [])
        engine = engine_of(model, activation_checkpointing=mode)
        engine.forward_backward_batch(packs, scores_of(engine, entropy=0.0))
        found.append([param.grad for param in engine.model.parameters() if param.grad is not None])
    assert same(*found)
    assert Inputs.made[1].taken > 4


# ---- On a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "inductor"])
def test_offload_on_gpu_is_bit_equal_to_full_with_less_memory_and_no_host_sync(
    backend, monkeypatch
):
    monkeypatch.setattr(parallelize, "SMALL", 2**20)
    blocks, rows, width = 12, 16384, 1024
    size = 4 * rows * width
    peaks = []
    results = []
    g = torch.Generator().manual_seed(0)
    batches = [torch.randn(rows, width, generator=g).pin_memory() for _ in range(2)]
    for mode in ("full", "offload"):
        before = torch.cuda.memory_allocated()
        engine = net_engine(mode, Net(width, blocks, runs=1), "cuda", compile=backend)
        loss = lambda x, net=engine.model: (net(x), x.numel())  # noqa: E731
        for _ in range(3):  # allocate and compile
            engine.train_batch(batches, loss)
        engine.optimizer_zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with no_host_sync():
            engine.forward_backward_batch(batches, loss)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        params = list(engine.model.parameters())
        results.append(
            [one for param in params for one in (param.detach().cpu(), param.grad.cpu())]
        )
        del engine, loss, params
        gc.collect()
    assert all(one.isfinite().all() for one in results[0])
    assert same(*results)
    inputs = Inputs.made[-1]
    assert inputs.taken == 8 * (blocks - 1)
    assert inputs.allocated == blocks - 1
    assert all(buffer.is_pinned() for buffer in inputs.free)
    assert peaks[0] - peaks[1] >= (blocks - 3) * size, [peak / size for peak in peaks]
