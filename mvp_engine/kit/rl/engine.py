"""RLEngine: an Engine that learns from rewards. One controller process drives models in worker groups.

One step: `sample` has prompts, completions and rewards, `train_step` advantages and updates; recipes override them. Run
folder, log, guard, signals, checkpoints and resume are those of every Engine; the models are in `ModelGroups`.
"""

from __future__ import annotations

import threading
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
from mvp_engine.engine import Engine, StepContext
from mvp_engine.engine.hooks import CheckStage
from mvp_engine.errors import UserError, count
from mvp_engine.hf.experts.router_replay import without_routes
from mvp_engine.hf.model.config_source import tool_schema
from mvp_engine.kit import model as model_kit
from mvp_engine.kit.data import MLLMDataKit, load_processor
from mvp_engine.kit.decoding import Decoding
from mvp_engine.kit.examples import end_training, page_figures, write_report_of
from mvp_engine.kit.rl import policy
from mvp_engine.kit.rl.buffer import (
    GROUP_THREAD,
    Buffer,
    Collector,
    Experience,
    GroupThreads,
    Updates,
)
from mvp_engine.kit.rl.chat import Answer, Chat, ChatSettings
from mvp_engine.kit.rl.check import rollout_stage
from mvp_engine.kit.rl.episodes import Episodes, Reward, untimed
from mvp_engine.kit.rl.model_groups import ModelGroups, check_scorer, check_teachers
from mvp_engine.kit.rl.prompts import Prompt, PromptLoader, prompt_loader, prompt_settings
from mvp_engine.kit.rl.rollout import (
    PackedRollout,
    Rollout,
    Sample,
    Sampling,
    check_mean_gap,
    generate,
    measure_gap,
    rollout_batch,
)
from mvp_engine.kit.rl.rollout_log import (
    HASH,
    RLMeter,
    RolloutLog,
    pass_metrics,
    rl_panels,
    rollout_metrics,
    rollout_sections,
    rollouts_html,
)
from mvp_engine.kit.rl.server_rollout import check_adapters, server_rollout
from mvp_engine.kit.rl.settings import CARD_KEYS, GAP_INTERVAL, RLConfig
from mvp_engine.model_engine import precision_on
from mvp_engine.model_engine.fsdp.parallelize import freeze
from mvp_engine.model_engine.optim import parameter_groups
from mvp_engine.report import write_report
from mvp_engine.report.facts import RunFacts
from mvp_engine.worker.launchers import WorkerDied
from mvp_engine.worker.worker import Loss

