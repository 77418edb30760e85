"""RLEngine: an Engine that learns from rewards. One controller process drives models in worker groups.

One step: `sample` has prompts, completions and rewards, `train_step` advantages and updates; recipes override them. Run
folder, log, guard, signals, checkpoints and resume are those of every Engine; the models are in `ModelGroups`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from mvp_engine.checkpoint.manager import recover
from mvp_engine.config.schema import Config, Parallel
from mvp_engine.data import derived_seed
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import World
from mvp_engine.engine import Engine, StepContext
from mvp_engine.engine.hooks import CheckStage
from mvp_engine.engine.monitor import Meter
from mvp_engine.errors import UserError, count
from mvp_engine.hf.model.config_source import tool_schema
from mvp_engine.kit import model as model_kit
from mvp_engine.kit.data import MLLMDataKit, load_processor
from mvp_engine.kit.decoding import Decoding
from mvp_engine.kit.examples import end_training, page_figures, write_report_of
from mvp_engine.kit.rl import policy
from mvp_engine.kit.rl.chat import Answer, Chat, ChatSettings
from mvp_engine.kit.rl.check import rollout_stage
from mvp_engine.kit.rl.collector import Collector, Experience, Updates
from mvp_engine.kit.rl.episodes import Episodes, Reward, reward_metrics
from mvp_engine.kit.rl.model_groups import ModelGroups, RewardModel, check_reward_model
from mvp_engine.kit.rl.prompts import Prompt, PromptLoader, prompt_loader, prompt_settings
from mvp_engine.kit.rl.rollout import (
    PackedRollout,
    Rollout,
    Sample,
    Sampling,
    check_mean_gap,
    measure_gap,
    rollout_batch,
)
from mvp_engine.kit.rl.rollout_log import RolloutLog, rl_panels, rollout_sections, rollouts_html
from mvp_engine.kit.rl.server_rollout import server_rollout
from mvp_engine.kit.rl.settings import RLConfig
from mvp_engine.model_engine import StepNumbers, precision_on
from mvp_engine.model_engine.fsdp.parallelize import freeze
from mvp_engine.model_engine.optim import parameter_groups
from mvp_engine.report import write_report
from mvp_engine.report.facts import RunFacts
from mvp_engine.worker.launchers import WorkerDied
from mvp_engine.worker.worker import Loss

# RLMeter: a Meter that also says what the steps of an RL training spend their time on.


class RLMeter(Meter):
    evaluation_keys = "eval.samples"

    def __init__(self, world: World, folder: Path, step: int) -> None:
        super().__init__(world, folder, step)
        self.seconds: dict[str, float] = {}
        self._timed = threading.local()  # what a thread is in: rollouts may run next to an update
        # Bytes of the rank that has most: the controller itself holds no model.
        self.peak_memory = 0

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """A context whose time is logged as `<name>_s` per step, without that of contexts inside."""
        outer = getattr(self._timed, "name", None)
        self._timed.name = name
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self._timed.name = outer
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if outer is not None:
            self.seconds[outer] = self.seconds.get(outer, 0.0) - seconds

    def peak(self) -> int:
        return self.peak_memory or super().peak()

    def read(self, totals: Any, waited: float, remaining_steps: int | None) -> dict[str, float]:
        steps = max(1, self.steps)
        spent = {f"{name}_s": seconds / steps for name, seconds in self.seconds.items()}
        self.seconds = {}
        if self.peak_memory:
            spent["memory_gib"] = self.peak_memory / 2**30
        return {**super().read(totals, waited, remaining_steps), **spent}


NO_SIGNAL_STEPS = 20
RESTARTS = 2  # of the processes of a training, after one of them died
CARD_KEYS = ["rl.algorithm", "rl.prompts_per_step", "rl.num_generations", "rl.updates", "rl.clip"]
CARD_KEYS += ["rl.kl_coef", "generation.max_new_tokens", "generation.temperature"]


class RLEngine(Engine):
    config_class: type[Config] = RLConfig
    config: RLConfig
    title = "What the policy answers"
    batch_unit = "prompt"
    batch_size_keys = ("rl.prompts_per_step",)
    trains_in_process = False
    planner = "mvp_engine.kit.rl.plan:RLPlanner"  # of mvp plan
    model_engine: ModelGroups  # type: ignore[assignment]
    meter: RLMeter
    tools: Sequence[
        Callable[..., Any]
    ] = ()  # that answers may call; their docstrings are in the prompts
    _no_signal = 0  # steps in a row

    def __init__(self, config: RLConfig, world: Any, *args: Any, **kwargs: Any) -> None:
        if world.size > 1:
            raise UserError(
                f"RL has one controller, and {world.size} ranks were started. Leave out --nproc; the ranks of the "
                f"model are workers.where=spawn groups.actor.ranks={world.size}"
            )
        if config.data.new_tokens:
            raise UserError(
                "data.new_tokens: RL samples from a model that knows its tokens. Fine-tune it with them first, and "
                "start from that export"
            )
        # What "auto" means for the models. The controller itself computes on a GPU only if the models are with it.
        self.precision = precision_on(world.device, config.train.precision)
        self.model_device = world.device
        completions = count(config.rl.num_generations, "completion")
        updates = count(config.rl.updates, "optimizer step")
        self.batch_division = f"with {completions} each, in {updates}"
        if config.workers.where != "local":
            world = replace(world, device=torch.device("cpu"))
        super().__init__(config, world, *args, **kwargs)

    def reward(self, row: dict[str, Any], answer: Answer) -> float | dict[str, float]:
        """The reward of a completion; `row` is the raw row of its prompt. Of several numbers, the sum is the reward.

        An engine that does not define it has the scores of `reward.model` alone.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define reward(row, answer)")

    def episode(self, row: dict[str, Any], chat: Chat) -> float | dict[str, float]:
        """One conversation of the policy, and its reward: by default one answer, after those that call `tools`.

        It runs in a process of its own, which has what this engine had before its models were built.
        """
        answer = chat.answer()
        while self.tools and answer.calls:
            answer = chat.call(answer, self.tools)
        return self.reward(row, answer)

    @classmethod
    def has_turns(cls) -> bool:
        """Whether an episode is more than one answer."""
        return cls.episode is not RLEngine.episode or bool(cls.tools)

    @property
    def parallel(self) -> Parallel:
        return self.config.groups.actor.parallel.with_timeout(self.config.parallel.timeout)

    # ---- What commands ask ----------------------------------------------------------------------------------------

    def describe_layout(self) -> str:
        return f"{self.config.groups.actor.ranks or 1} x {self.model_device.type}"

    def describe_training(self) -> dict[str, Any]:
        method = f"reinforcement learning ({self.config.rl.algorithm}; {{how}})"
        return {"method": method, "headline": "reward", "keys": CARD_KEYS}

    @property
    def samples_per_step(self) -> float | None:
        return self.global_batch_size * self.config.rl.num_generations

    def check_stages(self) -> Mapping[str, CheckStage]:
        return {"rollouts": partial(rollout_stage, self)}

    @classmethod
    def check_command(cls, config: RLConfig, command: str, run: Path | None, step: int) -> None:
        where = config.workers.where
        if command == "replay":
            raise UserError(
                f"mvp check: {run} is an RL run, whose models are in other processes. The prompts of step {step} "
                "are in skipped_steps.jsonl, some of its completions in rollouts.jsonl"
            )
        if where != "local" or run is not None:
            raise UserError(
                f"mvp profile measures its own process, and workers.where={where} has the models in others: set "
                "workers.where=local and leave out groups.actor.ranks; and steps of an RL run (--step) cannot be "
                "repeated"
            )

    # ---- Parts ----------------------------------------------------------------------------------------------------

    def prepare_model(self) -> nn.Module:
        """Of the controller, on the meta device: its parts, for logs and reports."""
        return model_kit.MLLMModelKit(self.config.lora).of_engine(self)

    def start_models(self, models: ModelGroups) -> None:
        """Start the worker group of each role. An evaluation has the actor and the reward model alone."""
        config = models.config
        models.start_actor()
        if config.rl.preset.has_critic:
            models.start_critic(config.rl.critic_lr)
        if config.rl.kl_coef:
            models.start_copy("reference")
        models.start_copy("rollout")
        if config.reward.model is not None:
            models.start_reward_model(config.reward.model)

    @classmethod
    def make_processor(cls, config: RLConfig) -> Any:
        """The processor or tokenizer. A recipe with synthetic data may build the data here."""
        return load_processor(config.processor or config.model.path)

    @classmethod
    def data_kit(cls, config: RLConfig) -> MLLMDataKit:
        """The data kit; `mvp data inspect` and `mvp check` use it too."""
        data = prompt_settings(config.data, config.generation.max_new_tokens)
        config = config.model_copy(update={"data": data})
        kit = MLLMDataKit.of(config, cls.make_processor)
        kit.row_encoder.tools = tuple(map(tool_schema, cls.tools))
        return kit

    @cached_property
    def data(self) -> MLLMDataKit:
        return self.data_kit(self.config)

    @property
    def tokenizer(self) -> Any:
        return getattr(self.data.processor, "tokenizer", self.data.processor)

    @property
    def global_batch_size(self) -> int:
        """Prompts in one step."""
        return self.config.rl.prompts_per_step

    def prepare_dataloader(self, split: str) -> PromptLoader:
        prompts, seed = self.config.rl.prompts_per_step, self.config.seed
        return prompt_loader(self.data, split, prompts=prompts, seed=seed, folder=self.run.dir)

    def prepare_rollout(self) -> Rollout:
        """The sampler that `generation.backend` names."""
        settings = self.config.generation
        if settings.backend == "packed":
            group = self.model_engine.rollout or self.model_engine.actor
            return PackedRollout(group, budget=self.config.budget)
        banned: Any = self.model.placeholders
        wait = self.config.parallel.timeout
        return server_rollout(settings, folder=self.run.dir, wait_seconds=wait, banned=banned)

    def _build_model_engine(self) -> ModelGroups:  # type: ignore[override]
        self.model = self.prepare_model()
        freeze(self.model, self.config.model.freeze)
        files, device, start = self.run.dir / "processor", self.model_device, self.start_models
        steps = self.total_steps
        groups = ModelGroups(self.config, self.precision, steps, files, device, start)
        if self._training:
            groups.param_groups = parameter_groups(self.model, self.config.optim)
        return self._closing.enter_context(closing(groups))

    def _open_episodes(self) -> None:
        """Before the models: the processes of episodes are forked from this one."""
        settings = self.config.reward
        chat = None
        play: Any = self.reward
        if self.has_turns():
            play = self.episode
            chat = ChatSettings.of(self.config, self.data)
            chat.check(has_tools=bool(self.tools))
        elif type(self).reward is RLEngine.reward:
            play = None
        if settings.model is not None:
            check_reward_model(settings.model, self.tokenizer)
        elif play is None:
            raise UserError(
                f"{type(self).__name__} has no reward: define reward(self, row, answer) or episode(self, row, chat), "
                "or set reward.model"
            )
        episodes = Episodes(play, self.tokenizer, settings, self.config.seed, chat)
        self.episodes = self._closing.enter_context(closing(episodes))
        self.rollout_log = RolloutLog(self.run.dir, self.tokenizer)

    def _connect_reward_model(self) -> None:
        if self.model_engine.reward is not None:
            self.episodes.model = RewardModel(self.model_engine.reward, self.config.budget)

    def eval_weights(self) -> AbstractContextManager[None]:
        return nullcontext()

    # ---- Training -------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train; after the death of a worker with new processes, from the newest checkpoint."""
        for restart in range(RESTARTS + 1):
            try:
                super().train()
                return
            except WorkerDied as error:
                if restart == RESTARTS:
                    raise
                self.logger.error("%s", error)
                self._reset(f"restart {restart + 1} of {RESTARTS}")

    def _reset(self, what: str) -> None:
        """Close everything and return to the state of a launch that resumes this run."""
        self._closing.close()
        recover(self.run.checkpoints)
        found = self.run.checkpoint_list()
        checkpoint = found[-1] if found else self.checkpoint
        start = checkpoint.name if checkpoint else "the start: there is no checkpoint yet"
        greeting = f"{what}: continuing {self.run.dir} from {start}"
        Engine.__init__(self, self.config, self.world, self.run, checkpoint, greeting)

    def start_data(self) -> None:
        self._closing.callback(self.data.stop_measuring)
        self.data.measure_ahead(["train", "eval"] if self.config.eval.steps else ["train"])
        model_kit.prepare_kernels(self.device, self.config.model)
        if self.config.eval.steps:
            self._eval_loader = self._loader("eval")  # its errors come now, not after hours
        self.open_data()  # the workers' schedules need the number of steps

    def before_train(self) -> None:
        model_kit.export_link(self.config.export_link)
        policy.PolicyLoss.of(self.config)  # refuses options that contradict each other
        self._open_episodes()
        super().before_train()
        self._connect_reward_model()
        self.meter = RLMeter(self.world, self.run.dir, self.step)
        self.rollout_log.rewind(self.step)
        self.rollout = self._closing.enter_context(closing(self.prepare_rollout()))
        apart = self.config.generation.backend != "packed" or self.model_engine.samples_apart
        collector = Collector(self.config, self.feed, self._collect, apart=apart)
        self.collector = self._closing.enter_context(closing(collector))
        self.collector.load_state_dict(self.model_engine.restored_pending)
        self.model_engine.pending_state = self.collector.state_dict

    def _open_checkpoints(self) -> None:
        super()._open_checkpoints()
        self.checkpoints.write_more = self.model_engine.write_models

    def do_train(self) -> None:
        while not self.done:
            self.hang.beat(self.step + 1)
            self.meter.begin(self.step + 1, "rollouts")
            is_last = self.total_steps is not None and self.step + 1 >= self.total_steps
            experience = self.collector.next(self._sync_weights, is_last)
            if experience is None:
                self.epoch = self.feed.epoch
                break
            self.epoch = experience.epoch
            ctx = StepContext(self.step + 1, self.epoch, "train", self.metrics)
            self.guard.watch(ctx.step, experience.place)
            self.meter.step(len(experience.samples))
            self.metrics.begin_step()
            self.rollout_log.write(ctx.step, "train", experience)
            _log_all(ctx, experience.metrics)
            self._watch_signal(experience)
            self.meter.mark("update")
            updates = Updates()
            with self.phase("update"):
                if experience.trainable():
                    updates = self.train_step(ctx, experience)
            is_measured = any("old_log_probs" in batch.token_fields for batch in ctx.micro_batches)
            if experience.is_of(self.step) and not is_measured:
                check_mean_gap(updates.metrics().get("gap"), self.config.generation.max_gap)
            peaks = [one.peak_memory for one in updates.actor + updates.critic]
            self.meter.peak_memory = max([self.meter.peak_memory, *peaks])
            self.model_engine.add_status(updates.actor, updates.critic)
            _log_all(ctx, updates.metrics())
            ctx.numbers = _step_numbers(updates)
            self.step = ctx.step
            self.meter.mark("train_post_step")
            self.train_post_step(ctx)
            self._after_step(ctx, ctx.numbers)

    def _watch_signal(self, experience: Experience) -> None:
        """Warn once of many steps in a row from which nothing was learnt."""
        self._no_signal = 0 if experience.prompts_with_signal() else self._no_signal + 1
        if self._no_signal == NO_SIGNAL_STEPS and self.config.rl.preset.has_groups:
            self.logger.warning(
                f"in the last {NO_SIGNAL_STEPS} steps all completions of each prompt had the same reward, so nothing "
                "was learnt: is the task too hard or too easy for this policy, or the reward wrong? rollouts.jsonl has "
                "completions with their rewards"
            )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of a step, whose time is `perf.NAME_s`; the report of a hang counts from its begin."""
        self.hang.beat(self.step + 1, f"{name} of step")
        with self.meter.timed(name):
            yield

    # ---- One step ---------------------------------------------------------------------------------------------------

    def sample(self, prompts: list[Prompt]) -> Experience:
        """Episodes of prompts, and their rewards."""
        with self.phase("reward"):  # which `generate` interrupts
            samples, rewards = self.episodes.play(prompts, self.sampling.samples, self.generate)
        return Experience(prompts, samples, rewards)

    def generate(self, prompts: list[Prompt], number: int) -> list[Sample]:
        """So many completions of each prompt, or of each conversation so far."""
        with self.phase("generate"):
            return self.rollout.generate(prompts, replace(self.sampling, samples=number))

    @property
    def rewards(self) -> Callable[[Sequence[Prompt], Sequence[Sample]], list[Reward]]:
        """The rewards of completions, of an engine without turns."""
        return self.episodes.rewards

    def train_step(self, ctx: StepContext, experience: Experience) -> Updates:
        """Advantages of the completions, and the updates of the models."""
        batch = self.prepare_batch(ctx, experience)
        rl, fields = self.config.rl, batch.token_fields
        options: Any = {"kl": rl.kl_coef, "lam": rl.gae_lambda}
        if rl.kl_coef and rl.preset.kl_in_reward:
            old_T, reference_T = policy.old_log_probs(batch), fields["reference_log_probs"]
            options["kl_T"] = policy.kl_penalty(old_T, reference_T, "k1")
        rewards_S, groups_S = batch.sequence_fields["reward"], batch.sequence_fields["group"]
        options["values_T"] = fields.get("old_values")
        fields |= policy.advantage_fields(rl.preset, batch, rewards_S, groups_S, **options)
        loss = policy.PolicyLoss.of(self.config, self.ratio_to(experience))
        return self.update(ctx, batch, loss, policy.ValueLoss(clip=rl.value_clip))

    def prepare_batch(self, ctx: StepContext, experience: Experience) -> PackedBatch:
        """A packed sequence for each completion with a reward, and what the models say of its tokens, before updates.

        Sequence fields: `reward` and `group`, which is the index of the prompt. Token fields: `sampler_log_probs`;
        `old_log_probs` by the actor, unless the update has them itself; `reference_log_probs` if `start_models` started
        a reference; `old_values` of a critic.
        """
        rl, models = self.config.rl, self.model_engine
        chosen = experience.trainable()
        samples = [experience.samples[i] for i in chosen]
        batch = rollout_batch(experience.prompts, samples)
        rewards = []
        for i, sample in zip(chosen, samples, strict=True):  # each sequence has that of its episode
            rewards += [experience.rewards[i].value] * len(sample.sequences())
        batch.sequence_fields["reward"] = torch.tensor(rewards, dtype=torch.float64)
        fields = batch.token_fields
        on_policy = experience.is_of(self.step)
        if self._needs_old_log_probs(ctx.step, on_policy):
            fields["old_log_probs"] = models.log_probs(batch)
            gap = measure_gap(batch, fields["old_log_probs"], experience.prompts, samples)
            # The policy has moved since older weights sampled: no limit says what is too far.
            gap.check(self.config.generation.max_gap if on_policy else None, self.tokenizer)
            _log_all(ctx, gap.metrics())
        if rl.kl_coef or models.has_reference:
            fields["reference_log_probs"] = models.reference_log_probs(batch)
        if models.critic is not None:
            found = models.critic.infer(batch, ["values"], budget=self.config.budget)
            fields["old_values"] = found["values"].float()
        return batch

    def _needs_old_log_probs(self, step: int, on_policy: bool) -> bool:
        """Whether step `step` needs old log-probs of the actor, which also give the gap.

        A single update is made by the policy that sampled: it has the old log-probs itself.
        """
        rl = self.config.rl
        if not on_policy or rl.max_importance is not None:
            return rl.max_importance is not None
        is_due = step == 1 or step % self.config.generation.gap_interval == 0
        return is_due or rl.updates > 1 or bool(rl.kl_coef and rl.preset.kl_in_reward)

    def ratio_to(self, experience: Experience) -> Literal["old", "sampler"]:
        """Whose probabilities the ratio of the loss divides by.

        `old`: those of the actor before the step. `sampler`: of older weights, without importance weights.
        """
        is_old = experience.is_of(self.step) or self.config.rl.max_importance is not None
        return "old" if is_old else "sampler"

    def update(
        self,
        ctx: StepContext,
        batch: PackedBatch,
        policy_loss: Loss,
        value_loss: Loss | None = None,
    ) -> Updates:
        """`rl.updates` optimizer steps of critic and actor, after `train_pre_step`, where the batch is the micro-batch.

        A critic, if there is one, needs `value_loss`.
        A loss runs in the processes of its model: a function at the top of a module or a static method, perhaps with a
        `functools.partial`, or a frozen dataclass.
        """
        ctx.micro_batches = [batch]
        ctx.count("tokens", batch.num_tokens)
        self.meter.mark("train_pre_step")
        self.train_pre_step(ctx)
        self.meter.mark("update")
        batch = ctx.micro_batches[0]
        rl, models = self.config.rl, self.model_engine
        options: Any = {"budget": self.config.budget, "cuts": rl.updates, "together": "group"}
        updates = Updates()
        if models.critic is not None and value_loss is not None:
            updates.critic.extend(models.critic.update(batch, value_loss, **options))
        if ctx.step > rl.critic_warmup or models.critic is None:
            updates.actor.extend(models.actor.update(batch, policy_loss, **options))
        if "old_log_probs" not in batch.token_fields:
            for numbers in updates.actor[1:]:  # the first one alone has the policy before the step
                numbers.metrics.pop("gap", None)
        return updates

    # ---- Rollouts -------------------------------------------------------------------------------------------------

    def _sync_weights(self) -> None:
        """The rollout samples with the weights of this step from now on."""
        actor = self.model_engine.actor
        weights = None  # the actor itself generates
        if self.config.generation.backend != "packed":
            between_gpus = self.config.generation.sync in ("ipc", "nccl")
            weights = actor.weights(on_device=between_gpus)
        elif self.model_engine.rollout is not None:
            weights = actor.weights(dtype=torch.float32)  # exact
        with self.phase("sync"):
            self.rollout.sync(weights, self.step)

    @property
    def sampling(self) -> Sampling:
        """How completions of a training are sampled."""
        settings = self.config.generation
        seed = derived_seed(self.config.seed, "rollout")
        stop, samples = tuple(self.data.eos_token_ids), self.config.rl.num_generations
        return Sampling(
            settings.max_new_tokens, stop, settings.temperature, samples=samples, seed=seed
        )

    def _collect(self, prompts: list[Prompt]) -> Experience:
        """What `sample` returns, with the metrics of its rewards and completions."""
        made = self.sample(prompts)
        made.metrics |= _metrics(made)
        if self.config.rl.preset.has_groups:
            made.log("with_signal", len(made.prompts_with_signal()), len(prompts))
        return made

    # ---- Evaluation -----------------------------------------------------------------------------------------------

    def before_evaluate(self) -> None:
        self._open_episodes()
        super().before_evaluate()
        self._connect_reward_model()

    def _evaluate(self) -> dict[str, float | None]:
        prompts = list(chain.from_iterable(self._eval_batches()))
        if not prompts:
            raise UserError("there are no held-out prompts: give a source split: eval")
        ctx = StepContext(self.step, self.epoch, "eval", self._metric_store(skip_nonfinite=False))
        made = self.eval_sample(prompts)
        _log_all(ctx, made.metrics | _metrics(made))
        _log_all(ctx, pass_metrics(made.samples, made.rewards))
        self.eval_end(ctx)
        if self._training or not self.rollout_log.has(self.step, "eval"):
            self.rollout_log.write(self.step, "eval", made)
        means, _ = ctx.metrics.reduce()
        self.hub.metrics({"step": ctx.step, "epoch": ctx.epoch, "split": "eval", **means})
        return means

    def eval_sample(self, prompts: list[Prompt]) -> Experience:
        """Completions of all held-out prompts by the actor, and their rewards."""
        number = self.config.eval.samples
        samples, rewards = self.episodes.play(prompts, number, self.complete)
        return Experience(prompts, samples, rewards)

    def complete(self, prompts: list[Prompt], number: int | None = None) -> list[Sample]:
        """Completions by the actor; unlike rollouts they may be greedy."""
        settings, length = self.config.eval, self.config.generation.max_new_tokens
        temperature = self.config.generation.temperature if settings.samples > 1 else 0.0
        number = number or settings.samples
        seed, budget = derived_seed(self.config.seed, "evaluation"), self.config.budget
        decoding = Decoding(length, self.data.eos_token_ids, temperature)
        decoding = replace(decoding, samples=number, seed=seed, budget=budget)
        packed = PackedBatch.concat([prompt.batch for prompt in prompts])
        keys = [prompt.key for prompt in prompts]
        completions = self.model_engine.actor.generate(packed, decoding, keys)
        return [Sample.of(completion, self.step) for completion in completions]

    def after_train(self) -> None:
        super().after_train()
        end_training(self, ())

    def export(self) -> Path:
        """Write a Hugging Face folder of the actor's weights; adapters are merged."""
        return model_kit.export_folder(self)

    def report(self) -> None:
        """Evaluate a checkpoint, export it, and write a page with curves and rollouts."""
        write_report_of(self, tuple)

    def write_page(self, figures: Any, answers: Any, export: Path | None) -> None:
        """Write `report.html` into the run folder: curves of rewards and of the policy, rollouts."""
        if figures is not None and not figures.get("reward_errors"):
            figures = {name: value for name, value in figures.items() if name != "reward_errors"}
        write_report(
            self.run.dir / "report.html",
            self.run,
            title=self.title,
            subtitle=f"{self.run.id}, step {self.step}",
            figures=None if figures is None else page_figures(self.model, figures),
            panels=rl_panels(RunFacts(self.run)),
            sections=rollouts_html(rollout_sections(self.run.dir, self.data)),
            config=self.config.to_yaml(),
        )
        self.logger.info("report: %s", self.run.dir / "report.html")


