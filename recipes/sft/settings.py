"""The config keys of this recipe: those of every fine-tuning. Add yours to the class."""

from mvp_engine.kit import MLLMConfig


class SFTConfig(MLLMConfig):
    pass
