"""Signals, dying ranks and restarts in real processes: what a whole job does.

`spawn` forks the processes from the tests' fork server; with `fresh_workers`, the ranks are torchrun's own children."""

import io
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from conftest import CAMPAIGN, TINY, read_metrics, run_process, spawn
from kill_resume import ForkedJob, child_pids, compare, settings_for
from rich.console import Console
from rich.live import Live

from mvp_engine import launch
from mvp_engine.distributed import World
from mvp_engine.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError
from mvp_engine.process.signals import StopSignals
from mvp_engine.runs import list_runs

pytestmark = pytest.mark.slow
TWO_RANKS = ["-m", "mvp_engine.cli", "train", str(TINY), "--nproc", "2"]
LAUNCH = f"-m mvp_engine.launch --config {TINY}".split()
LONG = ["train.max_steps=100000", "tiny.step_seconds=0.02", "data.micro_batch_size=4"]


def wait_for(process, text):
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} was not printed:\n{seen}")


def join_signal_threads():
    for thread in threading.enumerate():
        if thread.name == "mvp-signals":
            thread.join(60)


@pytest.mark.parametrize(  # SIGTERM: the test on two ranks
    "number", [pytest.param(signal.SIGTERM, marks=CAMPAIGN), signal.SIGINT]
)
def test_signal_to_one_rank_finishes_the_step_saves_and_exits_75(tmp_path, number):
    process = spawn(*LAUNCH, *LONG, f"output_dir={tmp_path}")
    wait_for(process, "step 4/")
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == EXIT_INTERRUPTED == 75, output
    assert f"{number.name}: finishing this step, then saving" in output
    [run] = list_runs(tmp_path)
    assert f"stopped and saved at step {run.info['step']}" in output
    assert run.checkpoint_list()[-1].name == f"step_{run.info['step']:08d}"
    assert "Traceback" not in output


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=CAMPAIGN)])
def test_signal_before_the_first_step_stops_at_once_with_75(tmp_path, number):
    process = spawn(*LAUNCH, "tiny.fault=hang_before_training", f"output_dir={tmp_path}")
    wait_for(process, "preparing")
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == EXIT_INTERRUPTED, output
    assert "mvp_engine: stopped before the first step; launch the same command again" in output
    assert "finishing this step" not in output
    [run] = list_runs(tmp_path)
    assert run.status() == "interrupted"


def test_stop_signals_ctrl_c_to_a_forked_process_is_not_counted_by_its_parent(
    monkeypatch,
):
    """A terminal sends Ctrl-C to loader workers as well; a second one would leave without saving."""
    exits = []
    monkeypatch.setattr(StopSignals, "_exit_at_once", lambda self: exits.append(1))
    with StopSignals() as signals:
        worker = os.fork()
        if worker == 0:
            os.kill(os.getpid(), signal.SIGINT)
            os._exit(0)
        assert os.waitpid(worker, 0)[1] == 0  # nor does it end the worker
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.requested == "SIGINT"
    join_signal_threads()
    assert not exits


def test_stop_signals_message_is_printed_by_a_live_panel_above_itself():
    """Written past the panel, it would move the cursor, and two lines of the panel would stay on the screen."""
    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    with Live("panel", console=console, auto_refresh=False):
        with StopSignals("saving"):
            os.kill(os.getpid(), signal.SIGTERM)
        join_signal_threads()
    assert "SIGTERM: saving\n" in console.file.getvalue()


def test_stop_signals_message_is_not_printed_after_a_rank_failed(
    capsys,
):
    """torchrun sends SIGTERM to the other ranks; the last line of the job stays the error of the failed one."""
    with StopSignals("saving", failed=lambda: True) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
    join_signal_threads()
    assert signals.requested == "SIGTERM"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "fault, nproc",
    [("hang", 1), ("busy", 1), pytest.param("busy", 2, marks=CAMPAIGN)],
)
def test_second_ctrl_c_in_a_hung_step_exits_at_once(tmp_path, fault, nproc):
    command = ["-m", "mvp_engine.cli", "train", str(TINY), "--nproc", str(nproc)]
    process = spawn(*command, f"tiny.fault={fault}", f"output_dir={tmp_path}", fresh_workers=True)
    wait_for(process, "hanging")
    process.send_signal(signal.SIGINT)
    wait_for(process, "finishing this step")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130  # the step would take minutes
    process.communicate()


def test_sigterm_to_mvp_train_on_two_ranks_saves_and_exits_75(tmp_path):
    process = spawn(*TWO_RANKS, *LONG, f"output_dir={tmp_path}")
    wait_for(process, "step 4/")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == EXIT_INTERRUPTED, output
    [run] = list_runs(tmp_path)
    assert run.status() == "interrupted"
    assert run.checkpoint_list()
    assert output.count("finishing this step") == 1
    assert "[rank 1]" not in output  # it would break the live panel of rank 0


@pytest.mark.parametrize("fault", ["raise", pytest.param("raise_everywhere", marks=CAMPAIGN)])
def test_exception_on_a_rank_or_on_all_ends_the_job_with_one_traceback(tmp_path, fault):
    """torchrun ends the rank that has failed first, and is about to say why, when another one exits before it."""
    words = [f"tiny.fault={fault}", "tiny.fault_rank=1", *LONG, f"output_dir={tmp_path}"]
    code, output = run_process(*TWO_RANKS, *words)
    assert code == 1
    assert fault != "raise" or "rank 1 failed" in output
    assert output.count("Traceback") == 1, output
    assert output.splitlines()[-1] == "KeyError: 'the bug of a user'"
    [run] = list_runs(tmp_path)
    assert (run.status(), run.info["error"]) == ("failed", "KeyError: 'the bug of a user'")


