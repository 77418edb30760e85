"""Pipeline parallel: gradients, log-probs and checkpoints of one rank, for packs of any lengths and numbers."""

import functools

import pytest
import torch
from conftest import CAMPAIGN, read_metrics, user_error
from families import overrides_of
from tiny_engines import (
    ALONE,
    LM,
    adamw,
    assert_close,
    assert_equal,
    assert_metrics,
    engine_of,
    gradients,
    loss_of,
    message_of,
    packed,
    scores_of,
    share_of,
    weights,
)
from torch.multiprocessing.reductions import StorageWeakRef

from mvp_engine.checkpoint.format import Reader
from mvp_engine.distributed.dtensor import local_tensor
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.model.pipeline import stage_bounds
from mvp_engine.model_engine.fsdp.engine import one_forward_one_backward

FOUR = {"num_hidden_layers": 4}
TIED = {"tie_word_embeddings": True}
FULL = {"activation_checkpointing": "full"}
EAGER = {"compile": "aot_eager"}


def case(family, *counts, how=None, **changes):
    """Family, micro-batches of each data rank, changes of the config, settings of the engine."""
    return family, list(counts), changes, how or {}


LAYOUTS = [
    (
        {"pipeline": 2},
        [
            case("qwen3", 3),
            case("llama", 5, **TIED),
            case("gemma3_text", 1),
        ],
    ),
    (
        {"pipeline": 2, "shard": 2},
        [
            case("llama", 5, 0, **TIED),
            case("qwen3_moe", 1, 3, **FOUR),
        ],
    ),
]
MORE = [
    (
        {"pipeline": 2},
        [
            case("gpt_oss", 4),
            case("qwen3_moe", 2),
            case("qwen3", 3, how=FULL, **FOUR),
            case("qwen3", 3, how=EAGER, **FOUR),
            case("llama", 3, how={**EAGER, **FULL}, **FOUR),
        ],
    ),
    (
        {"pipeline": 4},
        [
            case("llama", 5, **TIED, **FOUR),
            case("gemma3_text", 2),
            case("gpt_oss", 4, **FOUR),
        ],
    ),
    (
        {"pipeline": 2, "replicate": 2},
        [
            case("llama", 0, 2, **TIED),
            case("gpt_oss", 3, 1),
        ],
    ),
    (
        {"pipeline": 2, "shard": 2},
        [
            case("gpt_oss", 2, 5),
            case("gemma3_text", 4, 1),
            case("qwen3", 0, 3, how=EAGER, **FOUR),
        ],
    ),
    (
        {"pipeline": 2, "tensor": 2},
        [
            case("qwen3", 3),
            case("llama", 2, **TIED),
            case("qwen3_moe", 2),
        ],
    ),
    (
        {"pipeline": 2, "ulysses": 2},
        [
            case("qwen3", 3),
            case("llama", 2, **TIED),
            case("gpt_oss", 2),
        ],
    ),
    (
        {"pipeline": 2, "context": 2},
        [
            case("qwen3", 3),
            case("gemma3_text", 2),
            case("gpt_oss", 2),
        ],
    ),
    (
        {"pipeline": 2, "shard": 2, "expert": 2},
        [
            case("qwen3_moe", 3, 1, **FOUR),
            case("gpt_oss", 0, 2),
        ],
    ),
]


def packs(seed, number):
    """Micro-batches of one to three sequences of 2 to 11 tokens."""
    g = torch.Generator().manual_seed(seed)
    counts = [int(torch.randint(1, 4, (1,), generator=g)) for _ in range(number)]
    lengths = [torch.randint(2, 12, (count,), generator=g).tolist() for count in counts]
    return [packed(*each, seed=10 * seed + i, vocab=88) for i, each in enumerate(lengths)]


def step(engine, micro_batches):
    """One step: gradients by name, norm, loss, and the micro-batches that this stage kept at most."""
    kept = []
    is_compiled = bool(engine.settings.compile)  # the hook would be compiled, too
    hooks = [] if is_compiled else [watch_activations(engine, kept)]
    numbers = engine.train_batch(micro_batches, scores_of(engine))
    for hook in hooks:
        hook.remove()
    return {
        "grads": gradients(engine.model),
        "norm": float(numbers.grad_norm),
        "loss": engine.step_status()[0].loss,
        "log_probs": engine.infer_batch(packs(9, 1)[0], ["log_probs"])["log_probs"],
        "kept": max(kept, default=0),
        "held": sum(local_tensor(param).numel() for param in engine.model.parameters()),
    }


