"""MLLMModelKit: builds a Hugging Face model from a folder or a config, with LoRA adapters.

The functions below the class prepare kernels before the first step, and export the model of a run.

    def prepare_model(self):
        return MLLMModelKit(self.config.lora).build(self.config.model)

Freezing, learning rates, activation checkpointing and compilation by part are config keys of the engine.
"""

from __future__ import annotations

import logging
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mvp_engine.config.schema import Model, Part
from mvp_engine.data import keep_rng_state
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.errors import UserError
from mvp_engine.files import as_url, atomic_symlink, is_url
from mvp_engine.hf.lora.lora_export import export_adapter
from mvp_engine.hf.lora.lora_layers import add_adapters
from mvp_engine.hf.lora.lora_settings import Lora
from mvp_engine.hf.model.config_source import read_config, with_vocabulary
from mvp_engine.hf.model.model_parts import parts_of, table, trained_parts
from mvp_engine.hf.weights.hub import base_of_adapter, local_folder
from mvp_engine.hf.weights.load import NewRows
from mvp_engine.kit.data.measured_sources import repeated
from mvp_engine.kit.generation import check_writes
from mvp_engine.model_engine import ModelEngine, ModelSource, engine_class
from mvp_engine.model_engine.fsdp.compile import use_cache
from mvp_engine.ops import flash_attention

LOGGER = logging.getLogger("mvp_engine")


