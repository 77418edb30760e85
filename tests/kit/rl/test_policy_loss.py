"""Policy and value losses: packed, on any split and layout, equal to an independent padded reference on full logits."""

from __future__ import annotations

import itertools
import math
import re
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from conftest import ROOT, user_error
from families import config_of, overrides_of, parallel
from test_preference_loss import LAYOUTS, POLICY, alone, assert_equal, padded_model

from mvp_engine.config import compose
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.hf import LanguageModel, ValueModel
from mvp_engine.kit.rl import PolicyLoss, ValueLoss
from mvp_engine.kit.rl.policy import importance_weights
from mvp_engine.kit.rl.settings import Correction
from mvp_engine.model_engine import LanguageModelEngine, Settings, ValueModelEngine

LOSSES: list[dict[str, Any]] = [
    {"clip": (0.2, 0.28)},
    {"norm": "sequence", "kl": 0.3, "kl_estimator": "k3", "entropy": 0.1},
    {"norm": "constant", "length": 9, "kl": 0.2, "kl_estimator": "k1", "dual_clip": 1.3},
    {"norm": "sequence", "ratio": "sequence", "clip": (0.03, 0.04)},
    {"norm": "sequence", "cispo": True, "clip": (1.0, 0.3), "kl": 0.1, "kl_estimator": "k2"},
    {"dual_clip": 1.5, "entropy": -0.05, "temperature": 0.7},
    {"norm": "sequence", "ratio": "clipped_sequence", "clip": (0.1, 0.2), "entropy": 0.1},
    {"norm": "sequence", "gate": (1.0, 1.05), "kl": 0.1},
    {"gate": (2.0, 3.0)},
]
VALUE_LOSSES: list[dict[str, Any]] = [{}, {"clip": 0.1}]
READ = ("old_log_probs", "importance", "reference_log_probs", "advantages")
SPLITS = [[[0, 1, 2, 3, 4, 5, 6]], [[5, 0], [6], [3], [1, 2, 4]]]


@cache
def sequences():
    """Token ids and loss masks. One answer has a tool's tokens inside, one sequence has no answer at all."""
    g = torch.Generator().manual_seed(3)
    found = []
    for row in range(7):
        ids = torch.randint(3, 90, (6 + (5 * row) % 7,), generator=g)
        mask = torch.arange(len(ids)) >= 2 + row % 3
        if row == 2:
            mask[5:7] = False
        found.append((ids, mask & (row != 4)))
    return found


@cache
def fields():
    """Random fields of each sequence's tokens, around the policy's own log-probs; NaN where there is no label."""
    g = torch.Generator().manual_seed(4)
    with torch.no_grad():
        log_probs, _, mask = padded_outputs(padded_model(POLICY))
    found = []
    for row, (ids, _) in enumerate(sequences()):
        noise = torch.randn(5, len(ids), generator=g)
        own = torch.cat([log_probs[row, : len(ids) - 1], torch.zeros(1)])
        has_label = torch.cat([mask[row, : len(ids) - 1], torch.zeros(1, dtype=torch.bool)])
        named = {"old_log_probs": own + 0.3 * noise[0], "reference_log_probs": own + 0.5 * noise[1]}
        named["sampler_log_probs"] = named["old_log_probs"] + 0.2 * noise[2]
        named |= {"advantages": noise[3], "returns": noise[4], "old_values": 0.2 * noise[0]}
        named["importance"] = noise[1].exp().clamp(max=1.5) * (
            noise[2] < 1
        )  # some tokens are masked
        found.append(
            {name: torch.where(has_label, value, torch.nan) for name, value in named.items()}
        )
    return found


# ---- The padded reference ------------------------------------------------------------------------------------------


def padded(values):
    longest = max(map(len, values))
    return torch.stack([F.pad(value, (0, longest - len(value))) for value in values])


def padded_outputs(model, temperature=1.0):
    """Log-probs of the next tokens, entropies, and the mask of answers, (B, L - 1) each, from the full logits."""
    input_ids = padded([ids for ids, _ in sequences()])
    attention = padded([torch.ones_like(ids) for ids, _ in sequences()])
    logits = (
        model(input_ids=input_ids, attention_mask=attention).logits[:, :-1].float() / temperature
    )
    log_p = logits.log_softmax(-1)
    mask = padded([mask.long() for _, mask in sequences()])[:, 1:].bool()
    return log_p.gather(-1, input_ids[:, 1:, None])[..., 0], -(log_p.exp() * log_p).sum(-1), mask


