"""Preference losses: packed, on any split and layout, equal to an independent padded reference on full logits."""

from __future__ import annotations

import math
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from conftest import CAMPAIGN, ROOT, user_error
from families import config_of, overrides_of, parallel

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.engine import StepContext
from mvp_engine.hf import LanguageModel
from mvp_engine.imports import import_file
from mvp_engine.kit import MLLMEngine
from mvp_engine.kit.loss import sequence_log_probs
from mvp_engine.kit.preference import check_pairs
from mvp_engine.log.metrics import MetricStore
from mvp_engine.model_engine import LanguageModelEngine, Settings

RECIPE = ROOT / "recipes" / "preference"
PairsEngine: Any = import_file(RECIPE / "engine.py").PairsEngine
PreferenceLoss: Any = import_file(RECIPE / "settings.py").PreferenceLoss
LOSSES: list[dict[str, Any]] = [
    {"loss": "dpo", "label_smoothing": 0.1},
    {"loss": "ipo", "nll": 0.5},
    {"loss": "hinge", "beta": 0.7},
    {"loss": "robust", "label_smoothing": 0.2, "nll": 0.3},
    {"loss": "simpo", "beta": 2.0, "gamma": 0.3},
    {"loss": "orpo"},
    {"loss": "kto", "beta": 0.5, "desirable_weight": 1.5, "nll": 0.2},
]
LAYOUTS = [
    {"ulysses": 2},
    *(
        pytest.param(sizes, marks=CAMPAIGN)
        for sizes in ({"shard": 2}, {"tensor": 2}, {}, {"context": 2})
    ),
]
POLICY, REFERENCE = 5, 6  # seeds of their weights
PLAIN = 3  # a row that is no pair: only the NLL term counts it


def rows():
    """Each row's sequences, as (token ids, length of the prompt): two sides, or one of a row that is no pair."""
    g = torch.Generator().manual_seed(1)
    found = []
    for row in range(7):
        prompt = torch.randint(3, 40, (3 + row % 4,), generator=g)
        answers = [
            torch.randint(3, 40, (1 + (3 * row + side) % 5,), generator=g) for side in range(2)
        ]
        sides = [(torch.cat([prompt, answer]), len(prompt)) for answer in answers]
        found.append(sides[:1] if row == PLAIN else sides)
    return found


def packed(chosen, kto=False):
    """One batch of these rows; for KTO each row has one answer and a label."""
    sequences, fields = [], []
    for row in chosen:
        sides = rows()[row][:1] if kto else rows()[row]
        for place, side in enumerate(sides):
            sequences.append(side)
            fields.append((row, 0 if len(sides) == 1 else 1 - 2 * place, row % 2))
    masks = [torch.arange(len(ids)) >= prompt for ids, prompt in sequences]
    samples, sides_S, labels = torch.tensor(fields).T
    named = {"sample": samples, "label": labels} if kto else {"sample": samples, "side": sides_S}
    return PackedBatch.from_sequences([ids for ids, _ in sequences], masks, sequence_fields=named)


# ---- The padded reference ------------------------------------------------------------------------------------------


@cache
def padded_model(seed):
    """transformers' own model with the weights that an engine of this seed has."""
    engine = LanguageModelEngine(
        LanguageModel.on_meta(None, overrides_of("qwen3")), alone(), Settings(seed=seed)
    )
    engine.initialize()
    model = hf.Qwen3ForCausalLM._from_config(config_of("qwen3"), attn_implementation="eager")
    model.load_state_dict(
        {name.removeprefix("hf."): value for name, value in engine.model.state_dict().items()}
    )
    return model.float()


def padded_log_probs(model, sequences):
    """Summed log-probs of answers, and their lengths, from one right-padded batch and its full logits."""
    longest = max(len(ids) for ids, _ in sequences)
    input_ids = torch.stack([F.pad(ids, (0, longest - len(ids))) for ids, _ in sequences])
    mask = torch.stack([torch.arange(longest) < len(ids) for ids, _ in sequences])
    log_probs = (
        model(input_ids=input_ids, attention_mask=mask.long()).logits.float().log_softmax(-1)
    )
    found = log_probs[:, :-1].gather(-1, input_ids[:, 1:, None])[..., 0]
    answer = (
        torch.stack([(torch.arange(1, longest) >= prompt) for _, prompt in sequences]) & mask[:, 1:]
    )
    return (found * answer).sum(1), answer.sum(1)


