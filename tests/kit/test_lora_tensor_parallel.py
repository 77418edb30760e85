"""LoRA under tensor parallel: gradients, checkpoints and exports of one rank."""

import pytest
import torch
from conftest import CAMPAIGN, user_error
from families import config_of, parallel
from folders import alone, entries
from lora_models import BATCH, engine_of, exported, log_probs, steps, token_log_probs, weights

from mvp_engine.checkpoint.format import Reader
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.hf import LanguageModel
from mvp_engine.kit import Lora, MLLMModelKit

FAMILIES = ("qwen3", "phi3", "olmo2")  # split projections, fused ones, norms of all heads
LORA = Lora(rank=4, alpha=6.0)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    for family in FAMILIES:
        torch.manual_seed(0)
        LanguageModel.from_config(config_of(family)).hf.save_pretrained(folder / family)
    return folder


def results(bases, family, layout, out):
    """Gradients with adapters that are not zero, and the weights after two steps."""
    engine = engine_of(bases / family, LORA, layout)
    steps(engine, count=2)
    after = weights(engine)
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(
        [BATCH], lambda b: (engine.model(b, ["loss"])["loss"], b.num_loss_tokens)
    )
    grads = {
        n: full_tensor(p.grad) for n, p in engine.model.named_parameters() if p.grad is not None
    }
    if out is not None:
        engine.save_checkpoint(out / "saved")
        engine.export_hf(out / "merged")
        MLLMModelKit.export_adapter(engine, out / "adapter")
    return {name: grad / layout.data_size for name, grad in grads.items()}, after


def on_ranks(bases, families, out, sizes):
    world = World.join("cpu")
    layout = Layout.of(world, parallel(**sizes))
    with user_error(r"model.quantize does not support parallel.tensor > 1"):
        engine_of(bases / families[0], LORA, layout, quantize={"llm": "nf4"})
    found = [
        results(bases, family, layout, out if family == "qwen3" else None) for family in families
    ]
    world.close()
    return found


def check(bases, families, found):
    for i, family in enumerate(families):
        expected = results(bases, family, alone(), None)
        for rank in found:
            for ours, theirs in zip(rank[i], expected, strict=True):
                assert ours.keys() == theirs.keys()
                for name, value in ours.items():
                    assert torch.allclose(value, theirs[name], atol=1e-5, rtol=1e-4), (family, name)
        assert all(".lora_" in name for name in expected[0])
        assert max(float(grad.abs().max()) for grad in expected[0].values()) > 1e-2


@pytest.mark.slow
def test_lora_on_tensor_parallel_ranks_equals_one_rank_and_peft(ranks2, bases, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    check(bases, FAMILIES, ranks2.run(on_ranks, bases, FAMILIES, tmp_path, {"tensor": 2}))
    saved = Reader(tmp_path / "saved").entries
    assert saved["model.hf.model.layers.0.self_attn.q_proj.lora_B.weight"].shape[1] == 4
    assert all(".lora_" in name for name in saved if name.startswith("model."))
    engine = engine_of(bases / "qwen3", LORA, train=False)
    engine.load_checkpoint(tmp_path / "saved")
    expected = log_probs(engine)[:8]
    engine.export_hf(tmp_path / "again")
    again = exported(tmp_path / "again")
    for name, value in entries(tmp_path / "merged" / "model.safetensors"):
        assert torch.allclose(value, again[name], atol=1e-6), name
    base = AutoModelForCausalLM.from_pretrained(bases / "qwen3")
    ids = torch.arange(3, 12)[None]
    logits = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()(ids).logits
    picked = token_log_probs(logits, ids)
    assert torch.allclose(picked, expected, atol=1e-5)


@CAMPAIGN
def test_lora_on_shards_and_tensor_parallel_ranks_equals_one_rank(ranks4, bases, tmp_path):
    families = ("qwen3", "phi3")
    check(
        bases, families, ranks4.run(on_ranks, bases, families, tmp_path, {"shard": 2, "tensor": 2})
    )
