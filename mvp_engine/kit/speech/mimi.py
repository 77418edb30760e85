"""Mimi, the codec of Qwen3-Omni: its codes are Mimi's first 16 codebooks, at 12.5 frames per second of 24 kHz."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mvp_engine.kit.speech.codec import Codec

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
