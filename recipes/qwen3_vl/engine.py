"""Qwen3-VL in stages: align the projector, pre-train, instruct, in full or with LoRA. The stages are configs."""

from pathlib import Path
from typing import Any

from mvp_engine.errors import UserError
from mvp_engine.kit import MLLMEngine

from .data import prepare
from .settings import VLConfig


class VLEngine(MLLMEngine):
    config_class = VLConfig
    config: VLConfig
    title = "What Qwen3-VL answers"

    @classmethod
    def make_processor(cls, config: Any) -> Any:
        shapes = config.shapes
        processor = None if shapes is None else prepare(shapes.folder, shapes.rows)
        return processor if config.model.path is None else super().make_processor(config)

    @classmethod
    def data_kit(cls, config: Any) -> Any:
        path = config.model.path
        if config.shapes is not None and path is not None and not Path(path).is_dir():
            raise UserError(f"model.path={path} is missing: it is what the stage before exports, so train that first")
        return super().data_kit(config)
