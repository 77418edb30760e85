"""The Megatron backend against `fsdp`: log-probs, every gradient, weights after three steps, runs that move between."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from families import overrides_of, parallel
from torch import Tensor

from mvp_engine.cli import main
from mvp_engine.config.schema import Experts
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.errors import EXIT_USER_ERROR, UserError
from mvp_engine.hf import LanguageModel, ValueModel
from mvp_engine.kit.generation import generate
from mvp_engine.model_engine import Settings, engine_class
from mvp_engine.model_engine.megatron.layers import by_kv_head

MISSING = importlib.util.find_spec("megatron") is None
needs_megatron = pytest.mark.skipif(MISSING, reason="needs megatron-core: make test-megatron")
FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"]
EXPERTS = ["qwen3_moe", "mixtral"]
# ranks, sizes of the layout, settings, families
LAYOUTS: list[tuple[int, dict[str, int], dict[str, Any], list[str]]] = [
    (2, {"tensor": 2}, {"sequence_parallel": False}, FAMILIES),
    (2, {"tensor": 2}, {}, FAMILIES),
    (2, {"shard": 2}, {}, FAMILIES),
    (2, {"replicate": 2}, {"activation_checkpointing": "full"}, ["llama", "qwen3_moe"]),
    (2, {"tensor": 2}, {"activation_checkpointing": "selective"}, ["qwen3", "mixtral"]),
    (2, {"ulysses": 2}, {}, ["qwen3", "mixtral"]),
    (2, {"shard": 2, "expert": 2}, {}, EXPERTS),
    (2, {"context": 2}, {}, ["llama"]),
    (2, {"tensor": 2}, {"balance": True, "activation_checkpointing": "full"}, EXPERTS),
    (2, {"pipeline": 2}, {"balance": True}, EXPERTS),
    (4, {"shard": 2, "tensor": 2, "expert": 2}, {"balance": True}, EXPERTS),
    (2, {"pipeline": 2}, {}, FAMILIES),
    (4, {"pipeline": 2, "shard": 2}, {}, FAMILIES),
    (4, {"pipeline": 2, "tensor": 2}, {}, FAMILIES),
    (4, {"shard": 2, "tensor": 2}, {}, ["qwen3", "qwen3_moe"]),
]


def batches() -> list[PackedBatch]:
    """Three; two have an odd number of tokens."""
    g = torch.Generator().manual_seed(3)
    lengths = [(7, 3, 11, 2), (5, 9), (1, 6, 4)]
    return [
        PackedBatch.from_sequences([torch.randint(99, (n,), generator=g) for n in one])
        for one in lengths
    ]


def build(family: str, layout: Layout, backend: str, balance: bool = False, **how: Any) -> Any:
    kind = engine_class("language_model", backend)
    if balance:
        how["experts"] = Experts(balance="loss", weight=0.1, z=0.01)
    engine = kind(
        LanguageModel.on_meta(None, overrides_of(family)), layout, Settings(seed=5, **how)
    )
    # The gradient of a key's bias is rounding; a large eps keeps AdamW from making a step of it.
    engine.initialize(lambda model: torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3))
    return engine


def step(engine: Any) -> None:
    """One step over the batches that are shared out among the data ranks: one may have more than another."""

    def loss(batch: PackedBatch) -> tuple[Tensor, Tensor]:
        out = engine.model(batch, ["log_probs", "entropy"])
        return -out["log_probs"].sum() - 0.1 * out["entropy"].sum(), batch.num_loss_tokens

    layout = engine.layout
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(batches()[layout.data_rank :: layout.data_size], loss)


def weights_of(engine: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}


def trained(family: str, layout: Layout, backend: str, **how: Any) -> dict[str, dict[str, Tensor]]:
    engine = build(family, layout, backend, **how)
    outputs = engine.infer_batch(batches()[0], ["log_probs", "entropy"])
    step(engine)
    grads = {
        n: full_tensor(p.grad).clone()
        for n, p in engine.model.named_parameters()
        if p.grad is not None
    }
    engine.optimizer_step()
    for _ in range(2):
        step(engine)
        engine.optimizer_step()
    return {"outputs": outputs, "grads": grads, "weights": weights_of(engine)}


@functools.cache
def expected(family: str, balance: bool = False) -> dict[str, dict[str, Tensor]]:
    return trained(family, Layout(World.join("cpu")), "fsdp", balance=balance)


def assert_equal(found: dict[str, dict[str, Tensor]], family: str, balance: bool = False) -> None:
    for kind, tensors in found.items():
        for name, tensor in tensors.items():
            reference = expected(family, balance)[kind][name]
            worst = float((tensor - reference).abs().max() / reference.abs().max().clamp(min=1e-6))
            assert worst < 1e-5, (family, kind, name, worst)


def on_layout(sizes: dict[str, int], how: dict[str, Any], families: list[str]) -> dict[str, Any]:
    world = World.join("cpu")
    layout = Layout.of(world, parallel(**sizes))
    results = {family: trained(family, layout, "megatron", **how) for family in families}
    world.close()
    return results


@needs_megatron
@pytest.mark.parametrize("family", FAMILIES)
def test_megatron_on_one_rank_equals_fsdp(family: str) -> None:
    found = trained(family, Layout(World.join("cpu")), "megatron")
    assert_equal(found, family)
    assert {kind: found[kind].keys() for kind in found} == {
        k: v.keys() for k, v in expected(family).items()
    }


@needs_megatron
@pytest.mark.campaign(only=True)
def test_megatron_compiled_equals_fsdp() -> None:
    assert_equal(
        trained("qwen3", Layout(World.join("cpu")), "megatron", compile="aot_eager"), "qwen3"
    )


@needs_megatron
@pytest.mark.parametrize(("ranks", "sizes", "how", "families"), LAYOUTS, ids=str)
def test_megatron_on_layouts_equals_fsdp_on_one_rank(
    request: pytest.FixtureRequest,
    ranks: int,
    sizes: dict[str, int],
    how: dict[str, Any],
    families: list[str],
) -> None:
    pool = request.getfixturevalue(f"ranks{ranks}")
    results = pool.run(on_layout, sizes, how, families, timeout=400)
    for family in families:
        for result in results:
            assert_equal(result[family], family, how.get("balance", False))
        for kind, tensors in expected(
            family
        ).items():  # a pipeline stage has gradients of its own layers
            assert set().union(*(result[family][kind] for result in results)) == tensors.keys()


@needs_megatron
def test_megatron_in_bf16_is_close_to_fsdp_in_bf16() -> None:
    layout = Layout(World.join("cpu"))
    found, reference = (
        build("qwen3", layout, kind, precision="bf16") for kind in ("megatron", "fsdp")
    )
    outputs = [
        one.infer_batch(batches()[0], ["log_probs"])["log_probs"] for one in (found, reference)
    ]
    assert outputs[0] == pytest.approx(outputs[1], abs=0.03)
    step(found)
    assert all(param.grad.dtype == torch.float32 for param in found.model.parameters())


@needs_megatron
def test_megatron_generates_the_tokens_of_fsdp() -> None:
    layout = Layout(World.join("cpu"))
    written = []
    for backend in ("fsdp", "megatron"):
        engine = build("qwen3", layout, backend)
        written.append(generate(engine, batches()[0], max_new_tokens=6, stop=()))
    assert written[0] == written[1]
    assert {len(tokens) for tokens in written[0]} == {6}


def values(sizes: dict[str, int], backend: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Values, and gradients, of a value model."""
    world = World.join("cpu")
    layout = Layout.of(world, parallel(**sizes))
    model = ValueModel.on_meta(None, overrides_of("qwen3"))
    engine: Any = engine_class("value_model", backend)(model, layout, Settings(seed=5))
    engine.initialize(lambda model: torch.optim.SGD(model.parameters(), 0.1))
    found = engine.infer_batch(batches()[0], ["values"])["values"]
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(
        batches(), lambda b: (engine.model(b, ["values"])["values"].square().sum(), b.num_tokens)
    )
    grads = {
        name: full_tensor(param.grad).clone() for name, param in engine.model.named_parameters()
    }
    world.close()
    return found, grads


