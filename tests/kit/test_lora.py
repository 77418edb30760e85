"""LoRA: training starts as the base model, changes adapters only, and gives the same result on every layout."""

import pytest
import torch
from conftest import CAMPAIGN, ROOT, losses, mvp, user_error
from families import parallel
from folders import alone
from lora_models import BATCH, LM, WIDE, adam, engine_of, log_probs, pretrained, steps, weights
from test_api import constant
from tiny_models import build_model
from torch.utils.checkpoint import CheckpointPolicy

from mvp_engine.distributed import Layout, World
from mvp_engine.hf import LanguageModel
from mvp_engine.imports import import_file
from mvp_engine.kit import Lora, MLLMModelKit
from mvp_engine.model_engine import ModelSource, Settings, engine_class
from mvp_engine.model_engine.fsdp import parallelize
from mvp_engine.runs import list_runs


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return pretrained(tmp_path_factory.mktemp("base") / "qwen3")


@pytest.fixture(scope="module")
def vision_base(tmp_path_factory):
    """A pretrained folder of a vision-language model."""
    folder = tmp_path_factory.mktemp("base") / "qwen3_vl"
    build_model(LanguageModel, "qwen3_vl").hf.save_pretrained(folder)
    return folder


def test_lora_training_starts_as_the_base_model_and_changes_adapters_only(base):
    plain = engine_of(base, None, train=False)
    engine = engine_of(base, Lora(rank=4))
    expected = log_probs(plain)
    assert torch.equal(log_probs(engine), expected)
    before = weights(engine)
    # The base keeps its names.
    assert [name for name in before if ".lora_" not in name] == list(weights(plain))
    steps(engine, count=3)
    assert not torch.allclose(log_probs(engine), expected, atol=1e-3)
    for name, param in engine.model.named_parameters():
        if ".lora_" in name:
            assert not torch.equal(param, before[name]), name
        else:
            assert param.grad is None
            assert torch.equal(param, before[name]), name
    layers = [name for name in before if "lora_A" in name]
    assert len(layers) == 2 * 7  # all linear layers except the head
    assert f"LoRA on {len(layers)} layers" in MLLMModelKit.table(engine.model, engine.optimizer)


def test_lora_start_does_not_list_its_adapters_as_missing_in_the_folder(base):
    assert not engine_of(base, Lora(rank=4), train=False).model.not_in_folder
    value = engine_of(base, Lora(rank=4), kind="value_model", train=False)
    assert value.model.not_in_folder == ["score.weight"]


def test_lora_on_layers_with_biases_starts_as_the_base_model(tmp_path):
    build_model(LanguageModel, "qwen2").hf.save_pretrained(tmp_path / "qwen2")
    loras = (None, Lora(rank=4))
    engines = [engine_of(tmp_path / "qwen2", lora, train=False) for lora in loras]
    assert torch.equal(*map(log_probs, engines))


def train_in_bf16(folder, sizes):
    world = World.join("cpu") if sizes else None
    layout = Layout.of(world, parallel(**sizes)) if world else None
    engine = engine_of(folder, Lora(rank=4), layout, precision="bf16")
    steps(engine, count=3)
    found = weights(engine)
    if world:
        world.close()
    return found


@pytest.mark.slow
def test_lora_base_in_bf16_stays_bf16_when_training_in_bf16(ranks2, base, tmp_path):
    from transformers import AutoModelForCausalLM

    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(half)
    in_fp32 = engine_of(half, Lora(), train=False).model  # the precision is fp32
    assert {param.dtype for param in in_fp32.parameters()} == {torch.float32}
    before = weights(engine_of(half, Lora(rank=4), precision="bf16"))
    sharded = ranks2.run(train_in_bf16, half, {"shard": 2})
    for found in (train_in_bf16(half, {}), *sharded):
        for name, value in found.items():
            assert value.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16), name
            assert torch.equal(value, before[name]) == (".lora_" not in name), name
            assert value.isfinite().all()


def test_lora_selective_checkpointing_saves_no_adapter_matmuls(base, monkeypatch):
    kept, policy = [], parallelize._policy

    def watched(kinds, ctx, op, *args, **more):
        found = policy(kinds, ctx, op, *args, **more)
        is_saved = found == CheckpointPolicy.MUST_SAVE and not ctx.is_recompute
        if is_saved and op.overloadpacket.__name__ == "mm":
            kept.append(args[0].shape[0] * args[1].shape[1])
        return found

    monkeypatch.setattr(parallelize, "_policy", watched)
    sums = []
    for lora in (None, Lora(rank=2)):
        steps(engine_of(base, lora, activation_checkpointing="selective"), count=1)
        sums.append(sum(kept))
        kept.clear()
    assert 0 < sums[0] <= sums[1] < 1.1 * sums[0]


