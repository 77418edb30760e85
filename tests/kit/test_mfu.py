"""MFUKit: the formula against torch's FLOP counter, attention pairs against the mask, device peaks by name."""

import copy
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from families import TOKENS
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.distributed import World
from mvp_engine.engine import monitor as meter_module
from mvp_engine.engine.monitor import Meter
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.model import attention
from mvp_engine.kit import MFUKit
from mvp_engine.kit.mfu import causal_pairs
from mvp_engine.log.metrics import device_peak, peak_of

TEXT = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
}
TEXT |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "max_position_embeddings": 256,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [6, 5, 5]}}
PATCHES = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "out_hidden_size": 128,
    "depth": 3,
    "num_heads": 4,
}
PATCHES |= {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
VIT = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
VIT |= {"image_size": 32, "patch_size": 4}
WHISPER = {"d_model": 96, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 192}
WHISPER |= {"num_mel_bins": 16, "max_source_positions": 40}
SIGLIP = {**VIT, "model_type": "siglip_vision_model", "vision_use_head": False}

# What is counted -> (model type, its config, what is seen, what trains: a pattern of names, or all)
CASES = {
    "Llama: GQA": ("llama", TEXT, "", ""),
    "Qwen3: heads wider than the model": ("qwen3", {**TEXT, "tie_word_embeddings": True}, "", ""),
    "Qwen3-MoE: 2 of 8 experts": ("qwen3_moe", {**TEXT, **MOE}, "", ""),
    "Gemma 3: windows": ("gemma3_text", {**TEXT, "sliding_window": 16}, "", ""),
    "GPT-2: fused projections": (
        "gpt2",
        {"n_embd": 128, "n_layer": 3, "n_head": 4, "vocab_size": 320},
        "",
        "",
    ),
    "Qwen3-VL: encoder, deep features": (
        "qwen3_vl",
        {
            "vision_config": {
                **PATCHES,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0],
            }
        },
        "patches",
        "",
    ),
    "Qwen2.5-VL: encoder with windows": (
        "qwen2_5_vl",
        {"vision_config": {**PATCHES, "window_size": 32, "fullatt_block_indexes": [1]}},
        "patches",
        "",
    ),
    "LLaVA: CLIP": (
        "llava",
        {"vision_config": {**VIT, "model_type": "clip_vision_model"}},
        "images",
        "",
    ),
    "Gemma 3: SigLIP": (
        "gemma3",
        {"vision_config": SIGLIP, "mm_tokens_per_image": 16},
        "images",
        "",
    ),
    "Qwen2-Audio: Whisper": ("qwen2_audio", {"audio_config": WHISPER}, "audio", ""),
    "Qwen3-VL, encoder frozen": (
        "qwen3_vl",
        {
            "vision_config": {
                **PATCHES,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0],
            }
        },
        "patches",
        "language_model|merger|lm_head",
    ),
    "Qwen3-VL, projector alone": (
        "qwen3_vl",
        {
            "vision_config": {
                **PATCHES,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0],
            }
        },
        "patches",
        "merger",
    ),
    "Llama, LoRA": ("llama", {**TEXT, "num_hidden_layers": 8}, "", "lora"),
}


class Adapted(nn.Module):
    """A frozen linear layer with a LoRA adapter."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 16, bias=False)
        self.lora_B = nn.Linear(16, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def model_of(case):
    from transformers import AutoConfig

    kind, settings, seen, trains = CASES[case]
    if seen:
        mrope = MROPE if seen == "patches" else {}
        settings = {**TOKENS, **settings, "text_config": {**TEXT, "head_dim": 32, **mrope}}
    torch.manual_seed(0)
    model = LanguageModel.from_config(AutoConfig.for_model(kind, **copy.deepcopy(settings)))
    model.hf.config.get_text_config()._experts_implementation = "eager"  # what the counter can see
    if trains == "lora":
        for layer in model.base().layers:
            layer.self_attn.q_proj, layer.mlp.down_proj = (
                Adapted(layer.self_attn.q_proj),
                Adapted(layer.mlp.down_proj),
            )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not trains or any(part in name for part in trains.split("|")))
    return model


def sample(case, seen):
    """One sequence, with an image or audio if `seen`."""
    kind, settings, look, _ = CASES[case]
    ids, media, tokens = [torch.randint(3, 90, (30 if seen else 50,))], {}, {}
    if look == "patches":
        grid = torch.tensor([[1, 12, 20]])
        media = {"pixel_values": (torch.randn(240, 96), {"image_grid_thw": grid}, 60)}
    elif look == "images":
        count = settings.get("mm_tokens_per_image", 64)
        media = {"pixel_values": (torch.randn(1, 3, 32, 32), {}, count)}
    elif look == "audio":
        mask = {"feature_attention_mask": torch.ones(1, 80, dtype=torch.long)}
        media = {"input_features": (torch.randn(1, 16, 80), mask, 20)}
    made = {}
    for name, (values, fields, count) in media.items():
        item = Media(values, torch.tensor([len(values)]), torch.tensor([0]), fields)
        made[name] = item if seen else item.select([])
        if seen:
            ids.append(
                torch.full(
                    (count,), TOKENS["audio_token_id" if look == "audio" else "image_token_id"]
                )
            )
    row = torch.cat(ids)
    tokens = {"token_type_ids": [(row == 90).long()]} if kind == "gemma3" else {}
    return PackedBatch.from_sequences([row], token_fields=tokens, media=made)


def counted(model, one):
    """What torch counts in forward and backward of transformers' own model on one sequence."""
    given = {name: value[None] for name, value in one.token_fields.items()}
    for name, media in one.media.items():
        given |= {name: media.values, **media.fields} if len(media.row_counts) else {}
    with attention.eager_attention(model.hf.config), FlopCounterMode(display=False) as counter:
        where = one.position_ids[None]
        logits = model.hf(
            input_ids=one.input_ids[None], position_ids=where, use_cache=False, **given
        ).logits
        logits.sum().backward()
    return counter.get_total_flops()


