"""Distillation: a small student learns the next-token distributions of a trained teacher."""

from typing import Any

from mvp_engine.kit import DistilEngine

from .data import prepare
from .settings import StudentConfig


class StudentEngine(DistilEngine):
    config_class = StudentConfig
    config: StudentConfig

    @classmethod
    def data_kit(cls, config: Any) -> Any:
        if config.made is not None:
            prepare(config.made)
        return super().data_kit(config)
