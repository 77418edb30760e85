"""Router replay: experts recorded in generation are those of the trainer, which has the scores of its own logits."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from conftest import CAMPAIGN, user_error
from families import overrides_of
from model_sweep import causal_types
from tiny_configs import tiny_config
from tiny_engines import ALONE, assert_close, engine_of, gradients, packed
from transformers import Qwen3MoeConfig

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.experts import moe_layers, router_replay
from mvp_engine.hf.experts.router_replay import RouterReplay, add_routes, without_routes
from mvp_engine.kit.decoding import Decoding, complete, with_completion
from mvp_engine.kit.rl import PolicyLoss
from mvp_engine.kit.rl.rollout import PackedRollout, Sample, Sampling, generate, rollout_batch
from mvp_engine.worker.group import WorkerGroup
from mvp_engine.worker.worker import WorkerSpec

SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
BATCH = PackedBatch.from_sequences([torch.arange(3, 10), torch.arange(5, 9)])


def moe_model(experts=32, k=4, **sizes):
    """With strong experts: another choice changes the probability of a token."""
    torch.manual_seed(0)
    shape = {**SIZES, "vocab_size": 99, "norm_topk_prob": True, **sizes}
    model = LanguageModel.from_config(
        Qwen3MoeConfig(**shape, num_experts=experts, num_experts_per_tok=k)
    )
    for name, param in model.named_parameters():
        param.data += (0.15 if "experts" in name else 0.05) * torch.randn_like(param)
    model.router_replay = RouterReplay.of(model)
    return model


def sampled(engine, **how):
    """Completions as a training batch, with the log-probs of the sampler."""
    prompts = packed(9, 14, 5)
    decoding = Decoding(24, temperature=1.0, samples=3, seed=1, experts=True, **how)
    sequences, routes = [], []
    for one in complete(engine, prompts, decoding):
        prompt = prompts.select([one.prompt])
        whole = with_completion(prompt, None, one.tokens)
        first = prompt.num_tokens - 1
        labels, log_probs = whole.labels.clone(), torch.zeros(whole.num_tokens)
        labels[first:-1] = whole.input_ids[first + 1 :]
        log_probs[first:-1] = torch.tensor(one.log_probs)
        fields = {"sampler_log_probs": log_probs}
        sequences.append(dataclasses.replace(whole, labels=labels, token_fields=fields))
        routes.append(one.experts)
    return PackedBatch.concat(add_routes(sequences, routes))


def trained(engine, batch):
    """Log-probs of the trainer, and the experts that it used."""
    replay = engine.model.router_replay
    with engine.eval_mode(), engine.autocast(), replay.recording():
        found = engine.model(batch, ["log_probs"])["log_probs"].float()
    return found, replay.recorded


def gap_of(batch, log_probs):
    return (log_probs - batch.token_fields["sampler_log_probs"])[batch.labels != -100].abs()


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no cache"])
def test_replay_halves_the_gap_of_bf16_and_no_token_is_far(use_cache):
    engine = engine_of(moe_model(), precision="bf16")
    batch = sampled(engine, use_cache=use_cache)
    given = batch.token_fields["experts"]
    is_known = (given >= 0).all(-1).all(-1)
    # All but the last token of each sequence, which is no input of the sampler.
    ends = batch.cu_seqlens[1:].long() - 1
    assert given.dtype == torch.int16
    assert (~is_known).nonzero()[:, 0].tolist() == ends.tolist()
    log_probs, used = trained(engine, batch)
    assert torch.equal(used[is_known], given[is_known])
    own_log_probs, own = trained(engine, without_routes(batch))
    assert not torch.equal(own[is_known].sort(-1).values, given[is_known].sort(-1).values)
    gap, own_gap = gap_of(batch, log_probs), gap_of(batch, own_log_probs)
    assert own_gap.max() > 0.1
    assert gap.mean() < own_gap.mean() / 2
    assert gap.max() < 0.1


def test_replay_in_float32_changes_no_bit():
    engine = engine_of(moe_model(num_hidden_layers=2))
    batch = sampled(engine)
    log_probs, used = trained(engine, batch)
    own_log_probs, own = trained(engine, without_routes(batch))
    assert torch.equal(used, own)
    assert torch.equal(log_probs, own_log_probs)
    known = batch.token_fields["experts"]
    assert torch.equal(torch.where(known < 0, own, known), own)


def test_later_turn_replays_the_experts_of_earlier_ones_and_adds_its_own():
    engine = engine_of(moe_model(num_hidden_layers=2), precision="bf16")
    first = packed(9)
    decoding = Decoding(6, temperature=1.0, experts=True)
    (turn,) = complete(engine, first, decoding)
    assert turn.experts.shape == (9 + len(turn.tokens) - 1, 2, 4)
    context = with_completion(first, None, [*turn.tokens, 7, 8])  # of a tool
    turn.experts[3] = torch.tensor([[9, 8, 7, 6], [1, 2, 3, 4]])
    (context,) = add_routes([context], [turn.experts])
    (second,) = complete(engine, context, decoding)
    assert torch.equal(second.experts[: len(turn.experts)], turn.experts)
    assert (second.experts >= 0).all()
    assert len(second.experts) == context.num_tokens + len(second.tokens) - 1


def random_routes(batch, model, seed=0):
    """Different experts of each token and layer, as a sampler might have chosen."""
    replay = model.router_replay
    g = torch.Generator().manual_seed(seed)
    experts = next(iter(moe_layers.modules(model).values())).num_experts
    shape = (batch.num_tokens, replay.layers, experts)
    routes = torch.rand(shape, generator=g).argsort(-1)[..., :2].short()
    (found,) = add_routes([batch], [routes])
    return found


@pytest.mark.parametrize(
    "family, scores_of",
    [
        ("qwen3_moe", lambda logits, index: logits.softmax(-1).gather(-1, index)),
        ("gpt_oss", lambda logits, index: logits.gather(-1, index).softmax(-1)),
        ("glm4_moe", lambda logits, index: logits.sigmoid().gather(-1, index)),
    ],
)
def test_scores_of_given_experts_follow_the_rule_of_the_family(family, scores_of):
    model = LanguageModel.from_config(tiny_config(family))
    model.eval().router_replay = RouterReplay.of(model)
    routers = [
        module for name, module in model.named_modules() if name.endswith((".gate", ".router"))
    ]
    seen = []
    for router in routers:
        router.register_forward_hook(lambda module, args, out: seen.append((module, out)))
    batch = random_routes(BATCH, model)
    model(batch, ["log_probs"])
    found = seen[-len(routers) :]  # before, each router is tested
    assert len(found) == model.router_replay.layers
    for layer, (router, (logits, scores, index)) in enumerate(found):
        given = batch.token_fields["experts"][:, layer].long()
        assert torch.equal(index, given)
        wanted = scores_of(logits.float(), given)
        if getattr(router, "norm_topk_prob", False):
            wanted = wanted / wanted.sum(-1, keepdim=True)
        wanted = wanted * getattr(router, "routed_scaling_factor", 1.0)
        torch.testing.assert_close(scores.float(), wanted)


def test_router_gets_gradients_through_given_experts():
    model = moe_model(experts=4, k=2, num_hidden_layers=1)
    batch = random_routes(BATCH, model)
    model(batch, ["log_probs"])["log_probs"].sum().backward()
    assert model.get_submodule("hf.model.layers.0.mlp.gate").weight.grad.abs().max() > 1e-4


def replayed_gradients(layout, how):
    model = moe_model(experts=4, k=2, num_hidden_layers=2)
    rows = [random_routes(packed(8, 6, seed=seed), model, seed) for seed in (1, 2)]
    if layout.data_size == 2:
        rows = rows[layout.data_rank : layout.data_rank + 1]
    engine = engine_of(model, layout, **how)
    loss = lambda batch: (engine.model(batch, ["loss"])["loss"], batch.num_loss_tokens)  # noqa: E731
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(rows, loss)
    assert engine.model.router_replay.refused is None
    return gradients(engine.model)


@pytest.mark.parametrize(
    "sizes, how",
    [
        ({"ulysses": 2}, {"activation_checkpointing": "full"}),
        ({"shard": 2, "expert": 2}, {}),
        pytest.param({"context": 2}, {}, marks=CAMPAIGN),
        pytest.param({"pipeline": 2}, {}, marks=CAMPAIGN),
        pytest.param({"tensor": 2}, {}, marks=CAMPAIGN),
        pytest.param({"shard": 2}, {"compile": "aot_eager"}, marks=CAMPAIGN),
    ],
    ids=str,
)
def test_replayed_gradients_on_layout_equal_those_of_one_rank(on_ranks, sizes, how):
    wanted = replayed_gradients(ALONE, {})
    own = gradients_without_routes()
    assert max(float((wanted[name] - own[name]).abs().max()) for name in wanted) > 1e-3
    for found in on_ranks(sizes, replayed_gradients, how):
        assert_close(found, {name: wanted[name] for name in found}, 2e-6, floor=1e-3)


def gradients_without_routes():
    engine = engine_of(moe_model(experts=4, k=2, num_hidden_layers=2))
    rows = [packed(8, 6, seed=seed) for seed in (1, 2)]
    loss = lambda batch: (engine.model(batch, ["loss"])["loss"], batch.num_loss_tokens)  # noqa: E731
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(rows, loss)
    return gradients(engine.model)


def test_rollout_batch_pads_missing_experts_and_survives_a_checkpoint():
    prompt = SimpleNamespace(batch=packed(4), media=[])
    experts = torch.arange(5 * 2 * 2, dtype=torch.int16).view(5, 2, 2)
    with_experts = Sample(0, [5, 6], [-1.0, -2.0], [0, 0], "stop", experts=experts)
    with_experts = Sample.from_state(with_experts.state_dict())
    without = Sample(0, [5], [-1.0], [0], "stop")
    field = rollout_batch([prompt], [with_experts, without]).token_fields["experts"]
    assert field.shape == (6 + 5, 2, 2)
    assert torch.equal(field[:5], experts)
    assert (field[5:] == -1).all()
    assert "experts" not in rollout_batch([prompt], [without]).token_fields


def test_experts_for_a_model_that_has_none_or_others_are_refused():
    dense = LanguageModel.from_config(tiny_config("qwen3"))
    dense.router_replay = RouterReplay.of(dense)
    assert dense.router_replay is None
    (batch,) = add_routes([BATCH], [torch.zeros(11, 4, 2, dtype=torch.int16)])
    with user_error("the token field experts: .* has no routers"):
        dense(batch, ["log_probs"])
    model = moe_model(experts=4, k=2, num_hidden_layers=2)
    (wide,) = add_routes([BATCH], [torch.zeros(11, 2, 3, dtype=torch.int16)])
    with user_error("has 3 experts of each token, and the model uses 2"):
        model(wide, ["log_probs"])
    (short,) = add_routes([BATCH], [torch.zeros(11, 1, 2, dtype=torch.int16)])
    with user_error("has 1 layers, and the model has 2 with experts"):
        model(short, ["log_probs"])


def test_rows_of_blocks_without_experts_are_left_out():
    """A server may send a row for every block: tiny GLM-4.5 begins with one without experts."""
    model = LanguageModel.from_config(tiny_config("glm4_moe"))
    model.eval().router_replay = RouterReplay.of(model)
    batch = random_routes(BATCH, model)
    wanted = model(batch, ["log_probs"])["log_probs"]
    routes = batch.token_fields["experts"]
    (whole,) = add_routes([BATCH], [torch.cat([torch.zeros_like(routes[:, :1]), routes], 1)])
    assert torch.equal(model(whole, ["log_probs"])["log_probs"], wanted)


# Routers that do not choose by a topk of their experts: by a hash of the token, a sparse mixer, one expert too many.
OFF = {"deepseek_v4", "phimoe", "zaya"}


def test_router_without_a_choice_is_left_off_with_a_warning(monkeypatch):
    warnings = []
    monkeypatch.setattr(
        router_replay.LOGGER, "warning", lambda text, *args: warnings.append(text % args)
    )
    model = LanguageModel.from_config(tiny_config("phimoe")).eval()
    replay = model.router_replay = RouterReplay.of(model)
    with replay.recording(), torch.no_grad():
        model(BATCH, ["log_probs"])
    assert replay.recorded is None
    assert len(warnings) == 1
    assert "PhimoeTopKRouter does not choose by one topk of its experts" in warnings[0]
    with user_error("the token field experts: PhimoeTopKRouter"):
        model(random_routes(BATCH, model), ["log_probs"])


@CAMPAIGN
def test_every_family_with_experts_replays_or_is_off():
    off, on = set(), set()
    for name in causal_types():
        try:
            model = LanguageModel.from_config(tiny_config(name)).eval()
        except Exception:  # noqa: BLE001 - `test_model_sweep.py` says why it cannot be built
            continue
        if not moe_layers.modules(model) or name == "inkling_text":  # on padded rows
            continue
        replay = model.router_replay = RouterReplay.of(model)
        with torch.no_grad():
            plain = model(BATCH, ["log_probs"])["log_probs"]
            with replay.recording():
                model(BATCH, ["log_probs"])
            if replay.refused:
                off.add(name)
                continue
            (given,) = add_routes([BATCH], [replay.recorded])
            assert torch.equal(model(given, ["log_probs"])["log_probs"], plain), name
            rolled = replay.recorded.roll(1, 0)
            (given,) = add_routes([BATCH], [rolled])
            with replay.recording():
                model(given, ["log_probs"])
            assert torch.equal(replay.recorded, rolled), name
        on.add(name)
    assert off == OFF
    assert len(on) >= 44


def test_worker_group_samples_and_trains_with_the_same_experts():
    """As an RL run does it: by a rollout of the actor, in one batch with other fields, then an update."""
    config = {**overrides_of("qwen3_moe"), "num_hidden_layers": 2}
    spec = WorkerSpec.of(
        None, model={"config": config}, precision="bf16", optim={}, device="cpu", total_steps=1
    )
    prompts = [SimpleNamespace(batch=packed(n), media=[], key=n) for n in (5, 8)]
    with WorkerGroup.start(spec) as group:
        rollout = PackedRollout(group, budget=64)
        samples = generate(rollout, prompts, Sampling(6, samples=2, experts=True))
        batch = rollout_batch(prompts, samples)
        assert batch.token_fields["experts"].shape == (batch.num_tokens, 2, 2)
        log_probs = group.infer(batch, ["log_probs"], budget=16)["log_probs"]  # in several parts
        assert gap_of(batch, log_probs).max() < 0.1
        batch.token_fields["advantages"] = torch.ones(batch.num_tokens)
        (numbers,) = group.update(batch, PolicyLoss(), budget=16)
        assert numbers.skipped is None
        plain = generate(rollout, prompts, Sampling(6, samples=2))
        assert plain[0].experts is None
