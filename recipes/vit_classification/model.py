"""A vision transformer from transformers: built from a config or a folder, saved as a folder."""

from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTImageProcessor

from mvp_engine.config import Model
from mvp_engine.distributed import World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.errors import UserError
from mvp_engine.files import atomic_path
from mvp_engine.hf.config_source import read_config


def make_processor(path: str | None, size: int) -> Any:
    """The image processor, which resizes the whole image to a square. It is saved with the model."""
    if path is None:
        return ViTImageProcessor(size={"height": size, "width": size})
    read_config(path, {})  # raises a user error if the folder cannot be read
    return AutoImageProcessor.from_pretrained(path)


def make_model(model: Model, size: int, classes: list[str]) -> nn.Module:
    """A model with random weights, or with those of a folder; the head is new if the folder has other classes."""
    config = read_config(model.path, model.config)
    if model.path is not None and config.image_size != size:
        raise UserError(f"images.size={size}, but the model in {model.path} needs {config.image_size}: set it to that")
    config.image_size = size
    config.id2label = dict(enumerate(classes))
    config.label2id = {name: i for i, name in enumerate(classes)}
    if model.path is None:
        return AutoModelForImageClassification.from_config(config)
    return AutoModelForImageClassification.from_pretrained(model.path, config=config, ignore_mismatched_sizes=True)


def save(model: Any, processor: Any, folder: Path, world: World) -> None:
    """Write a folder for `from_pretrained`, atomically. All ranks call it, and rank 0 writes."""
    tensors = {name: full_tensor(tensor).cpu() for name, tensor in model.state_dict().items()}
    if world.is_main:
        plain: Any = AutoModelForImageClassification.from_config(model.config)  # FSDP changes the class of the model
        plain.load_state_dict(tensors)
        with atomic_path(folder, replace_folder=True) as temporary:
            plain.save_pretrained(temporary)
            processor.save_pretrained(temporary)
    world.barrier()
