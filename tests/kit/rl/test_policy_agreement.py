"""Policy losses and advantages give the numbers of TRL 1.16 (GRPO, RLOO) and of verl 0.9 (`core_algos`), called as they
are on the same padded tensors. Neither is a dependency: without them the tests are skipped."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import CAMPAIGN
from torch import Tensor, nn

from mvp_engine.data.batch import PackedBatch
from mvp_engine.kit.rl import (
    PolicyLoss,
    ValueLoss,
    gae,
    group_advantages,
    kl_penalty,
    reinforce_pp,
    token_rewards,
    whiten,
)
from mvp_engine.kit.rl.policy import importance_weights
from mvp_engine.kit.rl.settings import Correction

pytestmark = CAMPAIGN

B, L = 6, 9
G = torch.Generator().manual_seed(11)
MASK = (torch.arange(L) < torch.tensor([9, 4, 7, 1, 6, 9])[:, None]).float()
MASK[2, 3:5] = 0  # a tool's tokens
FIELDS = {
    name: torch.randn(B, L, generator=G)
    for name in ("advantages", "returns", "old_values", "values")
}
LOG_PROBS = -torch.rand(B, L, generator=G) * 3
FIELDS["old_log_probs"] = LOG_PROBS + 0.3 * torch.randn(B, L, generator=G)
FIELDS["reference_log_probs"] = LOG_PROBS + 0.4 * torch.randn(B, L, generator=G)
FIELDS["sampler_log_probs"] = FIELDS["old_log_probs"] + 0.2 * torch.randn(B, L, generator=G)
OF_SEQUENCES = torch.randn(B, generator=G)
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])


def pack(values):
    """Answers as sequences with a prompt of one token: entry t is about the answer's token t."""
    lengths = [int(row.nonzero().max()) + 1 for row in MASK]
    return [
        torch.cat([row[:length], torch.zeros(1)])
        for row, length in zip(values, lengths, strict=True)
    ]


def unpack(values_T, batch):
    padded = torch.zeros(B, L)
    for row, part in enumerate(values_T.split(batch.lengths.tolist())):
        padded[row, : len(part) - 1] = part[:-1]
    return padded * MASK


def batch_of(**changed):
    masks = [torch.cat([torch.zeros(1), part[:-1]]).bool() for part in pack(MASK)]
    fields = {name: pack(value) for name, value in (FIELDS | changed).items()}
    return PackedBatch.from_sequences(
        [torch.arange(len(mask)) for mask in masks], masks, token_fields=fields
    )


class Given(nn.Module):
    """A model whose outputs are given."""

    def __init__(self, batch, values):
        super().__init__()
        self.values = torch.cat(pack(values)).requires_grad_()
        self.masked = torch.where(batch.labels == -100, 0.0, self.values)

    def forward(self, batch, outputs, temperature=None):
        return {
            "log_probs": self.masked,
            "values": self.masked,
            "label_entropy": torch.zeros_like(self.values),
        }


def ours(loss, values=LOG_PROBS, **changed):
    """The loss and its gradient with respect to the model's outputs."""
    batch = batch_of(**changed)
    model = Given(batch, values)
    total, weight = loss(model, batch, lambda *_: None)
    (total / weight).backward()
    assert model.values.grad is not None
    return (total / weight).detach(), unpack(model.values.grad, batch)


def assert_agree(found, loss, leaf, tolerance=2e-6):
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert (found[0] - loss.detach()).abs() < tolerance, (found[0], loss)
    assert (found[1] - gradient).abs().max() < tolerance
    assert gradient.abs().max() > 1e-3


def leaf_of(values):
    return values.clone().requires_grad_()


# ---- verl ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def verl():
    return pytest.importorskip("verl.trainer.ppo.core_algos")


def verl_config(**options):
    from verl.workers.config import ActorConfig

    return ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **options)


NORMS = [
    ("token-mean", {"norm": "token"}, {}),
    ("seq-mean-token-mean", {"norm": "sequence"}, {}),
    ("seq-mean-token-sum-norm", {"norm": "constant", "length": 12}, {"loss_scale_factor": 12}),
]


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm[0])
@pytest.mark.parametrize("kind", ["vanilla", "gspo", "cispo"])
def test_policy_loss_agrees_with_verl(verl, kind, norm):
    name, options, of_batch = norm
    low, high = (0.02, 0.03) if kind == "gspo" else (0.2, 0.28)
    config = verl_config(clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=1.4)
    config.global_batch_info.update(of_batch)
    options = {**options, "clip": (low, high)}
    options |= {
        "vanilla": {"dual_clip": 1.4},
        "gspo": {"ratio": "sequence"},
        "cispo": {"cispo": True},
    }[kind]
    weights = (FIELDS["old_log_probs"] - FIELDS["sampler_log_probs"]).exp().clamp(max=1.1)
    leaf = leaf_of(LOG_PROBS)
    arguments = (FIELDS["old_log_probs"], leaf, FIELDS["advantages"], MASK, name, config, weights)
    loss, _ = verl.get_policy_loss_fn(kind)(*arguments)
    assert_agree(ours(PolicyLoss(**options), importance=weights), loss, leaf)


