"""The Megatron backend against `fsdp`: log-probs, every gradient, weights after three steps, runs that move between."""

import functools
import importlib.util

import pytest
import torch
from conftest import CAMPAIGN, ROOT, user_error
from families import overrides_of, parallel
from tiny_engines import (
    ALONE,
    assert_close,
    assert_equal,
    engine_of,
    gradients,
    packed,
    scores_of,
    sgd,
    share_of,
)

from mvp_engine.cli import main
from mvp_engine.config.schema import Experts
from mvp_engine.distributed import Layout
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.hf import LanguageModel
from mvp_engine.kit.generation import generate
from mvp_engine.model_engine import Settings, engine_class
from mvp_engine.model_engine.megatron.engine import by_kv_head

MISSING = importlib.util.find_spec("megatron") is None
needs_megatron = pytest.mark.skipif(MISSING, reason="needs megatron-core: make test-megatron")
FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"]
EXPERTS = ["qwen3_moe", "mixtral"]
FULL = {"activation_checkpointing": "full"}
# sizes of the layout, settings, families
LAYOUTS = [
    ({"tensor": 2}, {}, FAMILIES),
    ({"shard": 2}, {}, FAMILIES),
    ({"replicate": 2}, FULL, ["llama", "qwen3_moe"]),
    ({"tensor": 2}, {"activation_checkpointing": "selective"}, ["qwen3", "mixtral"]),
    ({"ulysses": 2}, {}, ["qwen3", "mixtral"]),
    ({"shard": 2, "expert": 2}, {}, EXPERTS),
    ({"context": 2}, {}, ["llama"]),
    ({"tensor": 2}, {"balance": True, **FULL}, EXPERTS),
    ({"pipeline": 2}, {"balance": True}, EXPERTS),
    ({"shard": 2, "tensor": 2, "expert": 2}, {"balance": True}, EXPERTS),
    ({"pipeline": 2}, {}, FAMILIES),
    ({"pipeline": 2, "shard": 2}, {}, FAMILIES),
    ({"pipeline": 2, "tensor": 2}, {}, FAMILIES),
    ({"shard": 2, "tensor": 2}, {}, ["qwen3", "qwen3_moe"]),
]
BATCHES = [packed(7, 3, 11, 2), packed(5, 9), packed(1, 6, 4)]  # two with an odd number of tokens


def adamw(model):
    """The gradient of a key's bias is rounding; a large eps keeps AdamW from making a step of it."""
    return torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)


def build(family, layout, backend, balance=False, **how):
    kind = engine_class("language_model", backend)
    if balance:
        how["experts"] = Experts(aux_loss_coef=0.1, router_z_loss_coef=0.01)
    return engine_of(family, layout, adamw, kind, seed=5, **how)


def accumulate(engine):
    """Gradients of the batches, which data ranks share out: one may have more than another."""
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(share_of(engine.layout, BATCHES), scores_of(engine))


def step(engine):
    accumulate(engine)
    engine.optimizer_step()


def weights_of(engine):
    return {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}


def trained(family, layout, backend, **how):
    engine = build(family, layout, backend, **how)
    outputs = engine.infer_batch(BATCHES[0], ["log_probs", "entropy"])
    accumulate(engine)
    grads = gradients(engine.model)
    engine.optimizer_step()
    step(engine)
    step(engine)
    return {"outputs": outputs, "grads": grads, "weights": weights_of(engine)}


@functools.cache
def expected(family, balance=False):
    return trained(family, ALONE, "fsdp", balance=balance)


def assert_as_fsdp(found, family, balance=False):
    for kind, tensors in found.items():
        reference = expected(family, balance)[kind]
        held = {name: reference[name] for name in tensors}  # of a pipeline stage, a part
        assert_close(tensors, held, floor=1e-6, what=(family, kind))


def on_megatron(layout, how, families):
    return {family: trained(family, layout, "megatron", **how) for family in families}


@needs_megatron
@pytest.mark.parametrize("family", FAMILIES)
def test_megatron_on_one_rank_equals_fsdp(family):
    found = trained(family, ALONE, "megatron")
    assert_as_fsdp(found, family)
    for kind, tensors in expected(family).items():
        assert found[kind].keys() == tensors.keys()


@needs_megatron
@CAMPAIGN
def test_megatron_compiled_equals_fsdp():
    assert_as_fsdp(trained("qwen3", ALONE, "megatron", compile="aot_eager"), "qwen3")


@needs_megatron
@pytest.mark.parametrize("sizes, how, families", LAYOUTS, ids=str)
def test_megatron_on_layouts_equals_fsdp_on_one_rank(on_ranks, sizes, how, families):
    results = on_ranks(sizes, on_megatron, how, families, timeout=400)
    for family in families:
        for result in results:
            assert_as_fsdp(result[family], family, how.get("balance", False))
        for kind, tensors in expected(family).items():
            assert set().union(*(result[family][kind] for result in results)) == tensors.keys()


@needs_megatron
def test_megatron_in_bf16_is_close_to_fsdp_in_bf16():
    engines = [build("qwen3", ALONE, kind, precision="bf16") for kind in ("megatron", "fsdp")]
    found, reference = (one.infer_batch(BATCHES[0], ["log_probs"]) for one in engines)
    assert found["log_probs"] == pytest.approx(reference["log_probs"], abs=0.03)
    accumulate(engines[0])
    assert all(param.grad.dtype == torch.float32 for param in engines[0].model.parameters())