def padded_loss(settings):
    """The loss of all rows, written after the papers, one pair at a time."""
    beta, eps = settings.beta, settings.label_smoothing
    policy, reference = padded_model(POLICY), padded_model(REFERENCE)
    if settings.loss == "kto":
        return padded_kto(settings)
    terms, nll, tokens = [], [], 0
    for row, sides in enumerate(rows()):
        log_probs, lengths = padded_log_probs(policy, sides)
        nll.append(-log_probs[0])
        tokens += int(lengths[0])
        if row == PLAIN:
            continue
        with torch.no_grad():
            ref, _ = padded_log_probs(reference, sides)
        means = log_probs / lengths
        ratio = (log_probs - ref)[0] - (log_probs - ref)[1]
        match settings.loss:
            case "dpo":
                term = (
                    -(1 - eps) * torch.sigmoid(beta * ratio).log()
                    - eps * torch.sigmoid(-beta * ratio).log()
                )
            case "robust":
                right, wrong = (
                    -torch.sigmoid(beta * ratio).log(),
                    -torch.sigmoid(-beta * ratio).log(),
                )
                term = ((1 - eps) * right - eps * wrong) / (1 - 2 * eps)
            case "hinge":
                term = torch.clamp(1 - beta * ratio, min=0)
            case "ipo":
                averages = (log_probs - ref) / lengths
                term = (averages[0] - averages[1] - 1 / (2 * beta)) ** 2
            case "simpo":
                term = -torch.sigmoid(beta * means[0] - beta * means[1] - settings.gamma).log()
            case "orpo":
                odds = means.exp() / (1 - means.exp())
                term = -beta * torch.sigmoid((odds[0] / odds[1]).log()).log()
        terms.append(term)
    return torch.stack(terms).mean() + settings.nll_weight * torch.stack(nll).sum() / tokens


def padded_kto(settings):
    policy, reference = padded_model(POLICY), padded_model(REFERENCE)
    sequences = [sides[0] for sides in rows()]
    swapped = []
    for row, (ids, prompt) in enumerate(sequences):
        other, start = sequences[(row + 1) % len(sequences)]
        swapped.append((torch.cat([ids[:prompt], other[start:]]), prompt))
    with torch.no_grad():
        ref, _ = padded_log_probs(reference, sequences)
        kl = (
            (padded_log_probs(policy, swapped)[0] - padded_log_probs(reference, swapped)[0])
            .mean()
            .clamp(min=0)
        )
    log_probs, lengths = padded_log_probs(policy, sequences)
    values = []
    for row, ratio in enumerate(log_probs - ref):
        if row % 2:
            values.append(
                settings.desirable_weight * (1 - torch.sigmoid(settings.beta * (ratio - kl)))
            )
        else:
            values.append(
                settings.undesirable_weight * (1 - torch.sigmoid(settings.beta * (kl - ratio)))
            )
    nll = -log_probs[1::2].sum() / lengths[1::2].sum()
    return torch.stack(values).mean() + settings.nll_weight * nll


# ---- The engine ----------------------------------------------------------------------------------------------------


def alone():
    return Layout(World(0, 1, 0, 1, torch.device("cpu")))


class SeededReference:
    """A second engine on the policy's layout, with other weights."""

    def __init__(self, layout, seed):
        model = LanguageModel.on_meta(None, overrides_of("qwen3"))
        self.engine = LanguageModelEngine(model, layout, Settings(seed=seed))
        self.engine.initialize()

    def log_probs(self, batch, split):
        with self.engine.eval_mode():
            return sequence_log_probs(self.engine.model(batch, ["log_probs"])["log_probs"], batch)

    def count_flops(self, ctx): ...


def engine_on(layout, reference=REFERENCE):
    """The engine's own step methods, without a run: a policy, its reference, and the settings that they read."""
    engine: Any = object.__new__(PairsEngine)
    engine.layout, engine.world, engine.device = layout, layout.world, layout.world.device
    engine.meter = SimpleNamespace(mark=str)  # nothing is timed
    model = LanguageModel.on_meta(None, overrides_of("qwen3"))
    engine.model_engine = LanguageModelEngine(model, layout, Settings(seed=POLICY))
    engine.model_engine.initialize(lambda model: torch.optim.SGD(model.parameters(), 0.0))
    engine.model = engine.model_engine.model
    engine.reference = SeededReference(layout, reference)
    return engine


