"""What trainings do with a model on pipeline stages: a second model, several calls, generation, half precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import overrides_of, parallel
from lora_models import pretrained
from test_reward import NoLog
from torch import Tensor
from torch.nn import functional as F

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel, ValueModel
from mvp_engine.kit import Distil, DistilLossKit, Lora, MLLMModelKit
from mvp_engine.kit.decoding import Decoding, complete
from mvp_engine.model_engine import LanguageModelEngine, ModelSource, Settings, ValueModelEngine

Step = Callable[[PackedBatch], tuple[Tensor, Tensor | float]]


def engine_of(seed: int, layout: Layout, trains: bool = True, **how: Any) -> LanguageModelEngine:
    model = LanguageModel.on_meta(None, {**overrides_of("qwen3"), "tie_word_embeddings": True})
    engine = LanguageModelEngine(model.requires_grad_(trains), layout, Settings(seed=seed, **how))
    engine.initialize((lambda model: torch.optim.SGD(model.parameters(), 0.0)) if trains else None)
    return engine


def pairs() -> list[PackedBatch]:
    generator = torch.Generator().manual_seed(4)
    lengths = [(7, 5, 4, 9), (3, 8), (6, 6)]
    return [
        PackedBatch.from_sequences([torch.randint(3, 88, (n,), generator=generator) for n in some])
        for some in lengths
    ]


def distil(layout: Layout) -> tuple[LanguageModelEngine, Step]:
    student, teacher = engine_of(5, layout), engine_of(6, layout, trains=False)
    kit: Any = DistilLossKit(Distil(teacher="x", temperature=0.7, nll=0.3), student.model, teacher)
    return student, lambda batch: kit(NoLog(), student.model, batch)


def dpo(layout: Layout) -> tuple[LanguageModelEngine, Step]:
    policy, reference = engine_of(5, layout), engine_of(6, layout, trains=False)

    def sums(engine: LanguageModelEngine, batch: PackedBatch) -> Tensor:
        log_probs_T = engine.model(batch, ["log_probs"])["log_probs"]
        return torch.stack([one.sum() for one in log_probs_T.split(batch.lengths.tolist())])

    def step(batch: PackedBatch) -> tuple[Tensor, float]:
        with reference.eval_mode():
            of_reference = sums(reference, batch)
        ratios = sums(policy, batch) - of_reference
        return -F.logsigmoid(0.3 * (ratios[::2] - ratios[1::2])).sum(), len(ratios) / 2

    return policy, step


def two_calls(layout: Layout) -> tuple[LanguageModelEngine, Step]:
    """Two forwards with gradients, of different lengths, and a third whose outputs the loss does not use."""
    engine = engine_of(5, layout)

    def step(batch: PackedBatch) -> tuple[Tensor, Tensor]:
        first = engine.model(batch, ["log_probs"])["log_probs"]
        second = engine.model(batch.select([0]), ["entropy"])["entropy"]
        engine.model(batch.select([1]), ["loss"])
        return -first.sum() * (1 + second.mean()), batch.num_loss_tokens

    return engine, step


LOSSES = {"distil": distil, "dpo": dpo, "two_calls": two_calls}


def trained(layout: Layout) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, build in LOSSES.items():
        engine, step = build(layout)
        engine.train_batch(pairs()[layout.data_rank :: layout.data_size], step)
        params = engine.model.named_parameters()
        grads = {
            key: full_tensor(param.grad).clone() for key, param in params if param.grad is not None
        }
        found[name] = (engine.step_status()[0].loss, grads)
    engine = engine_of(5, layout)
    decoding = Decoding(max_new_tokens=5, samples=2, temperature=1.0, seed=3)
    found["completions"] = [one.tokens for one in complete(engine, pairs()[0], decoding)]
    return found


def on_ranks(sizes: dict[str, int]) -> dict[str, Any]:
    world = World.join("cpu")
    found = trained(Layout.of(world, parallel(**sizes)))
    world.close()
    return found


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (2, {"pipeline": 2}),
        pytest.param(
            4,
            {"pipeline": 2, "shard": 2},
            marks=[pytest.mark.slow, pytest.mark.campaign(only=True)],
        ),
    ],
)
def test_pipeline_with_two_models_several_calls_and_generation_equals_one_rank(
    request: pytest.FixtureRequest, ranks: int, sizes: dict[str, int]
) -> None:
    results = request.getfixturevalue(f"ranks{ranks}").run(on_ranks, sizes)
    one = trained(Layout(World.join("cpu")))
    for result in results:
        assert [list(tokens) for tokens in result["completions"]] == [
            list(tokens) for tokens in one["completions"]
        ]
        for name in LOSSES:
            loss, grads = result[name]
            assert loss == pytest.approx(one[name][0], rel=1e-5), name
            assert grads
            for key, grad in grads.items():
                bound = 1e-5 * float(one[name][1][key].abs().max()) + 1e-8
                assert float((grad - one[name][1][key]).abs().max()) <= bound, (name, key)


def in_precision(precision: str, sizes: dict[str, int]) -> tuple[float, float, Tensor]:
    world = World.join("cpu")
    layout = Layout.of(world, parallel(**sizes)) if sizes else Layout(world)
    engine = engine_of(5, layout, precision=precision)

    def step(batch: PackedBatch) -> tuple[Tensor, Tensor]:
        return engine.model(batch, ["loss"])["loss"], batch.num_loss_tokens

    numbers = engine.train_batch(pairs(), step)
    hidden = engine.infer_batch(pairs()[0], ["hidden_states"])["hidden_states"].float()
    found = float(engine.step_status()[0].loss or 0), float(numbers.grad_norm), hidden
    world.close()
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_pipeline_in_half_precision_equals_one_rank_in_half_precision(
    ranks2, precision: str
) -> None:
    one = in_precision(precision, {})
    for loss, norm, hidden in ranks2.run(in_precision, precision, {"pipeline": 2}):
        assert loss == pytest.approx(one[0], rel=1e-5)
        assert norm == pytest.approx(one[1], rel=1e-3)
        assert torch.allclose(hidden, one[2], rtol=1e-5, atol=1e-5)


def outside() -> str:
    world = World.join("cpu")
    engine = engine_of(5, Layout.of(world, parallel(pipeline=2)))
    try:
        engine.model(pairs()[0], ["loss"])
    except UserError as error:
        return str(error)
    finally:
        engine._link.flush()  # type: ignore[union-attr]
        world.close()
    return ""


def test_model_of_stages_called_with_gradients_outside_of_a_step_raises(ranks2) -> None:
    for error in ranks2.run(outside):
        assert "outside of forward_step" in error


def with_lora(base: str, sizes: dict[str, int], folder: str, load: str | None) -> dict[str, Tensor]:
    """Adapters after two steps, or those of a checkpoint; saved and exported."""
    world = World.join("cpu")
    layout = Layout.of(world, parallel(**sizes)) if sizes else Layout(world)
    model = MLLMModelKit(Lora(rank=3)).build(ModelSource(base))
    engine = LanguageModelEngine(model, layout, Settings(seed=5))
    engine.initialize(
        lambda model: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    )
    if load is not None:
        engine.load_checkpoint(load)

    def step(batch: PackedBatch) -> tuple[Tensor, Tensor]:
        return engine.model(batch, ["loss"])["loss"], batch.num_loss_tokens

    for _ in range(0 if load else 2):
        engine.train_batch(pairs(), step)
    engine.save_checkpoint(f"{folder}/saved")
    engine.export_hf(f"{folder}/hf")
    named = engine.model.named_parameters()
    adapters = {
        name: full_tensor(param.detach()).clone() for name, param in named if ".lora_" in name
    }
    world.close()
    return adapters


def test_pipeline_with_lora_trains_saves_and_merges_as_one_rank(ranks2, tmp_path: Path) -> None:
    base = str(pretrained(tmp_path / "base"))
    one = with_lora(base, {}, str(tmp_path / "one"), None)
    results = ranks2.run(with_lora, base, {"pipeline": 2}, str(tmp_path / "two"), None)
    assert set().union(*results) == set(one)
    for result in results:
        for name, adapter in result.items():
            assert torch.allclose(adapter, one[name], rtol=1e-4, atol=1e-5), name
    with_lora(base, {}, str(tmp_path / "back"), str(tmp_path / "two" / "saved"))
    ranks2.run(
        with_lora, base, {"pipeline": 2}, str(tmp_path / "again"), str(tmp_path / "back" / "saved")
    )
    exported = [
        (tmp_path / name / "hf" / "model.safetensors").read_bytes()
        for name in ("two", "back", "again")
    ]
    assert exported[0] == exported[1] == exported[2]


def values(sizes: dict[str, int]) -> tuple[float | None, dict[str, Tensor], Tensor]:
    world = World.join("cpu")
    layout = Layout.of(world, parallel(**sizes)) if sizes else Layout(world)
    engine = ValueModelEngine(
        ValueModel.on_meta(None, overrides_of("qwen3")), layout, Settings(seed=5)
    )
    engine.initialize(lambda model: torch.optim.SGD(model.parameters(), 0.0))

    def step(batch: PackedBatch) -> tuple[Tensor, float]:
        return engine.model(batch, ["values"])["values"].sub(1).square().sum(), batch.num_tokens

    engine.train_batch(pairs(), step)
    params = engine.model.named_parameters()
    grads = {
        name: full_tensor(param.grad).clone() for name, param in params if param.grad is not None
    }
    found = (
        engine.step_status()[0].loss,
        grads,
        engine.infer_batch(pairs()[0], ["values"])["values"],
    )
    world.close()
    return found


def test_pipeline_of_a_value_model_gives_the_gradients_of_one_rank(ranks2) -> None:
    loss, grads, of_tokens = values({})
    results = ranks2.run(values, {"pipeline": 2})
    assert set(results[0][1]) | set(results[1][1]) == set(grads)
    for result in results:
        assert result[0] == pytest.approx(loss, rel=1e-5)
        assert torch.allclose(result[2], of_tokens, rtol=1e-5, atol=1e-5)
        for name, grad in result[1].items():
            assert torch.allclose(grad, grads[name], rtol=1e-5, atol=1e-6), name
