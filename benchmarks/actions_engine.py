"""The engine of `benchmarks/actions.py`: an ActionEngine that writes no checkpoints, of which pi0's have 42 GB."""

from mvp_engine.kit.actions.engine import ActionEngine


class BenchEngine(ActionEngine):
    def save(self) -> None:
        """Nothing: a benchmark is not resumed."""
