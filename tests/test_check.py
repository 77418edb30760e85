"""`mvp check`: it reports every problem, measures a few steps, and leaves no files behind."""

import json
import re
from pathlib import Path

import pytest
from conftest import CAMPAIGN, MAGIC, ROOT, TINY, mvp, run_process
from PIL import Image
from run_files import printed_json
from tiny_vlm import chat

from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.tools.check.engine import STEPS
from mvp_engine.tools.check.record import read_facts
from mvp_engine.tools.check.stages import is_known_metric
from mvp_engine.tools.check.stages import main as check_rank

DIGITS = ROOT / "recipes" / "digits_vlm" / "configs" / "train.yaml"
SMALL = [
    "text_config.num_hidden_layers=1",
    "vision_config.depth=1",
    "vision_config.deepstack_visual_indexes=[0]",
]
QUICK = [
    *(f"model.config.{key}" for key in SMALL),
    "digits.drawings=1",
    "digits.count=60",
    "data.num_workers=0",
]


CHAT = chat("Which digit is this?", "7")


def checked(capsys, config, *words, code=0):
    capsys.readouterr()
    assert mvp(f"check {config} --json", *words) == code
    found = printed_json(capsys)
    assert found["ok"] == (code == 0)
    assert bool(found["problems"]) == (code != 0)
    return found


def write_rows(folder, *rows):
    """A file of rows; returns the words that train on it without evaluations. A row that is no text is a chat."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return ["eval.steps=null", "eval.generation=null"]


def stages(found):
    return {stage["name"]: stage["ok"] for stage in found["stages"]}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Overrides that make the recipe small, with its data in a folder that the tests share."""
    return [f"output_dir={tmp_path_factory.mktemp('digits')}", *QUICK]


def test_check_of_a_plain_engine_measures_steps_and_leaves_no_files(tmp_path, capsys):
    folder = tmp_path / "outputs"
    found = checked(capsys, MAGIC, f"output_dir={folder}", "checkpoint.interval=1", "resume=auto")
    assert list(stages(found).items()) == [
        (name, True) for name in ("config", "model", "step", "split", "evaluation")
    ]
    step, training = found["step"], found["training"]
    assert (step["tokens"], step["samples"], len(step["losses"])) == (128 * 25, 128, STEPS)
    assert step["losses"][0] == pytest.approx(2.4, abs=0.2)
    assert step["losses"][-1] < step["losses"][0]
    assert step["seconds"] > 0
    assert (training["steps"], training["steps_per_epoch"]) == (600, 782)
    assert training["eta_s"] == pytest.approx(600 * step["seconds"])
    assert found["memory"]["of"] == "process"
    assert 0.1 < found["memory"]["peak_gib"] < found["memory"]["total_gib"]
    assert found["evaluation"].keys() == {"loss", "exact_match"}
    assert found["parts"] == [{**found["parts"][0], "part": "all"}]
    assert found["data"] is None
    assert "resume=auto is ignored" in found["warnings"][0]
    assert not folder.exists()


def test_check_json_keys_are_documented(tmp_path, capsys):
    found = checked(capsys, TINY, f"output_dir={tmp_path}")
    documented = set(re.findall(r"`([a-z_]+)`", (ROOT / "docs" / "check.md").read_text()))
    inner = [
        found["step"],
        found["training"],
        found["memory"],
        found["stages"][0],
        found["parts"][0],
    ]
    assert set(found).union(*inner) - documented == set()


def test_check_slow_loader_warns_with_the_fix(tmp_path, capsys):
    found = checked(capsys, TINY, f"output_dir={tmp_path}", "tiny.load_seconds=0.02")
    (warning,) = [text for text in found["warnings"] if "wait for data" in text]
    assert "raise data.num_workers (now 0; the machine has " in warning


