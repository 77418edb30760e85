"""The data of the CPU configs, built once into a folder: sums of three numbers, and chats that compute them."""

import json
import zlib
from pathlib import Path
from random import Random
from typing import Any

from mvp_engine.hf.model.config_source import tool_schema
from mvp_engine.kit.tiny_processors import train_tokenizer

from .tools import add

PROMPT = "Sum of {} {} {}."
VOCABULARY = 512  # at most
HELD_OUT = 200
VERSION = 3  # of what `build` writes
COMPLETE = 4  # one of so many chats of `train_short_chats.jsonl` adds all numbers
# Qwen's format of tools, with fewer words.
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def build(folder: Path, rows: int) -> None:
    """Write `{train,eval}_chats.jsonl` for SFT, `{train,eval}.jsonl` with prompts and numbers for RL, the tokenizer.

    Most chats of `train_short_chats.jsonl` forget the last number.
    """
    random = Random(0)
    made: dict[str, list[list[int]]] = {"train": [], "eval": []}
    while len(made["train"]) < rows or len(made["eval"]) < HELD_OUT:
        numbers = [random.randrange(50, 100) for _ in range(3)]  # both sums have three digits
        split = "eval" if zlib.crc32(bytes(numbers)) % 10 == 0 else "train"
        if len(made[split]) < (rows if split == "train" else HELD_OUT):
            made[split].append(numbers)
    for split, sums in made.items():
        _write(folder / f"{split}.jsonl", [{"prompt": PROMPT.format(*each), "numbers": each} for each in sums])
        _write(folder / f"{split}_chats.jsonl", [chat(*each) for each in sums])
    short = [chat(a, b, c, 1 if index % COMPLETE else 2) for index, (a, b, c) in enumerate(made["train"])]
    _write(folder / "train_short_chats.jsonl", short)
    # Digits stay tokens of their own; each text between them becomes one token.
    plain = train_tokenizer([], 256)
    texts = []
    for numbers in made["train"][:50]:
        row = chat(*numbers)
        text = plain.apply_chat_template(row["messages"], row["tools"], chat_template=TEMPLATE, tokenize=False)
        texts += text.split("<|im_end|>")
    tokenizer = train_tokenizer(texts, VOCABULARY, split_pattern=r"\d|<[|]im_start[|]>|\n")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "processor")


def chat(a: int, b: int, c: int, calls: int = 2) -> dict[str, Any]:
    """A conversation that adds twice, or once: then its answer is wrong."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": PROMPT.format(a, b, c)}]
    total = a
    for number in (b, c)[:calls]:
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": total, "b": number}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        total = add(total, number)
        messages.append({"role": "tool", "name": "add", "content": str(total)})
    messages.append({"role": "assistant", "content": str(total)})
    return {"messages": messages, "tools": [tool_schema(add)]}


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
