"""Folders of pi0: those of lerobot, bit-equal exports, LoRA that transformers loads merged."""

from __future__ import annotations

import pytest
import torch
from conftest import user_error
from folders import alone
from run_files import write_json
from safetensors.torch import load_file, save_file
from test_action_model import transformers_pi0
from tiny_models import close
from tiny_pi0 import pi0_rows, reference, tiny_pi0
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf.model.config_source import read_config
from mvp_engine.kit import Lora, MLLMModelKit
from mvp_engine.kit.actions import ActionModel, ActionModelEngine
from mvp_engine.model_engine import ModelSource, Settings

# Of lerobot/pi0_base: no model_type, no sizes, and settings of lerobot's own.
LEROBOT = {
    "type": "pi0",
    "n_obs_steps": 1,
    "input_features": {},
    "device": "mps",
    "paligemma_variant": "gemma_2b",
    "action_expert_variant": "gemma_300m",
    "dtype": "float32",
    "chunk_size": 50,
    "max_state_dim": 32,
    "max_action_dim": 32,
    "num_inference_steps": 10,
    "image_resolution": [224, 224],
    "normalization_mapping": {"STATE": "MEAN_STD"},
}


def renamed(name):
    """The name of a tensor of transformers' pi0 in folders of lerobot."""
    heads = {
        "model.dit.embed_tokens.weight": "gemma_expert",
        "model.vlm.language_model.embed_tokens.weight": "paligemma",
    }
    if name in heads:
        return f"paligemma_with_expert.{heads[name]}.lm_head.weight"
    for ours, theirs in {
        "model.vlm.": "paligemma.model.",
        "model.dit.": "gemma_expert.model.",
    }.items():
        if name.startswith(ours):
            # As transformers had it then.
            name = name.replace("vision_tower.", "vision_tower.vision_model.")
            return f"paligemma_with_expert.{theirs}{name.removeprefix(ours)}"
    return name.removeprefix("embed_action_time.")


def test_config_of_lerobot_is_that_of_pi0_and_other_policies_are_refused(tmp_path):
    from transformers import PI0Config

    file = tmp_path / "config.json"
    write_json(file, LEROBOT | {"chunk_size": 40})
    config = read_config(tmp_path, {})
    assert config.to_dict() | {"dtype": None} == PI0Config(chunk_size=40).to_dict() | {
        "dtype": None
    }
    for change, said in (
        ({"type": "pi05"}, "type=pi05"),
        ({"action_expert_variant": "gemma_2b"}, "variant=gemma_2b"),
    ):
        write_json(file, LEROBOT | change)
        with user_error(
            f"a lerobot policy with .*{said}, which transformers does not have: only",
        ):
            read_config(tmp_path, {})


# A folder that lerobot saved has its names below `model.`, that of openpi's weights has not.
@pytest.mark.parametrize(
    "dtype, prefix", [(torch.float32, ""), (torch.float32, "model."), (torch.bfloat16, "")]
)
def test_pi0_folder_with_the_names_of_lerobot_loads_and_exports_bit_equal(tmp_path, dtype, prefix):
    plain = transformers_pi0(tiny_pi0()).to(dtype)
    plain.save_pretrained(tmp_path / "folder")
    entries = {
        prefix + renamed(name): value.clone().contiguous()
        for name, value in plain.state_dict().items()
    }
    save_file(entries, tmp_path / "folder" / "model.safetensors", metadata={"format": "pt"})
    engine = ActionModelEngine(ActionModel.on_meta(tmp_path / "folder"), alone(), Settings())
    engine.initialize()
    for name, value in plain.state_dict().items():
        assert torch.equal(engine.model.get_parameter(f"hf.{name}"), value.float()), name
    engine.export_hf(tmp_path / "export")
    assert ActionModel.on_meta(tmp_path / "export").export_dtype == dtype
    written = load_file(tmp_path / "export" / "model.safetensors")
    assert sum(value.numel() for value in written.values()) == sum(
        p.numel() for p in plain.parameters()
    )
    assert {value.dtype for value in written.values()} == {dtype}


def test_pi0_with_lora_exports_merged_weights_that_transformers_loads(tmp_path):
    from transformers import PI0ForConditionalGeneration

    start = tiny_pi0()
    transformers_pi0(start).save_pretrained(tmp_path / "folder")
    lora = Lora(rank=2, alpha=4, modules_to_save=["action"])
    model = MLLMModelKit(lora).build(ModelSource(str(tmp_path / "folder")), "action_model")
    engine = ActionModelEngine(model, alone(), Settings())
    engine.initialize(
        lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 1e-2)
    )
    rows = pi0_rows(start)
    for _ in range(2):
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(
            [PackedBatch.concat(rows)], lambda b: (actions_sum(engine, b), b.num_sequences)
        )
        engine.optimizer_step()
    engine.export_hf(tmp_path / "export")
    loaded = PI0ForConditionalGeneration.from_pretrained(
        tmp_path / "export", attn_implementation="eager"
    )
    for row in rows:
        assert close(engine.model(row, ["velocity"])["velocity"][0], reference(loaded, row)[0])


def actions_sum(engine, batch):
    total: Tensor = engine.model(batch, ["action_losses"])["action_losses"].sum()
    return total
