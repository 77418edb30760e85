"""The peers' side of `recipes.py`: TRL's SFTTrainer on the same folder and rows, packed, with Liger's kernels or with
Unsloth's; LoRA by peft or by Unsloth."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))


def run(
    model: str,
    rows: str,
    out: str,
    started: float,
    steps: int,
    lora: int | None,
    longest: int,
    global_tokens: int,
    unsloth: bool = False,
    checkpointing: bool = False,
) -> None:
    if unsloth:  # imported first, since it patches the others
        from unsloth import FastLanguageModel
    import torch

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # TRL's loss is a Triton kernel
    import pyarrow
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from benchmarks.recipes_clock import LINEAR, Clock

    attention = "sdpa"
    if on_gpu and find_spec("flash_attn"):
        attention = "flash_attention_2"
    # Weights are float32, as ours; with LoRA the base is frozen in bf16, as ours.
    init: dict[str, Any] = {"dtype": "bfloat16" if lora else "float32", "attn_implementation": attention}
    arguments = SFTConfig(
        output_dir=str(Path(out).parent / "peer"),
        max_steps=steps,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        optim="adamw_torch_fused",
        learning_rate=1e-4 if lora else 1e-5,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_liger_kernel=on_gpu and not unsloth,
        gradient_checkpointing=checkpointing,
        include_num_input_tokens_seen="all",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=max(1, global_tokens // longest),
        packing=True,
        max_length=longest,
        model_init_kwargs=None if unsloth else init,
    )
    trained: Any = model
    adapters = None
    if unsloth:
        trained, _ = FastLanguageModel.from_pretrained(
            model,
            max_seq_length=longest,
            dtype=torch.bfloat16,
            load_in_4bit=False,
            full_finetuning=not lora,
            float32_mixed_precision=not lora,
            use_gradient_checkpointing="unsloth" if checkpointing else False,
        )
    if lora and unsloth:
        trained = FastLanguageModel.get_peft_model(
            trained,
            r=lora,
            lora_alpha=2 * lora,
            lora_dropout=0,
            target_modules=LINEAR,
            use_gradient_checkpointing="unsloth" if checkpointing else False,
            max_seq_length=longest,
        )
    elif lora:
        from peft import LoraConfig

        adapters = LoraConfig(r=lora, lora_alpha=2 * lora, target_modules=LINEAR, task_type="CAUSAL_LM")
    lines = [json.loads(line) for line in Path(rows).read_text().splitlines()]
    trainer = SFTTrainer(
        trained,
        args=arguments,
        # Its fingerprint is given: that of a table cannot be computed with every version of pyarrow.
        train_dataset=Dataset(InMemoryTable(pyarrow.Table.from_pylist(lines)), fingerprint="rows"),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=adapters,
        callbacks=[Clock(out, started, "chosen by Unsloth" if unsloth else attention)],
    )
    trainer.train()


if __name__ == "__main__":
    run(**json.loads(sys.argv[1]))
