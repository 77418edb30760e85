"""benchmarks/session.py ends every job at its limit, and leaves none of its processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
    stat = Path("/proc") / (tmp_path / "1.txt").read_text().strip() / "stat"
    assert not stat.is_file() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"  # gone, or a zombie
