"""Balance loss, z-loss and selection bias of experts: equal for every split of a batch, and they balance."""

import pytest
import torch
from conftest import CAMPAIGN, read_metrics, user_error
from test_expert_parallel import all_batches, media_rows, micro_batches, shape_of
from tiny_engines import (
    ALONE,
    LM,
    assert_close,
    assert_equal,
    assert_metrics,
    engine_of,
    loss_of,
    packed,
    sgd,
    weights,
)
from tiny_engines import gradients as gradients_of
from tiny_engines import train as train_step
from tiny_models import build_model
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from mvp_engine.config.schema import Experts
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.experts.expert_balance import _RouterLoss

BALANCES = {
    "qwen3_moe": Experts(aux_loss_coef=3.0, router_z_loss_coef=0.1),
    "glm4_moe": Experts(bias_update_rate=0.01, router_z_loss_coef=0.1),
}


def balanced(family, layout=ALONE, lr=1e-2, shape=None, **how):
    config = {**shape_of(family), **(shape or {})}
    settings = {"seed": 5, "experts": BALANCES.get(family), **how}
    return engine_of(config, layout, lambda model: sgd(model, lr), **settings)


def balance_of(engine):
    return engine.adapter.expert_balance


def step(engine, rows):
    metrics = train_step(engine, *rows).metrics
    return {name: float(value) for name, value in metrics.items()}


def state_of(engine):
    """Weights, and the biases of routers."""
    biases = {name: value for name, value in engine.model.named_buffers() if "bias" in name}
    return weights(engine.model) | {name: value.clone() for name, value in biases.items()}


def router_gradients(engine, rows):
    """Of balance and z-loss alone."""
    loss = loss_of(engine)
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(rows, lambda batch: (0.0 * loss(batch)[0], 1.0))
    return gradients_of(engine.model)


def trained(engine, rows):
    """The weights after three steps, the counts of experts, and the gradients of router losses alone."""
    balance = balance_of(engine)
    start = balance.state()
    balance.load_state({"counts": [[9.0, 2.0, 3.0, 4.0]] * len(balance.sizes), "weight": 10.0})
    router_grads = router_gradients(engine, rows)
    balance.load_state(start)
    for _ in range(3):
        step(engine, rows)
        with engine.eval_mode():  # an evaluation does not count
            list(engine.infer_micro_batches(rows, loss_of(engine)))
    return state_of(engine), balance.state(), router_grads


def trained_families(layout, how):
    rows = micro_batches(layout.data_rank)
    return {family: trained(balanced(family, layout, **how), rows) for family in BALANCES}


EXPERT = {"shard": 2, "expert": 2}
LONG = [
    ({"shard": 2}, {}),
    ({"replicate": 2}, {}),
    ({"ulysses": 2}, {"activation_checkpointing": "selective"}),
    ({"tensor": 2}, {}),
    ({"context": 2}, {}),
    ({"pipeline": 2, **EXPERT}, {}),
    (EXPERT, {"compile": "aot_eager"}),
    ({"shard": 4, "expert": 2}, {}),
    ({"shard": 2, "ulysses": 2, "expert": 4}, {}),
]


@pytest.mark.parametrize(
    "sizes, how",
    [
        pytest.param(EXPERT, {"activation_checkpointing": "full"}, marks=pytest.mark.slow),
        ({"pipeline": 2}, {}),
        *(pytest.param(*one, marks=CAMPAIGN) for one in LONG),
    ],
    ids=str,
)
def test_balanced_steps_on_layout_equal_those_of_one_rank(on_ranks, sizes, how):
    data_size = sizes.get("replicate", 1) * sizes.get("shard", 1)
    most = 2e-6 if "tensor" in sizes else 1e-6  # norms of heads, under tensor parallel
    results = on_ranks(sizes, trained_families, how)
    for family in BALANCES:
        state, counts, router_grads = trained(balanced(family), all_batches(data_size))
        for result in results:
            held, its_counts, its_grads = result[family]  # of a pipeline stage, a part
            assert its_counts == counts  # exactly
            assert_close(held, {name: state[name] for name in held}, floor=1e-3, what=family)
            of_held = {name: router_grads[name] for name in its_grads}
            assert_close(its_grads, of_held, most, floor=1e-3, what=family)
        assert set().union(*(result[family][0] for result in results)) == state.keys()


