"""FLOPs, MFU and estimates of action models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import CAMPAIGN, mvp, user_error
from run_files import printed_json
from test_action_model import tiny_regressor, transformers_pi0, typed, vlm_row, with_actions
from tiny_models import samples
from tiny_pi0 import pi0_rows, reference, tiny_pi0, tiny_pi0_config
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import PI0Config

from mvp_engine.cli import main
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.model.flop_costs import attention_flops, matmul_flops
from mvp_engine.kit import MFUKit
from mvp_engine.kit.actions import ActionModelEngine
from mvp_engine.kit.actions.pi0 import Pi0Policy, probe_batch
from mvp_engine.kit.plan.costs import BlockCosts, PlanSettings
from mvp_engine.kit.plan.step import peak_memory
from mvp_engine.model_engine import Settings


def last_layer_forward(model, row):
    """What transformers computes of the last prefix layer and actions do not need; it has no backward."""
    layer, config = model.decoder().layers[-1], model.decoder().config
    parts = (layer.self_attn.q_proj, layer.self_attn.o_proj, *layer.mlp.children())
    weights = [(m, name, w) for m in parts for name, w in m.named_parameters(recurse=False)]
    tokens = row.num_tokens
    rows = tokens * sum(
        matmul_flops(module, name, weight, config) for module, name, weight in weights
    )
    return rows + tokens**2 * attention_flops(layer.self_attn, config)


def test_mfu_flops_of_pi0_equal_the_torch_flop_counter():
    model = tiny_pi0()
    plain = transformers_pi0(model)
    for row in pi0_rows(model, draws=1):
        # `reference` adds three tokens of padding and an absent camera; neither is work that a step must do.
        with FlopCounterMode(display=False) as counter:
            unpadded(plain, row).backward()
        wanted = counter.get_total_flops() - last_layer_forward(model, row)
        assert float(MFUKit(model).flops(row)) == pytest.approx(wanted, rel=0.03)
    assert reference(plain, row)[0].shape == (1, 4, 5)


def unpadded(plain, row):
    fields = row.sequence_fields
    pixels = row.media["pixel_values"].values[None]
    out = plain(
        state=fields["action_state"],
        noise=fields["action_noise"][:, 0],
        timestep=fields["action_times"][:, 0],
        input_ids=row.input_ids[None],
        attention_mask=torch.ones_like(row.input_ids)[None],
        pixel_values=pixels,
        pixel_attention_mask=torch.ones(pixels.shape[:2], dtype=torch.bool),
    )
    return out.logits.sum()


def test_mfu_draws_add_suffix_work_and_no_prefix_work():
    model = tiny_pi0()
    kit = MFUKit(model)
    one, two, three = (float(kit.flops(pi0_rows(model, draws=n)[1])) for n in (1, 2, 3))
    assert two - one == pytest.approx(three - two, rel=1e-6)
    assert two - one < one


def test_mfu_of_a_regressor_counts_suffix_tokens_as_text():
    model = tiny_regressor()
    row = with_actions(samples(model, "qwen3_vl"))[1]
    kit = MFUKit(model)
    text = kit.costs.rows["text"] * row.num_tokens
    matmul, attention = kit.flops_by_kind(row)
    assert float(matmul) > text + 4 * kit.costs.rows["text"]  # a state and three steps
    assert float(attention) > 0


def test_plan_of_pi0_counts_memory_of_all_parts():
    model = tiny_pi0()
    batch = PackedBatch.concat(pi0_rows(model))
    settings = PlanSettings(gpu="H200")
    sizes = peak_memory(BlockCosts(model, settings), [batch], micro_batches=2)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sizes["optimizer states"] == 8.0 * trained
    more = peak_memory(
        BlockCosts(model, settings), [PackedBatch.concat(pi0_rows(model, draws=6))], micro_batches=2
    )
    assert more["activations"] > sizes["activations"]
    frozen = tiny_pi0()
    for name, param in frozen.named_parameters():
        param.requires_grad_("dit.layers" in name)
    less = peak_memory(BlockCosts(frozen, settings), [batch], micro_batches=2)
    assert less["activations"] < sizes["activations"]


def trained_step(model, batch, names, compile=None):
    """An engine after one step, and the bytes that its forward saved for backward, weights left out."""
    engine = ActionModelEngine(
        model, Layout(World(0, 1, 0, 1, torch.device("cpu"))), Settings(compile=compile)
    )
    engine.initialize(lambda m: torch.optim.AdamW(m.parameters(), 1e-3))
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    saved: dict[int, Tensor] = {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def loss(batch):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return sum(value.sum() for value in engine.model(batch, names).values()), 1  # type: ignore[return-value]

    engine.optimizer_zero_grad()
    engine.forward_backward_batch([batch], loss)
    engine.optimizer_step()
    sizes = [one.untyped_storage().nbytes() for place, one in saved.items() if place not in weights]
    return engine, sum(sizes)


def recipe(text_loss):
    return SimpleNamespace(actions=SimpleNamespace(text_weight=float(text_loss), draws=1))


@pytest.mark.parametrize("text_loss", [False, True])
@pytest.mark.parametrize("head", ["pi0", "regressor"])
def test_plan_of_actions_counts_gradients_and_states_that_a_step_has(head, text_loss):
    model: Any = tiny_pi0() if head == "pi0" else tiny_regressor()
    if head == "regressor":
        batch = PackedBatch.concat(with_actions(samples(model, "qwen3_vl")))
    else:
        rows = [typed(row) for row in pi0_rows(model)] if text_loss else pi0_rows(model)
        batch = PackedBatch.concat([*rows, vlm_row(model, rows[0])] if text_loss else rows)
    engine, _ = trained_step(
        model, batch, ["action_losses", "loss"] if text_loss else ["action_losses"]
    )
    settings = PlanSettings(precision="fp32", compile=None, recipe=recipe(text_loss))
    sizes = peak_memory(BlockCosts(model, settings), [batch], micro_batches=2)
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    states = sum(
        one["exp_avg"].nbytes + one["exp_avg_sq"].nbytes for one in engine.optimizer.state.values()
    )
    assert sizes["gradients"] == gradients
    assert sizes["optimizer states"] == states
    assert (sizes["loss"] > 0) == text_loss


@CAMPAIGN
def test_plan_of_pi0_activations_are_what_compiled_blocks_save():
    """In pi0's proportions, an eighth as wide; the backend partitions graphs as Inductor does."""
    text = {
        "model_type": "gemma",
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "intermediate_size": 2048,
    }
    text |= {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 1000}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 144, "intermediate_size": 538}
    vision |= {
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "patch_size": 14,
        "image_size": 112,
    }
    vlm = {
        "model_type": "paligemma",
        "text_config": text,
        "projection_dim": 256,
        "image_token_id": 1000,
    }
    vlm["vision_config"] = {**vision, "vision_use_head": False, "projection_dim": 256}
    expert = {**text, "hidden_size": 128, "intermediate_size": 512}
    model = Pi0Policy.build(PI0Config(vlm_config=vlm, dit_config=expert, chunk_size=50))
    batch = PackedBatch.concat([probe_batch(model, 3, 10, seed=seed, draws=1) for seed in range(2)])
    backend = "aot_eager_decomp_partition"
    _, saved = trained_step(model, batch, ["action_losses"], backend)
    settings = PlanSettings(precision="fp32", compile=backend, recipe=recipe(text_loss=False))
    assert peak_memory(BlockCosts(model, settings), [batch], micro_batches=2)[
        "activations"
    ] == pytest.approx(saved, rel=0.05)


def test_plan_of_a_pi0_that_does_not_fit_advises_without_sequence_parallel(tmp_path, capsys):
    PI0Config().save_pretrained(tmp_path / "pi0")
    words = ["plan", str(tmp_path / "pi0"), "--gpu", "H100", "--json", "--tokens", "26624"]
    assert main(words) == 2
    found = printed_json(capsys)["advice"]
    assert found
    for advice in found:
        assert "context" not in advice["words"]
        assert "ulysses" not in advice["words"]


def test_plan_command_of_a_pi0_folder_assumes_rows_of_three_cameras(tmp_path, capsys):
    model = tiny_pi0()
    transformers_pi0(model).save_pretrained(tmp_path / "pi0")
    assert mvp(f"plan {tmp_path}/pi0 --gpu H200 --json --tokens 440") == 0
    found = printed_json(capsys)
    assert found["packs"].startswith(
        "packs of 10 rows, assumed: 3 cameras of 4 tokens and a prompt of 32"
    )
    assert found["peak_gib"] > 0
    assert found["step_s"] > 0


def test_language_model_of_a_pi0_folder_names_the_model_type():
    with user_error(r"pi0 writes no text: set model\.type=action_model"):
        LanguageModel.from_config(tiny_pi0_config())
