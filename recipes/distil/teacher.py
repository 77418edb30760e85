"""The SFT of the CPU config's teacher."""

from typing import Any

from mvp_engine.kit import MLLMEngine

from .data import prepare
from .teacher_settings import TeacherConfig


class TeacherEngine(MLLMEngine):
    config_class = TeacherConfig
    config: TeacherConfig

    @classmethod
    def data_kit(cls, config: Any) -> Any:
        prepare(config.made)
        return super().data_kit(config)
