"""`model.cast_weights_once`: weights, gradients and norms bit-equal to those of weights cast in every micro-batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import test_omni_ranks as omni
import torch
from mixer_families import mixer_model
from test_compiled import dense
from tiny_models import build_model, packs_of
from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel, compute_weights
from mvp_engine.hf.lora import add_adapters
from mvp_engine.hf.lora_settings import Lora
from mvp_engine.kit import compile_ahead
from mvp_engine.model_engine import LanguageModelEngine, Settings
from mvp_engine.ops import attention as attention_ops
from mvp_engine.ops.fp8 import Fp8Linear

ONE = Layout(World(0, 1, 0, 1, torch.device("cpu")))
CAMPAIGN = pytest.mark.campaign(only=True)
STEPS = [[0], [1, 2], [0, 1, 3]]  # the packs of each: one, two and three micro-batches
MEMBERS = [[2, 1], [1, 0, 1], [1, 1, 0], [0]]
LENGTHS = [(7, 3, 11), (5, 9), (13, 2, 4, 6), (17,)]
EXPERTS_LORA = Lora(rank=8, target_parameters=["experts.gate_up_proj", "experts.down_proj"])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2, weight_decay=0.1)


def engine_of(model: Any, **how: Any) -> LanguageModelEngine:
    engine = LanguageModelEngine(model, ONE, Settings(precision="bf16", clip_grad_norm=1.0, **how))
    engine.initialize(adamw)
    return engine


def loss_of(engine: Any) -> Any:
    def loss(batch: PackedBatch) -> tuple[Tensor, Tensor]:
        return -engine.model(batch, ["log_probs"])["log_probs"].sum(), batch.num_loss_tokens

    return loss


def trained(model: Any, batches: list[PackedBatch], **how: Any) -> tuple[dict[str, Any], list[Tensor], int]:
    """Weights and gradients after some steps, norms and losses of each and after it, and the number of graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    engine = engine_of(model, **how)
    numbers = []
    for packs in STEPS:
        engine.optimizer_zero_grad()
        engine.forward_backward_batch([batches[i] for i in packs], loss_of(engine))
        if len(packs) == 2:  # a step of two calls
            engine.forward_backward_batch([batches[0]], loss_of(engine))
        done = engine.optimizer_step()
        evaluated = engine.infer_batch(batches[0], ["log_probs"])["log_probs"]
        numbers += [done.loss_sum, done.grad_norm, evaluated.sum()]
    tensors = {}
    for name, param in engine.model.named_parameters():
        assert param.dtype == torch.float32 or not param.requires_grad
        tensors |= {name: param.detach(), f"{name}.grad": param.grad}
    return tensors, numbers, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def check_equal(name: str, build: Any, **how: Any) -> None:
    with patch.multiple(attention_ops, _torch_varlen_is_supported=lambda *_: True, _torch_varlen=dense):
        model = build()
        batches = packs_of(model, name, MEMBERS, LENGTHS)
        wanted, numbers, graphs = trained(model, batches, **how)
        found, its_numbers, its_graphs = trained(build(), batches, **how, cast_weights_once=True)
    check_same(found, wanted)
    assert its_numbers == numbers
    assert its_graphs == graphs


def check_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name] is None) == (tensor is None), name
        assert tensor is None or torch.equal(found[name], tensor), name


def with_lora(name: str, settings: Lora | None = None) -> Any:
    model = build_model(LanguageModel, name)
    add_adapters(model, settings or Lora(rank=4))
    return model


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("qwen3", {}),
        ("qwen3_moe", {}),
        ("qwen3_vl", {}),
        ("qwen3", {"fp8": True}),
        ("qwen3_moe", {"fp8": True}),
        ("gpt_oss", {"fp8": True}),  # transposed, with biases
        pytest.param("qwen3_moe", {"fp8": True, "compile": "aot_eager"}, marks=CAMPAIGN),
        pytest.param("qwen3_moe", {"fp8": True, "activation_checkpointing": "selective"}, marks=CAMPAIGN),
        pytest.param("qwen3", {"fp8": True, "compile": "aot_eager"}, marks=CAMPAIGN),
        pytest.param("qwen3", {"fp8": True, "fp8_weight_gradients": True, "compile": "aot_eager"}, marks=CAMPAIGN),
        pytest.param("qwen3_vl", {"fp8": True, "fp8_weight_gradients": True}, marks=CAMPAIGN),
        pytest.param("qwen3", {"fp8": True, "activation_checkpointing": "full"}, marks=CAMPAIGN),
        pytest.param("qwen3", {"compile": "aot_eager"}, marks=CAMPAIGN),
        pytest.param("qwen3_moe", {"compile": "aot_eager"}, marks=CAMPAIGN),
        pytest.param("qwen3_vl", {"compile": "aot_eager"}, marks=CAMPAIGN),
        pytest.param("qwen3", {"compile": "inductor"}, marks=CAMPAIGN),
        pytest.param("qwen3", {"activation_checkpointing": "selective"}, marks=CAMPAIGN),
        pytest.param("qwen3_moe", {"activation_checkpointing": "full", "compile": "aot_eager"}, marks=CAMPAIGN),
    ],
    ids=str,
)
def test_cast_weights_once_trains_bit_equal(name: str, how: dict[str, Any]) -> None:
    check_equal(name, lambda: build_model(LanguageModel, name), **how)


