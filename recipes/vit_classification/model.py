"""A vision transformer of transformers' own classes: in by a config or a folder, out as a folder."""

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
    """What the model sees of a picture: all of it, squeezed into a square. It goes into the export."""
    if path is None:
        return ViTImageProcessor(size={"height": size, "width": size})
    read_config(path, {})  # which says what is wrong with a folder
    return AutoImageProcessor.from_pretrained(path)


def make_model(model: Model, size: int, classes: list[str]) -> nn.Module:
    """With random weights, or those of a folder; the head is new where the folder has other classes."""
    about = read_config(model.path, model.config)
    if model.path is not None and about.image_size != size:
        raise UserError(f"images.size={size}, but the model in {model.path} sees {about.image_size}: set it to that")
    about.image_size = size
    about.id2label, about.label2id = dict(enumerate(classes)), {name: i for i, name in enumerate(classes)}
    if model.path is None:
        return AutoModelForImageClassification.from_config(about)
    return AutoModelForImageClassification.from_pretrained(model.path, config=about, ignore_mismatched_sizes=True)


def save(model: Any, processor: Any, folder: Path, world: World) -> None:
    """Complete or not there. Ranks that share the weights call it together, and the first one writes."""
    tensors = {name: full_tensor(tensor).cpu() for name, tensor in model.state_dict().items()}
    if world.is_main:
        plain: Any = AutoModelForImageClassification.from_config(model.config)  # sharding changes the class
        plain.load_state_dict(tensors)
        with atomic_path(folder, replace_folder=True) as temporary:
            plain.save_pretrained(temporary)
            processor.save_pretrained(temporary)
    world.barrier()
