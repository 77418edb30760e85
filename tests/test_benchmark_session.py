"""Benchmarks on a GPU machine: jobs end at their limits, and leave no processes."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import is_gone

ROOT = Path(__file__).parents[1]
# A child in the same session, which a kill of the job alone would leave.
SLEEPS = "import os; os.execlp('sh', 'sh', '-c', 'sleep 99 & echo $!; sleep 99')"


@pytest.mark.slow
def test_session_kills_jobs_at_their_limits_with_their_children(tmp_path):
    shown = "import os, time; print(float(os.environ['BENCHMARK_ENDS']) - time.time() > 15)"
    jobs = [f'+60 -c "{shown}"', f'+4 -S -c "{SLEEPS}"', "60 -c 'raise SystemExit(3)'"]
    command = [sys.executable, str(ROOT / "benchmarks/session.py"), "--logs", str(tmp_path), *jobs]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ended with 0\nTrue" in done.stdout
    assert "killed after 4 s" in done.stdout
    assert done.stdout.rstrip().endswith("ended with 3")  # alone, after the others
    assert "not started" not in done.stdout
    assert is_gone(int((tmp_path / "1.txt").read_text()))


def test_watch_reads_output_that_ends_inside_of_a_character(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.watch import watch

    code = "printf 'step 1 \\342\\226'; sleep 600"  # two of the three bytes of a character
    seen = watch(["sh", "-c", code], tmp_path / "new" / "folder", 1.5, pattern=r"\bstep +1\b")
    assert (seen.code, seen.first is not None, seen.output[:6]) == (None, True, "step 1")


def test_session_job_after_its_time_is_not_started_and_one_without_arguments_is_refused(
    tmp_path,
):
    command = [sys.executable, str(ROOT / "benchmarks/session.py"), "--logs", str(tmp_path)]
    (tmp_path / "0.txt").write_text("of an earlier session")
    done = subprocess.run(
        [*command, "--seconds", "0", "9 -c 1"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "not started: the time of the session was up\n\n" in done.stdout) == (
        1,
        True,
    )
    done = subprocess.run([*command, "60"], capture_output=True, text=True, check=False)
    assert "has no arguments of python" in done.stderr
