"""ActionEngine: trains an action model on LeRobot folders, and rolls it out in an environment.

A recipe gives the environment, if it has one:

    class TableEngine(ActionEngine):
        def make_env(self, num_envs):
            return Table(num_envs)
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from mvp_engine.config.schema import Config
from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import StepContext
from mvp_engine.errors import UserError
from mvp_engine.hf.model.config_source import read_config
from mvp_engine.kit import flow
from mvp_engine.kit.actions.act import Normalization
from mvp_engine.kit.actions.kit import ActionDataKit
from mvp_engine.kit.actions.policy import action_loss, sample_actions
from mvp_engine.kit.actions.settings import ActionConfig
from mvp_engine.kit.actions.simulation import EpisodeResult, Observation, VectorEnv, rollout
from mvp_engine.kit.mllm import MLLMEngine
from mvp_engine.report import Example, write_report

ROLLOUTS_FILE = "rollouts.jsonl"
MAX_ENVS = 50  # environments that run at the same time, on one rank
STRIPS = 8  # episodes whose frames are shown in the report, each as a strip of frames in a row


class ActionEngine(MLLMEngine):
    """An MLLMEngine for robot episodes: a row is a frame of an episode, and the model predicts the next actions.

    It predicts a *chunk*: a fixed number of actions for the steps that follow.
    """

    config_class: type[Config] = ActionConfig
    config: ActionConfig
    title = "What the policy does"
    episodes: Sequence[EpisodeResult] = ()  # of the last evaluation

    def make_env(self, num_envs: int) -> VectorEnv:
        """Returns the environment for rollouts, with gymnasium's vector API. Recipes with simulation must define it."""
        raise UserError(
            f"rollouts: {type(self).__name__} has no environment. Give it make_env(num_envs), or set simulation=null"
        )

    # ---- Parts --------------------------------------------------------------------------------------------

    @classmethod
    def data_kit(cls, config: ActionConfig) -> ActionDataKit:  # type: ignore[override]
        model_config = read_config(config.model.path, config.model.config)
        return ActionDataKit(
            config.data,
            config.actions,
            cls.make_processor(config),
            model_config=model_config,
            num_workers=config.data.num_workers,
        )

    data: ActionDataKit

    def prepare_model(self) -> nn.Module:
        if self.config.model.type != "action_model":
            raise UserError(
                f"model.type={self.config.model.type}: LeRobot folders train an action model. Set "
                "model.type=action_model"
            )
        return super().prepare_model()

    def extra_state(self) -> dict[str, Any]:
        return {**super().extra_state(), "normalization": self.data.normalization.spec}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Load the normalization too: the weights need the statistics that they were trained with.

        A resumed training must still have the same ones; an evaluation uses those of the checkpoint.
        """
        super().load_extra_state(state)
        saved = Normalization(state["normalization"])
        if self._training and saved.spec != self.data.normalization.spec:
            current = self.data.normalization.spec
            changed = [name for name, value in saved.spec.items() if value != current.get(name)]
            raise UserError(
                f"the checkpoint was trained with another normalization ({', '.join(changed)}): restore the data and "
                "the section actions, set actions.statistics to the checkpoint's normalization.json, or start a new "
                "run from its weights (model.path)"
            )
        self.data.normalization = saved
        model: Any = self.model
        if self.world.is_main:
            saved.save(model.side_files)

    def forward_step(self, ctx: StepContext, micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        return action_loss(ctx, self.model, micro_batch, self.config.actions.text_weight)

    # ---- Acting -------------------------------------------------------------------------------------------

    def act(
        self, observations: Sequence[Observation], seed: int, keys: Sequence[tuple[int, int]]
    ) -> np.ndarray:
        """Returns a chunk of actions for each observation: (observations, steps, size), in the units of the data.

        `keys`: (episode, number of the chunk in it) of each observation. The noise of a flow head depends on them and
        on `seed` only, so it does not depend on how episodes are batched.
        """
        batch = self.observation_batch(observations)
        spec = self.data.spec
        noise = None
        if spec.kind == "flow":
            shape = (spec.chunk, spec.action_dim)
            draws = [flow.draw(seed, decision, episode, shape) for episode, decision in keys]
            noise = torch.cat([draw.noise for draw in draws])
        chunks = sample_actions(
            self.model_engine, batch, noise, None, self.config.data.tokens_per_pack
        )
        states = np.stack([observation.state for observation in observations])
        return self.data.normalization.unnormalize_actions(chunks, states)

    def observation_batch(self, observations: Sequence[Observation]) -> PackedBatch:
        """Returns one packed batch with the input of the model for each observation: task, images and state."""
        encoder = self.data.row_encoder
        normalization = self.data.normalization
        encoder.normalization = normalization
        batches = []
        for observation in observations:
            try:
                images = normalization.frames(observation.images)
            except ValueError as error:
                raise UserError(str(error)) from None
            if len(observation.state) != normalization.state_size:
                raise UserError(
                    f"an observation has a state of {len(observation.state)} values; the model was trained with "
                    f"{normalization.state_size} ({self.config.actions.state})"
                )
            batches.append(encoder.observation(observation.task, images, observation.state, {}))
        return PackedBatch.concat(batches)

    def roll_out(self, task: str | None = None) -> list[EpisodeResult]:
        """Runs the rollouts of the config and returns the results of all ranks. `task` replaces all instructions."""
        settings = self.config.simulation
        assert settings is not None
        # Ranks that run a forward together run the same episodes. Otherwise each rank runs a share of them.
        is_independent = self.layout.data_size == self.world.size and self.layout.shard_mesh is None
        rank, ranks = (self.world.rank, self.world.size) if is_independent else (0, 1)
        episodes = list(range(settings.episodes))[rank::ranks]
        results: list[EpisodeResult] = []
        if episodes:
            results = rollout(
                self,
                self.make_env(min(MAX_ENVS, len(episodes))),
                settings.episodes,
                settings.seed,
                episodes=episodes,
                execute=settings.execute,
                max_steps=settings.max_steps,
                task=task,
                state_key=self.config.actions.state,
                strips=STRIPS,
            )
        if is_independent:
            results = list(chain.from_iterable(self.world.all_gather(results)))
        return sorted(results, key=lambda result: result.index)

    # ---- Evaluation and report ----------------------------------------------------------------------------

    def eval_end(self, ctx: StepContext) -> None:
        if self.config.simulation is None:
            return
        self.episodes = self.roll_out()
        self.log_rollouts(ctx, self.episodes)
        if self.world.is_main:
            with open(self.run.dir / ROLLOUTS_FILE, "a", encoding="utf-8") as out:
                for episode in self.episodes:
                    entry = {"step": ctx.step, "episode": episode.index, "task": episode.task}
                    entry |= {"success": episode.success, "steps": episode.steps}
                    out.write(json.dumps(entry) + "\n")

    def log_rollouts(self, ctx: StepContext, episodes: Sequence[EpisodeResult]) -> None:
        """Log the success rate. Every rank has all episodes, so the mean over ranks is the rate."""
        ctx.log("success", sum(episode.success for episode in episodes), len(episodes))

    def write_page(
        self, figures: Mapping[str, float | None] | None, answers: Any, export: Path | None
    ) -> None:
        examples = []
        for episode in self.episodes:
            if episode.strip:
                result = (
                    f"{'success' if episode.success else 'failure'} after {episode.steps} steps"
                )
                media = partial(strip_image, episode.strip)
                examples.append(Example(media, episode.task, "success", result, episode.success))
        write_report(
            self.run.dir / "report.html",
            self.run,
            title=self.title,
            subtitle=f"{self.run.id}, step {self.step}: rollouts of unseen episodes",
            figures=None if figures is None else self.page_figures(figures),
            examples=examples,
            config=self.config.to_yaml(),
        )
        self.logger.info("report: %s", self.run.dir / "report.html")


# Strips of frames of an episode, for reports.

MIN_SIDE = 96  # pixels: smaller frames are enlarged by a whole factor
GAP = 2  # pixels between frames


def strip_image(frames: Sequence[np.ndarray]) -> list[bytes]:
    """Returns one PNG file, in a list as `Example` needs it, with the frames in a row."""
    height, width = frames[0].shape[:2]
    scale = max(1, -(-MIN_SIDE // height))
    canvas = np.full((height * scale, (width * scale + GAP) * len(frames) - GAP, 3), 255, np.uint8)
    for number, frame in enumerate(frames):
        left = number * (width * scale + GAP)
        enlarged = frame.repeat(scale, axis=0).repeat(scale, axis=1)
        canvas[:, left : left + width * scale] = enlarged
    file = io.BytesIO()
    Image.fromarray(canvas).save(file, "png")
    return [file.getvalue()]
