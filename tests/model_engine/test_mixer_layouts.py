"""Models with mixers on all layouts, with activation checkpointing and compiled: gradients to 1e-5."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
from families import parallel
from mixer_families import MIXERS, VISION_MIXERS, mixer_config, mixer_model
from torch.optim.lr_scheduler import LambdaLR

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel
from mvp_engine.model_engine import LanguageModelEngine, Settings

QUICK = [
    "qwen3_5_text",
    "lfm2_moe",
    "mamba",
]  # by a kernel's function, by a convolution alone, by sequence
OTHERS = [name for name in [*MIXERS, *VISION_MIXERS] if name not in QUICK]
HOW: dict[str, dict[str, Any]] = {
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "compiled": {"compile": "aot_eager"},
    "compiled, full": {"compile": "aot_eager", "activation_checkpointing": "full"},
    "compiled, attention": {"compile": "aot_eager", "activation_checkpointing": "attention"},
}


def batches(name: str, model: LanguageModel) -> list[PackedBatch]:
    """Two of the same size with other boundaries: those of the first must not be used for the second."""
    if name in VISION_MIXERS:  # rows with images and videos
        tiny_models.VISION.setdefault(name, ("", {}, "patches frame"))
        ones = tiny_models.samples(model, name)
        return [PackedBatch.concat(ones), PackedBatch.concat(ones[::-1])]
    g = torch.Generator().manual_seed(3)
    return [
        PackedBatch.from_sequences([torch.randint(3, 99, (n,), generator=g) for n in lengths])
        for lengths in ((7, 3, 11, 2), (2, 9, 12))
    ]


def gradients(name: str, layout: Layout, **how: Any) -> dict[str, torch.Tensor]:
    """Of both batches. Both forwards come before the backwards, so that a forward which is repeated comes late.

    Not if compiled: torch may compile a block again for the second, and repeat the first with that.
    """
    model = mixer_model(name)
    given = batches(name, model)
    engine = LanguageModelEngine(model, layout, Settings(seed=5, **how))
    engine.initialize(
        lambda model: torch.optim.SGD(model.parameters(), 0.0),
        lambda sgd: LambdaLR(sgd, lambda _: 1.0),
    )
    engine.model.eval()

    def loss(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = engine.model(batch, ["log_probs"])["log_probs"]
        return (torch.linspace(0.5, 1.5, len(log_probs)) * log_probs).sum(), batch.num_loss_tokens

    def loss_of_both(_: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        (first, count), (second, _) = map(loss, given)
        return first + second, count

    engine.optimizer_zero_grad()
    if "compile" in how:
        engine.forward_backward_batch(given, loss)
    else:
        engine.forward_backward_batch(given[:1], loss_of_both)
    grads = {n: p.grad for n, p in engine.model.named_parameters() if p.grad is not None}
    return {key: full_tensor(grad).clone() / layout.data_size for key, grad in grads.items()}


def check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert (found[key] - value).abs().max() <= 1e-5 * value.abs().max().clamp(min=1.0), key


def has_plan(name: str) -> bool:
    """Whether this transformers has a tensor-parallel plan for the layers; newer ones have more."""
    plan = mixer_config(name).get_text_config().base_model_tp_plan or {}
    return any("layers" in key for key in plan)


def on_two_ranks(names: list[str]) -> dict[str, dict[str, dict[str, torch.Tensor]]]:
    world = World.join("cpu")
    found = {}
    for kind in ("shard", "ulysses", "context", "tensor"):
        layout = Layout.of(world, parallel(**{kind: 2}))
        chosen = [name for name in names if kind != "tensor" or has_plan(name)]
        found[kind] = {name: gradients(name, layout) for name in chosen}
    with pytest.raises(UserError, match="mamba has no tensor-parallel plan in transformers"):
        gradients("mamba", layout)
    world.close()
    return found


def check_two_ranks(ranks: Any, names: list[str]) -> None:
    expected = {name: gradients(name, Layout(World.join("cpu"))) for name in names}
    for found in ranks.run(on_two_ranks, names):
        for of_layout in found.values():
            for name, grads in of_layout.items():
                check(grads, expected[name])


def test_mixers_on_shards_sequence_and_tensor_parallel_have_the_gradients_of_one_rank(
    ranks2,
) -> None:
    check_two_ranks(ranks2, QUICK)


@pytest.mark.campaign(only=True)
def test_all_mixers_on_shards_sequence_and_tensor_parallel_have_the_gradients_of_one_rank(
    ranks2,
) -> None:
    check_two_ranks(ranks2, OTHERS)


CASES = [(name, how) for name in [*MIXERS, *VISION_MIXERS] for how in HOW]
QUICK_CASES = [
    ("qwen3_5_text", "full"),
    ("qwen3_5_text", "selective"),
    ("mamba", "full"),
    ("mamba2", "compiled"),
]


def marks(case: tuple[str, str]) -> list[Any]:
    found: list[Any] = [] if case in QUICK_CASES else [pytest.mark.campaign(only=True)]
    return found


@pytest.mark.parametrize(
    ("name", "how"), [pytest.param(*case, marks=marks(case)) for case in CASES]
)
def test_mixers_with_activation_checkpointing_or_compiled_have_the_same_gradients(
    name: str, how: str
) -> None:
    layout = Layout(World.join("cpu"))
    torch._dynamo.reset()
    check(gradients(name, layout, **HOW[how]), gradients(name, layout))
