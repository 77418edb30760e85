"""The task: sort `digits` digits, as in `7 3 9 1 = 1 3 7 9`."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

EQUALS = 10  # the token ids 0 to 9 are the digits
VOCAB = 11


class SortingProblems(Dataset[Tensor]):
    """`size` problems as rows of digits, `=`, sorted digits. No problem is in both splits, "train" and "eval"."""

    def __init__(self, split: str, size: int, digits: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(10, (10 * size + 1000, digits), generator=generator)
        # The digits alone decide the split: one problem in eight is for evaluation.
        is_eval = (drawn * torch.arange(1, digits + 1) ** 2).sum(dim=1) % 8 == 0
        problems = drawn[is_eval == (split == "eval")][:size]
        equals = torch.full((len(problems), 1), EQUALS)
        self.rows = torch.cat([problems, equals, problems.sort(dim=1).values], dim=1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> Tensor:
        return self.rows[indices]