@pytest.mark.parametrize("kind", ["geo_mean", "sapo"])
def test_gmpo_and_sapo_agree_with_verl(verl, kind):
    """Of verl's GMPO one advantage of each sequence, and no weights: it has their geometric mean."""
    options = {"geo_mean": {"ratio": "clipped_sequence"}, "sapo": {"gate": (1.0, 1.05)}}[kind]
    config = verl_config(clip_ratio_low=0.1, clip_ratio_high=0.2)
    advantages = OF_SEQUENCES[:, None].expand(B, L)
    leaf = leaf_of(LOG_PROBS)
    arguments = (FIELDS["old_log_probs"], leaf, advantages, MASK, "seq-mean-token-mean", config)
    loss, _ = verl.get_policy_loss_fn(kind)(*arguments)
    found = ours(PolicyLoss(norm="sequence", clip=(0.1, 0.2), **options), advantages=advantages)
    assert_agree(found, loss, leaf)


@pytest.mark.parametrize("mask", [None, "token", "sequence", "geometric"])
@pytest.mark.parametrize("weights", [None, "token", "sequence"])
def test_correction_agrees_with_verl(verl, weights, mask):
    """verl's bounds are those of p(sampler) / p(trainer), in its modes token_k1, seq_sum_k1 and seq_mean_k1."""
    helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
    if weights is None and mask is None:
        return  # no correction
    log_ratio = (FIELDS["old_log_probs"] - FIELDS["sampler_log_probs"]) * MASK
    wanted = MASK.clone()
    options = {"weights": weights}
    if weights is not None:
        wanted, metrics = helper.compute_rollout_correction_weights(log_ratio, MASK, weights, 1.1)
        options["cap"] = 1.1
    if mask is not None:
        mode = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}[mask]
        bounds = f"{1 / 1.2}_{1 / 0.9}"
        kept, masked = helper.compute_rollout_rejection_mask(log_ratio, MASK, mode, bounds)
        wanted = wanted * kept
        options |= {"mask": mask, "bounds": [0.9, 1.2]}
    batch = batch_of()
    found, ours_of = importance_weights(Correction(**options), batch)
    assert torch.allclose(unpack(found, batch), wanted, atol=1e-6)
    if mask is None:
        ess, tokens = ours_of["ess"]
        assert ess / tokens == pytest.approx(metrics["rollout_is_eff_sample_size"], abs=1e-6)
    else:
        for name, theirs in (
            ("masked_tokens", "rollout_rs_masked_fraction"),
            ("masked_sequences", "rollout_rs_seq_masked_fraction"),
        ):
            total, count = ours_of[name]
            assert 0 < total <= count
            assert total / count == pytest.approx(masked[theirs], abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_agree_with_verl(verl, estimator):
    reference = FIELDS["reference_log_probs"]
    found = kl_penalty(LOG_PROBS, reference, estimator)
    assert torch.allclose(found, verl.kl_penalty(LOG_PROBS, reference, estimator), atol=1e-6)


def test_value_loss_agrees_with_verl(verl):
    leaf = leaf_of(FIELDS["values"])
    loss, _ = verl.compute_value_loss(leaf, FIELDS["returns"], FIELDS["old_values"], MASK, 0.2)
    assert_agree(ours(ValueLoss(clip=0.2), FIELDS["values"]), loss, leaf)


def test_gae_and_whitening_agree_with_verl(verl):
    batch = batch_of()
    rewards = torch.cat(pack(FIELDS["returns"] * MASK))
    advantages, returns = gae(batch.token_fields["values"], rewards, batch, 0.97, 0.9)
    wanted = verl.compute_gae_advantage_return(
        FIELDS["returns"] * MASK, FIELDS["values"], MASK, 0.97, 0.9
    )
    assert torch.allclose(unpack(whiten(advantages, batch), batch), wanted[0] * MASK, atol=2e-6)
    assert torch.allclose(unpack(returns, batch), wanted[1] * MASK, atol=2e-6)


def test_group_advantages_agree_with_verl(verl):
    batch = batch_of()
    scores = unpack(token_rewards(OF_SEQUENCES, batch), batch)
    index = GROUPS.numpy()
    for std in (True, False):
        wanted, _ = verl.compute_grpo_outcome_advantage(
            scores, MASK, index, norm_adv_by_std_in_grpo=std
        )
        found = group_advantages(OF_SEQUENCES, GROUPS, std=std)
        assert torch.allclose(found[:, None] * MASK, wanted, atol=2e-6)
    wanted, _ = verl.compute_rloo_outcome_advantage(scores, MASK, index)
    found = group_advantages(OF_SEQUENCES, GROUPS, std=False, leave_one_out=True)
    assert torch.allclose(found[:, None] * MASK, wanted, atol=2e-6)


def test_reinforce_pp_agrees_with_verl(verl):
    batch = batch_of()
    rewards = FIELDS["returns"] * MASK
    config = SimpleNamespace(gamma=0.95)
    wanted, _ = verl.compute_reinforce_plus_plus_outcome_advantage(rewards, MASK, config)
    found = reinforce_pp(torch.cat(pack(rewards)), batch, 0.95)
    assert torch.allclose(unpack(found, batch), wanted, atol=2e-6)


# ---- TRL -----------------------------------------------------------------------------------------------------------


class Accelerator:
    num_processes = 1

    def gather(self, value):
        return value

    gather_for_metrics = gather

    def reduce(self, value, reduction):
        return value


def trl_loss(trainer_class, leaf, inputs, **options):
    """TRL's own loss code on given log-probs: the trainer's attributes that it reads, without its model."""
    zeros = torch.zeros_like(leaf)
    args = SimpleNamespace(
        delta=options.pop("delta", None), use_bias_correction_kl=False, steps_per_generation=1
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (leaf, zeros, None),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=12,
        vllm_importance_sampling_correction=True,
        accelerator=Accelerator(),
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        args=args,
        **{"use_vllm": False, "beta": 0.0, "importance_sampling_level": "token", **options},
    )
    ids = torch.zeros(B, L, dtype=torch.long)
    common = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": MASK[:, :1],
        "completion_ids": ids,
        "completion_mask": MASK,
    }
    loss: Tensor = trainer_class._compute_loss(trainer, None, {**common, **inputs})
    return loss


