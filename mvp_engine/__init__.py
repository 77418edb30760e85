"""MVP Engine: train text, image, video and audio models with code small enough to read in an afternoon."""

__version__ = "0.1.0"
