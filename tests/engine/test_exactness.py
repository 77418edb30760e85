"""The same numbers, however the work is split, launched, killed or resumed."""

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import CAMPAIGN, MAGIC, ROOT, TINY, losses, read_metrics, run_process

from mvp_engine.errors import EXIT_INTERRUPTED
from mvp_engine.runs import list_runs

QUIET = ["log.backends=[jsonl]", "eval.steps=null", "checkpoint.interval=null"]


@pytest.mark.slow
def test_launch_by_python_torchrun_and_mvp_gives_equal_losses(tmp_path):
    words = [
        "train.max_steps=4",
        "log.interval=1",
        "data.micro_batch_size=16",
        "data.global_batch_size=32",
        *QUIET[1:],
    ]
    launch = f"-m mvp_engine.launch --config {MAGIC}".split()
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=1", *launch]
    ways = {
        "python": [*launch, "log.backends=[terminal,file,jsonl]"],
        "torchrun": [*torchrun, QUIET[0]],
        "mvp": ["-m", "mvp_engine.cli", "train", str(MAGIC), QUIET[0]],
    }

    # One of them from nothing: without git, a terminal or a writable folder.
    environment = {"PATH": "/nowhere", "TERM": "dumb", "PYTHONPATH": str(ROOT)}
    bare = {"fresh": True, "env": environment, "cwd": "/proc", "stdin": subprocess.DEVNULL}

    def run(name):
        options = bare if name == "python" else {}
        return run_process(*ways[name], f"output_dir={tmp_path / name}", *words, **options)

    with ThreadPoolExecutor() as pool:  # imports are most of it
        ended = list(pool.map(run, ways))
    assert [code for code, _ in ended] == [0, 0, 0], ended
    seen = [losses(tmp_path / name) for name in ways]
    assert len(seen[0]) == 4
    assert seen[0] == seen[1] == seen[2]
    assert list_runs(tmp_path / "python")[0].info["git"] is None


@pytest.mark.parametrize(
    "micro", [pytest.param(8, marks=CAMPAIGN), 3, pytest.param(1, marks=CAMPAIGN)]
)
def test_training_on_two_ranks_gives_the_losses_of_one(train, ranks2, tmp_path, micro):
    words = "train.epochs=2 log.interval=1 eval.steps=4 train.max_steps=null log.backends=[jsonl]".split()
    assert train(*words, "data.micro_batch_size=8", dir=tmp_path / "one") == 0
    two = f"output_dir={tmp_path / 'two'}"
    assert ranks2.launch(TINY, *words, f"data.micro_batch_size={micro}", two) == [0, 0]
    for split in ("train", "eval"):
        one, two_ranks = (read_metrics(tmp_path / name, split) for name in ("one", "two"))
        assert len(one) == (12 if split == "train" else 3)  # 44 samples: the last step has 4
        for a, b in zip(one, two_ranks, strict=True):
            for key in ("loss", "grad_norm", "lr") if split == "train" else ("loss",):
                assert a[key] == pytest.approx(b[key], rel=1e-5), (split, a["step"], key)


@pytest.mark.slow
@pytest.mark.parametrize("batches", [1, 3])
def test_evaluation_of_some_micro_batches_is_the_same_on_any_ranks(
    train, ranks2, ranks4, tmp_path, batches
):
    """20 held-out samples in micro-batches of 4."""
    words = f"train.max_steps=1 eval.steps=1 eval.batches={batches} log.backends=[jsonl]".split()
    assert train(*words, dir=tmp_path / "1") == 0
    for pool in (ranks2, ranks4):
        assert set(pool.launch(TINY, *words, f"output_dir={tmp_path / str(pool.size)}")) == {0}
    (one,), (two,), (four,) = (read_metrics(tmp_path / ranks, "eval") for ranks in "124")
    assert [two["loss"], four["loss"]] == pytest.approx([one["loss"]] * 2, rel=1e-6)
    assert train(*words, "eval.batches=null", dir=tmp_path / "all") == 0
    assert read_metrics(tmp_path / "all", "eval")[0]["loss"] != pytest.approx(one["loss"], rel=1e-3)


