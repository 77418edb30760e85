"""Balance loss, z-loss and selection bias of experts: equal for every split of a batch, and they balance."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, read_metrics
from families import overrides_of, parallel
from ranks import RankPool
from test_expert_parallel import MORE, assert_close, media_rows, micro_batches
from tiny_models import build_model
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from mvp_engine.config.schema import Experts
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.experts.expert_balance import _RouterLoss
from mvp_engine.model_engine import LanguageModelEngine, Settings

BALANCES = {
    "qwen3_moe": Experts(balance="loss", weight=3.0, z=0.1),
    "glm4_moe": Experts(balance="bias", rate=0.01, z=0.1),
}
State = dict[str, Tensor]
LM = ROOT / "tests" / "recipes" / "packed_lm" / "train.yaml"


def engine_of(
    family: str, layout: Layout, experts: Experts, lr: float = 1e-2, **how: Any
) -> LanguageModelEngine:
    shape = {**overrides_of(family), **MORE.get(family, {}), **how.pop("shape", {})}
    settings = Settings(seed=5, experts=experts, **how)
    engine = LanguageModelEngine(LanguageModel.on_meta(None, shape), layout, settings)
    engine.initialize(lambda model: torch.optim.SGD(model.parameters(), lr))
    return engine


def step(engine: LanguageModelEngine, rows: list[PackedBatch]) -> dict[str, float]:
    def loss(micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        return engine.model(micro_batch, ["loss"])["loss"], micro_batch.num_loss_tokens

    numbers = engine.train_batch(rows, loss)
    return {name: float(value) for name, value in numbers.metrics.items()}


def weights_of(engine: LanguageModelEngine) -> State:
    found = {
        name: full_tensor(param.detach()).clone() for name, param in engine.model.named_parameters()
    }
    return found | {
        name: value.clone() for name, value in engine.model.named_buffers() if "bias" in name
    }


def trained(engine: LanguageModelEngine, ranks: list[int]) -> tuple[State, list[Any]]:
    """The weights after three steps on the data of these data-parallel ranks; counts of experts, and the gradients of
    router losses alone."""
    rows = [one for rank in ranks for one in micro_batches(rank)]
    balance: Any = engine.adapter.expert_balance
    start = balance.state()
    balance.load_state({"counts": [[9.0, 2.0, 3.0, 4.0]] * len(balance.sizes), "weight": 10.0})
    router_grads = gradient(engine, rows)
    balance.load_state(start)
    for _ in range(3):
        step(engine, rows)
        with engine.eval_mode():  # an evaluation does not count
            list(engine.infer_micro_batches(rows, lambda one: engine.model(one, ["loss"])))
    return weights_of(engine), [balance.state(), router_grads]


def on_layout(
    sizes: dict[str, int], families: list[str], how: dict[str, Any]
) -> dict[str, tuple[State, list[Any]]]:
    world = World.join("cpu")
    layout = Layout.of(world, parallel(**sizes))
    found = {}
    for family in families:
        found[family] = trained(
            engine_of(family, layout, BALANCES[family], **how), [layout.data_rank]
        )
    world.close()
    return found


def alone(family: str, **how: Any) -> LanguageModelEngine:
    return engine_of(family, Layout(World.join("cpu")), BALANCES[family], **how)


@pytest.mark.parametrize(
    ("sizes", "how"),
    [
        pytest.param({"shard": 2}, {}, marks=pytest.mark.campaign(only=True)),
        pytest.param({"replicate": 2}, {}, marks=pytest.mark.campaign(only=True)),
        ({"shard": 2, "expert": 2}, {"activation_checkpointing": "full"}),
        pytest.param(
            {"ulysses": 2},
            {"activation_checkpointing": "selective"},
            marks=pytest.mark.campaign(only=True),
        ),
        pytest.param({"tensor": 2}, {}, marks=pytest.mark.campaign(only=True)),
        pytest.param({"context": 2}, {}, marks=pytest.mark.campaign(only=True)),
        ({"pipeline": 2}, {}),
        pytest.param(
            {"pipeline": 2, "shard": 2, "expert": 2}, {}, marks=pytest.mark.campaign(only=True)
        ),
        pytest.param(
            {"shard": 2, "expert": 2},
            {"compile": "aot_eager"},
            marks=pytest.mark.campaign(only=True),
        ),
        pytest.param({"shard": 4, "expert": 2}, {}, marks=pytest.mark.campaign(only=True)),
        pytest.param(
            {"shard": 2, "ulysses": 2, "expert": 4}, {}, marks=pytest.mark.campaign(only=True)
        ),
    ],
    ids=str,
)
def test_balanced_steps_on_layout_equal_those_of_one_rank(
    request, sizes: dict[str, int], how: dict[str, Any]
) -> None:
    ranks = math.prod(size for name, size in sizes.items() if name != "expert")
    pool: RankPool = request.getfixturevalue(f"ranks{ranks}")
    data = list(range(sizes.get("replicate", 1) * sizes.get("shard", 1)))
    families = list(BALANCES)
    results = pool.run(on_layout, sizes, families, how)
    for family in families:
        wanted, counts = trained(alone(family), data)
        for found in results:
            assert found[family][1][0] == counts[0]  # exactly
            held = found[family][0]  # of a pipeline stage, a part
            assert_close(held, {name: wanted[name] for name in held}, family)
            of_routers = found[family][1][1]
            most = 2e-6 if "tensor" in sizes else 1e-6  # norms of heads, under tensor parallel
            assert_close(of_routers, {name: counts[1][name] for name in of_routers}, family, most)
        assert set().union(*(found[family][0] for found in results)) == wanted.keys()


def gradient(engine: LanguageModelEngine, rows: list[PackedBatch]) -> State:
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(
        rows, lambda one: (0.0 * engine.model(one, ["loss"])["loss"], 1.0)
    )
    return {
        n: full_tensor(p.grad).clone()
        for n, p in engine.model.named_parameters()
        if p.grad is not None
    }


@pytest.mark.parametrize("how", [{}, {"activation_checkpointing": "full"}], ids=str)
def test_router_losses_alone_do_not_depend_on_the_split(how: dict[str, Any]) -> None:
    """To 1e-6, with a loss of 0: what is left is the gradient of balance and z-loss."""
    sequences = [
        torch.randint(99, (n,), generator=torch.Generator().manual_seed(n))
        for n in (7, 3, 11, 2, 9)
    ]
    whole = PackedBatch.from_sequences(sequences)
    results = []
    for rows in ([whole], whole.split(11).parts, whole.split(20).parts[::-1]):
        engine = alone("qwen3_moe", lr=0.0, **how)
        step(engine, rows)
        results.append(gradient(engine, rows))
    assert max(float(grad.abs().max()) for grad in results[0].values()) > 1e-2
    for other in results[1:]:
        for name, grad in results[0].items():
            error = float((other[name] - grad).abs().max()) / max(1e-3, float(grad.abs().max()))
            assert error < 1e-6, (name, error)


def test_balance_loss_with_the_shares_of_its_own_batch_is_that_of_transformers() -> None:
    """transformers' loss sums its shares to K, and has one loss for all layers: one layer here."""
    shape = {"shape": {"num_hidden_layers": 1}}
    experts = Experts(balance="loss", weight=0.5)
    engine = engine_of("mixtral", Layout(World.join("cpu")), experts, lr=0.0, **shape)
    [row] = micro_batches(3)
    step(engine, [row])
    found = gradient(engine, [row])["hf.model.layers.0.mlp.gate.weight"] / row.num_loss_tokens
    logits: list[Tensor] = []
    router = engine.model.get_submodule("hf.model.layers.0.mlp.gate")
    handle = router.register_forward_hook(lambda _, args, out: logits.append(out[0]))
    engine.model(row, ["loss"])
    handle.remove()
    loss: Any = load_balancing_loss_func((logits[0],), num_experts=4, top_k=2)
    [wanted] = torch.autograd.grad(0.5 * loss / 2, [router.weight])  # type: ignore[list-item]
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-8)


