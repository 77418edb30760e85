"""`mvp profile`: steps of a real training under the profiler, and the summary of its events."""

import re
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import MAGIC, ROOT, TINY, mvp
from run_files import read_json

from mvp_engine.distributed import World
from mvp_engine.report.facts import RunFacts
from mvp_engine.runs import list_runs
from mvp_engine.tools.profile import page
from mvp_engine.tools.profile_kernels import (
    MARK,
    Events,
    Kernel,
    busy_time,
    gaps,
    mark,
    read_events,
    sampled_clock,
    summary,
)

PLAIN = {
    "first_step": 6,
    "in_run": {},
    "phases": [],
    "slow_row": None,
}  # facts of a profile that `summary` has not


@pytest.mark.slow
def test_profile_writes_a_page_and_a_trace_and_no_run(tmp_path, capsys):
    words = f"--steps 2 --first 2 output_dir={tmp_path}/runs data.micro_batch_size=16"
    assert mvp(f"profile {MAGIC} --out {tmp_path}/out {words}") == 0
    printed = capsys.readouterr().out
    facts = read_json(tmp_path / "out" / "profile.json")
    assert (facts["steps"], 0 <= facts["idle"] < 1) == (2, True)
    assert facts["step_ms"] > 0 < facts["step_ms_alone"]
    kinds = {row["name"]: row["ms"] for row in facts["kinds"]}
    assert kinds["GEMM"] > 0
    assert sum(kinds.values()) < 2.5 * facts["step_ms"]  # two threads at most, and a little
    memory = facts["memory_gib"]
    assert (
        memory["parameters"]
        == memory["gradients"]
        == pytest.approx(memory["optimizer state"] / 2, rel=0.01)
    )
    assert (tmp_path / "out" / "profile.md").read_text() in printed
    assert read_json(tmp_path / "out" / "trace.json")["traceEvents"]
    assert not (tmp_path / "runs").exists()


def test_profile_user_errors_are_explained(tmp_path, capsys):
    words = f"profile {MAGIC} --out {tmp_path} output_dir={tmp_path}"
    assert mvp(f"{words} --steps 0") == 2
    assert mvp(f"{words} resume=auto") == 2
    assert "leave resume out" in capsys.readouterr().err
    assert mvp(f"profile reverse_rl/grpo --out {tmp_path} workers.where=spawn") == 2
    assert "set workers.where=local" in capsys.readouterr().err
    (tmp_path / "taken").write_text("a file")
    assert mvp(f"{words} --out {tmp_path}/taken") == 2  # before any step runs
    output = capsys.readouterr()
    assert "--out" in output.err
    assert "train step" not in output.out


def test_summary_counts_idle_time_and_kinds_of_kernels():
    kernels = [
        Kernel("gemm", 0, 10),
        Kernel("triton_norm", 5, 10),
        Kernel("memcpy", 25, 5),
        Kernel("gemm", 30, 10),
    ]
    assert busy_time(kernels) == 30
    assert gaps(kernels) == {"memcpy": [10]}
    assert Kernel("triton_per_fused__to_copy_add_0", 0, 1).kind.startswith("fused kernels")
    assert (
        Kernel(
            "cutlass::device_kernel<GemmUniversal<cute::SM90_TMA_LOAD, DefaultCopy_>>", 0, 1
        ).kind
        == "GEMM"
    )
    assert Kernel("triton_tem_fused__to_copy_flex_attention_backward_1", 0, 1).kind == "attention"
    facts = summary(Events(50e-6, kernels, [], []), 2, {"all": 1.0})
    assert facts["idle"] == pytest.approx(0.4)
    assert facts["step_ms"] == pytest.approx(0.025)
    assert facts["kinds"][0] == {"name": "GEMM", "ms": 0.01, "calls": 1}
    assert "| GEMM | 0.01 | 40.0% | 1 |" in (
        text := page({**facts, **PLAIN, "step_ms_alone": 0.02}, "a title")
    )
    assert "with 2 kernels and copies per step" in text
    assert "Communication" not in text
    assert " W at " not in text
    clock = {"power_w": 691.5, "sm_clock_mhz": 1530.0}
    often, seldom = (
        page({**facts, **PLAIN, "step_ms_alone": 0.02, **clock, "at_power_limit": x}, "")
        for x in (1.0, 0.1)
    )
    assert "The GPU drew 692 W at 1,530 MHz: at its power limit" in often
    assert "The GPU drew 692 W at 1,530 MHz. " in seldom


