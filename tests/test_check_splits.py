"""`mvp check` runs the same rows in two splits: losses that depend on the split are named, randomness is not."""

from __future__ import annotations

import re

import pytest
import torch
from conftest import ROOT, losses, mvp
from run_files import printed_json

from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.kit.row_checks import merge_pairs, split_each, split_micro_batch
from mvp_engine.launch import launch
from mvp_engine.tools.check import record, stages

RECIPE = ROOT / "tests" / "recipes" / "losses" / "train.yaml"


def checked(capsys, *words, config=RECIPE):
    capsys.readouterr()
    code = mvp(f"check {config} --json output_dir=unused", *words)
    found = printed_json(capsys)
    # On a busy machine.
    found["warnings"] = [text for text in found["warnings"] if "wait for data" not in text]
    return code, found


@pytest.mark.parametrize(
    "kind, cause",
    [
        ("mean_of_means", "The weight of these rows is 2 and 4: this is a mean of means"),
        ("mean", "returns the mean of its micro-batch with the number of its terms as the weight"),
        ("mean_over_tokens", "or the loss is divided inside of forward_step"),
        ("negatives", "compared with other rows of their micro-batch only (in-batch negatives"),
    ],
)
def test_check_loss_that_depends_on_the_split_is_a_problem_with_its_cause(kind, cause, capsys):
    code, found = checked(capsys, f"losses.kind={kind}")
    assert code == EXIT_USER_ERROR
    (problem,) = found["problems"]
    assert "the loss depends on how rows are split into micro-batches" in problem
    assert "for the same rows in 2 and in 4 micro-batches, and the gradients differ by" in problem
    assert cause in problem
    page = re.search(r"See (\S+)$", problem)
    assert page
    assert (ROOT / page[1]).is_file()
    assert found["split"]["grad_difference"] > 0.01
    assert found["stages"][-1]["name"] == "split"
    assert not found["stages"][-1]["ok"]


def test_check_loss_of_single_rows_is_compared_in_merged_micro_batches(capsys):
    code, found = checked(
        capsys, "losses.kind=negatives", "data.micro_batch_size=1", "data.global_batch_size=4"
    )
    assert code == EXIT_USER_ERROR
    assert found["split"]["micro_batches"] == [4, 2]
    assert found["split"]["loss"][0] == 0.0
    assert found["split"]["loss"][1] > 0.1


@pytest.mark.parametrize(
    "words", "kind=sum kind=cancel kind=noise kind=random_weight layer=dropout".split()
)
def test_check_loss_that_is_right_or_random_passes(words, capsys):
    for seed in range(3):
        code, found = checked(capsys, f"losses.{words}", f"seed={seed}")
        assert (code, found["problems"]) == (0, [])
        assert found["split"]["micro_batches"] == [2, 4]
        assert found["split"]["random"] == (words in ("kind=noise", "kind=random_weight"))
        if not found["split"]["random"]:
            assert found["split"]["loss"][0] == pytest.approx(found["split"]["loss"][1], abs=1e-5)


def test_check_random_model_with_wrong_loss_is_a_problem(capsys):
    code, found = checked(capsys, "losses.layer=dropout", "losses.kind=mean_of_means")
    assert code == EXIT_USER_ERROR
    assert "this is a mean of means" in found["problems"][0]


def test_check_gradients_that_grow_with_an_equal_loss_are_a_problem_that_names_them(capsys):
    code, found = checked(capsys, "losses.kind=growing")
    assert code == EXIT_USER_ERROR
    (problem,) = found["problems"]
    assert "have the same loss" in problem
    assert "but other gradients: layers.3.weight (" in problem
    assert "layers.0.weight (0 %)" in problem
    assert "random" not in found["stages"][-1]["says"]
    assert found["split"] is None


def test_check_random_gradients_of_an_equal_loss_are_random(capsys):
    code, found = checked(capsys, "losses.kind=random_gradient")
    assert (code, found["problems"]) == (0, [])
    assert found["split"]["random"]


def test_check_batch_norm_is_a_warning(capsys):
    code, found = checked(capsys, "losses.layer=batch_norm")
    assert code == 0
    assert (
        "1 BatchNorm1d module with statistics of one micro-batch of one rank"
        in found["warnings"][0]
    )