@pytest.mark.parametrize("how", [{}, {"activation_checkpointing": "full"}], ids=str)
def test_router_losses_alone_do_not_depend_on_the_split(how):
    whole = packed(7, 3, 11, 2, 9)
    results = []
    for rows in ([whole], whole.split(11).parts, whole.split(20).parts[::-1]):
        engine = balanced("qwen3_moe", lr=0.0, **how)
        step(engine, rows)
        results.append(router_gradients(engine, rows))
    assert max(float(grad.abs().max()) for grad in results[0].values()) > 1e-2
    for other in results[1:]:
        assert_close(other, results[0], 1e-6, floor=1e-3)


def test_balance_loss_with_the_shares_of_its_own_batch_is_that_of_transformers():
    """transformers' loss sums its shares to K, and has one loss for all layers: one layer here."""
    experts = Experts(aux_loss_coef=0.5)
    engine = balanced("mixtral", lr=0.0, shape={"num_hidden_layers": 1}, experts=experts)
    row = micro_batches(3)[0]
    step(engine, [row])
    grads = router_gradients(engine, [row])
    found = grads["hf.model.layers.0.mlp.gate.weight"] / row.num_loss_tokens
    logits = []
    router = engine.model.get_submodule("hf.model.layers.0.mlp.gate")
    handle = router.register_forward_hook(lambda _, args, out: logits.append(out[0]))
    engine.model(row, ["loss"])
    handle.remove()
    loss = load_balancing_loss_func((logits[0],), num_experts=4, top_k=2)
    (expected,) = torch.autograd.grad(0.5 * loss / 2, [router.weight])
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-8)