@pytest.fixture(scope="module")
def rows():
    """For each case, the FLOPs of two packed sequences by the kit and by the counter."""
    found = {}
    for case in CASES:
        model = model_of(case)
        # Text alone would train nothing.
        ones = [
            sample(case, seen=True),
            sample(case, seen=CASES[case][3] == "merger"),
        ]
        together = float(MFUKit(model).flops(PackedBatch.concat(ones), masked=False))
        found[case] = together, float(sum(counted(model, one) for one in ones))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_mfu_flops_equal_the_torch_flop_counter(rows, case):
    formula, counter = rows[case]
    assert formula == pytest.approx(counter, rel=0.02)


def test_mfu_table_in_the_docs_equals_the_test_results(
    rows,
):
    lines = ["| what | MFUKit, MFLOP | counter, MFLOP | apart |", "| --- | ---: | ---: | ---: |"]
    for case, (formula, counter) in rows.items():
        apart = f"{100 * (formula / counter - 1):+.2f} %"
        lines.append(f"| {case} | {formula / 1e6:.2f} | {counter / 1e6:.2f} | {apart} |")
    page = (ROOT / "docs" / "mfu.md").read_text()
    assert page.split("<!-- table -->")[1].split("<!-- /table -->")[0].strip() == "\n".join(
        lines
    ), "\n".join(lines)


@pytest.mark.parametrize("window", [None, 1, 3, 5, 40])
def test_causal_pairs_equal_the_count_of_the_mask(window):
    for length in (1, 2, 5, 17):
        q, k = torch.arange(length)[:, None], torch.arange(length)[None]
        allowed = (k <= q) & (q - k < (window or length))
        assert causal_pairs(torch.tensor([float(length)]), window).item() == allowed.sum().item()


def test_mfu_flops_windows_and_packing_reduce_attention_only():
    kit = MFUKit(model_of("Gemma 3: windows"))
    long = PackedBatch.from_sequences([torch.randint(3, 90, (120,))])
    halves = PackedBatch.from_sequences([torch.randint(3, 90, (60,)) for _ in "ab"])
    assert kit.flops(halves) < kit.flops(long) < kit.flops(long, masked=False)
    per_pair = 3 * 4 * 4 * 48  # forward and backward, 4 operations for each of 4 heads of 48
    layers = [
        120 * 121 / 2 if kind == "full_attention" else 16 * 17 / 2 + 104 * 16
        for kind in kit.config.layer_types
    ]
    saved = sum(120**2 - pairs for pairs in layers) * per_pair
    head = 6 * kit.model.hf.lm_head.weight.numel()  # the last token has no label
    assert float(kit.flops(long, masked=False) - kit.flops(long)) == pytest.approx(saved + head)


def test_mfu_flops_of_the_head_count_tokens_with_a_label_alone():
    kit = MFUKit(model_of("Gemma 3: windows"))
    ids = torch.randint(3, 90, (20,))
    few, many = (PackedBatch.from_sequences([ids], [torch.arange(20) > first]) for first in (15, 5))
    assert float(kit.flops(many) - kit.flops(few)) == 10 * 6 * kit.model.hf.lm_head.weight.numel()


@pytest.mark.parametrize(
    "name, teraflops",
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA B200", 2250),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA H20", 148),
        ("Voodoo 2", None),
    ],
)
def test_peak_of_device_name_is_found(name, teraflops):
    assert peak_of(name) == (None if teraflops is None else teraflops * 1e12)


def test_device_peak_unknown_gpu_warns_once_and_is_none(monkeypatch, logged):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Voodoo 2")
    warnings = logged()
    device_peak.cache_clear()
    try:
        assert [device_peak(torch.device("cuda", 0)) for _ in "abc"] == [None] * 3
    finally:
        device_peak.cache_clear()
    [warning] = warnings
    assert "Voodoo 2" in warning


def test_meter_mfu_divides_by_the_peak_of_all_ranks(monkeypatch, tmp_path):
    monkeypatch.setattr("mvp_engine.engine.monitor.device_peak", lambda _: 5e12)
    figures = {}
    for size in (1, 4):
        meter = Meter(World(0, size, 0, size, torch.device("cpu")), tmp_path, 0)
        meter.steps, meter._started = 1, meter._started - 2.0
        figures[size] = meter.read({"flops": 1e12, "tokens": 10.0}, 0.0, None)
    assert figures[1]["mfu"] == pytest.approx(0.1, rel=1e-2)
    assert figures[4]["mfu"] == pytest.approx(0.025, rel=1e-2)
    alone = Meter(World(0, 1, 0, 1, torch.device("cpu")), tmp_path, 0)
    assert "mfu" not in alone.read({"tokens": 1.0}, 0.0, None)


def test_meter_warns_once_if_evaluations_take_much_of_the_time(monkeypatch, logged, tmp_path):
    now, texts = [0.0], logged()
    monkeypatch.setattr(meter_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    for seconds, warnings in ((1.0, 0), (2.0, 1)):
        meter = Meter(World(0, 1, 0, 1, torch.device("cpu")), tmp_path, 0)
        for _ in range(5):
            now[0] += 10.0
            with meter.evaluating():
                now[0] += seconds
        assert len(texts) == warnings
        assert meter.read({}, 0.0, None)["step_s"] == 50.0  # evaluations are not training time
    assert texts[0].startswith("evaluations take 17 % of the time, 2.0 s each: raise eval.steps")
