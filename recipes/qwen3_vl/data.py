"""Made-up data for all stages: coloured shapes in pictures and short films, with captions and questions about them.

Everything is drawn from a seed of its split and kind, into a folder, once. Held-out drawings are other ones: places,
sizes and shades are drawn anew. Films are MP4 files and lists of frames, by turns.
"""

import json
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from mvp_engine.errors import UserError
from mvp_engine.kit import build_once, load_processor
from mvp_engine.kit.tiny_processors import make_qwen3_vl_processor

COLOURS = {"red": (215, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220), "yellow": (235, 200, 30)}
FORMS = ("circle", "cross", "triangle")
MOVES = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
NUMBERS = ("one", "two", "three", "four")
SIDE, FILM = 48, 32  # pixels of a picture, of a frame
HELD_OUT = 20  # each held-out file has one row for so many captions that are trained on
VOCABULARY = 384
# The tokenizer knows these whole.
WORDS = f"""user assistant {" ".join([*COLOURS, *FORMS, *MOVES, *NUMBERS])} a red circle and a blue cross moves left
One: green triangle Two: one is a yellow circle, two is a circle, What colour is the cross? What shape is blue?
How many shapes are there? Which way does it move? <0.2 seconds> <1.2 seconds> <1.5 seconds>"""

Thing = tuple[str, str]  # colour and form
Row = dict[str, Any]


def prepare(folder: str, rows: int) -> Any:
    """Make the folder, if it is not there; gives the processor that goes with it."""
    made = build_once(folder, {"rows": rows, "version": 2}, partial(_make, rows=rows), "shapes.folder")
    return load_processor(made / "processor")


