"""The config class of `distil.py`. This module imports no torch, so a misspelt key is an error at once."""

from .settings import CalculatorConfig


class DistilConfig(CalculatorConfig):
    step_of = ("distil", "distil_reverse", "distil_forward")  # what `train_step` computes
