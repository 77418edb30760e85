"""The class of exceptions for tiny configs and processors, and what families of types share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Special:
    """Exceptions of one type."""

    # Arguments of the config, before it is made small.
    parts: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)  # changes of the small config
    processor_of: str = ""  # another type with the same processor
    processor: str = ""  # classes that the auto classes do not name
    image_processor: str = ""
    video_processor: str = ""
    feature_extractor: str = ""
    images: dict[str, Any] = field(default_factory=dict)  # arguments of the image processor
    videos: dict[str, Any] = field(default_factory=dict)
    audio: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # arguments of the processor
    more: dict[str, Any] = field(default_factory=dict)  # other parts of the processor
    named: dict[str, str] = field(default_factory=dict)  # tokens that the tokenizer names
    tokens: tuple[str, ...] = ()  # further special tokens
    aliases: dict[str, str] = field(default_factory=dict)  # config key without _token_id -> token
    # What the chat template writes for an item.
    places: dict[str, str] = field(default_factory=dict)
    template: str | None = ""  # a chat template; None: there is none
    noise: float = 0.1  # of the random weights
    needs: str = ""  # a package that is no dependency of this one


DROP = "drop this key"
MROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
}
QWEN = {kind: f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")}
GLM = {kind: f"<|begin_of_{kind}|><|{kind}|><|end_of_{kind}|>" for kind in ("image", "video")}
GLM_TOKENS = tuple(
    f"<|{side}_of_{kind}|>" for kind in ("image", "video") for side in ("begin", "end")
)
GLM_ALIASES = {
    f"{kind}_{end}": f"<|{side}_of_{kind}|>"
    for kind in ("image", "video")
    for end, side in (("start", "begin"), ("end", "end"))
}
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>")
SIGLIP = {"options": {"vision_feature_select_strategy": "full", "num_additional_image_tokens": 0}}


def qwen_like(**changes):
    found = {
        "config": {"text_config": MROPE},
        "places": QWEN,
        "tokens": VISION_TOKENS,
        "aliases": {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"},
    }
    return Special(**{**found, **changes})


def glm_like(**changes):
    config = {"text_config": {**MROPE, "partial_rotary_factor": 1.0}}
    return Special(
        **{"config": config, "places": GLM, "tokens": GLM_TOKENS, "aliases": GLM_ALIASES, **changes}
    )


NAMED_VISION = {
    "places": {
        kind: f"<|vision_bos_token|><|{kind}_token|><|vision_eos_token|>"
        for kind in ("image", "video")
    }
    | {"audio": "<|audio_bos_token|><|audio_token|><|audio_eos_token|>"},
    "aliases": {
        "vision_start": "<|vision_bos_token|>",
        "vision_end": "<|vision_eos_token|>",
        "audio_start": "<|audio_bos_token|>",
        "audio_end": "<|audio_eos_token|>",
    },
}
GEMMA3 = {
    "config": {"mm_tokens_per_image": 4},
    "options": {"image_seq_length": 4},
    "aliases": {"image": "<|image_token|>"},
}
GEMMA4_AUDIO = {f"{name}_token": f"<|{name}_token|>" for name in ("audio", "boa", "eoa")}
START = {"vision_start_token_id": 3, "vision_end_token_id": 4}
# Words for the codes of a VQ encoder, as Chameleon's tokenizer names them.
IMAGE_WORDS = {
    "<image>": 600,
    **{f"IMGIMG{chr(ord('A') + code)}Z": 601 + code for code in range(10)},
}
VQ = {
    "base_channels": 32,
    "channel_multiplier": [1, 1],
    "num_embeddings": 10,
    "latent_channels": 32,
    "num_res_blocks": 1,
    "resolution": 16,
}
SAM = {
    "image_size": 64,
    "output_channels": 16,
    "window_size": 4,
    "global_attn_indexes": [1],
    "num_pos_feats": 8,
}
TOKENIZER = {"num_filters": 4, "downsampling_ratios": [40, 80], "depths": [1, 1, 1]}
FOUR_HEADS = {"num_key_value_heads": 4}
OMNI_PATCH = {"patch_size": 14}  # the code of its processor fixes videos to 100,000 pixels

QWEN2_5_OMNI = {
    "text_config": MROPE,
    "vision_config": {"patch_size": 14, "window_size": 56},
    "audio_config": {"n_window": 4},
    **START,
}
QWEN3_OMNI = {"text_config": MROPE, "vision_config": {"patch_size": 14}, **START}


def omni_like(processor_of, config):
    return qwen_like(
        processor_of=processor_of,
        images=OMNI_PATCH,
        videos=OMNI_PATCH,
        config=config,
        **NAMED_VISION,
    )