def padded_field(name):
    return padded([one[name] for one in fields()])[:, :-1].nan_to_num()


def padded_policy_loss(options):
    """Written after the papers, one answer at a time."""
    log_probs, entropies, masks = padded_outputs(
        padded_model(POLICY), options.get("temperature", 1.0)
    )
    low, high = options.get("clip", (0.2, 0.2))
    of_sequences = []
    for row, mask in enumerate(masks):
        if not mask.any():
            continue
        lp, entropy = log_probs[row][mask], entropies[row][mask]
        old, importance, ref, adv = (padded_field(name)[row][mask] for name in READ)
        ratio = (lp - old).exp()
        # GSPO-token: the sequence's ratio, each token's gradient.
        if options.get("ratio") == "sequence":
            ratio = (lp - old).mean().exp().detach() * (lp - lp.detach()).exp()
        if options.get("ratio") == "clipped_sequence":
            # GMPO with an advantage for each token, as in GSPO-token.
            own = torch.where(adv < 0, (lp - old).clamp(min=-low), (lp - old).clamp(max=high))
            terms = -adv * own.mean().exp().detach() * (own - own.detach()).exp()
        elif options.get("gate"):
            tau = torch.where(adv > 0, *map(torch.tensor, options["gate"]))
            terms = -adv * 4 / tau / (1 + (-tau * (ratio - 1)).exp())
        elif options.get("cispo"):
            terms = -ratio.clamp(1 - low, 1 + high).detach() * adv * lp
        else:
            terms = -torch.min(ratio * adv, ratio.clamp(1 - low, 1 + high) * adv)
            if bound := options.get("dual_clip"):
                terms = torch.where(adv < 0, torch.min(terms, -bound * adv), terms)
        terms = terms * importance
        kl = {"k1": lp - ref, "k2": 0.5 * (lp - ref) ** 2, "k3": (ref - lp).exp() - (ref - lp) - 1}
        terms = terms + options.get("kl", 0.0) * kl[options.get("kl_estimator", "k3")]
        of_sequences.append(terms - options.get("entropy", 0.0) * entropy)
    match options.get("norm", "token"):
        case "token":
            return torch.cat(of_sequences).mean()
        case "sequence":
            return torch.stack([terms.mean() for terms in of_sequences]).mean()
    return torch.stack([terms.sum() / options["length"] for terms in of_sequences]).mean()


@cache
def padded_value_model():
    engine = ValueModelEngine(
        ValueModel.on_meta(None, overrides_of("qwen3")), alone(), Settings(seed=POLICY)
    )
    engine.initialize()
    state = engine.model.state_dict()
    model = hf.Qwen3Model._from_config(config_of("qwen3"), attn_implementation="eager").float()
    model.load_state_dict(
        {name.removeprefix("hf."): v for name, v in state.items() if name.startswith("hf.")}
    )
    return model, state["score.weight"].clone().requires_grad_()


def padded_value_loss(options):
    model, weight = padded_value_model()
    input_ids = padded([ids for ids, _ in sequences()])
    attention = padded([torch.ones_like(ids) for ids, _ in sequences()])
    states = model(input_ids=input_ids, attention_mask=attention).last_hidden_state
    mask = padded([mask.long() for _, mask in sequences()])[:, 1:].bool()
    values = (states @ weight.T)[:, :-1, 0][mask]
    returns, old = padded_field("returns")[mask], padded_field("old_values")[mask]
    errors = (values - returns) ** 2
    if clip := options.get("clip"):
        errors = torch.max(errors, (torch.clamp(values, old - clip, old + clip) - returns) ** 2)
    return 0.5 * errors.mean()


@cache
def expected():
    found = []
    for options in LOSSES:
        model = padded_model(POLICY)
        model.zero_grad()
        loss = padded_policy_loss(options)
        loss.backward()
        found.append(
            (float(loss.detach()), {f"hf.{n}": p.grad.clone() for n, p in model.named_parameters()})
        )
    for options in VALUE_LOSSES:
        model, weight = padded_value_model()
        model.zero_grad()
        weight.grad = None
        loss = padded_value_loss(options)
        loss.backward()
        assert weight.grad is not None
        grads = {f"hf.{n}": p.grad.clone() for n, p in model.named_parameters()}
        found.append((float(loss.detach()), grads | {"score.weight": weight.grad.clone()}))
    return found


