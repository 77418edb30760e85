"""A small diffusion transformer (DiT): patches of an image, conditioned on time and class by adaptive layer norms."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .settings import DiT

SIDE = 8  # of an image, in pixels
PATCH = 2  # of a patch
CLASSES = 10
NO_CLASS = CLASSES  # the condition of draws that learn without one


class Block(nn.Module):
    """Attention and MLP; shift, scale and gate of both come from the condition and start at zero (adaLN-zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.condition = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.condition.weight)
        nn.init.zeros_(self.condition.bias)

    def forward(self, x_BTD: Tensor, condition_BD: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.condition(condition_BD)[:, None].chunk(6, dim=-1)
        x_BTD = x_BTD + gate * self.attention(self.norm(x_BTD) * (1 + scale) + shift)
        return x_BTD + gate2 * self.mlp(self.norm(x_BTD) * (1 + scale2) + shift2)

    def attention(self, x_BTD: Tensor) -> Tensor:
        qkv = self.qkv(x_BTD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2))


class DigitsDiT(nn.Module):
    """The velocity of noisy images (B, 64) at times (B,), given their classes (B,)."""

    def __init__(self, sizes: DiT) -> None:
        super().__init__()
        width = sizes.width
        self.patch_in = nn.Linear(PATCH**2, width)
        self.places = nn.Parameter(torch.randn((SIDE // PATCH) ** 2, width) * 0.02)
        self.times = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(CLASSES + 1, width)
        self.blocks = nn.ModuleList(Block(width, sizes.heads) for _ in range(sizes.depth))
        self.norm = nn.LayerNorm(width)
        self.patch_out = nn.Linear(width, PATCH**2)
        nn.init.zeros_(self.patch_out.weight)
        nn.init.zeros_(self.patch_out.bias)

    def forward(self, x_BP: Tensor, times_B: Tensor, classes_B: Tensor) -> Tensor:
        half = self.places.shape[1] // 2
        rates = torch.exp(-math.log(1000) * torch.arange(half, device=x_BP.device) / half)
        angles = times_B[:, None] * 100 * rates
        condition = F.silu(self.times(torch.cat([angles.sin(), angles.cos()], -1)) + self.classes(classes_B))
        x = self.patch_in(_patches(x_BP)) + self.places
        for block in self.blocks:
            x = block(x, condition)
        return _pixels(self.patch_out(self.norm(x)))


def _patches(x_BP: Tensor) -> Tensor:
    """(B, 64) -> (B, 16 patches, 4 pixels)."""
    n = SIDE // PATCH
    return x_BP.view(-1, n, PATCH, n, PATCH).transpose(2, 3).reshape(-1, n * n, PATCH**2)


def _pixels(x_BTP: Tensor) -> Tensor:
    n = SIDE // PATCH
    return x_BTP.view(-1, n, n, PATCH, PATCH).transpose(2, 3).reshape(-1, SIDE**2)
