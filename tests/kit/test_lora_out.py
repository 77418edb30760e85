"""LoRA adapters on disk: checkpoints with adapters only, peft folders and merged weights give the same logits."""

import re
import shutil

import pytest
import torch
from conftest import losses, mvp, user_error
from folders import without_checksums
from lora_models import (
    BATCH,
    LM,
    engine_of,
    exported,
    log_probs,
    pretrained,
    steps,
    token_log_probs,
    weights,
)
from run_files import log_of, read_json, write_json
from tiny_models import build_model, samples

from mvp_engine.checkpoint.format import Reader
from mvp_engine.checkpoint.manager import find_checkpoint
from mvp_engine.cli import main
from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.hf import LanguageModel, ValueModel
from mvp_engine.kit import Lora, MLLMModelKit
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


@pytest.mark.slow
def test_lora_checkpoint_of_two_ranks_resumes_on_one_and_exports_equal_logits(
    train, ranks2, base, tmp_path
):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run, straight = tmp_path / "run", tmp_path / "straight"
    words = f"model.type=language_model model.path={base} lora.rank=2 optim.lr=0.02".split()
    words += ["optim.schedule=constant", "log.backends=[file,jsonl]"]
    assert train(*words, config=LM, dir=straight) == 0
    two = [f"output_dir={run}", "parallel.shard=2", "train.max_steps=3"]
    assert ranks2.launch(LM, *words, *two) == [0, 0]
    assert train(*words, "resume=auto", config=LM, dir=run) == 0
    assert losses(run) == pytest.approx(losses(straight), rel=1e-5)
    assert losses(run)[-1] < losses(run)[0]
    assert "LoRA on 14 layers" in log_of(run)
    checkpoint = find_checkpoint(list_runs(run)[-1].dir)
    saved = Reader(checkpoint).entries
    assert all(".lora_" in name for name in saved if name.startswith(("model.", "optim.")))
    sizes = {"model": 0, "optim": 0}
    for name, entry in saved.items():
        kind = name.partition(".")[0]
        sizes[kind] = sizes.get(kind, 0) + entry.shape.numel()
    assert sizes["optim"] == 2 * sizes["model"] + sum(name.endswith(".step") for name in saved)
    size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    assert size < 12 * sizes["model"] + 512 * len(saved) + 30_000
    assert size < (base / "model.safetensors").stat().st_size / 4

    folder = str(list_runs(run)[-1].dir)
    for out, option in (("merged", []), ("adapter", ["--adapter"])):
        assert mvp(f"export {folder} {tmp_path}/{out}", *option) == 0
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    engine = engine_of(base, Lora(rank=2), train=False)
    engine.load_checkpoint(checkpoint)
    expected = log_probs(engine)[:8]
    own = AutoModelForCausalLM.from_pretrained(base)
    ids = torch.arange(3, 12)[None]
    before = own(ids).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for model in (merged, PeftModel.from_pretrained(own, str(tmp_path / "adapter"))):
        logits = model.eval()(ids).logits
        assert torch.allclose(token_log_probs(logits, ids), expected, atol=1e-5)
        assert not torch.allclose(logits, before, atol=1e-2)


