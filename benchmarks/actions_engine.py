"""The engine of `benchmarks/actions.py`: that of table_vla, without checkpoints, with random weights drawn on the GPU.

A checkpoint of pi0 has 42 GB, and its 3.5 B random numbers take half a minute on a CPU.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from mvp_engine.hf.model.config_source import read_config
from mvp_engine.imports import import_file
from mvp_engine.kit.actions.action_model import ActionModel

TABLE_VLA: Any = import_file(Path(__file__).parents[1] / "recipes" / "table_vla" / "engine.py")


class BenchEngine(TABLE_VLA.TableEngine):
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
