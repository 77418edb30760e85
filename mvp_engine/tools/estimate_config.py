"""The model and the packs of a config, for estimates of the config and of changes to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mvp_engine.config import compose
from mvp_engine.config.compose import Composed, MissingKeys
from mvp_engine.config.places import override_key
from mvp_engine.config.shipped import shipped_configs
from mvp_engine.data import accumulation_steps
from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.hf.actions.action_model import ActionModel
from mvp_engine.hf.model.config_source import read_config
from mvp_engine.hf.model.packed_model import PackedModel
from mvp_engine.hf.weights.hub import hub_model
from mvp_engine.kit import MLLMData
from mvp_engine.kit.data.settings import data_section
from mvp_engine.kit.estimate.auto import (
    check_supported,
    data_packs,
    global_batch,
    with_defaults,
)
from mvp_engine.kit.estimate.blocks import BlockCosts
from mvp_engine.kit.estimate.choice import AUTO, Choice, Workload, choose, is_open
from mvp_engine.kit.estimate.memory import peak_memory
from mvp_engine.kit.estimate.packs import (
    MEDIA_SHARE,
    DataPacks,
    Packs,
    assumed_action_packs,
    assumed_packs,
    assumed_speech_packs,
)
from mvp_engine.kit.estimate.sample import SampledBatches, assumed_batches
from mvp_engine.kit.estimate.settings import GIB, EstimateSettings, gpu_by_name
from mvp_engine.kit.estimate.step import estimate_step
from mvp_engine.kit.estimate.training import changed, meta_model, settings_of
from mvp_engine.kit.speech.flops import SPEAKING
from mvp_engine.tools.inspect import config_data_kit

MODEL_CONFIG = Path(__file__).parent / "estimate_model.yaml"


@dataclass(frozen=True)
class Question:
    """What to estimate: a config or a model, on which GPUs."""

    what: str  # a YAML file, a model folder or a Hub id
    overrides: list[str]
    gpu: str | None = None  # None: the one of this machine, or H200
    gpus: int | None = None  # None: as many as the parallel layout needs
    tokens: int | None = None  # of an assumed pack; None: the data of the config, where it is known
    media_share: float = MEDIA_SHARE


class Estimator:
    """A config with its model and packs, which changes of the config share as far as they can."""

    layout = "parallel"  # the config section of the parallel layout
    is_rl = False

    def __init__(self, question: Question, composed: tuple[Composed, bool] | None = None) -> None:
        if not 0 <= question.media_share <= 1:
            raise UserError(f"--media-share {question.media_share}: it is a share, from 0 to 1")
        self.what = question.what
        self.media_share = question.media_share
        self.gpu = question.gpu or _gpu_of_machine()
        gpu_by_name(self.gpu)  # an unknown GPU is an error before the data is read
        found, self.is_assumed = composed or compose_question(question)
        self.engine_class = found.engine_class
        self.config: Any = found.config
        if self.config.model.type == "module":
            raise UserError(
                "mvp estimate supports Hugging Face models: model.type=language_model, omni_model, value_model or "
                "action_model"
            )
        self.section, data = data_section(self.config)
        tokens_key = f"{self.section}.micro_batch_tokens"
        is_given = any(override_key(word) == tokens_key for word in question.overrides)
        if question.tokens is not None and not is_given:
            self.config = changed(self.config, {tokens_key: question.tokens})
        self.is_assumed |= any(s.stream and s.split == "train" for s in data.sources)
        self.gpus = self.default_gpus if question.gpus is None else question.gpus
        _check_gpus(self.gpus, self.parallel(self.config))
        self._models = dict[str, PackedModel]()
        self._packs = dict[tuple[int, int], Packs]()
        self.choice: Choice | None = None  # of `auto`
        if is_open(self.config, self.data(self.config)):
            check_supported(self.config, self.data(self.config))
            self.choice = self._choose()
            self.config = changed(self.config, self.choice.values)

    def _choose(self) -> Choice:
        """The choice that a training would make on these GPUs."""
        config = self.config
        plain = with_defaults(config)
        batch_choice = Choice({}, "")
        if self.data(config).global_batch_tokens == AUTO:
            values = {f"{self.section}.global_batch_tokens": self.data(plain).global_batch_tokens}
            batch_choice = Choice(values, "")
            if not self.is_assumed:
                batch_choice = global_batch(config, config_data_kit(self.engine_class, plain))
            config = changed(config, batch_choice.values)
            plain = with_defaults(config)
        data = self.data(config)
        if not is_open(config, data):
            return batch_choice
        settings = self.settings(plain)
        model = self.model(plain)
        ranks = self.gpus // settings.text_ranks
        gpu = gpu_by_name(self.gpu)
        if self.is_assumed:
            batch = self._assumed_batches(model, plain)
            work = Workload(model, settings, batch, gpu, ranks)
        else:
            rows = SampledBatches(config_data_kit(self.engine_class, plain))
            work = Workload(model, settings, rows, gpu, ranks, rows.heaviest)
        packs = data_packs(plain)
        return batch_choice + choose(config, self.section, data, packs, work)

    def _assumed_batches(self, model: PackedModel, config: Any) -> Callable[[int], PackedBatch]:
        """Micro-batches by their number of tokens."""
        if isinstance(model, SPEAKING):
            return lambda tokens: assumed_speech_packs(model, tokens).largest[0]
        if not isinstance(model, ActionModel):
            return assumed_batches(model.hf.config, self.data(config), self.media_share)
        draws = num_draws(config)
        return lambda tokens: assumed_action_packs(model, tokens, draws).largest[0]

    @property
    def default_gpus(self) -> int:
        return _replica_size(self.parallel(self.config))

    def parallel(self, config: Any) -> Any:
        return config.parallel

    def rank_values(self, gpus: int) -> dict[str, Any]:
        """Config keys that set the number of GPUs; of most configs the command line does."""
        return {}

    def estimate(self, config: Any, gpus: int) -> dict[str, Any]:
        """The estimate of one step (`estimate_step`) and of the whole training run."""
        settings = self.settings(config)
        ranks = gpus // settings.text_ranks  # data parallel ranks
        packs_per_step = self.packs_per_step(config, gpus)
        micro_batches = accumulation_steps(packs_per_step, 1, ranks)
        packs = self.packs(config, packs_per_step)
        step = [packs.sampled[i % len(packs.sampled)] for i in range(micro_batches)]
        accumulates = not self._has_global_batch(config)
        found = estimate_step(self.model(config), packs.largest, step, settings, accumulates)
        tokens = found["tokens_per_step"] * packs_per_step // micro_batches
        steps = _total_steps(config.loop, packs.steps_per_epoch)
        return {
            "config": self.what,
            "gpus": gpus,
            "packs": packs.text,
            "auto": self.choice and {**self.choice.values, "reason": self.choice.reason},
            **found,
            "tokens_per_step": tokens,
            "tokens_per_s": tokens / found["step_s"],
            "mfu": found["mfu"] * packs_per_step / (micro_batches * ranks),  # some ranks may wait
            "idle_ranks": max(0, ranks - packs_per_step),
            "steps": steps,
            "eta_s": steps and steps * found["step_s"],
        }

    def peak_gib(self, config: Any, gpus: int) -> float:
        """Peak memory alone, which is what a search for a fitting config needs."""
        return sum(self._training_memory(config, gpus).values())

    def _training_memory(self, config: Any, gpus: int) -> dict[str, float]:
        """GiB by kind at the peak of an update."""
        packs_per_step = self.packs_per_step(config, gpus)
        costs = BlockCosts(self.model(config), self.settings(config))
        micro_batches = accumulation_steps(packs_per_step, 1, gpus // costs.settings.text_ranks)
        micro_batches += not self._has_global_batch(config)
        found = peak_memory(costs, self.packs(config, packs_per_step).largest, micro_batches)
        return {name: size / GIB for name, size in found.items()}

    def _has_global_batch(self, config: Any) -> bool:
        """Without one, a training may have any number of micro-batches per step."""
        return self.data(config).global_batch_packs(config.data.global_batch_size) is not None

    def settings(self, config: Any) -> EstimateSettings:
        return settings_of(config, self.parallel(config), self.gpu)

    def model(self, config: Any) -> PackedModel:
        lora = getattr(config, "lora", None)
        key = f"{lora!r} {config.model.quantize}"
        if key not in self._models:
            self._models[key] = meta_model(config, self.settings(config))
        return self._models[key]

    def data(self, config: Any) -> MLLMData:
        return getattr(config, self.section)

    def packs_per_step(self, config: Any, gpus: int) -> int:
        packs = self.data(config).global_batch_packs(config.data.global_batch_size)
        parallel = config.parallel
        sequence_ranks = parallel.context * parallel.ulysses
        ranks = gpus // (parallel.pipeline * sequence_ranks * parallel.tensor)
        return packs or config.data.micro_batch_size * ranks

    def packs(self, config: Any, packs_per_step: int) -> Packs:
        data = self.data(config)
        if self.is_assumed:
            packs_per_step = 0  # makes no difference
        key = (data.pack_tokens, packs_per_step)
        if key not in self._packs:
            if self.is_assumed:
                self._packs[key] = self._assumed_packs(config, data)
            else:
                kit = config_data_kit(self.engine_class, config)
                self._packs[key] = DataPacks(kit, packs_per_step)
        return self._packs[key]

    def _assumed_packs(self, config: Any, data: MLLMData) -> Packs:
        model = self.model(config)
        if isinstance(model, ActionModel):
            return assumed_action_packs(model, data.pack_tokens, num_draws(config))
        if isinstance(model, SPEAKING):
            return assumed_speech_packs(model, data.pack_tokens)
        return assumed_packs(model.hf.config, data, self.media_share)


def num_draws(config: Any) -> int:
    """Noise draws per sample of an action model."""
    return config.actions.draws if hasattr(config, "actions") else 1


def _gpu_of_machine() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "H200"


def compose_question(question: Question) -> tuple[Composed, bool]:
    """The config, and whether its packs are assumed: it names no data, or the user gives the tokens."""
    file: str | Path = question.what
    words = list(question.overrides)
    if _is_model(question.what):
        file = MODEL_CONFIG
        words.insert(0, f"model.path={question.what}")
        model_config = read_config(question.what, {})
        if hasattr(model_config, "max_action_dim"):
            words.insert(0, "model.type=action_model")
        elif model_config.model_type == "csm":
            words.insert(0, "model.type=omni_model")
    try:
        return compose(file, words), question.tokens is not None
    except MissingKeys as error:
        of_data = [key for key in error.keys if ".sources." in key or key == "processor"]
        others = [key for key in error.keys if key not in of_data]
        if others:
            raise MissingKeys(Path(file), others) from None
        return compose(file, [*words, *(f"{key}=assumed" for key in of_data)]), True


def _is_model(what: str) -> bool:
    """A folder, or a Hub id such as org/name; everything else is a config, which may be misspelt."""
    path = Path(what).expanduser()
    if path.is_dir() or path.suffix in (".yaml", ".yml"):
        return path.is_dir()
    return hub_model(what) is not None and not shipped_configs(path.parts[0])


def _replica_size(parallel: Any) -> int:
    """The GPUs of one replica of the model, or of all replicas where their number is set."""
    sequence_ranks = parallel.context * parallel.ulysses
    replica = parallel.pipeline * parallel.shard * sequence_ranks * parallel.tensor
    return replica * max(1, parallel.replicate)


def _check_gpus(gpus: int, parallel: Any) -> None:
    size = _replica_size(parallel)
    if parallel.replicate == -1:
        fits = gpus > 0 and gpus % size == 0
        needed = f"a multiple of {size}"
    else:
        fits = gpus == size
        needed = f"{size}"
    if not fits:
        raise UserError(
            f"--gpus {gpus}: the parallel layout of the config needs {needed}. parallel.replicate=-1 fits any number "
            "of replicas"
        )


def _total_steps(loop: Any, steps_per_epoch: int | None) -> int | None:
    """The steps of the training run; None if its length is not known."""
    limits = [loop.total_steps]
    if loop.epochs is not None and steps_per_epoch is not None:
        limits.append(loop.epochs * steps_per_epoch)
    return min((steps for steps in limits if steps), default=None)
