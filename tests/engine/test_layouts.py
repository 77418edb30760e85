"""One model on many layouts: the losses of one rank, and checkpoints that any layout reads."""

import pytest
import torch
from conftest import CAMPAIGN, MAGIC, ROOT, TINY, losses, read_metrics, user_error

from mvp_engine.checkpoint import format as storage
from mvp_engine.config.schema import Parallel
from mvp_engine.distributed import Layout, World
from mvp_engine.engine.state import layout_text
from mvp_engine.errors import EXIT_INTERRUPTED
from mvp_engine.runs import list_runs

LM = ROOT / "tests" / "recipes" / "packed_lm" / "train.yaml"
SHARDED = [(2, 2), (4, 4), (4, 2)]  # ranks, shard


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, ranks, shard",
    [
        *(("tiny", *sizes) for sizes in SHARDED),
        ("magic", 2, 1),
        ("magic", *SHARDED[0]),
        *(pytest.param("magic", *sizes, marks=CAMPAIGN) for sizes in SHARDED[1:]),
    ],
)
def test_sharded_layouts_give_the_losses_of_one_rank(request, train, tmp_path, name, ranks, shard):
    config = {"tiny": TINY, "magic": MAGIC}[name]
    words = "train.max_steps=4 log.interval=1 log.backends=[jsonl] checkpoint.interval=null".split()
    # Which no number of ranks divides.
    words += [
        "eval.steps=2",
        "data.global_batch_size=9",
    ]
    words += ["task.eval_problems=17"] if config == MAGIC else []
    assert train(*words, "data.micro_batch_size=16", config=config, dir=tmp_path / "one") == 0
    pool = request.getfixturevalue(f"ranks{ranks}")
    layout = [
        f"parallel.shard={shard}",
        "data.micro_batch_size=2",
    ]
    assert pool.launch(config, *words, *layout, f"output_dir={tmp_path / 'many'}") == [0] * ranks
    for split in ("train", "eval"):
        one, many = read_metrics(tmp_path / "one", split), read_metrics(tmp_path / "many", split)
        assert len(one) == len(many) > 1
        for a, b in zip(one, many, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5), (split, a["step"])
            assert a.get("grad_norm", 0) == pytest.approx(b.get("grad_norm", 0), rel=1e-4)


@pytest.mark.slow
def test_run_resumed_on_other_layouts_gives_the_losses_of_one_rank(train, ranks2, ranks4, tmp_path):
    """No randomness in the model here: then the losses agree whatever the layout."""
    words = ["tiny.noise=0.1", "log.interval=3", "tiny.samples=20"]
    words += ["data.micro_batch_size=2", "data.global_batch_size=3"]  # the last step has 2 samples
    assert train(*words, dir=tmp_path / "straight") == 0
    cut = [*words, "resume=auto", f"output_dir={tmp_path / 'cut'}", "tiny.fault=sigterm"]
    assert (
        ranks4.launch(TINY, *cut, "parallel.shard=2", "tiny.fault_step=3") == [EXIT_INTERRUPTED] * 4
    )
    assert (
        ranks2.launch(TINY, *cut, "parallel.shard=2", "tiny.fault_step=5") == [EXIT_INTERRUPTED] * 2
    )
    assert ranks2.launch(TINY, *cut, "tiny.fault_step=7") == [EXIT_INTERRUPTED] * 2
    assert (
        ranks4.launch(TINY, *cut, "parallel.shard=4", "tiny.fault_step=9") == [EXIT_INTERRUPTED] * 4
    )
    assert train(*cut, "tiny.fault=null", dir=tmp_path / "cut") == 0
    assert losses(tmp_path / "straight") == pytest.approx(losses(tmp_path / "cut"), rel=1e-5)


@pytest.mark.slow
def test_half_logged_interval_resumed_on_another_layout_counts_once(
    train, ranks2, ranks4, tmp_path
):
    """Ranks that share sequences or matrices have the same tokens, and all ranks the same norm."""
    words = "log.interval=4 checkpoint.interval=2 optim.schedule=constant data.micro_batch_size=2".split()
    assert train(*words, "train.max_steps=4", config=LM, dir=tmp_path / "straight") == 0
    _, straight = read_metrics(tmp_path / "straight")  # of step 1, and of steps 2 to 4
    four = [
        *words,
        "train.max_steps=3",
        "parallel.shard=2",
        "parallel.ulysses=2",
        f"output_dir={tmp_path / '4'}",
    ]
    assert ranks4.launch(LM, *four) == [0] * 4
    again = [*words, f"resume={list_runs(tmp_path / '4')[-1].checkpoint_list()[0]}"]
    assert train(*again, "train.max_steps=4", config=LM, dir=tmp_path / "1") == 0
    two = [*again, "parallel.tensor=2", f"output_dir={tmp_path / '2'}"]
    assert ranks2.launch(LM, *two, "train.max_steps=4") == [0] * 2
    for name in ("1", "2"):
        found = read_metrics(tmp_path / name)[-1]
        assert found["totals"] == straight["totals"]
        assert found["grad_norm"] == pytest.approx(straight["grad_norm"], rel=1e-4)
        assert found["loss"] == pytest.approx(straight["loss"], rel=1e-5)
    # With nothing left to do, the half interval is logged by all ranks together, though only one has it.
    assert ranks2.launch(LM, *two, "train.max_steps=2") == [0] * 2
    assert read_metrics(tmp_path / "2")[-1]["step"] == 2


def test_checkpoint_of_sharded_ranks_has_one_shard_per_rank(ranks2, tmp_path):
    words = (
        f"train.max_steps=2 parallel.shard=2 data.micro_batch_size=2 output_dir={tmp_path}".split()
    )
    assert ranks2.launch(TINY, *words) == [0, 0]
    [run] = list_runs(tmp_path)
    assert "fp32 on 2 x cpu (2 ranks: shard=2); steps 0 to" in (run.dir / "log.txt").read_text()
    checkpoint = run.checkpoint_list()[-1]
    reader = storage.Reader(checkpoint)
    assert len(reader.shards("model.0.weight")) == 2
    assert len(reader.shards("optim.0.weight.exp_avg")) == 2
    assert bool(reader.read("model.0.weight").isfinite().all())


def test_layout_text_has_the_ranks_and_the_dimensions_that_are_not_1():
    base = {"shard": 1, "ulysses": 1, "tensor": 1, "timeout": 100.0}
    assert layout_text(Parallel(**base), 1) == "1 rank"
    many = Parallel(
        **{**base, "shard": 2, "tensor": 2, "context": 2, "ulysses": 2, "pipeline": 2, "expert": 4}
    )
    sizes = "replicate=2, shard=2, tensor=2, context=2, pipeline=2, ulysses=2, expert=4"
    assert layout_text(many, 64) == f"64 ranks: {sizes}"


@pytest.mark.parametrize(
    "words",
    [{"shard": 3}, {"shard": 8}, {"ulysses": 8}, {"context": 8}, {"tensor": 3}],
)
def test_layout_sizes_that_do_not_multiply_to_the_ranks_are_refused(words):
    four = World(0, 4, 0, 4, torch.device("cpu"))
    config = Parallel(**{"timeout": 100.0, **words})
    with user_error("do not divide the 4 processes of this job: a replica of the model takes"):
        Layout.of(four, config)