def on_layout(base, sizes, lora, settings):
    world = World.join("cpu")
    engine = engine_of(base, lora, Layout.of(world, parallel(**sizes)), **settings)
    first = {f"first {name}": value for name, value in weights(engine).items()}
    steps(engine)
    found = weights(engine)
    world.close()
    return first | found


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, settings",
    [
        pytest.param(
            {"replicate": 2},
            {"activation_checkpointing": "full"},
            marks=CAMPAIGN,
        ),
        ({"shard": 2}, {"activation_checkpointing": "selective", "compile": {"llm": "aot_eager"}}),
        ({"ulysses": 2}, {}),
        pytest.param(
            {"context": 2},
            {"activation_checkpointing": "full"},
            marks=CAMPAIGN,
        ),
    ],
    ids=["replicate", "shard", "ulysses", "context"],
)
def test_lora_layouts_train_to_the_same_weights(ranks2, base, sizes, settings):
    lora = Lora(rank=3, alpha=10.4)
    single = engine_of(base, lora)
    first = weights(single)
    steps(single)
    for found in ranks2.run(on_layout, base, sizes, lora, settings):
        for name, value in weights(single).items():
            assert torch.equal(found[f"first {name}"], first[name]), name
            assert torch.allclose(found[name], value, atol=1e-5), name


def test_lora_resume_with_dropout_is_bit_equal_and_merges(train, base, tmp_path):
    words = f"model.type=language_model model.path={base} lora.rank=2 lora.dropout=0.3".split()
    words += [
        "optim.schedule=constant",
        "lora.modules_to_save=['*.norm.weight']",
        "model.freeze=['hf.model.norm.weight']",
    ]
    assert train(*words, config=LM, dir=tmp_path / "straight") == 0
    assert train(*words, "train.max_steps=2", config=LM, dir=tmp_path / "run") == 0
    assert train(*words, "resume=auto", config=LM, dir=tmp_path / "run") == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    assert train(*words, "resume=auto", "workflow=evaluate", config=LM, dir=tmp_path / "run") == 0
    run = list_runs(tmp_path / "run")[0].dir
    for out in ("merged", "adapter --adapter"):  # model.freeze wins over lora.modules_to_save
        assert mvp(f"export {run} {tmp_path}/{out}") == 0


def test_lora_base_with_random_weights_is_stored_in_the_checkpoint(tmp_path):
    source = ModelSource(
        None, {"model_type": "qwen3", **WIDE, "num_hidden_layers": 1, "vocab_size": 99}
    )
    for seed in (1, 2):
        engine = engine_class("language_model")(
            MLLMModelKit(Lora()).build(source), alone(), Settings(seed=seed)
        )
        engine.initialize(adam, constant)
        if seed == 1:
            engine.save_checkpoint(tmp_path / "saved")
            expected = log_probs(engine)
        else:
            engine.load_checkpoint(tmp_path / "saved")
            assert torch.equal(log_probs(engine), expected)


def test_lora_unknown_or_conflicting_targets_are_refused(base, vision_base):
    for lora, words in (
        (
            Lora(target_modules=["q_prj"]),
            "no linear layers 'q_prj' apart from its head.* such as llm, .*q_proj",
        ),
        (Lora(target_modules=["lm_head"]), "no linear layers 'lm_head' apart from its head"),
        (Lora(target_modules=["audio"]), "no linear layers 'audio'"),
        (
            Lora(modules_to_save=["*.q_proj.*"]),
            "q_proj.weight is trained in full .* so it takes no adapter",
        ),
        (
            Lora(modules_to_save=["prjector"]),
            "lora.modules_to_save: no parameter name matches 'prjector'",
        ),
    ):
        with user_error(words):
            MLLMModelKit(lora).build(ModelSource(str(base)))
    with user_error("lora: Linear has no linear layers"):
        MLLMModelKit(Lora()).adapt(torch.nn.Linear(2, 2))
    with user_error("has no adapters to export"):
        MLLMModelKit.export_adapter(engine_of(base, None, train=False), "nowhere")


def test_lora_dropout_acts_in_training_only_and_a_frozen_part_trains_its_adapters(
    base,
):
    # Freezes base weights only.
    engine = engine_of(base, Lora(rank=2, dropout=0.5), freeze=("llm",))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, param in engine.model.named_parameters():
            param += 0.1 * (".lora_B" in name)
        one, two = (engine.model(BATCH, ["log_probs"])["log_probs"] for _ in "ab")
    assert not torch.equal(one, two)
    steps(engine)
    found = [log_probs(engine) for _ in "ab"]
    assert torch.equal(*found)


def test_model_skill_check_fails_a_model_that_ignores_an_adapter(vision_base):
    check = import_file(ROOT / "skills" / "model" / "check.py")

    def model():
        return MLLMModelKit(Lora(rank=2, target_modules=["llm", "vision"])).build(
            ModelSource(str(vision_base))
        )

    assert check.problems(vision_base, model()) == []
    broken = model()
    broken.hf.model.language_model.layers[1].mlp.down_proj._forward_hooks.clear()
    silent, unlike = check.problems(vision_base, broken)
    assert (
        "adapters without effect on text: 1, such as that of hf.model.language_model.layers.1.mlp.down"
        in silent
    )
    assert "log-probs of the merged weights differ" in unlike
