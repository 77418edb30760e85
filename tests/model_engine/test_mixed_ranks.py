"""Ranks with text, images, videos, sounds or nothing side by side: no hang, and the gradients of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import is_supported, layout_of, mean_of_copies, overrides_of, parallel
from tiny_models import build_model, samples
from torch.optim.lr_scheduler import LambdaLR

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.hf import LanguageModel
from mvp_engine.model_engine import LanguageModelEngine, ModelSource, Settings

NAMES = [
    "qwen3_vl",
    "qwen2_5_vl",
    "llava",
    "internvl",
    "gemma3",
    "smolvlm",
    "qwen2_audio",
    "qwen2_5_omni_thinker",
]
NAMES = [name for name in NAMES if is_supported(name)]
# What each of four ranks has: [], or micro-batches of samples 0 (text), 1 (one item), 2 (two, of two kinds if any)
SHARES = [[[0], [0]], [[1]], [], [[2, 0], [0], [1]]]
FROZEN = ["qwen3_vl", "llava", "qwen2_audio"]  # also with frozen encoders
ENCODERS = ("*vision*", "*visual*", "*audio*")


def share(model: LanguageModel, name: str, share: list[list[int]]) -> list[PackedBatch]:
    ones = samples(model, name)
    # A batch of text does not even have an empty list of images.
    text = PackedBatch(
        ones[0].input_ids,
        ones[0].labels,
        ones[0].position_ids,
        ones[0].cu_seqlens,
        ones[0].token_fields,
    )
    return [
        text if members == [0] else PackedBatch.concat([ones[i] for i in members])
        for members in share
    ]


def trained(
    name: str, layout: Layout, shares: list[list[list[int]]], frozen: bool
) -> dict[str, torch.Tensor]:
    """Gradients and evaluated log-probs after one step in which rank r has share r of the data."""
    model = build_model(LanguageModel, name)
    names = [n for n, _ in model.named_parameters()]
    freeze = [p for p in ENCODERS if any(p[1:-1] in n for n in names)] if frozen else []
    mine = share(
        model,
        name,
        [batch for part in shares[layout.data_rank :: layout.data_size] for batch in part],
    )
    engine = LanguageModelEngine(model, layout, Settings(freeze=tuple(freeze)))
    engine.initialize(
        lambda m: torch.optim.SGD(m.parameters(), 0.0), lambda o: LambdaLR(o, lambda _: 1.0)
    )
    engine.model.eval()

    def loss(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        out = engine.model(batch, ["log_probs", "entropy"])
        return out["entropy"].sum() - out["log_probs"].sum(), batch.num_loss_tokens

    engine.train_batch(mine, loss)
    found = {
        n: full_tensor(p.grad) for n, p in engine.model.named_parameters() if p.grad is not None
    }
    with engine.eval_mode():
        losses = [loss_sum for loss_sum, _ in engine.infer_micro_batches(mine, loss)]
    found["evaluated"] = sum(losses, torch.zeros(()))
    return found


def on_ranks(name: str, sizes: dict[str, int], frozen: bool) -> dict[str, Any]:
    with layout_of(**sizes) as layout:
        found = trained(name, layout, SHARES, frozen)
        found["evaluated"] = mean_of_copies(layout, found["evaluated"])
        return found


CAMPAIGN = pytest.mark.campaign(only=True)
# The kinds of encoders: each in the suite on shards or on Ulysses, with trained or with frozen encoders.
ON_SHARDS = [("gemma3", False), ("qwen3_vl", True)]
ON_ULYSSES = ["qwen3_vl", "qwen2_audio"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        pytest.param(name, frozen, marks=[] if (name, frozen) in ON_SHARDS else CAMPAIGN)
        for frozen in (False, True)
        for name in (FROZEN if frozen else NAMES)
    ],
)
def test_sharded_ranks_with_different_media_give_the_gradients_of_one(
    ranks4, name: str, frozen: bool
) -> None:
    check(ranks4.run(on_ranks, name, {"shard": 4}, frozen), name, frozen)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in ON_ULYSSES else pytest.param(name, marks=CAMPAIGN) for name in NAMES]
)
def test_ulysses_ranks_with_different_media_give_the_gradients_of_one(ranks4, name: str) -> None:
    check(ranks4.run(on_ranks, name, {"shard": 2, "ulysses": 2}, False), name, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "sizes"),
    [
        ("qwen3_vl", 2, {"shard": 2}),
        pytest.param("qwen3_vl", 4, {"shard": 2}, marks=CAMPAIGN),
        pytest.param("llava", 4, {"tensor": 2, "shard": 2}, marks=CAMPAIGN),
    ],
)
def test_other_layouts_with_different_media_give_the_gradients_of_one(
    request, name: str, ranks: int, sizes: dict[str, int]
) -> None:
    check(request.getfixturevalue(f"ranks{ranks}").run(on_ranks, name, sizes, False), name, False)


def check(results: list[dict[str, torch.Tensor]], name: str, frozen: bool) -> None:
    expected = trained(name, Layout(World(0, 1, 0, 1, torch.device("cpu"))), SHARES, frozen)
    seen = [n for n in expected if any(part in n for part in ("vision", "visual", "audio"))]
    assert bool(seen) != frozen
    for result in results:
        assert set(result) == set(expected)
        for key, value in expected.items():
            scale = max(1.0, float(value.abs().max()))
            assert torch.allclose(result[key] / scale, value / scale, rtol=1e-5, atol=1e-5), key


def encoders_alone(layout: Layout) -> list[dict[str, torch.Tensor]]:
    """Gradients, losses and gradient norm of two steps in which only encoders train, the first one of text."""
    model = build_model(LanguageModel, "qwen3_vl")
    mine = list[list[PackedBatch]]()
    for shares in ([[[0]], [[0], [0]]], SHARES):
        own = [batch for part in shares[layout.data_rank :: layout.data_size] for batch in part]
        mine.append(share(model, "qwen3_vl", own))
    engine = LanguageModelEngine(model, layout, Settings(freeze=("llm",)))
    engine.initialize(
        lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 0.1)
    )

    def loss(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return engine.model(batch, ["loss"])["loss"], batch.num_loss_tokens

    found = []
    for batches in mine:
        numbers = engine.train_batch(batches, loss)
        params = engine.model.named_parameters()
        grads = {n: full_tensor(p.grad).clone() for n, p in params if p.grad is not None}
        of_step = torch.tensor(engine.step_status()[0].loss)
        found.append({**grads, "norm": numbers.grad_norm.float().cpu(), "loss": of_step})
    return found


def encoders_alone_on_ranks(sizes: dict[str, int]) -> list[dict[str, torch.Tensor]]:
    with layout_of(**sizes) as layout:
        return encoders_alone(layout)


@pytest.mark.parametrize("sizes", [{"shard": 2}, {"shard": 1}])
def test_text_trains_nothing_where_only_encoders_train(ranks2, sizes: dict[str, int]) -> None:
    expected = encoders_alone(Layout(World(0, 1, 0, 1, torch.device("cpu"))))
    assert set(expected[0]) == {"norm", "loss"}
    assert expected[0]["norm"] == 0 < expected[1]["norm"]
    assert any("visual.merger" in name for name in expected[1])
    for result in ranks2.run(encoders_alone_on_ranks, sizes):
        for found, wanted in zip(result, expected, strict=True):
            assert set(found) == set(wanted)
            for key, value in wanted.items():
                scale = max(1.0, float(value.abs().max()))
                assert torch.allclose(found[key] / scale, value / scale, rtol=1e-5, atol=1e-5), key


def test_rank_without_data_runs_a_dummy_of_the_same_call(ranks2) -> None:
    """One of an earlier call, here of an inference, may lack what the step reads."""
    one, two = ranks2.run(after_inference)
    assert one == two == pytest.approx(after_inference(alone=True), rel=1e-5)


def after_inference(alone: bool = False) -> float:
    world = World(0, 1, 0, 1, torch.device("cpu")) if alone else World.join("cpu", timeout=100.0)
    layout = Layout.of(world, parallel(shard=world.size))
    engine = LanguageModelEngine(
        LanguageModelEngine.build_model(ModelSource(None, overrides_of("qwen3"))),
        layout,
        Settings(seed=1),
    )
    engine.initialize(lambda m: torch.optim.SGD(m.parameters(), 0.0))
    engine.infer_batch(PackedBatch.from_sequences([torch.arange(3, 20)]), ["log_probs"])
    batch = PackedBatch.from_sequences(
        [torch.arange(3, 20)], token_fields={"advantage": [torch.ones(17)]}
    )

    def loss(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return -(
            engine.model(batch, ["log_probs"])["log_probs"] * batch.token_fields["advantage"]
        ).sum(), batch.num_loss_tokens

    norm = float(
        engine.train_batch([batch] if world.rank == world.size - 1 else [], loss).grad_norm
    )
    world.close()
    return norm
