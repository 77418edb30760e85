"""The config keys of `code_engine.py`."""

from mvp_engine.config import Section
from mvp_engine.config.schema import Count, Positive
from mvp_engine.kit.rl import RLConfig


class Sandbox(Section):
    seconds: Positive = 5.0  # of a program
    memory_mib: Count = 512  # address space of a program


class CodeConfig(RLConfig):
    sandbox: Sandbox = Sandbox()
    instruction: str | None = None  # the system message of every prompt; null: that of the chat template
