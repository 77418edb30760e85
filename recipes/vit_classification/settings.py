"""The config keys of this recipe. This module imports no torch, so a misspelt key is an error at once."""

from mvp_engine.config import Config, Section
from mvp_engine.kit import Lora, OptimSettings


class Images(Section):
    """Image files by class, and how they are augmented."""

    root: str | None
    """A folder with one folder of images per class; null: scikit-learn's digits."""
    eval_root: str | None = None
    """A folder with the same classes for evaluation; null: a part of the first is held out."""
    held_out: int = 10
    """Every n-th image is held out, chosen by its name."""
    size: int
    """Pixels of a side, as the model sees the image."""
    bend: float = 0.0
    """Rotation, shear, scale and shift, each by up to this share."""
    crop: float = 1.0
    """Random crop of at least this share of the area."""
    flip: bool = False
    """Horizontal flip, half of the time."""


class VitConfig(Config):
    images: Images
    optim: OptimSettings
    lora: Lora | None = None  # null: full fine-tuning
    label_smoothing: float = 0.0
    """The share of the target that is spread evenly over the classes."""
