"""`mvp doctor`: each check finds what it is for, with a fix; a broken library does not end the others."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import MAGIC, ROOT, run_process

from mvp_engine.cli import main
from mvp_engine.ops import cudnn_attention, flash_attention
from mvp_engine.ops.attention import AttnSpec
from mvp_engine.ops.reference_attention import reference_attention
from mvp_engine.tools.doctor import command, gpus, host, kernels, media, probe, software
from mvp_engine.tools.doctor.finding import Finding
from mvp_engine.tools.nodes import Nodes

QWEN3 = ROOT / "recipes" / "qwen3" / "configs" / "sft_gpu1.yaml"
NO_CUDA = not torch.cuda.is_available()


def in_this_process(checks: list[str], request: probe.Request) -> Any:
    for kind, value in probe.run_checks(checks, request):
        yield ("", None) if kind == "begin" else ("", Finding(**value))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor without processes of its own."""
    monkeypatch.setattr(command, "run_probe", in_this_process)
    facts = {"ranks": 2, "hosts": ["a"], "backend": "gloo", "right": True, "bytes_per_s": 1e9}
    monkeypatch.setattr(command, "check_all_reduce", lambda nodes, on_gpus: command.describe(facts))


@pytest.mark.usefixtures("quick")
def test_doctor_json_has_a_finding_per_check_with_a_fix_unless_ok(tmp_path: Path, capsys) -> None:
    code = main(["doctor", "--json", "--dir", str(tmp_path)])
    facts = json.loads(capsys.readouterr().out)
    assert code == (0 if facts["ok"] else 2)
    by_name = {finding["name"]: finding for finding in facts["findings"]}
    expected = {"python", "torch", "host", "/dev/shm", "Hub cache", "driver", "attention", "loss"}
    expected |= {"image", "video", "audio", "disk", "all-reduce"}
    assert expected <= by_name.keys()
    for finding in facts["findings"]:
        assert (finding["status"] == "ok") == (finding["fix"] is None), finding
    for name in ("torch", "image", "video", "audio", "attention", "loss"):
        assert by_name[name]["status"] == "ok", by_name[name]


def test_doctor_with_a_wrong_config_key_prints_the_hint_and_exits_2(capsys) -> None:
    assert main(["doctor", str(MAGIC), "optim.lrr=1"]) == 2
    assert "Did you mean 'optim.lr'?" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_doctor_with_a_model_that_cannot_be_read_prints_why_and_exits_2(
    tmp_path: Path, capsys
) -> None:
    words = [
        "mllm.sources.chats.path=x",
        "mllm.sources.held_chats.path=x",
        f"model.path={tmp_path}",
    ]
    assert main(["doctor", str(QWEN3), *words]) == 2
    output = capsys.readouterr().out
    assert "problem  disk" in output
    assert "config.json" in output
    assert "this machine cannot train" in output


@pytest.mark.campaign(only=True)
def test_doctor_in_processes_of_its_own_finds_this_machine_ready(tmp_path: Path) -> None:
    code, output = run_process("-m", "mvp_engine.cli", "doctor", "--dir", str(tmp_path), fresh=True)
    assert code == 0, output
    assert "2 ranks, gloo" in output or "NCCL" in output
    assert ", 0 problems: " in output


def test_probe_process_that_dies_is_a_problem_and_other_checks_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = """
import json, os, signal, sys
out = os.fdopen(int(sys.argv[1]), "w", buffering=1)
for name in json.loads(sys.argv[2])[0]:
    print(json.dumps({"begin": name}), file=out)
    if name == "second":
        print("libfoo is broken", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    print(json.dumps({"finding": {"name": name, "status": "ok", "text": ""}}), file=out)
"""
    monkeypatch.setattr(command, "PROBE", [sys.executable, "-c", script])
    found = [
        finding
        for _, finding in command.run_probe(["first", "second", "third"], probe.Request())
        if finding
    ]
    assert [(f.name, f.status) for f in found] == [
        ("first", "ok"),
        ("second", "problem"),
        ("third", "ok"),
    ]
    assert "SIGSEGV: libfoo is broken" in found[1].text


def test_probe_process_that_cannot_import_torch_is_one_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = "raise ImportError('libcudnn.so.9: cannot open shared object file')"
    monkeypatch.setattr(command, "PROBE", [sys.executable, "-c", script])
    (found,) = [
        finding for _, finding in command.run_probe(["driver", "loss"], probe.Request()) if finding
    ]
    assert found.status == "problem"
    assert "libcudnn.so.9" in found.text


