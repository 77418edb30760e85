"""LoRA on the projections of mixers (linear attention, state space, short convolutions): gradients of peft."""

import pytest
import torch
from lora_models import engine_of, steps
from mixer_families import mixer_model

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf.lora.lora_layers import adapted_layers
from mvp_engine.kit import Lora, MLLMModelKit

SEQUENCES = [torch.arange(3, 14), torch.arange(40, 46)]
# Mixer kind -> projections of its mixer, which `[llm]` covers; convolutions are no linear layers.
PROJECTIONS = {
    "qwen3_5_text": {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"},
    "granitemoehybrid": {"in_proj", "out_proj"},
    "kimi_linear": {"q_proj", "o_proj"},
    "lfm2_moe": {"in_proj", "out_proj"},
}


@pytest.mark.parametrize("family", PROJECTIONS)
def test_lora_on_mixer_projections_has_the_gradients_of_peft(family, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    mixer_model(family).hf.save_pretrained(tmp_path / "base")
    engine = engine_of(tmp_path / "base", Lora(rank=2))
    adapted = {name.rpartition(".")[2] for name, _ in adapted_layers(engine.model)}
    assert PROJECTIONS[family] <= adapted
    assert not any("conv" in name for name in adapted)
    steps(engine, PackedBatch.from_sequences(SEQUENCES), count=1)  # adapters that are not zero
    MLLMModelKit.export_adapter(engine, tmp_path / "adapter")
    engine.optimizer_zero_grad()
    packed = PackedBatch.from_sequences(SEQUENCES)
    engine.forward_backward_batch(
        [packed], lambda b: (engine.model(b, ["loss"])["loss"], b.num_loss_tokens)
    )

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "adapter"), is_trainable=True).eval()
    for ids in SEQUENCES:  # one at a time: transformers knows no boundaries
        log_probs = (
            theirs(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        )
        (-log_probs.gather(-1, ids[1:, None]).sum()).backward()
    grads = {
        n.replace(".default", ""): p.grad
        for n, p in theirs.named_parameters()
        if p.grad is not None
    }
    found = 0
    for name, param in engine.model.named_parameters():
        if param.grad is None:
            continue
        expected = grads[name.replace("hf.", "base_model.model.", 1)]
        bound = 1e-5 * max(1.0, float(expected.abs().max()))
        assert torch.allclose(param.grad, expected, atol=bound), name
        found += 1
    assert found == len(grads) == 2 * len(dict(adapted_layers(engine.model)))


@pytest.mark.parametrize("family", ["mamba", "jamba", "mamba2", "falcon_h1"])
def test_lora_on_state_space_models_trains_every_adapter_and_merges(family, tmp_path):
    mixer_model(family).hf.save_pretrained(tmp_path / "base")
    engine = engine_of(tmp_path / "base", Lora(rank=2))
    packed = PackedBatch.from_sequences(SEQUENCES)
    steps(engine, packed, count=2)
    for name, layer in adapted_layers(engine.model):
        assert layer.lora_B.weight.abs().sum() > 0, name  # the forward ran through it
    engine.export_hf(tmp_path / "merged")
    merged = engine_of(tmp_path / "merged", None, train=False)
    found = [one.infer_batch(packed, ["log_probs"])["log_probs"] for one in (engine, merged)]
    assert torch.allclose(*found, atol=1e-5)
