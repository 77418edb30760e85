"""Benchmarks on a GPU machine: jobs end at their limits without leaving processes, and a failed one has figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
# A child in the same session, which a kill of the job alone would leave.
SLEEPS = "import subprocess as s, sys; print(s.Popen([sys.executable, '-c', 'import time; time.sleep(99)']).pid); "
SLEEPS += "sys.stdout.flush(); import time; time.sleep(99)"


@pytest.mark.slow
def test_session_kills_jobs_at_their_limits_with_their_children(tmp_path: Path) -> None:
    shown = "import os, time; print(float(os.environ['BENCHMARK_ENDS']) - time.time() > 15)"
    jobs = [f'+20 -c "{shown}"', f'+1 -c "{SLEEPS}"', "20 -c 'raise SystemExit(3)'"]
    command = [sys.executable, str(ROOT / "benchmarks/session.py"), "--logs", str(tmp_path), *jobs]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ended with 0\nTrue" in done.stdout
    assert "killed after 1 s" in done.stdout
    assert done.stdout.rstrip().endswith("ended with 3")  # alone, after the others
    assert "not started" not in done.stdout
    stat = Path("/proc") / (tmp_path / "1.txt").read_text().strip() / "stat"
    assert not stat.is_file() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"  # gone, or a zombie


def record(step: int, seconds: float) -> dict[str, Any]:
    perf = {"step_s": seconds, "tokens_per_s": 1000 / seconds, "mfu": 0.1 / seconds, "memory_gib": 3.0}
    return {"split": "train", "step": step, "loss": 2.0, "perf": perf}


def test_figures_count_the_second_half_and_keep_intervals_of_a_training_that_failed(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.recipes_figures import Watched, figures, table

    records = [(10.0, record(1, 9.0)), (14.0, record(5, 1.0)), (19.0, record(10, 0.5)), (20.0, record(15, 0.25))]
    found = figures(Watched(records, 25.0, None, ""))
    assert (found["first_step_s"], found["full_speed_s"], found["counted_s"]) == (10.0, 19.0, [14.0, 20.0])
    assert found["tokens_per_s"] == pytest.approx(2000 / 0.75)  # as many tokens in each interval
    assert found["tokens_per_step"] == pytest.approx(1000)
    assert found["data_wait"] is None
    failed = figures(Watched(records, 25.0, 1, "out of memory"))
    assert (failed["why"], failed["output"]) == ("ended with 1, after step 15", "out of memory")
    assert [one["step"] for one in failed["intervals"]] == [5, 10, 15]
    late = figures(Watched([], 25.0, None, "compiling"))
    assert late["why"] == "no step after 25 s"
    rows = [{"work": "text_0.6b", "side": "ours", **one} for one in (found, failed, late)]
    assert len({line.count("|") for line in table({"rows": rows}).splitlines()}) == 1


def test_watch_reads_output_that_ends_inside_of_a_character(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.watch import watch

    code = "import os, time; os.write(1, 'step 1 \\u2588'.encode()[:-1]); time.sleep(60)"
    seen = watch([sys.executable, "-c", code], tmp_path / "new" / "folder", 0.5, pattern=r"\bstep +1\b")
    assert (seen.code, seen.first is not None, seen.output[:6]) == (None, True, "step 1")


def test_session_job_after_its_time_is_not_started_and_one_without_arguments_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/session.py"), "--logs", str(tmp_path)]
    (tmp_path / "0.txt").write_text("of an earlier session")
    done = subprocess.run([*command, "--seconds", "0", "9 -c 1"], capture_output=True, text=True, check=False)
    assert (done.returncode, "not started: the time of the session was up\n\n" in done.stdout) == (1, True)
    done = subprocess.run([*command, "60"], capture_output=True, text=True, check=False)
    assert "has no arguments of python" in done.stderr
