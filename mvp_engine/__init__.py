"""MVP Engine: train text, image, video and audio models with code small enough to read in an afternoon."""

import os

__version__ = "0.2.0"

# The process that started this one, read before the slow imports: a change of it later means that the launcher died.
PARENT = os.getppid()


def __getattr__(name: str) -> object:
    """`train` and `load` of `api.py`, which import torch when they are first used."""
    if name in ("train", "load"):
        from mvp_engine import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