def test_killed_rank_is_named_and_the_job_exits_137(tmp_path):
    words = ["tiny.fault=kill", "tiny.fault_rank=1", *LONG, f"output_dir={tmp_path}"]
    code, output = run_process(*TWO_RANKS, *words)
    assert code == 128 + signal.SIGKILL
    assert output.splitlines()[-1].startswith("mvp: error: rank 1 was killed by SIGKILL")
    assert "mvp check" not in output
    [run] = list_runs(tmp_path)
    assert run.status() == "killed"


def report_of_rank_0(folder):
    """Fail as a rank, rank 0 first and slowly; returns when this rank ended, and its exit code."""
    world = World.join("cpu")
    exits = []

    def show(text, mode):
        time.sleep(1.0)  # the other rank has failed by then
        Path(folder, "said.txt").write_text(str(time.monotonic()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_show", show)
        patch.setattr(os, "_exit", lambda code: exits.append((time.monotonic(), code)))
        error = UserError("the first") if world.is_main else RuntimeError("a broken collective")
        if world.is_main:
            world.failed_first(error)
        world.barrier()
        launch._failed(error, world)
    world.barrier()
    world.close()
    return exits[0]


def test_rank_that_follows_exits_after_the_first_one_has_said_why_with_its_code(ranks2, tmp_path):
    exits = ranks2.run(report_of_rank_0, str(tmp_path))
    assert [code for _, code in exits] == [EXIT_USER_ERROR] * 2
    said = float((tmp_path / "said.txt").read_text())
    assert all(time > said for time, _ in exits)


def test_user_error_on_two_ranks_is_one_last_line(tmp_path):
    words = ["parallel.shard=4", f"output_dir={tmp_path}"]
    code, output = run_process(*TWO_RANKS, *words)
    assert code == EXIT_USER_ERROR
    assert output.startswith("mvp_engine: error: parallel.shard=4,")
    assert len(output.splitlines()) == 1


@CAMPAIGN
def test_killed_rank_ends_a_rank_that_hangs(tmp_path):
    """Rank 1 is killed while rank 0 hangs in a call that no exception can interrupt."""
    words = ["tiny.fault=hang", "tiny.fault_rank=0", *LONG, f"output_dir={tmp_path}"]
    process = spawn(*TWO_RANKS, *words, fresh_workers=True)
    wait_for(process, "hanging")
    [rank1] = [pid for pid in child_pids(process.pid) if _environment(pid).get("RANK") == "1"]
    started = time.monotonic()
    os.kill(rank1, signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert time.monotonic() - started < 60, output
    assert "of this job died; leaving" in output
    assert output.splitlines()[-1].startswith("mvp: error: rank 1 was killed by SIGKILL")


@CAMPAIGN
def test_killed_launcher_ends_ranks_that_are_starting(tmp_path):
    """Killed at three moments of the ranks' start, side by side."""
    waiting = {}
    for seconds, nproc in ((0.3, 1), (1.5, 1), (3.5, 2)):
        torchrun = f"-m torch.distributed.run --standalone --nproc_per_node={nproc}".split()
        folder = f"output_dir={tmp_path / str(seconds)}"
        waiting[spawn(*torchrun, *LAUNCH, *LONG, folder, fresh_workers=True)] = seconds
    began = {}
    ranks = []
    while waiting:
        for process, seconds in list(waiting.items()):
            if found := child_pids(process.pid):
                began.setdefault(process, time.monotonic())
            if process in began and time.monotonic() - began[process] > seconds:
                ranks += found
                process.kill()
                del waiting[process]
        time.sleep(0.05)
    assert len(ranks) > 3
    for process in began:
        process.communicate()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{rank}").exists() for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]


@CAMPAIGN
def test_torchrun_restart_resumes_from_the_last_checkpoint(tmp_path):
    words = "tiny.fault=crash_once tiny.fault_step=7 checkpoint.interval=2 log.interval=1".split()
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node=2 --max-restarts=1".split()
    words += ["data.micro_batch_size=2", f"output_dir={tmp_path}"]
    code, output = run_process(*torchrun, *LAUNCH, *words)
    assert code == 0, output
    assert "restarted by torchrun: continuing" in output
    assert len(list_runs(tmp_path)) == 1
    assert [r["step"] for r in read_metrics(tmp_path)] == list(range(1, 13))


@CAMPAIGN
@pytest.mark.parametrize("nproc", [1, 2])
def test_kill_9_at_random_moments_resumes_bit_equal(tmp_path, nproc, campaign_size):
    """`tests/kill_resume.py` does the same with fresh processes and torchrun."""
    kills = campaign_size(1, 20)
    settings = [*settings_for(kills), "data.micro_batch_size=4"]
    report = compare(kills, nproc, settings, tmp_path, seed=nproc + 1, start=ForkedJob)
    assert report["kills"] == kills
    assert report["bit_equal"]


def _environment(pid):
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
