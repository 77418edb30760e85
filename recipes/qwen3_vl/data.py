"""Synthetic data for all stages: coloured shapes in images and short videos, with captions and questions.

Everything is drawn from a seed of its split and kind, into a folder, once. Held-out drawings have other places, sizes
and shades. Every second video is an MP4 file, the others are lists of frames.
"""

import json
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mvp_engine.kit import build_once, load_processor
from mvp_engine.kit.tiny_processors import make_qwen3_vl_processor

from .shapes import COLOURS, FORMS, MOVES, Shape, draw_image, draw_video

NUMBERS = ("one", "two", "three", "four")
HELD_OUT = 20  # each held-out file has one row for this many training captions
VOCABULARY = 384
# The tokenizer learns these words as single tokens.
WORDS = f"""user assistant {" ".join([*COLOURS, *FORMS, *MOVES, *NUMBERS])} a red circle and a blue cross moves left
One: green triangle Two: one is a yellow circle, two is a circle, What colour is the cross? What shape is blue?
How many shapes are there? Which way does it move? <0.2 seconds> <1.2 seconds> <1.5 seconds>"""

Row = dict[str, Any]


def prepare(folder: str, rows: int) -> Any:
    """Build the folder if it is missing, and load its processor."""
    built = build_once(folder, {"rows": rows, "version": 2}, partial(_build, rows=rows), "shapes.folder")
    return load_processor(built / "processor")


def _build(folder: Path, rows: int) -> None:
    for seed, split in enumerate(("train", "eval")):
        for number, (kind, share, make_row) in enumerate(KINDS):
            (folder / split / kind).mkdir(parents=True)
            random = np.random.default_rng([seed, number])
            count = int(rows * share) if split == "train" else max(2, rows // HELD_OUT)
            lines = []
            for i in range(count):
                row = make_row(folder / split, f"{kind}/{i:05d}", random)
                lines.append(json.dumps(row) + "\n")
            (folder / split / f"{kind}.jsonl").write_text("".join(lines))
    make_qwen3_vl_processor([WORDS] * 2, VOCABULARY).save_pretrained(folder / "processor")


def random_shapes(random: np.random.Generator, count: int) -> list[Shape]:
    """Shapes of different colours and different forms."""
    colours = random.permutation(list(COLOURS))[:count]
    forms = random.permutation(FORMS)[:count]
    return [(str(colour), str(form)) for colour, form in zip(colours, forms, strict=True)]


def _random_move(random: np.random.Generator) -> str:
    return str(random.choice(list(MOVES)))


# ---- Sentences ------------------------------------------------------------------------------------------------------


def caption(shapes: list[Shape]) -> str:
    return " and ".join(f"a {colour} {form}" for colour, form in shapes)


def both(first: Shape, second: Shape) -> str:
    return f"one is {caption([first])}, two is {caption([second])}"


def moving(shape: Shape, move: str) -> str:
    return f"{caption([shape])} moves {move}"


# ---- Rows: each function makes one row of a file --------------------------------------------------------------------


def _texts_row(folder: Path, name: str, random: np.random.Generator) -> Row:
    """Notes, and the sentence for them: in later stages an image takes the place of the notes."""
    while True:
        shapes = random_shapes(random, 1 + int(random.integers(2)))
        move = _random_move(random)
        notes = [" ".join(shape) for shape in shapes]
        kinds = [
            (", ".join(notes), caption(shapes)),
            (f"One: {notes[0]} Two: {notes[-1]}", both(shapes[0], shapes[-1])),
            (f"{notes[0]}, {move}", moving(shapes[0], move)),
        ]
        prompt, completion = kinds[int(random.integers(3))]
        if (zlib.crc32(prompt.encode()) % 10 == 0) == (folder.name == "eval"):  # prompts are held out, too
            return {"prompt": prompt, "completion": completion}


def _captions_row(folder: Path, name: str, random: np.random.Generator) -> Row:
    shapes = random_shapes(random, 1 + int(random.integers(2)))
    return {"image": draw_image(folder, name, shapes, random), "text": caption(shapes)}


def _several_row(folder: Path, name: str, random: np.random.Generator) -> Row:
    """Two images, with text between them."""
    shapes = [random_shapes(random, 1)[0] for _ in range(2)]
    content = []
    for label, shape in zip(("One: ", " Two: "), shapes, strict=True):
        image = draw_image(folder, name + label.strip(" :"), [shape], random)
        content.append({"type": "text", "text": label})
        content.append({"type": "image", "image": image})
    return _chat(content, both(*shapes))


def _videos_row(folder: Path, name: str, random: np.random.Generator) -> Row:
    shape = random_shapes(random, 1)[0]
    move = _random_move(random)
    return {"video": draw_video(folder, name, shape, move, random), "text": moving(shape, move)}


def _colour_row(folder: Path, name: str, random: np.random.Generator) -> Row:
    shapes = random_shapes(random, 1)
    return _image_question(folder, name, shapes, random, "What colour is it?", shapes[0][0])


def _shape_row(folder: Path, name: str, random: np.random.Generator) -> Row:
    shapes = random_shapes(random, 1)
    return _image_question(folder, name, shapes, random, "What shape is it?", shapes[0][1])


def _count_row(folder: Path, name: str, random: np.random.Generator) -> Row:
    count = 1 + int(random.integers(len(NUMBERS)))
    shapes = [random_shapes(random, 1)[0] for _ in range(count)]
    return _image_question(folder, name, shapes, random, "How many shapes are there?", NUMBERS[count - 1])


def _move_row(folder: Path, name: str, random: np.random.Generator) -> Row:
    shape = random_shapes(random, 1)[0]
    move = _random_move(random)
    video = {"type": "video", "video": draw_video(folder, name, shape, move, random)}
    return _chat([video, {"type": "text", "text": "Which way does it move?"}], move)


def _image_question(
    folder: Path, name: str, shapes: list[Shape], random: np.random.Generator, question: str, answer: str
) -> Row:
    image = {"type": "image", "image": draw_image(folder, name, shapes, random)}
    return _chat([image, {"type": "text", "text": question}], answer)


def _chat(content: list[dict[str, Any]], answer: str) -> Row:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


# The files of a split, their numbers of rows as a share of `shapes.rows`, and the functions that make the rows.
KINDS = [
    ("texts", 1.0, _texts_row),
    ("captions", 1.0, _captions_row),
    ("several", 0.5, _several_row),
    ("films", 0.5, _videos_row),
    ("colour", 0.5, _colour_row),
    ("shape", 0.5, _shape_row),
    ("count", 0.5, _count_row),
    ("move", 0.5, _move_row),
]