def _log_all(ctx: StepContext, metrics: Mapping[str, tuple[float, float]]) -> None:
    for name, (value, weight) in metrics.items():
        ctx.log(name, value, weight)


def _metrics(made: Experience) -> dict[str, tuple[float, float]]:
    """Of rewards; the mean numbers of sampled tokens and turns, the share of samples that ended with a stop token."""
    sequences = [one for sample in made.samples for one in sample.sequences()]
    tokens = sum(end - start for one in sequences for start, end in one.written())
    finished = sum(sample.reason == "stop" for sample in made.samples)
    total = len(made.samples)
    found = {"length": (tokens, total), "finished": (finished, total)}
    if turns := sum(len(one.turns) for one in sequences):
        found["turns"] = (turns, total)
    return reward_metrics(made.rewards) | found


def _step_numbers(updates: Updates) -> StepNumbers:
    """The updates of a step as one; a step in which the actor was not updated has the weight 0."""
    weight = sum(one.weight for one in updates.actor)
    loss_sum = sum(one.weight * (one.loss or 0.0) for one in updates.actor)
    norms = [one.grad_norm for one in updates.actor]
    values = [loss_sum, weight, sum(norms) / max(1, len(norms))]
    loss, loss_weight, norm = torch.tensor(values, dtype=torch.float64).unbind()
    return StepNumbers(loss, loss_weight, norm)


