"""Trainings with context parallel: the losses of one rank, exact resume, checkpoints that other layouts read."""

import pytest
import torch
from conftest import CAMPAIGN, ROOT, read_metrics

from mvp_engine.checkpoint.format import Reader
from mvp_engine.runs import list_runs

LM = ROOT / "tests" / "recipes" / "packed_lm" / "train.yaml"
# So that a shorter run is the same run, cut.
WORDS = [
    "data.micro_batch_size=2",
    "optim.schedule=constant",
]


def tensors(folder):
    """Weights and optimizer states of the last checkpoint of the only run in a folder."""
    [run] = list_runs(folder)
    reader = Reader(run.checkpoint_list()[-1])
    return {
        name: reader.read(name) for name in reader.entries if name.startswith(("model.", "optim."))
    }


@pytest.mark.slow
@pytest.mark.campaign
def test_context_training_has_the_losses_of_one_rank_and_resumes_on_any_layout(
    train, ranks2, ranks4, tmp_path, campaign_size
):
    steps = campaign_size(6, 8)
    assert (
        train(
            *WORDS,
            f"train.max_steps={steps}",
            "eval.steps=3",
            config=LM,
            dir=tmp_path / "straight",
        )
        == 0
    )
    cut = [*WORDS, "resume=auto", f"output_dir={tmp_path / 'cut'}", "eval.steps=3"]
    assert ranks2.launch(LM, *cut, "parallel.context=2", "train.max_steps=3") == [0] * 2
    assert train(*cut, "train.max_steps=4", config=LM, dir=tmp_path / "cut") == 0
    for sizes, end in (("shard=2", 6), ("ulysses=2", 8))[: campaign_size(1, 2)]:
        words = ["parallel.context=2", f"parallel.{sizes}", f"train.max_steps={end}"]
        assert ranks4.launch(LM, *cut, *words) == [0] * 4
    one, many = read_metrics(tmp_path / "straight"), read_metrics(tmp_path / "cut")
    assert [r["step"] for r in many] == list(range(1, steps + 1))
    assert [r["loss"] for r in one] == pytest.approx([r["loss"] for r in many], rel=1e-5)
    assert [r["totals"] for r in one] == [r["totals"] for r in many]  # counted once
    evaluated = {r["step"]: r["loss"] for r in read_metrics(tmp_path / "cut", "eval")}
    for r in read_metrics(tmp_path / "straight", "eval"):
        assert evaluated[r["step"]] == pytest.approx(r["loss"], rel=1e-5)


@CAMPAIGN
def test_context_run_resumed_on_its_layout_is_bit_equal(ranks2, tmp_path):
    words = [*WORDS, "parallel.context=2"]
    assert ranks2.launch(
        LM, *words, "train.max_steps=6", f"output_dir={tmp_path / 'straight'}"
    ) == [0, 0]
    cut = [*words, "resume=auto", f"output_dir={tmp_path / 'cut'}"]
    assert ranks2.launch(LM, *cut, "train.max_steps=3") == [0, 0]
    assert ranks2.launch(LM, *cut, "train.max_steps=6") == [0, 0]
    one, two = tensors(tmp_path / "straight"), tensors(tmp_path / "cut")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert read_metrics(tmp_path / "straight") == read_metrics(tmp_path / "cut")


@CAMPAIGN
def test_context_checkpoint_read_and_written_by_other_layouts_is_bit_equal(
    train, ranks2, ranks4, tmp_path
):
    """Each launch resumes at the last step, does nothing, and saves again."""
    words = [*WORDS, "train.max_steps=2"]
    assert train(*words, config=LM, dir=tmp_path / "0") == 0
    expected = tensors(tmp_path / "0")
    layouts = [
        (ranks2, ["parallel.context=2"]),
        (ranks4, ["parallel.context=2", "parallel.ulysses=2"]),
        (ranks4, ["parallel.context=4"]),
        (ranks2, ["parallel.tensor=2"]),
    ]
    for number, (pool, sizes) in enumerate(layouts):
        source = list_runs(tmp_path / str(number))[0].checkpoint_list()[-1]
        folder = tmp_path / str(number + 1)
        given = [
            *words,
            *sizes,
            f"resume={source}",
            f"output_dir={folder}",
            "checkpoint.interval=1",
        ]
        assert pool.launch(LM, *given) == [0] * pool.size
        found = tensors(folder)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), sizes
