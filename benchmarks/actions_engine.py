"""The engine of `benchmarks/actions.py`: an ActionEngine without checkpoints that draws random weights on the GPU.

A checkpoint of pi0 has 42 GB, and its 3.5 B random numbers take half a minute on a CPU.
"""

from typing import Any

import torch
from torch import nn

from mvp_engine.hf.model.config_source import read_config
from mvp_engine.kit.actions.action_model import ActionModel
from mvp_engine.kit.actions.engine import ActionEngine


class BenchEngine(ActionEngine):
    def prepare_model(self) -> nn.Module:
        meta: Any = super().prepare_model()
        torch.manual_seed(self.config.seed)
        with self.device:
            model: Any = ActionModel.from_config(read_config(None, self.config.model.config))
        for name in ("source", "export_dtype", "side_files"):
            setattr(model, name, getattr(meta, name))
        return model

    def save(self) -> None:
        """Nothing: a benchmark is not resumed."""
