"""Frames next to rows of images and text in one pack, for pi0 and for a chunk regressor on Qwen3-VL."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import recipe_step, user_error
from PIL import Image
from test_action_data import CHUNK, model_config
from test_lerobot import color, write_folder
from transformers import Qwen3VLConfig

from mvp_engine.data.batch import IGNORE
from mvp_engine.kit.actions.action_model import ActionModel
from mvp_engine.kit.actions.kit import ActionDataKit
from mvp_engine.kit.actions.settings import ActionData
from mvp_engine.kit.data.settings import MLLMData
from mvp_engine.kit.tiny_processors import make_qwen3_vl_processor, train_tokenizer

TEXTS = ["task 0\n", "task 1\n", "Which colour?\n", "dark red"]


def write_questions(folder):
    """Two rows with an image, one without, and one that pi0 cannot train on."""
    Image.new("RGB", (32, 32), (100, 0, 0)).save(folder / "red.png")
    content = [{"type": "image", "image": "red.png"}, {"type": "text", "text": "Which colour?"}]
    chat = [{"role": "user", "content": content}, {"role": "assistant", "content": "dark red"}]
    text = [{"role": "user", "content": "task 0"}, {"role": "assistant", "content": "dark"}]
    rows = [{"messages": chat}, {"messages": chat}, {"messages": text}, {"messages": chat + chat}]
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def make_kit(tmp_path, processor, config, **actions):
    root = write_folder(tmp_path / "robot", "v3.0", None)
    sources = {"robot": {"path": str(root)}, "questions": {"path": str(write_questions(tmp_path))}}
    settings = {"pack_tokens": 2048, "global_batch_tokens": 2048, "max_bad_rows": 1.0}
    data = MLLMData.model_validate(
        {"sources": sources, "cache": str(tmp_path / "cache"), **settings}
    )
    return ActionDataKit(data, ActionData(**actions), processor, model_config=config)


def test_pi0_pack_holds_frames_and_answers_with_their_losses(tmp_path):
    tokenizer = train_tokenizer(TEXTS, 300, ("<image>",))
    config = model_config()
    kit = make_kit(tmp_path, tokenizer, config, text_weight=0.5, draws=2)
    [batch] = kit.loader(folder=tmp_path)
    fields = batch.sequence_fields
    is_text = fields["source"] == 1
    assert is_text.sum() == 3
    assert fields["action_mask"].flatten(1).any(1).equal(~is_text)
    learnt = []
    for at in range(batch.num_sequences):
        tokens = slice(batch.cu_seqlens[at], batch.cu_seqlens[at + 1])
        labels = batch.labels[tokens]
        types = batch.token_fields["token_type_ids"][tokens]
        answer = labels[labels != IGNORE]
        assert int(types.sum()) == len(answer)
        assert not types[
            : len(types) - len(answer)
        ].any()  # the question, and all of a frame, is bidirectional
        if len(answer):
            learnt.append(tokenizer.decode(answer))
    assert sorted(learnt, key=len) == ["dark<|im_end|>", "dark red<|im_end|>", "dark red<|im_end|>"]
    reds = batch.media["pixel_values"].values[:, 0].mean((1, 2))
    assert int(((reds * 0.5 + 0.5) * 255 - 100).abs().lt(1).sum()) >= 2  # both images of questions
    assert [one.reason for one in kit.bad_rows()] == ["unsupported"]
    torch.manual_seed(0)
    model: Any = ActionModel.from_config(config)
    with_text = SimpleNamespace(actions=kit.actions)
    loss, weight = recipe_step("table_vla", model=model, config=with_text, data=kit)(batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert weight == fields["action_mask"].sum() + 0.5 * batch.num_loss_tokens
    alone = model(batch, ["action_losses", "loss"])
    assert torch.allclose(loss, alone["action_losses"].sum() + 0.5 * alone["loss"], rtol=1e-5)
    assert alone["loss"].item() > 0


@pytest.mark.parametrize(
    "settings, said", [({"text_weight": 0.1}, "without text to learn. Set it to 0")]
)
def test_text_weight_without_text_is_a_user_error(tmp_path, settings, said):
    root = write_folder(tmp_path / "robot", "v3.0", None)
    data = MLLMData.model_validate({"sources": [{"path": str(root)}], "pack_tokens": 64})
    tokenizer = train_tokenizer(TEXTS, 300, ("<image>",))
    with user_error(said):
        ActionDataKit(data, ActionData(**settings), tokenizer, model_config=model_config())


def regressor_config(processor):
    """A tiny Qwen3-VL with the sizes of actions."""
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 300}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    text |= {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    }
    vision = {
        "hidden_size": 24,
        "intermediate_size": 32,
        "depth": 2,
        "num_heads": 2,
        "patch_size": 8,
    }
    vision |= {
        "out_hidden_size": 32,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    tokens = processor.tokenizer.convert_tokens_to_ids(
        ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    )
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    sizes = {"chunk_size": CHUNK, "max_action_dim": 5, "max_state_dim": 6}
    ids = dict(zip(names, tokens, strict=True))
    return {"text_config": text, "vision_config": vision, **ids, **sizes}


def test_regressor_on_qwen3_vl_reads_frames_as_prompts_of_its_processor(tmp_path):
    processor = make_qwen3_vl_processor(TEXTS, 300)
    config = Qwen3VLConfig(**regressor_config(processor))
    kit = make_kit(tmp_path, processor, config, text_weight=0.5)
    kit.save_processor(tmp_path)
    assert (tmp_path / "act.py").is_file()
    assert (tmp_path / "normalization.json").is_file()
    [batch] = kit.loader(folder=tmp_path)
    fields = batch.sequence_fields
    assert "action_noise" not in fields
    assert int(batch.num_loss_tokens) > 0
    frame = int((fields["source"] == 0).nonzero()[0])
    ids_of = batch.input_ids[batch.cu_seqlens[frame] : batch.cu_seqlens[frame + 1]].tolist()
    shown = processor.tokenizer.decode([one for one in ids_of if one != config.image_token_id])
    sample = int(fields["sample"][frame])
    rows = kit.train_folders()[0][0]
    assert rows.task(sample) in shown
    media = batch.media["pixel_values"]
    first = int(media.row_counts[: media.items_of(frame)[0]].sum())
    images = processor.image_processor
    red = (
        float(
            media.values[first].view(3, -1)[0].mean() * images.image_std[0] + images.image_mean[0]
        )
        * 255
    )
    assert abs(red - color(int(rows.frames.episode[sample]), int(rows.frames.frame[sample]))[0]) < 3
    torch.manual_seed(0)
    model: Any = ActionModel.from_config(config)
    outputs = model(batch, ["action_losses", "actions", "loss"])
    assert outputs["actions"].shape == (batch.num_sequences, CHUNK, 5)
    entries = fields["action_mask"]
    error = (outputs["actions"] - fields["action_chunk"]).abs()
    np.testing.assert_allclose(
        outputs["action_losses"].detach(),
        torch.where(entries, error, 0.0).detach(),
        rtol=1e-5,
        atol=1e-6,
    )
    same = kit.row_encoder.observation(
        rows.task(sample), rows.row(sample).images(), rows.states[sample], {}
    )  # type: ignore[attr-defined]
    acted = model(same, ["actions"])["actions"][0]
    np.testing.assert_allclose(
        acted.detach(), outputs["actions"][frame].detach(), rtol=1e-4, atol=1e-5
    )
