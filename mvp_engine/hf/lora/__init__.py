"""LoRA adapters and quantized base weights (QLoRA)."""

from __future__ import annotations

# What files outside of this room import, by module. A table, not imports: a start loads the modules that it needs.
DOOR = {
    "lora_export": "adapter_config adapter_tensors export_adapter",
    "lora_import": "load_adapter read_adapter settings_of",
    "lora_layers": "adapted_layers adapters_off add_adapters merge_adapters shard_adapters",
    "lora_settings": "Lora",
    "quantize": "dequantized quantize_layers unquantized_shape",
}
