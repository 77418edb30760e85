"""Preference data in packed batches: sides of pairs and labelled rows, their log-ratios, losses, checks and metrics.

Legend: T tokens, S sequences.

The chosen and the rejected side of a pair are adjacent sequences of one pack (`data.pairs`), so `x_S - x_S.roll(-1)`
is, at a chosen side, its value minus that of its rejected side. All values are computed for all sequences and masked:
no shape depends on the data, and only the functions for batches on the host read values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.distributed import Layout
from mvp_engine.engine import Engine, StepContext
from mvp_engine.errors import UserError
from mvp_engine.kit.loss import per_token, sequence_log_probs, sequence_sums

SMALLEST = 1e-6  # of a mean negative log-prob, where the odds of ORPO become infinite


# ---- Sequences ------------------------------------------------------------------------------------------


def has_preference(batch: PackedBatch) -> Tensor:
    """Sequences with a preference: a side of a pair, or a row with a label; not those of an empty pack."""
    fields = batch.sequence_fields
    if "side" in fields:
        return fields["side"] != 0
    if "sample" in fields:
        return fields["sample"] >= 0
    return torch.ones_like(fields["label"], dtype=torch.bool)


def is_good(batch: PackedBatch) -> Tensor:
    """Sequences with a good answer: chosen sides, rows that are no pairs, rows with label 1."""
    fields = batch.sequence_fields
    if "side" in fields:
        return fields["side"] >= 0
    return has_preference(batch) & (fields["label"] == 1)


def log_ratios(log_probs_T: Tensor, batch: PackedBatch, reference_S: Tensor | None) -> Tensor:
    """The log-prob of each sequence's answer minus that of the reference: the implicit reward over beta."""
    scores_S = sequence_log_probs(log_probs_T, batch)
    if reference_S is not None:
        # A row without a side may have no reference, and NaN times 0 is NaN.
        scores_S = scores_S - torch.where(has_preference(batch), reference_S, 0.0)
    return scores_S


def num_labels(batch: PackedBatch) -> Tensor:
    """The number of tokens with a label of each sequence, at least 1."""
    return sequence_sums((batch.labels != IGNORE).float(), batch).clamp(min=1)


