"""A small decoder-only transformer: pre-norm blocks, learned positions, causal attention.

Shapes: B samples, T tokens, D width, H heads, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in self.qkv(self.norm1(x_BTD)).chunk(3, -1))
        mixed_BHTd = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(mixed_BHTd.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD))))


class MagicTransformer(nn.Module):
    def __init__(self, vocab: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.token(tokens_BT) + self.position(positions_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))  # logits_BTV

    @torch.no_grad()
    def complete(self, prompt_BT: Tensor, new_tokens: int) -> Tensor:
        """Greedy decoding: the `new_tokens` most likely tokens after the prompt."""
        tokens_BT = prompt_BT
        for _ in range(new_tokens):
            tokens_BT = torch.cat([tokens_BT, self(tokens_BT)[:, -1:].argmax(-1)], dim=1)
        return tokens_BT[:, prompt_BT.shape[1] :]
