"""The model engine's API is enforced, and the page that says how to add a type and a backend is true."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, losses
from families import overrides_of
from test_packed_layouts import batch, gradients

from mvp_engine.cli import main
from mvp_engine.distributed import Layout, World
from mvp_engine.errors import UserError
from mvp_engine.model_engine import (
    FSDPEngine,
    LanguageModelEngine,
    ModelEngine,
    ModelSource,
    Settings,
    engine_class,
    register,
)
from mvp_engine.model_engine.registry import _REGISTRY

LM = ROOT / "tests" / "recipes" / "packed_lm" / "train.yaml"
PAGE = ROOT / "docs" / "model_engine.md"
ALONE = Layout(World(0, 1, 0, 1, torch.device("cpu")))


@pytest.fixture
def follow(monkeypatch) -> Any:
    """Run a section's code of the page; what it registers is forgotten afterwards."""
    monkeypatch.setattr("mvp_engine.model_engine.registry._REGISTRY", dict(_REGISTRY))

    def run(section: str) -> dict[str, Any]:
        text = PAGE.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
        [code] = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
        names: dict[str, Any] = {"__name__": "example"}
        exec(compile(code, str(PAGE), "exec"), names)
        return names

    return run


def test_docs_example_of_a_model_type_runs(follow, tmp_path: Path) -> None:
    names = follow("Adding a model type")
    kind = engine_class("token_classifier")
    assert kind is names["TokenClassifierEngine"]
    engine = kind(
        kind.build_model(ModelSource(None, overrides_of("qwen3"))), ALONE, Settings(seed=3)
    )
    engine.initialize(adam, constant)
    logits = engine.infer_batch(batch(), ["class_logits"], budget=12)["class_logits"]
    assert logits.shape == (23, 3)
    assert logits.std() > 0
    engine.export_hf(tmp_path / "out")
    engine.save_checkpoint(tmp_path / "saved")
    assert main(["merge", str(tmp_path / "saved"), str(tmp_path / "merged")]) == 0
    for folder in ("out", "merged"):
        again = kind(kind.build_model(ModelSource(str(tmp_path / folder))), ALONE)
        again.initialize()
        assert torch.equal(
            again.infer_batch(batch(), ["class_logits"], budget=12)["class_logits"], logits
        )


def test_docs_example_of_a_backend_runs(follow, train, tmp_path: Path) -> None:
    follow("Adding a backend")
    words = [
        "loop.total_steps=6",
        "lm.weights=true",
        "loop.eval_interval=3",
        "optim.schedule=constant",
    ]
    assert train(*words, config=LM, dir=tmp_path / "fsdp") == 0
    assert train(*words, "model.backend=plain", config=LM, dir=tmp_path / "plain") == 0
    assert losses(tmp_path / "plain") == pytest.approx(losses(tmp_path / "fsdp"), rel=1e-5)
    cut = [*words, "model.backend=plain", "resume=auto"]
    assert train(*cut, "loop.total_steps=4", config=LM, dir=tmp_path / "cut") == 0
    assert train(*cut, config=LM, dir=tmp_path / "cut") == 0
    assert losses(tmp_path / "cut") == losses(tmp_path / "plain")


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-3)


def constant(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def test_model_engine_subclass_without_all_methods_is_refused() -> None:
    class Half(ModelEngine):
        def initialize(self, optimizer: Any = None, scheduler: Any = None) -> None:
            pass

    with pytest.raises(TypeError, match="abstract method"):
        Half(torch.nn.Linear(2, 2), ALONE)
    calls = "initialize train_mode eval_mode forward_backward_batch optimizer_zero_grad optimizer_step lr_scheduler_step"
    calls += (
        " train_batch infer_batch to save_checkpoint load_checkpoint export_hf get_per_tensor_param"
    )
    calls += (
        " data_parallel_rank data_parallel_size data_parallel_group is_mp_src_rank_with_outputs"
    )
    assert all(hasattr(ModelEngine, name) for name in calls.split())
    page = PAGE.read_text()
    assert all(
        f"`{name}`" in page
        for name in calls.split()
        if name not in ("optimizer_zero_grad", "lr_scheduler_step")
    )


def test_registry_unknown_and_duplicate_names_are_refused(train, capsys) -> None:
    with pytest.raises(
        UserError, match=r"model\.type=langage_model on model\.backend=fsdp is not registered"
    ):
        engine_class("langage_model")
    with pytest.raises(
        UserError, match=r"model\.backend=megatro is not registered\. Did you mean megatron"
    ):
        engine_class("language_model", "megatro")
    with pytest.raises(ValueError, match="is FSDPEngine already"):
        register("module", "fsdp")(LanguageModelEngine)
    assert engine_class("module") is FSDPEngine
    assert train("model.type=language_model", "model.backend=mcore", config=LM) == 2
    assert (
        "language_model on fsdp, language_model on megatron, module on fsdp"
        in capsys.readouterr().err
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("qwen3", {"activation_checkpointing": "full"}),
        ("qwen3", {"activation_checkpointing": "selective"}),
        (
            "gpt_oss",
            {"activation_checkpointing": "selective"},
        ),  # its experts have biases, which transformers adds in place
        pytest.param(
            "qwen3", {"compile": "aot_eager"}, marks=pytest.mark.campaign(only=True)
        ),  # see test_compiled.py
    ],
    ids=str,
)
def test_activation_checkpointing_and_compile_give_equal_gradients(
    family: str, how: dict[str, Any]
) -> None:
    expected, found = gradients(family, ALONE), gradients(family, ALONE, **how)
    assert all(
        torch.allclose(found[name], grad, rtol=1e-5, atol=1e-6) for name, grad in expected.items()
    )


