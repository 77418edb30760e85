"""Random number generators: seeds derived from names, and the state of all generators of a process."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch


def derived_seed(*parts: object) -> int:
    """A 32-bit seed (numpy's limit) from anything printable; the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "little")


def seed_everything(seed: int, cuda: bool = True) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if cuda and torch.cuda.is_available():
        torch.cuda.manual_seed(seed)


@contextmanager
def keep_rng_state() -> Iterator[None]:
    """torch's DataLoader draws a seed from the global generator when it starts: keep that off the training's stream."""
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


def rng_state() -> dict[str, Any]:
    """All generators of this process, as values that `torch.load(weights_only=True)` reads back."""
    version, keys, gauss = random.getstate()
    _, words, position, has_gauss, cached = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    return {
        "python": [version, list(keys), gauss],
        "numpy": [
            torch.from_numpy(words.astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    words, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", words.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
