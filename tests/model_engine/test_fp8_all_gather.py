"""FSDP2 gathers the weights of layers in FP8 as float8: half the bytes of bf16, and the numbers of one rank."""

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from lora_models import engine_of as lora_engine
from lora_models import pretrained
from tiny_engines import (
    ALONE,
    adamw,
    assert_equal,
    counting,
    engine_of,
    fresh_graphs,
    gradients,
    weights,
)
from tiny_engines import train as train_step
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from mvp_engine.distributed.data_parallel import apply_fsdp
from mvp_engine.hf.experts.fp8_layers import GatheredWeight, gather_fp8, run_in_bf16
from mvp_engine.kit import Lora
from mvp_engine.kit.plan.record import CollectiveRecorder
from mvp_engine.ops import fp8

IN = 64


class Block(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.up = nn.Linear(IN, wide)
        self.down = nn.Linear(wide, IN, bias=False)

    def forward(self, x):
        return x + self.down(F.silu(self.up(x)))


class Blocks(nn.Module):
    """Residual blocks of linear layers alone, so that one rank and shards compute in the same dtypes."""

    def __init__(self, wide=96, weight_gradients=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(wide) for _ in range(2))
        fp8.use((one for one in self.modules() if type(one) is nn.Linear), weight_gradients)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def sharded(model, layout, reshard=True):
    assert layout.shard_mesh is not None
    apply_fsdp(model, layout.shard_mesh, torch.bfloat16, reshard=reshard)
    gather_fp8(model)
    return model


def step(model, rank):
    """Forward and backward of a batch of this rank; returns the loss."""
    x = torch.randn(24, IN, generator=torch.Generator().manual_seed(rank)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    loss = (out.float() * torch.linspace(-1, 1, IN)).square().sum()
    loss.backward()
    return float(loss.detach())


def alone(ranks, model):
    """The batches of all ranks on one, which sums their gradients."""
    return [step(model, rank) for rank in range(ranks)], gradients(model)


def second_step(layout, weight_gradients, backend, reshard):
    """The second of two steps: its all-gathers fill the storage of the first."""
    model = Blocks(weight_gradients=weight_gradients)
    for layer in model.layers if backend else ():
        layer.compile(backend=backend, fullgraph=True)
    sharded(model, layout, reshard)
    for _ in range(2):
        model.zero_grad()
        loss = step(model, layout.world.rank)
    return loss, gradients(model)


@pytest.mark.parametrize(
    "weight_gradients, backend, reshard",
    [
        (False, None, True),
        (True, None, False),
        pytest.param(True, "aot_eager", True, marks=pytest.mark.slow),
    ],
)
def test_fp8_losses_and_gradients_of_two_shards_are_those_of_one_rank(
    on_ranks, weight_gradients, backend, reshard
):
    """To the bit: a rank quantizes its rows from float32, as one rank does, and a sum of two has one order."""
    found = on_ranks({"shard": 2}, second_step, weight_gradients, backend, reshard)
    losses, expected = alone(2, Blocks(weight_gradients=weight_gradients))
    assert [loss for loss, _ in found] == losses
    assert_equal(found[0][1], expected)


def test_fp8_losses_and_gradients_of_hsdp_are_those_of_one_rank(on_ranks):
    found = on_ranks({"shard": 2, "replicate": 2}, second_step, False, None, True)
    losses, expected = alone(4, Blocks())
    assert [loss for loss, _ in found] == losses
    for name, grad in expected.items():  # sums of four, in another order
        atol = 1e-6 * float(grad.abs().max())
        assert torch.allclose(found[3][1][name], grad, rtol=1e-5, atol=atol), name


def facts_of_shards(layout, wide):
    """What is gathered, and as which type, with weights that bf16 holds exactly."""
    model = Blocks(wide)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.bfloat16())
    losses, expected = alone(2, model)
    model.zero_grad()
    sharded(model, layout)
    kinds = set()
    model.layers[0].up.register_forward_pre_hook(lambda layer, _: kinds.add(type(layer.weight)))
    with CollectiveRecorder() as recorder:
        assert step(model, layout.world.rank) == losses[layout.world.rank]
    assert_equal(gradients(model), expected)
    weight = model.layers[0].up.weight
    assert (weight.dtype, weight.grad.dtype) == (torch.float32, torch.float32)
    assert type(weight.to_local()) is Tensor  # what stays sharded
    return [one.bytes for one in recorder.calls if one.kind == "all-gather"], kinds


@pytest.mark.parametrize("wide, kind", [(96, GatheredWeight), (95, nn.Parameter)])
def test_fp8_all_gather_moves_a_byte_per_weight_unless_rows_are_uneven(on_ranks, wide, kind):
    up = 48 * (IN + 4)  # of 96 rows, each with a scale of 4 bytes
    if wide == 95:
        up = 48 * IN * 2  # bf16, padded to 96 rows
    down = 32 * (wide + 4)
    bias = 48 * 2
    for gathered_bytes, kinds in on_ranks({"shard": 2}, facts_of_shards, wide):
        assert kinds == {kind}
        assert gathered_bytes == [up + down + bias] * 4  # two blocks, in forward and in backward


def losses_after_changes(layout):
    """Of one step each: as it is, with new local tensors as after an offload, in bf16, and of doubled weights."""
    model = sharded(Blocks(), layout)
    rank = layout.world.rank
    losses = [step(model, rank)]
    model._apply(torch.clone)
    gather_fp8(model)
    losses.append(step(model, rank))
    with run_in_bf16(model):
        losses.append(step(model, rank))
    with torch.no_grad():
        model.layers[0].up.weight.mul_(2)
    return [*losses, step(model, rank)]


def test_fp8_all_gather_after_model_was_moved_run_in_bf16_or_updated_uses_its_weights(
    on_ranks,
):
    model = Blocks()
    first = alone(2, model)[0]
    with torch.no_grad():
        model.layers[0].up.weight.mul_(2)
    last = alone(2, model)[0]
    for rank, losses in enumerate(on_ranks({"shard": 2}, losses_after_changes)):
        assert losses[:2] == [first[rank]] * 2
        assert losses[2] == pytest.approx(first[rank], rel=0.01)
        assert losses[2] != first[rank]
        assert losses[3] == last[rank]


def kinds_of_shared_weights(layout):
    model = Blocks(wide=IN)
    model.layers[0].down.weight = model.layers[0].up.weight  # both in FP8
    model.layers[1].down.weight = model.layers[1].up.weight
    model.layers[1].down.__class__ = nn.Linear
    kinds = []
    for layer in model.layers:
        layer.up.register_forward_pre_hook(lambda layer, _: kinds.append(type(layer.weight)))
    step(sharded(model, layout), layout.world.rank)
    return kinds


def test_fp8_weight_shared_with_layer_in_bf16_is_gathered_in_bf16(on_ranks):
    assert on_ranks({"shard": 2}, kinds_of_shared_weights)[0] == [GatheredWeight, nn.Parameter]


BATCH = counting(30, 12, 50, modulus=7)


def train(engine, steps):
    numbers = [train_step(engine, BATCH, BATCH) for _ in range(steps)]
    return [float(one.loss_sum / one.weight) for one in numbers]


def fp8_engine(layout, how):
    settings = {"seed": 5, "precision": "bf16", "fp8": True, **how}
    return engine_of("qwen3", layout, lambda model: adamw(model, 3e-3), **settings)


def trained(layout, folder, how):
    """Losses of three steps, and of the third after a resume, which has the same weights."""
    engine, other = fp8_engine(layout, how), fp8_engine(layout, how)
    losses = train(engine, 2)
    engine.save_checkpoint(folder)
    losses += train(engine, 1)
    train(other, 1)
    other.load_checkpoint(folder)
    resumed = train(other, 1)
    assert_equal(weights(other.model), weights(engine.model))
    return losses, resumed


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{"activation_checkpointing": "selective"}, {"freeze": ["*.mlp.*"]}], ids=str
)
def test_fp8_training_on_shards_follows_one_rank_and_resumes_bit_equal(on_ranks, tmp_path, how):
    expected = train(fp8_engine(ALONE, how), 3)
    for losses, resumed in on_ranks({"shard": 2}, trained, tmp_path, how):
        assert resumed == losses[2:]
        assert losses == pytest.approx(expected, rel=2e-3)  # embeddings are gathered in bf16


