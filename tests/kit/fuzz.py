"""Generator of rows: bad ones of every kind, and good ones that look odd, each with its expected reason code."""

from __future__ import annotations

import base64
import json
import os
import random
import zlib
from fractions import Fraction

import numpy as np
from media_files import audio_file, bomb, image_file, png_chunk, video_file
from PIL import Image
from test_rows import ANSWER, MISTAKES, QUESTION, chat

# A line of the file, and the reason code; None for a row that must be trained on.
Line = tuple[bytes, str | None]
ANY = "?"  # either good or bad
ODD = [
    "né",
    "🙂",
    "👩‍👩‍👧",
    "שלום",
    "a\u0301",
    "\u2028",
    "\u0085",
    "\u200b",
    "\U0010fffd",
    "\u0000",
    "\ufeff",
    "٣",
    "  ",
    "\t",
    "<video>",
]
TOKENS = [
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "<|im_start|>",
    "</s>",
    "<|audio_bos|>",
    "<|vision_eos|>",
]
HOLDERS = ["<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>"]  # media placeholders: no text may hold them


BAD_PATHS = {
    "missing_file": ["gone.png", "é" * 300, "loop.png", "good ü.png/x"],
    "path_escape": [
        "../secret.png",
        "link.png",
        "linked/secret.png",
        "zero.png",
        "/etc/hostname",
        "file:///etc/hostname",
        "file:///%2e%2e/etc/passwd",
        "../" * 40 + "etc/passwd",
    ],
    "unsupported": [".", "pipe.mp4", "https://example.com/a.png", "s3://bucket/a.png"],
    "bad_media": ["", "a\0b.png"],
}
BAD_MEDIA = {
    "corrupt": [
        *(("image", f"{name}.png") for name in ("cut", "text", "empty", "liar", "words")),
        ("image", "cut.jpg"),
        ("image", "good.mp4"),
        ("image", "data:image/png;base64,@@@"),
        ("video", "cut.mp4"),
        ("video", "good.wav"),
        ("video", ["cut.png", "cut.png"]),
        ("audio", "cut.wav"),
        ("audio", "good ü.png"),
        ("audio", {"array": [0.0] * 10, "sampling_rate": 0}),
    ],
    "too_large": [("image", "bomb.png")],
    "missing_file": [("video", ["good ü.png", "gone.png"])],
    "bad_media": [("video", ["good ü.png"] * 3 + [None])],
    "too_long": [("audio", "long.wav"), ("audio", "endless.flac"), ("video", "endless.mp4")],
    "too_short": [("audio", {"array": [0.0] * 10, "sampling_rate": 16000})],
    "wrong_type": [
        ("audio", {"array": ["loud"], "sampling_rate": 16000}),
        ("audio", {"array": [[0.0, 0.1]] * 9, "sampling_rate": 16000}),
    ],
}
# Mistakes in rows that only later stages see, in addition to those that `read_row` refuses.
BAD_SHAPES = {
    "media_count": [
        chat([{"type": "image"}]),
        chat("<image><image>", images=["good ü.png"]),
        chat("<image>"),
    ],
    "nothing_to_learn": [{"messages": [QUESTION, {**ANSWER, "loss": False}]}],
    "template": [chat("a", tools=[{"name": "add"}])],
    "wrong_type": [
        chat([{"type": "image", "image": "good ü.png", "max_pixels": -1}]),
        chat([{"type": "video", "video": "good.mp4", "fps": "fast"}]),
    ],
}
BAD_LINES = {
    "bad_json": [
        b"{broken",
        b'{"messages": [}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"text": "\xff\xfe"}',
        b"\x00" * 50,
        b"\x89PNG\x0b",
        b'{"text": 1' + b"0" * 10_000 + b"}",
    ],
    "wrong_type": [b"[1, 2]", b"7", b"null", b'"text"', b'{"text": NaN}'],
}


def is_json(row):
    try:
        return bool(json.dumps(row))
    except TypeError:
        return False


for reason, mistakes in MISTAKES.items():
    BAD_SHAPES.setdefault(reason, []).extend(filter(is_json, mistakes))


def pairs(table):
    """Each value of a table with its reason."""
    return [(value, reason) for reason, values in table.items() for value in values]


def with_large_comment(png):
    """A PNG with a compressed comment that unpacks to 200 MB."""
    comment = b"zTXtnote\0\0" + zlib.compress(bytes(2 * 10**8))
    return png[:33] + png_chunk(comment) + png[33:]


