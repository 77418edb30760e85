"""Reinforcement learning in an environment: the policy learns to walk to a goal, with a reward for every move."""

from typing import Any

from mvp_engine.engine import StepContext
from mvp_engine.kit.rl import Chat, Experience, Prompt, RLEngine, Updates, policy

from .settings import GridConfig
from .world import GridWorld

GAMMA = 0.8  # discount per token; a move has two


class GridEngine(RLEngine):
    config_class = GridConfig

    # ---- One step: prompts, episodes with their rewards, advantages, update -----------------------

    def episode(self, row: dict[str, Any], chat: Chat) -> dict[str, float]:
        """A walk: each answer is a move, and the next message is what the policy sees then."""
        world = GridWorld()
        world.reset(seed=row["seed"])
        while True:
            observation, reward, terminated, truncated, _ = world.step(chat.answer().text)
            chat.reward(reward)
            if terminated or truncated:
                return {"goal": float(terminated)}
            chat.user(observation)

    def sample(self, prompts: list[Prompt]) -> Experience:
        """`rl.num_generations` episodes of each prompt, all at the same time."""
        with self.phase("reward"):  # the time of `episode`, without that of `generate`
            samples, rewards = self.episodes.play(prompts, self.rollout, self.sampling)
        return Experience(prompts, samples, rewards)

    def train_step(self, ctx: StepContext, experience: Experience) -> Updates:
        """REINFORCE++: the advantage of a token is what comes after it, compared with all tokens of the step."""
        batch = self.prepare_batch(ctx, experience)
        rewards_T = policy.token_rewards(batch.sequence_fields["reward"], batch)  # those of moves at the moves
        batch.token_fields["advantages"] = policy.reinforce_pp(rewards_T, batch, GAMMA)
        loss = policy.PolicyLoss.of(self.config, self.ratio_to(experience))
        return self.update(ctx, batch, loss, policy.ValueLoss())