@pytest.mark.slow
def test_check_of_a_data_kit_inspects_rows_and_evaluates(digits, tmp_path, capsys):
    export = tmp_path / "export"
    found = checked(
        capsys, DIGITS, *digits, f"export_link={export}", "train.max_steps=null", "train.epochs=3"
    )
    assert list(stages(found)) == ["config", "data", "model", "step", "split", "evaluation"]
    (row,) = found["data"]["rows"]
    assert [piece["text"] for piece in row["sequences"][0]["text"] if piece.get("learnt")] == [
        "0<|im_end|>"
    ]
    plan = found["data"]["plan"]
    assert found["training"]["steps"] == 3 * plan["steps"]
    assert found["step"]["samples"] == pytest.approx(plan["rows"] / plan["steps"], abs=0.05)
    assert 256 < found["step"]["tokens"] <= 3 * 256
    assert plan["fill"] > 0.8
    assert sum(source["rows"] for source in found["eval_data"]["sources"]) == 24
    assert {"loss", "loss_one", "accuracy_one", "exact_two"} <= found["evaluation"].keys()
    parts = {one["part"]: one for one in found["parts"]}
    assert parts.keys() == {"vision", "projector", "llm", "all"}
    assert parts["all"]["parameters"] == sum(
        one["parameters"] for name, one in parts.items() if name != "all"
    )
    folder = Path(digits[0].partition("=")[2])
    assert [entry.name for entry in folder.iterdir() if not entry.name.startswith(".")] == [
        "digits_data"
    ]
    assert not export.exists()
    assert mvp(f"check {DIGITS}", *digits, "model.freeze=[vision]") == 0
    text = capsys.readouterr().out
    for words in (
        "«0<|im_end|>»",
        "frozen",
        "peak memory",
        "750 steps",
        "without evaluations",
        "ready to train",
    ):
        assert words in text


def test_check_nonfinite_loss_or_gradient_is_a_problem_with_its_place(tmp_path, capsys):
    words = [f"output_dir={tmp_path}", "tiny.fault_step=2", "guard.max_skips=1"]
    found = checked(capsys, TINY, *words, "tiny.fault=nan_once", code=EXIT_USER_ERROR)
    assert len(found["problems"]) == 2
    for number, problem in enumerate(found["problems"], start=1):
        where = rf"step 2, rank 0, micro-batch {number} of 2: the loss is nan; its samples: \d+, "
        assert re.match(where, problem)
    assert found["step"]["losses"][1] is None
    found = checked(capsys, TINY, *words, "tiny.fault=nan_grad", code=EXIT_USER_ERROR)
    (problem,) = found["problems"]
    assert problem.startswith(
        "step 2 was skipped: a gradient is not finite, that of 0.weight; its samples:"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_check_settings_that_fail_late_are_problems_at_once(digits, tmp_path, capsys):
    here = f"output_dir={tmp_path}"
    words = [here, "eval.steps=1000", "checkpoint.best_metric=beauty"]
    (problem,) = checked(capsys, TINY, *words, code=EXIT_USER_ERROR)["problems"]
    assert "checkpoint.best_metric=beauty is not among the eval metrics: loss" in problem
    # The micro-batch has no row of source b.
    assert is_known_metric("exact_b", ["loss", "exact_a"], ["a", "b"])
    assert not is_known_metric("exact_c", ["loss", "exact_a"], ["a", "b"])
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "run.json").write_text("{}")
    (problem,) = checked(capsys, TINY, here, "run_id=taken", code=EXIT_USER_ERROR)["problems"]
    assert "exists: choose another run_id" in problem
    (problem,) = checked(capsys, TINY, f"output_dir={TINY}", code=EXIT_USER_ERROR)["problems"]
    assert f"{TINY} cannot be written to" in problem
    found = checked(capsys, DIGITS, *digits, f"export_link={tmp_path}", code=EXIT_USER_ERROR)
    assert "exists and is no link of an earlier run" in found["problems"][0]
    assert stages(found) == {"config": True, "data": True, "model": False}
    gone = (
        "data.sources=[{path: ${digits.folder}/train_one.jsonl}, {path: gone.jsonl, split: eval}]"
    )
    found = checked(capsys, DIGITS, *digits, gone, code=EXIT_USER_ERROR)
    assert "gone.jsonl" in found["problems"][0]
    assert stages(found) == {"config": True, "data": False}


def test_check_bad_rows_are_a_warning_or_an_error(digits, tmp_path, capsys):
    words = write_rows(tmp_path, "{broken", *[{**CHAT, "origin": "web"}] * 30)
    words += [*digits, f"data.sources=[{{path: {tmp_path}/rows.jsonl}}]", f"data.cache={tmp_path}"]
    assert mvp(f"check {DIGITS}", *words) == EXIT_USER_ERROR
    output = capsys.readouterr()
    assert re.search(
        r"ok +config.*\n(.*\n)*.*bad_json +rows.jsonl:1: (.*\n)*FAILED +data\n", output.out
    )
    assert "1 of 31 rows are bad, and 0 are allowed" in output.err
    found = checked(capsys, DIGITS, *words, "data.max_bad_rows=0.1")
    # On a busy machine.
    bad, columns, unused = [text for text in found["warnings"] if "wait for data" not in text]
    assert bad == "train: leaves out 1 bad row"
    assert columns == "train: nothing reads 1 column: origin"
    assert (
        "parameters that train got no gradient in 4 steps: all of vision, all of projector. Is the loss"
        in unused
    )
    assert found["data"]["rows"][0]["where"] == "rows.jsonl:2"  # the first good row
    assert found["evaluation"] is None


