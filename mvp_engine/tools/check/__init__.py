"""`mvp check`: a dry run of a config before it costs hours."""

from mvp_engine.tools.check.record import read_facts
from mvp_engine.tools.check.stages import main

__all__ = ["main", "read_facts"]
