"""Tiny tokenizers with the special tokens of real formats; their chat templates are in this folder."""

# ruff: noqa: RUF001 - characters of DeepSeek's special tokens

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mvp_engine.kit.data.encode.template import ChatTemplate
from mvp_engine.kit.data.read.row_types import Message, Part, Row

FOLDER = Path(__file__).parent
CHATML = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
MISTRAL = ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
R1 = [
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁outputs▁end｜>",
]
PHI = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"]
SPECIAL = {
    "qwen2_5": CHATML,
    "qwen3": CHATML,
    "generation": CHATML,
    "qwen_vl": CHATML + VISION,
    "llama3": LLAMA,
    "gemma": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
    "mistral": MISTRAL,
    "deepseek_r1": R1,
    "phi3": PHI,
    "zephyr": ["<s>", "</s>"],
    "llava": ["<s>", "</s>", "<image>"],
    "by_index": ["<s>", "</s>"],
}


@lru_cache
def tokenizer(name, trim=False, chat_template=None):
    """A tiny byte-level BPE with the format's special tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(
        ["assistant user system\n\n hello world the sum is four </s>"] * 3, trainer
    )
    backend.post_processor = processors.ByteLevel(trim_offsets=trim)
    bos = next(
        (token for token in SPECIAL[name] if token in ("<s>", "<bos>", R1[0], LLAMA[0])), None
    )
    ends = ("</s>", "<eos>", R1[1], "<|eot_id|>", "<|endoftext|>")
    eos = next(token for token in SPECIAL[name] if token in ends)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)
    made.add_special_tokens({"additional_special_tokens": SPECIAL[name]})
    if name == "qwen3":
        made.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    made.chat_template = chat_template or (FOLDER / f"{name}.jinja").read_text()
    return made


@lru_cache
def template(name, **options):
    return ChatTemplate(tokenizer(name), **options)


def message(role, *content, loss=None, **extra):
    parts = [Part("text", item) if isinstance(item, str) else item for item in content]
    return Message(role, tuple(parts), loss, extra)


def texts_with_loss(template, *messages, tools=()):
    """The runs of tokens with loss, as text. The tokens must be those of the tokenizer's own call on the text."""
    rendered = template.render(Row(messages=messages, tools=tools))
    ids, loss, _ = template.tokenize(rendered)
    assert ids == template.tokenizer(rendered.text, add_special_tokens=False).input_ids
    runs: list[list[int]] = [[]]
    for id, has in zip(ids, loss, strict=True):
        if has:
            runs[-1].append(id)
        elif runs[-1]:
            runs.append([])
    by_token = [template.tokenizer.decode(run, skip_special_tokens=False) for run in runs if run]
    assert by_token == [rendered.text[start:end] for start, end in rendered.loss]
    return by_token


SYSTEM, HI, BYE = message("system", "Be brief."), message("user", "Hi\n"), message("user", " Bye?")
HELLO, CIAO = message("assistant", "Hello  there!"), message("assistant", "Ciao\n\n  now.")
CALL = message(
    "assistant",
    tool_calls=[{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
)
RESULT = message("tool", '{"sum": "fünf"}', name="add")
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds <|im_end|>", "parameters": {}},
}

STOPS = {
    "qwen2_5": "<|im_end|>",
    "qwen_vl": "<|im_end|>",
    "generation": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "phi3": "<|end|>",
    "deepseek_r1": R1[1],
    "zephyr": "</s>",
    "by_index": "</s>",
}


class Processor:
    """The attributes of a Hugging Face processor that ChatTemplate uses."""

    def __init__(self, name, made=None):
        self.tokenizer = made or tokenizer(name)
        self.chat_template = self.tokenizer.chat_template
        self.image_token = next(token for token in SPECIAL[name] if "image" in token)
        self.video_token = "<|video_pad|>"

    def apply_chat_template(self, *args, **options):
        return self.tokenizer.apply_chat_template(*args, **options)


IMAGE, VIDEO = Part("image", b"\x89PNG"), Part("video", ["a.png", "b.png"])


def adds_bos(name):
    made = copy.deepcopy(tokenizer(name))
    bos = (made.bos_token, made.bos_token_id)
    made._tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos[0]} $A", special_tokens=[bos]
    )
    return made


PIECES = [
    "a",
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "<|end|>",
    "</think>",
    "<think>",
    "{%",
    "</s>",
    "  ",
    "\n",
    "é🙂",
]
Turns = list[tuple[str, str, bool]]  # role, text, whether it carries loss


def chatml(chat):
    """Qwen2.5's format written by hand (below: Phi-3, Llama-3): pieces of the text, and whether they carry loss."""
    system = (
        []
        if chat[0][0] == "system"
        else [("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n", False)]
    )
    turns = [(f"<|im_start|>{role}\n", text + "<|im_end|>", has) for role, text, has in chat]
    return system + [
        piece for head, text, has in turns for piece in ((head, False), (text, has), ("\n", False))
    ]


def phi(chat):
    turns = [(f"<|{role}|>\n", text + "<|end|>", has) for role, text, has in chat]
    pieces = [
        piece for head, text, has in turns for piece in ((head, False), (text, has), ("\n", False))
    ]
    return [*pieces, ("<|endoftext|>", False)]


def llama(chat):
    system = chat.pop(0)[1].strip() if chat[0][0] == "system" else ""
    top = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n"
    turns = [
        (f"<|start_header_id|>{role}<|end_header_id|>\n\n", text.strip() + "<|eot_id|>", has)
        for role, text, has in chat
    ]
    return [(top + system + "<|eot_id|>", False)] + [
        p for head, text, has in turns for p in ((head, False), (text, has))
    ]
