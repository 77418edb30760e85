"""Hugging Face models on every layout: each gradient of the first step, and the loss over five, to 1e-5."""

import contextlib
import functools
import gc
import time
from pathlib import Path

import pytest
import torch
from conftest import CAMPAIGN, read_metrics, user_error
from families import overrides_of
from tiny_engines import (
    ALONE,
    LM,
    assert_close,
    assert_metrics,
    engine_of,
    packed,
    scores_of,
)
from tiny_engines import gradients as gradients_of
from torch import nn

from mvp_engine.distributed import Layout
from mvp_engine.distributed.sequence_parallel import check_heads
from mvp_engine.launch import launch

FAMILIES = ["qwen3", "gpt_oss", "gemma2", "qwen3_moe", "gpt2"]
WITH_PLAN = ["qwen3", "gemma2", "qwen3_moe", "phi3", "olmo2", "starcoder2"]  # of tensor parallel
SLOW = [pytest.mark.slow]
LONG = [pytest.mark.slow, CAMPAIGN]  # each of these layouts has a neighbour that the suite runs

# Each way to split alone has all families; the combinations on four ranks have two each, which differ most in what
# that layout splits.
LAYOUTS = [
    ({"shard": 2}, FAMILIES[:1]),
    ({"ulysses": 2}, FAMILIES[:1]),
    pytest.param({"shard": 2}, FAMILIES[1:], marks=SLOW),
    pytest.param({"ulysses": 2}, FAMILIES[1:], marks=SLOW),
    ({"tensor": 2}, ["qwen3"]),
    pytest.param({"tensor": 2}, WITH_PLAN[1:], marks=SLOW),
    pytest.param({"shard": 2, "tensor": 2}, ["qwen3", "qwen3_moe"], marks=SLOW),
    pytest.param({"shard": 2, "replicate": 2}, ["qwen3", "gpt_oss"], marks=LONG),
    pytest.param({"shard": 2, "ulysses": 2}, ["qwen3", "qwen3_moe"], marks=LONG),
    pytest.param({"ulysses": 4}, ["gpt_oss", "gemma2"], marks=LONG),
    pytest.param({"ulysses": 2, "replicate": 2}, ["gemma2", "qwen3"], marks=LONG),
    pytest.param({"ulysses": 2, "tensor": 2}, ["qwen3", "gemma2"], marks=LONG),
    pytest.param({"tensor": 2, "replicate": 2}, ["qwen3_moe", "gemma2"], marks=LONG),
]


def batch():
    return packed(7, 3, 11, 2)


def gradients(config, layout, **how):
    """Those of the summed loss of one batch that all data ranks have, from weights that come from the seed."""
    engine = engine_of(config, layout, seed=5, **how)
    engine.model.eval()  # some have dropout
    engine.optimizer_zero_grad()
    for half in batch().split(14).parts:  # two calls add up to one step
        engine.forward_backward_batch([half], scores_of(engine))
    return gradients_of(engine.model, layout.data_size)


def of_families(layout, families):
    return {family: gradients(family, layout) for family in families}


@functools.cache
def expected(family):
    return gradients(family, ALONE)


@pytest.mark.parametrize("sizes, families", LAYOUTS, ids=str)
def test_every_layout_gives_the_gradients_of_one_rank(on_ranks, sizes, families):
    for result in on_ranks(sizes, of_families, families):
        for family in families:
            assert_close(result[family], expected(family), what=family)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """What one rank made of five steps."""
    folder = tmp_path_factory.mktemp("one")
    words = ["eval.steps=5", "data.micro_batch_size=8", f"output_dir={folder}"]
    assert launch(str(LM), words) == 0
    return folder


@pytest.mark.parametrize(
    "ranks, layout",
    [
        (2, ["parallel.ulysses=2"]),
        pytest.param(4, ["parallel.shard=2", "parallel.ulysses=2"], marks=LONG),
        pytest.param(4, ["parallel.shard=2", "parallel.tensor=2"], marks=LONG),
    ],
    ids=str,
)
def test_every_layout_gives_the_losses_of_one_rank_over_five_steps(
    request, one, tmp_path, ranks, layout
):
    pool = request.getfixturevalue(f"ranks{ranks}")
    words = ["eval.steps=5", "data.micro_batch_size=2", f"output_dir={tmp_path}"]
    assert pool.launch(LM, *words, *layout) == [0] * ranks
    for split in ("train", "eval"):
        assert_metrics(read_metrics(tmp_path, split), read_metrics(one, split), loss=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "word",
    [
        "parallel.shard=2",
        pytest.param("parallel.tensor=2", marks=CAMPAIGN),
        pytest.param("parallel.ulysses=2", marks=CAMPAIGN),
    ],
)
def test_bf16_on_every_layout_is_close_to_fp32(one, ranks2, tmp_path, word):
    """Weights travel as bf16; the masters and the sums of gradients stay float32."""
    words = [word, "train.precision=bf16", "data.micro_batch_size=2", f"output_dir={tmp_path}"]
    assert ranks2.launch(LM, *words) == [0, 0]
    assert_metrics(read_metrics(tmp_path), read_metrics(one), loss=2e-2, grad_norm=1e-1)


