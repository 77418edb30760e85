"""A tiny pi0 with random weights, batches for it, and the same sample as transformers takes it."""

import torch

from mvp_engine.kit.actions.pi0 import Pi0Policy, probe_batch

VOCABULARY = 120


def tiny_pi0_config(image_token_id=VOCABULARY, head_dim=8, **changes):
    """As in the real one, the image token lies outside of the vocabulary."""
    from transformers import PI0Config

    text = {
        "model_type": "gemma",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 4,
        "image_size": 8,
        "vision_use_head": False,
        "vocab_size": VOCABULARY,
        "projection_dim": 32,
    }
    vlm = {"model_type": "paligemma", "text_config": text, "vision_config": vision}
    vlm |= {"projection_dim": 32, "image_token_id": image_token_id}
    expert = {**text, "hidden_size": 16, "intermediate_size": 32}
    sizes = {"chunk_size": 4, "max_state_dim": 6, "max_action_dim": 5, "num_inference_steps": 3}
    return PI0Config(vlm_config=vlm, dit_config=expert, **{**sizes, **changes})


def randomize(model, seed=0):
    """No weight is zero (Gemma's norms start there)."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param += 0.1 * torch.randn(param.shape, generator=g)


def tiny_pi0(seed=0, **changes):
    torch.manual_seed(seed)
    model = Pi0Policy.build(tiny_pi0_config(**changes))
    randomize(model, seed)
    return model


def pi0_rows(model, draws=2):
    """Sequences with 1, 3 and 2 cameras and prompts of different lengths; the last two have masked steps."""
    rows = [probe_batch(model, c, w, seed=c, draws=draws) for c, w in ((1, 7), (3, 2), (2, 5))]
    rows[1].sequence_fields["action_mask"][:, 2:] = False
    rows[2].sequence_fields["action_mask"][:, :, 3:] = False
    return rows


def reference(model, row):
    """Velocities (N, C, A) and the summed loss of one sequence from a `PI0ForConditionalGeneration`, padded."""
    fields = row.sequence_fields
    noise, times = fields["action_noise"][0], fields["action_times"][0]
    draws = len(noise)
    padding = 3  # on the right, as the processor pads
    ids = torch.cat([row.input_ids, torch.zeros(padding, dtype=torch.long)]).expand(draws, -1)
    attended = (torch.arange(ids.shape[1]) < row.num_tokens).long().expand(draws, -1)
    pixels = row.media["pixel_values"].values
    absent = torch.zeros(1, *pixels.shape[1:])  # a camera that this row has not
    pixels = torch.cat([pixels, absent]).expand(draws, -1, -1, -1, -1)
    present = (torch.arange(pixels.shape[1]) < pixels.shape[1] - 1).expand(draws, -1)
    out = model(
        state=fields["action_state"].expand(draws, -1),
        noise=noise,
        timestep=times,
        input_ids=ids,
        attention_mask=attended,
        pixel_values=pixels,
        pixel_attention_mask=present,
        actions=fields["action_chunk"].expand(draws, -1, -1),
    )
    errors = (out.logits - (noise - fields["action_chunk"])).square() * fields["action_mask"]
    return out.logits, errors.sum() / draws