def test_check_parameters_without_gradient_are_named(capsys):
    code, found = checked(capsys, "losses.unused=true")
    assert code == 0
    assert found["without_gradient"] == ["factor", "unused.weight", "unused.bias"]
    assert (
        "3 of 7 parameters that train got no gradient in 4 steps: factor, unused.weight"
        in found["warnings"][0]
    )
    assert checked(capsys)[1]["without_gradient"] == []


def test_check_rising_loss_is_a_warning(capsys):
    code, found = checked(capsys, "optim.lr=3")
    assert code == 0
    (warning,) = found["warnings"]
    assert re.match(
        r"the loss rises from \d+\.\d+ to \d+\.?\d* in 4 steps: lower optim.lr", warning
    )


def test_check_forward_step_without_a_weight_is_an_error_that_says_so(capsys):
    assert mvp(f"check {RECIPE} losses.kind=no_weight") == 1
    error = capsys.readouterr().err
    assert "forward_step must return (loss_sum, weight), not Tensor" in error
    assert "mvp check /" not in error  # its folder is gone
    assert "mvp-check-" not in error


def _check(folder, words):
    return stages.main(["--config", str(RECIPE), "--folder", folder, "--quiet", *words])


@pytest.mark.slow
def test_check_on_two_ranks_compares_the_rows_of_both(ranks2, tmp_path):
    for kind, shard, code in (("sum", 2, 0), ("sum", 1, 0), ("negatives", 1, EXIT_USER_ERROR)):
        folder = tmp_path / f"{kind}{shard}"
        folder.mkdir()
        words = f"losses.kind={kind} parallel.shard={shard} data.micro_batch_size=4 losses.unused=true".split()
        assert ranks2.run(_check, str(folder), words) == [code, code]
        found = record.read_facts(folder)
        assert found["split"]["micro_batches"] == [4, 8]
        assert found["without_gradient"] == ["factor", "unused.weight", "unused.bias"]


@pytest.mark.slow
def test_docs_whole_step_loss_gives_the_same_losses_in_every_split(tmp_path, capsys):
    page = (ROOT / "docs" / "whole_step_loss.md").read_text()
    for name, language in (("engine.py", "python"), ("train.yaml", "yaml")):
        (code,) = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
        (tmp_path / name).write_text(code)
    code, found = checked(capsys, config=tmp_path / "train.yaml")
    assert (code, found["problems"], found["warnings"]) == (0, [], [])
    expected: list[float] = []
    for size in (16, 8, 64):
        words = [
            f"output_dir={tmp_path / str(size)}",
            f"data.micro_batch_size={size}",
            "train.max_steps=3",
        ]
        assert (
            launch(str(tmp_path / "train.yaml"), [*words, "log.interval=1", "eval.steps=null"]) == 0
        )
        expected = expected or losses(tmp_path / str(size))
        assert losses(tmp_path / str(size)) == pytest.approx(expected, rel=1e-5)
    assert expected[0] > 2.0


def test_split_micro_batch_keeps_every_row_once():
    lengths = [9, 2, 7, 3]
    sides = PackedBatch.from_sequences(
        [torch.arange(n) for n in lengths], sequence_fields={"sample": torch.tensor([5, 5, 8, 8])}
    )
    # Fewer labels first.
    for part, samples in zip(split_micro_batch(sides) or [], ([8, 8], [5, 5]), strict=True):
        assert part.sequence_fields["sample"].tolist() == samples
    batch = {
        "x": torch.arange(6).view(3, 2),
        "names": ["a", "b", "c"],
        "temperature": 2.0,
        "scale": torch.tensor(3.0),
    }
    one, two = split_micro_batch(batch) or []
    assert (one["names"], two["names"]) == (["a"], ["b", "c"])
    assert torch.equal(torch.cat([one["x"], two["x"]]), batch["x"])
    assert one["scale"] == two["scale"] == 3
    (merged,) = merge_pairs([(one["x"], one["names"]), (two["x"], two["names"])]) or []
    assert torch.equal(merged[0], batch["x"])
    assert merged[1] == batch["names"]
    for unknown in (
        {"x": torch.zeros(3), "classes": torch.zeros(5)},
        object(),
        torch.zeros(1, 4),
        "text",
    ):
        assert split_micro_batch(unknown) is None
        assert merge_pairs([unknown]) is None
    assert split_each([object()], lambda one: [one, one]) is not None
