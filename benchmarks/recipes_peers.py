"""Peers of `recipes.py`: the trainers that it compares with, in an environment that may be another than ours."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.watch import watch

TRAINER = ("trl", "datasets", "pyarrow")
LIGER = (*TRAINER, "liger-kernel", "peft")
VERSIONS = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Peer:
    packages: tuple[str, ...]
    arguments: dict[str, Any] = field(default_factory=dict)  # of the script
    lora_only: bool = False
    script: str = "recipes_sft_trainer.py"


# Activation checkpointing is the default with LoRA; without it there is memory enough for their packs.
NOT_CHECKPOINTED = {"checkpointing": False}
PEERS = {
    "TRL + Liger": Peer(LIGER),
    "TRL + Liger, not checkpointed": Peer(LIGER, NOT_CHECKPOINTED, lora_only=True),
    "Unsloth": Peer((*TRAINER, "unsloth"), {"unsloth": True}),
    "Unsloth, not checkpointed": Peer((*TRAINER, "unsloth"), {"unsloth": True, **NOT_CHECKPOINTED}, lora_only=True),
    "Axolotl": Peer((*LIGER, "axolotl"), script="recipes_axolotl.py"),
    "Axolotl, not checkpointed": Peer(
        (*LIGER, "axolotl"), NOT_CHECKPOINTED, lora_only=True, script="recipes_axolotl.py"
    ),
}


def versions(python: str, packages: tuple[str, ...]) -> dict[str, str | None]:
    found = subprocess.run([python, "-c", VERSIONS, *packages], capture_output=True, text=True, check=True)
    kept: dict[str, str | None] = json.loads(found.stdout)
    return kept


def train_peer(
    peer: Peer, how: dict[str, Any], python: str, env: dict[str, str], limit: float, scratch: Path
) -> dict[str, Any]:
    """`how`: the arguments of the script but for the peer's own."""
    needed = versions(python, ("torch", "transformers", *peer.packages))
    if missing := [name for name, one in needed.items() if one is None]:
        return {"why": f"not installed: {', '.join(missing)}"}
    out = scratch / "peer.json"
    how = how | {"out": str(out), "started": time.monotonic(), "checkpointing": bool(how["lora"])} | peer.arguments
    env = env | {"UNSLOTH_COMPILE_LOCATION": str(scratch / "unsloth"), "UNSLOTH_DISABLE_STATISTICS": "1"}
    env["AXOLOTL_DO_NOT_TRACK"] = "1"
    script = str(Path(__file__).parent / peer.script)
    seen = watch([python, script, json.dumps(how)], scratch, limit, env=env)
    found = json.loads(out.read_text()) if out.is_file() else {"ends": [], "tokens": []}
    ends, tokens = found["ends"], found["tokens"]
    half = len(ends) // 2
    if half < 1 or seen.code not in (0, None):
        why = f"{len(ends)} steps within the limit" if seen.code is None else f"ended with {seen.code}"
        return {"why": why, "output": seen.output, "versions": needed}
    seconds = ends[-1] - ends[half - 1]
    kept = {name: found[name] for name in ("memory_gib", "losses", "attention", "first_step_s")}
    return {
        "steps": len(ends),
        "step_s": seconds / (len(ends) - half),
        "tokens_per_s": (tokens[-1] - tokens[half - 1]) / seconds,
        **kept,
        "versions": needed,
    }
