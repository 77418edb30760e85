"""LoRA: begins as the base model, trains alike on every layout, saves adapters only, goes out merged or for peft."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, losses
from families import config_of, parallel
from test_api import constant
from test_hf_folders import alone, entries
from test_vision import lively, samples
from torch import Tensor

from mvp_engine.batch import PackedBatch
from mvp_engine.checkpoint import storage
from mvp_engine.checkpoint.manager import find_checkpoint
from mvp_engine.checkpoint.pieces import whole
from mvp_engine.cli import main
from mvp_engine.distributed import Layout, World
from mvp_engine.errors import EXIT_USER_ERROR, UserError
from mvp_engine.imports import import_file
from mvp_engine.kit import Lora, MLLMModelKit
from mvp_engine.model_engine import FSDPEngine, ModelSource, Settings, engine_class
from mvp_engine.model_engine.packed import LanguageModel, ValueModel
from mvp_engine.runs import list_runs

LM = ROOT / "tests" / "recipes" / "packed_lm" / "train.yaml"
BATCH = PackedBatch.from_sequences([torch.arange(3, 12), torch.arange(5, 9)])
WIDE = {"hidden_size": 160, "intermediate_size": 320}  # so that a base is much more than its adapters


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A pretrained folder of a text model."""
    torch.manual_seed(0)
    config = config_of("qwen3")
    for name, value in WIDE.items():
        setattr(config, name, value)
    folder = tmp_path_factory.mktemp("base") / "qwen3"
    LanguageModel.from_config(config).hf.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> Path:
    """A pretrained folder of a model that sees."""
    folder = tmp_path_factory.mktemp("base") / "qwen3_vl"
    lively(LanguageModel, "qwen3_vl").hf.save_pretrained(folder)
    return folder


def engine_of(
    folder: Path,
    lora: Lora | None,
    layout: Layout | None = None,
    kind: str = "language_model",
    train: bool = True,
    **settings: Any,
) -> FSDPEngine:
    model = MLLMModelKit(lora).build(ModelSource(str(folder)), kind)
    engine = engine_class(kind)(model, layout or alone(), Settings(seed=3, **settings))
    assert isinstance(engine, FSDPEngine)
    engine.initialize(*((adam, constant) if train else ()))
    return engine


def adam(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)


def steps(engine: FSDPEngine, batch: PackedBatch = BATCH, count: int = 2, output: str = "log_probs") -> None:
    for _ in range(count):
        engine.train_batch([batch], lambda b: (-engine.model(b, [output])[output].sum(), b.weight))


def weights(engine: FSDPEngine) -> dict[str, Tensor]:
    return {name: whole(param.detach()).clone() for name, param in engine.model.named_parameters()}


@pytest.mark.parametrize("dora", [False, True])
def test_training_begins_as_the_base_model_and_changes_adapters_only(base: Path, dora: bool) -> None:
    plain = engine_of(base, None, train=False)
    engine = engine_of(base, Lora(rank=4, dora=dora))
    expected = plain.infer_batch(BATCH, ["log_probs"])["log_probs"]
    assert torch.equal(engine.infer_batch(BATCH, ["log_probs"])["log_probs"], expected)
    before = weights(engine)
    assert [name for name in before if ".lora_" not in name] == list(weights(plain))  # names stay as they are
    steps(engine, count=3)
    assert not torch.allclose(engine.infer_batch(BATCH, ["log_probs"])["log_probs"], expected, atol=1e-3)
    for name, param in engine.model.named_parameters():
        if ".lora_" in name:
            assert not torch.equal(param, before[name]), name
        else:
            assert param.grad is None
            assert torch.equal(param, before[name]), name
    layers = [name for name in before if "lora_A" in name]
    assert len(layers) == 4 * 7  # all linear layers but the head
    assert f"LoRA on {len(layers)} layers" in MLLMModelKit.table(engine.model, engine.optimizer)


def test_with_biases_too_training_begins_as_the_base_model(tmp_path: Path) -> None:
    lively(LanguageModel, "qwen2").hf.save_pretrained(tmp_path / "qwen2")
    plain, dora = (engine_of(tmp_path / "qwen2", lora, train=False) for lora in (None, Lora(rank=4, dora=True)))
    found = [engine.infer_batch(BATCH, ["log_probs"])["log_probs"] for engine in (plain, dora)]
    assert torch.equal(*found)


