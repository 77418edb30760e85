"""Tiny configs of the model families that the tests cover. `tiny_models.py` builds models from them."""

import copy
from contextlib import contextmanager

import pytest
import torch
import transformers
from packaging.version import Version

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FOUR_LAYERS = {"num_hidden_layers": 4}  # where every fourth layer is of another kind
WINDOW = {"sliding_window": 3}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GEMMA = {"query_pre_attn_scalar": 8, **WINDOW}

# model type -> (its special features, config settings beyond SMALL)
FAMILIES = {
    "llama": ("GQA", {}),
    "mistral": ("GQA, sliding window", WINDOW),
    "qwen2": ("GQA, biases", {}),
    "qwen3": ("GQA, query and key norms", {}),
    "qwen3_moe": ("mixture of experts", EXPERTS),
    "mixtral": ("mixture of experts", {"num_local_experts": 4}),
    "qwen2_moe": (
        "mixture of experts, window only in the mask",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 16,
            "use_sliding_window": True,
            "max_window_layers": 0,
            **WINDOW,
        },
    ),
    "phimoe": ("mixture of experts, window only in the mask", {"num_local_experts": 4, **WINDOW}),
    "olmoe": ("mixture of experts", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "attention sinks, sliding window, mixture of experts",
        {"num_local_experts": 4, "num_experts_per_tok": 2, **WINDOW},
    ),
    "gemma": ("scaled embeddings", {}),
    "gemma2": ("soft-capping of attention and logits, sliding window", GEMMA),
    "gemma3_text": ("sliding window in 5 of 6 layers, two rotary bases", {**GEMMA, **FOUR_LAYERS}),
    "phi3": ("fused projections", {}),
    "olmo2": ("norms after the blocks", {}),
    "olmo3": ("sliding window", {**WINDOW, **FOUR_LAYERS}),
    "granite": ("scaled residuals and logits", {"logits_scaling": 2.0}),
    "cohere2": ("parallel blocks, scaled logits, sliding window", {**WINDOW, **FOUR_LAYERS}),
    "smollm3": ("layers without rotary positions", FOUR_LAYERS),
    "starcoder2": ("layer norms with biases, sliding window", WINDOW),
    "glm4": ("half-rotary positions", {}),
    "exaone4": ("hybrid windows", {**WINDOW, **FOUR_LAYERS}),
    "ernie4_5": ("", {}),
    "seed_oss": ("", {}),
    "gpt_neox": ("parallel residuals, no GQA", {}),
    "gpt2": ("learned positions", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
}

# Ids of the placeholder tokens for images, videos and audio, in each model of VISION.
TOKENS = {
    "image_token_id": 90,
    "video_token_id": 91,
    "audio_token_id": 92,
    "vision_start_token_id": 93,
}

MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
SMALL_VIT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 2,
}
PATCHES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "out_hidden_size": 32,
    "depth": 2,
    "num_heads": 2,
    "patch_size": 2,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
