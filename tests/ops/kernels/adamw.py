"""The AdamW kernel against plain operations gives the same states."""

import contextlib

import torch
from test_optim_low_precision import compare_kernel_and_plain_operations

if not torch.cuda.is_available():
    torch.cuda.device = lambda device: contextlib.nullcontext()
compare_kernel_and_plain_operations("cuda" if torch.cuda.is_available() else "cpu")
