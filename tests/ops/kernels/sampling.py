"""The sampling kernel draws the tokens of plain PyTorch."""

import torch

from mvp_engine.kit import decoding
from mvp_engine.ops import triton_kernels

device = "cuda" if torch.cuda.is_available() else "cpu"
keys = torch.tensor(decoding.sequence_keys(3, list(range(40)), 1))
logits = torch.randn(40, 9001, generator=torch.Generator().manual_seed(0))
logits[:, 5] = float("-inf")
logits[3, :] = float("-inf")
logits[3, 9000] = 0.0
of_position = decoding._keys_of_position(keys, 7)
found = triton_kernels.sample_tokens(logits.to(device), of_position.to(device))
assert found.cpu().tolist() == decoding.sample_tokens(logits, keys, 7).tolist()
assert found[3] == 9000
