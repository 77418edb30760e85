"""`mvp estimate`: predicted memory and time of a config on GPUs that need not be present."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from mvp_engine.config import compose
from mvp_engine.data import accumulation_steps
from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.hf.adapter import cast_frozen_base
from mvp_engine.hf.packed_model import PackedModel
from mvp_engine.kit import MLLMDataKit, MLLMModelKit
from mvp_engine.log.format import duration, rate
from mvp_engine.model_engine.base import DTYPES
from mvp_engine.model_engine.fsdp.parallelize import freeze
from mvp_engine.tools.data_kit import config_data_kit
from mvp_engine.tools.estimate_settings import EstimateSettings, gpu_by_name
from mvp_engine.tools.estimate_step import estimate_step

SAMPLED_PACKS = 8  # micro-batches that are loaded for the time of a step


def print_estimate(
    config_file: str, overrides: list[str], gpu: str, gpus: int, *, as_json: bool
) -> None:
    facts = estimate_config(config_file, overrides, gpu, gpus)
    print(json.dumps(facts, indent=2) if as_json else page(facts))


def estimate_config(config_file: str, overrides: list[str], gpu: str, gpus: int) -> dict[str, Any]:
    """The estimate of one step (`estimate_step`) and of the whole training run."""
    composed = compose(config_file, overrides)
    config: Any = composed.config
    if config.model.type == "module":
        raise UserError(
            "mvp estimate supports Hugging Face models: model.type=language_model or value_model"
        )
    _check_gpus(gpus, config.parallel)
    loop = config.loop
    if loop.total_steps is None and loop.epochs is None:
        raise UserError(
            "the length of the training is unknown: set loop.total_steps or loop.epochs"
        )
    gpu_by_name(gpu)  # an unknown GPU is an error before the data is read
    settings = _settings(config, gpu)
    model = _build_model(config, settings)
    kit = config_data_kit(composed.engine_class, config)
    ranks = gpus // settings.text_ranks  # data parallel ranks
    batch_size = kit.settings.global_batch_packs(config.data.global_batch_size)
    packs = batch_size or config.data.micro_batch_size * ranks
    dataset = _dataset(kit, packs)
    sampled = _sampled_packs(dataset)
    micro_batches = accumulation_steps(packs, 1, ranks)
    step = [sampled[i % len(sampled)] for i in range(micro_batches)]
    found = estimate_step(model, _largest_packs(dataset), step, settings)
    limits = [loop.total_steps, loop.epochs and loop.epochs * dataset.plan.steps]
    total = min(steps for steps in limits if steps)
    tokens = found["tokens_per_step"] * packs // micro_batches
    return {
        "config": config_file,
        "gpus": gpus,
        **found,
        "tokens_per_step": tokens,
        "tokens_per_s": tokens / found["step_s"],
        "steps": total,
        "eta_s": total * found["step_s"],
    }


def _check_gpus(gpus: int, parallel: Any) -> None:
    replica = parallel.shard * parallel.ulysses * parallel.tensor
    if parallel.replicate == -1:
        fits = gpus % replica == 0
        needed = f"a multiple of {replica}"
    else:
        fits = gpus == parallel.replicate * replica
        needed = f"{parallel.replicate * replica}"
    if not fits:
        raise UserError(
            f"--gpus {gpus}: the parallel layout of the config needs {needed}. parallel.replicate=-1 fits any number "
            "of replicas"
        )


def _settings(config: Any, gpu: str) -> EstimateSettings:
    precision = config.loop.precision
    return EstimateSettings.from_config(
        config,
        "bf16" if precision == "auto" else precision,
        gpu=gpu,
        state_dtype=getattr(config.optim, "state_dtype", "float32"),
        ema=getattr(config.optim, "ema", None) is not None,
        shard=config.parallel.shard,
        ulysses=config.parallel.ulysses,
        tensor=config.parallel.tensor,
    )


def _build_model(config: Any, settings: EstimateSettings) -> PackedModel:
    model: Any = MLLMModelKit(getattr(config, "lora", None)).build(config.model)
    assert isinstance(model, PackedModel)
    freeze(model, config.model.freeze)
    if settings.half_precision:
        cast_frozen_base(model, DTYPES[settings.precision])
    return model


def _dataset(kit: MLLMDataKit, packs: int) -> Any:
    if kit.is_stream("train"):
        raise UserError(
            "mvp estimate needs a packing plan, and streams have none: name one of their files as a source"
        )
    # The loader also raises for data and batch sizes that cannot be trained on.
    return kit.loader("train", global_batch_size=packs).dataset


def _largest_packs(dataset: Any) -> list[PackedBatch]:
    """The pack with most tokens and the one with most encoder work: the peak is in one of them."""
    encoder_costs = np.concatenate([cost.encoder for cost in dataset.costs])
    tokens = list[int]()
    encoder_work = list[int]()
    for index in range(len(dataset.plan)):
        rows, lengths = dataset.plan.pack(index)
        tokens.append(int(lengths.sum()))
        row_numbers = dataset.first[rows[:, 0]] + rows[:, 1]
        encoder_work.append(int(encoder_costs[row_numbers].sum()))
    chosen = {int(np.argmax(tokens)), int(np.argmax(encoder_work))}
    return [dataset[index][0] for index in sorted(chosen)]


def _sampled_packs(dataset: Any) -> list[PackedBatch]:
    """Packs that are spread evenly over the epoch."""
    count = min(SAMPLED_PACKS, len(dataset))
    places = np.linspace(0, len(dataset) - 1, count).astype(int).tolist()
    return [dataset[index][0] for index in places]


def page(facts: dict[str, Any]) -> str:
    """The estimate as text."""
    lines = [f"{facts['config']} on {facts['gpus']} x {facts['gpu']}, estimated", ""]
    for name, size in facts["memory_gib"].items():
        lines.append(f"  {name:<22}{size:8.2f} GiB")
    verdict = "fits"
    if not facts["fits"]:
        verdict = (
            "does NOT fit: lower mllm.micro_batch_tokens, set model.activation_checkpointing or "
            "optim.state_dtype, or raise parallel.shard"
        )
    peak = f"{facts['peak_gib']:8.2f} GiB of {facts['room_gib']:.0f} GiB: {verdict}"
    lines += [f"  {'peak memory per GPU':<22}{peak}", ""]
    for name, seconds in facts["seconds"].items():
        lines.append(f"  {name:<22}{1e3 * seconds:8.1f} ms")
    throughput = f"{rate(facts['tokens_per_s'])} tokens/s, MFU {facts['mfu']:.1%}"
    step = f"{1e3 * facts['step_s']:8.1f} ms, {facts['tokens_per_step']:,} tokens: {throughput}"
    lines += [
        f"  {'step':<22}{step}",
        f"  {'training':<22}{facts['steps']:8,} steps, about {duration(facts['eta_s'])}",
        "",
        "Communication between GPUs and waiting for data or host are not included. Accuracy: docs/performance.md",
    ]
    return "\n".join(lines)
