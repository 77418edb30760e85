"""OptimSettings: the `optim` section of a recipe that uses OptimKit."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from mvp_engine.config.schema import Optim

STATE_BYTES = {"float32": 8.0, "bfloat16": 4.0, "int8": 2.06}  # of Adam's two states, per parameter


class OptimSettings(Optim):
    """The engine's `optim` section and the keys of this kit."""

    name: Literal["adamw", "muon"] = "adamw"
    """The optimizer. muon is for the matrices of blocks; all other parameters then use AdamW."""
    state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """How AdamW's moments and Muon's momentum are stored."""
    offload: bool = False
    """Keep the optimizer states in pinned memory of the host, and copy them to the GPU in buckets during each update:
    8 bytes per trained parameter less GPU memory with float32 states, the same results (docs/optim.md)."""
    muon_exclude: list[str] = Field(default_factory=list)
    """Patterns of parameter names, or parts, that use AdamW under name=muon."""

    @model_validator(mode="after")
    def _check_combinations(self) -> OptimSettings:
        if self.muon_exclude and self.name == "adamw":
            raise ValueError(
                "muon_exclude lists parameters that muon must not update: set name=muon, or remove it"
            )
        return self
