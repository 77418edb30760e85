"""`mvp`: what each command prints, as text and as JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import CAMPAIGN, MAGIC, ROOT, TINY, mvp
from run_files import json_lines, printed_json

from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.runs import Run, list_runs


@pytest.fixture
def two_runs(train, tmp_path):
    assert train("train.max_steps=6 eval.steps=3 run_id=first") == 0
    assert train("train.max_steps=6 optim.lr=0.1 run_id=second") == 0
    return tmp_path


def test_train_and_evaluate_accept_overrides_in_any_order(tmp_path, capsys):
    folder = f"output_dir={tmp_path}"
    assert mvp(f"train {TINY} train.max_steps=3 --nproc 1 {folder}") == 0
    assert mvp(f"evaluate {TINY} {folder}") == 0
    assert "eval step 3" in capsys.readouterr().out
    assert len(list_runs(tmp_path)) == 1


def test_config_show_output_trains_again(tmp_path, capsys):
    assert mvp(f"config {TINY} seed=4") == 0
    shown = capsys.readouterr().out
    (tmp_path / "again.yaml").write_text(shown)
    assert yaml.safe_load(shown)["seed"] == 4
    assert mvp(f"train {tmp_path}/again.yaml output_dir={tmp_path} train.max_steps=2") == 0


def test_saved_config_of_a_run_trains_with_equal_losses(two_runs):
    assert mvp(f"train {two_runs}/first/config.yaml run_id=third") == 0
    first, third = (json_lines(two_runs / name / "metrics.jsonl") for name in ("first", "third"))
    assert [record["loss"] for record in first] == [record["loss"] for record in third]


def test_config_schema_prints_json(capsys):
    assert mvp(f"config {MAGIC} --schema") == 0
    assert printed_json(capsys)["$defs"]["Task"]["properties"]["digits"]["default"] == 12


def test_runs_list_and_show_print_status_and_metrics(two_runs, capsys):
    assert mvp(f"runs --dir {two_runs}") == 0
    text = capsys.readouterr().out
    assert "first" in text
    assert "second" in text
    assert "finished" in text
    assert mvp(f"runs first --dir {two_runs}") == 0
    text = capsys.readouterr().out
    assert "first: finished at step 6" in text
    assert "best" in text
    assert mvp(f"runs latest --dir {two_runs} --json") == 0
    facts = printed_json(capsys)
    assert facts["id"] == "second"
    assert facts["train"]["step"] == 6


def test_failed_run_keeps_its_reason_until_it_is_resumed(train, tmp_path, capsys):
    words = ["tiny.fault=nan_forever", "guard.max_skips=2"]
    assert train(*words, "run_id=first") == EXIT_USER_ERROR
    assert mvp(f"runs latest --dir {tmp_path}") == 0
    printed = capsys.readouterr().out
    assert "first: failed at step 4" in printed
    assert "  error       " in printed
    assert "stopped at step 4: skipped 2 steps in a row" in printed
    assert train("run_id=first resume=auto") == 0
    capsys.readouterr()
    assert mvp(f"runs latest --dir {tmp_path} --json") == 0
    assert printed_json(capsys)["error"] is None


def test_runs_show_reads_the_last_record_of_each_split(tmp_path, capsys):
    run = Run.create(tmp_path, "tiny", "first")
    lines = [json.dumps({"step": step, "split": "train", "loss": 1.0 / step}) for step in (1, 2)]
    lines.insert(1, json.dumps({"step": 1, "split": "eval", "loss": 7.0}))
    (run.dir / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 3, "split": "train", "lo')
    assert mvp(f"runs latest --dir {tmp_path} --json") == 0
    shown = printed_json(capsys)
    assert (shown["step"], shown["train"]["loss"], shown["eval"]["loss"]) == (2, 0.5, 7.0)


def test_runs_diff_prints_config_keys_and_metrics(two_runs, capsys):
    assert mvp(f"runs first second --dir {two_runs}") == 0
    assert "optim.lr: 0.02 -> 0.1" in capsys.readouterr().out
    assert mvp(f"runs first second --dir {two_runs} --json") == 0
    answer = printed_json(capsys)
    assert answer["config"]["optim.lr"] == [0.02, 0.1]
    assert "train.loss" in answer["figures"]


def test_runs_plot_writes_a_png(two_runs, capsys):
    out = two_runs / "both.png"
    assert mvp(f"runs first second --plot grad_norm --out {out} --dir {two_runs}") == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert mvp(f"runs first --plot beauty --dir {two_runs}") == EXIT_USER_ERROR
    assert "no values of 'beauty' in these runs; they have:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, expected",
    [
        ("runs nobody", "no run 'nobody' below"),
        ("runs latest", "no run 'latest' below"),
        ("runs", "no runs in"),
    ],
)
def test_runs_without_a_match_print_a_message(tmp_path, capsys, words, expected):
    mvp(f"{words} --dir {tmp_path}")
    output = capsys.readouterr()
    assert expected in output.out + output.err


def test_misspelt_files_and_runs_get_a_hint(tmp_path, capsys):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text("{}\n")
    assert mvp(f"data inspect {tmp_path}/row/train.json") == EXIT_USER_ERROR
    assert f"Did you mean {tmp_path}/rows/train.jsonl?" in capsys.readouterr().err
    Run.create(tmp_path, "tiny", "first")
    assert mvp(f"runs frist --dir {tmp_path}") == EXIT_USER_ERROR
    assert "Did you mean first?" in capsys.readouterr().err
    assert mvp(f"train {TINY} resume={tmp_path}/firts output_dir={tmp_path}") == EXIT_USER_ERROR
    assert f"Did you mean {tmp_path}/first?" in capsys.readouterr().err


def test_misspelt_file_in_a_folder_that_may_not_be_listed_is_a_user_error(
    tmp_path, capsys, monkeypatch
):
    def refuse(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(Path, "iterdir", refuse)  # root may list every folder
    assert mvp(f"data inspect {tmp_path}/rows.jsonl") == EXIT_USER_ERROR
    assert "nothing at" in capsys.readouterr().err


def test_user_errors_are_one_line(capsys):
    assert mvp("config nowhere.yaml") == EXIT_USER_ERROR
    assert mvp(f"train {TINY} --nproc 0") == EXIT_USER_ERROR
    with pytest.raises(SystemExit, match="2"):
        mvp(f"train {TINY} --nproz 2")
    text = capsys.readouterr().err
    assert "config file not found: nowhere.yaml" in text
    assert "--nproc 0" in text
    assert "unrecognized arguments: --nproz" in text


def read_one_line(command):
    """Exit code, stdout and stderr of a command with a reader that closes the pipe after one line."""
    script = f"set -o pipefail; {sys.executable} {command} | head -n 1"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("python", ["", "-u"])
def test_output_after_a_broken_pipe_is_discarded(tmp_path, python):
    lines = f"for n in range(20000): print(n); print(n, file=sys.stderr)\nopen({str(tmp_path / 'done')!r}, 'w')"
    code = f"import sys\nfrom mvp_engine.process.watchdog import ignore_broken_pipes\nignore_broken_pipes()\n{lines}"
    (tmp_path / "prints.py").write_text(code)
    assert read_one_line(f"{python} {tmp_path}/prints.py 2>&1")[::2] == (0, "")
    assert (tmp_path / "done").exists()


@pytest.mark.slow
@CAMPAIGN
def test_profile_with_a_broken_pipe_writes_its_files(tmp_path):
    words = f"{MAGIC} --nproc 2 --steps 1 --first 1 --out {tmp_path} data.micro_batch_size=16 data.global_batch_size=32"
    code, stdout, stderr = read_one_line(f"-m mvp_engine.cli profile {words}")
    assert (code, len(stdout.splitlines()), "BrokenPipeError" in stderr) == (0, 1, False)
    assert (tmp_path / "profile.md").read_text()


def test_runs_and_help_import_neither_torch_nor_pydantic():
    code = "import sys, mvp_engine.cli, mvp_engine.tools.runs; print({'torch', 'pydantic'} & set(sys.modules))"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == "set()"


def test_ctrl_c_in_a_command_without_state_exits_130_without_a_traceback(monkeypatch, capsys):
    def interrupted(**options):
        raise KeyboardInterrupt

    monkeypatch.setattr("mvp_engine.cli.call", interrupted)
    assert mvp("recipe") == 130
    assert capsys.readouterr().err == "mvp: interrupted\n"
