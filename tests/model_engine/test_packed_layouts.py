"""Hugging Face models on every layout: each gradient of the first step, and the loss over five, to 1e-5."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, read_metrics
from families import overrides_of, parallel
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.distributed.ulysses import check_heads
from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel
from mvp_engine.launch import launch
from mvp_engine.model_engine import LanguageModelEngine, Settings

LM = ROOT / "tests" / "recipes" / "packed_lm" / "train.yaml"

FAMILIES = ["qwen3", "gpt_oss", "gemma2", "qwen3_moe", "gpt2"]
WITH_PLAN = ["qwen3", "gemma2", "qwen3_moe", "phi3", "olmo2", "starcoder2"]  # of tensor parallel

# (ranks, shard, ulysses, tensor): families. The remaining ranks are replicas. Each way to split alone has all
# families; the combinations on four ranks have two each, which differ most in what that layout splits.
LAYOUTS = {
    (2, 2, 1, 1): FAMILIES,
    (2, 1, 2, 1): FAMILIES,
    (2, 1, 1, 2): WITH_PLAN,
    (4, 2, 1, 1): ["qwen3", "gpt_oss"],
    (4, 2, 2, 1): ["qwen3", "qwen3_moe"],
    (4, 1, 4, 1): ["gpt_oss", "gemma2"],
    (4, 1, 2, 1): ["gemma2", "qwen3"],
    (4, 2, 1, 2): ["qwen3", "qwen3_moe"],
    (4, 1, 2, 2): ["qwen3", "gemma2"],
    (4, 1, 1, 2): ["qwen3_moe", "gemma2"],
}
MIXED = [(2, 1, 2, 1), (4, 2, 2, 1), (4, 2, 1, 2)]  # each kind, shards with each


IN_CAMPAIGN = {
    (4, 2, 1, 1),
    (4, 2, 2, 1),
    (4, 1, 4, 1),
    (4, 1, 2, 1),
    (4, 1, 1, 2),
    (4, 1, 2, 2),
}  # each has a neighbour that is not


def marked(
    layouts: Iterable[tuple[int, ...]], in_campaign: set[tuple[int, ...]] = IN_CAMPAIGN
) -> list[Any]:
    """Those on four ranks are marked `slow`, and some of them run in a campaign only."""
    found = []
    for layout in layouts:
        marks = [pytest.mark.slow] if layout[0] == 4 else []
        marks += [pytest.mark.campaign(only=True)] if layout in in_campaign else []
        found.append(pytest.param(*layout, marks=marks))
    return found


def batch() -> PackedBatch:
    g = torch.Generator().manual_seed(3)
    return PackedBatch.from_sequences([torch.randint(99, (n,), generator=g) for n in (7, 3, 11, 2)])


def gradients(family: str, layout: Layout, **how: Any) -> dict[str, torch.Tensor]:
    """Those of the summed loss of one batch that all data ranks have, from weights that come from the seed."""
    engine = LanguageModelEngine(
        LanguageModel.on_meta(None, overrides_of(family)), layout, Settings(seed=5, **how)
    )
    engine.initialize(
        lambda model: torch.optim.SGD(model.parameters(), 0.0),
        lambda sgd: LambdaLR(sgd, lambda _: 1.0),
    )
    engine.model.eval()  # some have dropout

    def loss(micro_batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        out = engine.model(micro_batch, ["log_probs", "entropy"])
        return out["log_probs"].sum() - 0.1 * out["entropy"].sum(), micro_batch.num_loss_tokens

    engine.optimizer_zero_grad()
    halves = batch().split(14).parts
    for half in halves:  # two calls add up to one step
        engine.forward_backward_batch([half], loss)
    grads = {n: p.grad for n, p in engine.model.named_parameters() if p.grad is not None}
    return {name: full_tensor(grad) / layout.data_size for name, grad in grads.items()}


def on_layout(
    shard: int, sequence: int, tensor: int, families: list[str]
) -> dict[str, dict[str, torch.Tensor]]:
    world = World.join("cpu")
    layout = Layout.of(world, parallel(shard=shard, ulysses=sequence, tensor=tensor))
    result = {family: gradients(family, layout) for family in families}
    world.close()
    return result


@functools.cache
def expected(family: str) -> dict[str, torch.Tensor]:
    return gradients(family, Layout(World.join("cpu")))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one rank made of five steps."""
    folder = tmp_path_factory.mktemp("one")
    assert (
        launch(
            str(LM), ["loop.eval_interval=5", "data.micro_batch_size=8", f"project.dir={folder}"]
        )
        == 0
    )
    return folder


@pytest.mark.parametrize(("ranks", "shard", "sequence", "tensor"), marked(LAYOUTS))
def test_every_layout_gives_the_gradients_of_one_rank(
    request, ranks: int, shard: int, sequence: int, tensor: int
) -> None:
    families = LAYOUTS[ranks, shard, sequence, tensor]
    results = request.getfixturevalue(f"ranks{ranks}").run(
        on_layout, shard, sequence, tensor, families
    )
    for family in families:
        for result in results:
            assert result[family].keys() == expected(family).keys()
            for name, grad in expected(family).items():
                assert torch.allclose(result[family][name], grad, rtol=1e-5, atol=1e-5), (
                    family,
                    name,
                )


