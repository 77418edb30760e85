"""Triton kernels in a process of their own: without a GPU Triton interprets them, which is set before its import."""

import os
import subprocess
import sys

import torch


def run_kernels(code: str) -> None:
    environment = {**os.environ, **({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
