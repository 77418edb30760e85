"""Preference training of text and vision-language models: DPO and its relatives on pairs, KTO on rows with a label.

Legend: T tokens, S sequences. The sides of a pair are adjacent sequences of one pack, the chosen one first: there
`x_S - x_S.roll(-1)` is the value of the chosen side minus that of the rejected one. No shape depends on the data.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.engine import StepContext
from mvp_engine.kit import Answer, MLLMEngine, MLLMModelKit
from mvp_engine.kit import preference as kit
from mvp_engine.kit.row_checks import refuse_weights

from .settings import PairsConfig


class PairsEngine(MLLMEngine):
    config_class = PairsConfig
    config: PairsConfig
    title = "What the model answers after preference training"
    reference: kit.Reference | None = None
    nll_scale = 0.0  # of the step: pairs per token of the NLL term
    kl: Tensor | float = 0.0  # of the step, KTO: how far the policy is from its reference, over all rows

    # ---- Model: the policy, and the reference that it starts from --------------------------------

    def prepare_model(self) -> nn.Module:
        policy = MLLMModelKit(self.config.lora).of_engine(self)
        if self.config.reference == "copy":
            self.reference = kit.CopyReference(self)
        return policy

    def before_train(self) -> None:
        super().before_train()
        self.reference = kit.open_reference(self, self.measured_splits)

    def before_evaluate(self) -> None:
        super().before_evaluate()
        self.reference = kit.open_reference(self, ["eval"])

    # ---- Data: packs of pairs, or of rows with a label; optimizer and schedule -------------------

    def prepare_dataloader(self, split: str) -> Any:
        if self.config.preference.loss != "kto" and not self.config.preference.nll_weight:
            self.data.require_pairs(split)
        return self.data.engine_loader(self, split)

    def prepare_optimizer(self, model: nn.Module) -> Any:
        return self.optim.build_optimizer(model)  # of the section `optim`, by default AdamW

    def prepare_scheduler(self, optimizer: Any) -> Any:
        return self.optim.build_scheduler(optimizer, self.total_steps)

    # ---- One step --------------------------------------------------------------------------------

    def train_pre_step(self, ctx: StepContext) -> None:
        """What all ranks agree on before the losses of the step."""
        super().train_pre_step(ctx)
        settings = self.config.preference
        if settings.loss != "kto":
            kit.check_pairs(ctx.micro_batches)
        if self.reference is not None:
            self.reference.count_flops(ctx)
        if settings.nll_weight:
            self.nll_scale = kit.pairs_per_token(ctx.micro_batches, self.layout)
        if settings.loss == "kto":
            # From prompts with answers of other rows: the policy should find them as likely as its reference does.
            self.kl = kit.mismatched_kl(self, self.reference, ctx.micro_batches, self.config.data.tokens_per_pack)
            ctx.log("kl", self.kl)

    def forward_step(self, ctx: StepContext, micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """The loss summed over pairs (of KTO: over rows), and their number: the engine divides once per step."""
        refuse_weights(micro_batch)
        settings = self.config.preference
        kl, nll_scale = (self.kl, self.nll_scale) if ctx.split == "train" else (0.0, 0.0)
        # The reference first: its activations are gone before those of the policy are kept.
        reference_S = None if self.reference is None else self.reference.log_probs(micro_batch, ctx.split)
        ctx.count("tokens", micro_batch.num_tokens)
        log_probs_T = self.model(micro_batch, ["log_probs"])["log_probs"]
        # log p(answer) - log p_reference(answer) of each sequence, or the mean over its tokens.
        scores_S = kit.log_ratios(log_probs_T, micro_batch, reference_S)
        if settings.loss in ("ipo", "simpo", "orpo"):
            scores_S = scores_S / kit.num_labels(micro_batch)
        rewards_S = settings.beta * scores_S.detach()
        if settings.loss == "kto":
            is_good_S = kit.is_good(micro_batch)
            sign_S = torch.where(is_good_S, 1.0, -1.0)
            weight_S = torch.where(is_good_S, settings.desirable_weight, settings.undesirable_weight)
            loss_S = weight_S * (1 - torch.sigmoid(settings.beta * sign_S * (scores_S - kl)))
            counts_S = kit.has_preference(micro_batch)
            kit.log_labelled_rows(ctx, micro_batch, rewards_S)
        else:
            scores_S = kit.log_odds(scores_S) if settings.loss == "orpo" else scores_S
            loss_S = self.pair_losses(scores_S - scores_S.roll(-1))
            counts_S = micro_batch.sequence_fields["side"] == 1
            kit.log_pairs(ctx, micro_batch, rewards_S)
        loss_sum, weight = torch.where(counts_S, loss_S, 0.0).sum(), counts_S.sum()
        nll_sum, tokens = kit.good_answer_nll(log_probs_T, micro_batch)
        ctx.log("nll", nll_sum.detach(), tokens)
        if settings.nll_weight:
            ctx.log("preference_loss", loss_sum.detach(), weight)
            loss_sum = loss_sum + settings.nll_weight * nll_scale * nll_sum
        return loss_sum, weight

    def pair_losses(self, margin_S: Tensor) -> Tensor:
        """The loss of each pair, from its margin: the score of the chosen side minus that of the rejected one."""
        settings, beta = self.config.preference, self.config.preference.beta
        match settings.loss:
            case "ipo":
                return (margin_S - 1 / (2 * beta)).square()
            case "hinge":
                return F.relu(1 - beta * margin_S)
            case "orpo":
                return -beta * F.logsigmoid(margin_S)
            case "simpo":
                return kit.sigmoid_loss(beta * margin_S - settings.gamma, settings.label_smoothing)
            case "robust":
                return kit.robust_loss(beta * margin_S, settings.label_smoothing)
            case _:  # DPO: -log sigmoid(beta * margin)
                return kit.sigmoid_loss(beta * margin_S, settings.label_smoothing)

    # ---- Evaluation ------------------------------------------------------------------------------

    def generation_rows(self, micro_batch: PackedBatch) -> Tensor:
        """Good answers only: a pair has its prompt twice."""
        return kit.is_good(micro_batch) & super().generation_rows(micro_batch)

    def eval_end(self, ctx: StepContext) -> None:
        if self.config.preference.nll_weight:
            kit.log_nll_term(ctx, self.layout, self.config.preference.nll_weight)
        super().eval_end(ctx)

    def score(self, ctx: StepContext, name: str, answers: list[Answer]) -> None:
        """Log how often a generated answer is of the preferred kind: a sentence, or the right digit."""
        super().score(ctx, name, answers)
        if self.config.made and self.config.made["kind"] == "text":
            ctx.log("preferred", sum(one.written.startswith("The next number is") for one in answers), len(answers))
