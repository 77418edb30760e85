"""Axolotl's side of `recipes.py`: its own training of the same folder and rows, packed, with Liger's kernels; LoRA with
Axolotl's kernels."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from axolotl.cli.args import TrainerCliArgs
from axolotl.cli.config import load_cfg
from axolotl.cli.train import do_train
from axolotl.integrations.base import BasePlugin
from axolotl.utils.dict import DictDefault

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.recipes_clock import LINEAR, Clock

LIGER = ["rope", "rms_norm", "glu_activation", "fused_linear_cross_entropy"]


class ClockPlugin(BasePlugin):
    clock: Clock

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        return [self.clock]


def settings(
    model: str, rows: str, out: str, steps: int, lora: int | None, longest: int, global_tokens: int, checkpointing: bool
) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    folder = Path(out).parent / "peer"
    found: dict[str, Any] = {
        "base_model": model,
        "datasets": [{"path": rows, "ds_type": "json", "type": "chat_template", "roles_to_train": ["assistant"]}],
        "dataset_prepared_path": str(folder / "rows"),
        "output_dir": str(folder),
        "sequence_len": longest,
        "sample_packing": True,
        "pad_to_sequence_len": False,  # tokens are counted with padding
        "attn_implementation": "sdpa",  # torch's packed attention, where a GPU has it
        "micro_batch_size": 1,
        "gradient_accumulation_steps": max(1, global_tokens // longest),
        "max_steps": steps,
        "optimizer": "adamw_torch_fused",
        "learning_rate": 1e-4 if lora else 1e-5,
        "lr_scheduler": "constant",
        "max_grad_norm": 1.0,
        "bf16": on_gpu,  # weights too: it has no float32 weights beside bf16 computation
        "gradient_checkpointing": checkpointing,
        "include_tokens_per_second": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "plugins": ["benchmarks.recipes_axolotl.ClockPlugin"],
    }
    if on_gpu:
        found["plugins"].append("axolotl.integrations.liger.LigerPlugin")
        found |= {f"liger_{name}": True for name in LIGER}
    if lora:
        found |= {"adapter": "lora", "lora_r": lora, "lora_alpha": 2 * lora, "lora_target_modules": LINEAR}
        found |= {f"lora_{part}_kernel": on_gpu for part in ("mlp", "qkv", "o")}
    return found


def run(started: float, **how: Any) -> None:
    found = settings(**how)
    ClockPlugin.clock = Clock(how["out"], started, found["attn_implementation"])
    do_train(load_cfg(DictDefault(found)), TrainerCliArgs())


if __name__ == "__main__":
    from benchmarks import recipes_axolotl  # Axolotl imports the plugin from this module, not from `__main__`

    recipes_axolotl.run(**json.loads(sys.argv[1]))