@pytest.mark.parametrize(
    "build",
    [
        lambda: with_lora("qwen3"),
        pytest.param(lambda: with_lora("qwen3_moe", EXPERTS_LORA), marks=CAMPAIGN),
        pytest.param(lambda: mixer_model("zamba2"), marks=CAMPAIGN),
        pytest.param(lambda: mixer_model("mamba"), marks=CAMPAIGN),
    ],
    ids=["lora", "lora experts", "zamba2", "mamba"],
)
def test_cast_weights_once_with_adapters_and_shared_weights_trains_bit_equal(build: Any) -> None:
    check_equal("text", build)


@pytest.mark.parametrize("checkpointing", ["none", pytest.param("full", marks=CAMPAIGN)])
@pytest.mark.parametrize("compile", [None, pytest.param("aot_eager", marks=CAMPAIGN)])
def test_cast_weights_once_with_adapters_of_fp8_layers_trains_bit_equal(compile: Any, checkpointing: str) -> None:
    """On frozen linear layers and experts."""
    how: dict[str, Any] = {"compile": compile, "activation_checkpointing": checkpointing}
    check_equal("text", lambda: with_lora("qwen3_moe", EXPERTS_LORA), fp8=True, **how)


def test_cast_weights_once_quantizes_frozen_weights_when_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = compute_weights.quantize_weights
    watched = lambda copies, weights: (sizes.append(len(weights)), real(copies, weights))[1]  # noqa: E731
    monkeypatch.setattr(compute_weights, "quantize_weights", watched)
    results = []
    for once in (False, True):
        model = with_lora("qwen3", Lora(rank=16))
        engine = engine_of(model, fp8=True, cast_weights_once=once)
        batches = packs_of(model, "text", [], LENGTHS)
        loaded = {name: value * 1.1 for name, value in model.state_dict().items() if "lora_" not in name}
        found = []
        for step in range(4):
            if step == 2:
                model.load_state_dict(loaded, strict=False)
            numbers = engine.train_batch(batches, loss_of(engine))
            found += [numbers.loss_sum, numbers.grad_norm]
        results.append(found)
    frozen = [module for module in model.modules() if isinstance(module, Fp8Linear)]
    assert sizes == [len(frozen), 0, len(frozen), 0]
    assert results[1] == results[0]
    assert not any("lora_" in name for name, module in model.named_modules() if module in frozen)
    assert all(module.weight.grad is None for module in frozen)
    assert engine.compute_weights
    engine.compute_weights.release()  # as offloading does
    engine.train_batch(batches, loss_of(engine))
    assert sizes[4:] == [len(frozen)]
    assert not any(copy.leaf.requires_grad for copy in engine.compute_weights._fp8_copies)  # inputs would be saved
    sizes.clear()
    engine = engine_of(build_model(LanguageModel, "qwen3"), fp8=True, cast_weights_once=True)
    for _ in range(2):  # trainable ones always: kernels of optimizers may count no version
        engine.forward_backward_batch(batches, loss_of(engine))
    assert sizes == [len(frozen)] * 2


@CAMPAIGN
@pytest.mark.parametrize("compile", [None, "aot_eager"])
def test_cast_weights_once_with_a_talker_trains_bit_equal(compile: str | None) -> None:
    batches = [omni.micro_batch(members) for members in ([2, 0], [0], [1, 3])]
    how: dict[str, Any] = {"precision": "bf16", "compile": compile}
    grads = []
    for once in (False, True):
        engine = omni.engine_on(ONE, omni.adamw, **how, cast_weights_once=once)
        steps = [omni.step(engine, batches[:1]), omni.step(engine, batches)]
        weights = {f"{name} itself": param.detach() for name, param in engine.model.named_parameters()}
        grads.append(steps[-1] | weights)
    check_same(grads[1], grads[0])