def test_gradients_do_not_depend_on_micro_batch_split(train, tmp_path):
    seen = []
    for micro in (8, 4, 2, 1):
        folder = tmp_path / str(micro)
        assert train(f"data.micro_batch_size={micro} log.interval=1", dir=folder) == 0
        seen.append([(r["loss"], r["grad_norm"]) for r in read_metrics(folder)])
    for other in seen[1:]:
        assert torch.allclose(torch.tensor(seen[0]), torch.tensor(other), rtol=1e-5)


def test_logged_loss_is_the_weighted_mean_over_the_interval(train, tmp_path):
    words = ["optim.lr=0", "optim.weight_decay=0", "train.max_steps=4"]
    assert train("log.interval=1", *words, dir=tmp_path / "each") == 0
    assert train("log.interval=4", *words, dir=tmp_path / "all") == 0
    each = read_metrics(tmp_path / "each")
    weights = [record["totals"]["tokens"] for record in each]
    first, *others = zip([record["loss"] for record in each], weights, strict=True)
    mean = sum(loss * weight for loss, weight in others) / sum(weights[1:])
    # Step 1 has its own record.
    assert losses(tmp_path / "all") == pytest.approx([first[0], mean], rel=1e-7)


def straight_and_cut(run, words, folder, cuts):
    """Train in one go, and stopped by SIGTERM at each of `cuts` and resumed; the records must be the same bits."""
    assert set(run(*words, f"output_dir={folder / 'straight'}")) == {0}
    for cut in cuts:
        codes = run(
            *words, "resume=auto", "tiny.fault=sigterm", *cut, f"output_dir={folder / 'cut'}"
        )
        assert set(codes) == {EXIT_INTERRUPTED}
    assert set(run(*words, "resume=auto", f"output_dir={folder / 'cut'}")) == {0}
    for split in ("train", "eval"):
        straight = read_metrics(folder / "straight", split)
        assert straight == read_metrics(folder / "cut", split)
        assert len(straight) == (5 if split == "train" else 3)  # step 1, then every third


RESUME_WORDS = "tiny.dropout=0.3 tiny.noise=0.1 eval.steps=5 log.interval=3".split()


@pytest.mark.slow
@pytest.mark.parametrize(
    "loader, stops",  # an epoch has 6 steps (11 micro-batches in twos)
    [
        ("tiny.loader=sample", [2, 4]),
        ("tiny.loader=sample", [6, 8]),
        ("tiny.loader=torch", [6, 8]),
        pytest.param("tiny.loader=torch", [2, 4], marks=CAMPAIGN),
        ("tiny.loader=iterable", [6, 8]),
        pytest.param("tiny.loader=iterable", [2, 4], marks=CAMPAIGN),
        ("data.num_workers=2", [4]),
    ],
)
def test_resumed_run_is_bit_equal_to_an_uninterrupted_one(train, tmp_path, loader, stops):
    """A second resume must not start the data again."""
    cuts = [[f"tiny.fault_step={stop}"] for stop in stops]
    straight_and_cut(lambda *w: [train(*w)], [loader, *RESUME_WORDS], tmp_path, cuts)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["data.global_batch_size=8"], marks=pytest.mark.slow),
        ["data.global_batch_size=1"],  # the second rank has no samples
        pytest.param(  # one rank runs a dummy in every step
            ["data.global_batch_size=3", "parallel.shard=2"], marks=pytest.mark.slow
        ),
    ],
)
def test_resumed_run_on_two_ranks_is_bit_equal(ranks2, tmp_path, words):
    cuts = [["tiny.fault_step=4", "tiny.fault_rank=1"], ["tiny.fault_step=7"]]
    words = [*RESUME_WORDS, f"data.micro_batch_size={1 if len(words) > 1 else 2}", *words]
    straight_and_cut(lambda *w: ranks2.launch(TINY, *w), words, tmp_path, cuts)


def test_deterministic_mode_when_configured_is_enabled(train):
    try:
        assert train("deterministic=true train.max_steps=1") == 0
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_seed_changed_changes_losses_and_repeated_repeats_them(train, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert train(f"seed={seed} tiny.dropout=0.3 tiny.noise=0.1", dir=tmp_path / name) == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses(tmp_path / "c")
    assert re.match(r"tiny-\d{8}-\d{6}", next((tmp_path / "a").iterdir()).name)
