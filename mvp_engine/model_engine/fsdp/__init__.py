"""The FSDP2 backend: PyTorch modules, replicated, sharded, cut by tokens or by matrices."""
