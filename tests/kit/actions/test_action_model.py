"""Action models: pi0 packed equals alone equals transformers' own forward, every gradient; the chunk regressor."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import user_error
from families import config_of
from tiny_models import close, samples
from tiny_pi0 import pi0_rows, randomize, reference, tiny_pi0

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.model.model_parts import parts_of
from mvp_engine.hf.model.preflight import check_packing
from mvp_engine.kit.actions import ActionModel
from mvp_engine.kit.actions.chunk_regressor import ChunkRegressor
from mvp_engine.kit.actions.pi0 import check_velocities

UNUSED = 8  # tensors of pi0 without a gradient: what follows the last prefix layer's keys, the expert's embeddings


def transformers_pi0(model):
    from transformers import PI0ForConditionalGeneration

    config = copy.deepcopy(model.hf.config)
    config._attn_implementation = "eager"
    plain = PI0ForConditionalGeneration(config)
    plain.load_state_dict(model.hf.state_dict())
    return plain


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same_gradients(found, wanted):
    """To 1e-5 of the largest entry of all gradients; no gradient is missing."""
    largest = max(float(value.abs().max()) for value in wanted.values())
    for name in found.keys() | wanted.keys():
        one = found.get(name, torch.zeros(()))
        two = wanted.get(name, torch.zeros(()))
        assert float((one - two).abs().max()) <= 1e-5 * largest, name


@pytest.mark.parametrize("image_token_id", [120, 119], ids=["outside", "inside"])
def test_pi0_packed_equals_alone_and_transformers_with_every_gradient(image_token_id):
    model = tiny_pi0(image_token_id=image_token_id)
    plain = transformers_pi0(model)
    rows = pi0_rows(model)
    packed = model(PackedBatch.concat(rows), ["velocity", "action_losses"])
    packed["action_losses"].sum().backward()
    of_pack = gradients(model.hf)
    unused = {name for name, _ in model.named_parameters()} - {f"hf.{name}" for name in of_pack}
    assert len(unused) == UNUSED
    assert unused == {*model.text_parameters, "hf.model.dit.embed_tokens.weight"}

    model.zero_grad()
    for i, row in enumerate(rows):
        alone = model(row, ["velocity", "action_losses"])
        assert close(packed["velocity"][i], alone["velocity"][0])
        alone["action_losses"].sum().backward()
    same_gradients(gradients(model.hf), of_pack)

    for i, row in enumerate(rows):
        velocity, loss = reference(plain, row)
        assert close(packed["velocity"][i], velocity)
        assert packed["action_losses"][i].sum().item() == pytest.approx(loss.item(), rel=1e-5)
        loss.backward()
    same_gradients(of_pack, gradients(plain))


def test_pi0_preflight_finds_a_changed_layer():
    model = tiny_pi0()
    check_velocities(model, exact=True)
    layer: Any = model.decoder().layers[0]
    forward = layer.forward

    def leaking(hidden, **kwargs):
        out, key, value = forward(hidden, **kwargs)
        return out + 1e-2 * out.mean(1, keepdim=True), key, value

    layer.forward = leaking
    with user_error("velocities differ from those with another neighbour"):
        check_velocities(model, exact=True)


def test_pi0_sampled_actions_equal_those_of_transformers():
    model = tiny_pi0()
    plain = transformers_pi0(model)
    rows = pi0_rows(model)
    noise = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    found = model.sample_actions(PackedBatch.concat(rows), noise, steps=5)
    for i, row in enumerate(rows):
        pixels = row.media["pixel_values"].values[None]
        wanted = plain.sample_actions(
            state=row.sequence_fields["action_state"],
            input_ids=row.input_ids[None],
            pixel_values=pixels,
            noise=noise[i : i + 1],
            attention_mask=torch.ones_like(row.input_ids)[None],
            pixel_attention_mask=torch.ones(pixels.shape[:2], dtype=torch.bool),
            num_steps=5,
        )
        assert close(found[i], wanted[0])


def test_pi0_draws_share_a_prefix_and_equal_draws_of_their_own():
    model = tiny_pi0()
    row = pi0_rows(model, draws=3)[1]
    together = model(row, ["velocity"])["velocity"]
    for n in range(3):
        fields = {**row.sequence_fields}
        for name in ("action_noise", "action_times"):
            fields[name] = fields[name][:, n : n + 1]
        one = PackedBatch.from_sequences([row.input_ids], sequence_fields=fields, media=row.media)
        assert close(model(one, ["velocity"])["velocity"][:, 0], together[:, n])


def vlm_row(model, row):
    """The images of a row, its prompt, and an answer of three tokens with labels; no actions."""
    answer = torch.tensor([5, 6, 7])
    ids = torch.cat([row.input_ids, answer])
    is_answer = torch.arange(len(ids)) >= row.num_tokens
    fields = {name: torch.zeros_like(value) for name, value in row.sequence_fields.items()}
    types = {"token_type_ids": [is_answer.long()]}
    return PackedBatch.from_sequences(
        [ids], [is_answer], token_fields=types, sequence_fields=fields, media=row.media
    )


def typed(row):
    row.token_fields["token_type_ids"] = torch.zeros_like(row.input_ids)
    return row


def test_pi0_co_training_text_loss_equals_paligemma_and_actions_do_not_change():
    from transformers import PaliGemmaForConditionalGeneration

    model = tiny_pi0()
    config = copy.deepcopy(model.hf.config.vlm_config)
    config._attn_implementation = "eager"
    paligemma = PaliGemmaForConditionalGeneration(config)
    paligemma.model.load_state_dict(model.base().state_dict())
    rows = pi0_rows(model)
    alone = [model(row, ["action_losses"])["action_losses"] for row in rows]
    chat = vlm_row(model, rows[1])
    mixed = PackedBatch.concat([typed(rows[0]), chat, typed(rows[2])])
    found = model(mixed, ["action_losses", "loss"])
    assert close(found["action_losses"][[0, 2]], torch.cat([alone[0], alone[2]]))
    assert not found["action_losses"][1].any()
    labels = torch.where(chat.token_fields["token_type_ids"] == 1, chat.input_ids, -100)
    wanted = paligemma(
        input_ids=chat.input_ids[None],
        pixel_values=chat.media["pixel_values"].values,
        attention_mask=torch.ones_like(chat.input_ids)[None],
        position_ids=chat.position_ids[None],
        token_type_ids=chat.token_fields["token_type_ids"][None],
        labels=labels[None],
    ).loss
    assert found["loss"].item() == pytest.approx(3 * wanted.item(), rel=1e-5)
    found["loss"].backward()
    assert model.decoder().norm.weight.grad is not None  # unused without text


def test_pi0_parts_are_vision_projector_llm_and_action():
    parts = parts_of(tiny_pi0())
    assert {
        parts[name] for name in parts if ".dit." in name or "action" in name or "state_proj" in name
    } == {"action"}
    assert parts["hf.model.vlm.multi_modal_projector.linear.weight"] == "projector"
    assert parts["hf.model.vlm.language_model.norm.weight"] == "llm"
    assert {parts[name] for name in parts if "vision_tower" in name} == {"vision"}


@pytest.mark.parametrize(
    "changes, said",
    [
        (
            {"action_chunk": torch.zeros(1, 3, 5)},
            r"action_chunk.* has the shape \(1, 3, 5\); this model needs",
        ),
        ({"action_noise": torch.zeros(1, 4, 5)}, r"needs \(1, 'N', 4, 5\)"),
        ({"action_state": None}, "no sequence_fields\\['action_state'\\]"),
        ({"action_times": None}, "no sequence_fields\\['action_times'\\]"),
    ],
)
def test_action_model_wrong_fields_are_user_errors(changes, said):
    model = tiny_pi0()
    row = pi0_rows(model)[0]
    for name, value in changes.items():
        if value is None:
            del row.sequence_fields[name]
        else:
            row.sequence_fields[name] = value
    with user_error(said):
        model(row, ["action_losses"])


# ---- Chunk regressor ----------------------------------------------------------------------------------------------


SIZES = {"chunk_size": 3, "max_action_dim": 2, "max_state_dim": 4}


def tiny_regressor(name="qwen3_vl", **sizes):
    config = config_of(name)
    for key, value in (sizes or SIZES).items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = ActionModel.from_config(config)
    randomize(model)
    return model


def with_actions(rows):
    g = torch.Generator().manual_seed(3)
    for row in rows:
        row.sequence_fields["action_state"] = torch.randn(1, 4, generator=g)
        row.sequence_fields["action_chunk"] = torch.randn(1, 3, 2, generator=g)
        row.sequence_fields["action_mask"] = torch.rand(1, 3, 2, generator=g) > 0.3
    return rows


def test_regressor_packed_equals_alone_with_every_gradient_and_text_is_unchanged():
    model = tiny_regressor()
    assert isinstance(model, ChunkRegressor)
    check_packing(model)
    rows = with_actions(samples(model, "qwen3_vl"))
    packed = model(PackedBatch.concat(rows), ["actions", "action_losses", "log_probs"])
    (packed["action_losses"].sum() - packed["log_probs"].sum()).backward()
    of_pack = gradients(model)
    assert len(of_pack) == len(list(model.parameters()))
    model.zero_grad()
    start = 0
    for i, row in enumerate(rows):
        alone = model(row, ["actions", "action_losses", "log_probs"])
        assert close(packed["actions"][i], alone["actions"][0])
        text = model(row, ["log_probs"])["log_probs"]
        assert close(packed["log_probs"][start : start + row.num_tokens], text)
        assert close(alone["log_probs"], text)
        start += row.num_tokens
        (alone["action_losses"].sum() - alone["log_probs"].sum()).backward()
    same_gradients(gradients(model), of_pack)


def test_regressor_actions_equal_transformers_with_an_explicit_mask():
    """Prefix causal; state sees the prefix, queries see all: by the decoder's own forward and a mask tensor."""
    model = tiny_regressor()
    row = with_actions(samples(model, "qwen3_vl"))[0]
    found = model(row, ["actions", "action_losses"])
    prefix, chunk = row.num_tokens, SIZES["chunk_size"]
    total = prefix + 1 + chunk
    allowed = torch.ones(total, total, dtype=torch.bool).tril()
    allowed[prefix + 1 :] = True
    mask = torch.where(allowed, 0.0, float("-inf"))[None, None]
    config = copy.deepcopy(model.hf.config)
    config._attn_implementation = "eager"
    plain = type(model.hf)(config)
    plain.load_state_dict(model.hf.state_dict())
    state = model.state_proj(row.sequence_fields["action_state"])
    suffix = torch.cat([state, model.action_queries.weight])[None]
    embeds = torch.cat([plain.get_input_embeddings()(row.input_ids)[None], suffix], dim=1)
    positions = torch.arange(total).expand(3, 1, -1)
    out = plain.model.language_model(
        inputs_embeds=embeds, attention_mask=mask, position_ids=positions
    )
    actions = model.action_head(out.last_hidden_state[0, prefix + 1 :])
    assert close(found["actions"][0], actions)
    errors = (actions - row.sequence_fields["action_chunk"][0]).abs() * row.sequence_fields[
        "action_mask"
    ][0]
    assert close(found["action_losses"][0], errors)


@pytest.mark.parametrize(
    "name, said",
    [
        ("qwen3", "has no encoder of images"),
        ("paligemma", "a prefix that is not causal"),
        ("qwen3_vl", "chunk_size"),
    ],
)
def test_regressor_on_an_unsupported_model_is_a_user_error(name, said):
    sizes = {"max_action_dim": 2} if said == "chunk_size" else SIZES
    with user_error(said):
        tiny_regressor(name, **sizes)


def test_regressor_parts_and_text_outputs_are_those_of_a_language_model():
    model = tiny_regressor()
    parts = parts_of(model)
    own = {name for name, part in parts.items() if part == "action"}
    assert own == {name for name, _ in model.named_parameters() if not name.startswith("hf.")}
    assert set(LanguageModel.provides) <= set(model.provides)
