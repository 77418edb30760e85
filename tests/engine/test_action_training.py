"""The engine of table_vla on a mixture of robot frames and questions: one and two ranks, shards, and after kill -9."""

import pytest
from conftest import CAMPAIGN, read_metrics
from kill_resume import ForkedJob, compare
from run_files import write_json
from test_action_cotrain import TEXTS, write_questions
from test_lerobot import write_folder

from mvp_engine.kit.tiny_processors import train_tokenizer
from mvp_engine.launch import launch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A config file of a tiny pi0 on frames of videos and on questions with and without images."""
    folder = tmp_path_factory.mktemp("mixture")
    train_tokenizer(TEXTS, 300, ("<image>",)).save_pretrained(folder / "tokenizer")
    text = {
        "model_type": "gemma",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "vocab_size": 300,
        "head_dim": 8,
    }
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24}
    vision = {
        "model_type": "siglip_vision_model",
        "image_size": 32,
        "patch_size": 16,
        "hidden_size": 16,
    }
    vision |= {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "projection_dim": 16,
    }
    vlm = {
        "model_type": "paligemma",
        "text_config": text,
        "image_token_id": 3,
        "projection_dim": 16,
    }
    vlm["vision_config"] = {**vision, "vision_use_head": False}
    model = {"model_type": "pi0", "vlm_config": vlm, "dit_config": text}
    model |= {"chunk_size": 4, "max_action_dim": 5, "max_state_dim": 6}
    sources = {
        "robot": {"path": str(write_folder(folder / "robot", "v3.0", "libx264"))},
        "questions": {"path": str(write_questions(folder)), "repeats": 3},
    }
    values = {
        "engine": "table_vla",
        "processor": str(folder / "tokenizer"),
        "run_name": "mixture",
        "cpu_threads": 1,
        "model": {"type": "action_model", "config": model},
        "actions": {"draws": 2, "text_weight": 0.5},
        "data": {
            "sources": sources,
            "pack_tokens": 48,
            "cache": str(folder / "costs"),
            "max_bad_rows": 0.5,
            "global_batch_size": 4,
            "num_workers": 0,
        },
        "train": {"max_steps": 4},
        "optim": {"lr": 1e-3, "schedule": "constant"},
        "log": {"interval": 1, "backends": ["file", "jsonl"]},
    }
    file = folder / "train.yaml"
    write_json(file, values)
    return file


def test_action_engine_on_a_mixture_has_the_losses_of_one_rank(config, tmp_path, ranks2):
    """With shards a rank may have no image, or no action, in a forward in which the other one has."""
    assert launch(str(config), [f"output_dir={tmp_path / 'alone'}"]) == 0
    alone = read_metrics(tmp_path / "alone")
    assert {"loss", "action_loss", "text_loss"} <= alone[-1].keys()
    for name, words in (
        ("replicas", []),
        ("shards", ["parallel.shard=2", "model.activation_checkpointing=full"]),
    ):
        assert set(ranks2.launch(config, f"output_dir={tmp_path / name}", *words)) == {0}
        for one, other in zip(alone, read_metrics(tmp_path / name), strict=True):
            for key in ("loss", "action_loss", "text_loss", "grad_norm"):
                assert other[key] == pytest.approx(one[key], rel=1e-4), (name, one["step"], key)


@CAMPAIGN
@pytest.mark.parametrize("ranks", [1, 2])
def test_action_engine_killed_and_resumed_is_bit_equal(config, tmp_path, ranks):
    words = ["train.max_steps=30", "checkpoint.interval=2"]
    assert compare(2, ranks, words, tmp_path, config=config, start=ForkedJob)["bit_equal"]