def step(engine, settings, micro_batches):
    """Loss and gradients of a step as the model engine divides them, and the metrics."""
    layout = engine.layout
    engine.config = SimpleNamespace(preference=settings, data=SimpleNamespace(tokens_per_pack=40))
    kept, engine.reference = (
        engine.reference,
        None if settings.loss in ("simpo", "orpo") else engine.reference,
    )
    ctx = StepContext(
        1, 0, "train", MetricStore(layout.world, layout.is_mp_src_rank), micro_batches
    )
    with pytest.MonkeyPatch.context() as patch:
        # It checks rows of a loader.
        patch.setattr(MLLMEngine, "train_pre_step", lambda self, ctx: None)
        engine.train_pre_step(ctx)
    engine.model_engine.optimizer_zero_grad()
    totals = engine.model_engine.forward_backward_batch(
        micro_batches, partial(engine._forward_step, ctx)
    )
    loss, weight = (
        sum(each) for each in zip(*layout.world.all_gather(totals.tolist()), strict=True)
    )
    grads = {}
    for name, param in engine.model.named_parameters():
        if param.grad is not None:
            grads[name] = full_tensor(param.grad).clone() / weight * layout.model_parallel_size
    engine.reference = kept
    return loss / weight, grads, ctx.metrics.reduce()[0]


def all_losses(sizes, splits):
    """Every loss in every split into micro-batches, on this rank's share of the rows."""
    world = World.join("cpu")
    layout = Layout.of(world, parallel(**sizes))
    engine = engine_on(layout)
    found = []
    for given in LOSSES:
        for split in splits:
            own = split[layout.data_rank :: layout.data_size]
            batches = [packed(chosen, given["loss"] == "kto") for chosen in own]
            found.append(step(engine, PreferenceLoss(**given), batches))
    world.close()
    return found


@cache
def expected():
    found = []
    for given in LOSSES:
        model = padded_model(POLICY)
        model.zero_grad()
        loss = padded_loss(PreferenceLoss(**given))
        loss.backward()
        found.append(
            (float(loss.detach()), {f"hf.{n}": p.grad.clone() for n, p in model.named_parameters()})
        )
    return found


def assert_equal(found, wanted, what):
    assert found[0] == pytest.approx(wanted[0], abs=1e-5, rel=1e-5), what
    for name, grad in found[1].items():
        assert torch.allclose(grad, wanted[1][name], rtol=1e-5, atol=1e-5), (what, name)


SPLITS = [[[0, 1, 2, 3, 4, 5, 6]], [[5, 0], [6], [3], [1, 2, 4]]]


def test_preference_losses_and_gradients_equal_padded_reference_in_any_split():
    found = all_losses({}, SPLITS)
    for place, given in enumerate(LOSSES):
        for one in found[place * len(SPLITS) :][: len(SPLITS)]:
            assert_equal(one, expected()[place], given)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_preference_losses_and_gradients_equal_padded_reference_on_two_ranks(ranks2, sizes):
    for of_rank in ranks2.run(all_losses, sizes, SPLITS[1:]):
        for one, wanted, given in zip(of_rank, expected(), LOSSES, strict=True):
            assert_equal(one, wanted, (sizes, given))


def test_preference_metrics_are_exact_means_over_pairs():
    settings = PreferenceLoss(loss="dpo", beta=0.3)
    _, _, metrics = step(
        engine_on(alone()), settings, [packed([0, 1]), packed([2, PLAIN, 4]), packed([5, 6])]
    )
    scores = []
    with torch.no_grad():
        for row, sides in enumerate(rows()):
            if row != PLAIN:
                ratio = padded_log_probs(padded_model(POLICY), sides)[0]
                scores.append(0.3 * (ratio - padded_log_probs(padded_model(REFERENCE), sides)[0]))
    chosen, rejected = torch.stack(scores).T
    wanted = {"rewards/chosen": chosen, "rewards/rejected": rejected, "margin": chosen - rejected}
    wanted["accuracy"] = (chosen > rejected).float()
    assert {name: metrics[name] for name in wanted} == {
        name: pytest.approx(float(value.mean()), abs=1e-5) for name, value in wanted.items()
    }


def test_preference_policy_equal_to_reference_gives_ln_2_on_every_pack():
    engine = engine_on(alone(), reference=POLICY)
    for chosen in ([0, 1, 2], [4], [PLAIN, 5, 6]):
        loss, _, metrics = step(engine, PreferenceLoss(), [packed(chosen)])
        assert loss == pytest.approx(math.log(2), abs=1e-7)
        assert metrics["margin"] == 0


@pytest.mark.parametrize("cut", [[0, 2], [0], [1, 0, 2, 3]], ids=str)
def test_preference_cut_pair_raises(cut):
    with user_error("its other side is not next to it"):
        check_pairs([packed([0, 1]).select(cut)])