def test_check_unknown_config_key_fails_the_config_stage(capsys):
    found = checked(capsys, TINY, "optim.lrr=1", code=EXIT_USER_ERROR)
    assert stages(found) == {"config": False}
    assert "Did you mean 'optim.lr'?" in found["problems"][0]
    assert mvp(f"check {TINY} optim.lrr=1") == EXIT_USER_ERROR
    output = capsys.readouterr()
    assert output.out.split() == ["FAILED", "config"]
    assert "Did you mean 'optim.lr'?" in output.err


def _check(folder, words):
    return check_rank(["--config", str(DIGITS), "--folder", folder, "--quiet", *words])


@CAMPAIGN
def test_check_on_two_ranks_equals_one_rank(ranks2, digits, tmp_path, capsys):
    words = [*digits, "data.global_batch_size=4", "parallel.shard=2"]
    assert ranks2.run(_check, str(tmp_path), words) == [0, 0]
    two, one = read_facts(tmp_path), checked(capsys, DIGITS, *words[:-1])
    assert (two["ok"], two["processes"]) == (True, 2)
    assert two["step"]["losses"] == pytest.approx(one["step"]["losses"], rel=1e-4)
    assert two["step"]["tokens"] == one["step"]["tokens"]
    assert two["parts"] == one["parts"]


@pytest.mark.slow
def test_check_failure_of_rank_1_is_reported_by_rank_0(tmp_path):
    words = f"output_dir={tmp_path} tiny.fault=nan_once tiny.fault_step=1 tiny.fault_rank=1".split()
    code, output = run_process("-m", "mvp_engine.cli", "check", str(TINY), "--nproc", "2", *words)
    assert code == EXIT_USER_ERROR, output
    assert output.count("ok      config") == 1
    assert "PROBLEM step 1, rank 1, micro-batch 1" in output
    assert not list(tmp_path.iterdir())


def test_check_bad_rows_of_a_stream_are_listed(digits, tmp_path, capsys, monkeypatch):
    # Rows of a stream that the data stage reads.
    monkeypatch.setattr("mvp_engine.tools.inspect_rows.SAMPLE", 100)
    rows = [CHAT] * 400
    rows[50] = rows[150] = rows[250] = "{broken"
    words = [*write_rows(tmp_path, *rows), *digits, "train.max_steps=4"]
    words.append(f"data.sources=[{{path: {tmp_path}/rows.jsonl, stream: true}}]")
    found = checked(capsys, DIGITS, *words)
    assert [row["where"] for row in found["data"]["bad"]["rows"]] == ["rows.jsonl:51"]
    assert {row["where"] for row in found["bad_rows"]} == {"rows.jsonl:151", "rows.jsonl:251"}
    assert mvp(f"check {DIGITS}", *words, "data.max_bad_rows=1") == EXIT_USER_ERROR
    output = capsys.readouterr()
    assert "bad_json  rows.jsonl:151: " in output.out
    assert re.search(r"[23] of \d+ rows are bad, and 1 are allowed", output.err)
    assert "mvp-check-" not in output.out + output.err


@pytest.mark.slow
def test_check_media_that_no_step_has_are_tried(digits, tmp_path, capsys, monkeypatch):
    """One row of 400 has an image, and the encoder fails: the training would find out in the middle of an epoch."""
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    Image.new("RGB", (32, 32)).save(tmp_path / "image.png")
    image = {**chat("<image>Which digit is this?", "7"), "images": ["image.png"]}
    words = write_rows(tmp_path, *[CHAT] * 400, image)
    words += [*digits, f"data.sources=[{{path: {tmp_path}/rows.jsonl}}]", f"data.cache={tmp_path}"]
    without_gradient = checked(capsys, DIGITS, *words)["without_gradient"]
    assert any(".visual." in name for name in without_gradient)  # no step had the image

    def fail(*_, **__):
        raise IndexError("tuple index out of range")

    monkeypatch.setattr(Qwen3VLVisionModel, "forward", fail)
    found = checked(capsys, DIGITS, *words, code=EXIT_USER_ERROR)
    assert (
        "qwen3_vl: the forward on a row with pixel_values fails: IndexError: tuple index"
        in found["problems"][0]
    )
    assert stages(found)["model"]
    assert not stages(found)["step"]
