"""Distillation: a small student learns the next-token distributions of a trained teacher."""

from typing import Any

from mvp_engine.config import Section
from mvp_engine.kit import DistilConfig, DistilEngine

from .data import prepare


class Made(Section):
    folder: str  # rows and tokenizer are built into it, once
    rows: int  # for training


class StudentConfig(DistilConfig):
    made: Made | None = None  # synthetic data; null: mllm.sources are files of your own


class StudentEngine(DistilEngine):
    config_class = StudentConfig
    config: StudentConfig

    @classmethod
    def data_kit(cls, config: Any) -> Any:
        if config.made is not None:
            prepare(config.made)
        return super().data_kit(config)