def watch_activations(engine, kept):
    """Note how many forwards have the input of this stage's first query projection in memory, for its gradient."""
    inputs = []
    modules = engine.model.named_modules()
    query = next(module for name, module in modules if name.endswith(".q_proj"))

    def note(_, args):
        inputs.append(StorageWeakRef(args[0].untyped_storage()))
        kept.append(sum(not one.expired() for one in inputs))

    return query.register_forward_pre_hook(note)


def build(layout, family, changes, **how):
    engine = engine_of({**overrides_of(family), **changes}, layout, seed=5, **how)
    engine.model.eval()
    return engine


@functools.cache
def expected(family, changes, counts):
    batches = [one for rank, number in enumerate(counts) for one in packs(rank, number)]
    return step(build(ALONE, family, dict(changes)), batches)


def stepped(layout, cases):
    rank = layout.data_rank
    return [
        step(build(layout, family, changes, **how), packs(rank, counts[rank]))
        for family, counts, changes, how in cases
    ]


def check(results, one, case):
    """Every gradient on every rank that holds it, and that each is held."""
    assert set().union(*(result["grads"] for result in results)) == set(one["grads"]), case
    for result in results:
        assert result["norm"] == pytest.approx(one["norm"], rel=1e-5), case
        assert result["loss"] == pytest.approx(one["loss"], rel=1e-5), case
        assert torch.allclose(result["log_probs"], one["log_probs"], rtol=1e-5, atol=1e-5), case
        held = {name: one["grads"][name] for name in result["grads"]}
        assert_close(result["grads"], held, floor=1e-3, what=case)


@pytest.mark.parametrize(
    "sizes, cases",
    [*LAYOUTS, *(pytest.param(*one, marks=[pytest.mark.slow, CAMPAIGN]) for one in MORE)],
    ids=str,
)
def test_pipeline_gives_the_gradients_of_one_rank(on_ranks, sizes, cases):
    results = on_ranks(sizes, stepped, cases)
    stages = sizes["pipeline"]
    for index, (family, counts, changes, how) in enumerate(cases):
        one = expected(family, tuple(changes.items()), tuple(counts))
        of_case = [result[index] for result in results]
        check(of_case, one, (family, sizes))
        for rank, result in enumerate(of_case):
            stage = rank // (len(results) // stages)
            assert result["kept"] <= min(max(counts), stages - stage), (family, rank)
            assert result["held"] < one["held"], (family, rank)
        if not how and max(counts) >= stages and not {"shard", "replicate"} & sizes.keys():
            assert max(result["kept"] for result in of_case) == stages, family


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", range(6))
def test_schedule_runs_every_forward_and_backward_and_keeps_few_micro_batches(
    micro_batches, stages
):
    for stage in range(stages):
        order = list(one_forward_one_backward(micro_batches, stage, stages))
        assert order.count(True) == order.count(False) == micro_batches
        kept = [order[: i + 1].count(True) - order[: i + 1].count(False) for i in range(len(order))]
        assert min(kept, default=0) >= 0
        assert max(kept, default=0) == min(micro_batches, stages - stage)


def test_stage_bounds_spread_parameters_evenly_and_leave_deepstack_on_the_first_stage():
    assert stage_bounds(7, 3, 0, "") == [0, 3, 5, 7]
    assert stage_bounds(7, 3, 0, "", (0.5, 0.1)) == [0, 2, 5, 7]
    assert stage_bounds(8, 3, 0, "", (0.5, 0.1)) == [0, 2, 5, 8]
    # Qwen3-235B, whose embeddings are a quarter of a block: 1.032 between the stages with most and least.
    assert stage_bounds(94, 4, 0, "", (0.25, 0.25)) == [0, 23, 47, 71, 94]
    assert stage_bounds(6, 3, 3, "") == [0, 3, 5, 6]
    with user_error("each stage needs one"):
        stage_bounds(2, 3, 0, "")
    with user_error("Use 2 stages or fewer"):
        stage_bounds(4, 3, 3, "")


# ---- Checkpoints --------------------------------------------------------------------------------------------------