def in_half_precision(folder: Path, sizes: dict[str, int]) -> dict[str, Tensor]:
    world = World.join("cpu") if sizes else None
    layout = Layout.of(world, parallel(**sizes)) if world else None
    engine = engine_of(folder, Lora(rank=4, dora=True), layout, precision="bf16")
    steps(engine, count=3)
    found = weights(engine)
    if world:
        world.close()
    return found


def test_a_base_in_half_precision_stays_so_where_that_is_computed_with(ranks2, base: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    whole_base = engine_of(tmp_path / "half", Lora(), train=False)
    assert all(param.dtype == torch.float32 for param in whole_base.model.parameters())  # computed in float32
    before = weights(engine_of(tmp_path / "half", Lora(rank=4, dora=True), precision="bf16"))
    for found in (
        in_half_precision(tmp_path / "half", {}),
        *ranks2.run(in_half_precision, tmp_path / "half", {"shard": 2}),
    ):
        for name, value in found.items():
            assert value.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16), name
            assert torch.equal(value, before[name]) == (".lora_" not in name), name
            assert value.isfinite().all()


def on_layout(base: Path, sizes: dict[str, int], lora: Lora, settings: dict[str, Any]) -> dict[str, Tensor]:
    world = World.join("cpu")
    engine = engine_of(base, lora, Layout.of(world, parallel(**sizes)), **settings)
    first = {f"first {name}": value for name, value in weights(engine).items()}
    steps(engine)
    found = weights(engine)
    world.close()
    return first | found


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ({"replicate": 2}, {"recompute": "full"}),
        ({"shard": 2}, {"recompute": "selective", "compile": {"llm": "aot_eager"}}),
        ({"sequence": 2}, {}),
    ],
    ids=["replicate", "shard", "sequence"],
)
def test_adapters_train_alike_on_every_layout(ranks2, base: Path, sizes, settings) -> None:
    lora = Lora(rank=3, dora=sizes != {"replicate": 2}, rslora=True)
    single = engine_of(base, lora)
    first = weights(single)
    steps(single)
    for found in ranks2.run(on_layout, base, sizes, lora, settings):
        for name, value in weights(single).items():
            assert torch.equal(found[f"first {name}"], first[name]), name
            assert torch.allclose(found[name], value, atol=1e-5), name


@pytest.mark.parametrize("more", [[], ["lora.dora=true", "lora.rslora=true"]], ids=["lora", "dora"])
def test_saved_on_two_ranks_resumed_on_one_exported_for_peft_and_merged(
    train, ranks2, base: Path, tmp_path: Path, more: list[str]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    words = ["model.type=language_model", f"model.path={base}", "lora.rank=2", "optim.lr=0.02"]
    words += ["optim.schedule=constant", "log.backends=[file,jsonl]", *more]
    assert train(*words, config=LM, dir=tmp_path / "straight") == 0
    two = [f"project.dir={tmp_path / 'run'}", "parallel.shard=2", "loop.total_steps=3"]
    assert ranks2.launch(LM, *words, *two) == [0, 0]
    assert train(*words, "resume=auto", config=LM, dir=tmp_path / "run") == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "straight"), rel=1e-5)
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]
    folder = list_runs(tmp_path / "run")[-1].dir
    assert "LoRA on 28 layers" in (folder / "log.txt").read_text()
    checkpoint = find_checkpoint(folder)
    saved = storage.Reader(checkpoint).entries
    assert all(".lora_" in name for name in saved if name.startswith(("model.", "optim.")))
    sizes = {kind: sum(e.shape.numel() for n, e in saved.items() if n.startswith(kind)) for kind in ("model", "optim")}
    assert sizes["optim"] == 2 * sizes["model"] + sum(name.endswith(".step") for name in saved)
    size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    assert size < 12 * sizes["model"] + 512 * len(saved) + 30_000 < (base / "model.safetensors").stat().st_size / 4

    for out, option in (("merged", []), ("adapter", ["--adapter"])):
        assert main(["merge", str(folder), str(tmp_path / out), *option]) == 0
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    engine = engine_of(base, Lora(rank=2, dora=bool(more), rslora=bool(more)), train=False)
    engine.load_checkpoint(checkpoint)
    hidden = engine.infer_batch(BATCH, ["log_probs"])["log_probs"]
    own = AutoModelForCausalLM.from_pretrained(base)
    ids = torch.arange(3, 12)[None]
    before = own(ids).logits
    for model in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged"),
        PeftModel.from_pretrained(own, str(tmp_path / "adapter")),
    ):
        logits = model.eval()(ids).logits
        picked = logits[0].log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
        assert torch.allclose(picked, hidden[:8], atol=1e-5)
        assert not torch.allclose(logits, before, atol=1e-2)


