"""`mvp plan` of an RL config: the actor's ranks, with generation, log-probs, reference, teachers and critic.

A step is estimated with completions of `generation.max_new_tokens`. Generation reads all weights once for each new
token of the prompts that are completed together; that of a server is not counted.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from itertools import islice
from statistics import mean
from typing import Any

import numpy as np

from mvp_engine.errors import UserError, count
from mvp_engine.hf.model.config_source import num_heads
from mvp_engine.hf.model.language_model import LanguageModel
from mvp_engine.kit.plan.costs import PlanSettings, facts_of
from mvp_engine.kit.plan.hardware import FITS, GIB, gpu_by_name
from mvp_engine.kit.plan.packs import Packs, assumed_packs
from mvp_engine.kit.plan.planner import Planner
from mvp_engine.kit.plan.step import BANDWIDTH_EFFICIENCY, DYNAMIC, REST
from mvp_engine.kit.rl.prompts import Prompt, prompt_loader
from mvp_engine.kit.rl.rollout import Sample, rollout_batch

UPDATE = ("GEMM", "attention", "memory traffic")
STATIC = ("weights", "gradients", "optimizer states")
SAMPLED_PROMPTS = 64


class RLPlanner(Planner):
    """A Planner of the actor's ranks; groups on other processes are not counted."""

    layout = "groups.actor.parallel"
    has_global_batch = False

    def parallel(self, config: Any) -> Any:
        return config.groups.actor.parallel

    def rank_values(self, gpus: int) -> dict[str, Any]:
        if gpus == (self.config.groups.actor.ranks or 1):
            return {}
        return {"workers.where": "spawn", "groups.actor.ranks": gpus}

    @property
    def default_gpus(self) -> int:
        return self.config.groups.actor.ranks or super().default_gpus

    def settings(self, config: Any) -> PlanSettings:
        if self.parallel(config).pipeline > 1:
            raise UserError(
                "mvp plan of an RL config does not know groups.actor.parallel.pipeline > 1: plan with "
                "pipeline=1 and as many more shards, whose ranks hold as many weights"
            )
        reference, teacher = config.groups.reference, config.groups.teacher
        is_copy = config.rl.has_reference and (reference is not None or config.lora is None)
        here = reference is None or reference.shares_actor
        teachers = config.rl.teacher_paths if teacher is None or teacher.shares_actor else ()
        settings = super().settings(config)
        return replace(settings, reference_copy=is_copy and here, teachers=tuple(teachers))

    # ---- Rollouts -------------------------------------------------------------------------------------------------

    @cached_property
    def prompt_tokens(self) -> np.ndarray:
        """Tokens of each prompt; without data, as many as a completion has."""
        if self.is_assumed:
            return np.array([self.config.generation.max_new_tokens])
        _, costs = self.data_kit(self.config).measured("train")
        tokens = np.concatenate([cost.tokens for cost in costs])
        return tokens[tokens > 0]

    def _tokens_per_step(self, config: Any) -> float:
        length = float(self.prompt_tokens.mean()) + config.generation.max_new_tokens
        return float(config.rl.prompts_per_step * config.rl.num_generations * length)

    def packs_per_step(self, config: Any, gpus: int) -> int:
        return math.ceil(self._tokens_per_step(config) / self.data(config).tokens_per_pack)

    def packs(self, config: Any, packs_per_step: int) -> Packs:
        data = self.data(config)
        key = (data.tokens_per_pack, 0)
        if key not in self._packs:
            if self.is_assumed:
                rows = {"max_length": 2 * config.generation.max_new_tokens}
                data = data.model_copy(update=rows)
                facts = facts_of(self.model(config), config)
                share = self.question.media_share
                packs = assumed_packs(facts, data, data.tokens_per_pack, share)
            else:
                packs = _rollout_packs(self.data_kit(config), config)
            self._packs[key] = packs
        return self._packs[key]

    # ---- A step ---------------------------------------------------------------------------------------------------

    def estimate(self, config: Any, gpus: int) -> dict[str, Any]:
        facts = super().estimate(config, gpus)
        memory = self._memory(config, gpus, facts["memory_gib"])
        # The packs of a step need not be full: a step is so much of them.
        tokens = self._tokens_per_step(config)
        share = min(1.0, tokens / facts["tokens_per_step"])
        update = {name: share * facts["seconds"][name] for name in UPDATE}
        seconds = {**facts["seconds"], **update}
        seconds |= self._more_seconds(config, gpus, seconds)
        before = facts["step_s"]
        extra = REST * (sum(seconds.values()) - sum(facts["seconds"].values()))
        step_s = before + extra
        peak = sum(memory.values())
        steps = facts["steps"]
        return {
            **facts,
            "memory_gib": memory,
            "peak_gib": peak,
            "fits": peak * GIB < FITS * gpu_by_name(self.gpu).memory,
            "seconds": seconds,
            "step_s": step_s,
            "tokens_per_step": round(tokens),
            "tokens_per_s": tokens / step_s,
            "mfu": facts["mfu"] * share * before / step_s,
            "eta_s": steps and steps * step_s,
        }

    def peak_gib(self, config: Any, gpus: int) -> float:
        return sum(self._memory(config, gpus, self._training_memory(config, gpus)).values())

    def simulate(self, facts: dict[str, Any]) -> dict[str, Any]:
        raise UserError(
            "a simulation is for trainings; of an RL config, plan the training of its actor: the same model and "
            "parallel sizes in a config of sft"
        )

    def _memory(self, config: Any, gpus: int, memory: dict[str, float]) -> dict[str, float]:
        """With a critic on the same ranks; the KV cache in place of activations, where it is larger."""
        memory = dict(memory)
        critic = config.groups.critic
        if config.rl.preset.has_critic and critic.shares_actor:
            memory["critic"] = sum(memory[name] for name in STATIC)
        if config.generation.backend != "packed":
            return memory
        cache = self._cache_bytes(config, gpus) / GIB
        if cache > sum(memory[name] for name in DYNAMIC):
            memory = {name: size for name, size in memory.items() if name not in DYNAMIC}
            memory["KV cache"] = cache
        return memory

    def _more_seconds(self, config: Any, gpus: int, seconds: dict[str, float]) -> dict[str, float]:
        """What a step does besides the actor's update: forwards for log-probs, critic, generation."""
        update = sum(seconds[name] for name in UPDATE)
        forward = update / 3  # forward and backward are three parts of work
        optimizer = seconds["optimizer"] * config.rl.updates
        more = {"optimizer": optimizer, "log-probs": forward * (1 + config.rl.has_reference)}
        if paths := self.settings(config).teachers:  # each reads the rows of its sources
            own = sum(p.numel() for p in self.model(config).parameters())
            sizes = [
                sum(p.numel() for p in LanguageModel.on_meta(path).parameters()) for path in paths
            ]
            more["teacher"] = forward * mean(sizes) / own
        if config.rl.preset.has_critic and config.groups.critic.shares_actor:
            more["critic"] = forward + update + optimizer
        if config.generation.backend == "packed" and config.groups.rollout is None:
            more["generation"] = self._generation_seconds(config, gpus)
        return more

    def _together(self, config: Any, gpus: int) -> tuple[int, int]:
        """Prompts that a data-parallel rank completes at a time, and how often it does so in a step."""
        ranks = max(1, gpus // self.settings(config).text_ranks)
        prompts = math.ceil(config.rl.prompts_per_step / ranks)
        budget = self.data(config).tokens_per_pack
        at_a_time = min(prompts, max(1, int(budget // self.prompt_tokens.mean())))
        return at_a_time, math.ceil(prompts / at_a_time)

    def _cache_bytes(self, config: Any, gpus: int) -> float:
        """The KV cache of the prompts that are completed together."""
        model: Any = self.model(config)
        text = model.hf.config.get_text_config()
        heads, kv_heads = num_heads(text)
        head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
        settings = self.settings(config)
        token = 2 * text.num_hidden_layers * kv_heads * head_size * settings.compute_bytes
        at_a_time, _ = self._together(config, gpus)
        length = float(self.prompt_tokens.mean()) + config.generation.max_new_tokens
        return at_a_time * config.rl.num_generations * length * token / settings.tensor

    def _generation_seconds(self, config: Any, gpus: int) -> float:
        settings = self.settings(config)
        weights = sum(p.numel() for p in self.model(config).parameters()) * settings.compute_bytes
        _, times = self._together(config, gpus)
        read = weights / settings.tensor + self._cache_bytes(config, gpus) / 2
        gpu = gpu_by_name(self.gpu)
        return (
            times
            * config.generation.max_new_tokens
            * read
            / (BANDWIDTH_EFFICIENCY * gpu.bytes_per_s)
        )


def _rollout_packs(kit: Any, config: Any) -> Packs:
    """Full packs of rollouts of the data: of some prompts, and of the longest one."""
    loader = prompt_loader(kit, "train", prompts=SAMPLED_PROMPTS)
    prompts: list[Prompt] = next(iter(loader))
    dataset = loader.dataset
    samples = dataset.first[dataset.rows[:, 0]] + dataset.rows[:, 1]
    tokens = np.concatenate([cost.tokens for cost in kit.measured("train")[1]])
    longest = dataset[int(tokens[samples].argmax())]
    new = config.generation.max_new_tokens
    group = config.rl.num_generations
    budget = config.data.tokens_per_pack
    packs = Packs(_pack(prompts, new, group, budget), int(tokens.max()) + new, "")
    if isinstance(longest, Prompt):
        packs.largest = [*packs.largest, _pack([longest], new, group, budget)]
    packs.steps_per_epoch = math.ceil(len(dataset) / config.rl.prompts_per_step)
    mean = float(tokens[tokens > 0].mean())
    packs.text = (
        f"{count(config.rl.prompts_per_step, 'prompt')} of {mean:,.0f} tokens x {count(group, 'completion')} of "
        f"{new:,} tokens, in packs of up to {budget:,}"
    )
    return packs


def _pack(prompts: list[Prompt], new: int, group: int, budget: int) -> Any:
    """As many samples of the prompts, group by group, as one pack has room for."""

    def samples() -> Any:
        while True:
            for index in range(len(prompts)):
                for _ in range(group):
                    yield Sample(index, [0] * new, [0.0] * new, [0] * new, "length")

    length = sum(prompt.batch.num_tokens for prompt in prompts) / len(prompts) + new
    number = max(1, int(budget // length))
    return rollout_batch(prompts, list(islice(samples(), number)))
