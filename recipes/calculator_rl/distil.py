"""On-policy distillation: the policy plays the same episodes, and a teacher judges every token that it wrote."""

from mvp_engine.engine import StepContext
from mvp_engine.kit.rl import Experience, Updates, policy

from .distil_settings import DistilConfig
from .engine import CalculatorEngine


class DistilEngine(CalculatorEngine):
    config_class = DistilConfig
    config: DistilConfig
    learns_from_teachers = True

    def train_step(self, ctx: StepContext, experience: Experience) -> Updates:
        """What the teachers of `rl.teachers` say of the step; rewards are metrics here."""
        batch = self.prepare_batch(ctx, experience)
        if self.config.rl.preset.divergence:  # of the whole vocabulary at each token, by the loss
            loss = policy.DistilLoss.of(self.config, self.data.source_names("train"))
            return self.update(ctx, batch, loss)
        # The advantage of a token: how much more likely it is for the teacher than for the policy.
        teacher_T = batch.token_fields["teacher_log_probs"]
        batch.token_fields["advantages"] = teacher_T - policy.old_log_probs(batch)
        return self.update(ctx, batch, policy.PolicyLoss.of(self.config, self.ratio_to(experience)))
