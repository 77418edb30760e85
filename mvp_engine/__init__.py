"""MVP Engine: train text, image, video and audio models with code small enough to read in an afternoon."""

import os

__version__ = "0.2.0"

# The process that started this one, read before the slow imports: a change of it later means that the launcher died.
PARENT = os.getppid()
