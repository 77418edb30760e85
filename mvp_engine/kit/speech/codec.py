"""Codec: the interface of speech codecs, and `open_codec`, which opens the one that `mllm.speech.codec` names.

A codec is a folder (Mimi as transformers saves it, or a `ResidualKMeans`) or a class in a file of the user's:

    class Codec(mvp_engine.kit.speech.Codec):
        sampling_rate, frame_rate, books, codebook_size = 16_000, 50.0, 8, 1024

        def encode(self, waveform):  # float32 (samples,) -> integers (frames, books)
            ...
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mvp_engine.errors import UserError, similar_path
from mvp_engine.hf.weights.hub import local_folder
from mvp_engine.imports import load_spec

KEY = "mllm.speech.codec"
_ATTRIBUTES = ("sampling_rate", "frame_rate", "books", "codebook_size")


class Codec(ABC):
    """Waveforms to codes, and back. A subclass sets the attributes; a user's own may live in any file."""

    sampling_rate: int  # of waveforms
    frame_rate: float  # frames per second
    books: int  # codes of a frame
    codebook_size: int  # codes are 0 to codebook_size - 1, in each book
    # Changes whenever codes of the same waveform would; of a class in a file, by default a hash of the file.
    fingerprint: str = ""

    @abstractmethod
    def encode(self, waveform: np.ndarray) -> np.ndarray:
        """(frames, books) of integers, for a float waveform (samples,) at `sampling_rate`."""

    def encode_many(self, waveforms: Sequence[np.ndarray]) -> list[np.ndarray]:
        """`encode` of several waveforms; a neural codec has one forward for them."""
        return [self.encode(waveform) for waveform in waveforms]

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """The float waveform of (frames, books) codes."""
        raise UserError(f"{type(self).__name__} has no decode, so codes cannot be played with it")


def open_codec(spec: str, books: int | None = None, device: str = "cpu", key: str = KEY) -> Codec:
    """The codec of a folder, of a model of the Hub, or of `file.py:Class`.

    `books` are the codebooks that are wanted: the first ones of a codec that has more. `key` is the setting that errors
    name.
    """
    codec = _user_codec(spec, key) if _is_class(spec) else _folder_codec(spec, books, device, key)
    if books is not None and codec.books < books:
        raise UserError(
            f"{key}={spec} has {codec.books} codebooks; mllm.speech.books={books} are wanted"
        )
    return codec


def _is_class(spec: str) -> bool:
    return ":" in spec and spec.rpartition(":")[0].endswith(".py")


def _user_codec(spec: str, key: str) -> Codec:
    module, name = load_spec(spec, Path.cwd(), key)
    found = getattr(module, name or "", None)
    if not isinstance(found, type) or not issubclass(found, Codec):
        raise UserError(f"{key}={spec}: {name} is not a subclass of mvp_engine.kit.speech.Codec")
    codec = found()
    missing = [attribute for attribute in _ATTRIBUTES if not hasattr(codec, attribute)]
    if missing:
        raise UserError(f"{key}={spec}: {name} does not set {', '.join(missing)}")
    if not codec.fingerprint:
        source = Path(str(module.__file__)).read_bytes()
        codec.fingerprint = hashlib.blake2b(source, digest_size=16).hexdigest()
    return codec


def _folder_codec(spec: str, books: int | None, device: str, key: str) -> Codec:
    from mvp_engine.kit.speech.kmeans import FILE, ResidualKMeans
    from mvp_engine.kit.speech.mimi import Mimi

    folder = local_folder(spec, weights=True)
    if not folder.is_dir():
        raise UserError(
            f"{key}={spec} is neither a folder nor file.py:Class.{similar_path(folder)}"
        )
    if (folder / FILE).is_file():
        return ResidualKMeans.load(folder)
    config = folder / "config.json"
    model_type = json.loads(config.read_text()).get("model_type") if config.is_file() else None
    if model_type != "mimi":
        found = f"model_type {model_type!r}" if model_type else f"neither config.json nor {FILE}"
        raise UserError(
            f"{key}={spec} has {found}; supported are Mimi's folder (kyutai/mimi), a ResidualKMeans' one, and a "
            "class of your own (file.py:Class)"
        )
    return Mimi(folder, books, device)