def test_parts_of_a_model_that_sees_adapted_and_trained_in_full(seeing: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForMultimodalLM

    engine = engine_of(seeing, Lora(rank=2, alpha=3.0, targets=["q_proj", "vision"], train=["projector"]))
    model = engine.model
    assert isinstance(model, LanguageModel)
    batch = PackedBatch.concat(samples(model, "qwen3_vl"))
    before = weights(engine)
    steps(engine, batch)
    parts = MLLMModelKit.parts(model)
    for name, value in weights(engine).items():
        moves = ".lora_" in name or parts[name] == "projector"
        assert torch.equal(value, before[name]) != moves, name
    adapted = {name.partition(".lora_")[0] for name in parts if ".lora_" in name}
    assert {parts[f"{name}.weight"] for name in adapted} == {"vision", "llm"}
    assert {name.rpartition(".")[2] for name in adapted if parts[f"{name}.weight"] == "llm"} == {"q_proj"}

    expected = engine.infer_batch(batch, ["log_probs"])["log_probs"]
    engine.export_hf(tmp_path / "merged")
    MLLMModelKit.export_adapter(engine, tmp_path / "adapter")
    engine.save_checkpoint(tmp_path / "saved")
    assert main(["merge", str(tmp_path / "saved"), str(tmp_path / "again")]) == 0
    merged = dict(entries(tmp_path / "merged" / "model.safetensors"))
    again = dict(entries(tmp_path / "again" / "model.safetensors"))
    assert merged.keys() == again.keys()
    assert all(torch.allclose(merged[name], again[name], atol=1e-6) for name in merged)
    loaded = engine_of(tmp_path / "merged", None, train=False)
    assert torch.allclose(loaded.infer_batch(batch, ["log_probs"])["log_probs"], expected, atol=1e-5)
    theirs = PeftModel.from_pretrained(AutoModelForMultimodalLM.from_pretrained(seeing), str(tmp_path / "adapter"))
    with_peft = theirs.merge_and_unload().state_dict()
    for name, value in loaded.model.hf.state_dict().items():  # type: ignore[union-attr, operator]
        assert torch.allclose(with_peft[name], value, atol=1e-6), name


def test_the_head_of_a_value_model_trains_and_goes_out_with_the_adapter(base: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    engine = engine_of(base, Lora(rank=2), kind="value_model")
    assert isinstance(engine.model, ValueModel)
    steps(engine, output="values")
    MLLMModelKit.export_adapter(engine, tmp_path / "adapter")
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=0)
    model = PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()
    values = engine.infer_batch(BATCH, ["values"])["values"]
    assert float(model(torch.arange(3, 12)[None]).logits) == pytest.approx(float(values[8]), abs=1e-5)


def test_a_base_that_is_gone_or_another_one_is_told(train, base: Path, tmp_path: Path, capsys) -> None:
    here = tmp_path / "base"
    shutil.copytree(base, here)
    engine = engine_of(here, Lora(rank=2))
    engine.save_checkpoint(tmp_path / "saved")
    moved = tmp_path / "moved"
    here.rename(moved)
    words = ["merge", str(tmp_path / "saved"), str(tmp_path / "out")]
    assert main(words) == EXIT_USER_ERROR
    assert f"there is no folder {here}. Name the folder: mvp merge --base FOLDER" in capsys.readouterr().err
    assert main([*words, "--base", str(moved)]) == 0
    engine_of(moved, Lora(rank=2)).load_checkpoint(tmp_path / "saved")
    torch.manual_seed(1)
    other = LanguageModel.on_meta(moved)
    torch.nn.Module.to_empty(other, device="cpu")
    for param in other.parameters():
        torch.nn.init.normal_(param)
    other.hf.save_pretrained(tmp_path / "other")  # type: ignore[operator]
    with pytest.raises(UserError, match=r"the weights in .*other are others\. Set model.path to the folder"):
        engine_of(tmp_path / "other", Lora(rank=2)).load_checkpoint(tmp_path / "saved")
    words = ["model.type=language_model", f"model.path={here}", "lora.rank=2"]
    assert train(*words, config=LM) == EXIT_USER_ERROR
    assert f"model.path={here} is no folder" in capsys.readouterr().err


def test_a_base_drawn_from_the_seed_is_in_the_checkpoint(tmp_path: Path) -> None:
    source = ModelSource(None, {"model_type": "qwen3", **WIDE, "num_hidden_layers": 1, "vocab_size": 99})
    for seed in (1, 2):
        engine = engine_class("language_model")(MLLMModelKit(Lora()).build(source), alone(), Settings(seed=seed))
        engine.initialize(adam, constant)
        if seed == 1:
            engine.save_checkpoint(tmp_path / "saved")
            expected = engine.infer_batch(BATCH, ["log_probs"])["log_probs"]
        else:
            engine.load_checkpoint(tmp_path / "saved")
            assert torch.equal(engine.infer_batch(BATCH, ["log_probs"])["log_probs"], expected)


def on_tensor_ranks(base: Path) -> str:
    world = World.join("cpu")
    with pytest.raises(UserError) as caught:
        engine_of(base, Lora(), Layout.of(world, parallel(tensor=2)))
    world.close()
    return str(caught.value)


def test_what_cannot_be_adapted_is_refused(ranks2, base: Path, seeing: Path) -> None:
    for lora, words in (
        (Lora(targets=["q_prj"]), "no linear layers 'q_prj', its head aside.* such as llm, .*q_proj"),
        (Lora(targets=["lm_head"]), "no linear layers 'lm_head', its head aside"),
        (Lora(targets=["audio"]), "no linear layers 'audio'"),
        (Lora(train=["*.q_proj.*"]), "q_proj.weight is to train in full .* so it takes no adapter"),
        (Lora(train=["prjector"]), "lora.train: no parameter is called 'prjector'"),
    ):
        with pytest.raises(UserError, match=words):
            MLLMModelKit(lora).build(ModelSource(str(base)))
    with pytest.raises(UserError, match="Linear is no Hugging Face model, so it takes no adapters"):
        MLLMModelKit(Lora()).adapt(torch.nn.Linear(2, 2))
    with pytest.raises(UserError, match="has no adapters to export"):
        MLLMModelKit.export_adapter(engine_of(base, None, train=False), "nowhere")
    assert all("does not go with parallel.tensor > 1" in said for said in ranks2.run(on_tensor_ranks, base))


def test_dropout_and_a_frozen_part_leave_adapters_training(base: Path) -> None:
    engine = engine_of(base, Lora(rank=2, dropout=0.5), freeze=("llm",))  # the part's weights; adapters are beside them
    torch.manual_seed(0)
    with torch.no_grad():
        for name, param in engine.model.named_parameters():
            param += 0.1 * (".lora_B" in name)
        one, two = (engine.model(BATCH, ["log_probs"])["log_probs"] for _ in "ab")
    assert not torch.equal(one, two)
    steps(engine)
    found = [engine.infer_batch(BATCH, ["log_probs"])["log_probs"] for _ in "ab"]
    assert torch.equal(*found)


def test_the_skills_check_passes_a_model_and_fails_one_that_forgets_an_adapter(seeing: Path) -> None:
    check = import_file(ROOT / "skills" / "model" / "check.py")

    def model() -> Any:
        return MLLMModelKit(Lora(rank=2, targets=["llm", "vision"])).build(ModelSource(str(seeing)))

    assert check.problems(seeing, model()) == []
    broken = model()
    broken.hf.model.language_model.layers[1].mlp.down_proj._forward_hooks.clear()
    silent, unlike = check.problems(seeing, broken)
    assert "1 adapter(s) have no effect on text, such as that of hf.model.language_model.layers.1.mlp.down" in silent
    assert "merged weights give log-probs that differ" in unlike