# ---- The engine ----------------------------------------------------------------------------------------------------


def packed(rows, named):
    ids, masks = ([sequences()[row][place] for row in rows] for place in range(2))
    of_tokens = {name: [named[row][name] for row in rows] for name in named[0]}
    return PackedBatch.from_sequences(ids, masks, token_fields=of_tokens)


def engines_on(layout):
    overrides = overrides_of("qwen3")
    settings = Settings(seed=POLICY)
    engines: list[Any] = [
        LanguageModelEngine(LanguageModel.on_meta(None, overrides), layout, settings),
        ValueModelEngine(ValueModel.on_meta(None, overrides), layout, settings),
    ]
    for engine in engines:
        engine.initialize(lambda model: torch.optim.SGD(model.parameters(), 0.0))
    return engines


def step(engine, loss, micro_batches):
    """Loss and gradients of a step as the model engine divides them, and the means that the loss logs."""
    layout, sums = engine.layout, {}

    def log(name, value, weight):
        before = sums.get(name, (0.0, 0.0))
        sums[name] = (before[0] + float(value), before[1] + float(weight))

    engine.optimizer_zero_grad()
    totals = engine.forward_backward_batch(
        micro_batches, lambda batch: loss(engine.model, batch, log)
    )
    loss_sum, weight = (
        sum(each) for each in zip(*layout.world.all_gather(totals.tolist()), strict=True)
    )
    grads = {}
    for name, param in engine.model.named_parameters():
        grads[name] = full_tensor(param.grad).clone() / weight * layout.model_parallel_size
    return (
        loss_sum / weight,
        grads,
        {name: value / weight for name, (value, weight) in sums.items()},
    )


def all_losses(sizes, splits, named):
    """Every loss in every split into micro-batches, on this rank's share of the sequences."""
    world = World.join("cpu")
    layout = Layout.of(world, parallel(**sizes))
    policy, critic = engines_on(layout)
    runs = [(policy, PolicyLoss(**options)) for options in LOSSES]
    runs += [(critic, ValueLoss(**options)) for options in VALUE_LOSSES]
    found = []
    for engine, loss in runs:
        for split in splits:
            own = [packed(rows, named) for rows in split[layout.data_rank :: layout.data_size]]
            found.append(step(engine, loss, own))
    world.close()
    return found


def test_policy_and_value_losses_and_gradients_equal_padded_reference_in_any_split():
    found = all_losses({}, SPLITS, fields())
    for place, wanted in enumerate(expected()):
        for one in found[place * len(SPLITS) :][: len(SPLITS)]:
            assert_equal(one, wanted, (LOSSES + VALUE_LOSSES)[place])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_policy_and_value_losses_and_gradients_equal_padded_reference_on_two_ranks(ranks2, sizes):
    for of_rank in ranks2.run(all_losses, sizes, SPLITS[1:], fields()):
        for one, wanted, options in zip(of_rank, expected(), LOSSES + VALUE_LOSSES, strict=True):
            assert_equal(one, wanted, (sizes, options))


def test_policy_metrics_are_exact_means_over_tokens():
    policy, _ = engines_on(alone())
    batches = [packed([0, 1], fields()), packed([2, 4], fields()), packed([3, 5, 6], fields())]
    _, _, metrics = step(policy, PolicyLoss(), batches)
    with torch.no_grad():
        log_probs, entropies, mask = padded_outputs(padded_model(POLICY))
    old, _, reference, advantages = (padded_field(name)[mask] for name in READ)
    sampler = padded_field("sampler_log_probs")[mask]
    ratio = (log_probs[mask] - old).exp()
    gap = reference - log_probs[mask]
    is_clipped = ((ratio > 1.2) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))
    wanted = {
        "ratio": ratio,
        "clip_fraction": is_clipped.float(),
        "approx_kl": ratio - 1 - ratio.log(),
        "entropy": entropies[mask],
        "kl": gap.exp() - gap - 1,
        "gap": (old - sampler).abs(),
    }
    assert 0 < is_clipped.float().mean() < 1
    assert metrics == {
        name: pytest.approx(float(value.mean()), abs=1e-5) for name, value in wanted.items()
    }


