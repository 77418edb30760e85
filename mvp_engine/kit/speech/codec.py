"""Codec: the interface of speech codecs, and `open_codec`, which opens the one that `data.speech.codec` names.

A codec is a folder (Mimi as transformers saves it, or a `ResidualKMeans`) or a class in a file of the user's:

    class Codec(mvp_engine.kit.speech.Codec):
        sampling_rate, frame_rate, books, codebook_size = 16_000, 50.0, 8, 1024

        def encode(self, waveform):  # float32 (samples,) -> integers (frames, books)
            ...
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mvp_engine.errors import UserError, similar_path
from mvp_engine.files import atomic_path
from mvp_engine.hf.weights.hub import local_folder
from mvp_engine.imports import load_spec

KEY = "data.speech.codec"
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
            f"{key}={spec} has {codec.books} codebooks; data.speech.books={books} are wanted"
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


# Mimi, the codec of Qwen3-Omni: its codes are Mimi's first 16 codebooks, at 12.5 frames per second of 24 kHz.

BATCH_SECONDS = 240.0  # of audio in one forward, with its padding: 1.5 GB of activations
HASH_BLOCKS = 64
HASH_BYTES = 4096


class Mimi(Codec):
    """A Mimi of transformers, in float32."""

    def __init__(self, folder: Path, books: int | None = None, device: str = "cpu") -> None:
        """`books`: the first ones of its codebooks; by default all."""
        from transformers import MimiConfig

        self.folder = folder
        self.device = device
        config: Any = MimiConfig.from_pretrained(folder, local_files_only=True)
        self.sampling_rate = int(config.sampling_rate)
        self.frame_rate = float(config.frame_rate)
        self.frame_samples = round(self.sampling_rate / self.frame_rate)
        self.books = int(
            config.num_quantizers if books is None else min(books, config.num_quantizers)
        )
        self.codebook_size = int(config.codebook_size)
        self.fingerprint = f"mimi {self.books} {_hash_weights(folder)}"

    @cached_property
    def model(self) -> Any:
        """Loaded at the first call: where all codes are cached, nobody needs the weights."""
        from transformers import MimiModel

        model: Any = MimiModel.from_pretrained(self.folder, local_files_only=True)
        return model.eval().requires_grad_(False).to(self.device)

    def encode(self, waveform: np.ndarray) -> np.ndarray:
        return self.encode_many([waveform])[0]

    def encode_many(self, waveforms: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Batches of similar lengths, each padded with silence to whole frames.

        Mimi is causal, so the codes of a waveform do not depend on what is padded behind it.
        """
        counts = [-(-len(waveform) // self.frame_samples) for waveform in waveforms]
        codes = [np.zeros((0, self.books), np.int64) for _ in waveforms]
        for batch in self._batches(counts):
            values = torch.zeros(len(batch), 1, counts[batch[-1]] * self.frame_samples)
            for row, index in enumerate(batch):
                waveform = np.asarray(waveforms[index], np.float32)
                values[row, 0, : len(waveform)] = torch.from_numpy(waveform)
            with torch.inference_mode():
                found = self.model.encode(values.to(self.device), num_quantizers=self.books)
            for index, codes_KF in zip(batch, found.audio_codes.cpu(), strict=True):
                codes[index] = codes_KF[:, : counts[index]].T.contiguous().numpy()
        return codes

    def _batches(self, counts: list[int]) -> list[list[int]]:
        """Waveforms by length, at most BATCH_SECONDS together as padded; those without a frame are left out."""
        most = BATCH_SECONDS * self.frame_rate
        batches: list[list[int]] = []
        for index in sorted(range(len(counts)), key=counts.__getitem__):
            if not counts[index]:
                continue
            if not batches or (len(batches[-1]) + 1) * counts[index] > most:
                batches.append([])
            batches[-1].append(index)
        return batches

    def decode(self, codes: np.ndarray) -> np.ndarray:
        codes_1KF = torch.as_tensor(codes).long().T[None].to(self.device)
        with torch.inference_mode():
            found = self.model.decode(codes_1KF).audio_values
        return found[0, 0].cpu().numpy()


def _hash_weights(folder: Path) -> str:
    """A hash of the config and of blocks all over the weight files: whole files have 400 MB."""
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open(file, "rb") as opened:
            for block in range(HASH_BLOCKS):
                opened.seek(block * size // HASH_BLOCKS)
                digest.update(opened.read(HASH_BYTES))
    return digest.hexdigest()


# ResidualKMeans: a small speech codec, fitted to a few minutes of speech in seconds on a CPU.
#
# A frame is a stretch of log-mel spectrogram. The first codebook holds k-means centres of frames, each further one
# centres of what the books before it leave. It is made for demos and tests, where no neural codec is at hand: speech
# stays intelligible, and Griffin-Lim makes the waveform.

FILE = "residual_kmeans.npz"


class ResidualKMeans(Codec):
    """Codebooks (books, size, values of a frame) of a residual quantizer of log-mels."""

    def __init__(self, codebooks: Tensor, mels: MelSpectrogram, stack: int, mean: Tensor) -> None:
        """A frame is `stack` columns of the spectrogram; `mean` (values of a frame,) is subtracted."""
        self.codebooks = codebooks
        self.mels = mels
        self.stack = stack
        self.mean = mean
        self.sampling_rate = mels.sampling_rate
        self.frame_rate = mels.sampling_rate / (mels.hop * stack)
        self.books = codebooks.shape[0]
        self.codebook_size = codebooks.shape[1]
        digest = hashlib.blake2b(
            codebooks.numpy().tobytes() + mean.numpy().tobytes(), digest_size=16
        )
        self.fingerprint = f"residual_kmeans {mels} {stack} {digest.hexdigest()}"

    @classmethod
    def fit(
        cls,
        waveforms: list[np.ndarray],
        sampling_rate: int,
        *,
        frame_rate: float = 25.0,
        stack: int = 2,
        mels: int = 64,
        books: int = 4,
        size: int = 128,
        iterations: int = 12,
        seed: int = 0,
    ) -> ResidualKMeans:
        """Fit the codebooks to float waveforms of one sampling rate."""
        hop = round(sampling_rate / frame_rate / stack)
        spectrogram = MelSpectrogram(sampling_rate, hop, 2 * hop, mels)
        frames = [_stacked(spectrogram.log_mels(torch.from_numpy(one)), stack) for one in waveforms]
        values = torch.cat(frames)
        if len(values) < size:
            raise UserError(
                f"a codec of {size} entries cannot be fitted to {len(values)} frames of speech: give more of it"
            )
        mean = values.mean(0)
        residual = values - mean
        generator = torch.Generator().manual_seed(seed)
        codebooks = []
        for _ in range(books):
            book = _fit_book(residual, size, iterations, generator)
            codebooks.append(book)
            residual = residual - book[_nearest(residual, book)]
        return cls(torch.stack(codebooks), spectrogram, stack, mean)

    def encode(self, waveform: np.ndarray) -> np.ndarray:
        spectrogram = self.mels.log_mels(torch.from_numpy(np.asarray(waveform, np.float32)))
        residual = _stacked(spectrogram, self.stack) - self.mean
        codes = []
        for book in self.codebooks:
            nearest = _nearest(residual, book)
            codes.append(nearest)
            residual = residual - book[nearest]
        return torch.stack(codes, dim=1).numpy()

    def log_mels(self, codes: np.ndarray) -> Tensor:
        """(frames * stack, mels): the spectrogram that codes stand for."""
        codes_FK = torch.as_tensor(codes).long()
        frames = self.mean.expand(len(codes_FK), -1)
        for book, codes_F in zip(self.codebooks, codes_FK.T, strict=True):
            frames = frames + book[codes_F]
        return frames.reshape(-1, self.mels.mels)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        return self.mels.waveform(self.log_mels(codes)).numpy()

    def save(self, folder: str | Path) -> None:
        """Write the folder that `data.speech.codec` names."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        sizes = (
            self.mels.sampling_rate,
            self.mels.hop,
            self.mels.window,
            self.mels.mels,
            self.stack,
        )
        with atomic_path(folder / FILE) as temporary, open(temporary, "wb") as out:
            np.savez(out, codebooks=self.codebooks.numpy(), mean=self.mean.numpy(), sizes=sizes)

    @classmethod
    def load(cls, folder: Path) -> ResidualKMeans:
        with np.load(folder / FILE, allow_pickle=False) as saved:
            codebooks, mean = torch.from_numpy(saved["codebooks"]), torch.from_numpy(saved["mean"])
            *sizes, stack = saved["sizes"].tolist()
        return cls(codebooks, MelSpectrogram(*sizes), stack, mean)


def _stacked(log_mels_FM: Tensor, stack: int) -> Tensor:
    """Columns joined `stack` at a time; the last frame is filled with its last column."""
    missing = -len(log_mels_FM) % stack
    if missing:
        log_mels_FM = torch.cat([log_mels_FM, log_mels_FM[-1:].expand(missing, -1)])
    return log_mels_FM.reshape(len(log_mels_FM) // stack, -1)


def _nearest(values: Tensor, book: Tensor) -> Tensor:
    scores = values @ book.T * 2 - book.square().sum(1)
    return scores.argmax(1)


def _fit_book(values: Tensor, size: int, iterations: int, generator: torch.Generator) -> Tensor:
    """k-means by Lloyd's algorithm. A centre that no frame is nearest to starts again at a random frame."""
    book = values[torch.randperm(len(values), generator=generator)[:size]].clone()
    for _ in range(iterations):
        nearest = _nearest(values, book)
        counts = torch.bincount(nearest, minlength=size)
        sums = torch.zeros_like(book).index_add(0, nearest, values)
        book = sums / counts[:, None].clamp(min=1)
        empty = (counts == 0).nonzero()[:, 0]
        if len(empty):
            chosen = torch.randint(len(values), (len(empty),), generator=generator)
            book[empty] = values[chosen]
    return book


# Log-mel spectrograms of a waveform, and back: a waveform from log-mels by Griffin-Lim.
#
# Legend: S samples, F frames, B frequency bins, M mel bands.

FLOOR = 1e-4  # of mel amplitudes, -80 dB below a full-scale sine: silence is one value
MOMENTUM = 0.99  # of the fast Griffin-Lim algorithm


@dataclass(frozen=True)
class MelSpectrogram:
    """The transform for one sampling rate. A frame is centred on its hop, and the waveform is padded to whole hops."""

    sampling_rate: int
    hop: int  # samples
    window: int  # samples
    mels: int

    @cached_property
    def _window(self) -> Tensor:
        return torch.hann_window(self.window)

    @cached_property
    def _filters(self) -> Tensor:
        """Triangles on the mel scale (HTK's formula), from 0 Hz to half of the sampling rate."""
        highest = 2595 * math.log10(1 + self.sampling_rate / 2 / 700)
        points = 700 * (10 ** (torch.linspace(0, highest, self.mels + 2) / 2595) - 1)
        frequencies = torch.linspace(0, self.sampling_rate / 2, self.window // 2 + 1)
        low, centre, high = points[:-2, None], points[1:-1, None], points[2:, None]
        rising = (frequencies - low) / (centre - low)
        falling = (high - frequencies) / (high - centre)
        return torch.minimum(rising, falling).clamp(min=0)

    @cached_property
    def _inverse(self) -> Tensor:
        return torch.linalg.pinv(self._filters)

    def log_mels(self, waveform_S: Tensor) -> Tensor:
        """(frames, mels): the natural logarithm of mel amplitudes, one frame for each hop that has begun."""
        num_frames = -(-len(waveform_S) // self.hop)
        edge = (self.window - self.hop) // 2
        right = num_frames * self.hop - len(waveform_S) + self.window - self.hop - edge
        padded = torch.nn.functional.pad(waveform_S.float(), (edge, right))
        spectrum = torch.stft(
            padded, self.window, self.hop, window=self._window, center=False, return_complex=True
        )
        amplitudes_BF = spectrum.abs() * (2 / self._window.sum())
        return (self._filters @ amplitudes_BF).clamp(min=FLOOR).log().T

    def waveform(self, log_mels_FM: Tensor, iterations: int = 48) -> Tensor:
        """A waveform with these log-mels, about: phases are found by (fast) Griffin-Lim, always the same ones."""
        mels_MF = log_mels_FM.float().exp().T
        # Non-negative least squares, by a few multiplicative updates from the pseudo-inverse's solution.
        amplitudes_BF = (self._inverse @ mels_MF).clamp(min=1e-7)
        wanted = self._filters.T @ mels_MF
        for _ in range(16):
            found = self._filters.T @ (self._filters @ amplitudes_BF)
            amplitudes_BF = amplitudes_BF * wanted / found.clamp(min=1e-10)
        amplitudes_BF = amplitudes_BF * (self._window.sum() / 2)
        generator = torch.Generator().manual_seed(0)
        angles = 2 * math.pi * torch.rand(amplitudes_BF.shape, generator=generator)
        phases = torch.polar(torch.ones_like(angles), angles)
        before = torch.zeros_like(phases)
        for _ in range(iterations):
            found = self._stft(self._istft(amplitudes_BF * phases))
            moved = found - MOMENTUM / (1 + MOMENTUM) * before
            phases = moved / moved.abs().clamp(min=1e-10)
            before = found
        length = log_mels_FM.shape[0] * self.hop
        edge = (self.window - self.hop) // 2
        return self._istft(amplitudes_BF * phases)[edge : edge + length]

    def _stft(self, waveform_S: Tensor) -> Tensor:
        return torch.stft(
            waveform_S,
            self.window,
            self.hop,
            window=self._window,
            center=False,
            return_complex=True,
        )

    def _istft(self, spectrum_BF: Tensor) -> Tensor:
        """The waveform by overlap and add, with the squared windows divided out; torch.istft wants `center`."""
        frames_SF = torch.fft.irfft(spectrum_BF, n=self.window, dim=0) * self._window[:, None]
        num_frames = frames_SF.shape[1]
        length = self.window + self.hop * (num_frames - 1)
        squares_SF = (self._window**2)[:, None].expand(-1, num_frames)
        both = torch.stack([frames_SF, squares_SF])
        summed = torch.nn.functional.fold(both, (1, length), (1, self.window), stride=(1, self.hop))
        waveform, weight = summed[:, 0, 0]
        return waveform / weight.clamp(min=1e-3)
