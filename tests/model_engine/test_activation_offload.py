"""`model.activation_checkpointing=offload`: bit-equal to `full`; inputs of blocks on the host, in reused buffers."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from lazy_streams import use_lazy_streams
from tiny_models import build_model, packs_of
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from mvp_engine.distributed import Layout, World
from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel
from mvp_engine.model_engine import FSDPEngine, LanguageModelEngine, Settings
from mvp_engine.model_engine.fsdp import activation_offload, parallelize
from mvp_engine.model_engine.fsdp.activation_offload import HostInputs

BLOCKS = 5
WIDTH = 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.down(self.up(x).relu())


class Net(nn.Module):
    """Blocks that run twice in a forward, as those of an encoder; `change` is called with the input of each."""

    def __init__(self, width: int = WIDTH, blocks: int = BLOCKS, runs: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.runs = runs
        self.change: Any = None
        self.by_name = False

    def forward(self, x: Tensor) -> Tensor:
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

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.made.append(self)
        self.allocated = 0
        self.taken = 0

    def take(self, size: int, device: torch.device) -> Tensor:
        self.allocated += not any(len(one) >= size for one in self.free)
        self.taken += 1
        return super().take(size, device)

    @property
    def all_are_free(self) -> bool:
        return self.host_bytes == sum(map(len, self.free))

    @property
    def free(self) -> list[Tensor]:
        return self._free + self._returned


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "SMALL", 64)
    monkeypatch.setattr(parallelize, "HostInputs", Inputs)
    monkeypatch.setattr(Inputs, "made", [])


def alone(device: str = "cpu") -> Layout:
    return Layout(World(0, 1, 0, 1, torch.device(device)))


def engine_of(model: nn.Module, mode: Any, device: str = "cpu", **how: Any) -> FSDPEngine:
    engine = FSDPEngine(model, alone(device), Settings(activation_checkpointing=mode, **how))
    engine.initialize(lambda model: torch.optim.SGD(model.parameters(), 1e-3))
    return engine


def trained(mode: str, rows: list[list[int]], **how: Any) -> list[Tensor]:
    """The weights after steps with micro-batches of so many rows."""
    engine = engine_of(Net(), mode, **how)
    for step, sizes in enumerate(rows):
        g = torch.Generator().manual_seed(step)
        batches = [torch.randn(size, WIDTH, generator=g) for size in sizes]
        engine.train_batch(batches, lambda x: (engine.model(x), len(x)))
    return [param.detach().clone() for param in engine.model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def test_offload_is_bit_equal_to_full_and_reuses_its_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = use_lazy_streams(monkeypatch)  # copies run as late as they may
    freed_early: list[bool] = []

    def free(self: Any) -> None:
        copied = self.is_copied
        real_free(self)
        freed_early.append(copied.stream.done < copied.place)

    real_free = activation_offload._Input.free_on_device
    monkeypatch.setattr(activation_offload._Input, "free_on_device", free)
    gc.disable()  # buffers are free without it
    try:
        rows = [[31, 32], [9, 32, 31], [32]]
        assert same(trained("full", rows), trained("offload", rows))
    finally:
        gc.enable()
    _, inputs = Inputs.made
    calls = 2 * BLOCKS - 1  # the input of the last block stays
    assert inputs.taken == 6 * calls
    assert inputs.allocated == calls
    assert inputs.all_are_free
    assert freed_early == [False] * 6 * (calls - 1)
    assert len(streams) == 1
    assert not streams[0].queue  # backward has waited for all
    assert trained("offload", [[32], [64]])
    assert (
        Inputs.made[-1].allocated == 2 * calls
    )  # a larger pack takes the place of the smaller one
    assert len(Inputs.made[-1].free) == calls


def test_offload_holds_two_inputs_on_the_device_and_prefetches_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Counted(activation_offload._Input):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            alive.add(self)

        def use(self) -> Tensor:
            prefetched.append(self.on_device is not None)
            found = super().use()
            count(found)
            return found

    def count(_: Tensor) -> None:
        on_device = [one for one in alive if one.on_device is not None]
        held.append(len(on_device))

    alive: weakref.WeakSet[Counted] = weakref.WeakSet()
    held: list[int] = []
    prefetched: list[bool] = []
    monkeypatch.setattr(activation_offload, "_Input", Counted)
    engine = engine_of(Net(), "offload")
    engine.model.change = count  # type: ignore[assignment]
    engine.train_batch([torch.ones(32, WIDTH)] * 2, lambda x: (engine.model(x), 1))
    assert max(held) == 2
    assert prefetched == [True] * 4 * BLOCKS
    assert not alive


@pytest.mark.parametrize(
    ("backend", "by_name"), [(None, False), (None, True), ("aot_eager", False)]
)
def test_offload_after_forward_has_two_inputs_in_memory(backend: str | None, by_name: bool) -> None:
    engine = engine_of(Net(), "offload", compile=backend)
    inputs: list[StorageWeakRef] = []
    net: Any = engine.model
    net.by_name = by_name
    net.change = lambda x: inputs.append(StorageWeakRef(x.untyped_storage()))
    loss = net(torch.ones(32, WIDTH))
    assert [one.expired() for one in inputs] == [True] * (2 * BLOCKS - 2) + [False] * 2
    loss.backward()


def test_offload_of_compiled_blocks_is_bit_equal_to_full() -> None:
    full = trained("full", [[31, 32], [9]], compile="aot_eager")
    assert same(full, trained("offload", [[31, 32], [9]], compile="aot_eager"))
    assert Inputs.made[1].allocated == 2 * BLOCKS - 1


def test_offload_input_passed_by_name_and_evaluation_without_gradients() -> None:
    engine = engine_of(Net(), "offload")
    engine.model.by_name = True  # type: ignore[assignment]
    with engine.eval_mode():
        engine.model(torch.ones(32, WIDTH))
    assert not Inputs.made[0].taken
    engine.train_batch([torch.ones(32, WIDTH)], lambda x: (engine.model(x), 1))
    assert Inputs.made[0].taken == 2 * BLOCKS - 1
    engine.train_batch([torch.ones(1, WIDTH)], lambda x: (engine.model(x), 1))  # small inputs stay
    assert Inputs.made[0].taken == 2 * BLOCKS - 1


def several_forwards(mode: str, loss_of: str) -> list[Tensor]:
    """Gradients where forwards and backwards are not in turn, as of preference pairs."""
    engine = engine_of(Net(), mode)
    net = engine.model
    g = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(rows, WIDTH, generator=g) for rows in (32, 48, 16))
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
    loss_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = several_forwards("full", loss_of)
    streams = use_lazy_streams(monkeypatch)
    assert same(full, several_forwards("offload", loss_of))
    assert Inputs.made[-1].all_are_free
    assert not streams[0].queue


def test_offload_buffers_are_the_smallest_that_fit() -> None:
    inputs = Inputs(nn.Module())
    device = torch.device("cpu")
    buffers = {size: inputs.take(size, device) for size in (3072, 1024, 2048)}
    for size in (3072, 1024, 2048):
        inputs.give_back(buffers.pop(size))
    assert [len(inputs.take(size, device)) for size in (2000, 2500, 1000)] == [2048, 3072, 1024]
    assert inputs.host_bytes == 6144


def test_offload_without_host_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "available_host_memory", lambda: 5 * 2**30)
    monkeypatch.setattr(
        activation_offload, "pinned_zeros", lambda shape, *_: torch.empty(shape, device="meta")
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    inputs = HostInputs(nn.Module())
    assert len(inputs.take(2**30, torch.device("cuda"))) == 2**30
    with pytest.raises(
        UserError, match=r"has 1.0 GiB of inputs .* and 5.0 GiB are left for more on 4 ranks"
    ):
        inputs.take(2**31, torch.device("cuda"))


def test_offload_after_interrupted_forward_and_backward_has_all_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = trained("full", [[32]])
    streams = use_lazy_streams(monkeypatch)
    engine = engine_of(Net(), "offload")
    net: Any = engine.model
    calls = [0]

    def fail(x: Tensor) -> None:
        calls[0] += 1
        if calls[0] == 4:
            raise KeyboardInterrupt

    g = torch.Generator().manual_seed(0)
    batch = torch.randn(32, WIDTH, generator=g)
    net.change = fail
    for interrupt in (fail, lambda x: x.register_hook(fail)):  # in forward, in backward
        net.change = interrupt
        calls[0] = 0
        with pytest.raises(KeyboardInterrupt):
            engine.forward_backward_batch([batch], lambda x: (net(x), len(x)))
        engine.optimizer_zero_grad()
        gc.collect()
        assert Inputs.made[-1].all_are_free
        assert not streams[0].queue  # copies were waited for before their memory was freed
    net.change = None
    engine.train_batch([batch], lambda x: (net(x), len(x)))
    assert same(expected, [param.detach() for param in net.parameters()])
    assert Inputs.made[-1].allocated == 2 * BLOCKS - 1


def test_offload_input_saved_in_two_shapes_is_copied_once_per_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies: list[Any] = []
    real = activation_offload._Input.copy_to_device

    def copy(self: Any) -> None:
        copies.extend([self] * (self.on_device is None))
        real(self)

    monkeypatch.setattr(activation_offload._Input, "copy_to_device", copy)
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


def test_offload_of_blocks_with_two_inputs_in_one_storage_keeps_them_apart() -> None:
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


def test_offload_input_changed_in_place_raises() -> None:
    engine = engine_of(Net(), "offload")
    engine.model.change = lambda x: x.detach().add_(1)  # type: ignore[assignment]
    with pytest.raises(
        UserError, match="input of a block was changed in place after the block had read it"
    ):
        engine.train_batch([torch.ones(32, WIDTH)], lambda x: (engine.model(x), 1))


def test_activation_checkpointing_of_unknown_mode_is_an_error() -> None:
    for wrong in ("offloaded", {"llm": "offloaded"}):
        with pytest.raises(
            UserError, match="'offloaded' is none of none, selective, attention, full, offload"
        ):
            Settings(activation_checkpointing=wrong)


def test_offload_of_parts_is_bit_equal_to_full(monkeypatch: pytest.MonkeyPatch) -> None:
    use_lazy_streams(monkeypatch)
    found = []
    for mode in ("full", {"vision": "offload", "llm": "offload"}):
        model = build_model(LanguageModel, "qwen3_vl")
        packs = packs_of(model, "qwen3_vl", [[2, 1], [1, 0, 1]], [(7, 3, 11), (5, 9)])
        engine = LanguageModelEngine(model, alone(), Settings(activation_checkpointing=mode))
        engine.initialize(lambda model: torch.optim.SGD(model.parameters(), 0.0))
        loss = lambda batch: (
            -engine.model(batch, ["log_probs"])["log_probs"].sum(),
            batch.num_loss_tokens,
        )  # noqa: E731, B023
        engine.forward_backward_batch(packs, loss)
        found.append([param.grad for param in engine.model.parameters() if param.grad is not None])
    assert same(*found)
    assert Inputs.made[1].taken > 4


# ---- On a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "inductor"])
def test_offload_on_gpu_is_bit_equal_to_full_with_less_memory_and_no_host_sync(
    backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_offload, "SMALL", 2**20)
    blocks, rows, width = 12, 16384, 1024
    size = 4 * rows * width
    peaks: list[int] = []
    results: list[list[Tensor]] = []
    g = torch.Generator().manual_seed(0)
    batches = [torch.randn(rows, width, generator=g).pin_memory() for _ in range(2)]
    for mode in ("full", "offload"):
        before = torch.cuda.memory_allocated()
        engine = engine_of(Net(width, blocks, runs=1), mode, "cuda", compile=backend)
        loss = lambda x, net=engine.model: (net(x), x.numel())  # noqa: E731
        for _ in range(3):  # allocate and compile
            engine.train_batch(batches, loss)
        engine.optimizer_zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_sync_debug_mode("error")
        try:
            engine.forward_backward_batch(batches, loss)
        finally:
            torch.cuda.set_sync_debug_mode("default")
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
