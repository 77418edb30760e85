"""Mixture-of-experts layers: GEMMs, balance, expert parallel, and FP8."""

from __future__ import annotations

# What files outside of this room import, by module. A table, not imports: a start loads the modules that it needs.
DOOR = {
    "expert_balance": "ExpertBalance",
    "fp8_layers": "gather_fp8 quantized_once run_in_bf16 use_fp8",
    "router_replay": "RouterReplay add_routes without_routes",
    "grouped_mm": "fp8_grouped_linear is_supported",
    "moe_layers": (
        "MULTIPLE adapter_name apply_expert_parallel fit_fp8 fp8_layers grouped_experts "
        "modules num_experts use use_fp8"
    ),
}
