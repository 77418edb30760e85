"""What the peers of `recipes.py` write after each step, by a callback of Hugging Face's Trainer."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # with LoRA


class Clock(TrainerCallback):
    def __init__(self, out: str, started: float, attention: str) -> None:
        """`started`: when the process was, by `time.monotonic` of its parent."""
        self.out = Path(out)
        self.started = started
        self.found: dict[str, Any] = {"ends": [], "tokens": [], "memory_gib": None, "attention": attention}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        found = self.found
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            found["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        found["ends"].append(time.monotonic() - self.started)
        found["tokens"].append(int(state.num_input_tokens_seen))
        found["first_step_s"] = found["ends"][0]
        found["losses"] = [one["loss"] for one in state.log_history if "loss" in one]
        part = self.out.with_suffix(".part")  # renamed when whole: the process may be killed at any time
        part.write_text(json.dumps(found))
        part.replace(self.out)
