"""FLOPs, MFU and estimates of Omni models."""

import pytest
import torch
from omni_models import batch_of, qwen3_omni_settings, spoken_row
from torch.utils.flop_counter import FlopCounterMode

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf.model.attention import config_tree
from mvp_engine.hf.model.config_source import read_config
from mvp_engine.kit import MFUKit
from mvp_engine.kit.plan.costs import BlockCosts, PlanSettings, facts_of
from mvp_engine.kit.plan.step import peak_memory
from mvp_engine.kit.speech import OmniModel


def tiny():
    config = read_config(None, {"model_type": "qwen3_omni_moe", **qwen3_omni_settings()})
    torch.manual_seed(0)
    model = OmniModel.from_config(config)
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.1)
    for part in (*config_tree(model.hf.config), *config_tree(model.talker.config)):
        part._experts_implementation_internal = "eager"  # torch counts no grouped GEMM
    return model, config


@pytest.mark.parametrize("text", [True, False])
def test_mfu_flops_of_speech_equal_the_torch_flop_counter(text):
    model, config = tiny()
    model.hf.requires_grad_(text)
    batch = PackedBatch.concat(
        [batch_of(config, spoken_row(seed=1, frames=40, text=9)) for _ in range(2)]
    )
    with FlopCounterMode(display=False) as counter:
        out = model(batch, ["loss", "speech_loss"] if text else ["speech_loss"])
        sum(one.sum() for one in out.values()).backward()
    counted = counter.get_total_flops()
    # The heads compute their logits again in backward; torch counts that and pairs that the mask excludes.
    assert float(MFUKit(model).flops(batch)) == pytest.approx(counted, rel=0.15)


def test_mfu_flops_of_speech_alone_leave_out_the_thinker():
    model, config = tiny()
    batch = batch_of(config, spoken_row(seed=1))
    with_text = float(MFUKit(model).flops(batch))
    model.hf.requires_grad_(False)
    alone = float(MFUKit(model).flops(batch))
    assert alone < with_text
    longer = batch_of(config, spoken_row(seed=1, text=30))
    media = {**longer.media, "speech": batch.media["speech"]}
    longer.media = media
    assert float(MFUKit(model).flops(longer)) == alone  # more text in the thinker is no more work


def test_plan_of_talker_training_fits_where_training_all_does_not():
    real = {
        "num_code_groups": 16,
        "code_predictor_config": {"num_code_groups": 16},
        "spatial_merge_size": 2,
    }
    text = {"num_hidden_layers": 48, "num_experts": 128, "num_attention_heads": 32, "head_dim": 128}
    model = OmniModel.on_meta(
        None,
        {
            "model_type": "qwen3_omni_moe",
            "talker_config": {**real, "speaker_id": {"ethan": 2302}},
            "thinker_config": {"text_config": text},
        },
    )
    settings = PlanSettings(precision="bf16", activation_checkpointing={"talker": "selective"})
    batch, _, _ = facts_of(model).assumed_batch(8192)  # type: ignore[misc]
    parameters = {
        name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()
    }
    assert 2.5e9 < parameters["talker"] < 4e9
    sizes = []
    for freeze in (False, True):
        model.hf.requires_grad_(not freeze)
        found = peak_memory(BlockCosts(model, settings), [batch], micro_batches=2)
        sizes.append({name: size / 2**30 for name, size in found.items()})
    everything, talker = (sum(one.values()) for one in sizes)
    assert talker < everything / 2
    assert sizes[1]["activations"] > 1  # GiB: the talker's positions and the codes of its frames
    assert sizes[1]["optimizer states"] == pytest.approx(8 * parameters["talker"] / 2**30)
