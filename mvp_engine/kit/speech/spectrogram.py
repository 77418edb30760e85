"""Log-mel spectrograms of a waveform, and back: a waveform from log-mels by Griffin-Lim.

Legend: S samples, F frames, B frequency bins, M mel bands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

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
