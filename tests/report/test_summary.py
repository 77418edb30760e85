"""The end of a training: the summary on the terminal and the page from the run folder."""

import json
import re

from run_folder import run_folder

from mvp_engine.report.facts import RunFacts
from mvp_engine.report.page import end_of_run, summary_text


def test_summary_has_best_metric_time_speed_left_out_rows_and_next_commands(tmp_path, monkeypatch):
    for name, value in {
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "1",
    }.items():
        monkeypatch.setenv(name, value)
    run = run_folder(tmp_path)
    (run.checkpoints / "step_00000040").mkdir(parents=True)
    (run.checkpoints / "step_00000040" / "meta.json").write_text("{}")
    text = summary_text(RunFacts(run), seconds=3725)
    for part in (
        f"{tmp_path.name}: finished at step 40 of 40, in 1:02:05",
        "eval        step 40  loss 0.75  exact_web 12.5 %  exact_own 90.0 %",
        "best        loss 0.25 at step 20",
        "tokens/s 48.2k, MFU 53.5 %, fill of packs 97.0 %, wait for data 1.0 %, peak memory 40.00 GiB",
        "left out    5 rows (web: 4 corrupt, own: 1 too long)",
        f"mvp chat {tmp_path}",
        f"resume={tmp_path} workflow=export --nproc 2",
        f"resume={tmp_path} train.max_steps=80 --nproc 2",
    ):
        assert part in text, text
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "csm"}')
    assert "mvp chat" not in summary_text(RunFacts(run), seconds=1)  # it writes no text


def test_summary_points_to_the_slowest_step_that_a_profile_repeats(tmp_path):
    run = run_folder(tmp_path)
    slow = {
        "rank": 0,
        "seconds": 9.0,
        "usual_seconds": 1.0,
        "usual_split": {"evaluation": 1.0, "forward": 1.0},
    }
    steps = [{**slow, "step": 10, "phase": "evaluation", "split": {"evaluation": 9.0}}]
    (tmp_path / "slow_steps.jsonl").write_text(json.dumps(steps[0]) + "\n")
    assert "mvp profile" not in summary_text(RunFacts(run), seconds=1)
    steps.append({**slow, "step": 7, "phase": "forward", "split": {"forward": 9.0}})
    (tmp_path / "slow_steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert "--step 7" in summary_text(RunFacts(run), seconds=1)


def test_end_of_run_page_has_every_section_of_the_run_folder(tmp_path, capsys):
    run = run_folder(tmp_path)
    answer = {"prompt": "What is it?", "expected": "a cat", "written": "a dog", "right": False}
    lines = [{"step": 20, **answer, "prompt": "Old?"}, {"step": 40, **answer}]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    end_of_run(run, 5.0, page=True, summary=True)
    page = (tmp_path / "report.html").read_text()
    for part in (
        "8 x NVIDIA H200, bf16",
        "48.2k",
        "53.5 %",
        "90.0 %",
        "corrupt",
        "LoRA on 7 layers",
        "torch 2.15.0",
    ):
        assert part in page
    # Loss, by source, shares, learning rate, gradient norm.
    assert page.count("<svg ") == 5
    assert "What is it?" in page
    assert "Old?" not in page
    assert "prefers-color-scheme: dark" in page
    assert "width=device-width" in page
    assert f"{tmp_path}/ (report.html)" in capsys.readouterr().out


def test_end_of_run_keeps_the_page_that_the_recipe_wrote(tmp_path):
    run = run_folder(tmp_path)
    (tmp_path / "report.html").write_text("of the recipe")
    end_of_run(run, 5.0, page=True, summary=False)
    assert (tmp_path / "report.html").read_text() == "of the recipe"


def test_end_of_run_error_is_printed_and_not_raised(tmp_path, capsys):
    run = run_folder(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "split": "train", "perf": 3}\n')
    end_of_run(run, 5.0, page=True, summary=True)
    assert f"the report of {tmp_path} failed" in capsys.readouterr().out


def test_summary_of_rows_left_out_has_every_reason_and_adds_up(tmp_path):
    run = run_folder(tmp_path)
    bad = [{"source": "web", "where": f"{i}", "reason": f"reason_{i}"} for i in range(6)]
    (tmp_path / "bad_rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bad))
    line = next(
        line for line in summary_text(RunFacts(run), seconds=1).splitlines() if "left out" in line
    )
    assert "7 rows" in line
    assert sum(int(n) for n in re.findall(r": (\d+) ", line)) == 7