@pytest.mark.parametrize(
    ("ranks", "shard", "sequence", "tensor"), marked(MIXED, IN_CAMPAIGN | {(4, 2, 1, 2)})
)
def test_every_layout_gives_the_losses_of_one_rank_over_five_steps(
    request, one: Path, tmp_path: Path, ranks: int, shard: int, sequence: int, tensor: int
) -> None:
    pool = request.getfixturevalue(f"ranks{ranks}")
    layout = [
        f"parallel.shard={shard}",
        f"parallel.ulysses={sequence}",
        f"parallel.tensor={tensor}",
    ]
    words = ["loop.eval_interval=5", "data.micro_batch_size=2", f"project.dir={tmp_path}"]
    assert pool.launch(LM, *words, *layout) == [0] * ranks
    for split in ("train", "eval"):
        alone, many = read_metrics(one, split), read_metrics(tmp_path, split)
        assert [r["loss"] for r in alone] == pytest.approx([r["loss"] for r in many], rel=1e-5)
        assert [r.get("totals") for r in alone] == [r.get("totals") for r in many]  # counted once


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ["parallel.shard=2"],
        pytest.param(["parallel.tensor=2"], marks=pytest.mark.campaign(only=True)),
        pytest.param(["parallel.ulysses=2"], marks=pytest.mark.campaign(only=True)),
    ],
    ids=str,
)
def test_bf16_on_every_layout_is_close_to_fp32(
    one: Path, ranks2, tmp_path: Path, layout: list[str]
) -> None:
    """Weights travel as bf16; the masters and the sums of gradients stay float32."""
    words = [*layout, "loop.precision=bf16", "data.micro_batch_size=2", f"project.dir={tmp_path}"]
    assert ranks2.launch(LM, *words) == [0, 0]
    alone, two = read_metrics(one), read_metrics(tmp_path)
    assert [r["loss"] for r in alone] == pytest.approx([r["loss"] for r in two], rel=2e-2)
    assert [r["grad_norm"] for r in alone] == pytest.approx([r["grad_norm"] for r in two], rel=1e-1)


@pytest.mark.slow
@pytest.mark.campaign
def test_packed_run_resumed_on_other_layouts_gives_the_losses_of_one_rank(
    train, ranks2, ranks4, tmp_path: Path, campaign_size: Any
) -> None:
    steps = campaign_size(6, 8)
    words = [
        "data.micro_batch_size=2",
        "optim.schedule=constant",
    ]  # so that a shorter run is the same run, cut
    assert train(*words, f"loop.total_steps={steps}", config=LM, dir=tmp_path / "straight") == 0
    cut = [*words, "resume=auto", f"project.dir={tmp_path / 'cut'}"]
    both = ["parallel.shard=2", "parallel.ulysses=2"]
    assert ranks4.launch(LM, *cut, *both, "loop.total_steps=3") == [0] * 4
    assert ranks2.launch(LM, *cut, "parallel.tensor=2", "loop.total_steps=5") == [0] * 2
    assert train(*cut, "loop.total_steps=6", config=LM, dir=tmp_path / "cut") == 0
    if steps > 6:
        words = ["parallel.shard=4", "data.micro_batch_size=1"]
        assert ranks4.launch(LM, *cut, *words, f"loop.total_steps={steps}") == [0] * 4
    one, many = read_metrics(tmp_path / "straight"), read_metrics(tmp_path / "cut")
    assert [r["step"] for r in many] == list(range(1, steps + 1))
    assert [r["loss"] for r in one] == pytest.approx([r["loss"] for r in many], rel=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(4, 2, 3), (6, 3, 2), (4, 4, 8)])
def test_ulysses_with_heads_that_do_not_divide_is_refused(
    heads: int, kv_heads: int, ranks: int
) -> None:
    with pytest.raises(
        UserError, match=f"parallel.ulysses={ranks} cannot share {heads} query and {kv_heads}"
    ):
        check_heads(heads, kv_heads, ranks)


@pytest.mark.slow
def test_two_engines_with_different_layouts_in_one_process_give_equal_outputs(ranks4) -> None:
    for answer in ranks4.run(two_layouts):
        assert answer["same"]


def two_layouts() -> dict[str, Any]:
    world = World.join("cpu")
    both = []
    for sizes in ({"shard": 4}, {"shard": 2, "ulysses": 2}, {"tensor": 2, "shard": 2}):
        model = LanguageModel.on_meta(None, overrides_of("qwen3"))
        both.append(
            LanguageModelEngine(model, Layout.of(world, parallel(**sizes)), Settings(seed=5))
        )
        both[-1].initialize()
    outs = [
        engine.infer_batch(batch(), ["log_probs"], budget=11)["log_probs"]
        for engine in both
        for _ in range(2)
    ]
    world.close()
    return {"same": all(torch.allclose(out, outs[0], rtol=1e-5, atol=1e-5) for out in outs)}


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_closed_world_leaves_no_parameters_and_no_gloo_threads(
    ranks2, sizes: tuple[int, int, int]
) -> None:
    """Threads of a gloo group wake up a hundred times a second, for nothing."""
    assert ranks2.run(left_behind, *sizes) == [([], [])] * 2


def gloo_threads() -> set[str]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            name = (task / "comm").read_text().strip()
            if "gloo" in name:
                found.add(f"{task.name} {name}")
    return found


def left_behind(*sizes: int) -> tuple[list[str], list[tuple[int, ...]]]:
    """By this world; what tests before it left in the process is theirs."""
    threads, before = (
        gloo_threads(),
        [value for value in gc.get_objects() if isinstance(value, nn.Parameter)],
    )
    on_layout(*sizes, ["qwen3"])
    gc.collect()
    known = {id(value) for value in before}
    deadline = time.monotonic() + 20
    while gloo_threads() - threads and time.monotonic() < deadline:
        time.sleep(0.01)  # the kernel lists a thread for a moment after it was joined
    after = [
        value
        for value in gc.get_objects()
        if isinstance(value, nn.Parameter) and id(value) not in known
    ]
    return sorted(gloo_threads() - threads), [tuple(value.shape) for value in after]