def test_clock_of_gpu_is_sampled_while_something_runs(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    lines = [
        "1980, 120.5, Not Active",
        "1530, 691.5, Active",
        "[N/A], [N/A], [N/A]",
        "1545, 692.5, Active",
    ]
    tool.write_text(
        f'#!/bin/sh\necho "$*" > {tmp_path}/asked\n' + "".join(f"echo '{line}'\n" for line in lines)
    )
    tool.write_text(tool.read_text() + "sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with sampled_clock("GPU-7") as samples:
        begin = time.perf_counter()
        while len(samples.rows) < 3 and time.perf_counter() < begin + 60:
            time.sleep(0.01)
    found = samples.between(begin - 1, time.perf_counter())
    assert found == {
        "sm_clock_mhz": 1545.0,
        "power_w": 691.5,
        "at_power_limit": pytest.approx(2 / 3),
    }
    assert samples.between(begin - 2, begin - 1) == {}
    assert "-i GPU-7 --query-gpu=clocks.sm,power.draw" in (tmp_path / "asked").read_text()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    tool.write_text(
        f'#!/bin/sh\necho "$*" > {tmp_path}/asked\nprintf "\\377 Field is not valid\\n"\nexit 2\n'
    )
    with sampled_clock() as samples:  # fails, as with a query that the driver does not know
        begin = time.perf_counter()
        while "-i 3 " not in (tmp_path / "asked").read_text() and time.perf_counter() < begin + 60:
            time.sleep(0.01)
    assert samples.between(0, time.perf_counter()) == {}
    assert "-i 3 " in (tmp_path / "asked").read_text()
    tool.write_text("not a program")
    with sampled_clock() as samples:  # cannot be started
        assert samples.between(0, time.perf_counter()) == {}
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with sampled_clock() as samples:  # no such tool
        assert samples.between(0, time.perf_counter()) == {}


@pytest.mark.slow
def test_profile_slow_loader_is_reported_as_wait_for_data_and_idle_time(tmp_path):
    slow = "tiny.load_seconds=0.05 data.num_workers=0"
    assert (
        mvp(f"profile {TINY} --out {tmp_path} --steps 2 --first 2 output_dir={tmp_path} {slow}")
        == 0
    )
    facts = read_json(tmp_path / "profile.json")
    # 0.99 on a machine with nothing else to do.
    assert facts["data_wait_ms"] > 0.5 * facts["step_ms"]
    assert facts["idle"] > 0.5
    text = (tmp_path / "profile.md").read_text()
    assert "More data.num_workers, smaller media or faster storage would help." in text
    assert "engine.py" in text.partition("for data.")[2].partition("More data.num_workers")[0]


SLOW_HOOK = "time.sleep(tiny.slow_seconds)  # the slow hook"


@pytest.mark.slow
def test_profile_traces_exactly_the_named_steps(tmp_path, capsys):
    """A hook is slow at step 5 alone: its line is in a profile of this step, and not in those of its neighbours."""
    slow = f"tiny.fault=slow_hook tiny.fault_step=5 tiny.slow_seconds=0.3 output_dir={tmp_path}"
    for first, steps, is_in in ((5, 1, True), (3, 2, False), (6, 1, False), (4, 2, True)):
        assert mvp(f"profile {TINY} --out {tmp_path} --steps {steps} --first {first} {slow}") == 0
        page = (tmp_path / "profile.md").read_text()
        assert (SLOW_HOOK in page) == is_in, (first, page)
        assert not is_in or (
            "The hook train_post_step takes" in page and "larger packs" not in page
        )
        events = read_json(tmp_path / "trace.json")["traceEvents"]
        assert sum(one["name"] == "mvp_engine: wait for data" for one in events) == steps
    capsys.readouterr()


@pytest.mark.slow
def test_profile_of_a_step_of_a_run_names_the_slow_line_of_hook_and_row(train, tmp_path, capsys):
    words = "tiny.fault=slow_hook tiny.fault_step=11 tiny.slow_seconds=0.4 tiny.slow_row=17".split()
    assert train(*words, "train.max_steps=20", "checkpoint.interval=5", "tiny.samples=200") == 0
    run = list_runs(tmp_path)[-1]
    records = {one["step"]: one for one in RunFacts(run).slowest}
    [step] = [step for step, one in records.items() if one.get("row") == 17]
    capsys.readouterr()
    assert mvp(f"profile {run.dir} --step 11 --out {tmp_path}/hook") == 0
    assert SLOW_HOOK in capsys.readouterr().out
    assert mvp(f"profile {run.dir} --step {step} --out {tmp_path}/row") == 0
    text = capsys.readouterr().out
    assert "time.sleep(self.slow_row[1])  # the slow row" in text
    assert "The slowest row, 17, took" in text
    assert "data.num_workers" not in text
    names = [one["name"] for one in read_json(tmp_path / "row" / "trace.json")["traceEvents"]]
    assert any(name.endswith(": train_post_step") for name in names)  # Python frames
    assert mvp(f"profile {run.dir} --step 30 --out {tmp_path}/late") == 2
    assert "ended before step 30: name an earlier one" in capsys.readouterr().err
    assert len(list_runs(tmp_path)) == 1


def test_page_of_slow_hook_names_its_line_and_not_larger_packs():
    facts = summary(Events(1.0, [Kernel("gemm", 0, 100_000)], [], []), 1, {})
    hook = {
        "name": "train_post_step",
        "ms": 800.0,
        "lines": [{"line": "engine.py:9 f: x.cpu()", "ms": 790.0}],
    }
    idle = page({**facts, **PLAIN}, "a title")
    assert "larger packs" in idle
    text = page({**facts, **PLAIN, "phases": [hook]}, "a title")
    assert (
        "The hook train_post_step takes 800.0 ms (80.0%) of a step; 790.0 ms in `engine.py:9 f: x.cpu()`."
        in text
    )
    assert "| train_post_step | 800.00 | 80.0% | engine.py:9 f: x.cpu() |" in text
    assert "larger packs" not in text


def test_windows_of_gpu_and_host_are_apart():
    """The host is ahead of the GPU: its marks come before the GPU has done the steps before the window."""

    def event(name, start, end, device):
        times = SimpleNamespace(start=start, elapsed_us=lambda: end - start)
        return SimpleNamespace(
            name=name, time_range=times, device_type=device, is_user_annotation=name == MARK
        )

    host = [(MARK, 100, 101), (MARK, 400, 401)]
    host += [("mvp_engine: wait for data", start, start + 10) for start in (90, 110, 300, 410)]
    gpu = [
        ("at::cuda::spin_kernel(long)", 500, 502),
        ("at::cuda::spin_kernel(long)", 902, 903),
        (MARK, 500, 502),
    ]
    gpu += [
        ("gemm", 450, 500),
        ("gemm", 502, 602),
        ("ncclKernel", 602, 652),
        ("gemm", 852, 902),
        ("gemm", 910, 920),
    ]
    listed = [event(*one, "DeviceType.CPU") for one in host] + [
        event(*one, "DeviceType.CUDA") for one in gpu
    ]
    found = read_events(SimpleNamespace(events=lambda: listed), "cuda")
    assert found.seconds == pytest.approx(400e-6)
    assert [kernel.start for kernel in found.kernels] == [502, 602, 852]
    assert [kernel.start for kernel in found.collectives] == [602]
    assert [wait.start for wait in found.data_waits] == [110, 300]
    assert summary(found, 2, {})["idle"] == pytest.approx(0.5)
    lost = [
        one
        for one in listed
        if one.name != "at::cuda::spin_kernel(long)" or one.time_range.start == 500
    ]
    # Of the host.
    assert read_events(SimpleNamespace(events=lambda: lost), "cuda").seconds == pytest.approx(
        299e-6
    )
    no_kernels = [one for one in listed if one.device_type == "DeviceType.CPU"]
    facts = summary(
        read_events(SimpleNamespace(events=lambda: no_kernels), "cuda"), 2, {"peak": 1.0}
    )
    assert (facts["idle"], facts["launches"], facts["data_wait_ms"]) == (
        None,
        0,
        pytest.approx(0.01),
    )
    assert "The profiler recorded no kernels" in page(
        {**facts, **PLAIN, "step_ms_alone": 1.0}, "a title"
    )


def test_summary_separates_exposed_communication():
    kernels = [
        Kernel("gemm", 0, 4000),
        Kernel("ncclDevKernel_AllGather", 3000, 3000),
        Kernel("gemm", 8000, 1000),
    ]
    kernels.append(Kernel("Memcpy DtoH", 5000, 500))  # a copy hides no communication
    facts = summary(
        Events(10e-3, kernels, [kernels[1], Kernel("gloo:all_reduce", 8500, 1000)], []), 1, {}
    )
    assert (facts["comm_ms"], facts["exposed_comm_ms"], facts["idle"]) == (
        4.0,
        2.5,
        pytest.approx(0.3),
    )
    text = page({**facts, **PLAIN, "step_ms_alone": 9.0}, "a title")
    assert (
        "Communication takes 4.0 ms per step; 2.5 ms of it (62%) is exposed: no kernel computes meanwhile."
        in text
    )


def test_collectives_on_gloo_are_found(ranks2):
    assert all(
        name.startswith("gloo:") and length > 0 for name, length in ranks2.run(_profiled_collective)
    )


def _profiled_collective():
    world = World.join("cpu")
    with torch.profiler.profile() as profiler:
        torch.distributed.all_reduce(torch.ones(1000))  # before the window
        mark(world.device)
        torch.distributed.all_reduce(torch.ones(1000))
        mark(world.device)
    world.close()
    (seen,) = read_events(profiler, "cpu").collectives
    return seen.name, seen.length


def test_own_loss_kernels_are_counted_as_loss():
    source = (ROOT / "mvp_engine" / "ops" / "logit_kernels.py").read_text()
    names = re.findall(r"@triton\.jit\ndef (\w+)\(", source)
    assert names
    assert {Kernel(name, 0, 1).kind for name in names} == {"loss (logits)"}