def _make(folder: Path, rows: int) -> None:
    for seed, split in enumerate(("train", "eval")):
        for number, (kind, share, make) in enumerate(KINDS):
            (folder / split / kind).mkdir(parents=True)
            random = np.random.default_rng([seed, number])
            count = int(rows * share) if split == "train" else max(2, rows // HELD_OUT)
            made = [make(folder / split, f"{kind}/{i:05d}", random) for i in range(count)]
            (folder / split / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    make_qwen3_vl_processor([WORDS] * 2, VOCABULARY).save_pretrained(folder / "processor")


# What the rows say


def some(random: np.random.Generator, count: int) -> list[Thing]:
    """Things of different colours and different forms."""
    colours, forms = random.permutation(list(COLOURS))[:count], random.permutation(FORMS)[:count]
    return [(str(colour), str(form)) for colour, form in zip(colours, forms, strict=True)]


def caption(things: list[Thing]) -> str:
    return " and ".join(f"a {colour} {form}" for colour, form in things)


def _texts_row(folder: Path, name: str, random: np.random.Generator) -> Row:
    """Notes and the sentence that they make: what a model that sees will be given as a picture. Some are held out."""
    while True:
        things = some(random, 1 + int(random.integers(2)))
        first, last, way = things[0], things[-1], str(random.choice(list(MOVES)))
        notes = [" ".join(thing) for thing in things]
        prompt, completion = [
            (", ".join(notes), caption(things)),
            (f"One: {notes[0]} Two: {notes[-1]}", both(first, last)),
            (f"{notes[0]}, {way}", moving(first, way)),
        ][int(random.integers(3))]
        if (zlib.crc32(prompt.encode()) % 10 == 0) == (folder.name == "eval"):
            return {"prompt": prompt, "completion": completion}


def both(first: Thing, second: Thing) -> str:
    return f"one is {caption([first])}, two is {caption([second])}"


def moving(thing: Thing, way: str) -> str:
    return f"{caption([thing])} moves {way}"


def _captions_row(folder: Path, name: str, random: np.random.Generator) -> Row:
    things = some(random, 1 + int(random.integers(2)))
    return {"image": _picture(folder, name, things, random), "text": caption(things)}


def _several_row(folder: Path, name: str, random: np.random.Generator) -> Row:
    """Pictures between pieces of text."""
    things, content = [some(random, 1)[0] for _ in range(2)], list[dict[str, str]]()
    for label, thing in zip(("One: ", " Two: "), things, strict=True):
        content.append({"type": "text", "text": label})
        content.append({"type": "image", "image": _picture(folder, name + label.strip(" :"), [thing], random)})
    return _chat(content, both(*things))


def _films_row(folder: Path, name: str, random: np.random.Generator) -> Row:
    thing, way = some(random, 1)[0], str(random.choice(list(MOVES)))
    return {"video": _film(folder, name, thing, way, random), "text": moving(thing, way)}


def _colour_row(folder: Path, name: str, random: np.random.Generator) -> Row:
    ((colour, form),) = some(random, 1)
    return _about(folder, name, [(colour, form)], random, "What colour is it?", colour)


def _shape_row(folder: Path, name: str, random: np.random.Generator) -> Row:
    ((colour, form),) = some(random, 1)
    return _about(folder, name, [(colour, form)], random, "What shape is it?", form)


def _count_row(folder: Path, name: str, random: np.random.Generator) -> Row:
    things = [some(random, 1)[0] for _ in range(1 + int(random.integers(len(NUMBERS))))]
    return _about(folder, name, things, random, "How many shapes are there?", NUMBERS[len(things) - 1])


def _move_row(folder: Path, name: str, random: np.random.Generator) -> Row:
    thing, way = some(random, 1)[0], str(random.choice(list(MOVES)))
    film = {"type": "video", "video": _film(folder, name, thing, way, random)}
    return _chat([film, {"type": "text", "text": "Which way does it move?"}], way)


def _about(folder: Path, name: str, things: list[Thing], random: np.random.Generator, asked: str, answer: str) -> Row:
    picture = {"type": "image", "image": _picture(folder, name, things, random)}
    return _chat([picture, {"type": "text", "text": asked}], answer)


def _chat(content: list[dict[str, Any]], answer: str) -> Row:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


# The files of a split, how many rows each has as a share of `shapes.rows`, and what makes one.
KINDS = [
    ("texts", 1.0, _texts_row),
    ("captions", 1.0, _captions_row),
    ("several", 0.5, _several_row),
    ("films", 0.5, _films_row),
    ("colour", 0.5, _colour_row),
    ("shape", 0.5, _shape_row),
    ("count", 0.5, _count_row),
    ("move", 0.5, _move_row),
]


# What is to be seen


def _picture(folder: Path, name: str, things: list[Thing], random: np.random.Generator) -> str:
    """From left to right, each in a column of its own."""
    paper, width = _paper(SIDE, random), SIDE / len(things)
    for i, thing in enumerate(things):
        size = random.uniform(0.7, 0.95) * min(width, SIDE / 2) / 2
        x = random.uniform(i * width + size, (i + 1) * width - size)
        _draw(paper, thing, x, random.uniform(size, SIDE - size), size, _shade(thing, random))
    paper.save(folder / f"{name}.png")
    return f"{name}.png"


def _film(folder: Path, name: str, thing: Thing, way: str, random: np.random.Generator) -> str | list[str]:
    """Every second one is a file of eight frames, the others are lists of four."""
    as_file = int(name.rpartition("/")[2]) % 2 == 0
    count, size, shade = (8 if as_file else 4), random.uniform(5, 7), _shade(thing, random)
    length = random.uniform(11, FILM - 2 * size - 1)
    step, room = np.array(MOVES[way]) * length, FILM - 2 * size - np.abs(MOVES[way]) * length
    start = size + random.uniform(0, 1, 2) * room - np.minimum(step, 0)
    background, frames = _paper(FILM, random), []
    for i in range(count):
        frames.append(background.copy())
        _draw(frames[-1], thing, *(start + step * i / (count - 1)), size, shade)
    if as_file:
        _encode(folder / f"{name}.mp4", frames)
        return f"{name}.mp4"
    for i, frame in enumerate(frames):
        frame.save(folder / f"{name}_{i}.png")
    return [f"{name}_{i}.png" for i in range(count)]


def _encode(file: Path, frames: list[Image.Image]) -> None:
    try:
        import av
    except ModuleNotFoundError:
        raise UserError("this recipe's films are made with PyAV: pip install 'mvp-engine[data]'") from None
    with av.open(str(file), "w") as film:
        stream = film.add_stream("libx264", rate=4, options={"crf": "8", "threads": "1"})
        stream.width, stream.height, stream.pix_fmt = FILM, FILM, "yuv420p"
        for frame in frames:
            film.mux(stream.encode(av.VideoFrame.from_image(frame)))
        film.mux(stream.encode())


def _paper(side: int, random: np.random.Generator) -> Image.Image:
    return Image.new("RGB", (side, side), tuple(random.integers(225, 256, 3).tolist()))


def _shade(thing: Thing, random: np.random.Generator) -> tuple[int, ...]:
    return tuple(np.clip(np.array(COLOURS[thing[0]]) + random.integers(-25, 26, 3), 0, 255).tolist())


def _draw(paper: Image.Image, thing: Thing, x: float, y: float, size: float, shade: tuple[int, ...]) -> None:
    """`size` is half of what it measures across."""
    pen, box = ImageDraw.Draw(paper), (x - size, y - size, x + size, y + size)
    if thing[1] == "circle":
        pen.ellipse(box, fill=shade)
    elif thing[1] == "cross":
        pen.rectangle((x - size / 3, box[1], x + size / 3, box[3]), fill=shade)
        pen.rectangle((box[0], y - size / 3, box[2], y + size / 3), fill=shade)
    else:
        pen.polygon([(x, box[1]), (box[0], box[3]), (box[2], box[3])], fill=shade)
