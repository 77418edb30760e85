"""The short SFT of the CPU configs: the model that reinforcement learning starts from."""

from typing import Any

from mvp_engine.kit import MLLMEngine

from .data import prepare
from .sft_settings import ChatConfig


class ChatEngine(MLLMEngine):
    config_class = ChatConfig
    config: ChatConfig

    @classmethod
    def data_kit(cls, config: Any) -> Any:
        prepare(config.made)
        return super().data_kit(config)