def resharded(layout, load, folder, steps):
    """The losses of steps from a checkpoint; saves another one, and a Hugging Face folder."""
    shape = {**overrides_of("llama"), **TIED, **FOUR}
    engine = engine_of(shape, layout, lambda m: adamw(m, 1e-2), seed=5, clip_grad_norm=0.5)
    engine.model.eval()
    if load is not None:
        engine.load_checkpoint(load / "saved")
    losses = []
    for number in range(steps):
        engine.train_batch(share_of(layout, packs(number, 4)), loss_of(engine))
        losses.append(engine.step_status()[0].loss)
    engine.save_checkpoint(folder / "saved")
    engine.export_hf(folder / "hf")
    return losses


def saved(folder):
    reader = Reader(folder / "saved")
    names = [name for name in reader.entries if name.startswith(("model.", "optim."))]
    return {name: reader.read(name) for name in names}


@pytest.mark.slow
def test_pipeline_checkpoints_are_bit_equal_over_layouts_and_continue_the_losses(
    on_ranks, tmp_path
):
    straight = resharded(ALONE, None, tmp_path / "straight", 4)
    resharded(ALONE, None, tmp_path / "one", 2)
    of_one = (tmp_path / "one" / "hf" / "model.safetensors").read_bytes()
    before = tmp_path / "one"
    for sizes in ({"pipeline": 2}, {"pipeline": 2, "shard": 2}, {"pipeline": 4}, {"shard": 4}):
        folder = tmp_path / str(sizes)
        on_ranks(sizes, resharded, before, folder, 0)
        assert_equal(saved(folder), saved(tmp_path / "one"))
        assert (folder / "hf" / "model.safetensors").read_bytes() == of_one
        before = folder
    for losses in on_ranks({"pipeline": 2, "shard": 2}, resharded, None, tmp_path / "trained", 4):
        assert losses == pytest.approx(straight, rel=1e-5)
    one, two = saved(tmp_path / "straight"), saved(tmp_path / "trained")
    assert one.keys() == two.keys()
    for name in one:
        assert torch.allclose(one[name].float(), two[name].float(), rtol=1e-4, atol=1e-4), name


def loaded_from(layout, folder):
    """Whether a stage has exactly its tensors of a Hugging Face folder, and both copies of tied ones are equal."""
    from safetensors.torch import load_file

    engine = engine_of(LanguageModel.on_meta(folder), layout, optimizer=None, seed=1)
    files = load_file(folder / "model.safetensors")
    held = weights(engine.model)
    layers = {name.split(".")[3] for name in held if ".layers." in name}
    same = all(torch.equal(value, files[name.removeprefix("hf.")]) for name, value in held.items())
    return same and layers == {str(2 * layout.stage), str(2 * layout.stage + 1)}


def test_stages_load_their_slices_of_a_folder(on_ranks, tmp_path):
    resharded(ALONE, None, tmp_path, 1)
    assert on_ranks({"pipeline": 2}, loaded_from, tmp_path / "hf") == [True] * 2


# ---- Trainings ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pipeline_run_with_evaluation_and_resume_has_the_metrics_of_one_rank(
    train, ranks2, ranks4, tmp_path
):
    words = ["data.micro_batch_size=2", "optim.schedule=constant", "eval.steps=2"]
    assert train(*words, "train.max_steps=6", config=LM, dir=tmp_path / "one") == 0
    cut = [*words, "resume=auto", f"output_dir={tmp_path / 'cut'}"]
    stages = [*cut, "parallel.pipeline=2"]
    assert ranks2.launch(LM, *stages, "train.max_steps=2") == [0] * 2
    assert ranks4.launch(LM, *stages, "parallel.shard=2", "train.max_steps=4") == [0] * 4
    assert train(*cut, "train.max_steps=6", config=LM, dir=tmp_path / "cut") == 0
    for split in ("train", "eval"):
        one, many = (read_metrics(tmp_path / name, split) for name in ("one", "cut"))
        assert_metrics(many, one, loss=1e-5, grad_norm=1e-4)


@pytest.mark.parametrize(
    "family, changes, message",
    [
        ("qwen3", {"num_hidden_layers": 1}, "the model has 1 block, and each stage needs one"),
        ("gemma2", {}, ""),
    ],
)
def test_pipeline_refuses_models_that_cannot_be_cut(on_ranks, family, changes, message):
    for error in on_ranks({"pipeline": 2}, message_of, build, family, changes):
        assert message in error if message else not error
