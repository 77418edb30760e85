"""A vision transformer from transformers: built from a config or a folder, saved as a folder.

With `model.path` the folder gives the architecture and all weights but those of the head, which is new if the classes
are others. A vision-language folder (CLIP, SigLIP) gives its vision encoder.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    AutoImageProcessor,
    AutoModelForImageClassification,
    ViTImageProcessor,
)

from mvp_engine.config import Model
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.errors import UserError, count
from mvp_engine.files import atomic_path, remove
from mvp_engine.hf.lora.lora_layers import merge_adapters
from mvp_engine.hf.model.config_source import read_config
from mvp_engine.hf.weights.hub import local_folder
from mvp_engine.hf.weights.load import load
from mvp_engine.kit import Lora, MLLMModelKit
from mvp_engine.model_engine import ModelEngine

LOGGER = logging.getLogger("mvp_engine")


def make_processor(path: str | None, size: int) -> Any:
    """The image processor, which resizes the whole image to a square. It is saved with the model."""
    if path is None:
        return ViTImageProcessor(size={"height": size, "width": size})
    read_config(path, {})  # raises a user error if the folder cannot be read
    processor = AutoImageProcessor.from_pretrained(local_folder(path))
    made = processor(Image.new("RGB", (2 * size, size)), return_tensors="pt")["pixel_values"].shape[1:]
    if made != (3, size, size):
        raise UserError(
            f"images.size={size}, but the image processor in {path} makes tensors of {tuple(made)} for an image: set "
            "images.size to the size that it makes; a model without a fixed size is not supported"
        )
    return processor


def make_model(model: Model, size: int, classes: list[str], lora: Lora | None = None) -> nn.Module:
    """A model with random weights, or with those of a folder and a new head, if the folder has other classes."""
    if model.path is not None:
        _check_sizes(read_config(model.path, {}).to_dict(), model.config, model.path)
    config = read_config(model.path, model.config)
    if type(config) not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        raise UserError(
            f"transformers has no image classifier for {config.model_type}: of a vision-language model, give the whole "
            "folder (siglip, not siglip_vision_model)"
        )
    vision = getattr(config, "vision_config", config)  # of CLIP and SigLIP, the vision encoder classifies
    has_size = hasattr(vision, "image_size")  # a convolutional network takes any
    if has_size and model.path is not None and vision.image_size != size:
        raise UserError(f"images.size={size}, but the model in {model.path} needs {vision.image_size}: set it to that")
    if has_size:
        vision.image_size = size
    had_classes = list(config.id2label.values())
    config.id2label = dict(enumerate(classes))
    config.label2id = {name: i for i, name in enumerate(classes)}
    built: Any = AutoModelForImageClassification.from_config(config, dtype=torch.float32)
    if model.path is not None:
        _load(built, local_folder(model.path, weights=True), has_head=had_classes == classes)
    return MLLMModelKit(lora).adapt(built)


def _check_sizes(folder: dict[str, Any], changes: dict[str, Any], path: str, key: str = "model.config") -> None:
    """Raise where the config contradicts the folder. Only floats, such as dropout, may differ from it."""
    for name, value in changes.items():
        there = folder.get(name)
        if isinstance(value, dict) and isinstance(there, dict):
            _check_sizes(there, value, path, f"{key}.{name}")
        elif not isinstance(value, float) and value != there:
            raise UserError(
                f"{key}.{name}={value}, but the model in {path} has {there}. Sizes come from the folder: leave the "
                "key out, or drop all of the YAML file's: model.config=null"
            )


def _load(model: Any, folder: Path, has_head: bool) -> None:
    """Fill the model from a folder: everything, except the head where `has_head` is False."""
    head = _head(model)
    tensors = model.state_dict(keep_vars=True)
    wanted = {name: value for name, value in tensors.items() if has_head or name not in head}
    loaded, unused = load(model, folder, wanted)
    missing = [name for name in wanted if name not in loaded]
    if has_head:
        missing = [name for name in missing if name not in head]
    if missing:
        raise UserError(
            f"{folder} lacks {count(len(missing), 'weight')} of {type(model).__name__}, such as {missing[0]}"
        )
    new = head - loaded
    model.source = folder
    model.fresh = tuple(sorted(new))  # LoRA trains these in full
    if new:
        LOGGER.info("the head is new: %s has other classes", folder)
    unused = [name for name in unused if name not in head]
    if unused:
        LOGGER.info("in %s, but not in the model: %d tensors, such as %s", folder, len(unused), unused[0])


def _head(model: Any) -> set[str]:
    """The parameters of the modules that depend on the number of classes: a model with one class more differs there."""
    config = type(model.config).from_dict(model.config.to_dict())
    config.id2label = dict.fromkeys(range(len(config.id2label) + 1), "")
    with torch.device("meta"):
        other = AutoModelForImageClassification.from_config(config).state_dict()
    tensors = model.state_dict()
    roots = {name.split(".")[0] for name, value in tensors.items() if other[name].shape != value.shape}
    return {name for name in tensors if name.split(".")[0] in roots}


def save(engine: ModelEngine, processor: Any, folder: Path) -> None:
    """Write a folder for `from_pretrained`, adapters merged, and adapters also as a folder for peft.

    All ranks call it, and rank 0 writes.
    """
    model: Any = engine.model
    own = model.state_dict()
    fetch = merge_adapters(model, lambda name: full_tensor(own[name]))
    tensors = {name: fetch(name).cpu() for name in own if ".lora_" not in name}
    adapter = folder.with_name(f"{folder.name}_adapter")
    if engine.world.is_main:
        plain: Any = AutoModelForImageClassification.from_config(model.config)  # FSDP changes the class of the model
        plain.load_state_dict(tensors)
        with atomic_path(folder, replace_folder=True) as temporary:
            plain.save_pretrained(temporary)
            processor.save_pretrained(temporary)
        remove(adapter)
    engine.world.barrier()
    if getattr(model, "lora", None) is not None:
        MLLMModelKit.export_adapter(engine, adapter)
