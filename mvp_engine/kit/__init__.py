"""Kits: data, model, loss, optimizer, MFU and generation for recipes, which use the ones they need."""

from typing import TYPE_CHECKING

from mvp_engine.imports import lazy_exports
from mvp_engine.kit.build_once import build_once, make_data

if TYPE_CHECKING:
    from mvp_engine.hf.lora.lora_settings import Lora
    from mvp_engine.kit.data import DataSource, Limits, MLLMData, MLLMDataKit, load_processor
    from mvp_engine.kit.decoding import Completion, Decoding, complete, stop_at
    from mvp_engine.kit.examples import examples_of
    from mvp_engine.kit.generation import Answer, generate, generate_answers
    from mvp_engine.kit.loss import TokenNormedLossKit
    from mvp_engine.kit.mfu import MFUKit
    from mvp_engine.kit.mllm import MLLMEngine
    from mvp_engine.kit.model import MLLMModelKit
    from mvp_engine.kit.optim import OptimKit, OptimSettings
    from mvp_engine.kit.row_checks import check_labels, check_rows
    from mvp_engine.kit.settings import EvalGeneration, MLLMConfig, TokenLoss
else:  # the sections of configs are here too, and `mvp config CONFIG` imports no torch
    __getattr__ = lazy_exports(__name__)


__all__ = [
    "Answer",
    "Completion",
    "DataSource",
    "Decoding",
    "EvalGeneration",
    "Limits",
    "Lora",
    "MFUKit",
    "MLLMConfig",
    "MLLMData",
    "MLLMDataKit",
    "MLLMEngine",
    "MLLMModelKit",
    "OptimKit",
    "OptimSettings",
    "TokenLoss",
    "TokenNormedLossKit",
    "build_once",
    "check_labels",
    "check_rows",
    "complete",
    "examples_of",
    "generate",
    "generate_answers",
    "load_processor",
    "make_data",
    "stop_at",
]