@needs_megatron
def test_megatron_value_model_on_two_ranks_equals_fsdp(ranks2) -> None:
    reference, grads = values({}, "fsdp")
    for found, of_rank in ranks2.run(values, {"tensor": 2}, "megatron", timeout=400):
        assert torch.allclose(found, reference, atol=1e-5)
        assert of_rank.keys() == grads.keys()
        assert all(
            torch.allclose(of_rank[n], grads[n], rtol=1e-5, atol=1e-5 * float(grads[n].abs().max()))
            for n in grads
        )


def two_layouts() -> list[dict[str, dict[str, Tensor]]]:
    """Steps of two engines in one process, each after the other's."""
    world = World.join("cpu")
    sizes = [{"tensor": 2}, {"pipeline": 2}]
    engines = [build("llama", Layout.of(world, parallel(**one)), "megatron") for one in sizes]
    for _ in range(3):
        for engine in engines:
            step(engine)
            engine.optimizer_step()
    results = [{"weights": weights_of(engine)} for engine in engines]
    world.close()
    return results


@needs_megatron
def test_megatron_engines_of_two_layouts_live_in_one_process(ranks2) -> None:
    for of_rank in ranks2.run(two_layouts, timeout=400):
        for result in of_rank:
            assert_equal(result, "llama")


