"""Reinforcement learning of an agent with a loop of its own: a program that knows only the address of the policy."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mvp_engine.engine import StepContext
from mvp_engine.kit.rl import Chat, Experience, Prompt, RLEngine, Updates, policy

from .settings import AgentConfig

AGENT = Path(__file__).with_name("agent.py")


class AgentEngine(RLEngine):
    config_class = AgentConfig

    # ---- One step: prompts, episodes with their rewards, advantages, update -----------------------

    def episode(self, row: dict[str, Any], chat: Chat) -> dict[str, float]:
        """1 if the program says that it came to the goal. Each of its requests to `chat.url` is a turn."""
        program = [sys.executable, str(AGENT), str(row["place"]), str(row["goal"])]
        environment = {**os.environ, "OPENAI_BASE_URL": chat.url}
        done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
        return {"goal": float(done.stdout)}

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
