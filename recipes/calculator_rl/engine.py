"""Reinforcement learning with a tool: the policy learns to add three numbers by two calls of `add`."""

from typing import Any

from mvp_engine.engine import StepContext
from mvp_engine.kit.rl import Chat, Experience, Prompt, RLEngine, Updates, policy

from .settings import CalculatorConfig
from .tools import add


class CalculatorEngine(RLEngine):
    config_class = CalculatorConfig

    tools = (add,)  # declared in the prompts

    # ---- One step: prompts, episodes with their rewards, advantages, update -----------------------

    def episode(self, row: dict[str, Any], chat: Chat) -> dict[str, float]:
        """1 for the right sum, and a quarter for each call that leads to it."""
        a, b, c = row["numbers"]
        useful = [{"a": a, "b": b}, {"a": a + b, "b": c}]
        answer = chat.answer()
        while answer.calls:
            chat.reward(0.25 * (useful[:1] == [answer.calls[0].arguments]))
            useful = useful[1:]
            answer = chat.call(answer, self.tools)
        return {"exact": float(answer.text == str(a + b + c))}

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