def losses_with_lora(layout, base):
    """Losses of two steps, which keep the base as it was, and the kinds of weights that layers in FP8 see."""
    engine = lora_engine(base, Lora(rank=3), layout, precision="bf16", fp8=True)
    before = weights(engine.model)
    kinds = set()

    def note(layer, _):
        kinds.add((type(layer.weight), layer.weight.requires_grad))

    for layer in engine.model.modules():
        if isinstance(layer, fp8.Fp8Linear):
            layer.register_forward_pre_hook(note)
    losses = train(engine, 2)
    after = weights(engine.model)
    assert all(torch.equal(after[name], before[name]) for name in after if ".lora_" not in name)
    return losses, kinds


@pytest.mark.slow
def test_fp8_lora_on_shards_gathers_its_frozen_base_in_fp8(on_ranks, tmp_path):
    base = pretrained(tmp_path / "base")
    expected, _ = losses_with_lora(ALONE, base)
    for losses, kinds in on_ranks({"shard": 2}, losses_with_lora, base):
        assert losses == pytest.approx(expected, rel=2e-3)
        assert losses[1] < losses[0]
        assert kinds == {(GatheredWeight, False)}


def gathered(shape=(32, 48)):
    """A gathered weight, and its values in bf16."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight = GatheredWeight(*fp8.quantize(values), torch.bfloat16)
    return nn.Parameter(weight), nn.Parameter(weight.dequantize())


@pytest.mark.parametrize("has_bias", [False, True])
def test_gathered_weight_in_bf16_linear_has_outputs_and_gradients_of_its_values(
    has_bias,
):
    results = []
    for weight in gathered():
        x = torch.linspace(-1, 1, 2 * 5 * 48).view(2, 5, 48).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = F.linear(x, weight, torch.ones(32) if has_bias else None)
        out.float().square().sum().backward()
        results.append([out, x.grad, weight.grad])
    for found, expected in zip(*results, strict=True):
        assert type(found) is Tensor
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "device, backend",
    [
        ("cpu", None),
        ("cpu", "aot_eager"),
        pytest.param("cuda", None, marks=pytest.mark.gpu),
        pytest.param("cuda", "inductor", marks=pytest.mark.gpu),
    ],
)
def test_gathered_weight_refilled_for_backward_gives_results_of_float32_weight(device, backend):
    """Its values are freed after forward and filled again for backward, as FSDP2 does."""
    results = []
    for is_gathered in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(64, 48, bias=False).to(device)
        fp8.use([layer], weight_gradients=True)
        if is_gathered:
            values = fp8.quantize(layer.weight.detach())
            layer.weight = nn.Parameter(GatheredWeight(*values, torch.bfloat16))
        x = torch.randn(32, 64).to(device, torch.bfloat16).requires_grad_()
        with torch.autocast(device, torch.bfloat16):
            out = (torch.compile(layer, backend=backend, fullgraph=True) if backend else layer)(x)
        if is_gathered:
            values = layer.weight.fp8_values
            kept = values.clone()
            values.untyped_storage().resize_(0)
            values.untyped_storage().resize_(kept.nbytes)
            with torch.autograd._unsafe_preserve_version_counter((values,)):
                values.copy_(kept)
        out.backward(out.detach())
        results.append([out.detach(), x.grad, layer.weight.grad.bfloat16()])
    tolerance = 0.01 if backend == "inductor" else 0.0
    for expected, found in zip(*results, strict=True):
        assert (found - expected).norm() <= tolerance * expected.norm()


def test_gathered_weight_in_compiled_layer_is_not_quantized_again_nor_copied():
    """From a weight in bf16, the graph would keep a transposed copy in FP8 for backward, in every layer."""
    layer = nn.Linear(48, 32, bias=False)
    fp8.use([layer])
    layer.weight = gathered()[0]
    assert fp8.quantize(layer.weight.detach())[0] is layer.weight.fp8_values
    graphs = []

    def keep(module, _):
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    fresh_graphs()
    backend = aot_autograd(fw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        compiled(torch.ones(16, 48, requires_grad=True)).sum().backward()
    forward = graphs[0]
    quantized = forward.find_nodes(op="call_function", target=torch.ops.aten.amax.default)
    assert len(quantized) == 1  # the input
    outputs = forward.output_node().args[0]
    kept = [node for node in outputs if node.meta["val"].dtype == torch.float8_e4m3fn]
    assert [node.op for node in kept] == ["placeholder"]  # the gathered values, which FSDP2 frees


def test_gathered_weight_whose_values_are_freed_has_zeros_like_it_and_cannot_be_changed():
    weight, values = gathered()
    assert torch.equal(weight * 1, values)
    changes = [
        lambda: weight.mul_(2),
        lambda: torch._foreach_mul_([weight], 2.0),
        lambda: torch.add(values, 1, out=weight),
    ]
    message = "would change a weight that was gathered in FP8"
    for change in changes:
        with torch.no_grad(), pytest.raises(RuntimeError, match=message):
            change()
    with torch.no_grad():
        assert torch.equal(torch.zeros_like(values).add_(weight), values)  # it is read
    weight.fp8_values.untyped_storage().resize_(0)  # as FSDP2 does
    zeros = torch.zeros_like(weight)  # FSDP2's gradient of a parameter that was not used
    assert (type(zeros), zeros.dtype, zeros.stride()) == (Tensor, torch.bfloat16, (48, 1))
    assert not zeros.any()
    assert isinstance(weight.detach(), GatheredWeight)
