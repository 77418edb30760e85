"""Configuration: `default.yaml` < the recipe's YAML < the command line, validated by a strict schema."""

from mvp_engine.config.compose import Composed, compose
from mvp_engine.config.schema import Config, Model, Section

__all__ = ["Composed", "Config", "Model", "Section", "compose"]