def test_activation_checkpointing_of_a_block_used_twice_gives_equal_gradients() -> None:
    """For images and for videos, say; autocast would cast their weights only once."""
    found = []
    for how in ("none", "full", "selective"):
        model = LanguageModelEngine.build_model(ModelSource(None, overrides_of("qwen3")))
        engine = LanguageModelEngine(
            model, ALONE, Settings(activation_checkpointing=how, precision="bf16")
        )
        engine.initialize(lambda model: torch.optim.SGD(model.parameters(), 0.0))
        twice = lambda run, b: (run(b, ["loss"])["loss"] + run(b, ["entropy"])["entropy"].sum(), 1)  # noqa: E731
        engine.train_batch([batch()], functools.partial(twice, engine.model))
        found.append([p.grad for p in engine.model.parameters() if p.grad is not None])
    for one, full, some in zip(*found, strict=True):
        assert torch.equal(one, full)
        assert torch.allclose(
            one, some, atol=0.01 * float(one.abs().max())
        )  # summed in float32, not in bf16


def test_activation_checkpointing_saves_fewer_activations() -> None:
    def kept(how: str) -> int:
        model = LanguageModelEngine.build_model(ModelSource(None, overrides_of("qwen3")))
        engine = LanguageModelEngine(model, ALONE, Settings(activation_checkpointing=how))
        engine.initialize()
        total = [0]

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            total[0] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            engine.model(batch(), ["log_probs"])
        return total[0]

    everything, full = kept("none"), kept("full")
    assert full < 0.4 * everything


NORMS = {
    **overrides_of("glm4_moe"),
    "use_qk_norm": True,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
NORMS |= {"moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}


def test_tensor_parallel_norms_missing_in_the_plan_get_reduced_gradients(
    ranks2, monkeypatch
) -> None:
    """transformers' plan does not name them, and each rank would have its own part of the gradient without a word."""
    monkeypatch.setattr("test_packed_layouts.overrides_of", lambda _: NORMS)
    expected = gradients("glm4_moe", ALONE)
    for found in ranks2.run(with_norms, True):
        assert all(
            torch.allclose(found[name], grad, rtol=1e-5, atol=1e-5)
            for name, grad in expected.items()
        )
    for said in ranks2.run(with_norms, False):
        assert re.search(
            r"parallel\.tensor=2: \S+[qk]_norm.weight gets a different gradient on each rank", said
        )


def with_norms(found: bool) -> Any:
    import test_packed_layouts as layouts
    from families import parallel

    from mvp_engine.hf.model import tp_plan as tensor

    world = World.join("cpu")
    before = layouts.overrides_of, tensor._head_norms
    layouts.overrides_of = lambda _: NORMS
    if not found:
        tensor._head_norms = lambda *_: set()
    try:
        return gradients("glm4_moe", Layout.of(world, parallel(tensor=2)))
    except UserError as error:
        return str(error)
    finally:
        layouts.overrides_of, tensor._head_norms = before
        world.close()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor": 4}, "parallel.tensor=4 cannot share 4 query and 2 key/value heads of qwen3"),
        ({"tensor": 3}, "do not multiply to the 4 process"),
        ({"ulysses": 2, "tensor": 2, "family": "gpt2"}, "gpt2 has no tensor-parallel plan"),
    ],
    ids=str,
)
def test_unsupported_layouts_are_refused_at_start(
    ranks4, sizes: dict[str, Any], message: str
) -> None:
    for said in ranks4.run(refused, sizes):
        assert message in said


def refused(sizes: dict[str, Any]) -> str:
    from families import parallel

    world = World.join("cpu")
    family = sizes.pop("family", "qwen3")
    try:
        gradients(family, Layout.of(world, parallel(**sizes)))
    except UserError as error:
        return str(error)
    finally:
        world.close()
    return "nothing"