NO_SIGNAL_STEPS = 20
RESTARTS = 2  # of the processes of a training, after one of them died


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
    collector: Buffer | Collector
    # Functions or methods that answers may call; their docstrings are in the prompts.
    tools: Sequence[Callable[..., Any]] = ()
    reward_columns: Sequence[str] = ()  # of rows, which `reward` reads: without one nothing starts
    gamma = 1.0  # the discount per token, of reinforce_pp and ppo
    learns_from_teachers = False  # set by an engine whose own `train_step` uses `teacher_log_probs`
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
        methods = {tool for tool in self.tools if getattr(type(self), tool.__name__, None) is tool}
        tools = [getattr(self, tool.__name__) if tool in methods else tool for tool in self.tools]
        while tools and answer.calls:
            answer = chat.call(answer, tools)
        return self.reward(row, answer) if self.judges() else 0.0

    @classmethod
    def has_turns(cls) -> bool:
        """Whether an episode is more than one answer."""
        return cls.episode is not RLEngine.episode or bool(cls.tools)

    @classmethod
    def judges(cls) -> bool:
        """Whether it has a reward of its own; others have that of a reward model, or learn from teachers."""
        return cls.episode is not RLEngine.episode or cls.reward is not RLEngine.reward

    @property
    def runs_freely(self) -> bool:
        """Whether episodes run over several steps."""
        return self.config.rl.async_steps > 1

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
        if config.rl.has_reference:
            models.start_copy("reference")
        models.start_teachers()
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
        loader = prompt_loader(self.data, split, prompts=prompts, seed=seed, folder=self.run.dir)
        return loader.with_columns(self.reward_columns)

    def prepare_rollout(self) -> Rollout:
        """The sampler that `generation.backend` names."""
        settings = self.config.generation
        if settings.backend == "packed":
            group = self.model_engine.rollout or self.model_engine.actor
            return PackedRollout(group, budget=self.config.budget)
        if settings.sync.startswith("adapter"):
            check_adapters(self.model)
        banned: Any = self.model.placeholders
        wait = self.config.parallel.timeout
        return server_rollout(settings, folder=self.run.dir, wait_seconds=wait, banned=banned)

    def _build_model_engine(self) -> ModelGroups:  # type: ignore[override]
        self.model = self.prepare_model()
        freeze(self.model, self.config.model.freeze)
        files, device, start = self.run.dir / "processor", self.model_device, self.start_models
        groups = ModelGroups(self.config, self.precision, self.total_steps, files, device, start)
        if self._training:
            groups.param_groups = parameter_groups(self.model, self.config.optim)
        return self._closing.enter_context(closing(groups))

    def _open_episodes(self, for_training: bool) -> None:
        """Before the models: the processes of episodes are forked from this one."""
        settings = self.config.reward
        chat = None
        play: Any = self.reward if self.judges() else None
        if self.has_turns():
            play = self.episode
            chat = ChatSettings.of(self.config, self.data)
            chat.check(has_tools=bool(self.tools))
        if settings.model is not None:
            check_scorer("reward.model", settings.model, self.data.processor, has_score=True)
        elif not self.judges() and not self._is_distillation:
            raise UserError(
                f"{type(self).__name__} has no reward: define reward(self, row, answer) or episode(self, row, chat), "
                "or set reward.model"
            )
        self.has_reward = self.judges() or settings.model is not None

        def opened(**options: Any) -> Episodes:
            made = Episodes(play, self.tokenizer, settings, self.config.seed, chat, **options)
            return self._closing.enter_context(closing(made))

        self.eval_episodes = self.episodes = opened()
        if for_training and self.runs_freely:  # then others are played while an evaluation runs
            self.episodes = opened(of_many_threads=True)
        self.rollout_log = RolloutLog(self.run.dir, self.tokenizer)

    def _connect_reward_model(self) -> None:
        if self.model_engine.reward is not None:
            self.eval_episodes.model = self.episodes.model = self.model_engine.reward_scores

    @property
    def _is_distillation(self) -> bool:
        """Whether teachers alone train the policy; a reward is a metric then."""
        return self.config.rl.preset.advantages == "teacher"

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
        checkpoint = [self.checkpoint, *self.run.checkpoint_list()][-1]
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
        self._policy_loss("old")  # refuses options that contradict each other
        if self.config.rl.teachers:
            is_used = type(self).train_step is RLEngine.train_step or self.learns_from_teachers
            sources = self.data.source_names("train")
            check_teachers(self.config.rl, sources, self.data.processor, is_used)
        self._open_episodes(for_training=True)
        super().before_train()
        self._connect_reward_model()
        self.meter = RLMeter(self.world, self.run.dir, self.step)
        self.episodes.phase = self.phase
        self.rollout_log.rewind(self.step)
        apart = self.config.generation.backend != "packed" or self.model_engine.samples_apart
        if not self.runs_freely:  # closed after episodes and rollout, which its thread waits for
            self.collector = Collector(self.config, self.feed, self._collect, apart=apart)
            self._closing.callback(self.collector.close)
            self._closing.callback(self.episodes.stop)
        self.rollout = self._closing.enter_context(closing(self.prepare_rollout()))
        if self.runs_freely:
            self.collector = self._free_buffer(apart)
        if not self.feed.is_restarted:
            self.collector.load_state_dict(self.model_engine.restored_pending)
        self.model_engine.pending_state = self.collector.state_dict

    def _free_buffer(self, apart: bool) -> Buffer:
        episodes = self.episodes
        threads = GroupThreads(self.rollout, self._collect, apart=apart, stop=episodes.stop)
        self.rollout = self._closing.enter_context(closing(threads))
        episodes.idle = threads.idle
        if episodes.model is not None:
            episodes.model = partial(threads.with_models, episodes.model)

        def wait() -> None:
            with self.phase("generate"):
                threads.wait()

        return Buffer(self.config, self.feed, threads.start, wait)

    def _open_checkpoints(self) -> None:
        super()._open_checkpoints()
        self.checkpoints.write_more = self.model_engine.write_models

    def do_train(self) -> None:
        while not self.done:
            self.hang.beat(self.step + 1)
            self.meter.begin(self.step + 1, "rollouts")
            left = None if self.total_steps is None else max(0, self.total_steps - self.step - 1)
            experience = self.collector.next(self._sync_weights, self.step, left)
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
            if self.runs_freely:
                self.episodes.check(experience.prompts, experience.samples, experience.rewards)
                ctx.count(HASH, experience.hash())
            self._watch_signal(experience)
            self.meter.mark("update")
            updates = Updates()
            if not self.config.rl.async_steps:
                self.rollout.release()
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
            ctx.numbers = updates.step_numbers()
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
        if threading.current_thread().name.startswith(GROUP_THREAD):
            yield  # the times of groups would add up
            return
        self.hang.beat(self.step + 1, f"{name} of step")
        with self.meter.timed(name):
            yield

    # ---- One step ---------------------------------------------------------------------------------------------------

    def sample(self, prompts: list[Prompt]) -> Experience:
        """Episodes of prompts, and their rewards."""
        with self.phase("reward"):  # without the time of the phase `generate` inside of it
            samples, rewards = self.episodes.play(prompts, self.rollout, self.sampling)
        return Experience(prompts, samples, rewards)

    def generate(self, prompts: list[Prompt], sampling: Sampling) -> list[Sample]:
        """Completions of prompts by the rollout."""
        with self.phase("generate"):
            return generate(self.rollout, prompts, sampling)

    def rewards(self, prompts: list[Prompt], samples: list[Sample]) -> list[Reward]:
        """The rewards of completions, of an engine without turns."""
        return self.episodes.rewards(prompts, samples)

    def train_step(self, ctx: StepContext, experience: Experience) -> Updates:
        """Advantages of the completions, and the updates of the models."""
        batch = self.prepare_batch(ctx, experience)
        rl, fields = self.config.rl, batch.token_fields
        loss = self._policy_loss(self.ratio_to(experience))
        if rl.preset.divergence:  # from the teachers, in the loss
            return self.update(ctx, batch, loss)
        kl = 1.0 if self._is_distillation else rl.kl_coef
        options: Any = {"kl": kl, "gamma": self.gamma, "lam": rl.gae_lambda}
        options["values_T"] = fields.get("old_values")
        target = "teacher_log_probs" if rl.teachers else "reference_log_probs"
        in_rewards = rl.preset.kl_in_reward or self._is_distillation
        if kl and (in_rewards or rl.teachers):
            kl_T = policy.kl_penalty(policy.old_log_probs(batch), fields[target], "k1")
            options |= {"kl_T": kl_T} if in_rewards else {}
        rewards_S, groups_S = batch.sequence_fields["reward"], batch.sequence_fields["group"]
        fields |= policy.advantage_fields(rl.preset, batch, rewards_S, groups_S, **options)
        if rl.teachers and not in_rewards:
            fields["advantages"] -= policy.of_labels(kl * kl_T, batch)
        return self.update(ctx, batch, loss, policy.ValueLoss(clip=0.2))

    def _policy_loss(self, ratio_to: Literal["old", "sampler"]) -> Loss:
        if self.config.rl.preset.divergence:
            return policy.DistilLoss.of(self.config, self.data.source_names("train"))
        return policy.PolicyLoss.of(self.config, ratio_to)

    def prepare_batch(self, ctx: StepContext, experience: Experience) -> PackedBatch:
        """A packed sequence for each completion with a reward, and what the models say of its tokens, before updates.

        Sequence fields: `reward`; `group`, which is the index of the prompt; `source`, the number of its source; with
        `rl.teachers` `teacher`, the number of its teacher; of remax `baseline`. Token fields: `sampler_log_probs`;
        `old_log_probs` by the actor, unless the update has them itself; `importance` with a correction;
        `reference_log_probs` if `start_models` started a reference; `teacher_log_probs`, unless the loss compares whole
        distributions; `old_values` of a critic.
        """
        rl, models = self.config.rl, self.model_engine
        chosen = experience.trainable()
        samples = [experience.samples[i] for i in chosen]
        batch = rollout_batch(experience.prompts, samples)
        rewards = []
        for i, sample in zip(chosen, samples, strict=True):  # each sequence has that of its episode
            rewards += [experience.rewards[i]] * sum(bool(one.tokens) for one in sample.sequences())
        fields, of_sequences = batch.token_fields, batch.sequence_fields
        of_sequences["reward"] = torch.tensor([one.value for one in rewards], dtype=torch.float64)
        if rl.preset.advantages == "greedy":
            baselines = [one.baseline for one in rewards]
            of_sequences["baseline"] = torch.tensor(baselines, dtype=torch.float64)
        sources = self.data.source_names("train")
        names = [experience.prompts[group].source for group in of_sequences["group"].tolist()]
        of_sequences["source"] = torch.tensor([sources.index(name) for name in names])
        if rl.teachers:
            of_sequences["teacher"] = torch.tensor([rl.teacher_of(name) for name in names])
        on_policy = experience.is_of(self.step)
        if self._needs_old_log_probs(ctx.step, on_policy):
            fields["old_log_probs"] = models.log_probs(batch)
            # The policy has moved since older weights sampled: no limit says what is too far.
            version = self.step if self.runs_freely else None
            old_T, prompts = fields["old_log_probs"], experience.prompts
            gap = measure_gap(batch, old_T, prompts, samples, version=version)
            max_gap = self.config.generation.max_gap
            gap.check(max_gap if on_policy or self.runs_freely else None, self.tokenizer)
            _log_all(ctx, gap.metrics())
        if rl.corrects is not None:
            fields["importance"], found = policy.importance_weights(rl.corrects, batch)
            _log_all(ctx, found)
        if rl.has_reference or models.has_reference:
            fields["reference_log_probs"] = models.reference_log_probs(batch)
        if models.teachers and not rl.preset.divergence:
            fields["teacher_log_probs"] = models.teacher_log_probs(batch)
            kl_T = policy.old_log_probs(batch) - fields["teacher_log_probs"]
            policy.log_teacher_kl(ctx.log, batch, kl_T, sources)
        if models.critic is not None:
            fields["old_values"] = models.score(models.critic, batch, "values")
        return batch

    def _needs_old_log_probs(self, step: int, on_policy: bool) -> bool:
        """Whether step `step` needs old log-probs of the actor, which also give the gap.

        A single update is made by the policy that sampled: it has the old log-probs itself.
        """
        rl = self.config.rl
        if not on_policy or rl.corrects is not None:
            return rl.corrects is not None
        is_due = step == 1 or step % GAP_INTERVAL == 0
        return is_due or rl.updates > 1 or bool(rl.kl_coef and rl.preset.kl_in_reward)

    def ratio_to(self, experience: Experience) -> Literal["old", "sampler"]:
        """Whose probabilities the ratio of the loss divides by.

        `old`: those of the actor before the step. `sampler`: of older weights, without a correction.
        """
        is_old = experience.is_of(self.step) or self.config.rl.corrects is not None
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
        rl, actor, critic = self.config.rl, self.model_engine.actor, self.model_engine.critic
        options: Any = {"budget": self.config.budget, "cuts": rl.updates, "together": "group"}
        updates = Updates()
        if critic is not None and value_loss is not None:
            updates.critic.extend(critic.update(without_routes(batch), value_loss, **options))
        if ctx.step > rl.critic_warmup or critic is None:
            updates.actor.extend(actor.update(batch, policy_loss, **options))
        if "old_log_probs" not in batch.token_fields:
            for numbers in updates.actor[1:]:  # the first one alone has the policy before the step
                numbers.metrics.pop("gap", None)
        return updates

    # ---- Rollouts -------------------------------------------------------------------------------------------------

    def _sync_weights(self) -> None:
        """The rollout samples with the weights of this step from now on."""
        actor = self.model_engine.actor
        weights: Any = None  # the actor itself generates
        sync = self.config.generation.sync
        if self.model_engine.rollout is not None:
            weights = actor.weights(dtype=torch.float32)  # exact
        elif self.config.generation.backend != "packed":
            is_adapter, on_device = sync.startswith("adapter"), sync in ("ipc", "nccl")
            weights = actor.export_adapter if is_adapter else actor.weights(on_device=on_device)
        with self.phase("sync"):
            self.rollout.sync(weights, self.step)

    @property
    def sampling(self) -> Sampling:
        """How completions of a training are sampled."""
        settings = self.config.generation
        seed = derived_seed(self.config.seed, "rollout")
        stop, samples = tuple(self.data.eos_token_ids), self.config.rl.num_generations
        # In half precision the trainer would choose other experts for some tokens than the sampler.
        experts = self.precision != "fp32"
        sampling = Sampling(settings.max_new_tokens, stop, settings.temperature, samples=samples)
        return replace(sampling, seed=seed, experts=experts)

    def _collect(self, prompts: list[Prompt]) -> Experience:
        """What `sample` returns, with the metrics of its rewards and completions."""
        made = self.sample(prompts)
        if self.config.rl.preset.advantages == "greedy":
            self._compare_with_greedy(made)
        made.metrics |= rollout_metrics(made, self.has_reward)
        if self.config.rl.preset.has_groups:
            made.log("with_signal", len(made.prompts_with_signal()), len(prompts))
        return made

    def _compare_with_greedy(self, made: Experience) -> None:
        """Give each reward that of its prompt's greedy completion, which is not trained."""
        with self.phase("greedy"):
            greedy = replace(self.eval_decoding, temperature=0.0, samples=1)
            _, baselines = self.episodes.play(made.prompts, self._eval_rollout(), greedy, untimed)
        for index, sample in enumerate(made.samples):
            reward, baseline = made.rewards[index], baselines[sample.prompt]
            if baseline.error is not None:
                error = f"that of the greedy completion: {baseline.error}"
                reward = Reward(None, error=reward.error or error)
            made.rewards[index] = replace(reward, baseline=baseline.value)

    # ---- Evaluation -----------------------------------------------------------------------------------------------

    def before_evaluate(self) -> None:
        self._open_episodes(for_training=False)
        super().before_evaluate()
        self._connect_reward_model()

    def _evaluate(self) -> dict[str, float | None]:
        prompts = list(chain.from_iterable(self._eval_batches()))
        if not prompts:
            raise UserError("there are no held-out prompts: give a source split: eval")
        ctx = StepContext(self.step, self.epoch, "eval", self._metric_store(skip_nonfinite=False))
        made = self.eval_sample(prompts)
        _log_all(ctx, made.metrics | rollout_metrics(made, self.has_reward))
        if self.has_reward:
            _log_all(ctx, pass_metrics(made.samples, made.rewards))
        self.eval_end(ctx)
        if self._training or not self.rollout_log.has(self.step, "eval"):
            self.rollout_log.write(self.step, "eval", made)
        means, _ = ctx.metrics.reduce()
        self.hub.metrics({"step": ctx.step, "epoch": ctx.epoch, "split": "eval", **means})
        return means

    def eval_sample(self, prompts: list[Prompt]) -> Experience:
        """Completions of all held-out prompts by the actor, and their rewards."""
        rollout, decoding = self._eval_rollout(), self.eval_decoding
        return Experience(prompts, *self.eval_episodes.play(prompts, rollout, decoding, untimed))

    def complete(self, prompts: list[Prompt]) -> list[Sample]:
        """Completions by the actor, as an evaluation makes them."""
        return generate(self._eval_rollout(), prompts, self.eval_decoding)

    def _eval_rollout(self) -> PackedRollout:
        return PackedRollout(self.model_engine.actor, budget=self.config.budget, version=self.step)

    @property
    def eval_decoding(self) -> Decoding:
        """How completions of an evaluation are generated; unlike rollouts they may be greedy."""
        settings, generation = self.config.eval, self.config.generation
        temperature = generation.temperature if settings.samples > 1 else 0.0
        seed = derived_seed(self.config.seed, "evaluation")
        decoding = Decoding(generation.max_new_tokens, self.data.eos_token_ids, temperature)
        return replace(decoding, samples=settings.samples, seed=seed)

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