# pass@k: the probability that at least one of k completions of a prompt is right, from n >= k of them.


def pass_at_k(total: int, right: int, k: int) -> float:
    """The unbiased estimate from `total` completions, of which `right` are right (Chen et al., 2021)."""
    return 1.0 - math.comb(total - right, k) / math.comb(total, k)


def pass_metrics(
    samples: Sequence[Sample], rewards: Sequence[Reward], right_from: float = 1.0
) -> dict[str, tuple[float, float]]:
    """pass@1, pass@2, pass@4, ... up to the completions of each prompt, as (sum, prompts).

    A completion is right if its reward is `right_from` or more. One without a reward is left out, as it is of the mean
    reward: pass@k is the mean over the prompts with at least k rewards.
    """
    completions = Counter(sample.prompt for sample in samples)
    judged: dict[int, list[bool]] = {}
    for sample, reward in zip(samples, rewards, strict=True):
        if reward.value is not None:
            judged.setdefault(sample.prompt, []).append(reward.value >= right_from)
    fewest = min(completions.values(), default=0)
    found = {}
    for k in sorted({*(2**i for i in range(fewest.bit_length())), fewest} - {0}):
        groups = [group for group in judged.values() if len(group) >= k]
        if groups:
            total = sum(pass_at_k(len(group), sum(group), k) for group in groups)
            found[f"pass@{k}"] = (total, float(len(groups)))
    return found