@pytest.mark.slow
@pytest.mark.campaign
def test_packed_run_resumed_on_other_layouts_gives_the_losses_of_one_rank(
    train, ranks2, ranks4, tmp_path, campaign_size
):
    steps = campaign_size(6, 8)
    # Of a constant schedule, so that a shorter run is the same run, cut.
    words = ["data.micro_batch_size=2", "optim.schedule=constant"]
    assert train(*words, f"train.max_steps={steps}", config=LM, dir=tmp_path / "straight") == 0
    cut = [*words, "resume=auto", f"output_dir={tmp_path / 'cut'}"]
    both = ["parallel.shard=2", "parallel.ulysses=2"]
    assert ranks4.launch(LM, *cut, *both, "train.max_steps=3") == [0] * 4
    assert ranks2.launch(LM, *cut, "parallel.tensor=2", "train.max_steps=5") == [0] * 2
    assert train(*cut, "train.max_steps=6", config=LM, dir=tmp_path / "cut") == 0
    if steps > 6:
        words = ["parallel.shard=4", "data.micro_batch_size=1"]
        assert ranks4.launch(LM, *cut, *words, f"train.max_steps={steps}") == [0] * 4
    assert_metrics(read_metrics(tmp_path / "cut"), read_metrics(tmp_path / "straight"), loss=1e-5)


@pytest.mark.parametrize("heads, kv_heads, ranks", [(4, 2, 3), (6, 3, 2), (4, 4, 8)])
def test_ulysses_with_heads_that_do_not_divide_is_refused(heads, kv_heads, ranks):
    with user_error(f"parallel.ulysses={ranks} cannot share {heads} query and {kv_heads}"):
        check_heads(heads, kv_heads, ranks)


def log_probs_on_layouts(layout):
    from families import parallel

    shape = overrides_of("qwen3")
    both = {"shard": 2, "tensor": 2}
    layouts = [layout, *(Layout.of(layout.world, parallel(**one)) for one in (SPLIT, both))]
    engines = [engine_of(shape, each, optimizer=None, seed=5) for each in layouts]
    return [
        engine.infer_batch(batch(), ["log_probs"], budget=11)["log_probs"]
        for engine in engines
        for _ in range(2)
    ]


SPLIT = {"shard": 2, "ulysses": 2}


@pytest.mark.slow
def test_engines_with_different_layouts_in_one_process_give_equal_outputs(on_ranks):
    for outs in on_ranks({"shard": 4}, log_probs_on_layouts):
        assert all(torch.allclose(out, outs[0], rtol=1e-5, atol=1e-5) for out in outs)


@pytest.mark.parametrize("sizes", [{}, {"shard": 2}, {"ulysses": 2}, {"tensor": 2}], ids=str)
def test_closed_world_leaves_no_parameters_and_no_gloo_threads(ranks2, sizes):
    """Threads of a gloo group wake up a hundred times a second, for nothing."""
    assert ranks2.run(left_behind, sizes) == [([], [])] * 2


def gloo_threads():
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            name = (task / "comm").read_text().strip()
            if "gloo" in name:
                found.add(f"{task.name} {name}")
    return found


def parameters():
    return [value for value in gc.get_objects() if isinstance(value, nn.Parameter)]


def left_behind(sizes):
    """By this world; what tests before it left in the process is theirs."""
    from families import on_layout

    threads = gloo_threads()
    before = parameters()
    on_layout(sizes, of_families, ["qwen3"])
    gc.collect()
    known = {id(value) for value in before}
    deadline = time.monotonic() + 20
    while gloo_threads() - threads and time.monotonic() < deadline:
        time.sleep(0.01)  # the kernel lists a thread for a moment after it was joined
    shapes = [tuple(value.shape) for value in parameters() if id(value) not in known]
    return sorted(gloo_threads() - threads), shapes
