"""Kernels and numeric building blocks: plain PyTorch first, faster kernels behind the same call."""
