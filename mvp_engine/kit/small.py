"""Small tokenizers and processors for recipes that make up their data: a family's own classes, a few hundred tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

CHAT = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # the places of special tokens are their ids
SEEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def small_tokenizer(
    texts: Iterable[str],
    size: int,
    special: Iterable[str] = (),
    pieces: str | None = None,
    **media: str,
) -> Any:
    """Bytes, and what pays of the words in `texts`: at most `size` tokens, with those of `CHAT` and `special` first.

    `pieces` is a pattern of what a token may lie in, instead of GPT-2's.
    Its chats are like Qwen's; `media` are the texts that stand for an item of each kind (`audio="<|AUDIO|>"`).
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pieces is None)
    cut = [pre_tokenizers.Split(Regex(pieces), "isolated")] if pieces else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cut, whole])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*CHAT, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[*CHAT, *special],
        chat_template=_template(media),
    )


def small_qwen3_vl(texts: Iterable[str], size: int, patch: int = 8) -> Any:
    """Qwen3-VL's processor for small pictures: a token is 2 x 2 patches, in films of two frames."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    places = {kind: f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")}
    tokenizer = small_tokenizer(texts, size, SEEN, **places)
    patches: dict[str, Any] = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2}
    patches["size"] = {
        "shortest_edge": patch**2,
        "longest_edge": (8 * patch) ** 2,
    }  # areas; a config's limits go over
    films = Qwen3VLVideoProcessor(**patches, cap_pixels_per_frame=True)
    return Qwen3VLProcessor(
        Qwen2VLImageProcessor(**patches), tokenizer, films, tokenizer.chat_template
    )


def _template(media: Mapping[str, str]) -> str:
    items = "".join(
        f"{{%- if part.type == '{kind}' %}}{text}{{%- endif %}}" for kind, text in media.items()
    )
    return (
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
        "{%- for part in ([{'type': 'text', 'text': message.content}] "
        "if message.content is string else message.content) %}"
        f"{items}{{%- if part.type == 'text' %}}{{{{- part.text }}}}{{%- endif %}}{{%- endfor %}}"
        "{{- '<|im_end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
