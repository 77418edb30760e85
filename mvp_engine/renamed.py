"""Old names and the names that replaced them: config keys, modules, attributes.

An old name is an error that gives the new one. Nothing is accepted under two names.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from typing import Any

CONFIG_KEYS = {
    "model.recompute": "model.activation_checkpointing",
    "optim.rates": "optim.lr_by_part",
    "optim.moments": "optim.state_dtype",
    "parallel.sequence": "parallel.ulysses",
    "ask": "eval_generation",
    "ask.every": "eval_generation.every_n_samples",
    "eval_generation.every": "eval_generation.every_n_samples",
    "mllm.packs_per_step": "data.global_batch_size",
}

REMOVED_KEYS = {
    "lora.dora": "DoRA is no longer supported: delete the key to train with plain LoRA",
    "model.cast_weights_once": "It changed no results and made no step faster: delete the key",
    "checkpoint.background": "Checkpoints are always written in the background: delete the key",
}
REMOVED_DEFAULTS = {"checkpoint.background": True}  # of other removed keys: false

# Modules below mvp_engine.
MODULES = {
    "log.report": "report.page",
    "log.plot": "report.plot",
    "kit.report": "report.page",
    "log.profile": "tools.profile",
    "kit.data.inspect": "tools.inspect",
    "batch": "data.batch",
    "padded": "data.padded",
    "pipes": "process.pipes",
    "signals": "process.signals",
    "tools.estimate_blocks": "kit.estimate.blocks",
    "tools.estimate_memory": "kit.estimate.memory",
    "tools.estimate_packs": "kit.estimate.packs",
    "tools.estimate_settings": "kit.estimate.settings",
    "tools.estimate_step": "kit.estimate.step",
    "check": "tools.check",
    "check.show": "tools.check.show",
    "check.stages": "tools.check.stages",
    "config.recipe": "config.engine_class",
    "estimate": "tools.estimate",
    "profile": "tools.profile",
    "recipes": "tools.recipe",
    "checkpoint.hf": "hf.load",
    "checkpoint.hf_export": "hf.export",
    "checkpoint.pieces": "distributed.dtensor",
    "checkpoint.storage": "checkpoint.format",
    "distributed.reducer": "distributed.ddp",
    "distributed.sequence": "distributed.ulysses",
    "distributed.sharding": "distributed.fsdp",
    "model_engine.encoders": "hf.vision",
    "model_engine.fsdp.ahead": "model_engine.fsdp.prefetch",
    "model_engine.fsdp.build": "model_engine.fsdp.parallelize",
    "model_engine.fsdp.numbers": "model_engine.fsdp.grad_norm",
    "model_engine.fsdp.passes": "model_engine.fsdp.lockstep",
    "model_engine.fsdp.tensor": "hf.tp_plan",
    "model_engine.fsdp.weights": "model_engine.fsdp.init_weights",
    "model_engine.hooks": "hf.input_hooks",
    "model_engine.lora": "hf.lora",
    "model_engine.merge": "hf.merge",
    "model_engine.packed": "hf",
    "model_engine.parts": "hf.parts",
    "model_engine.probe": "hf.preflight",
    "model_engine.source": "hf.config_source",
    "ops.by_sequence": "ops.reference_attention",
    "ops.experts": "hf.experts",
    "ops.flex": "ops.flex_attention",
    "ops.ragged_attention": "ops.cudnn_attention",
    "ops.varlen": "ops.torch_varlen",
    "kit.generate": "kit.generation",
    "kit.made": "kit.build_once",
    "kit.small": "kit.tiny_processors",
    "kit.optim.kernels": "kit.optim.adamw_kernel",
    "kit.optim.moments": "kit.optim.state_tensor",
    "kit.data.rows": "kit.data.read.rows",
    "kit.data.sources": "kit.data.read.sources",
    "kit.data.decode": "kit.data.read.decode",
    "kit.data.template": "kit.data.encode.template",
    "kit.data.media": "kit.data.encode.media",
    "kit.data.limits": "kit.data.read.limits",
    "kit.data.samples": "kit.data.encode.row_encoder",
    "kit.data.packs": "kit.data.pack.packs",
    "kit.data.plan": "kit.data.pack.plan",
    "kit.data.asking": "kit.data.encode.processor_calls",
    "kit.data.bad": "kit.data.read.bad_rows",
    "kit.data.costs": "kit.data.pack.costs",
    "kit.data.marks": "kit.data.encode.template_marks",
    "kit.data.mixture": "kit.data.pack.mixture",
    "kit.data.show": "tools.inspect_page",
    "kit.data.streams": "kit.data.read.streams",
    "kit.data.watch": "kit.data.pack.worker_watchdog",
    "kit.data.windows": "kit.data.pack.stream_loader",
}


def renamed_key(key: str) -> str | None:
    """The new name of a config key that was renamed itself or is in a renamed section, else None."""
    prefix = key
    while prefix:
        if prefix in CONFIG_KEYS:
            return CONFIG_KEYS[prefix] + key.removeprefix(prefix)
        prefix = prefix.rpartition(".")[0]
    return None


def current_keys(values: Mapping[str, object]) -> dict[str, object]:
    """The values of a config of an older version by today's keys, without those of removed keys."""
    kept = [key for key in values if key not in REMOVED_KEYS]
    return {renamed_key(key) or key: values[key] for key in kept}


def drop_removed_defaults(values: Mapping[str, Any]) -> None:
    """Delete removed keys that have their default from the values of a run's config.yaml, which records all keys."""
    for key in REMOVED_KEYS:
        section, _, name = key.rpartition(".")
        found = values.get(section)
        if isinstance(found, dict) and found.get(name) is REMOVED_DEFAULTS.get(key, False):
            del found[name]


def renamed_attributes(attributes: Mapping[str, str]) -> Callable[[object, str], None]:
    """The `__getattr__` of a class: its AttributeError gives the new name of an attribute where there is one."""

    def get(owner: object, name: str) -> None:
        kind = type(owner).__name__
        if name in attributes:
            raise AttributeError(f"{kind}.{name} was renamed to {kind}.{attributes[name]}")
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")

    return get


class _RenamedModules(importlib.abc.MetaPathFinder):
    """The last finder of Python's import system: it is asked only for modules that were not found."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, module = name.partition(".")
        if package == "mvp_engine" and module in MODULES:
            raise ImportError(f"{name} was renamed to mvp_engine.{MODULES[module]}", name=name)
        return None


def install() -> None:
    """Answer imports of renamed modules with the new name."""
    if not any(isinstance(finder, _RenamedModules) for finder in sys.meta_path):
        sys.meta_path.append(_RenamedModules())
