"""The config keys of `agent_engine.py`."""

from .settings import GridConfig


class AgentConfig(GridConfig):
    pass
