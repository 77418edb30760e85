"""PreferenceLossKit: DPO and its relatives on packed pairs, KTO on packed rows with a label.

Legend: T tokens, S sequences.

The chosen and the rejected side of a pair are adjacent sequences of one pack (`mllm.pairs`), so a pair's margin is a
sequence's score minus that of the next one. All values are computed for all sequences and masked: no shape depends on
the data, and nothing here syncs with the GPU. The kit returns a sum over pairs and their number; the engine divides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.distributed import Layout
from mvp_engine.engine.hooks import StepContext
from mvp_engine.errors import UserError
from mvp_engine.kit.loss import per_token, sequence_log_probs, sequence_sums
from mvp_engine.kit.preference.settings import PreferenceLoss

PER_TOKEN = ("ipo", "simpo", "orpo")  # losses on the mean log-prob of a side's tokens
SMALLEST = 1e-6  # of a mean negative log-prob, where the odds of ORPO become infinite


@dataclass(frozen=True)
class StepTerms:
    """What a micro-batch must know of its whole step, agreed by all ranks before it."""

    # Pairs per token of the NLL term: the engine divides the term by the pairs, and it should be a mean over tokens.
    nll_scale: float = 0.0
    # KTO: how far the policy is from its reference, over all rows of the step.
    kl: Tensor | float = 0.0


class PreferenceLossKit:
    def __init__(self, settings: PreferenceLoss | None = None) -> None:
        self.settings = settings or PreferenceLoss()

    def __call__(
        self,
        ctx: StepContext,
        model: nn.Module,
        batch: PackedBatch,
        reference_S: Tensor | None = None,
        terms: StepTerms | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`(loss_sum, weight)` of a micro-batch; the weight is its number of pairs, or of rows with a label.

        `reference_S` has the log-prob of each sequence under the reference model, summed over its tokens with a label.
        """
        terms = terms or StepTerms()
        ctx.count("tokens", batch.num_tokens)
        log_probs_T = model(batch, ["log_probs"])["log_probs"]
        scores_S = self.scores(log_probs_T, batch, reference_S)
        if self.settings.loss == "kto":
            loss_sum, weight = self._labelled_rows(ctx, batch, scores_S, terms.kl)
        else:
            loss_sum, weight = self._pairs(ctx, batch, scores_S)
        nll_sum, tokens = self.nll(log_probs_T, batch)
        ctx.log("nll", nll_sum.detach(), tokens)
        if self.settings.nll_weight:
            ctx.log("preference_loss", loss_sum.detach(), weight)
            loss_sum = loss_sum + self.settings.nll_weight * terms.nll_scale * nll_sum
        return loss_sum, weight

    # ---- Numbers of sequences -----------------------------------------------------------------------------

    def scores(self, log_probs_T: Tensor, batch: PackedBatch, reference_S: Tensor | None) -> Tensor:
        """The implicit reward of each sequence over beta: its log-prob, minus that of the reference."""
        scores_S = sequence_log_probs(log_probs_T, batch)
        if reference_S is not None:
            # A row without a side may have no reference, and NaN times 0 is NaN.
            scores_S = scores_S - torch.where(self._counts(batch), reference_S, 0.0)
        if self.settings.loss in PER_TOKEN:
            labels_S = sequence_sums((batch.labels != IGNORE).float(), batch)
            scores_S = scores_S / labels_S.clamp(min=1)
        return scores_S

    def nll(self, log_probs_T: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """The NLL of good answers and their tokens: chosen sides, rows that are no pairs, rows with label 1."""
        is_good_T = per_token(self.is_good(batch), batch)
        has_loss_T = is_good_T & (batch.labels != IGNORE)
        return -torch.where(has_loss_T, log_probs_T, 0.0).sum(), has_loss_T.sum()

    def is_good(self, batch: PackedBatch) -> Tensor:
        """Sequences with a good answer: chosen sides, rows that are no pairs, rows with label 1."""
        if self.settings.loss == "kto":
            return self._counts(batch) & (batch.sequence_fields["label"] == 1)
        return batch.sequence_fields["side"] >= 0

    def pair_losses(self, margin_S: Tensor) -> Tensor:
        """The loss of each margin between the scores of a chosen and a rejected side."""
        settings = self.settings
        smoothing = settings.label_smoothing
        logits_S = settings.beta * margin_S
        match settings.loss:
            case "ipo":
                return (margin_S - 1 / (2 * settings.beta)).square()
            case "hinge":
                return F.relu(1 - logits_S)
            case "orpo":
                return -settings.beta * F.logsigmoid(margin_S)
            case "simpo":
                logits_S = logits_S - settings.gamma
        right_S = -(1 - smoothing) * F.logsigmoid(logits_S)
        wrong_S = -smoothing * F.logsigmoid(-logits_S)
        if settings.loss == "robust":
            return (right_S - wrong_S) / (1 - 2 * smoothing)
        return right_S + wrong_S

    def count(self, batches: list[PackedBatch]) -> tuple[int, int]:
        """The number of pairs (or rows with a label), and of tokens of the NLL term, in batches on the host."""
        pairs = 0
        tokens = 0
        for batch in batches:
            members = int(self._counts(batch).sum())
            pairs += members if self.settings.loss == "kto" else members // 2
            is_good_T = per_token(self.is_good(batch), batch)
            tokens += int((is_good_T & (batch.labels != IGNORE)).sum())
        return pairs, tokens

    # ---- Inside -------------------------------------------------------------------------------------------

    def _pairs(
        self, ctx: StepContext, batch: PackedBatch, scores_S: Tensor
    ) -> tuple[Tensor, Tensor]:
        is_chosen_S = batch.sequence_fields["side"] == 1
        compared_S = scores_S
        if self.settings.loss == "orpo":
            compared_S = log_odds(scores_S)
        margin_S = compared_S - compared_S.roll(-1)
        loss_S = self.pair_losses(margin_S)
        pairs = is_chosen_S.sum()
        self._log_pairs(ctx, batch, scores_S, pairs)
        return torch.where(is_chosen_S, loss_S, 0.0).sum(), pairs

    def _log_pairs(
        self, ctx: StepContext, batch: PackedBatch, scores_S: Tensor, pairs: Tensor
    ) -> None:
        rewards_S = self.settings.beta * scores_S.detach()
        margin_S = rewards_S - rewards_S.roll(-1)
        is_chosen_S = batch.sequence_fields["side"] == 1
        is_rejected_S = batch.sequence_fields["side"] == -1
        ctx.log("rewards/chosen", torch.where(is_chosen_S, rewards_S, 0.0).sum(), pairs)
        ctx.log("rewards/rejected", torch.where(is_rejected_S, rewards_S, 0.0).sum(), pairs)
        ctx.log("margin", torch.where(is_chosen_S, margin_S, 0.0).sum(), pairs)
        ctx.log("accuracy", (is_chosen_S & (margin_S > 0)).sum(), pairs)

    def _labelled_rows(
        self, ctx: StepContext, batch: PackedBatch, scores_S: Tensor, kl: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        settings = self.settings
        is_row_S = self._counts(batch)
        is_good_S = self.is_good(batch)
        is_bad_S = is_row_S & ~is_good_S
        sign_S = torch.where(is_good_S, 1.0, -1.0)
        weight_S = torch.where(is_good_S, settings.desirable_weight, settings.undesirable_weight)
        loss_S = weight_S * (1 - torch.sigmoid(settings.beta * sign_S * (scores_S - kl)))
        rewards_S = settings.beta * scores_S.detach()
        good = torch.where(is_good_S, rewards_S, 0.0).sum()
        bad = torch.where(is_bad_S, rewards_S, 0.0).sum()
        ctx.log("rewards/chosen", good, is_good_S.sum())
        ctx.log("rewards/rejected", bad, is_bad_S.sum())
        ctx.log("accuracy", (is_row_S & (sign_S * rewards_S > 0)).sum(), is_row_S.sum())
        return torch.where(is_row_S, loss_S, 0.0).sum(), is_row_S.sum()

    def _counts(self, batch: PackedBatch) -> Tensor:
        """Sequences with a preference: a side of a pair, or a row with a label; not those of an empty pack."""
        fields = batch.sequence_fields
        if self.settings.loss != "kto":
            return fields["side"] != 0
        if "sample" in fields:
            return fields["sample"] >= 0
        return torch.ones_like(fields["label"], dtype=torch.bool)


def log_odds(scores_S: Tensor) -> Tensor:
    """log(p / (1 - p)) of a mean log-prob log p < 0."""
    log_p_S = scores_S.clamp(max=-SMALLEST)
    return log_p_S - torch.log(-torch.expm1(log_p_S))


def check_pairs(batch: PackedBatch) -> None:
    """Raise for a pair that was cut: each chosen side needs its rejected side next to it. For batches on the host."""
    fields: Any = batch.sequence_fields
    if "side" not in fields:
        raise UserError("the batch has no sides: load preference rows with mllm.pairs=true")
    sides = fields["side"].tolist()
    samples = fields["sample"].tolist() if "sample" in fields else [0] * len(sides)
    index = 0
    while index < len(sides):
        if sides[index] == 0:
            index += 1
            continue
        is_pair = sides[index : index + 2] == [1, -1]
        if not is_pair or samples[index] != samples[index + 1]:
            raise UserError(
                f"sequence {index} of a micro-batch has side {sides[index]} and its other side is not next to it: "
                "a hook reordered or cut a pair. Keep the two sequences of a sample together"
            )
        index += 2


# The KL term of KTO: prompts with answers of other rows, which the policy should find as likely as its reference does.
#
# Each row of a step gets the last answer of the next one, in the order of the samples of all ranks. So the term does
# not depend on how the rows are packed, split into micro-batches or divided among ranks.


@dataclass(frozen=True)
class LastAnswer:
    """The tokens of a row's last answer, and where they start in its sequence."""

    sample: int
    start: int
    ids: Tensor
    token_fields: dict[str, Tensor]


def mismatched_batches(
    batches: list[PackedBatch], layout: Layout, budget: int
) -> tuple[list[PackedBatch], int]:
    """This rank's rows with answers of other rows, in micro-batches of at most `budget` tokens; rows of all ranks.

    All ranks call it. `batches` are on the host.
    """
    rows: list[tuple[PackedBatch, LastAnswer]] = []
    for batch in batches:
        for sequence, sample in enumerate(batch.sequence_fields["sample"].tolist()):
            one = batch.select([sequence])
            if sample >= 0 and bool((one.labels != IGNORE).any()):
                rows.append((one, last_answer(one, sample)))
    gathered = layout.world.all_gather([answer for _, answer in rows])
    everyone: list[LastAnswer] = []
    for answers in layout.of_data_ranks(gathered):
        everyone += answers
    everyone.sort(key=lambda answer: answer.sample)
    following = dict(
        zip([one.sample for one in everyone], everyone[1:] + everyone[:1], strict=True)
    )
    swapped = [with_answer(row, own, following[own.sample], budget) for row, own in rows]
    parts = PackedBatch.concat(swapped).split(budget).parts if swapped else []
    return parts, len(everyone)


def last_answer(row: PackedBatch, sample: int) -> LastAnswer:
    """The last run of labels of a batch of one sequence."""
    places = (row.labels != IGNORE).nonzero()[:, 0]
    gaps = (places.diff() > 1).nonzero()[:, 0]
    first = int(places[gaps[-1] + 1 if len(gaps) else 0])
    tokens = slice(first + 1, int(places[-1]) + 2)  # a label is the next token
    fields = {name: value[tokens] for name, value in row.token_fields.items()}
    return LastAnswer(sample, first + 1, row.input_ids[tokens], fields)


def with_answer(row: PackedBatch, own: LastAnswer, other: LastAnswer, budget: int) -> PackedBatch:
    """The prompt of a row, media included, with another row's answer, which is cut to fit the budget."""
    ids = other.ids[: budget - own.start]
    count = len(ids)
    labels = torch.full_like(row.labels[:1], IGNORE).repeat(own.start + count)
    labels[own.start - 1 : own.start - 1 + count] = ids
    positions = row.position_ids
    answer_positions = positions[..., own.start : own.start + 1] + torch.arange(count)
    fields = {}
    for name, value in row.token_fields.items():
        fields[name] = torch.cat([value[: own.start], other.token_fields[name][:count]])
    return PackedBatch(
        torch.cat([row.input_ids[: own.start], ids]),
        labels,
        torch.cat([positions[..., : own.start], answer_positions], dim=-1),
        torch.tensor([0, own.start + count], dtype=torch.int32),
        fields,
        row.sequence_fields,
        row.media,
    )
