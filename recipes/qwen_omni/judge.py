"""A judge of speech that never saw the model: connected-word recognition by dynamic time warping.

Its templates are eSpeak's renderings of the single words. A dynamic program over the frames of a sound finds the
sequence of whole words, each warped in time, with the smallest distance. So it hears any words in any number: nothing
says which sentence was meant.

Legend: F frames of the sound, L frames of a template.
"""

import math
from typing import NamedTuple

import numpy as np
import torch

from mvp_engine.kit.speech.codec import MelSpectrogram
from mvp_engine.kit.speech.demo import Speaker

from .data import VOICES, WORDS, say

FRAMES_PER_SECOND = 50
MELS = 40
CEPSTRA = 13
RANGE = 7.0  # of log-mels: what is quieter than the loudest by more is silence


class _Path(NamedTuple):
    """The best warpings that end in each frame of a template: their costs, and the frame where the word began."""

    costs: np.ndarray
    starts: np.ndarray


class Judge:
    """Hears the words of WORDS in a speaker's voice."""

    def __init__(self) -> None:
        speaker = Speaker()
        self.rate = speaker.rate
        self._templates: dict[str, list[np.ndarray]] = {}
        for voice in VOICES:
            self._templates[voice] = [self._features(say(speaker, word, voice)) for word in WORDS.split()]

    def words(self, waveform: np.ndarray, voice: str) -> list[str]:
        """The words that a sound at `rate` is nearest to."""
        if len(waveform) < self.rate // 10:
            return []
        sound = self._features(waveform)
        templates = self._templates[voice]
        distances = [np.linalg.norm(sound[:, None] - template, axis=-1) for template in templates]
        paths = [_Path(np.full(len(one), math.inf), np.full(len(one), -1)) for one in templates]
        # After each frame: the cost of the best words so far, the last of them, and where it began.
        costs = [0.0]
        last = [(-1, -1)]
        for frame in range(len(sound)):
            paths = [
                _step(path, distance[frame], costs[-1], frame) for path, distance in zip(paths, distances, strict=True)
            ]
            ends = [float(path.costs[-1]) for path in paths]
            best = int(np.argmin(ends))
            costs.append(ends[best])
            last.append((best, int(paths[best].starts[-1])))
        heard = []
        frame = len(sound)
        while frame > 0 and math.isfinite(costs[frame]):
            word, frame = last[frame]
            heard.append(WORDS.split()[word])
        return heard[::-1]

    def _features(self, waveform: np.ndarray) -> np.ndarray:
        """Cepstra of log-mels, and their slopes."""
        hop = self.rate // FRAMES_PER_SECOND
        spectrogram = MelSpectrogram(self.rate, hop, 2 * hop, MELS)
        mels = spectrogram.log_mels(torch.from_numpy(np.asarray(waveform, np.float32))).numpy()
        mels = np.maximum(mels, mels.max() - RANGE)
        angles = np.outer(np.arange(CEPSTRA), np.arange(MELS) + 0.5) * math.pi / MELS
        cepstra = mels @ np.cos(angles).T * math.sqrt(2 / MELS)
        cepstra[:, 0] *= 0.5  # loudness, which differs more within a word than between words
        slopes = np.zeros_like(cepstra)
        slopes[1:-1] = (cepstra[2:] - cepstra[:-2]) / 2
        return np.concatenate([cepstra, 2 * slopes], axis=1)


def _step(path: _Path, distance_L: np.ndarray, before: float, frame: int) -> _Path:
    """One more frame of the sound: a warping stays, moves on by a frame, or skips one; or the word begins here."""
    cost, start = path
    moved = np.concatenate([[before], cost[:-1]])
    moved_start = np.concatenate([[frame], start[:-1]])
    skipped = np.concatenate([[math.inf], [math.inf], cost[:-2]])[: len(cost)]
    skipped_start = np.concatenate([[-1], [-1], start[:-2]])[: len(cost)]
    choices = np.stack([moved, cost, skipped])
    chosen = choices.argmin(axis=0)
    starts = np.stack([moved_start, start, skipped_start])
    places = np.arange(len(cost))
    return _Path(choices[chosen, places] + distance_L, starts[chosen, places])
