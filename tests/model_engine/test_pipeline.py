"""Pipeline parallel: gradients, log-probs and checkpoints of one rank, for packs of any lengths and numbers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, read_metrics
from families import overrides_of, parallel, refusal
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mvp_engine.checkpoint.format import Reader
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor, local_tensor
from mvp_engine.distributed.pipeline import one_forward_one_backward
from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.model.pipeline_cut import stage_bounds
from mvp_engine.model_engine import LanguageModelEngine, Settings

LM = ROOT / "tests" / "recipes" / "packed_lm" / "train.yaml"
FOUR = {"num_hidden_layers": 4}
TIED = {"tie_word_embeddings": True}

# ranks, sizes, (family, changes of its config, micro-batches of each data rank, settings of the engine)
Case = tuple[str, dict[str, Any], list[int], dict[str, Any]]
LAYOUTS: list[tuple[int, dict[str, int], list[Case]]] = [
    (
        2,
        {"pipeline": 2},
        [("qwen3", {}, [3], {}), ("llama", TIED, [5], {}), ("gemma3_text", {}, [1], {})],
    ),
    (
        4,
        {"pipeline": 2, "shard": 2},
        [("llama", TIED, [5, 0], {}), ("qwen3_moe", FOUR, [1, 3], {})],
    ),
]
MORE: list[tuple[int, dict[str, int], list[Case]]] = [
    (
        2,
        {"pipeline": 2},
        [
            ("gpt_oss", {}, [4], {}),
            ("qwen3_moe", {}, [2], {}),
            ("qwen3", FOUR, [3], {"activation_checkpointing": "full"}),
            ("qwen3", FOUR, [3], {"compile": "aot_eager"}),
            ("llama", FOUR, [3], {"compile": "aot_eager", "activation_checkpointing": "full"}),
        ],
    ),
    (
        4,
        {"pipeline": 4},
        [
            ("llama", {**TIED, **FOUR}, [5], {}),
            ("gemma3_text", {}, [2], {}),
            ("gpt_oss", FOUR, [4], {}),
        ],
    ),
    (4, {"pipeline": 2}, [("llama", TIED, [0, 2], {}), ("gpt_oss", {}, [3, 1], {})]),
    (
        4,
        {"pipeline": 2, "shard": 2},
        [("gpt_oss", {}, [2, 5], {}), ("gemma3_text", {}, [4, 1], {})],
    ),
    (4, {"pipeline": 2, "shard": 2}, [("qwen3", FOUR, [0, 3], {"compile": "aot_eager"})]),
    (
        4,
        {"pipeline": 2, "tensor": 2},
        [("qwen3", {}, [3], {}), ("llama", TIED, [2], {}), ("qwen3_moe", {}, [2], {})],
    ),
    (
        4,
        {"pipeline": 2, "ulysses": 2},
        [("qwen3", {}, [3], {}), ("llama", TIED, [2], {}), ("gpt_oss", {}, [2], {})],
    ),
    (
        4,
        {"pipeline": 2, "context": 2},
        [("qwen3", {}, [3], {}), ("gemma3_text", {}, [2], {}), ("gpt_oss", {}, [2], {})],
    ),
    (
        4,
        {"pipeline": 2, "shard": 2, "expert": 2},
        [("qwen3_moe", FOUR, [3, 1], {}), ("gpt_oss", {}, [0, 2], {})],
    ),
]


def packs(seed: int, number: int) -> list[PackedBatch]:
    """Micro-batches of one to three sequences of 2 to 11 tokens."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(number):
        lengths = torch.randint(
            2, 12, (int(torch.randint(1, 4, (1,), generator=generator)),), generator=generator
        )
        found.append(
            PackedBatch.from_sequences(
                [torch.randint(3, 88, (n,), generator=generator) for n in lengths]
            )
        )
    return found


