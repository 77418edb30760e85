"""The schema of a config: types and checks. Default values are in `default.yaml`, and only there.

A recipe adds its own keys by subclassing `Config` and setting the subclass as its engine's `config_class`:

    class Task(Section):
        digits: int = 4

    class MyConfig(Config):
        task: Task = Task()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from mvp_engine import plugins
from mvp_engine.files import is_url


class Section(BaseModel):
    """A group of config keys. Unknown keys and wrong types are errors; values are immutable."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=True,  # a string below a field describes it
    )


@contextmanager
def recorded_reads(section: Section) -> Iterator[set[str]]:
    """A context that collects the names of a section's attributes that code inside of it reads."""
    kind = type(section)
    names: set[str] = set()

    class Recorded(kind):  # type: ignore[valid-type, misc]
        def __getattribute__(self, name: str) -> Any:
            names.add(name)
            return super().__getattribute__(name)

    object.__setattr__(section, "__class__", Recorded)
    try:
        yield names
    finally:
        object.__setattr__(section, "__class__", kind)


@cache
def _default_yaml() -> dict[str, Any]:
    text = (files("mvp_engine.config") / "default.yaml").read_text(encoding="utf-8")
    values: dict[str, Any] = yaml.safe_load(text)
    return values


def default_values(section: str) -> dict[str, Any]:
    """The values of a section in `default.yaml`."""
    return dict(_default_yaml()[section])


Count = Annotated[int, Field(ge=1)]
Interval = Count | Literal["auto"]  # auto: by the number of steps, when a training starts
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


# Parts of a model: those that multimodal language models have, and those of kits.
PARTS: tuple[str, ...] = ("vision", "audio", "projector", "llm", *plugins.names("model_part"))
if TYPE_CHECKING:
    Part = str
else:
    Part = Literal[PARTS]
# Modes of activation checkpointing, the largest memory first.
ActivationCheckpointing = Literal["none", "selective", "attention", "full", "offload"]
CHECKPOINTING_MODES: tuple[str, ...] = get_args(ActivationCheckpointing)


class Train(Section):
    max_steps: Count | None
    epochs: Count | None
    precision: Literal["auto", "fp32", "bf16", "fp16"]


class Eval(Section):
    steps: Interval | None
    batches: Count | None


def if_auto(default: Callable[[], int]) -> BeforeValidator:
    """`default()` in place of auto."""
    return BeforeValidator(lambda value: default() if value == "auto" else value)


class Data(Section):
    micro_batch_size: Annotated[Count, if_auto(lambda: 32)]
    global_batch_size: Count | None
    num_workers: Annotated[int, Field(ge=0), if_auto(lambda: 0)]


class Optim(Section):
    lr: NonNegative
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]
    eps: Positive
    weight_decay: NonNegative
    lr_by_part: dict[str, NonNegative]
    schedule: Literal["cosine", "linear", "constant", "wsd"]
    warmup: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=1)]
    decay_ratio: Fraction
    min_lr_ratio: Fraction
    max_grad_norm: Positive | None = 1.0
    ema: float | None = Field(default=None, gt=0, lt=1)


class Guard(Section):
    spike_sigmas: Positive | None
    max_skips: Count


class Log(Section):
    interval: Interval
    backends: list[str | dict[str, Any]]


class Model(Section):
    type: str
    backend: str
    path: str | None
    config: Annotated[dict[str, Any], BeforeValidator(lambda value: value or {})]
    freeze: list[str]
    activation_checkpointing: (
        Literal["auto"] | ActivationCheckpointing | dict[Part, ActivationCheckpointing]
    )
    compile: str | dict[Part, str | None] | None
    fp8: bool | Literal["all"] | dict[Part, bool | Literal["all"]]
    quantize: dict[Part, Literal["nf4"]]
    offload_outside_steps: Literal["none", "optimizer", "all"]


class Experts(Section):
    aux_loss_coef: NonNegative | None = None
    bias_update_rate: NonNegative | None = None
    router_z_loss_coef: NonNegative = 0.0

    @property
    def balance(self) -> Literal["loss", "bias", "none"]:
        """What balances the experts: a loss, or a bias of the routers' choice."""
        if self.bias_update_rate is not None:
            return "bias"
        return "none" if self.aux_loss_coef is None else "loss"

    @property
    def is_used(self) -> bool:
        return self.balance != "none" or self.router_z_loss_coef > 0

    @model_validator(mode="after")
    def _one_balance(self) -> Experts:
        if self.aux_loss_coef is not None and self.bias_update_rate is not None:
            raise ValueError(
                "aux_loss_coef balances by a loss, bias_update_rate by a bias: set one of them to null"
            )
        return self


class Checkpoint(Section):
    interval: Interval | None
    keep_n: Count | None
    keep_every: Count | None
    best_metric: str | None
    best_mode: Literal["min", "max"]
    trainable_only: bool | None
    patience: Count | None
    remote: str | None

    @field_validator("remote")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is not None and not is_url(value):
            raise ValueError(f"write a URL, such as s3://bucket/runs or file://{value}")
        return value


class GroupParallel(Section):
    """How ranks share a model; the sizes multiply to the ranks of one replica, of which there are as many as fit."""

    shard: Count = 1
    """FSDP: ranks that shard parameters, gradients and optimizer states of one replica."""
    context: Count = 1
    """Sequence parallel: ranks that shard the queries of a batch and gather keys and values."""
    pipeline: Count = 1
    """Pipeline parallel: stages of the model, each with a slice of the decoder's blocks."""
    ulysses: Count = 1
    """Sequence parallel (Ulysses): ranks that shard the tokens of a batch."""
    tensor: Count = 1
    """Tensor parallel: ranks that shard each weight matrix."""
    expert: Count = 1
    """Expert parallel: so many of the shard x context x ulysses ranks share the experts; it multiplies no ranks."""
    reshard: bool = True
    """FSDP: gather parameters in every forward and backward; false: once per step, and once per sampling of answers."""

    def with_timeout(self, timeout: float) -> Parallel:
        return Parallel(**self.model_dump(), timeout=timeout)


class Parallel(GroupParallel):
    timeout: Positive

    @property
    def hang_seconds(self) -> float:
        """A step that takes longer is reported, before a collective of it times out."""
        return self.timeout / 2


class Config(Section):
    run_name: str = Field(pattern=r"^[\w][\w.+-]*$")
    output_dir: str
    run_id: str | None = Field(pattern=r"^[\w][\w.+-]*$")
    engine: str | None
    workflow: str
    resume: str | None
    resume_data: Literal["continue", "restart"]
    seed: int = Field(ge=0, lt=2**63)
    deterministic: bool
    device: Literal["auto", "cpu", "cuda"]
    cpu_threads: Count | None
    model: Model
    train: Train
    eval: Eval
    data: Data
    optim: Optim
    experts: Experts
    guard: Guard
    log: Log
    checkpoint: Checkpoint
    parallel: Parallel

    @model_validator(mode="after")
    def _patience_has_evaluations(self) -> Config:
        if self.checkpoint.patience and not (self.eval.steps and self.checkpoint.best_metric):
            raise ValueError(
                "checkpoint.patience counts evaluations without a better checkpoint.best_metric: set "
                "eval.steps and checkpoint.best_metric too"
            )
        return self

    def to_yaml(self) -> str:
        """YAML that `mvp train` accepts again, from any folder."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False, allow_unicode=True)
