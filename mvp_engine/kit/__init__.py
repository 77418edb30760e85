"""Kits: small suites of calls that recipes use as they like."""

from mvp_engine.hf.lora import Lora
from mvp_engine.kit.data import DataSource, Limits, MLLMData, MLLMDataKit, load_processor
from mvp_engine.kit.examples import examples_of
from mvp_engine.kit.generate import Answer, answer, generate
from mvp_engine.kit.loss import TokenLoss, TokenNormedLossKit
from mvp_engine.kit.made import made_once
from mvp_engine.kit.mfu import MFUKit
from mvp_engine.kit.mllm import EvalGeneration, MLLMConfig, MLLMEngine
from mvp_engine.kit.model import MLLMModelKit
from mvp_engine.kit.optim import OptimKit, OptimSettings

__all__ = [
    "Answer",
    "DataSource",
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
    "answer",
    "examples_of",
    "generate",
    "load_processor",
    "made_once",
]