def test_lora_vision_model_exports_adapted_and_fully_trained_parts(vision_base, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForMultimodalLM

    lora = Lora(
        rank=2, alpha=3.0, target_modules=["q_proj", "vision"], modules_to_save=["projector"]
    )
    engine = engine_of(vision_base, lora)
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
    by_part = {}
    for name in adapted:
        by_part.setdefault(parts[f"{name}.weight"], set()).add(name.rpartition(".")[2])
    assert by_part.keys() == {"vision", "llm"}
    assert by_part["llm"] == {"q_proj"}

    expected = log_probs(engine, batch)
    engine.export_hf(tmp_path / "merged")
    MLLMModelKit.export_adapter(engine, tmp_path / "adapter")
    engine.save_checkpoint(tmp_path / "saved")
    assert mvp(f"export {tmp_path}/saved {tmp_path}/again") == 0
    merged, again = exported(tmp_path / "merged"), exported(tmp_path / "again")
    stream = dict(engine.get_per_tensor_param())
    assert all(torch.equal(stream[name], value) for name, value in merged.items())
    assert merged.keys() == again.keys()
    assert all(torch.allclose(merged[name], again[name], atol=1e-6) for name in merged)
    loaded = engine_of(tmp_path / "merged", None, train=False)
    assert torch.allclose(log_probs(loaded, batch), expected, atol=1e-5)
    base = AutoModelForMultimodalLM.from_pretrained(vision_base)
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    with_peft = theirs.merge_and_unload().state_dict()
    for name, value in loaded.model.hf.state_dict().items():
        assert torch.allclose(with_peft[name], value, atol=1e-6), name


def test_export_adapter_of_a_value_model_contains_its_head(base, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    engine = engine_of(base, Lora(rank=2), kind="value_model")
    assert isinstance(engine.model, ValueModel)
    steps(engine, output="values")
    MLLMModelKit.export_adapter(engine, tmp_path / "adapter")
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=0)
    model = PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()
    values = engine.infer_batch(BATCH, ["values"])["values"]
    assert float(model(torch.arange(3, 12)[None]).logits) == pytest.approx(
        float(values[8]), abs=1e-5
    )


@pytest.mark.parametrize("family", ["phi3", "qwen3_moe", "gemma3", "qwen2_5_omni_thinker"])
def test_export_adapter_families_equal_merged_weights(family, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    build_model(LanguageModel, family).hf.save_pretrained(tmp_path / "base")
    has = {"gemma3": ["vision"], "qwen2_5_omni_thinker": ["vision", "audio", "projector"]}.get(
        family, []
    )
    engine = engine_of(tmp_path / "base", Lora(rank=2, target_modules=["llm", *has]), train=False)
    with torch.no_grad():
        for name, param in engine.model.named_parameters():
            param += 0.3 * torch.randn_like(param) * (".lora_" in name)
    engine.export_hf(tmp_path / "merged")
    MLLMModelKit.export_adapter(engine, tmp_path / "adapter")
    auto = AutoModelForMultimodalLM if has else AutoModelForCausalLM
    merged = auto.from_pretrained(tmp_path / "merged").state_dict()
    peft = PeftModel.from_pretrained(
        auto.from_pretrained(tmp_path / "base"), str(tmp_path / "adapter")
    )
    for name, value in peft.merge_and_unload().state_dict().items():
        assert torch.allclose(value, merged[name], atol=1e-5), name


def test_export_adapter_refuses_parameters_that_peft_cannot_store(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForMultimodalLM

    adapter, llava = tmp_path / "adapter", tmp_path / "llava_next"
    for family, train, name in (
        ("llava_next", "projector", "image_newline"),
        ("gemma", "*embed*", "embed_tokens"),  # ties embeddings and head
    ):
        build_model(LanguageModel, family).hf.save_pretrained(tmp_path / family)
        engine = engine_of(tmp_path / family, Lora(rank=2, modules_to_save=[train]))
        with user_error(f"{name}.* trained in full, which a peft folder cannot hold"):
            MLLMModelKit.export_adapter(engine, adapter)
        engine.export_hf(tmp_path / f"{family} merged")
    # A part trained in full that has parameters in modules with submodules.
    engine = engine_of(llava, Lora(rank=2, modules_to_save=["vision"]))
    steps(engine, PackedBatch.concat(samples(engine.model, "llava_next")))
    MLLMModelKit.export_adapter(engine, adapter)
    auto = AutoModelForMultimodalLM.from_pretrained(llava)
    loaded = PeftModel.from_pretrained(auto, str(adapter)).merge_and_unload().state_dict()
    vision = {name: value for name, value in weights(engine).items() if ".vision_tower." in name}
    for name, value in vision.items():
        assert torch.equal(loaded[name.removeprefix("hf.")], value), name
    kept = read_json(adapter / "adapter_config.json")["modules_to_save"]
    assert "model.vision_tower.embeddings" in kept
    assert not any(name.startswith("model.vision_tower.embeddings.") for name in kept)


def test_lora_base_that_moved_or_changed_is_refused(train, base, tmp_path, capsys):
    here, moved, saved = (tmp_path / name for name in ("base", "moved", "saved"))
    lora = Lora(rank=2)
    shutil.copytree(base, here)
    engine_of(here, lora).save_checkpoint(saved)
    here.rename(moved)
    words = ["export", str(saved), str(tmp_path / "out")]
    assert main(words) == EXIT_USER_ERROR
    said = f"{here} is not a folder. Name the folder: mvp export --base FOLDER"
    assert said in capsys.readouterr().err
    assert main([*words, "--base", str(moved)]) == 0
    engine_of(moved, lora).load_checkpoint(saved)
    torch.manual_seed(1)
    other = LanguageModel.on_meta(moved)
    torch.nn.Module.to_empty(other, device="cpu")
    for param in other.parameters():
        torch.nn.init.normal_(param)
    other.hf.save_pretrained(tmp_path / "other")
    words = r"other holds different weights\. Set model.path to the folder"
    with user_error(words):
        engine_of(tmp_path / "other", lora).load_checkpoint(saved)
    words = ["model.type=language_model", f"model.path={here}", "lora.rank=2"]
    assert train(*words, config=LM) == EXIT_USER_ERROR
    assert f"model.path={here} is not a folder" in capsys.readouterr().err


def test_dora_checkpoint_is_refused_by_name(base, tmp_path, capsys):
    """By `hf/mvp.json`, which older versions wrote, and by the names of its tensors."""

    def note(is_dora):
        write_json(file, info | {"lora": info["lora"] | {"dora": is_dora}})

    lora, saved = Lora(rank=2), tmp_path / "saved"
    engine = engine_of(base, lora)
    engine.save_checkpoint(saved)
    without_checksums(saved)
    file = saved / "hf" / "mvp.json"
    info = read_json(file)
    words = ["export", str(saved), str(tmp_path / "out")]
    said = "was trained with DoRA (lora.dora=true), which was removed"
    note(True)
    with user_error(re.escape(said)):
        engine.load_checkpoint(saved)
    assert main(words) == EXIT_USER_ERROR
    assert said in capsys.readouterr().err
    note(False)
    engine.load_checkpoint(saved)
    assert main(words) == 0

    layer = next(name for name in weights(engine) if "lora_A" in name).partition(".lora_A")[0]
    engine.model.get_submodule(layer).lora_magnitude_vector = torch.nn.Linear(2, 2)
    engine.save_checkpoint(tmp_path / "magnitudes")
    words = r"trained with DoRA, .* it holds model\..*lora_magnitude_vector\.weight"
    with user_error(words):
        engine_of(base, lora, train=False).load_checkpoint(tmp_path / "magnitudes")
