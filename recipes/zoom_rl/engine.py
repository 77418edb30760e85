"""Reinforcement learning with a tool that returns an image: the policy learns where to look, and to read it there."""

import re
from pathlib import Path
from typing import Any

from PIL import Image

from mvp_engine.engine import StepContext
from mvp_engine.kit.rl import Chat, Experience, Prompt, RLEngine, Updates, policy

from .data import crop
from .settings import ZoomConfig


class ZoomEngine(RLEngine):
    config_class = ZoomConfig

    # ---- One step: prompts, episodes with their rewards, advantages, update -----------------------

    def episode(self, row: dict[str, Any], chat: Chat) -> dict[str, float]:
        """1 for the right digit, which can be read only in the enlarged cell."""
        answer = chat.answer()
        if call := re.fullmatch(r"zoom ([01]) ([01])", answer.text):
            picture = Image.open(Path(self.config.made["folder"]) / row["picture"])
            chat.tool(crop(picture, int(call[1]), int(call[2])))
            answer = chat.answer()
        return {"right": float(answer.text == row["answer"])}

    def sample(self, prompts: list[Prompt]) -> Experience:
        """`rl.num_generations` episodes of each prompt, all at the same time."""
        with self.phase("reward"):  # the time of `episode`, without that of `generate`
            samples, rewards = self.episodes.play(prompts, self.rollout, self.sampling)
        return Experience(prompts, samples, rewards)

    def train_step(self, ctx: StepContext, experience: Experience) -> Updates:
        """GRPO: the advantage of an episode is its reward compared with the others of its prompt."""
        batch = self.prepare_batch(ctx, experience)
        fields = batch.sequence_fields
        advantages_S = policy.group_advantages(fields["reward"], fields["group"], episodes_S=fields.get("episode"))
        batch.token_fields["advantages"] = policy.spread(advantages_S, batch)
        loss = policy.PolicyLoss.of(self.config, self.ratio_to(experience))
        return self.update(ctx, batch, loss, policy.ValueLoss())