def test_policy_loss_without_old_log_probs_is_on_policy():
    policy, _ = engines_on(alone())
    with torch.no_grad():
        own = policy.model(packed([0, 1, 2], fields()), ["log_probs"])["log_probs"]
    batch = packed([0, 1, 2], fields())
    batch.token_fields["old_log_probs"] = own
    wanted = step(policy, PolicyLoss(), [batch])
    del batch.token_fields["old_log_probs"], batch.token_fields["sampler_log_probs"]
    found = step(policy, PolicyLoss(), [batch])
    assert_equal(found, wanted, "")
    assert found[2]["ratio"] == 1
    assert found[2]["clip_fraction"] == 0


def test_policy_loss_ratio_to_the_sampler_has_its_log_probs_as_old_ones_and_the_gap_of_now():
    policy, _ = engines_on(alone())
    batch = packed([0, 1, 2], fields())
    with user_error("ratio_to=sampler corrects already"):
        step(policy, PolicyLoss(ratio_to="sampler"), [batch])
    del batch.token_fields["importance"]
    sampler_T = batch.token_fields["sampler_log_probs"]
    batch.token_fields["old_log_probs"] = sampler_T
    wanted = step(policy, PolicyLoss(), [batch])
    del batch.token_fields["old_log_probs"]
    found = step(policy, PolicyLoss(ratio_to="sampler"), [batch])
    assert_equal(found, wanted, "")
    assert found[2].keys() == wanted[2].keys()
    with torch.no_grad():
        own_T = policy.model(batch, ["log_probs"])["log_probs"]
    has_label_T = batch.labels != -100
    gap = float((own_T - sampler_T)[has_label_T].abs().mean())
    assert (wanted[2]["gap"], found[2]["gap"]) == (0, pytest.approx(gap, abs=1e-5))
    assert gap > 0.1


def test_policy_loss_ratio_beyond_float32_keeps_gradients_finite():
    policy, _ = engines_on(alone())
    batch = packed([0, 1], fields())
    batch.token_fields["old_log_probs"] = torch.full((batch.num_tokens,), -200.0)
    loss, grads, _ = step(policy, PolicyLoss(kl=0.1), [batch])
    assert torch.isfinite(torch.tensor(loss))
    assert all(grad.isfinite().all() for grad in grads.values())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"clip": (1.2, 0.2)}, "clip="),
        ({"dual_clip": 1.1}, "above the clip range's end 1.2"),
        ({"norm": "constant"}, "length=None must be set"),
        ({"norm": "token", "length": 4}, "with norm=constant alone"),
        ({"norm": "tokens"}, "token, sequence or constant"),
        ({"cispo": True, "dual_clip": 3.0}, "None with cispo"),
        ({"gate": (1.0, 1.05), "ratio": "sequence"}, "None with cispo and ratios of sequences"),
        ({"gate": (1.0, 0.0)}, "two numbers above 0"),
        ({"ratio": "clipped_sequence", "dual_clip": 3.0}, "None with cispo, gate and clipped_seq"),
        ({"ratio": "clipped_sequence", "cispo": True}, "cispo=True must be False"),
    ],
    ids=str,
)
def test_policy_loss_wrong_option_raises(options, message):
    with user_error(message):
        PolicyLoss(**options)


@pytest.mark.parametrize("option", [{"kl": 0.1}, {"ratio_to": "sampler"}], ids=str)
def test_policy_loss_missing_field_raises(option):
    policy, _ = engines_on(alone())
    batch = packed([0, 1], fields())
    del batch.token_fields["reference_log_probs"], batch.token_fields["sampler_log_probs"]
    with user_error(f"PolicyLoss: {next(iter(option))}=.* needs the token field"):
        step(policy, PolicyLoss(**option), [batch])


# ---- Correction ----------------------------------------------------------------------------------------------------

CORRECTIONS = [
    {"weights": weights, "mask": mask, "bounds": [0.8, 1.1]}
    for weights in (None, "token", "sequence")
    for mask in (None, "token", "sequence", "geometric")
    if weights or mask
]


def correction_of(options):
    given = {key: value for key, value in options.items() if key != "bounds" or options["mask"]}
    cap = {"cap": 1.05} if options["weights"] else {}
    return Correction(**given, **cap)


