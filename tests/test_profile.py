"""`mvp profile`: steps of a real training, and where their time went."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from mvp_engine.cli import main
from mvp_engine.distributed import World
from mvp_engine.tools.profile_page import Kernel, busy_time, collectives_of, gaps, page, summary

CONFIG = str(ROOT / "recipes" / "magic_transformer" / "configs" / "train.yaml")


def test_a_page_and_a_trace_of_some_steps_and_nothing_else(tmp_path: Path, capsys) -> None:
    words = [CONFIG, "--out", str(tmp_path / "out"), "--steps", "2", "--first", "2", f"project.dir={tmp_path / 'runs'}"]
    assert main(["profile", *words, "data.micro_batch_size=16"]) == 0
    told = capsys.readouterr().out
    facts = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert (facts["steps"], 0 <= facts["idle"] < 1) == (2, True)
    assert facts["step_ms"] > 0 < facts["step_ms_alone"]
    kinds = {row["name"]: row["ms"] for row in facts["kinds"]}
    assert kinds["matrix products"] > 0
    assert sum(kinds.values()) < 2.5 * facts["step_ms"]  # two threads at most, and a little
    memory = facts["memory_gib"]
    assert memory["parameters"] == memory["gradients"] == pytest.approx(memory["optimizer state"] / 2, rel=0.01)
    assert (tmp_path / "out" / "profile.md").read_text() in told
    assert json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    assert not (tmp_path / "runs").exists()


def test_what_cannot_be_profiled_is_explained(tmp_path: Path, capsys) -> None:
    words = ["profile", CONFIG, "--out", str(tmp_path), f"project.dir={tmp_path}"]
    assert main([*words, "--steps", "0"]) == 2
    assert main([*words, "resume=auto"]) == 2
    assert "leave resume out" in capsys.readouterr().err
    (tmp_path / "taken").write_text("a file")
    assert main([*words, "--out", str(tmp_path / "taken")]) == 2  # before any step is made
    assert "--out" in (told := capsys.readouterr()).err
    assert "train step" not in told.out


def test_idle_time_is_what_no_kernel_fills_and_is_told_by_what_ends_it() -> None:
    kernels = [Kernel("gemm", 0, 10), Kernel("triton_norm", 5, 10), Kernel("memcpy", 25, 5), Kernel("gemm", 30, 10)]
    assert busy_time(kernels) == 30
    assert gaps(kernels) == {"memcpy": [10]}
    assert Kernel("triton_per_fused__to_copy_add_0", 0, 1).kind.startswith("fused blocks")
    assert Kernel("triton_tem_fused__to_copy_flex_attention_backward_1", 0, 1).kind == "attention"
    facts = summary(kernels, 50e-6, 2, {"all": 1.0})
    assert facts["idle"] == pytest.approx(0.4)
    assert facts["step_ms"] == pytest.approx(0.025)
    assert facts["kinds"][0] == {"name": "matrix products", "ms": 0.01, "calls": 1}
    assert "| matrix products | 0.01 | 40.0% | 1 |" in (told := page({**facts, "step_ms_alone": 0.02}, "a title"))
    assert "exchanged" not in told


def test_what_ranks_exchange_is_told_apart_from_what_runs_meanwhile() -> None:
    kernels = [Kernel("gemm", 0, 4000), Kernel("ncclDevKernel_AllGather", 3000, 3000), Kernel("gemm", 8000, 1000)]
    kernels.append(Kernel("Memcpy DtoH", 5000, 500))  # is not what hides it
    facts = summary(kernels, 10e-3, 1, {}, [kernels[1], Kernel("gloo:all_reduce", 8500, 1000)])
    assert (facts["comm_ms"], facts["exposed_comm_ms"], facts["idle"]) == (4.0, 2.5, pytest.approx(0.3))
    told = page({**facts, "step_ms_alone": 9.0}, "a title")
    assert "Ranks exchanged data for 4.0 ms of a step; for 2.5 ms of that (62%) nothing else was computed." in told


def test_ranks_on_gloo_are_seen_exchanging(ranks2) -> None:
    assert all(name.startswith("gloo:") and length > 0 for name, length in ranks2.run(_seen_exchanging))


def _seen_exchanging() -> tuple[str, float]:
    world = World.join("cpu")
    with torch.profiler.profile() as profiler:
        torch.distributed.all_reduce(torch.ones(1000))
    world.close()
    (seen,) = collectives_of(profiler, [])
    return seen.name, seen.length