class MLLMModelKit:
    """Builds models with LoRA adapters. `lora=None`: full fine-tuning."""

    def __init__(self, lora: Lora | None = None) -> None:
        self.lora = lora

    def build(
        self,
        model: Model | ModelSource,
        model_type: str = "language_model",
        new_rows: NewRows | None = None,
    ) -> nn.Module:
        """Builds the model that a config or source names, without weights: the model engine loads or initializes them.

        `model_type` is used for a `ModelSource`; a config has its own. `new_rows`: those of `data.new_tokens`, from
        `MLLMDataKit.new_rows`.
        """
        if isinstance(model, Model):
            if model.type == "module":
                raise UserError(
                    "model.type=module has nothing to build: set model.type=language_model, or value_model, or "
                    "call adapt() on the module of prepare_model()"
                )
            engine_type = engine_class(model.type, model.backend)
            source = ModelSource(model.path, model.config)
        else:
            engine_type = engine_class(model_type)
            source = model
        if new_rows is None:
            return self.adapt(engine_type.build_model(source))
        needed = max(new_rows.sources) + 1
        is_enough = read_config(source.path, source.config).get_text_config().vocab_size >= needed
        if not is_enough:
            changes = with_vocabulary(source.path, source.config, new_rows.num_rows)
            source = ModelSource(source.path, changes)
        built: Any = engine_type.build_model(source)
        built.new_rows = new_rows
        return self.adapt(built)

    def of_engine(self, engine: Any) -> nn.Module:
        """Builds the model of an MLLMEngine.

        It also saves the processor of the training, with its limits of media, in the run folder: from there it is
        copied into checkpoints and exports.
        """
        config = engine.config
        model: Any = self.build(config.model, config.model.type, engine.data.new_rows)
        check_writes(model, "eval.generation" if config.eval.generation else None)
        model.use_side_files(engine.run.dir / "processor")
        if engine.world.is_main:
            engine.data.save_processor(model.side_files, config.model.path)
        return model

    def adapt(self, model: nn.Module) -> nn.Module:
        """If `lora` is set, freezes a model and adds adapters. Any module with linear layers can have them.

        A model whose path is an adapter gets that one: with its rank, alpha and layers, whatever `lora` says of them.

        Parameters whose names match a pattern in the attribute `fresh` of the model, such as a new head, train in full.
        """
        folder: Any = getattr(model, "adapter_folder", None)
        settings = self.lora
        if folder is not None:
            if settings is None:
                raise UserError(
                    f"{folder} is a LoRA adapter, and this model has none: train on with LoRA (the section lora), or "
                    "merge the adapter first (mvp export RUN OUT, or peft's merge_and_unload)"
                )
            from mvp_engine.hf.lora.lora_import import settings_of

            subject: Any = model
            settings = settings_of(subject, settings)
        if settings is not None:
            add_adapters(model, settings)
        return model

    @staticmethod
    def parts(model: nn.Module) -> dict[str, Part]:
        """Returns the part of the model ("llm", for example) that each parameter belongs to, by parameter name."""
        return parts_of(model)

    @staticmethod
    def table(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
        """Returns the table of trained parameters by part that the engine logs at the start."""
        return table(trained_parts(model, optimizer.param_groups if optimizer else ()))

    @staticmethod
    def export_adapter(engine: ModelEngine, folder: str | Path) -> None:
        """Writes the adapter alone, as a folder for `peft`. All ranks call it. `engine.export_hf` merges it instead."""
        params = dict(engine.model.named_parameters())
        path = Path(folder).expanduser().resolve()
        export_adapter(
            engine.model, path, lambda name: full_tensor(params[name].detach()), engine.world
        )


def check_new_rows(engine: Any) -> None:
    """Raise for an engine whose model has no rows for `data.new_tokens`; warn of rows that are frozen."""
    model: Any = engine.model
    if getattr(model, "new_rows", None) is None:
        raise UserError(
            f"data.new_tokens: {type(engine).__name__} builds a model without rows for them: build it by "
            "MLLMModelKit.of_engine, or give build() the new_rows of the data kit"
        )
    embedding = model.hf.get_input_embeddings()
    if not any(param.requires_grad for param in embedding.parameters()):
        LOGGER.warning(
            "data.new_tokens: model.freeze freezes the embedding, so their rows stay what they start as"
        )


def with_saved_lora(config: Any) -> Any:
    """The config with the rank and alpha of the adapter that `model.path` names, if it names one, for its records."""
    if config.lora is None or config.model.path is None:
        return config
    folder = local_folder(config.model.path)
    if base_of_adapter(folder) is None:
        return config
    from mvp_engine.hf.lora.lora_import import read_adapter

    saved = read_adapter(folder)
    values = {"rank": saved.config["r"], "alpha": saved.alpha}
    LOGGER.info("training on from the adapter %s, with its layers, %s", folder, values)
    return config.model_copy(update={"lora": config.lora.model_copy(update=values)})


# Work on kernels before the first step: start Inductor's compile processes, import attention kernels, and compile the
# blocks of the model on a few rows. The last one happens while other processes measure the costs of all rows.


def prepare_kernels(device: torch.device, model: Model) -> None:
    start_compile_workers(device, model)  # first, since it sets the folder of the compile cache
    prepare_attention(device)


def start_compile_workers(device: torch.device, model: Model) -> None:
    """Start the processes that compile kernels for Inductor, if the config compiles blocks on a GPU.

    By default Inductor starts them with its first graph. They need some seconds to import torch, in which this process
    compiles the kernels one by one.
    """
    setting = model.compile
    backends = setting.values() if isinstance(setting, dict) else [setting]
    if device.type != "cuda" or not {"auto", "inductor"}.intersection(backends):
        return
    use_cache()  # the processes inherit its environment variable
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.use_process_pool()


def prepare_attention(device: torch.device) -> None:
    """Import FlashAttention 4 in a thread, since it takes a second or two.

    If it is not installed, and this GPU could use it, log that attention would be faster with it.
    """
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
    """If blocks are compiled, compiles them by a forward and backward on one pack of sampled rows.

    Only the compiled graphs remain: buffers and random states are restored, and gradients are dropped. One pack is
    enough, since the sizes that differ between packs are marked as dynamic. It does nothing when all rows are measured
    already, since there is no wait to use: then the first steps compile. All ranks must call it with the same rows.
    """
    model: Any = engine.model
    is_compiled = any(module._compiled_call_impl is not None for module in model.modules())
    if not is_compiled or engine.layout.pipeline > 1 or engine.data.is_stream():
        return
    if not engine.world.any(engine.data.is_measuring)[0]:
        return
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    rows = repeated(engine.data.sample(), engine.config.data.tokens_per_pack)
    with keep_rng_state():
        _forward_backward(engine, rows)
    for buffer, before in buffers:
        buffer.copy_(before)


def _forward_backward(engine: Any, batch: PackedBatch) -> None:
    model: Any = engine.model
    output_name = "hidden_states" if "hidden_states" in model.provides else model.provides[0]
    with engine.model_engine.autocast():
        output = model(batch.to(engine.device), [output_name])[output_name]
    if output.requires_grad:
        output.float().mean().backward()
    model.zero_grad(set_to_none=True)


# The export of an MLLMEngine, and the symlink to it at the path of the config key `export_link`.


def export_folder(engine: Any) -> Path:
    """Writes a Hugging Face folder of the current weights, or of their averages (EMA), into the run folder.

    All ranks must call it. Adapters are merged. The symlink of `export_link`, if set, then points to the folder.
    """
    link = export_link(engine.config.export_link)
    if not engine._training and not hasattr(engine, "model_engine"):
        engine.before_evaluate()
    suffix = "" if engine.config.optim.ema is None else "_ema"
    folder: Path = engine.run.dir / f"hf_step_{engine.weights_step or engine.step}{suffix}"
    if not engine.world.broadcast(folder.exists()):
        with engine.eval_weights():
            engine.model_engine.export_hf(folder)
    if link is not None and is_url(link):
        from mvp_engine.checkpoint.remote import run_in_thread
        from mvp_engine.stores import upload_folder

        upload = partial(upload_folder, folder.resolve(), link, "config.json")
        run_in_thread(upload if engine.world.is_main else lambda: None, engine.world)
    elif engine.world.is_main and link is not None:
        link.parent.mkdir(parents=True, exist_ok=True)
        atomic_symlink(link, os.path.relpath(folder.resolve(), link.parent.resolve()))
    link_note = f", also found as {as_url(link)}" if link else ""
    engine.logger.info("Hugging Face folder: %s%s", folder, link_note)
    return folder


def export_link(export: str | None) -> Path | None:
    """Returns the path of the symlink, or the URL of the copy, or None. Raises if it cannot be created there."""
    if export is None or is_url(export):
        return export and Path(export)  # type: ignore[return-value]
    link = Path(export).expanduser()
    if link.exists() and not link.is_symlink():
        raise UserError(
            f"export_link={link} exists and is no link of an earlier run: set export_link to another path"
        )
    parent = next(folder for folder in link.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(
            f"export_link={link}: nothing can be written into {parent}. Set export to another path"
        )
    return link
