"""A vision-language-action model on a table: pick up the block, put it on the plate that the instruction names.

The model reads camera images, an instruction and a state, and predicts a *chunk*: the actions of the next steps. A pi0
learns by flow matching to turn noise into a chunk; a vision-language model with an action head learns it by regression.

Legend: S observations, N draws of noise and time for each, C steps of a chunk, A action dimensions.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import StepContext
from mvp_engine.errors import UserError
from mvp_engine.hf.model.config_source import read_config
from mvp_engine.kit import MLLMEngine, MLLMModelKit, actions
from mvp_engine.kit.examples import write_examples_page

from .data import prepare
from .settings import TableConfig
from .world import Table


class TableEngine(MLLMEngine):
    config_class = TableConfig
    config: TableConfig
    title = "What a small pi0 does on the table"
    data: actions.ActionDataKit
    episodes: Sequence[actions.EpisodeResult] = ()  # of the last evaluation

    # ---- Model: pi0, or a vision-language model with an action head ------------------------------

    def prepare_model(self) -> nn.Module:
        return MLLMModelKit(self.config.lora).of_engine(self)

    # ---- Data: a row is a frame of an episode, with the chunk of actions that follows it ---------

    @classmethod
    def make_processor(cls, config: Any) -> Any:
        table = config.table
        if table is None:
            return super().make_processor(config)
        return prepare(table.folder, table.demonstrations, table.version, table.codec)

    @classmethod
    def data_kit(cls, config: Any) -> actions.ActionDataKit:
        """Reads LeRobot folders, and normalizes states and actions by the statistics of the training frames."""
        config.check_engine()
        model_config = read_config(config.model.path, config.model.config)
        processor, workers = cls.make_processor(config), config.data.num_workers
        return actions.ActionDataKit(
            config.data, config.actions, processor, model_config=model_config, num_workers=workers
        )

    def prepare_dataloader(self, split: str) -> Any:
        """Packs of frames. Workers draw noise and times from (seed, epoch, frame): a step depends on its pack alone."""
        return self.data.engine_loader(self, split)

    def extra_state(self) -> dict[str, Any]:
        """A checkpoint has the normalization, since the weights fit no other."""
        return {**super().extra_state(), "normalization": self.data.normalization.spec}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        super().load_extra_state(state)
        self.data.load_normalization(state["normalization"], is_resumed=self._training)
        if self.world.is_main:
            folder: Any = self.model.side_files
            self.data.normalization.save(folder)

    # ---- Optimizer and schedule ------------------------------------------------------------------

    def prepare_optimizer(self, model: nn.Module) -> Any:
        return self.optim.build_optimizer(model)  # of the section `optim`, by default AdamW

    def prepare_scheduler(self, optimizer: Any) -> Any:
        return self.optim.build_scheduler(optimizer, self.total_steps)

    # ---- One step --------------------------------------------------------------------------------

    def forward_step(self, ctx: StepContext, micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """The loss summed over the entries of chunks, and their number. Labels of text count `actions.text_weight`."""
        ctx.count("tokens", micro_batch.num_tokens)
        text_weight = self.config.actions.text_weight
        text = ["loss"] if text_weight else []  # of rows that are no frames
        fields = micro_batch.sequence_fields
        chunk_SCA = fields["action_chunk"].float()  # normalized
        mask_SCA = fields["action_mask"]  # False behind the end of the episode, and in unused dimensions
        if self.data.spec.kind == "flow":
            # A straight line from the actions, at time 0, to noise, at time 1: x_t = t * noise + (1 - t) * actions.
            # The model learns the velocity of x_t, which is noise - actions at all times.
            clean_SNCA = chunk_SCA[:, None]
            noise_SNCA = fields["action_noise"].float()
            t_SN11 = fields["action_times"].float()[:, :, None, None]
            noisy_SNCA = t_SN11 * noise_SNCA + (1 - t_SN11) * clean_SNCA
            outputs = self.model(micro_batch, ["velocity", *text], noisy=noisy_SNCA)
            errors_SNCA = (outputs["velocity"] - (noise_SNCA - clean_SNCA)).square()
            # All draws of an observation share its pass over images and text, and its weight.
            loss_SCA = torch.where(mask_SCA[:, None], errors_SNCA, 0.0).mean(1)
        else:
            outputs = self.model(micro_batch, ["actions", *text])
            loss_SCA = torch.where(mask_SCA, (outputs["actions"] - chunk_SCA).abs(), 0.0)
        loss_sum, weight = loss_SCA.sum(), mask_SCA.sum()
        if not text_weight:
            return loss_sum, weight
        labels = micro_batch.num_loss_tokens
        ctx.log("action_loss", loss_sum.detach(), weight)
        ctx.log("text_loss", outputs["loss"].detach(), labels)
        return loss_sum + text_weight * outputs["loss"], weight + text_weight * labels

    # ---- Evaluation: the policy acts in the environment, in a closed loop ------------------------

    def make_env(self, num_envs: int) -> Any:
        """The environment, with gymnasium's vector API."""
        if self.config.table is None:
            raise UserError(
                "simulation: only the demonstrations of `table` have this environment. Set simulation=null, or write "
                "make_env(num_envs) for your robot in a copy of this recipe"
            )
        return Table(num_envs)

    def act(self, seen: Sequence[actions.Observation], seed: int, keys: Sequence[tuple[int, int]]) -> np.ndarray:
        """A chunk for each observation, in the units of the data; `keys` are (episode, number of its chunk)."""
        batch = self.data.observation_batch(seen)
        noise = self.data.start_noise(seed, keys)  # None: the head is no flow
        budget = self.config.data.tokens_per_pack
        chunks = actions.sample_actions(self.model_engine, batch, noise, budget=budget)
        return self.data.normalization.unnormalize_actions(chunks, np.stack([one.state for one in seen]))

    def eval_end(self, ctx: StepContext) -> None:
        """After the losses of held-out frames: the share of episodes that succeed, on unseen tables."""
        if self.config.simulation is None:
            return
        self.episodes = actions.rollout_on_ranks(self)
        ctx.log("success", sum(one.success for one in self.episodes), len(self.episodes))
        if self.config.table is not None:
            # The plate is chosen by the instruction: without one, the policy can only guess.
            guesses = actions.rollout_on_ranks(self, task="")
            ctx.log("success_without_instruction", sum(one.success for one in guesses), len(guesses))
        if self.world.is_main:
            actions.append_episodes(self.run.dir / "rollouts.jsonl", ctx.step, self.episodes)

    def write_page(self, figures: Any, answers: Any, export: Any) -> None:
        examples = actions.episode_examples(self.episodes)  # strips of frames
        write_examples_page(self, figures, examples, ": rollouts of unseen episodes")
