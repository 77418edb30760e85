"""LoRA adapters and quantized base weights (QLoRA)."""
