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
from mvp_engine.model_engine import LanguageModelEngine, ModelSource, Settings

if __package__:
    from .data import IMAGE, LONGEST, PAD, PER_STEP, VISION, Pixels, Row, rows, shape
    from .trl_side import trl_trainer
else:
    from data import IMAGE, LONGEST, PAD, PER_STEP, VISION, Pixels, Row, rows, shape
    from trl_side import trl_trainer


def own_model(name: str, device: torch.device, seed: int) -> Any:
    """transformers' model with the weights that our engine draws, and nothing else of ours."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    settings = shape(name)
    world = World(0, 1, 0, 1, device)
    ours = LanguageModelEngine(
        LanguageModelEngine.build_model(ModelSource(None, settings)), Layout(world), Settings(seed=seed)
    )
    ours.initialize()
    config = AutoConfig.for_model(**settings, attn_implementation="sdpa", use_cache=False)
    auto: Any = AutoModelForImageTextToText if name in VISION else AutoModelForCausalLM
    with device:
        model = auto.from_config(config)
    model.load_state_dict(ours.model.hf.state_dict())
    return model


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
) -> None:
    """Writes the losses, one of each interval, and the seconds at the end of each step; with `packing`, TRL's.

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
        out.write_text(json.dumps(found | ({"sequences": trainer.sequences()} if packing else {})))

    common: dict[str, Any] = {
        "output_dir": str(out.parent / "trainer"),
        "max_steps": steps,
        "bf16": device.type == "cuda",
        "use_cpu": device.type == "cpu",
        "optim": "adamw_torch_fused",
        "learning_rate": 1e-4,
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
    model = own_model(name, device, seed=0)
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

    run(**json.loads(sys.argv[1], object_hook=lambda made: {**made, "out": Path(made["out"])}))
