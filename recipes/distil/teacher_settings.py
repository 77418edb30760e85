"""The config keys of `teacher.py`."""

from mvp_engine.kit import MLLMConfig

from .settings import Made


class TeacherConfig(MLLMConfig):
    made: Made
