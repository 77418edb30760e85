"""`mvp estimate`: what a config will need of a GPU that need not be there."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from mvp_engine.config import compose
from mvp_engine.data import accumulation_steps
from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.hf.packed_model import PackedModel
from mvp_engine.kit import MLLMDataKit, MLLMModelKit
from mvp_engine.log.format import duration, rate
from mvp_engine.model_engine.fsdp.parallelize import cast_frozen_base, freeze
from mvp_engine.tools.data_kit import config_data_kit
from mvp_engine.tools.estimate_memory import Setting, estimate

SAMPLE = 8  # micro-batches that are loaded for the time of a step


def facts(config_file: str, overrides: list[str], gpu: str, gpus: int) -> dict[str, Any]:
    """The estimate of `mvp_engine.tools.estimate_memory`, and the whole training's time."""
    composed = compose(config_file, overrides)
    config: Any = composed.config
    if config.model.type == "module":
        raise UserError(
            "mvp estimate knows Hugging Face models: model.type=language_model or value_model"
        )
    parallel = config.parallel
    share = parallel.shard * parallel.ulysses * parallel.tensor
    if gpus % share or parallel.replicate not in (-1, gpus // share):
        needed = (
            f"a multiple of {share}"
            if parallel.replicate == -1
            else f"{parallel.replicate * share}"
        )
        raise UserError(
            f"--gpus {gpus}: the layout of the config needs {needed}. parallel.replicate=-1 takes any"
        )
    loop, optim = config.loop, config.optim
    if loop.total_steps is None and loop.epochs is None:
        raise UserError("how long to train? Set loop.total_steps or loop.epochs")
    setting = Setting(
        gpu=gpu,
        half=loop.precision != "fp32",
        compile=config.model.compile,
        activation_checkpointing=config.model.activation_checkpointing,
        fp8=config.model.fp8,
        state_dtype=getattr(optim, "state_dtype", "float32"),
        ema=getattr(optim, "ema", None) is not None,
        shard=parallel.shard,
        ulysses=parallel.ulysses,
        tensor=parallel.tensor,
    )
    setting.card()  # an unknown one is an error before the data are looked at
    model: Any = MLLMModelKit(getattr(config, "lora", None)).build(config.model)
    assert isinstance(model, PackedModel)
    freeze(model, config.model.freeze)
    if setting.half:
        cast_frozen_base(model, torch.float16 if loop.precision == "fp16" else torch.bfloat16)
    kit = config_data_kit(composed.engine_class, config)
    ranks = gpus // (parallel.ulysses * parallel.tensor)
    data = config.data
    packs = kit.settings.global_batch_packs(data.global_batch_size) or data.micro_batch_size * ranks
    largest, some, steps = _batches(kit, packs)
    each = accumulation_steps(packs, 1, ranks)
    step = [some[i % len(some)] for i in range(each)]
    found = estimate(model, largest, step, setting)
    total = min(n for n in (loop.total_steps, loop.epochs and loop.epochs * steps) if n)
    tokens = found["tokens_per_step"] * ranks
    return {
        "config": config_file,
        "gpus": gpus,
        **found,
        "tokens_per_step": tokens,
        "tokens_per_s": tokens / found["step_s"],
        "steps": total,
        "eta_s": total * found["step_s"],
    }


def _batches(kit: MLLMDataKit, packs: int) -> tuple[list[PackedBatch], list[PackedBatch], int]:
    """The packs with most tokens and with most work for encoders, some from all over the epoch, and its steps."""
    if kit.is_stream("train"):
        raise UserError(
            "mvp estimate goes by the plan of the data, and streams have none: name a file of them"
        )
    data = kit.loader(
        "train", global_batch_size=packs
    ).dataset  # which refuses what cannot be trained on
    encoder = np.concatenate([cost.encoder for cost in data.costs])
    tokens, work = [], []
    for index in range(len(data.plan)):
        rows, length = data.plan.pack(index)
        tokens.append(int(length.sum()))
        work.append(int(encoder[data.first[rows[:, 0]] + rows[:, 1]].sum()))
    spread = np.linspace(0, len(data) - 1, min(SAMPLE, len(data))).astype(int).tolist()
    chosen = {int(np.argmax(tokens)), int(np.argmax(work))}
    return [data[i][0] for i in sorted(chosen)], [data[i][0] for i in spread], data.plan.steps


def page(told: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{told['config']} on {told['gpus']} x {told['gpu']}, estimated", ""]
    lines += [f"  {name:<18}{size:8.2f} GiB" for name, size in told["memory_gib"].items()]
    verdict = (
        "fits"
        if told["fits"]
        else "does NOT fit: fewer micro_batch_tokens, model.activation_checkpointing, optim.state_dtype or shards"
    )
    lines += [
        f"  {'peak, on each':<18}{told['peak_gib']:8.2f} GiB of {told['room_gib']:.0f}: {verdict}",
        "",
    ]
    lines += [f"  {name:<18}{1e3 * seconds:8.1f} ms" for name, seconds in told["seconds"].items()]
    lines += [
        f"  {'step':<18}{1e3 * told['step_s']:8.1f} ms, {told['tokens_per_step']:,} tokens: "
        f"{rate(told['tokens_per_s'])} tokens/s, mfu {told['mfu']:.1%}",
        f"  {'training':<18}{told['steps']:8,} steps, about {duration(told['eta_s'])}",
        "",
        "Without communication between GPUs, and if loaders and host keep up. How near this is: docs/performance.md",
    ]
    return "\n".join(lines)


def print_estimate(
    config_file: str, overrides: list[str], gpu: str, gpus: int, *, as_json: bool
) -> None:
    found = facts(config_file, overrides, gpu, gpus)
    print(json.dumps(found, indent=2) if as_json else page(found))
