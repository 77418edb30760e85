"""Two small towers: one reads a number as digits, the other one as words."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .settings import Towers

DIGITS = 4  # of a number
LETTERS = 5  # of a word, the shorter ones with blanks


class Tower(nn.Module):
    """A symbol at each place, to a normalized embedding."""

    def __init__(self, symbols: int, places: int, settings: Towers) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, 16)
        self.hidden = nn.Linear(16 * places, settings.width)
        self.dropout = nn.Dropout(settings.dropout)
        self.out = nn.Linear(settings.width, settings.embedding)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = F.gelu(self.hidden(self.symbols(ids).flatten(1)))
        return F.normalize(self.out(self.dropout(hidden)), dim=-1)


class TwoTowers(nn.Module):
    def __init__(self, settings: Towers, loss: str) -> None:
        super().__init__()
        self.digits = Tower(10, DIGITS, settings)
        self.words = Tower(27, DIGITS * LETTERS, settings)
        # As SigLIP and CLIP start: similarities times 10, or times 1 / 0.07.
        self.log_scale = nn.Parameter(torch.tensor(10.0 if loss == "siglip" else 14.3).log())
        if loss == "siglip":
            self.bias = nn.Parameter(torch.tensor(-10.0))

    def forward(self, digits: Tensor, letters: Tensor) -> Tensor:
        return torch.stack([self.digits(digits), self.words(letters)], dim=1)