@needs_megatron
def test_megatron_generates_the_tokens_of_fsdp():
    engines = [build("qwen3", ALONE, backend) for backend in ("fsdp", "megatron")]
    one, two = (generate(engine, BATCHES[0], max_new_tokens=6, stop=()) for engine in engines)
    assert one == two
    assert {len(tokens) for tokens in one} == {6}


def values(layout, backend):
    """Values, and gradients, of a value model."""
    kind = engine_class("value_model", backend)
    engine = engine_of("qwen3", layout, lambda model: sgd(model, 0.1), kind, seed=5)
    found = engine.infer_batch(BATCHES[0], ["values"])["values"]
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(
        BATCHES, lambda b: (engine.model(b, ["values"])["values"].square().sum(), b.num_tokens)
    )
    return found, gradients(engine.model)


@needs_megatron
def test_megatron_value_model_on_two_ranks_equals_fsdp(on_ranks):
    reference, grads = values(ALONE, "fsdp")
    for found, of_rank in on_ranks({"tensor": 2}, values, "megatron", timeout=400):
        assert torch.allclose(found, reference, atol=1e-5)
        assert_close(of_rank, grads, 2e-5, floor=0.0)


def two_layouts(layout):
    """Steps of two engines in one process, each after the other's."""
    layouts = [layout, Layout.of(layout.world, parallel(pipeline=2))]
    engines = [build("llama", each, "megatron") for each in layouts]
    for _ in range(3):
        for engine in engines:
            step(engine)
    return [{"weights": weights_of(engine)} for engine in engines]


@needs_megatron
def test_megatron_engines_of_two_layouts_live_in_one_process(on_ranks):
    for of_rank in on_ranks({"tensor": 2}, two_layouts, timeout=400):
        for result in of_rank:
            assert_as_fsdp(result, "llama")


# ---- Runs that move between backends ------------------------------------------------------------------------------


def continued(layout, backend, family, load, folder):
    """Load a checkpoint, take a step, save another one and a Hugging Face folder; returns weights before and after."""
    engine = build(family, layout, backend)
    if load is not None:
        engine.load_checkpoint(load / "saved")
    before = weights_of(engine)
    step(engine)
    engine.save_checkpoint(folder / "saved")
    engine.export_hf(folder / "hf")
    return before, weights_of(engine)


@needs_megatron
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_run_moves_from_fsdp_to_megatron_and_back(on_ranks, tmp_path, family):
    from mvp_engine.hf.weights.merge import merge

    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    sizes = {"tensor": 2, "pipeline": 2}
    first = on_ranks({"shard": 2}, continued, "fsdp", family, None, one)[0]
    second = on_ranks(sizes, continued, "megatron", family, one, two, timeout=400)[0]
    third = on_ranks({"shard": 2}, continued, "fsdp", family, two, three)[0]
    assert_equal(second[0], first[1])
    assert_equal(third[0], second[1])
    # Three steps on one rank, on one backend.
    assert_close(third[1], expected(family)["weights"], floor=0.0)
    merge(two / "saved", LanguageModel.on_meta(None, overrides_of(family)), tmp_path / "merged")
    assert_equal(_weights_in(two / "hf"), _weights_in(tmp_path / "merged"))


def _weights_in(folder):
    from safetensors.torch import load_file

    files = [load_file(file) for file in folder.glob("*.safetensors")]
    return {name: tensor for file in files for name, tensor in file.items()}


# ---- What is refused ------------------------------------------------------------------------------------------------


def engine_for(family, backend="megatron", config=None, **how):
    model = LanguageModel.on_meta(None, {**overrides_of(family), **(config or {})})
    return engine_class("language_model", backend)(model, ALONE, Settings(**how))


@pytest.mark.parametrize(
    "family, config, how, message",
    [
        (
            "gemma2",
            {},
            {},
            "gemma2 is none of llama, mixtral, qwen2, qwen3, qwen3_moe. Set model.backend=fsdp",
        ),
        ("llama", {"attention_bias": True}, {}, "self_attn.o_proj has a bias"),
        ("llama", {"hidden_act": "gelu"}, {}, "hidden_act=gelu"),
        ("mixtral", {"router_jitter_noise": 0.1}, {}, "router_jitter_noise"),
        ("qwen3", {}, {"fp8": {"llm": True}}, "model.fp8 and model.quantize are not supported"),
    ],
    ids=str,
)
def test_megatron_refuses_by_name(family, config, how, message):
    with user_error(message.replace(".", r"\.")):
        engine_for(family, config=config, **how)


@pytest.mark.skipif(not MISSING, reason="megatron-core is installed")
def test_megatron_that_is_not_installed_names_the_extra():
    with user_error(r"pip install 'mvp-engine\[megatron\]'"):
        engine_for("qwen3")


@pytest.mark.skipif(not MISSING, reason="megatron-core is installed")
def test_megatron_that_is_not_installed_is_noticed_before_data_is_read(workspace, capsys):
    config = ROOT / "recipes" / "qwen3" / "configs" / "pretrain_cpu.yaml"
    words = f"train {config} model.backend=megatron made.folder={workspace}/made".split()
    assert main(words) == EXIT_USER_ERROR
    assert "pip install 'mvp-engine[megatron]'" in capsys.readouterr().err
    assert not (workspace / "made").exists()


def test_weight_table_interleaves_queries_keys_and_values_by_key_value_head():
    query, key, value = torch.arange(8), torch.arange(10, 14), torch.arange(20, 24)
    joined = by_kv_head(query, key, value, head_dim=2)  # 4 and 2 heads
    assert joined.tolist() == [0, 1, 2, 3, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 22, 23]