def test_cast_weights_once_covers_matrices_of_blocks_alone() -> None:
    """Linear layers, experts and their adapters; not embeddings, heads, norms, biases, routers."""
    engine = engine_of(build_model(LanguageModel, "qwen3_vl"), cast_weights_once=True)
    text = {name for name in matrices(engine) if ".language_model.layers." in name}
    assert covered(engine) == text
    engine = engine_of(build_model(LanguageModel, "qwen3_moe"), cast_weights_once=True)
    routers = {name for name in matrices(engine) if name.endswith("mlp.gate.weight")}
    outside = {"hf.model.embed_tokens.weight", "hf.lm_head.weight"}
    assert covered(engine) == matrices(engine) - routers - outside
    engine = engine_of(with_lora("qwen3_moe", EXPERTS_LORA), cast_weights_once=True)
    assert covered(engine) == {name for name, p in engine.model.named_parameters() if p.requires_grad}
    engine = engine_of(build_model(LanguageModel, "qwen3"), cast_weights_once=True, fp8=True)
    in_fp8 = [module for module in engine.model.modules() if isinstance(module, Fp8Linear)]
    assert engine.compute_weights
    assert len(in_fp8) == len(engine.compute_weights.fp8_places) > 0
    assert covered(engine) == {name for name in matrices(engine) if ".layers." in name}
    engine = engine_of(build_model(LanguageModel, "qwen3_moe"), cast_weights_once=True, fp8=True)
    assert covered(engine) == matrices(engine) - routers - outside
    assert not engine.compute_weights.places
    engine = engine_of(build_model(LanguageModel, "gpt_oss"), cast_weights_once=True, fp8=True)
    in_bf16 = {name for _, name in engine.compute_weights.places}
    assert in_bf16 == {"gate_up_proj_bias", "down_proj_bias"}  # no matrices of experts


def matrices(engine: Any) -> set[str]:
    return {name for name, param in engine.model.named_parameters() if param.ndim > 1}


def covered(engine: Any) -> set[str]:
    names = {param: name for name, param in engine.model.named_parameters()}
    weights = engine.compute_weights
    return {names[param] for param in (*weights.masters, *weights.fp8_masters)}


def test_cast_weights_once_compiled_ahead_compiles_the_graphs_of_training() -> None:
    """Graphs of float32 weights would be compiled for nothing."""
    engine = engine_of(build_model(LanguageModel, "qwen3"), cast_weights_once=True, compile="eager")
    (batch,) = packs_of(engine.model, "qwen3", [], [(7, 3)])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    stand_in: Any = SimpleNamespace(model=engine.model, model_engine=engine, device="cpu")
    compile_ahead._forward_backward(stand_in, batch)
    counted = torch._dynamo.utils.counters["stats"]
    ahead = counted["unique_graphs"]
    assert all(param.grad is None for param in engine.model.parameters())
    engine.forward_backward_batch([batch, batch], loss_of(engine))
    assert engine.compute_weights
    engine.compute_weights.release()  # as offloading does
    engine.forward_backward_batch([batch], loss_of(engine))
    assert counted["unique_graphs"] == ahead > 0


def test_cast_weights_once_failed_forward_leaves_masters() -> None:
    engine = engine_of(build_model(LanguageModel, "qwen3"), cast_weights_once=True)
    before = dict(engine.model.named_parameters())
    (batch,) = packs_of(engine.model, "qwen3", [], [(7, 3)])

    def fails(one: PackedBatch) -> Any:
        loss_of(engine)(one)
        weight = engine.model.get_parameter(next(n for n in before if n.endswith("q_proj.weight")))
        assert weight.dtype == torch.bfloat16
        raise KeyError("a forward that fails")

    with pytest.raises(KeyError, match="a forward that fails"):
        engine.forward_backward_batch([batch], fails)
    after = dict(engine.model.named_parameters())
    assert all(after[name] is param for name, param in before.items())


def build(layout: Layout, **settings: Any) -> None:
    LanguageModelEngine(build_model(LanguageModel, "qwen3"), layout, Settings(**settings)).initialize(adamw)


def test_cast_weights_once_unsupported_is_refused() -> None:
    with pytest.raises(UserError, match=r"cast_weights_once is for bf16, not for fp32: set loop.precision=bf16"):
        build(ONE, cast_weights_once=True)
    with pytest.raises(UserError, match="no block of LanguageModel has trainable float32 weights"):
        build(ONE, cast_weights_once=True, precision="bf16", freeze=("*.layers.*",))
    two = Layout(World(0, 2, 0, 2, torch.device("cpu")), replicate=2)
    with pytest.raises(UserError, match=r"cast_weights_once is for one rank, not for 2"):
        build(two, cast_weights_once=True, precision="bf16")