# ---- Runs that move between backends ------------------------------------------------------------------------------


def continued(
    sizes: dict[str, int], backend: str, family: str, load: str | None, save: str, hf: str
) -> Any:
    """Load a checkpoint, take a step, save another one and a Hugging Face folder; returns weights before and after."""
    world = World.join("cpu")
    engine = build(family, Layout.of(world, parallel(**sizes)), backend)
    if load is not None:
        engine.load_checkpoint(load)
    before = weights_of(engine)
    step(engine)
    engine.optimizer_step()
    engine.save_checkpoint(save)
    engine.export_hf(hf)
    result = before, weights_of(engine)
    world.close()
    return result


@needs_megatron
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_run_moves_from_fsdp_to_megatron_and_back(
    ranks2, ranks4, tmp_path: Path, family: str
) -> None:
    from mvp_engine.hf.weights.merge import merge

    folders = [str(tmp_path / f"{kind}{i}") for i in range(3) for kind in ("checkpoint", "hf")]
    first = ranks2.run(continued, {"shard": 2}, "fsdp", family, None, folders[0], folders[1])[0]
    sizes = {"tensor": 2, "pipeline": 2}
    second = ranks4.run(
        continued, sizes, "megatron", family, folders[0], *folders[2:4], timeout=400
    )[0]
    third = ranks2.run(continued, {"shard": 2}, "fsdp", family, folders[2], *folders[4:])[0]
    for (_, after), (before, _) in ((first, second), (second, third)):
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in after)
    for name, tensor in expected(family)[
        "weights"
    ].items():  # three steps on one rank, on one backend
        assert float((third[1][name] - tensor).abs().max() / tensor.abs().max()) < 1e-5, name
    merged = tmp_path / "merged"
    merge(Path(folders[2]), LanguageModel.on_meta(None, overrides_of(family)), merged)
    exported = _weights_in(folders[3])
    assert exported.keys() == _weights_in(merged).keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in _weights_in(merged).items())


def _weights_in(folder: Path | str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {
        name: tensor
        for file in Path(folder).glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


# ---- What is refused ------------------------------------------------------------------------------------------------


def engine_for(
    family: str, backend: str = "megatron", config: dict[str, Any] | None = None, **how: Any
) -> Any:
    model = LanguageModel.on_meta(None, {**overrides_of(family), **(config or {})})
    return engine_class("language_model", backend)(
        model, Layout(World.join("cpu")), Settings(**how)
    )


@pytest.mark.parametrize(
    ("family", "config", "how", "message"),
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
def test_megatron_refuses_by_name(
    family: str, config: dict[str, Any], how: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        engine_for(family, config=config, **how)


def test_sequence_parallel_of_megatron_on_fsdp_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.sequence_parallel is for model\.backend=megatron"):
        engine_for("qwen3", "fsdp", sequence_parallel=True).initialize()


@pytest.mark.skipif(not MISSING, reason="megatron-core is installed")
def test_megatron_that_is_not_installed_names_the_extra() -> None:
    with pytest.raises(UserError, match=r"pip install 'mvp-engine\[megatron\]'"):
        engine_for("qwen3")


@pytest.mark.skipif(not MISSING, reason="megatron-core is installed")
def test_megatron_that_is_not_installed_is_noticed_before_data_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    config = ROOT / "recipes" / "qwen3" / "configs" / "pretrain_cpu.yaml"
    assert (
        main(["train", str(config), "model.backend=megatron", f"made.folder={tmp_path}/made"])
        == EXIT_USER_ERROR
    )
    assert "pip install 'mvp-engine[megatron]'" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_weight_table_interleaves_queries_keys_and_values_by_key_value_head() -> None:
    query, key, value = (
        torch.arange(8),
        torch.arange(10, 14),
        torch.arange(20, 24),
    )  # 4 and 2 heads of 2
    joined = by_kv_head(query, key, value, head_dim=2)
    assert joined.tolist() == [0, 1, 2, 3, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 22, 23]
