"""WorkerSpec: all that a rank needs to build its model engine. It pickles: a group sends it to its ranks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mvp_engine.config.schema import Config, Model, Parallel, default_values
from mvp_engine.errors import UserError, count
from mvp_engine.hf.lora.lora_settings import Lora
from mvp_engine.kit.optim.settings import OptimSettings
from mvp_engine.model_engine import Settings


@dataclass(frozen=True)
class WorkerSpec:
    model: Model
    settings: Settings
    parallel: Parallel
    optim: OptimSettings | None = None  # None: for inference only
    total_steps: int | None = None  # of the learning-rate schedule: optimizer steps
    lora: Lora | None = None
    seed: int = 0
    device: str = "auto"  # auto, cpu, cuda
    cpu_threads: int | None = None
    deterministic: bool = False
    hang_seconds: float | None = (
        None  # a call that takes longer is reported with the stacks of all ranks
    )
    side_files: str | None = None  # a folder with tokenizer and processor, for exports

    @classmethod
    def from_config(cls, config: Config, precision: str, **changes: Any) -> WorkerSpec:
        """The spec of a recipe's config, for a precision that is not "auto"; `changes` replace fields."""
        fields: dict[str, Any] = {
            "model": config.model,
            "settings": Settings.from_config(config, precision),
            "parallel": config.parallel,
            "optim": config.optim,
            "total_steps": config.loop.total_steps,
            "lora": getattr(config, "lora", None),
            "seed": config.seed,
            "device": config.device,
            "cpu_threads": config.cpu_threads,
            "deterministic": config.deterministic,
            "hang_seconds": config.guard.hang_seconds,
        }
        return cls(**{**fields, **changes})

    @classmethod
    def of(
        cls,
        path: str | None = None,
        *,
        model: dict[str, Any] | None = None,
        parallel: dict[str, Any] | None = None,
        optim: dict[str, Any] | None = None,
        settings: Settings | None = None,
        precision: str = "fp32",
        seed: int = 0,
        **fields: Any,
    ) -> WorkerSpec:
        """The spec of a Hugging Face folder, for programs without a config file: config keys with their defaults.

        `optim=None` is for inference only; `optim={}` is the default optimizer. `settings` replace those of `model`,
        `precision` and `seed`.
        """
        keys = {**default_values("model"), "type": "language_model", "path": path, **(model or {})}
        section = Model(**keys)
        if settings is None:
            names = {field.name for field in dataclasses.fields(Settings)}
            of_model = {name: value for name, value in section if name in names}
            of_model["freeze"] = tuple(section.freeze)
            settings = Settings(**of_model, precision=precision, seed=seed)
        layout = Parallel(**{**default_values("parallel"), **(parallel or {})})
        optimizer = None if optim is None else OptimSettings(**{**default_values("optim"), **optim})
        return cls(section, settings, layout, optimizer, seed=seed, **fields)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that work on the same sequences."""
        parallel = self.parallel
        return parallel.pipeline * parallel.context * parallel.ulysses * parallel.tensor

    def data_size(self, ranks: int) -> int:
        """The data-parallel size of a group of this many ranks."""
        each = self.model_parallel_size
        if ranks % each:
            raise UserError(
                f"parallel.pipeline={self.parallel.pipeline} times parallel.context={self.parallel.context} times "
                f"parallel.ulysses={self.parallel.ulysses} times parallel.tensor={self.parallel.tensor} does not "
                f"divide the {count(ranks, 'rank')} of the group: use {each * (ranks // each + 1)}, or change them"
            )
        return ranks // each
