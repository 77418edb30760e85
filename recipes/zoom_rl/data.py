"""The data of the CPU configs, built once into a folder: pictures of four framed digits."""

import json
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from mvp_engine.kit.tiny_processors import make_qwen3_vl_processor

QUESTION = "The digit in the red frame?"
RED = (230, 20, 20)
OTHERS = [(20, 170, 40), (30, 60, 240), (240, 210, 0)]
CELL = 32  # pixels of a side; a picture is two cells wide
SMALL = 8  # pixels of a side of the picture in the prompt, in which no digit can be read
HELD_OUT = 200
VOCABULARY = 320  # at most


def build(folder: Path, rows: int) -> None:
    """Write `{train,eval}_chats.jsonl` for SFT, `{train,eval}.jsonl` with prompts for RL, pictures, the processor."""
    random = Random(0)
    (folder / "pictures").mkdir()
    texts = []
    for split, count in (("eval", HELD_OUT), ("train", rows)):
        prompts = []
        chats = []
        for index in range(count):
            name = f"pictures/{split}{index:04d}"
            asked = index % 4
            colors = random.sample(OTHERS, 3)
            colors.insert(asked, RED)
            digits = random.sample(range(10), 4)
            picture = draw(colors, digits, random)
            picture.save(folder / f"{name}.png")
            picture.resize((SMALL, SMALL), Image.Resampling.BOX).save(folder / f"{name}_small.png")
            prompt = {"prompt": f"<image>{QUESTION}", "images": [f"{name}_small.png"]}
            prompts.append({**prompt, "picture": f"{name}.png", "answer": str(digits[asked])})
            x, y = asked % 2, asked // 2
            crop(picture, x, y).save(folder / f"{name}_crop.png")
            words = [f"<image>{QUESTION}", f"zoom {x} {y}", "<image>", str(digits[asked])]
            roles = ["user", "assistant", "tool", "assistant"]
            messages = [{"role": role, "content": text} for role, text in zip(roles, words, strict=True)]
            chats.append({"messages": messages, "images": [*prompt["images"], f"{name}_crop.png"]})
            texts += [f"user\n{QUESTION}", f"assistant\nzoom {x} {y}", "tool\n"]
        for name, lines in ((f"{split}.jsonl", prompts), (f"{split}_chats.jsonl", chats)):
            (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    make_qwen3_vl_processor(texts, VOCABULARY).save_pretrained(folder / "processor")


def draw(colors: list[tuple[int, int, int]], digits: list[int], random: Random) -> Image.Image:
    """A picture of four cells, in the order of reading."""
    picture = Image.new("RGB", (2 * CELL, 2 * CELL))
    pen = ImageDraw.Draw(picture)
    font: Any = ImageFont.load_default(size=22)
    for index, (color, digit) in enumerate(zip(colors, digits, strict=True)):
        left, top = index % 2 * CELL, index // 2 * CELL
        box = (left, top, left + CELL - 1, top + CELL - 1)
        pen.rectangle(box, fill="white", outline=color, width=5)
        place = (left + random.randrange(8, 12), top + random.randrange(1, 5))
        pen.text(place, str(digit), font=font, fill="black")
    return picture


def crop(picture: Image.Image, x: int, y: int) -> Image.Image:
    """The cell in column `x` and row `y`."""
    return picture.crop((x * CELL, y * CELL, (x + 1) * CELL, (y + 1) * CELL))