WINDOWS = {**PATCHES, "window_size": 8, "fullatt_block_indexes": [1]}
DEEPSTACK = {**PATCHES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
WHISPER = {
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "num_mel_bins": 8,
    "max_source_positions": 16,
}
RESAMPLER = {
    "hidden_size": 32,
    "resampler_n_latents": 3,
    "resampler_depth": 1,
    "resampler_n_heads": 2,
    "resampler_head_dim": 8,
    "num_key_value_heads": 1,
}
PINPOINTS = {"image_grid_pinpoints": [[8, 16], [16, 8], [16, 16]]}


def sub_configs(vision, audio=None, **text):
    """The sub-configs of a model with encoders."""
    found = {"text_config": {**SMALL, **text}, "vision_config": vision, "audio_config": audio}
    return {name: config for name, config in found.items() if config is not None}


def vit(model_type=None, **more):
    return {**SMALL_VIT, **({} if model_type is None else {"model_type": model_type}), **more}


# model type -> (its special features, config settings beyond TOKENS, formats of its media: see `media_of`)
VISION = {
    "qwen2_vl": (
        "positions on three axes",
        sub_configs({**PATCHES, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}, **MROPE),
        "patches video",
    ),
    "qwen2_5_vl": (
        "positions on three axes, windows in the encoder",
        sub_configs(WINDOWS, **MROPE),
        "patches video",
    ),
    "qwen3_vl": (
        "positions on three axes, features of several depths",
        sub_configs(DEEPSTACK, **MROPE),
        "patches frame",
    ),
    "qwen3_vl_moe": (
        "the same, mixture of experts",
        sub_configs(DEEPSTACK, **MROPE, **EXPERTS),
        "patches",
    ),
    "glm4v": (
        "positions on three axes",
        sub_configs({**PATCHES, "image_size": 8}, **MROPE),
        "patches",
    ),
    "paddleocr_vl": (
        "positions on three axes, NaViT",
        sub_configs({**SMALL_VIT, "spatial_merge_size": 2}, **MROPE),
        "squares",
    ),
    "video_llama_3": (
        "images and videos with merge sizes of their own",
        sub_configs(vit(), model_type="qwen2"),
        "merged merged_video",
    ),
    "internvl": (
        "tiles, InternViT",
        sub_configs(
            vit("internvl_vision", image_size=[8, 8], patch_size=[2, 2]), model_type="qwen2"
        ),
        "tiles",
    ),
    "gemma3": (
        "SigLIP, the tokens of an image see each other",
        {**sub_configs(vit("siglip_vision_model"), **GEMMA), "mm_tokens_per_image": 4},
        "tiles",
    ),
    "gemma4": (
        "padded patches, the tokens of an image see each other",
        sub_configs(
            vit(
                num_key_value_heads=2, head_dim=8, pooling_kernel_size=2, position_embedding_size=16
            ),
            **WINDOW,
            **FOUR_LAYERS,
            use_bidirectional_attention="vision",
            global_head_dim=8,
            vocab_size_per_layer_input=99,
            hidden_size_per_layer_input=8,
        ),
        "placed",
    ),
    "paligemma": (
        "SigLIP, the tokens of the prompt see each other",
        {**sub_configs(vit("siglip_vision_model"), model_type="gemma"), "projection_dim": 32},
        "tiles",
    ),
    "idefics2": (
        "padded images, a resampler",
        {**sub_configs(vit(), model_type="mistral", **WINDOW), "perceiver_config": RESAMPLER},
        "padded",
    ),
    "idefics3": (
        "padded tiles, SigLIP",
        {**sub_configs(vit(), model_type="llama"), "scale_factor": 2},
        "padded",
    ),
    "smolvlm": (
        "padded tiles, SigLIP",
        {**sub_configs(vit(), model_type="llama"), "scale_factor": 2},
        "padded",
    ),
    "llava": ("CLIP", sub_configs(vit("clip_vision_model"), model_type="llama"), "tiles"),
    "llava_next": (
        "tiles of any resolution, CLIP",
        {**sub_configs(vit("clip_vision_model"), model_type="llama"), **PINPOINTS},
        "anyres",
    ),
    "llava_onevision": (
        "tiles of any resolution, SigLIP",
        {**sub_configs(vit("siglip_vision_model"), model_type="qwen2"), **PINPOINTS},
        "anyres",
    ),
    "mistral3": (
        "images of any size, Pixtral; from transformers 5.20",
        {**sub_configs(vit("pixtral", head_dim=8), model_type="mistral"), "spatial_merge_size": 2},
        "sized",
    ),
    # With two layers, the random weights would generate placeholder tokens.
    "qwen2_audio": (
        "Whisper",
        sub_configs(None, WHISPER, model_type="qwen2", **FOUR_LAYERS),
        "audio",
    ),
    "qwen2_5_omni_thinker": (
        "positions on three axes, windows in both encoders; from transformers 5.21",
        sub_configs(WINDOWS, {**WHISPER, "output_dim": 32, "n_window": 4}, **MROPE),
        "audio patches",
    ),
}

# The first transformers that trains a family: before, Pixtral passes no boundaries between images to attention, and
# Qwen2.5-Omni has no backbone without its head. Both are user errors there.
SINCE = {"mistral3": "5.20", "qwen2_5_omni_thinker": "5.21"}


def is_supported(name):
    """Whether the installed transformers can train the family."""
    return Version(transformers.__version__) >= Version(SINCE.get(name, "0"))


# Families that the data kit is tested with, by their own processors, and the media of their rows.
IMAGE_VIDEO = "image, video"
KIT = {
    **dict.fromkeys(["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "smolvlm"], IMAGE_VIDEO),
    **dict.fromkeys(["gemma3", "idefics3", "llava", "llava_next"], "image"),
    "qwen2_audio": "audio",
    "qwen2_5_omni_thinker": "image, video, audio",
}

# Models that read which tokens are images from a token field.
TYPES = {"gemma3": "token_type_ids", "paligemma": "token_type_ids", "gemma4": "mm_token_type_ids"}

# Models with encoders that must be rejected, and a part of the error message.
REFUSED_VISION = {
    "mllama": (
        "sees images by cross-attention",
        sub_configs(vit(), num_hidden_layers=2, cross_attention_layers=[1]),
    ),
}


def media_of(form, large, g):
    """One image, video or audio clip as a processor returns it in this format: its kind, values and fields."""
    grid = torch.tensor([[2 if form == "video" else 1, 4, 8 if large else 4]])
    patches = int(grid.prod())
    of_images = {"image_grid_thw": grid}

    def randn(*shape):
        return torch.randn(*shape, generator=g)

    if form == "patches":
        return "pixel_values", randn(patches, 24), of_images
    if form == "squares":
        return "pixel_values", randn(patches, 3, 2, 2), of_images
    if form == "merged":
        fields = {**of_images, "image_merge_sizes": torch.tensor([1])}
        return "pixel_values", randn(patches, 12), fields
    if form == "merged_video":
        fields = {"video_grid_thw": grid, "video_merge_sizes": torch.tensor([2])}
        return "pixel_values_videos", randn(patches, 12), fields
    if form in ("video", "frame"):  # some models have a text token between frames, so one frame
        return "pixel_values_videos", randn(patches, 24), {"video_grid_thw": grid}
    if form == "tiles":
        return "pixel_values", randn(1 + large, 3, 8, 8), {}
    if form == "anyres":
        size = torch.tensor([[16, 16] if large else [8, 16]])
        return "pixel_values", randn(5 if large else 3, 3, 8, 8), {"image_sizes": size}
    if form == "sized":
        size = torch.tensor([[8, 8] if large else [4, 8]])
        return "pixel_values", randn(1, 3, 8, 8), {"image_sizes": size}
    if form == "padded":
        mask = (torch.arange(8) < (8 if large else 4))[:, None].expand(1, 1, 8, 8)
        return "pixel_values", randn(1, 1, 3, 8, 8) * mask, {"pixel_attention_mask": mask}
    if form == "placed":
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(-1)[None].clone()
        places[:, 16 if large else 8 :] = -1
        return "pixel_values", torch.rand(1, 16, 12, generator=g), {"image_position_ids": places}
    assert form == "audio"
    mask = (torch.arange(32) < (32 if large else 20)).long()[None]
    return "input_features", randn(1, 8, 32) * mask, {"feature_attention_mask": mask}


def config_of(name):
    from transformers import AutoConfig

    if not is_supported(name):
        pytest.skip(f"{name} needs transformers {SINCE[name]}")
    if name in VISION or name in REFUSED_VISION:
        special = (VISION if name in VISION else REFUSED_VISION)[name][1]
        return AutoConfig.for_model(name, **copy.deepcopy({**TOKENS, **special}))
    extra = FAMILIES[name][1] if name in FAMILIES else {}
    return AutoConfig.for_model(name, **{**SMALL, **extra})


def overrides_of(name):
    """The same config as a user would write it under `model.config`."""
    from transformers import CONFIG_MAPPING

    default = CONFIG_MAPPING[name]()
    settings = {**SMALL, **FAMILIES.get(name, ("", {}))[1]}
    known = {key: value for key, value in settings.items() if hasattr(default, key)}
    return {"model_type": name, **known}


def parallel(**sizes):
    """The `parallel` section of a config."""
    from mvp_engine.config.schema import Parallel

    defaults = {"shard": 1, "ulysses": 1, "tensor": 1, "timeout": 100.0}
    sizes.pop("replicate", None)  # it follows from the number of ranks
    return Parallel(**{**defaults, **sizes})


@contextmanager
def layout_of(device="cpu", **sizes):
    """The layout of this rank process, while it is a member of a job."""
    from mvp_engine.distributed import Layout, World

    world = World.join(device)
    try:
        yield Layout.of(world, parallel(**sizes))
    finally:
        world.close()


def on_layout(sizes, function, *args):
    """`function(layout, *args)` on this rank process, as a member of a job."""
    with layout_of(**sizes) as layout:
        return function(layout, *args)


def mean_of_copies(layout, value):
    """The sum over data-parallel ranks: all ranks, each of which counts as one of the copies of its data."""
    return sum(layout.world.all_gather(value)) / layout.model_parallel_size


def refusal(sizes, build):
    """The message with which a user error ends `build(layout)`; empty if it ends without one."""
    from mvp_engine.errors import UserError

    try:
        with layout_of(**sizes) as layout:
            build(layout)
    except UserError as error:
        return str(error)
    return ""


def table():
    """The table in docs/models.md; `python tests/hf/families.py` prints it."""
    rows = [f"| `{name}` | {special or '-'} |" for name, (special, _) in FAMILIES.items()]
    return "\n".join(["| model type | what is special about it |", "| --- | --- |", *rows])


def vision_table():
    """The second table there: the entries of `media` and, for models that read them, of `token_fields`."""
    rows = []
    for name, (special, _, forms) in VISION.items():
        found = [media_of(form, False, torch.Generator()) for form in forms.split()]
        media = "; ".join(
            f"`{kind}`" + "".join(f" + `{field}`" for field in fields) for kind, _, fields in found
        )
        types = TYPES.get(name)
        rows.append(
            f"| `{name}` | {media} | {f'`{types}`' if types else '-'} | {KIT.get(name, '-')} | {special} |"
        )
    head = [
        "| model type | `media` | `token_fields` | data kit | what is special about it |",
        "| --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *rows])


if __name__ == "__main__":
    print(table(), vision_table(), sep="\n\n")