def test_probe_process_that_hangs_is_a_problem_with_the_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "PROBE", [sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(command, "PROBE_SECONDS", 0.2)
    (found,) = [finding for _, finding in command.run_probe(["driver"], probe.Request()) if finding]
    assert "did not finish within 0.2 s" in found.text


def test_check_that_raises_is_a_problem_and_other_checks_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "check_loss", lambda: 1 / 0)
    found = [f for _, f in in_this_process(["loss", "image"], probe.Request()) if f]
    assert [(f.name, f.status) for f in found] == [("loss", "problem"), ("image", "ok")]
    assert "ZeroDivisionError" in found[0].text


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("1.9.1", "problem"),
        ("2.11.0+cu130", "ok"),
        ("2.13.4", "ok"),
        ("2.14.0.dev1", "warning"),
        ("3.0", "warning"),
    ],
)
def test_package_version_is_compared_with_the_tested_ones(
    version: str, status: str, monkeypatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    found = software._check_package("torch", software.Package("2.11", "2.13"))
    assert found.status == status
    assert (found.fix is None) == (status == "ok")


def test_missing_package_names_its_extra() -> None:
    found = software._check_package("no_such_package", software.Package("1", "2", "video", "data"))
    assert (found.status, found.fix) == ("warning", "pip install 'mvp-engine[data]'")
    assert (
        software._check_package("no_such_package", software.Package("1", "2")).status == "problem"
    )
    package = software.Package("1", "2", extra="ray", only="workers.where=ray")
    found = software._check_package("no_such_package", package)
    assert (found.status, found.fix) == ("ok", None)
    assert "only workers.where=ray needs it (pip install 'mvp-engine[ray]')" in found.text


def test_tested_versions_begin_where_pyproject_does_and_include_the_installed_ones() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [project["dependencies"], *project["optional-dependencies"].values()]
    lowest = dict(word.split(">=") for words in wanted for word in words if ">=" in word)
    for name, package in software.PACKAGES.items():
        assert package.lowest == lowest[name], name
    assert [f for f in software.check_software() if f.status != "ok"] == []


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_media_check_with_a_broken_decoder_result_is_a_problem(kind: str, tmp_path: Path) -> None:
    file = tmp_path / media.FILES[kind]
    file.write_bytes((media.FOLDER / file.name).read_bytes()[:60])
    found = media.check_media(kind, tmp_path)
    assert found.status == "problem"
    assert found.fix


def test_media_check_without_the_package_gives_the_install_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    found = media.check_media("video")
    assert (found.status, found.fix) == ("warning", "pip install 'mvp-engine[data]'")


def test_small_shared_memory_and_disk_are_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=60 * 2**20, total=64 * 2**20)  # what docker gives
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    found = host._check_shared_memory(tmp_path)
    assert found.status == "problem"
    assert "--shm-size" in (found.fix or "")
    assert host.check_disk(tmp_path / "new" / "folder", None).status == "ok"
    assert host.check_disk(tmp_path, (2**20, 3)).status == "ok"
    found = host.check_disk(tmp_path, (2**30, 3))
    assert found.status == "problem"
    assert "3 checkpoints of 1.00 GiB" in found.text


def test_folder_that_is_not_writable_is_a_problem() -> None:
    found = host.check_disk(Path("/proc/runs"), None)
    assert found.status == "problem"
    assert "project.dir" in (found.fix or "")


