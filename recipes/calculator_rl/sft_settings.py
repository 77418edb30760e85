"""The config keys of `sft.py`."""

from mvp_engine.kit import MLLMConfig

from .settings import Made


class ChatConfig(MLLMConfig):
    made: Made
