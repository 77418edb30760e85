"""`mvp check`: a config tried out before it costs hours."""

from mvp_engine.tools.check.stages import facts, main

__all__ = ["facts", "main"]
