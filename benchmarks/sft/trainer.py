"""The other sides: Hugging Face's Trainer on the same weights and sequences, padded, with or without Liger's kernels;
or TRL's, which packs them."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mvp_engine.data.batch import IGNORE
from mvp_engine.distributed import Layout, World
from mvp_engine.kit import Lora, MLLMModelKit
from mvp_engine.model_engine import LanguageModelEngine, ModelSource, Settings

if __package__:
    from .data import IMAGE, LONGEST, PAD, PER_STEP, VISION, Pixels, Row, rows, shape
    from .trl_side import trl_trainer
else:
    from data import IMAGE, LONGEST, PAD, PER_STEP, VISION, Pixels, Row, rows, shape
    from trl_side import trl_trainer


def own_model(name: str, device: torch.device, seed: int, lora: Lora | None = None, experts: str | None = None) -> Any:
    """transformers' model with the weights that our engine draws, and nothing else of ours; with `lora`, peft's.

    `experts` is transformers' `experts_implementation`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    settings = shape(name)
    world = World(0, 1, 0, 1, device)
    built = MLLMModelKit(lora).adapt(LanguageModelEngine.build_model(ModelSource(None, settings)))
    ours = LanguageModelEngine(built, Layout(world), Settings(seed=seed))
    ours.initialize()
    weights = ours.model.hf.state_dict()
    adapters = {name: weights.pop(name) for name in list(weights) if ".lora_" in name}
    how = {"attn_implementation": "sdpa", "experts_implementation": experts, "use_cache": False}
    config = AutoConfig.for_model(**settings, **how)
    auto: Any = AutoModelForImageTextToText if name in VISION else AutoModelForCausalLM
    with device:
        model = auto.from_config(config)
    model.load_state_dict(weights)
    return model if lora is None else adapted(model, lora, adapters)


def adapted(model: Any, lora: Lora, adapters: dict[str, torch.Tensor]) -> Any:
    """peft's model on all linear layers but the head, starting from these adapters."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    how = LoraConfig(r=lora.rank, lora_alpha=lora.resolved_alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    found = get_peft_model(model, how)
    theirs = {name for name, param in found.named_parameters() if param.requires_grad}
    given = {f"base_model.model.{name}": weight for name, weight in adapters.items()}
    if theirs != {name.replace(".weight", ".default.weight") for name in given}:
        raise RuntimeError(f"peft trains {len(theirs)} tensors, our engine {len(given)} others")
    set_peft_model_state_dict(found, given)
    return found


def padded(chosen: list[Row], pixels: Pixels) -> dict[str, torch.Tensor]:
    longest = max(len(row.ids) for row in chosen)
    ids = torch.full((len(chosen), longest), PAD)
    labels, mask = torch.full_like(ids, IGNORE), torch.zeros_like(ids)
    for i, row in enumerate(chosen):
        size = len(row.ids)
        ids[i, :size], mask[i, :size] = row.ids, 1
        labels[i, :size] = torch.where(row.learnt, row.ids, IGNORE)
    made = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    grids = [grid for row in chosen for grid in row.grids]
    if grids:
        made["pixel_values"], made["image_grid_thw"] = pixels.of(grids)
        made["mm_token_type_ids"] = (ids == IMAGE).long()
    return made


def run(
    out: Path,
    name: str,
    mix: str,
    steps: int,
    interval: int,
    batch: int,
    liger: bool,
    longest: int = LONGEST,
    checkpointing: bool = False,
    packing: str | None = None,
    lr: float = 1e-4,
    lora: dict[str, Any] | None = None,
    bf16: bool | None = None,
    experts: str | None = None,
) -> None:
    """Writes the losses, one of each interval, and the seconds at the end of each step; with `packing`, TRL's.

    Without `bf16`, the precision is bf16 on a GPU and float32 on a CPU; `lora` are keys of our config's section.
    Written after each step, so that a run that is ended leaves what it had.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize()
            ends.append(time.perf_counter())
            write()

    def write() -> None:
        losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
        memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
        found = {"losses": losses, "ends": ends, "memory_gib": memory}
        part = out.with_suffix(".part")  # renamed when whole: the process may be killed at any time
        part.write_text(json.dumps(found | ({"sequences": trainer.sequences()} if packing else {})))
        part.replace(out)

    common: dict[str, Any] = {
        "output_dir": str(out.parent / "trainer"),
        "max_steps": steps,
        "bf16": device.type == "cuda" if bf16 is None else bf16,
        "use_cpu": device.type == "cpu",
        "optim": "adamw_torch_fused",
        "learning_rate": lr,
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "logging_steps": interval,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "use_liger_kernel": liger and device.type == "cuda",  # its kernels run nowhere else
        "gradient_checkpointing": checkpointing,
        "remove_unused_columns": False,
    }
    data: Any = rows(mix, steps, longest)
    model = own_model(name, device, seed=0, lora=None if lora is None else Lora(**lora), experts=experts)
    trainer: Any
    if packing:
        trainer = trl_trainer(model, common, data, packing, longest, batch, steps)
    else:
        size = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": PER_STEP[mix] // batch}
        collator = partial(padded, pixels=Pixels())
        trainer = Trainer(model, TrainingArguments(**common, **size), data_collator=collator, train_dataset=data)
    trainer.add_callback(Clock())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    write()  # with the loss of the last step


if __name__ == "__main__":
    import sys

    given = json.loads(sys.argv[1])
    run(**{**given, "out": Path(given["out"])})
