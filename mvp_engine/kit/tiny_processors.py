"""Small tokenizers and processors for recipes with synthetic data: a family's own classes, a few hundred tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# Special tokens come first in the vocabulary, so their index is their id.
CHAT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    special_tokens: Iterable[str] = (),
    split_pattern: str | None = None,
    **placeholders: str,
) -> Any:
    """A byte-level BPE tokenizer trained on `texts`: at most `vocab_size` tokens, with Qwen's chat format.

    `split_pattern` is a regular expression for pre-tokenization, in place of GPT-2's. `placeholders` are the texts
    that the chat template writes for an item of each kind, such as `audio="<|AUDIO|>"`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [*CHAT_TOKENS, *special_tokens]
    backend = Tokenizer(models.BPE())
    steps: list[Any] = []
    if split_pattern:
        steps.append(pre_tokenizers.Split(Regex(split_pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=special,
        chat_template=_chat_template(placeholders),
    )


def word_tokenizer(words: Iterable[str], special_tokens: Iterable[str] = ()) -> Any:
    """A tokenizer of whole words, with Qwen's chat format: ids are special tokens, a line break, roles, `words`.

    Spaces are no tokens. Any other word is unknown.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [*CHAT_TOKENS, *special_tokens]
    tokens = [*special, "\n", "system", "user", "assistant", "<unk>", *words]
    ids = {token: id for id, token in enumerate(dict.fromkeys(tokens))}
    backend = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    splits = [pre_tokenizers.Split(" ", "removed")]
    splits.append(pre_tokenizers.Split(Regex(r"\n|[^\w\n]"), "isolated"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        additional_special_tokens=special,
        chat_template=_chat_template({}),
    )


def make_qwen3_vl_processor(texts: Iterable[str], vocab_size: int, patch_size: int = 8) -> Any:
    """Qwen3-VL's processor for small images: a token is 2 x 2 patches, of videos in two frames."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    placeholders = {}
    for kind in ("image", "video"):
        placeholders[kind] = f"<|vision_start|><|{kind}_pad|><|vision_end|>"
    tokenizer = train_tokenizer(texts, vocab_size, VISION_TOKENS, **placeholders)
    options: dict[str, Any] = {
        "patch_size": patch_size,
        "merge_size": 2,
        "temporal_patch_size": 2,
        # Areas in pixels; the limits of a config replace them.
        "size": {"shortest_edge": patch_size**2, "longest_edge": (8 * patch_size) ** 2},
    }
    images = Qwen2VLImageProcessor(**options)
    videos = Qwen3VLVideoProcessor(**options, cap_pixels_per_frame=True)
    return Qwen3VLProcessor(images, tokenizer, videos, tokenizer.chat_template)


def _chat_template(placeholders: Mapping[str, str]) -> str:
    items = ""
    for kind, text in placeholders.items():
        items += f"{{%- if part.type == '{kind}' %}}{text}{{%- endif %}}"
    return (
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
        "{%- for part in ([{'type': 'text', 'text': message.content}] "
        "if message.content is string else message.content) %}"
        f"{items}{{%- if part.type == 'text' %}}{{{{- part.text }}}}{{%- endif %}}{{%- endfor %}}"
        "{{- '<|im_end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
