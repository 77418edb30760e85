"""TRL's side of `recipes.py`: SFTTrainer on the same folder and rows, packed, with Liger's kernels; LoRA by peft."""

from __future__ import annotations

import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

STARTED = time.perf_counter()


def run(model: str, rows: str, out: str, steps: int, lora: int | None, longest: int, global_tokens: int) -> None:
    import pyarrow
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    on_gpu = torch.cuda.is_available()
    attention = "sdpa"
    if on_gpu and find_spec("flash_attn"):
        attention = "flash_attention_2"
    found: dict[str, Any] = {"ends": [], "tokens": [], "losses": [], "memory_gib": None, "attention": attention}

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
                found["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
            found["ends"].append(time.perf_counter() - STARTED)
            found["tokens"].append(int(state.num_input_tokens_seen))
            found["first_step_s"] = found["ends"][0]
            found["losses"] = [one["loss"] for one in state.log_history if "loss" in one]
            Path(out).write_text(json.dumps(found))

    arguments = SFTConfig(
        output_dir=str(Path(out).parent / "trl"),
        max_steps=steps,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        optim="adamw_torch_fused",
        learning_rate=1e-4 if lora else 1e-5,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=5,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_liger_kernel=on_gpu,
        gradient_checkpointing=bool(lora),
        include_num_input_tokens_seen="all",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=max(1, global_tokens // longest),
        packing=True,
        max_length=longest,
        # Weights are float32, as ours; with LoRA the base is frozen in bf16, as ours.
        model_init_kwargs={"dtype": "bfloat16" if lora else "float32", "attn_implementation": attention},
    )
    adapters = None
    if lora:
        from peft import LoraConfig

        adapters = LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear", task_type="CAUSAL_LM")
    lines = [json.loads(line) for line in Path(rows).read_text().splitlines()]
    trainer = SFTTrainer(
        model,
        args=arguments,
        # Its fingerprint is given: that of a table cannot be computed with every version of pyarrow.
        train_dataset=Dataset(InMemoryTable(pyarrow.Table.from_pylist(lines)), fingerprint="rows"),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=adapters,
        callbacks=[Clock()],
    )
    trainer.train()


if __name__ == "__main__":
    run(**json.loads(sys.argv[1]))
