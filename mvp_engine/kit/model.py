"""MLLMModelKit: a Hugging Face model from a folder or a config, its parts by name, LoRA adapters, and its kernels.

    def prepare_model(self):
        return MLLMModelKit(self.config.lora).build(self.config.model)

Freezing, learning rates, activation checkpointing and compilation by part are config keys of the engine.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mvp_engine.config.schema import Model, Part
from mvp_engine.data import rng_state, set_rng_state
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.errors import UserError
from mvp_engine.files import atomic_symlink
from mvp_engine.hf.lora.lora_export import export_adapter
from mvp_engine.hf.lora.lora_layers import add_adapters
from mvp_engine.hf.lora.lora_settings import Lora
from mvp_engine.hf.model.model_parts import parts_of, table, trained_parts
from mvp_engine.kit.data.measured_sources import repeated
from mvp_engine.kit.generation import check_writes
from mvp_engine.model_engine import ModelEngine, ModelSource, engine_class
from mvp_engine.model_engine.fsdp.compile import use_cache
from mvp_engine.ops import flash_attention


class MLLMModelKit:
    """Builds the model; `lora=None` is full fine-tuning."""

    def __init__(self, lora: Lora | None = None) -> None:
        self.lora = lora

    def build(self, model: Model | ModelSource, model_type: str = "language_model") -> nn.Module:
        """The model that the config names, without weights: the model engine loads or initializes them.

        `model_type` is for a `ModelSource`; a config has its own.
        """
        if isinstance(model, Model):
            if model.type == "module":
                raise UserError(
                    "model.type=module has nothing to build: set model.type=language_model, or value_model, or "
                    "call adapt() on the module of prepare_model()"
                )
            kind = engine_class(model.type, model.backend)
            source = ModelSource(model.path, model.config)
        else:
            kind = engine_class(model_type)
            source = model
        return self.adapt(kind.build_model(source))

    def of_engine(self, engine: Any) -> nn.Module:
        """The model of an MLLMEngine. Its checkpoints and exports get the processor with the limits of the training."""
        config = engine.config
        model: Any = self.build(config.model, config.model.type)
        check_writes(model, "eval.generation" if config.eval.generation else None)
        model.use_side_files(engine.run.dir / "processor")
        if engine.world.is_main:
            engine.data.save_processor(model.side_files, config.model.path)
        return model

    def adapt(self, model: nn.Module) -> nn.Module:
        """Freeze a model and add its adapters, if `lora` is set; any module with linear layers can have them.

        Parameters that match the patterns of an attribute `fresh` of the model, such as a new head, train in full.
        """
        if self.lora is not None:
            add_adapters(model, self.lora)
        return model

    @staticmethod
    def parts(model: nn.Module) -> dict[str, Part]:
        """The part of each parameter, by the parameter's name."""
        return parts_of(model)

    @staticmethod
    def table(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
        """A table of what trains, by part, as the engine logs it at the start."""
        return table(trained_parts(model, optimizer.param_groups if optimizer else ()))

    @staticmethod
    def export_adapter(engine: ModelEngine, folder: str | Path) -> None:
        """Write the adapter alone, as a folder for `peft`; all ranks call it. `engine.export_hf` merges instead."""
        params = dict(engine.model.named_parameters())
        path = Path(folder).expanduser().resolve()
        export_adapter(
            engine.model, path, lambda name: full_tensor(params[name].detach()), engine.world
        )


# What is compiled before the first step, or prepared for it: worker processes of Inductor, attention kernels, and the
# blocks of a model on a few rows, while the costs of all rows are measured.

LOGGER = logging.getLogger("mvp_engine")


def prepare_kernels(device: torch.device, model: Model) -> None:
    start_compile_workers(device, model)  # first: it names the folder of the compile cache
    prepare_attention(device)


def start_compile_workers(device: torch.device, model: Model) -> None:
    """Start the processes that compile kernels for Inductor, if the config compiles blocks on a GPU.

    They import torch for some seconds. Inductor would start them with its first graph, whose kernels are compiled in
    this process one by one until they are ready.
    """
    setting = model.compile
    backends = setting.values() if isinstance(setting, dict) else [setting]
    if device.type != "cuda" or not {"auto", "inductor"}.intersection(backends):
        return
    use_cache()  # the processes inherit its environment variable
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.use_process_pool()


def prepare_attention(device: torch.device) -> None:
    """Import FlashAttention 4 in a thread, which takes a second or two; or log that it would be faster on this GPU."""
    if device.type != "cuda" or not flash_attention.runs_on(device):
        return
    if flash_attention.INSTALLED:
        threading.Thread(target=flash_attention.load, daemon=True).start()
    else:
        LOGGER.info(
            "attention with heads of 64 or 128 would be faster on this GPU with flash-attn-4 %s: "
            "pip install 'mvp-engine[cuda]'",
            flash_attention.VERSION,
        )


def compile_blocks(engine: Any) -> None:
    """Run forward and backward on a pack of sampled rows, if blocks are compiled. Nothing of it stays but graphs.

    One pack is enough, since the sizes that differ between packs are marked. It does nothing when all rows are measured
    already: then the first steps compile. All ranks must call it: they run the same rows.
    """
    model: Any = engine.model
    is_compiled = any(module._compiled_call_impl is not None for module in model.modules())
    if not is_compiled or engine.layout.pipeline > 1 or engine.data.is_stream():
        return
    if not engine.world.any(engine.data.is_measuring)[0]:
        return
    random_state = rng_state()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    _forward_backward(engine, repeated(engine.data.sample(), engine.config.data.tokens_per_pack))
    for buffer, before in buffers:
        buffer.copy_(before)
    set_rng_state(random_state)


def _forward_backward(engine: Any, batch: PackedBatch) -> None:
    model: Any = engine.model
    name = "hidden_states" if "hidden_states" in model.provides else model.provides[0]
    with engine.model_engine.autocast():
        output = model(batch.to(engine.device), [name])[name]
    if output.requires_grad:
        output.float().mean().backward()
    model.zero_grad(set_to_none=True)


# The export of an MLLMEngine, and the symlink to it that the config key `export` names.


def export_folder(engine: Any) -> Path:
    """Write a Hugging Face folder of the current weights, or of their averages (EMA), into the run folder.

    All ranks call it. Adapters are merged.
    """
    link = export_link(engine.config.export_link)
    suffix = "" if engine.config.optim.ema is None else "_ema"
    folder: Path = engine.run.dir / f"hf_step_{engine.weights_step or engine.step}{suffix}"
    if not engine.world.broadcast(folder.exists()):
        with engine.eval_weights():
            engine.model_engine.export_hf(folder)
    if engine.world.is_main and link is not None:
        link.parent.mkdir(parents=True, exist_ok=True)
        atomic_symlink(link, os.path.relpath(folder.resolve(), link.parent.resolve()))
    linked = f", also found as {link}" if link else ""
    engine.logger.info("Hugging Face folder: %s%s", folder, linked)
    return folder


def export_link(export: str | None) -> Path | None:
    """The path of the link, after a check that it can be written."""
    if export is None:
        return None
    link = Path(export).expanduser()
    if link.exists() and not link.is_symlink():
        raise UserError(
            f"export_link={link} exists and is no link of an earlier run: set export to another path"
        )
    parent = next(folder for folder in link.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(
            f"export_link={link}: nothing can be written into {parent}. Set export to another path"
        )
    return link
