"""LoRA on stacked experts: gradients, folders and merged weights are those of peft's `target_parameters`."""

from pathlib import Path

import pytest
import torch
from conftest import CAMPAIGN, user_error
from families import config_of, layout_of, parallel
from folders import alone
from lora_models import BATCH, LM, engine_of, log_probs, steps, token_log_probs, weights
from run_files import log_of, read_json
from safetensors.torch import load_file

from mvp_engine.distributed import Layout, World
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.lora.lora_layers import adapters_off
from mvp_engine.kit import Lora, MLLMModelKit

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
LORA = Lora(rank=8, target_modules=["q_proj", *BOTH])
IDS = torch.arange(3, 12)[None]


def folder_of(name, path):
    torch.manual_seed(0)
    model = LanguageModel.from_config(config_of(name))
    with torch.no_grad():
        for param in model.parameters():
            param += 0.1 * torch.randn_like(param)
    model.hf.save_pretrained(path / name)
    return path / name


def own_log_probs(model):
    return token_log_probs(model.eval()(IDS).logits, IDS).detach()


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_expert_adapters_exported_and_merged_give_the_log_probs_of_the_engine(name, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = folder_of(name, tmp_path)
    engine = engine_of(base, LORA)
    steps(engine)
    found = log_probs(engine)[:8]
    MLLMModelKit.export_adapter(engine, tmp_path / "adapter")
    engine.export_hf(tmp_path / "merged")
    assert len(read_json(tmp_path / "adapter" / "adapter_config.json")["target_parameters"]) == 4
    own = AutoModelForCausalLM.from_pretrained(base)
    before = own_log_probs(own)
    assert not torch.allclose(before, found, atol=1e-2)
    assert torch.allclose(
        own_log_probs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), found, atol=1e-5
    )
    adapted = PeftModel.from_pretrained(own, str(tmp_path / "adapter"))
    assert torch.allclose(own_log_probs(adapted), found, atol=1e-5)
    with adapters_off(engine.model):
        assert torch.allclose(log_probs(engine)[:8], before, atol=1e-5)


def test_expert_adapters_get_the_gradients_of_peft(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = folder_of("qwen3_moe", tmp_path)
    engine = engine_of(base, Lora(rank=8, target_modules=["q_proj", *BOTH]))
    steps(engine)  # so that lora_B is not zero
    MLLMModelKit.export_adapter(engine, tmp_path / "adapter")
    row = BATCH.select([0])
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(
        [row], lambda b: (-engine.model(b, ["log_probs"])["log_probs"].sum(), 1.0)
    )
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "adapter"), is_trainable=True
    )
    logits = theirs(IDS).logits[0]
    (-logits.log_softmax(-1)[:-1].gather(-1, IDS[0, 1:, None]).sum()).backward()
    grads = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    at = "base_model.model.model.layers.1.mlp.experts"
    for key, module in (("down_proj", at), ("gate_up_proj", f"{at}.base_layer")):
        own = engine.model.get_submodule(f"hf.model.layers.1.mlp.experts.{key}_adapter")
        experts = len(own.lora_A)
        their_a = grads[f"{module}.lora_A.default.weight"]
        their_b = grads[f"{module}.lora_B.default.weight"]
        assert torch.allclose(own.lora_A.grad, their_a.view(experts, 8, -1), rtol=1e-4, atol=1e-5)
        assert torch.allclose(
            own.lora_B.grad, their_b.view(-1, 8, experts).permute(2, 0, 1), rtol=1e-4, atol=1e-5
        )


def trained(base, folder, sizes):
    with layout_of(**sizes) as layout:
        engine = engine_of(Path(base), LORA, layout)
        steps(engine)
        engine.save_checkpoint(folder)
        return weights(engine)


@pytest.mark.slow
def test_expert_adapters_on_expert_parallel_ranks_train_and_save_as_on_one(ranks2, tmp_path):
    base = folder_of("gpt_oss", tmp_path)
    one = engine_of(base, LORA)
    steps(one)
    for found in ranks2.run(
        trained, str(base), str(tmp_path / "checkpoint"), {"shard": 2, "expert": 2}
    ):
        for name, value in weights(one).items():
            assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-5), name
    again = engine_of(base, LORA)
    again.load_checkpoint(tmp_path / "checkpoint")
    assert all(torch.equal(value, found[name]) for name, value in weights(again).items())


def test_lora_without_experts_says_what_stays_frozen(train, tmp_path):
    base = folder_of("qwen3_moe", tmp_path)
    words = f"model.type=language_model model.path={base} lora.rank=2 log.backends=[file]".split()
    assert train(*words, "train.max_steps=1", config=LM, dir=tmp_path / "run") == 0
    log = log_of(tmp_path / "run")
    share = "the stacked experts of 2 layers have no adapter and stay frozen, "
    assert share in log
    sizes = {name: param.numel() for name, param in LanguageModel.on_meta(base).named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert f"{share}{100 * experts / sum(sizes.values()):.0f} % of all weights" in log


@pytest.mark.parametrize(
    "lora, message",
    [
        (
            Lora(rank=8, target_modules=["experts.up"]),
            "linear layers or stacked experts 'experts.up' apart from its head. Name a part or",
        ),
        (Lora(rank=4, target_modules=BOTH), "lora.rank=4 is no multiple of 8"),
        (Lora(rank=8, dropout=0.1, target_modules=BOTH), "stacked experts take no dropout"),
        (
            Lora(rank=8, modules_to_save=["*.experts.*"], target_modules=BOTH),
            "is trained in full",
        ),
    ],
)
def test_expert_adapters_that_cannot_be_are_refused(tmp_path, lora, message):
    with user_error(message.replace(".", r"\.")):
        engine_of(folder_of("qwen3_moe", tmp_path), lora, alone())


def exported(base, folder):
    world = World.join("cpu")
    engine = engine_of(Path(base), LORA, Layout.of(world, parallel(pipeline=2)))
    steps(engine)
    engine.save_checkpoint(f"{folder}/checkpoint")
    engine.export_hf(f"{folder}/merged")
    world.close()


@CAMPAIGN
def test_expert_adapters_of_pipeline_stages_are_merged_as_on_one_rank(ranks2, tmp_path):
    base = folder_of("qwen3_moe", tmp_path)
    ranks2.run(exported, str(base), str(tmp_path))
    one = engine_of(base, LORA)
    one.load_checkpoint(tmp_path / "checkpoint")
    one.export_hf(tmp_path / "alone")
    found, wanted = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("merged", "alone")
    )
    assert found.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    before = load_file(base / "model.safetensors")
    changed = {name for name, value in found.items() if not torch.equal(value, before[name])}
    assert {name for name in changed if "experts" in name}
    stepped = engine_of(base, LORA)
    steps(stepped)
    for name, value in weights(stepped).items():
        assert torch.allclose(value, weights(one)[name], rtol=1e-4, atol=1e-5), name
