"""Training on from a LoRA adapter: `model.path` is its folder, in peft's format."""

import pytest
import torch
from conftest import mvp, user_error
from lora_models import BATCH, engine_of, log_probs, pretrained, steps, weights
from run_files import log_of, read_json
from safetensors.torch import load_file
from test_lora_experts import BOTH, folder_of
from tiny_vlm import with_images, write

from mvp_engine.kit import Lora, MLLMModelKit
from mvp_engine.runs import list_runs

SAVED = Lora(
    rank=3, alpha=5.0, target_modules=["q_proj", "down_proj"], modules_to_save=["*.norm.weight"]
)
OTHER = Lora(rank=16, target_modules=["llm"])  # what the config says; the adapter decides


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return pretrained(tmp_path_factory.mktemp("base") / "qwen3")


def saved(engine, folder):
    steps(engine)
    MLLMModelKit.export_adapter(engine, folder)
    return folder


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_adapter_continues_with_its_weights_rank_alpha_and_layers(base, tmp_path):
    first = engine_of(base, SAVED)
    adapter = saved(first, tmp_path / "adapter")
    second = engine_of(adapter, OTHER)
    assert_same(weights(second), weights(first))
    assert torch.equal(log_probs(second), log_probs(first))
    assert second.model.lora.scaling == SAVED.scaling
    steps(second, count=1)
    assert not torch.equal(log_probs(second), log_probs(first))  # it trains
    MLLMModelKit.export_adapter(second, tmp_path / "again")
    configs = [read_json(tmp_path / name / "adapter_config.json") for name in ("adapter", "again")]
    assert configs[0] == configs[1]


def test_adapter_of_peft_with_rslora_continues_with_the_logits_of_peft(base, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    settings = {"r": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": r".*\.1\..*v_proj"}
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**settings))
    for name, param in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param)
    theirs.save_pretrained(tmp_path / "adapter")
    engine = engine_of(tmp_path / "adapter", OTHER)
    row = BATCH.select([0])
    ids = row.input_ids[None]
    expected = theirs.eval()(ids).logits[0].log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    assert torch.allclose(log_probs(engine, row)[:-1], expected, atol=1e-5)


def test_adapter_of_stacked_experts_continues(tmp_path):
    folder = folder_of("qwen3_moe", tmp_path)
    first = engine_of(folder, Lora(rank=8, target_modules=["q_proj", *BOTH]))
    adapter = saved(first, tmp_path / "adapter")
    assert_same(weights(engine_of(adapter, OTHER)), weights(first))


def shards(layout, adapter):
    return weights(engine_of(adapter, OTHER, layout))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"shard": 2}, {"tensor": 2}])
def test_adapter_continues_on_shards(sizes, base, tmp_path, on_ranks):
    first = engine_of(base, Lora(rank=4, target_modules=["q_proj", "o_proj"]))
    adapter = saved(first, tmp_path / "adapter")
    for found in on_ranks(sizes, shards, adapter):
        assert_same(found, weights(first))


def test_adapter_that_does_not_fit_is_refused(base, tmp_path):
    adapter = saved(engine_of(base, SAVED), tmp_path / "adapter")
    with user_error("is a LoRA adapter, and this model has none"):
        engine_of(adapter, None)
    file = adapter / "adapter_config.json"
    text = file.read_text()
    file.write_text(text.replace('"bias": "none"', '"bias": "all"'))
    with user_error("bias=all is not supported"):
        engine_of(adapter, OTHER)
    file.write_text(text.replace('"r": 3', '"r": 4'))
    with user_error(r"has shape \[3, \d+\], and the model needs \[4"):
        engine_of(adapter, OTHER)
    file.write_text(text.replace(str(base), str(tmp_path / "gone")))
    with user_error("is not a model's folder, nor a model of the Hub"):
        engine_of(adapter, OTHER)
    file.write_text(text)
    engine = engine_of(adapter, OTHER)
    with user_error("training starts from the adapter"), engine.disable_adapter():
        pass


def test_sft_of_an_adapter_folder_trains_it_on_and_resumes(vlm_folder, capsys):
    write(vlm_folder / "rows.jsonl", with_images(vlm_folder, 8))
    words = "--data rows.jsonl eval.steps=null eval.generation=null data.pack_tokens=256 data.num_workers=0"
    words += " log.backends=[file,jsonl] optim.schedule=constant optim.warmup=0 train.epochs=null"
    assert mvp(f"sft --model model {words} train.max_steps=2 lora.rank=3 run_id=first") == 0
    assert mvp("export first adapter --adapter") == 0
    assert mvp(f"sft --model adapter {words} train.max_steps=2 run_id=second") == 0
    run = next(run for run in list_runs(vlm_folder / "outputs") if run.id == "second")
    assert "training on from the adapter" in log_of(vlm_folder / "outputs")
    assert run.config["lora"]["rank"] == 3
    assert mvp("train outputs/second/config.yaml resume=outputs/second train.max_steps=3") == 0
    assert mvp("export second again --adapter") == 0
    configs = [
        read_json(vlm_folder / name / "adapter_config.json") for name in ("adapter", "again")
    ]
    assert configs[0] == configs[1]
    assert mvp("export second merged") == 0
    merged = load_file(vlm_folder / "merged" / "model.safetensors")
    assert_same(merged, load_file(run.dir / "hf_step_3" / "model.safetensors"))
    capsys.readouterr()
    assert mvp(f"sft --model adapter {words} train.max_steps=1 --full") == 2
    assert "is a LoRA adapter, and this model has none" in capsys.readouterr().err