@pytest.mark.skipif(not NO_CUDA, reason="pretends that torch sees no GPU")
@pytest.mark.parametrize(
    ("built", "driver", "visible", "status", "words"),
    [
        (None, None, None, "ok", "no NVIDIA driver"),
        (None, "13.0", None, "problem", "built without CUDA"),
        ("13.0", None, None, "ok", "no NVIDIA driver"),
        ("13.0", "13.0", "", "warning", "hides all GPUs"),
        (
            "13.0",
            "12.4",
            None,
            "problem",
            "supports CUDA up to 12.4, but torch is built for CUDA 13.0",
        ),
        ("12.6", "12.4", None, "problem", "torch sees no GPU"),
    ],
)
def test_driver_check_says_why_torch_sees_no_gpu(
    built: str | None, driver: str | None, visible: str | None, status: str, words: str, monkeypatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(gpus, "driver_cuda", lambda: driver)
    monkeypatch.setattr(gpus, "driver_version", lambda: driver and "550.1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = gpus.check_driver()
    assert found.status == status
    assert words in found.text


def test_all_reduce_on_two_ranks_sums_over_them(ranks2: Any, tmp_path: Path) -> None:
    out = tmp_path / "facts.json"
    assert ranks2.run(_all_reduce, str(out)) == [0, 0]
    facts = json.loads(out.read_text())
    assert (facts["ranks"], facts["right"]) == (2, True)
    assert command.describe(facts).status == "ok"
    assert command.describe({**facts, "right": False}).status == "problem"


def _all_reduce(out: str) -> int:
    from mvp_engine.tools.doctor import all_reduce

    return all_reduce.main(["--out", out])


def test_ranks_that_hang_or_fail_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SECONDS", 0.2)
    monkeypatch.setattr(command, "run_with_limit", lambda *_: (None, ""))
    found = command.check_all_reduce(Nodes(8), on_gpus=True)
    assert found.status == "problem"
    assert "8 ranks did not finish" in found.text
    assert "NCCL_DEBUG=INFO" in (found.fix or "")
    monkeypatch.setattr(
        command, "run_with_limit", lambda *_: (1, "x\nRuntimeError: ncclSystemError")
    )
    found = command.check_all_reduce(Nodes(8, count=2), on_gpus=True)
    assert "16 ranks: RuntimeError: ncclSystemError" in found.text
    assert "docs/several_nodes.md" in (found.fix or "")


def test_run_with_limit_kills_all_processes_after_the_limit() -> None:
    code, output = command.run_with_limit(["sh", "-c", "echo begun; sleep 100 & wait"], 1.5)
    assert (code, output) == (None, "begun\n")


def test_checkpoint_size_counts_weights_and_optimizer_states() -> None:
    from mvp_engine.config import compose
    from mvp_engine.tools.doctor.checkpoint_size import checkpoint_sizes, head_size

    words = [
        "model.path=null",
        "model.config={model_type: qwen3, hidden_size: 64, head_dim: 32, num_hidden_layers: 2}",
    ]
    words += ["mllm.sources.chats.path=x", "mllm.sources.held_chats.path=x"]
    config = compose(
        str(QWEN3),
        [*words, "checkpoint.keep_n=2", "loop.eval_interval=10", "checkpoint.best_metric=loss"],
    ).config
    size, count = checkpoint_sizes(config) or (0, 0)
    from mvp_engine.kit import MLLMModelKit

    parameters = sum(p.numel() for p in MLLMModelKit().build(config.model).parameters())
    assert (size, count) == (12 * parameters, 4)  # two kept, the best, one that is being written
    assert head_size(config) == 32
    assert checkpoint_sizes(compose(str(MAGIC), []).config) is None


@pytest.mark.filterwarnings("error")
def test_fp8_errors_of_linear_layers_and_experts_are_small_on_a_cpu() -> None:
    found = kernels._fp8_errors(torch.device("cpu"))
    found["experts"] = kernels._fp8_experts_error(torch.device("cpu"))
    assert all(0.01 < error < 0.1 for error in found.values()), found


@pytest.mark.parametrize(
    ("capability", "installed", "kernel", "status", "named"),
    [
        (9, {"flash", "cudnn"}, "FlashAttention 4", "ok", ""),
        (
            9,
            {"cudnn"},
            "cuDNN",
            "warning",
            f"flash-attn-4 {flash_attention.VERSION} is not installed",
        ),
        (9, set(), "FlashAttention 2", "warning", "nvidia-cudnn-frontend is not installed"),
        (10, {"flash", "cudnn"}, "cuDNN", "ok", "only on Hopper GPUs"),
        (8, {"flash", "cudnn"}, "FlashAttention 2", "ok", "need Hopper or Blackwell"),
    ],
)
def test_attention_kernel_is_the_first_that_runs_and_missing_ones_are_named(
    monkeypatch, capability: int, installed: set[str], kernel: str, status: str, named: str
) -> None:
    """The kernels of a GPU are the reference here."""
    inputs = [torch.randn(heads, 40, 16, requires_grad=True) for heads in (2, 1, 1)]
    monkeypatch.setattr(kernels, "_packed_inputs", lambda _: inputs)
    spec = AttnSpec(torch.tensor([0, 15, 40]), 25)
    monkeypatch.setattr(kernels, "_spec", lambda: spec)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (capability, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(flash_attention, "load", lambda: "loaded")
    for name, module in {"flash": flash_attention, "cudnn": cudnn_attention}.items():
        monkeypatch.setattr(module, "INSTALLED", name in installed)
        monkeypatch.setattr(module, "is_supported", lambda *_: True)
    for name, one in kernels._KERNELS.items():
        monkeypatch.setitem(kernels._KERNELS, name, one._replace(attention=reference_attention))
    found = kernels.check_attention()
    assert (found.facts["kernel"], found.status) == (kernel, status), found
    assert named in found.text
    assert (found.fix is None) == (status == "ok")


def test_attention_kernel_with_wrong_values_is_a_problem_with_its_fix(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    inputs = [torch.randn(heads, 40, 16, requires_grad=True) for heads in (2, 1, 1)]
    wrong = kernels._KERNELS["cuDNN"]._replace(
        attention=lambda q, k, v, spec: q * (k.mean() + v.mean())
    )
    found = kernels._try_attention("cuDNN", wrong, inputs, AttnSpec(torch.tensor([0, 15, 40]), 25))
    assert (found.status, "wrong values" in found.text) == ("problem", True)
    assert "FlashAttention 2 is used then" in str(found.fix)


@pytest.mark.gpu
def test_kernels_on_a_gpu_agree_with_plain_torch() -> None:
    checks = (kernels.check_attention, kernels.check_loss, kernels.check_compile, kernels.check_fp8)
    for check in (*checks, kernels.check_mixers):
        found = check()
        assert found is not None
        assert found.status in ("ok", "warning"), found
    assert [f.status for f in gpus.check_gpus() if f.status == "problem"] == []
