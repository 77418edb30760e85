"""Tiny processors of real model families, built without downloads."""

from functools import cache

import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

PATCH = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
AREAS = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
TILES = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 16}}
SQUARE = {"height": 16, "width": 16}
GRIDS = [f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)]


def tokenizer(*special, **named):
    """A byte tokenizer in which two line breaks are one token, so that text may merge with an expansion."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {
        "ĊĊ": 256
    }
    bare = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    new = hf.PreTrainedTokenizerFast(
        tokenizer_object=bare,
        eos_token="<|im_end|>",
        model_input_names=["input_ids", "attention_mask"],
        extra_special_tokens=named,
    )
    new.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *special]})
    return new


def qwen(kind, video_processor):
    text = tokenizer("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    return kind(
        hf.Qwen2VLImageProcessor(**PATCH, size=AREAS), text, video_processor(**PATCH, size=AREAS)
    )


def internvl():
    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
    }
    text = tokenizer(**names, video_token="<video>")
    images, videos = hf.GotOcr2ImageProcessor(size=SQUARE), hf.InternVLVideoProcessor(size=SQUARE)
    return hf.InternVLProcessor(images, text, videos, image_seq_length=4)


def smolvlm():
    videos = hf.SmolVLMVideoProcessor(
        size={"longest_edge": 16}, max_image_size={"longest_edge": 16}, num_frames=6, fps=1
    )
    text = tokenizer(
        "<fake_token_around_image>",
        "<image>",
        "<end_of_utterance>",
        "<global-img>",
        "<video>",
        *GRIDS,
    )
    return hf.SmolVLMProcessor(hf.SmolVLMImageProcessor(**TILES), text, videos, image_seq_len=4)


def idefics3():
    text = tokenizer(
        "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *GRIDS
    )
    return hf.Idefics3Processor(hf.Idefics3ImageProcessor(**TILES), text, image_seq_len=4)


def llava(kind=hf.LlavaProcessor, images=None):
    images = images or hf.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=SQUARE)
    kept = {
        "patch_size": 4,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    return kind(images, tokenizer("<image>"), **kept)


def gemma3():
    named = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    text = tokenizer("<start_of_turn>", "<end_of_turn>", **named)
    return hf.Gemma3Processor(hf.Gemma3ImageProcessor(size=SQUARE), text, image_seq_length=4)


def whisper():
    return hf.WhisperFeatureExtractor(feature_size=8, chunk_length=2)


def omni():
    named = {f"{kind}_token": f"<|{kind.upper()}|>" for kind in ("image", "video", "audio")}
    named |= {
        f"{name}_token": f"<|{name}|>"
        for name in ("vision_bos", "vision_eos", "audio_bos", "audio_eos")
    }
    patch = {**PATCH, "patch_size": 14}  # its code fixes videos to 100,000 pixels
    images = hf.Qwen2VLImageProcessor(**patch, size=AREAS)
    return hf.Qwen2_5OmniProcessor(
        images, hf.Qwen2VLVideoProcessor(**patch), whisper(), tokenizer(**named)
    )


def llava_next():
    grids = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
    return llava(
        hf.LlavaNextProcessor,
        hf.LlavaNextImageProcessor(size={"shortest_edge": 16}, crop_size=SQUARE, **grids),
    )


FAMILIES = {
    "qwen2_vl": lambda: qwen(hf.Qwen2VLProcessor, hf.Qwen2VLVideoProcessor),
    "qwen2_5_vl": lambda: qwen(hf.Qwen2_5_VLProcessor, hf.Qwen2VLVideoProcessor),
    "qwen3_vl": lambda: qwen(hf.Qwen3VLProcessor, hf.Qwen3VLVideoProcessor),
    "llava": llava,
    "llava_next": llava_next,
    "internvl": internvl,
    "gemma3": gemma3,
    "idefics3": idefics3,
    "smolvlm": smolvlm,
    "qwen2_audio": lambda: hf.Qwen2AudioProcessor(
        whisper(), tokenizer("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    ),
    "qwen2_5_omni": omni,
}


def chat_template(
    placeholders,
    begin="'<|im_start|>' + m.role + '\\n'",
    stop="<|im_end|>",
):
    """A chat template: its placeholders, a Jinja expression for the start of a turn, the stop token."""
    part = "{{ p.text if p.type == 'text' else " + str(placeholders) + "[p.type] }}"
    body = (
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        + part
        + "{% endfor %}{% endif %}"
    )
    prompt = f"{{% if add_generation_prompt %}}{{% set m = {{'role': 'assistant'}} %}}{{{{ {begin} }}}}{{% endif %}}"
    return f"{{% for m in messages %}}{{{{ {begin} }}}}{body}{{{{ '{stop}\\n' }}}}{{% endfor %}}{prompt}"


QWEN = {kind: f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")}
OMNI = {kind: f"<|vision_bos|><|{kind.upper()}|><|vision_eos|>" for kind in ("image", "video")}
CAPITALIZED = "m.role | capitalize + (': ' if m.content is string else ':')"
TEMPLATES = {
    **dict.fromkeys(["qwen2_vl", "qwen2_5_vl", "qwen3_vl"], chat_template(QWEN)),
    **dict.fromkeys(
        ["llava", "llava_next"], chat_template({"image": "<image>\n"}, "m.role | upper + ': '")
    ),
    "internvl": chat_template({"image": "<IMG_CONTEXT>\n", "video": "<video>\n"}),
    "gemma3": chat_template(
        {"image": "<start_of_image>"},
        "'<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n'",
        "<end_of_turn>",
    ),
    **dict.fromkeys(
        ["idefics3", "smolvlm"],
        chat_template({"image": "<image>", "video": "<video>"}, CAPITALIZED, "<end_of_utterance>"),
    ),
    "qwen2_5_omni": chat_template({**OMNI, "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"}),
}


@cache
def processor_of(name):
    """Built once per process: tests must not change it."""
    return FAMILIES[name]()


@cache
def chat_processor(name):
    """A processor with a chat template like that of its family; some classes have their own."""
    processor = FAMILIES[name]()
    processor.chat_template = TEMPLATES.get(name, processor.chat_template)
    return processor