class Fuzz:
    """Writes the media files once, then generates any number of lines."""

    def __init__(self, folder, seed=0):
        self.dice, self.folder = random.Random(seed), folder
        self.files: dict[str, bytes] = {}
        noise = np.random.default_rng(seed).integers(0, 255, (40, 48, 3), dtype=np.uint8)
        for name in ("png", "jpg", "webp", "gif", "bmp", "tif"):
            format = {"jpg": "JPEG", "tif": "TIFF"}.get(name, name.upper())
            self.files[f"good ü.{name}"] = image_file(Image.fromarray(noise), format)
        self.files["good.mp4"] = video_file(frames=6, fps=4)
        self.files["good.wav"] = audio_file(0.4, rate=8000, channels=1)
        bad = {
            "cut.jpg": self.files["good ü.jpg"][:300],
            "cut.png": self.files["good ü.png"][:2000],
            "cut.mp4": self.files["good.mp4"][:400],
            "cut.wav": self.files["good.wav"][:20],
            "text.png": b"no image at all",
            "empty.png": b"",
            "bomb.png": bomb(60000, 60000),
            "liar.png": bomb(900, 900),
            "words.png": with_large_comment(self.files["good ü.png"]),
            # Longer than the encoder's two seconds.
            "long.wav": audio_file(3, rate=8000, channels=1),
            "endless.flac": audio_file(1200, rate=8000, format="FLAC", channels=1),
            "endless.mp4": video_file(frames=6, fps=Fraction(1, 1000)),
        }
        for name, data in (self.files | bad).items():
            (folder / name).write_bytes(data)
        (folder.parent / "secret.png").write_bytes(self.files["good ü.png"])
        (folder / "link.png").symlink_to(folder.parent / "secret.png")
        (folder / "linked").symlink_to(folder.parent)
        (folder / "zero.png").symlink_to("/dev/zero")
        (folder / "loop.png").symlink_to(folder / "loop.png")
        (folder / "inside.png").symlink_to(folder / "good ü.png")
        os.mkfifo(folder / "pipe.mp4")

    def lines(self, count):
        """Lines of all kinds; about half of them are good rows."""
        kinds = [self.good_text] * 12 + [self.good_media] * 6 + [self.good_format] * 4
        kinds += (
            [self.bad_path] * 4 + [self.bad_media] * 4 + [self.bad_shape] * 4 + [self.bad_line] * 2
        )
        kinds += [self.bad_text, self.wrong_types, self.mutated, self.mutated_media, self.junk]
        found = [(kinds[i] if i < len(kinds) else self.dice.choice(kinds))() for i in range(count)]
        self.dice.shuffle(found)
        return [
            (line if isinstance(line, bytes) else json.dumps(line).encode(), reason)
            for line, reason in found
        ]

    def text(self):
        words = self.dice.choices(
            [*ODD, *TOKENS, "what", "is", "this", "?"], k=self.dice.randint(1, 6)
        )
        return " ".join(words)

    def good_text(self):
        return chat(
            self.text() + " ?", self.text() + " ok"
        ), None  # a prompt of blanks alone is a bad row

    def good_media(self):
        images = [
            *[f"good ü.{name}" for name in ("png", "jpg", "webp", "gif", "bmp", "tif")],
            "inside.png",
        ]
        file = self.dice.choice(images)
        raw = "data:image/png;base64," + base64.b64encode(self.files["good ü.png"]).decode()
        values = [
            file,
            f"./x/../{file}",
            str(self.folder / file),
            (self.folder / file).as_uri(),
            raw,
        ]
        blocks = [
            {"type": "image", "image": value}
            for value in self.dice.choices(values, k=self.dice.randint(1, 3))
        ]
        rows = [
            chat([*blocks, {"type": "text", "text": self.text()}]),
            chat("<image> what?", images=[file]),
            chat([{"type": "image_url", "image_url": {"url": raw}}]),
            {
                "conversations": [
                    {"from": "human", "value": "<image>?"},
                    {"from": "gpt", "value": "A."},
                ],
                "image": file,
            },
            {"caption": "An image.", "image": file},
            chat([{"type": "video", "video": "good.mp4", "fps": 2}]),
            chat([{"type": "video", "video": ["good ü.png", "good ü.bmp"]}]),
            chat([{"type": "audio", "audio": "good.wav"}]),
            chat([{"type": "audio"}, {"type": "image"}], audio="good.wav", image=file),
        ]
        return self.dice.choice(rows), None

    def good_format(self):
        rows = [
            {"text": self.text() + "x"},
            {"prompt": self.text() + " ?", "completion": "ok"},
            {"instruction": "Do", "input": self.text(), "output": "done", "history": [["a", "b"]]},
            {"prompt": "Which?", "chosen": "This.", "rejected": "That."},
            {
                "conversations": [
                    {"from": "human", "value": self.text() + " ?"},
                    {"from": "gpt", "value": "Hm"},
                ]
            },
            chat(
                [{"type": "text", "text": "a"}, {"text": self.text()}],
                [{"type": "text", "text": "b"}],
            ),
            {**chat("a", "b"), "tools": None, "junk": {"deep": [[[[{}]]]]}, "id": 10**30},
            {
                "messages": [
                    {"role": "user", "content": "a", "loss": True},
                    {"role": "gpt", "content": "b", "loss": 0},
                ]
            },
        ]
        return self.dice.choice(rows), None

    def bad_path(self):
        kind = self.dice.choice(["image", "video", "audio"])
        file, reason = self.dice.choice(pairs(BAD_PATHS))
        return chat([{"type": kind, kind: file}]), reason

    def bad_media(self):
        huge = "data:image/png;base64," + base64.b64encode(bomb(10**9, 10**9)).decode()
        (kind, value), reason = self.dice.choice(
            [*pairs(BAD_MEDIA), (("image", huge), "too_large")]
        )
        return chat([{"type": kind, kind: value}, {"type": "text", "text": "?"}]), reason

    def bad_shape(self):
        return self.dice.choice(pairs(BAD_SHAPES))

    def bad_text(self):
        if self.dice.random() < 0.5:
            return chat(f"say {self.dice.choice(HOLDERS)}"), "placeholder_in_text"
        return chat("half \ud83d", self.dice.choice(["b", "\udc00"])), "bad_text"

    def bad_line(self):
        return self.dice.choice(pairs(BAD_LINES))

    def wrong_types(self):
        """A good row with one value replaced by one of another type."""
        row = self.good_format()[0]
        places = list(_leaves(row))
        place, key = self.dice.choice(places)
        place[key] = self.dice.choice(
            [None, True, 0, -1.5, "", [], {}, [[]], {"type": "image"}, ["a", 1], "\ud800", 10**40]
        )
        return row, ANY

    def mutated(self):
        line = bytearray(
            json.dumps(
                self.dice.choice([self.good_text, self.good_media, self.good_format])()[0]
            ).encode()
        )
        for _ in range(self.dice.randint(1, 6)):
            line[self.dice.randrange(len(line))] = self.dice.choice(
                [*b'{}[]",:\\0 aZ', 0xC3, 0xFF, 0]
            )
        return bytes(line), ANY

    def mutated_media(self):
        name, data = self.dice.choice(sorted(self.files.items()))
        broken = bytearray(
            data[: self.dice.randint(1, len(data))] if self.dice.random() < 0.4 else data
        )
        for _ in range(self.dice.randint(0, 8)):
            broken[self.dice.randrange(min(len(broken), 400))] = self.dice.randrange(256)
        kind = {"mp4": "video", "wav": "audio"}.get(name.rpartition(".")[2], "image")
        return chat(
            [{"type": kind, kind: f"data:x;base64,{base64.b64encode(broken).decode()}"}]
        ), ANY

    def junk(self, depth=0):
        """Nested junk with known keys."""
        keys = [
            "messages",
            "role",
            "content",
            "type",
            "image",
            "images",
            "text",
            "value",
            "from",
            "tools",
            "video",
            "x",
        ]
        kind = self.dice.randrange(8 if depth < 6 else 5)
        leaves = [
            None,
            self.dice.choice(ODD),
            self.dice.choice([0, -1, 1e308, True]),
            "user",
            "image",
        ]
        if depth and kind < 5:
            return leaves[kind], ANY
        inner = [self.junk(depth + 1)[0] for _ in range(self.dice.randint(0, 4))]
        if depth and kind == 5:
            return inner, ANY
        return dict(zip(self.dice.sample(keys, len(inner)), inner, strict=True)), ANY


def _leaves(value):
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _leaves(inner)
