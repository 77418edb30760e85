"""Generator of rows: bad ones of every kind, and good ones that look odd, each with its expected reason code."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import struct
import zlib
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Line = tuple[
    bytes, str | None
]  # a line of the file, and the reason code; None for a row that must be trained on
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


def chat(question: Any, answer: Any = "Yes.", **more: Any) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ],
        **more,
    }


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes with a huge size in its header."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [head, b"IDAT" + zlib.compress(b"\0" * 100), b"IEND"]
    packed = [struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def with_large_comment(png: bytes) -> bytes:
    """A PNG with a compressed comment that unpacks to 200 MB."""
    comment = b"zTXtnote\0\0" + zlib.compress(bytes(2 * 10**8))
    return (
        png[:33]
        + struct.pack(">I", len(comment) - 4)
        + comment
        + struct.pack(">I", zlib.crc32(comment))
        + png[33:]
    )


def video_file(frames: int, fps: Any = 4) -> bytes:
    import av

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for i in range(frames):
            pixels = np.full((32, 32, 3), 8 * i % 256, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


def audio_file(seconds: float, rate: int = 8000, format: str = "WAV") -> bytes:
    import soundfile

    out = io.BytesIO()
    soundfile.write(out, np.zeros(int(seconds * rate), np.int16), rate, format=format)
    return out.getvalue()


class Fuzz:
    """Writes the media files once, then generates any number of lines."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.dice, self.folder = random.Random(seed), folder
        self.files: dict[str, bytes] = {}
        noise = np.random.default_rng(seed).integers(0, 255, (40, 48, 3), dtype=np.uint8)
        for name in ("png", "jpg", "webp", "gif", "bmp", "tif"):
            file = io.BytesIO()
            Image.fromarray(noise).save(
                file, {"jpg": "JPEG", "tif": "TIFF"}.get(name, name.upper())
            )
            self.files[f"good ü.{name}"] = file.getvalue()
        self.files |= {"good.mp4": video_file(6), "good.wav": audio_file(0.4)}
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
            "long.wav": audio_file(3),  # longer than the encoder's two seconds
            "endless.flac": audio_file(1200, format="FLAC"),
            "endless.mp4": video_file(6, Fraction(1, 1000)),
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

    def lines(self, count: int) -> list[Line]:
        """Lines of all kinds; about half of them are good rows."""
        kinds: list[Callable[[], Any]] = (
            [self.good_text] * 12 + [self.good_media] * 6 + [self.good_format] * 4
        )
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

    def text(self) -> str:
        words = self.dice.choices(
            [*ODD, *TOKENS, "what", "is", "this", "?"], k=self.dice.randint(1, 6)
        )
        return " ".join(words)

    def good_text(self) -> tuple[Any, None]:
        return chat(
            self.text() + " ?", self.text() + " ok"
        ), None  # a prompt of blanks alone is a bad row

    def good_media(self) -> tuple[Any, None]:
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

    def good_format(self) -> tuple[Any, None]:
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
            {**chat("a", "b"), "images": None, "junk": {"deep": [[[[{}]]]]}, "id": 10**30},
            {
                "messages": [
                    {"role": "user", "content": "a", "loss": True},
                    {"role": "gpt", "content": "b", "loss": 0},
                ]
            },
        ]
        return self.dice.choice(rows), None

    def bad_path(self) -> tuple[Any, str]:
        file, reason = self.dice.choice(
            [
                ("gone.png", "missing_file"),
                ("é" * 300, "missing_file"),
                ("loop.png", "missing_file"),
                ("good ü.png/x", "missing_file"),
                ("../secret.png", "path_escape"),
                ("link.png", "path_escape"),
                ("linked/secret.png", "path_escape"),
                ("zero.png", "path_escape"),
                ("/etc/hostname", "path_escape"),
                ("file:///etc/hostname", "path_escape"),
                ("file:///%2e%2e/etc/passwd", "path_escape"),
                ("../" * 40 + "etc/passwd", "path_escape"),
                (".", "unsupported"),
                ("pipe.mp4", "unsupported"),
                ("https://example.com/a.png", "unsupported"),
                ("s3://bucket/a.png", "unsupported"),
                ("", "bad_media"),
                ("a\0b.png", "bad_media"),
            ]
        )
        kind = self.dice.choice(["image", "video", "audio"])
        return chat([{"type": kind, kind: file}]), reason

    def bad_media(self) -> tuple[Any, str]:
        kind, value, reason = self.dice.choice(
            [
                *(
                    ("image", name, "corrupt")
                    for name in ("cut.jpg", "cut.png", "text.png", "empty.png", "liar.png")
                ),
                ("image", "bomb.png", "too_large"),
                ("image", "good.mp4", "corrupt"),
                ("image", "data:image/png;base64,@@@", "corrupt"),
                (
                    "image",
                    "data:image/png;base64," + base64.b64encode(bomb(10**9, 10**9)).decode(),
                    "too_large",
                ),
                ("video", "cut.mp4", "corrupt"),
                ("video", "good.wav", "corrupt"),
                ("video", ["good ü.png", "gone.png"], "missing_file"),
                ("video", ["cut.png", "cut.png"], "corrupt"),
                ("video", ["good ü.png"] * 3 + [None], "bad_media"),
                ("audio", "cut.wav", "corrupt"),
                ("audio", "good ü.png", "corrupt"),
                ("audio", "long.wav", "too_long"),
                ("audio", "endless.flac", "too_long"),
                ("video", "endless.mp4", "too_long"),
                ("image", "words.png", "corrupt"),
                ("audio", {"array": [0.0] * 10, "sampling_rate": 16000}, "too_short"),
                ("audio", {"array": [0.0] * 10, "sampling_rate": 0}, "corrupt"),
                ("audio", {"array": ["loud"], "sampling_rate": 16000}, "wrong_type"),
                ("audio", {"array": [[0.0, 0.1]] * 9, "sampling_rate": 16000}, "wrong_type"),
            ]
        )
        return chat([{"type": kind, kind: value}, {"type": "text", "text": "?"}]), reason

    def bad_shape(self) -> tuple[Any, str]:
        user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        return self.dice.choice(
            [
                ({}, "unknown_format"),
                ({"question": "a", "reply": "b"}, "unknown_format"),
                ({"messages": None}, "unknown_format"),
                ({"messages": []}, "empty"),
                ({"messages": "hello"}, "bad_json"),
                ({"messages": {"role": "user"}}, "wrong_type"),
                ({"messages": [[user], [answer]]}, "wrong_type"),
                ({"messages": [user]}, "no_answer"),
                (chat("a", ""), "no_answer"),
                (chat("a", "  \n"), "no_answer"),
                (chat("a", 5), "wrong_type"),
                (chat({"type": "text"}), "wrong_type"),
                (chat([{"type": "smell", "smell": "x"}]), "unknown_block"),
                (chat([{"type": "image"}]), "media_count"),
                (chat("<image><image>", images=["good ü.png"]), "media_count"),
                (chat("<image>"), "media_count"),
                (chat("<image>", images=[7]), "bad_media"),
                (chat("<image>", images=["good ü.png"], image="good ü.png"), "bad_media"),
                ({"messages": [{"role": "king", "content": "a"}, answer]}, "unknown_role"),
                ({"messages": [{"role": 7, "content": "a"}, answer]}, "unknown_role"),
                ({"messages": [user, {**answer, "loss": "yes"}]}, "wrong_type"),
                ({"messages": [user, {**answer, "loss": False}]}, "nothing_to_learn"),
                ({"messages": [user, {"role": "assistant"}]}, "missing_key"),
                ({**chat("a"), "system": 3}, "wrong_type"),
                ({**chat("a"), "tools": "{"}, "bad_json"),
                ({**chat("a"), "tools": [{"name": "add"}]}, "template"),
                ({"text": ""}, "empty"),
                ({"text": " \n\t"}, "empty"),
                ({"text": ["a"]}, "wrong_type"),
                ({"prompt": "a", "chosen": "b", "rejected": "b"}, "equal_pair"),
                ({"instruction": 1, "output": "b"}, "wrong_type"),
                (chat([{"type": "image", "image": "good ü.png", "max_pixels": -1}]), "wrong_type"),
                (chat([{"type": "video", "video": "good.mp4", "fps": "fast"}]), "wrong_type"),
            ]
        )

    def bad_text(self) -> tuple[Any, str]:
        if self.dice.random() < 0.5:
            return chat(f"say {self.dice.choice(HOLDERS)}"), "placeholder_in_text"
        return chat("half \ud83d", self.dice.choice(["b", "\udc00"])), "bad_text"

    def bad_line(self) -> tuple[bytes, str]:
        return self.dice.choice(
            [
                (b"{broken", "bad_json"),
                (b'{"messages": [}', "bad_json"),
                (b"[" * 100_000, "bad_json"),
                (b'{"a":' * 100_000, "bad_json"),
                (b'{"text": "\xff\xfe"}', "bad_json"),
                (b"\x00" * 50, "bad_json"),
                (b"\x89PNG\x0b", "bad_json"),
                (b'{"text": 1' + b"0" * 10_000 + b"}", "bad_json"),
                (b"[1, 2]", "wrong_type"),
                (b"7", "wrong_type"),
                (b"null", "wrong_type"),
                (b'"text"', "wrong_type"),
                (b'{"text": NaN}', "wrong_type"),
            ]
        )

    def wrong_types(self) -> tuple[Any, str]:
        """A good row with one value replaced by one of another type."""
        row = self.good_format()[0]
        places = list(_leaves(row))
        place, key = self.dice.choice(places)
        place[key] = self.dice.choice(
            [None, True, 0, -1.5, "", [], {}, [[]], {"type": "image"}, ["a", 1], "\ud800", 10**40]
        )
        return row, ANY

    def mutated(self) -> tuple[bytes, str]:
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

    def mutated_media(self) -> tuple[Any, str]:
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

    def junk(self, depth: int = 0) -> tuple[Any, str]:
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


def _leaves(value: Any) -> Any:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _leaves(inner)
