"""ResidualKMeans: a small speech codec, fitted to a few minutes of speech in seconds on a CPU.

A frame is a stretch of log-mel spectrogram. The first codebook holds k-means centres of frames, each further one
centres of what the books before it leave. It is made for demos and tests, where no neural codec is at hand: speech
stays intelligible, and Griffin-Lim makes the waveform.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mvp_engine.errors import UserError
from mvp_engine.files import atomic_path
from mvp_engine.kit.speech.codec import Codec
from mvp_engine.kit.speech.spectrogram import MelSpectrogram

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
        """Write the folder that `mllm.speech.codec` names."""
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