def good_answer_nll(log_probs_T: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """The NLL of good answers, and their number of tokens."""
    has_loss_T = per_token(is_good(batch), batch) & (batch.labels != IGNORE)
    return -torch.where(has_loss_T, log_probs_T, 0.0).sum(), has_loss_T.sum()


# ---- Losses ---------------------------------------------------------------------------------------------


def sigmoid_loss(logits_S: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """-log sigmoid(logits); `label_smoothing`: the share of pairs that is taken to be the wrong way round."""
    right_S = -(1 - label_smoothing) * F.logsigmoid(logits_S)
    wrong_S = -label_smoothing * F.logsigmoid(-logits_S)
    return right_S + wrong_S


def robust_loss(logits_S: Tensor, label_smoothing: float) -> Tensor:
    """`sigmoid_loss` of the right labels, unbiased where this share of pairs is the wrong way round."""
    right_S = -(1 - label_smoothing) * F.logsigmoid(logits_S)
    wrong_S = -label_smoothing * F.logsigmoid(-logits_S)
    return (right_S - wrong_S) / (1 - 2 * label_smoothing)


def log_odds(scores_S: Tensor) -> Tensor:
    """log(p / (1 - p)) of a mean log-prob log p < 0."""
    log_p_S = scores_S.clamp(max=-SMALLEST)
    return log_p_S - torch.log(-torch.expm1(log_p_S))


# ---- Metrics --------------------------------------------------------------------------------------------


def log_pairs(ctx: StepContext, batch: PackedBatch, rewards_S: Tensor) -> None:
    """Log means over pairs: the rewards of both sides, their margin, and how often it is positive."""
    is_chosen_S = batch.sequence_fields["side"] == 1
    is_rejected_S = batch.sequence_fields["side"] == -1
    pairs = is_chosen_S.sum()
    margin_S = rewards_S - rewards_S.roll(-1)
    ctx.log("rewards/chosen", torch.where(is_chosen_S, rewards_S, 0.0).sum(), pairs)
    ctx.log("rewards/rejected", torch.where(is_rejected_S, rewards_S, 0.0).sum(), pairs)
    ctx.log("margin", torch.where(is_chosen_S, margin_S, 0.0).sum(), pairs)
    ctx.log("accuracy", (is_chosen_S & (margin_S > 0)).sum(), pairs)


def log_labelled_rows(ctx: StepContext, batch: PackedBatch, rewards_S: Tensor) -> None:
    """Log means over rows: the rewards of good and of bad answers, and how often they have the label's sign."""
    is_row_S = has_preference(batch)
    is_good_S = is_good(batch)
    is_bad_S = is_row_S & ~is_good_S
    sign_S = torch.where(is_good_S, 1.0, -1.0)
    good = torch.where(is_good_S, rewards_S, 0.0).sum()
    bad = torch.where(is_bad_S, rewards_S, 0.0).sum()
    ctx.log("rewards/chosen", good, is_good_S.sum())
    ctx.log("rewards/rejected", bad, is_bad_S.sum())
    ctx.log("accuracy", (is_row_S & (sign_S * rewards_S > 0)).sum(), is_row_S.sum())


# ---- A whole step: batches on the host ----------------------------------------------------------------------


def pairs_per_token(batches: list[PackedBatch], layout: Layout) -> float:
    """Pairs (or labelled rows) of the step, over its tokens of good answers. All ranks call it.

    The engine divides a loss by the pairs. An NLL term times this ratio is then a mean over tokens.
    """
    pairs = 0
    tokens = 0
    for batch in batches:
        members = int(has_preference(batch).sum())
        pairs += members // 2 if "side" in batch.sequence_fields else members
        is_good_T = per_token(is_good(batch), batch)
        tokens += int((is_good_T & (batch.labels != IGNORE)).sum())
    all_pairs, all_tokens = layout.world.all_reduce([float(pairs), float(tokens)], torch.add)
    return all_pairs / max(1.0, all_tokens)


def log_nll_term(ctx: StepContext, layout: Layout, nll_weight: float) -> None:
    """Add the NLL term to the loss of an evaluation, at its end: the mean over all tokens is known there."""
    own = ctx.metrics.state_dict()
    sums = dict(zip(own["names"], own["device"].tolist(), strict=True))
    gathered = layout.world.all_gather([sums.get(f"mean/{name}") for name in ("loss", "nll")])
    pairs = sum(loss[1] for loss, _ in gathered if loss)
    nll = sum(nll[0] for _, nll in gathered if nll)
    tokens = sum(nll[1] for _, nll in gathered if nll)
    if layout.is_metrics_rank:
        ctx.log("loss", nll_weight * nll / max(1, tokens) * pairs, 0.0)


def check_pairs(batches: list[PackedBatch]) -> None:
    """Raise for a pair that was cut: each chosen side needs its rejected side next to it."""
    for batch in batches:
        fields: Any = batch.sequence_fields
        if "side" not in fields:
            raise UserError("the batch has no sides: load preference rows with data.pairs=true")
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


def check_last_tokens(model: Any, batches: list[PackedBatch]) -> None:
    """Raise for a row that ends with the pad token: classifiers of transformers read the last token before pad tokens.

    `model` is a value model. Its export would score such a row at another token than the training.
    """
    pad = getattr(model.hf.config.get_text_config(), "pad_token_id", None)
    for batch in batches:
        last_S = batch.input_ids[batch.cu_seqlens[1:].long() - 1]
        if pad is not None and bool((last_S == pad).any()):
            raise UserError(
                f"a row ends with the pad token {pad} of the model's config: an exported classifier would read its "
                "score one token earlier. Set model.config.pad_token_id to a token that no row ends with"
            )


# The KL term of KTO: prompts with answers of other rows, which the policy should find as likely as its reference does.
#
# Each row of a step gets the last answer of the next one, in the order of the samples of all ranks. So the term does
# not depend on how the rows are packed, split into micro-batches or divided among ranks.


def mismatched_kl(
    engine: Engine, reference: Any, batches: list[PackedBatch], budget: int
) -> Tensor:
    """The mean log-ratio of policy and reference over mismatched answers of all rows of the step, at least 0.

    All ranks call it.
    """

    def log_ratio_sum(batch: PackedBatch) -> Tensor:
        policy_S = sequence_log_probs(engine.model(batch, ["log_probs"])["log_probs"], batch)
        total: Tensor = (policy_S - reference.log_probs(batch, "train")).sum()
        return total

    parts, rows = mismatched_batches(batches, engine.layout, budget)
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    with engine.model_engine.eval_mode():
        for part in engine.model_engine.infer_micro_batches(parts, log_ratio_sum):
            total += part
    if engine.world.size > 1:
        dist.all_reduce(total)
    return (total / engine.layout.model_parallel_size / max(1, rows)).clamp(min=0).float()


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
