"""MVP Engine: train text, image, video and audio models with code small enough to read in an afternoon."""

import os

__version__ = "0.1.0"

PARENT = os.getppid()  # taken at once, before the slow imports: who started us, if it is still there