@pytest.mark.parametrize("options", CORRECTIONS, ids=str)
def test_importance_weights_are_those_of_plain_loops(options):
    batch = packed(range(7), fields())
    found, metrics = importance_weights(correction_of(options), batch)
    old_T, sampler_T = (
        batch.token_fields[f"{name}_log_probs"].tolist() for name in ("old", "sampler")
    )
    low, high = options["bounds"]
    weights = [0.0] * batch.num_tokens
    masked, masked_sequences = 0, 0
    starts = batch.cu_seqlens.tolist()
    for first, end in itertools.pairwise(starts):
        places = [t for t in range(first, end) if batch.labels[t] != -100]
        total = sum(old_T[t] - sampler_T[t] for t in places)
        before = masked
        for t in places:
            ratios = {
                "token": math.exp(old_T[t] - sampler_T[t]),
                "sequence": math.exp(total),
                "geometric": math.exp(total / len(places)),
            }
            weights[t] = min(1.05, ratios[options["weights"]]) if options["weights"] else 1.0
            if options["mask"] and not low <= ratios[options["mask"]] <= high:
                weights[t] = 0.0
                masked += 1
        masked_sequences += masked > before
    assert found.tolist() == pytest.approx(weights, abs=1e-6)
    tokens = batch.num_loss_tokens
    assert metrics["masked_tokens"] == (masked, tokens)
    assert metrics["masked_sequences"] == (masked_sequences, 6)
    squares = sum(weight**2 for weight in weights)
    assert metrics["ess"] == (pytest.approx(sum(weights) ** 2 / squares), tokens)
    assert (0 < masked < tokens) == (options["mask"] is not None)


@pytest.mark.parametrize("shifted", [2.0, -2.0])
def test_geometric_mask_removes_exactly_the_sequences_with_shifted_tokens(shifted):
    """40 sequences of 25 tokens, two of them with all tokens (5 %) by another sampler."""
    batch = PackedBatch.from_sequences([torch.arange(26)] * 40, [torch.arange(26) > 0] * 40)
    g = torch.Generator().manual_seed(5)
    own_T = -2 * torch.rand(batch.num_tokens, generator=g)
    sampler_T = own_T + 0.05 * torch.randn(batch.num_tokens, generator=g)
    sequence_T = torch.arange(40).repeat_interleave(26)
    is_other_T = (sequence_T == 7) | (sequence_T == 31)
    fields = {"old_log_probs": own_T, "sampler_log_probs": sampler_T + shifted * is_other_T}
    batch.token_fields |= fields
    weights_T, metrics = importance_weights(Correction(weights=None, mask="geometric"), batch)
    assert torch.equal(weights_T == 1, (batch.labels != -100) & ~is_other_T)
    assert metrics["masked_tokens"] == (50, 1000)
    assert metrics["masked_sequences"] == (2, 40)
    assert metrics["ess"] == (950, 1000)


def test_masked_tokens_stay_in_the_denominator():
    policy, _ = engines_on(alone())
    batch = packed([0, 1, 2], fields())
    counts = []
    for share in (1.0, 0.0):
        batch.token_fields["importance"] = torch.full((batch.num_tokens,), share)
        loss, weight = PolicyLoss()(policy.model, batch, lambda *_: None)
        counts.append((float(loss.detach()) != 0, int(weight)))
    assert counts == [(True, batch.num_loss_tokens), (False, batch.num_loss_tokens)]


@pytest.mark.parametrize(
    "words, message",
    [
        ("rl.correction={weights:null}", "weights and mask are both null: set one"),
        ("rl.correction={weights:null,mask:token,cap:3}", "rl.correction.cap is of weights"),
        ("rl.correction={bounds:[0.4,2]}", "rl.correction.bounds is of mask, which is null"),
        ("rl.correction={mask:geometric,bounds:[2,0.5]}", "low < high"),
        ("rl.correction={mask:mean}", "rl.correction.mask"),
        ("rl.importance_cap=2", "Here it is rl.correction, as {weights: token, cap: 2}"),
        ("rl.algorithm=sapo rl.clip=[0.1,0.1]", "a soft gate in place of clipping"),
    ],
)
def test_correction_that_means_nothing_is_refused(words, message):
    config = ROOT / "recipes" / "reverse_rl" / "configs" / "grpo.yaml"
    with user_error(re.escape(message)):
        compose(config, ["model.path=x", *words.split()])