def test_router_loss_gradient_is_that_of_autograd():
    logits = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    coefficients, z = torch.rand(4, dtype=torch.float64), torch.tensor(0.3)
    is_real = torch.tensor([True, True, False, True, True, False])
    scores = logits.softmax(-1).topk(2).values
    _RouterLoss.apply(scores, logits, coefficients, z, is_real, torch.tensor(8.0)).sum().mul(
        0.0
    ).backward()
    other = logits.detach().requires_grad_()
    of_token = (other.softmax(-1) * coefficients).sum(-1) + 0.3 * other.logsumexp(-1).square()
    (8.0 * of_token[is_real].sum()).backward()
    torch.testing.assert_close(logits.grad, other.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", BALANCES)
def test_balanced_run_resumed_from_checkpoint_is_bit_equal(family, tmp_path):
    engine = balanced(family)
    rows = micro_batches(2)
    step(engine, rows)
    engine.save_checkpoint(tmp_path)
    step(engine, rows)
    again, other = balanced(family), balanced(family)
    again.load_checkpoint(tmp_path)
    step(again, rows)
    expected = state_of(engine)
    assert_equal(state_of(again), expected)
    other.load_checkpoint(tmp_path)
    counts = [[1.0] * 4] * len(balance_of(other).sizes)
    balance_of(other).load_state({"counts": counts, "weight": 1.0})
    step(other, rows)
    changed = state_of(other)
    assert not all(torch.equal(value, expected[name]) for name, value in changed.items())


@pytest.mark.parametrize(
    "family, experts, lr, start",
    [
        ("gpt_oss", Experts(aux_loss_coef=0.05), 0.02, 0.25),
        ("glm4_moe", Experts(bias_update_rate=0.002), 0.01, 0.2),
    ],
    ids=["loss", "bias"],
)
@pytest.mark.campaign
def test_router_at_six_times_the_mean_is_balanced_in_200_steps(
    campaign_size, family, experts, lr, start
):
    """With random tokens, 1,024 a step: chance alone gives the busiest of 8 experts 1.15 times the mean."""
    steps = campaign_size(20, 200)
    number = {"gpt_oss": "num_local_experts", "glm4_moe": "n_routed_experts"}[family]
    shape = {"num_hidden_layers": 1, number: 8, "num_experts_per_tok": 1, "vocab_size": 997}
    if family == "glm4_moe":
        shape["first_k_dense_replace"] = 0
    if steps < 200:  # as fast as 200 steps, without their end
        faster = {"aux_loss_coef": 2, "bias_update_rate": 10}
        given = experts.model_dump(exclude_none=True)
        experts = Experts(**{key: value * faster.get(key, 1) for key, value in given.items()})
    engine = balanced(family, lr=lr, shape=shape, experts=experts)
    for name, value in [*engine.model.named_parameters(), *engine.model.named_buffers()]:
        if name.endswith(("router.bias", "e_score_correction_bias")):
            value.data[0] = start
    loads = []
    for seed in range(steps):
        rows = [packed(*[64] * 16, seed=seed, vocab=997)]
        loads.append(step(engine, rows)["expert_load_max"])
    assert loads[0] > 6.0
    last = loads[-steps // 4 :]
    assert sum(last) / len(last) <= (1.3 if steps == 200 else 3.0), loads[:: steps // 10]


def counts_and_weights(layout):
    """After two steps with images on the first data rank only, so that the other one runs a dummy sequence."""
    model = build_model(LanguageModel, "qwen3_vl_moe")
    rows = media_rows(model, layout)
    experts = Experts(aux_loss_coef=1.0)
    engine = engine_of(model, layout, lambda model: sgd(model, 1e-2), experts=experts)
    for _ in range(2):
        step(engine, rows)
    return balance_of(engine).state(), state_of(engine)


@pytest.mark.parametrize(
    "sizes",
    [
        {"shard": 2},
        pytest.param({"shard": 2, "ulysses": 2, "expert": 2}, marks=CAMPAIGN),
    ],
    ids=str,
)
def test_dummy_sequences_are_not_counted(on_ranks, sizes):
    counts, expected = counts_and_weights(ALONE)
    for its_counts, found in on_ranks(sizes, counts_and_weights):
        assert its_counts == counts
        assert_close(found, expected, floor=1e-3)


@pytest.mark.parametrize(
    "family, balance, message",
    [
        (
            "qwen3_moe",
            {"bias_update_rate": 0.001},
            "experts.bias_update_rate: the routers of qwen3_moe choose by their sc",
        ),
        ("qwen3", {"aux_loss_coef": 0.01}, "experts: qwen3 has no experts to balance"),
    ],
)
def test_balance_that_a_model_cannot_have_is_refused(family, balance, message):
    with user_error(message):
        balanced(family, experts=Experts(**balance))


@pytest.mark.slow
def test_balanced_training_resumed_on_expert_parallel_ranks_logs_the_loads_of_one_rank(
    train, ranks2, tmp_path
):
    words = ["lm.family=qwen3_moe", "experts.aux_loss_coef=1.0"]
    words += ["optim.schedule=constant", "data.micro_batch_size=2"]
    assert train(*words, "train.max_steps=4", config=LM, dir=tmp_path / "one") == 0
    cut = [*words, "resume=auto", f"output_dir={tmp_path / 'two'}"]
    cut += ["parallel.shard=2", "parallel.expert=2"]
    for steps in (2, 4):
        assert ranks2.launch(LM, *cut, f"train.max_steps={steps}") == [0, 0]
    one, two = read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two")
    for name in ("expert_load", "expert_load_max"):
        assert [record[name] for record in one] == [record[name] for record in two]
        assert min(record[name] for record in one) >= 1.0
    assert_metrics(two, one, loss=1e-5)
