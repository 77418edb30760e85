"""Contrastive training: numbers as digits and as words find each other. Two small towers, no labels."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from mvp_engine.kit import ContrastiveEngine

from .settings import NumbersConfig, Towers

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIGITS = 4  # of a number
LETTERS = 5  # of a word, the shorter ones with blanks
HELD_OUT = 500  # numbers, by chance


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


class NumbersEngine(ContrastiveEngine):
    config_class = NumbersConfig
    config: NumbersConfig

    def prepare_model(self) -> nn.Module:
        return TwoTowers(self.config.towers, self.config.contrastive.loss)

    def prepare_dataloader(self, split: str) -> Any:
        numbers = torch.randperm(10**DIGITS, generator=torch.Generator().manual_seed(0)).tolist()
        numbers = numbers[:HELD_OUT] if split == "eval" else numbers[HELD_OUT:]
        texts = [f"{n:0{DIGITS}d}" for n in numbers]
        digits = torch.tensor([[int(digit) for digit in text] for text in texts])
        letters = torch.tensor([_letters(WORDS[d]) for d in range(10)])[digits].flatten(1)
        return self.sample_loader(TensorDataset(digits, letters), split)

    def embed(self, micro_batch: Any) -> Tensor:
        views: Tensor = self.model(*micro_batch)
        return views

    def scalars(self) -> dict[str, Tensor]:
        model: Any = self.model
        learnt = {"log_scale": model.log_scale}
        return learnt | ({"bias": model.bias} if self.config.contrastive.loss == "siglip" else {})


def _letters(word: str) -> list[int]:
    return [ord(letter) - ord("a") + 1 if letter != " " else 0 for letter in word.ljust(LETTERS)]