def test_router_loss_gradient_is_that_of_autograd() -> None:
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


def test_balanced_run_resumed_from_checkpoint_is_bit_equal(tmp_path: Path) -> None:
    for family in BALANCES:
        engine = alone(family)
        rows = micro_batches(2)
        step(engine, rows)
        engine.save_checkpoint(tmp_path / family)
        step(engine, rows)
        again = alone(family)
        again.load_checkpoint(tmp_path / family)
        step(again, rows)
        wanted = weights_of(engine)
        assert all(torch.equal(value, wanted[name]) for name, value in weights_of(again).items())
        other = alone(family)
        other.load_checkpoint(tmp_path / family)
        other.adapter.expert_balance.load_state(
            {"counts": [[1.0] * 4] * len(other.adapter.expert_balance.sizes), "weight": 1.0}
        )  # type: ignore[union-attr]
        step(other, rows)
        changed = not all(
            torch.equal(value, wanted[name]) for name, value in weights_of(other).items()
        )
        assert changed  # so the counts matter


@pytest.mark.parametrize(
    ("family", "experts", "lr", "start"),
    [
        ("gpt_oss", Experts(balance="loss", weight=0.05), 0.02, 0.25),
        ("glm4_moe", Experts(balance="bias", rate=0.002), 0.01, 0.2),
    ],
    ids=["loss", "bias"],
)
@pytest.mark.campaign
def test_router_at_six_times_the_mean_is_balanced_in_200_steps(
    campaign_size, family: str, experts: Experts, lr: float, start: float
) -> None:
    """With random tokens, 1,024 a step: chance alone gives the busiest of 8 experts 1.15 times the mean."""
    steps = campaign_size(20, 200)
    number = {"gpt_oss": "num_local_experts", "glm4_moe": "n_routed_experts"}[family]
    shape = {"num_hidden_layers": 1, number: 8, "num_experts_per_tok": 1, "vocab_size": 997}
    if family == "glm4_moe":
        shape["first_k_dense_replace"] = 0
    if steps < 200:  # as fast as 200 steps, without their end
        experts = experts.model_copy(
            update={"weight": 2 * experts.weight, "rate": 10 * experts.rate}
        )
    engine = engine_of(family, Layout(World.join("cpu")), experts, lr=lr, shape=shape)
    for name, value in [*engine.model.named_parameters(), *engine.model.named_buffers()]:
        if name.endswith(("router.bias", "e_score_correction_bias")):
            value.data[0] = start
    g = torch.Generator().manual_seed(0)
    loads = []
    for _ in range(steps):
        rows = [
            PackedBatch.from_sequences([torch.randint(997, (64,), generator=g) for _ in range(16)])
        ]
        loads.append(step(engine, rows)["expert_load_max"])
    assert loads[0] > 6.0
    last = loads[-steps // 4 :]
    assert sum(last) / len(last) <= (1.3 if steps == 200 else 3.0), loads[:: steps // 10]


# ---- Dummies ----------------------------------------------------------------------------------------------------


def media_counts(sizes: dict[str, int] | None) -> Any:
    """Counts after two steps with images on the first data rank only, so that the other one runs a dummy sequence."""
    world = World.join("cpu")
    layout = Layout(world) if sizes is None else Layout.of(world, parallel(**sizes))
    model = build_model(LanguageModel, "qwen3_vl_moe")
    ranks = range(2) if sizes is None else [layout.data_rank]
    rows = [one for rank in ranks for one in media_rows(model, rank)]
    engine = LanguageModelEngine(
        model, layout, Settings(experts=Experts(balance="loss", weight=1.0))
    )
    engine.initialize(lambda model: torch.optim.SGD(model.parameters(), 1e-2))
    for _ in range(2):
        step(engine, rows)
    found = engine.adapter.expert_balance.state(), weights_of(engine)  # type: ignore[union-attr]
    world.close()
    return found


@pytest.mark.parametrize(
    "sizes",
    [
        {"shard": 2},
        pytest.param(
            {"shard": 2, "ulysses": 2, "expert": 2}, marks=pytest.mark.campaign(only=True)
        ),
    ],
    ids=str,
)
def test_dummy_sequences_are_not_counted(request, sizes: dict[str, int]) -> None:
    counts, weights = media_counts(None)
    pool: RankPool = request.getfixturevalue(f"ranks{2 * sizes.get('ulysses', 1)}")
    for found in pool.run(media_counts, sizes):
        assert found[0] == counts
        assert_close(found[1], weights, "qwen3_vl_moe")


# ---- Errors -----------------------------------------------------------------------------------------------------


def test_bias_of_a_router_without_one_is_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"experts\.balance=bias: the routers of qwen3_moe choose by their scores alone",
    ):
        engine_of("qwen3_moe", Layout(World.join("cpu")), Experts(balance="bias"))


def test_balance_of_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UserError, match="experts: qwen3 has no experts to balance"):
        engine_of("qwen3", Layout(World.join("cpu")), Experts(balance="loss"))


# ---- A training -------------------------------------------------------------------------------------------------


def test_balanced_training_resumed_on_expert_parallel_ranks_logs_the_loads_of_one_rank(
    train, ranks2: RankPool, tmp_path: Path
) -> None:
    words = [
        "lm.family=qwen3_moe",
        "experts.balance=loss",
        "experts.weight=1.0",
        "optim.schedule=constant",
    ]
    words += ["data.micro_batch_size=2"]
    assert train(*words, "loop.total_steps=4", config=LM, dir=tmp_path / "one") == 0
    cut = [
        *words,
        "resume=auto",
        f"project.dir={tmp_path / 'two'}",
        "parallel.shard=2",
        "parallel.expert=2",
    ]
    for steps in (2, 4):
        assert ranks2.launch(LM, *cut, f"loop.total_steps={steps}") == [0, 0]
    one, two = read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two")
    for name in ("expert_load", "expert_load_max"):
        assert [record[name] for record in one] == [record[name] for record in two]
        assert min(record[name] for record in one) >= 1.0
    assert [record["loss"] for record in one] == pytest.approx(
        [record["loss"] for record in two], rel=1e-5
    )