PER_TOKEN = {
    "old_per_token_logps": FIELDS["old_log_probs"],
    "ref_per_token_logps": FIELDS["reference_log_probs"],
    "num_items_in_batch": MASK.sum(),
    "importance_sampling_ratio": (FIELDS["old_log_probs"] - FIELDS["sampler_log_probs"])
    .exp()
    .clamp(max=1.1),
}
TRL_LOSSES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"loss_type": "grpo"}, {"norm": "sequence"}),
    ({"loss_type": "bnpo", "beta": 0.2}, {"norm": "token", "kl": 0.2}),
    ({"loss_type": "dapo", "use_vllm": True}, {"norm": "token"}),
    ({"loss_type": "dr_grpo", "delta": 1.4}, {"norm": "constant", "length": 12, "dual_clip": 1.4}),
    (
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"norm": "sequence", "ratio": "sequence"},
    ),
    (
        {"loss_type": "cispo", "epsilon_high": 1.28},
        {"norm": "token", "cispo": True, "clip": (1.0, 0.28)},
    ),
]


@pytest.mark.parametrize("theirs, options", TRL_LOSSES, ids=str)
def test_policy_loss_agrees_with_trl_grpo(theirs, options):
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    leaf = leaf_of(LOG_PROBS)
    theirs = {"epsilon_low": 0.2, "epsilon_high": 0.28, **theirs}
    loss = trl_loss(trainer, leaf, {**PER_TOKEN, "advantages": OF_SEQUENCES}, **theirs)
    options = {"clip": (0.2, 0.28), **options}
    changed = {"advantages": OF_SEQUENCES[:, None].expand(B, L)}
    if theirs.get("use_vllm"):
        changed["importance"] = PER_TOKEN["importance_sampling_ratio"]
    found = ours(PolicyLoss(**options), **changed)
    assert_agree(found, loss, leaf)


def test_policy_gradient_agrees_with_trl_rloo_on_policy():
    trainer = pytest.importorskip("trl.trainer.rloo_trainer").RLOOTrainer
    leaf = leaf_of(LOG_PROBS)
    inputs = {"old_logps": (LOG_PROBS * MASK).sum(1), "advantages": OF_SEQUENCES}
    loss = trl_loss(trainer, leaf, inputs, epsilon_low=0.2, epsilon_high=0.2)
    (gradient,) = torch.autograd.grad(loss, leaf)
    advantages = OF_SEQUENCES[:, None].expand(B, L)
    _, found = ours(
        PolicyLoss(norm="constant", length=1), advantages=advantages, old_log_probs=LOG_PROBS
    )
    assert (found - gradient).abs().max() < 2e-6