def config_of(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    return {**overrides_of(family), **changes}


def build(
    config: dict[str, Any], layout: Layout, lr: float = 0.0, **how: Any
) -> LanguageModelEngine:
    engine = LanguageModelEngine(
        LanguageModel.on_meta(None, config), layout, Settings(seed=5, **how)
    )
    engine.initialize(lambda model: torch.optim.AdamW(model.parameters(), lr))
    engine.model.eval()
    return engine


def step(engine: LanguageModelEngine, micro_batches: list[PackedBatch]) -> dict[str, Any]:
    """One step: gradients by name, norm, loss, and the micro-batches that this stage kept at most."""

    def loss(micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        out = engine.model(micro_batch, ["log_probs", "entropy"])
        return out["log_probs"].sum() - 0.1 * out["entropy"].sum(), micro_batch.num_loss_tokens

    kept: list[int] = []
    hooks = (
        [] if engine.settings.compile else [watch_activations(engine, kept)]
    )  # it would be compiled, too
    numbers = engine.train_batch(micro_batches, loss)
    for hook in hooks:
        hook.remove()
    params = engine.model.named_parameters()
    grads = {
        name: full_tensor(param.grad).clone() for name, param in params if param.grad is not None
    }
    log_probs = engine.infer_batch(packs(9, 1)[0], ["log_probs"])["log_probs"]
    results = {"norm": float(numbers.grad_norm), "loss": engine.step_status()[0].loss}
    return {
        "grads": grads,
        "log_probs": log_probs,
        "kept": max(kept, default=0),
        "weights": held(engine),
        **results,
    }


def watch_activations(engine: LanguageModelEngine, kept: list[int]) -> Any:
    """Note how many forwards have the input of this stage's first query projection in memory, for its gradient."""
    inputs: list[StorageWeakRef] = []
    modules = engine.model.named_modules()
    query = next(module for name, module in modules if name.endswith(".q_proj"))

    def note(_: Any, args: tuple[Tensor, ...]) -> None:
        inputs.append(StorageWeakRef(args[0].untyped_storage()))
        kept.append(sum(not one.expired() for one in inputs))

    return query.register_forward_pre_hook(note)


def held(engine: LanguageModelEngine) -> int:
    """Elements of parameters on this rank."""
    return sum(local_tensor(param).numel() for param in engine.model.parameters())


@functools.cache
def expected(
    family: str, changes: tuple[tuple[str, Any], ...], counts: tuple[int, ...]
) -> dict[str, Any]:
    engine = build(config_of(family, dict(changes)), Layout(World.join("cpu")))
    return step(engine, [one for rank, number in enumerate(counts) for one in packs(rank, number)])


def on_ranks(sizes: dict[str, int], cases: list[Case]) -> list[dict[str, Any]]:
    world = World.join("cpu")
    layout = Layout.of(world, parallel(**sizes))
    results = []
    for family, changes, counts, how in cases:
        engine = build(config_of(family, changes), layout, **how)
        results.append(step(engine, packs(layout.data_rank, counts[layout.data_rank])))
    world.close()
    return results


def check(results: list[dict[str, Any]], one: dict[str, Any], case: object) -> None:
    """Every gradient on every rank that holds it, and that each is held."""
    assert set().union(*(result["grads"] for result in results)) == set(one["grads"]), case
    for result in results:
        assert result["norm"] == pytest.approx(one["norm"], rel=1e-5), case
        assert result["loss"] == pytest.approx(one["loss"], rel=1e-5), case
        assert torch.allclose(result["log_probs"], one["log_probs"], rtol=1e-5, atol=1e-5), case
        for name, grad in result["grads"].items():
            bound = 1e-5 * float(one["grads"][name].abs().max()) + 1e-8
            assert float((grad - one["grads"][name]).abs().max()) <= bound, (case, name)


def compare(
    request: pytest.FixtureRequest, ranks: int, sizes: dict[str, int], cases: list[Case]
) -> None:
    results = request.getfixturevalue(f"ranks{ranks}").run(on_ranks, sizes, cases)
    stages = sizes["pipeline"]
    for index, (family, changes, counts, how) in enumerate(cases):
        one = expected(family, tuple(changes.items()), tuple(counts))
        of_case = [result[index] for result in results]
        check(of_case, one, (family, sizes))
        for rank, result in enumerate(of_case):
            stage = rank // (ranks // stages)
            assert result["kept"] <= min(max(counts), stages - stage), (family, rank)
            if (
                not how
                and max(counts) >= stages
                and "shard" not in sizes
                and "replicate" not in sizes
            ):
                counted = [other["kept"] for other in of_case if other["kept"]]
                assert max(counted) == stages, family
            assert result["weights"] < one["weights"], (family, rank)


@pytest.mark.parametrize(("ranks", "sizes", "cases"), LAYOUTS, ids=str)
def test_pipeline_gives_the_gradients_of_one_rank(
    request: pytest.FixtureRequest, ranks: int, sizes: dict[str, int], cases: list[Case]
) -> None:
    compare(request, ranks, sizes, cases)


@pytest.mark.slow
@pytest.mark.campaign(only=True)
@pytest.mark.parametrize(("ranks", "sizes", "cases"), MORE, ids=str)
def test_pipeline_with_other_dimensions_gives_the_gradients_of_one_rank(
    request: pytest.FixtureRequest, ranks: int, sizes: dict[str, int], cases: list[Case]
) -> None:
    compare(request, ranks, sizes, cases)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", range(6))
def test_schedule_runs_every_forward_and_backward_and_keeps_few_micro_batches(
    micro_batches: int, stages: int
) -> None:
    for stage in range(stages):
        order = list(one_forward_one_backward(micro_batches, stage, stages))
        assert order.count(True) == order.count(False) == micro_batches
        kept = [order[: i + 1].count(True) - order[: i + 1].count(False) for i in range(len(order))]
        assert min(kept, default=0) >= 0
        assert max(kept, default=0) == min(micro_batches, stages - stage)


def test_stage_bounds_give_blocks_to_stages_with_fewest_parameters_and_deepstack_to_the_first() -> (
    None
):
    assert stage_bounds(7, 3, 0, "") == [0, 3, 5, 7]
    assert stage_bounds(7, 3, 0, "", (0.5, 0.1)) == [0, 2, 5, 7]
    assert stage_bounds(8, 3, 0, "", (0.5, 0.1)) == [0, 2, 5, 8]
    # Qwen3-235B, whose embeddings are a quarter of a block: 1.032 between the stages with most and least.
    bounds = stage_bounds(94, 4, 0, "", (0.25, 0.25))
    assert bounds == [0, 23, 47, 71, 94]
    sizes = [b - a + end for a, b, end in zip(bounds, bounds[1:], (0.25, 0, 0, 0.25), strict=False)]
    assert max(sizes) / min(sizes) <= 1.05
    assert stage_bounds(6, 3, 3, "") == [0, 3, 5, 6]
    with pytest.raises(UserError, match="each stage needs one"):
        stage_bounds(2, 3, 0, "")
    with pytest.raises(UserError, match="Use 2 stages or fewer"):
        stage_bounds(4, 3, 3, "")


# ---- Checkpoints --------------------------------------------------------------------------------------------------


def resharded(
    sizes: dict[str, int], load: str | None, save: str, export: str, steps: int
) -> list[float | None]:
    world = World.join("cpu")
    layout = Layout.of(world, parallel(**sizes)) if sizes else Layout(world)
    engine = build(config_of("llama", {**TIED, **FOUR}), layout, 1e-2, clip_grad_norm=0.5)
    if load is not None:
        engine.load_checkpoint(load)
    losses = []
    for number in range(steps):
        batches = packs(number, 4)
        own = batches[layout.data_rank :: layout.data_size]

        def loss(micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
            return engine.model(micro_batch, ["loss"])["loss"], micro_batch.num_loss_tokens

        engine.train_batch(own, loss)
        losses.append(engine.step_status()[0].loss)
    engine.save_checkpoint(save)
    engine.export_hf(export)
    world.close()
    return losses


def saved(folder: Path) -> dict[str, Tensor]:
    reader = Reader(folder)
    return {
        name: reader.read(name) for name in reader.entries if name.startswith(("model.", "optim."))
    }


def assert_bit_equal(folder: Path, other: Path) -> None:
    one, two = saved(folder), saved(other)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
def test_pipeline_checkpoints_are_bit_equal_over_layouts_and_continue_the_losses(
    ranks2, ranks4, tmp_path: Path
) -> None:
    straight = resharded({}, None, str(tmp_path / "straight"), str(tmp_path / "hf_straight"), 4)
    resharded({}, None, str(tmp_path / "one"), str(tmp_path / "hf_one"), 2)
    chain: list[tuple[Any, dict[str, int]]] = [
        (ranks2, {"pipeline": 2}),
        (ranks4, {"pipeline": 2, "shard": 2}),
        (ranks4, {"pipeline": 4}),
        (ranks4, {"shard": 4}),
    ]
    before = tmp_path / "one"
    for number, (pool, sizes) in enumerate(chain):
        folder = tmp_path / f"layout{number}"
        pool.run(resharded, sizes, str(before), str(folder), str(tmp_path / f"hf{number}"), 0)
        assert_bit_equal(folder, tmp_path / "one")
        exported = (tmp_path / f"hf{number}" / "model.safetensors").read_bytes()
        assert exported == (tmp_path / "hf_one" / "model.safetensors").read_bytes()
        before = folder
    trained = [str(tmp_path / "trained"), str(tmp_path / "hf_trained"), 4]
    for losses in ranks4.run(resharded, {"pipeline": 2, "shard": 2}, None, *trained):
        assert losses == pytest.approx(straight, rel=1e-5)
    one, two = saved(tmp_path / "straight"), saved(tmp_path / "trained")
    assert one.keys() == two.keys()
    for name in one:
        assert torch.allclose(one[name].float(), two[name].float(), rtol=1e-4, atol=1e-4), name


def loaded_from(folder: str, sizes: dict[str, int]) -> bool:
    """Whether a stage has exactly its tensors of a Hugging Face folder, and both copies of tied ones are equal."""
    from safetensors.torch import load_file

    world = World.join("cpu")
    layout = Layout.of(world, parallel(**sizes))
    engine = LanguageModelEngine(LanguageModel.on_meta(folder), layout, Settings(seed=1))
    engine.initialize()
    files = load_file(f"{folder}/model.safetensors")
    names = [name for name, _ in engine.model.named_parameters()]
    same = all(
        torch.equal(full_tensor(param.detach()), files[name.removeprefix("hf.")])
        for name, param in engine.model.named_parameters()
    )
    layers = {name.split(".")[3] for name in names if ".layers." in name}
    world.close()
    return same and layers == {str(2 * layout.stage), str(2 * layout.stage + 1)}


def test_stages_load_their_slices_of_a_folder(ranks2, tmp_path: Path) -> None:
    resharded({}, None, str(tmp_path / "one"), str(tmp_path / "hf"), 1)
    assert ranks2.run(loaded_from, str(tmp_path / "hf"), {"pipeline": 2}) == [True] * 2


# ---- Trainings ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pipeline_run_with_evaluation_and_resume_has_the_metrics_of_one_rank(
    train, ranks2, ranks4, tmp_path: Path
) -> None:
    words = ["data.micro_batch_size=2", "optim.schedule=constant", "loop.eval_interval=2"]
    assert train(*words, "loop.total_steps=6", config=LM, dir=tmp_path / "one") == 0
    cut = [*words, "resume=auto", f"project.dir={tmp_path / 'cut'}"]
    assert ranks2.launch(LM, *cut, "parallel.pipeline=2", "loop.total_steps=2") == [0] * 2
    assert (
        ranks4.launch(LM, *cut, "parallel.pipeline=2", "parallel.shard=2", "loop.total_steps=4")
        == [0] * 4
    )
    assert train(*cut, "loop.total_steps=6", config=LM, dir=tmp_path / "cut") == 0
    for split in ("train", "eval"):
        one, many = read_metrics(tmp_path / "one", split), read_metrics(tmp_path / "cut", split)
        assert [r["step"] for r in one] == [r["step"] for r in many]
        assert [r["loss"] for r in one] == pytest.approx([r["loss"] for r in many], rel=1e-5)
        assert [r.get("totals") for r in one] == [r.get("totals") for r in many]
        assert [r.get("grad_norm", 0) for r in one] == pytest.approx(
            [r.get("grad_norm", 0) for r in many], rel=1e-4
        )


# ---- Refusals -----------------------------------------------------------------------------------------------------


def refused(changes: dict[str, Any], family: str) -> str:
    return refusal({"pipeline": 2}, lambda layout: build(config_of(family, changes), layout))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3", {"num_hidden_layers": 1}, "the model has 1 block, and each stage needs one"),
        ("gemma2", {}, ""),
    ],
)
def test_pipeline_refuses_models_that_cannot_be_cut(
    ranks2, family: str, changes: dict[str, Any], message: str
) -> None:
    for error in ranks2.run(refused, changes, family):
        assert message in error if message else not error
