"""`mvp doctor`: each check finds what it is for, with a fix; a broken library does not end the others."""

import importlib.metadata
import resource
import shutil
import sys
import tomllib
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import CAMPAIGN, MAGIC, ROOT, mvp, run_process
from run_files import printed_json, read_json

from mvp_engine.config import compose
from mvp_engine.kit import MLLMModelKit
from mvp_engine.ops import cudnn_attention, flash_attention
from mvp_engine.ops.attention import AttnSpec, reference_attention
from mvp_engine.tools import doctor, doctor_checks
from mvp_engine.tools.doctor import Finding, Package, Request
from mvp_engine.tools.nodes import Nodes

QWEN3 = ROOT / "recipes" / "qwen3" / "configs" / "sft_gpu1.yaml"
CHATS = ["data.sources.chats.path=x", "data.sources.held_chats.path=x"]
SPEC = AttnSpec(torch.tensor([0, 15, 40]), 25)


def findings(items):
    return [item for item in items if isinstance(item, Finding)]


@pytest.fixture
def quick(monkeypatch):
    """The doctor without processes of its own."""
    facts = {"ranks": 2, "hosts": ["a"], "backend": "gloo", "right": True, "bytes_per_s": 1e9}
    monkeypatch.setattr(doctor, "run_checks", doctor_checks.run_checks)
    monkeypatch.setattr(
        doctor, "check_all_reduce", lambda *_, **__: doctor.describe_all_reduce(facts)
    )


@pytest.mark.usefixtures("quick")
def test_doctor_json_has_a_finding_per_check_with_a_fix_unless_ok(tmp_path, capsys):
    code = mvp(f"doctor --json --dir {tmp_path}")
    facts = printed_json(capsys)
    assert code == (0 if facts["ok"] else 2)
    by_name = {finding["name"]: finding for finding in facts["findings"]}
    works = ["torch", "image", "video", "audio", "attention", "loss"]
    assert {
        "python",
        "host",
        "/dev/shm",
        "Hub cache",
        "driver",
        "disk",
        "all-reduce",
        *works,
    } <= by_name.keys()
    assert [f for f in facts["findings"] if (f["status"] == "ok") != (f["fix"] is None)] == []
    assert [by_name[name] for name in works if by_name[name]["status"] != "ok"] == []


def test_doctor_with_a_wrong_config_key_prints_the_hint_and_exits_2(capsys):
    assert mvp(f"doctor {MAGIC} optim.lrr=1") == 2
    assert "Did you mean 'optim.lr'?" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_doctor_with_a_model_that_cannot_be_read_prints_why_and_exits_2(tmp_path, capsys):
    assert mvp(f"doctor {QWEN3}", *CHATS, f"model.path={tmp_path}") == 2
    output = capsys.readouterr().out
    for text in ("problem  disk", "config.json", "this machine cannot train"):
        assert text in output


@CAMPAIGN
def test_doctor_in_processes_of_its_own_finds_this_machine_ready(tmp_path):
    code, output = run_process("-m", "mvp_engine.cli", "doctor", "--dir", str(tmp_path), fresh=True)
    assert code == 0, output
    assert "2 ranks, gloo" in output or "NCCL" in output
    assert ", 0 problems: " in output


DIES = """
import json, os, signal, sys
out = os.fdopen(int(sys.argv[1]), "w", buffering=1)
for name in json.loads(sys.argv[2])[0]:
    print(json.dumps(name), file=out)
    if name == "second":
        print("libfoo is broken", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    print(json.dumps({"name": name, "status": "ok", "text": ""}), file=out)
"""
NO_TORCH = "raise ImportError('libcudnn.so.9: cannot open shared object file')"


@pytest.mark.parametrize(
    "script, statuses, text",
    [
        pytest.param(DIES, ["ok", "problem", "ok"], "SIGSEGV: libfoo is broken", id="dies"),
        pytest.param(NO_TORCH, ["problem"], "libcudnn.so.9", id="cannot import torch"),
        pytest.param(
            "import time; time.sleep(60)", ["problem"], "did not finish within 1 s", id="hangs"
        ),
    ],
)
def test_process_of_checks_that_fails_is_a_problem_and_other_checks_run(
    script, statuses, text, monkeypatch
):
    monkeypatch.setattr(doctor, "CHECKS_PROCESS", [sys.executable, "-S", "-c", script])
    monkeypatch.setattr(doctor, "CHECKS_SECONDS", 1.0 if "sleep" in script else 60.0)
    result = findings(doctor.run_checks(["first", "second", "third"], Request()))
    assert [f.status for f in result] == statuses
    assert text in next(f.text for f in result if f.status == "problem")


def test_check_that_raises_is_a_problem_and_other_checks_run(
    monkeypatch,
):
    monkeypatch.setattr(doctor_checks, "check_loss", lambda: 1 / 0)
    loss, image = findings(doctor_checks.run_checks(["loss", "image"], Request()))
    assert (loss.name, loss.status, image.name, image.status) == ("loss", "problem", "image", "ok")
    assert "ZeroDivisionError" in loss.text


@pytest.mark.parametrize(
    "version, status",
    [
        ("1.9.1", "problem"),
        ("2.11.0+cu130", "ok"),
        ("2.13.4", "ok"),
        ("2.14.0.dev1", "warning"),
        ("3.0", "warning"),
    ],
)
def test_package_version_is_compared_with_the_tested_ones(version, status, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    finding = doctor._check_package("torch", Package("2.11", "2.13"))
    assert finding.status == status
    assert (finding.fix is None) == (status == "ok")


@pytest.mark.parametrize(
    "package, status, fix",
    [
        (Package("1", "2", "video", "data"), "warning", "pip install 'mvp-engine[data]'"),
        (Package("1", "2"), "problem", "pip install no_such_package"),
        (Package("1", "2", extra="ray", only="workers.where=ray"), "ok", None),
    ],
)
def test_missing_package_names_its_extra(package, status, fix):
    finding = doctor._check_package("no_such_package", package)
    assert (finding.status, finding.fix) == (status, fix)
    if package.only:
        assert "only workers.where=ray needs it (pip install 'mvp-engine[ray]')" in finding.text


def test_tested_versions_begin_where_pyproject_does_and_include_the_installed_ones():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = chain(project["dependencies"], *project["optional-dependencies"].values())
    lowest = dict(word.split(">=") for word in required if ">=" in word)
    assert {name: lowest[name] for name in doctor.PACKAGES} == {
        n: p.lowest for n, p in doctor.PACKAGES.items()
    }
    assert [f for f in doctor.check_software() if f.status != "ok"] == []


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_media_check_with_a_broken_decoder_result_is_a_problem(kind, tmp_path):
    name = doctor_checks.MEDIA[kind]
    (tmp_path / name).write_bytes((doctor_checks.FOLDER / name).read_bytes()[:60])
    finding = doctor_checks.check_media(kind, tmp_path)
    assert finding.status == "problem"
    assert finding.fix


def test_media_check_without_the_package_gives_the_install_line(
    monkeypatch,
):
    monkeypatch.setitem(sys.modules, "av", None)
    finding = doctor_checks.check_media("video")
    assert (finding.status, finding.fix) == ("warning", "pip install 'mvp-engine[data]'")


def test_small_shared_memory_and_disk_are_problems(tmp_path, monkeypatch):
    usage = SimpleNamespace(free=60 * 2**20, total=64 * 2**20)  # what docker gives
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    finding = doctor._check_shared_memory(tmp_path)
    assert finding.status == "problem"
    assert "--shm-size" in str(finding.fix)
    assert doctor.check_disk(tmp_path / "new" / "folder", None).status == "ok"
    assert doctor.check_disk(tmp_path, (2**20, 3)).status == "ok"
    finding = doctor.check_disk(tmp_path, (2**30, 3))
    assert finding.status == "problem"
    assert "3 checkpoints of 1.00 GiB" in finding.text


def test_folder_that_is_not_writable_is_a_problem():
    finding = doctor.check_disk(Path("/proc/runs"), None)
    assert finding.status == "problem"
    assert "output_dir" in str(finding.fix)


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that torch sees no GPU")
@pytest.mark.parametrize(
    "built, driver, visible, status, words",
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
    built, driver, visible, status, words, monkeypatch
):
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(doctor_checks, "driver_cuda", lambda: driver)
    monkeypatch.setattr(doctor_checks, "driver_version", lambda: driver and "550.1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    finding = doctor_checks.check_driver()
    assert finding.status == status
    assert words in finding.text


def test_all_reduce_on_two_ranks_sums_over_them(ranks2, tmp_path):
    out = tmp_path / "facts.json"
    assert ranks2.run(doctor_checks.main, ["all-reduce", str(out)]) == [0, 0]
    facts = read_json(out)
    assert (facts["ranks"], facts["right"]) == (2, True)
    assert doctor.describe_all_reduce(facts).status == "ok"
    assert doctor.describe_all_reduce({**facts, "right": False}).status == "problem"


@pytest.mark.parametrize(
    "result, nodes, text, fix",
    [
        ((None, ""), 1, "8 ranks did not finish", "NCCL_DEBUG=INFO"),
        (
            (1, "x\nRuntimeError: ncclSystemError"),
            2,
            "16 ranks: RuntimeError: nccl",
            "docs/several_nodes.md",
        ),
    ],
)
def test_ranks_that_hang_or_fail_are_problems(result, nodes, text, fix, monkeypatch):
    monkeypatch.setattr(doctor, "run_with_limit", lambda *_: result)
    finding = doctor.check_all_reduce(Nodes(8, count=nodes), on_gpus=True)
    assert finding.status == "problem"
    assert text in finding.text
    assert fix in str(finding.fix)


def test_run_with_limit_kills_all_processes_after_the_limit():
    code, output = doctor.run_with_limit(["sh", "-c", "echo begun; sleep 100 & wait"], 0.5)
    assert (code, output) == (None, "begun\n")


def test_checkpoint_size_counts_weights_and_optimizer_states():
    words = [
        "model.path=null",
        "model.config={model_type: qwen3, hidden_size: 64, head_dim: 32, num_hidden_layers: 2}",
    ]
    words += [*CHATS, "checkpoint.keep_n=2", "eval.steps=10", "checkpoint.best_metric=loss"]
    config = compose(str(QWEN3), words).config
    parameters = sum(p.numel() for p in MLLMModelKit().build(config.model).parameters())
    # Two kept, the best, one that is being written.
    assert doctor_checks.checkpoint_sizes(config) == (12 * parameters, 4)
    assert doctor_checks.head_size(config) == 32
    assert doctor_checks.checkpoint_sizes(compose(str(MAGIC), []).config) is None


@pytest.mark.filterwarnings("error")
def test_fp8_errors_of_linear_layers_and_experts_are_small_on_a_cpu():
    errors = doctor_checks.fp8_errors(torch.device("cpu"), has_experts=True)
    assert len(errors) == 3
    assert all(0.01 < error < 0.1 for error in errors.values()), errors


@pytest.fixture
def inputs(monkeypatch):
    """q, k and v on the CPU, in place of those on a GPU."""
    tensors = [torch.randn(heads, 40, 16, requires_grad=True) for heads in (2, 1, 1)]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(doctor_checks, "_packed_inputs", lambda _: tensors)
    monkeypatch.setattr(doctor_checks, "_spec", lambda: SPEC)
    return tensors


@pytest.mark.usefixtures("inputs")
@pytest.mark.parametrize(
    "capability, installed, kernel, status, named",
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
    monkeypatch, capability, installed, kernel, status, named
):
    """The kernels of a GPU are the reference here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (capability, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(flash_attention, "load", lambda: "loaded")
    for name, module in {"flash": flash_attention, "cudnn": cudnn_attention}.items():
        monkeypatch.setattr(module, "INSTALLED", name in installed)
        monkeypatch.setattr(module, "is_supported", lambda *_: True)
    for name, entry in doctor_checks._KERNELS.items():
        monkeypatch.setitem(
            doctor_checks._KERNELS, name, entry._replace(attention=reference_attention)
        )
    finding = doctor_checks.check_attention(Request())
    assert (finding.facts["kernel"], finding.status) == (kernel, status), finding
    assert named in finding.text
    assert (finding.fix is None) == (status == "ok")


def test_attention_kernel_with_wrong_values_is_a_problem_with_its_fix(
    inputs,
):
    wrong = doctor_checks._KERNELS["cuDNN"]._replace(
        attention=lambda q, k, v, spec: q * (k.mean() + v.mean())
    )
    finding = doctor_checks._try_attention("cuDNN", wrong, inputs, SPEC)
    assert (finding.status, "wrong values" in finding.text) == ("problem", True)
    assert "FlashAttention 2 is used then" in str(finding.fix)


@pytest.mark.gpu
def test_kernels_on_a_gpu_agree_with_plain_torch():
    names = ["attention", "loss", "torch.compile", "FP8", "mixers", "GPUs"]
    result = findings(doctor_checks.run_checks(names, Request()))
    assert {*names[:-1], "GPU 0"} <= {finding.name for finding in result}
    assert [finding for finding in result if finding.status == "problem"] == []


def fake_sysfs(folder, nets, ports=()):
    """/sys/class with interfaces {name: (state, Mb/s)} and ports (adapter, port, state, link, rate)."""
    for name, (state, speed) in nets.items():
        (folder / "net" / name).mkdir(parents=True)
        (folder / "net" / name / "operstate").write_text(f"{state}\n")
        (folder / "net" / name / "speed").write_text(f"{speed}\n")
    for adapter, port, state, link, rate in ports:
        place = folder / "infiniband" / adapter / "ports" / port
        place.mkdir(parents=True)
        for file, text in (("state", state), ("link_layer", link), ("rate", rate)):
            (place / file).write_text(f"{text}\n")
    return folder


NETS = {"lo": ("unknown", -1), "eth0": ("up", 10000), "eth1": ("up", 100000), "eth2": ("down", 0)}
PORT = ("mlx5_0", "1", "4: ACTIVE", "InfiniBand", "400 Gb/sec (4X NDR)")


@pytest.mark.parametrize(
    "ports, variables, nodes, name, status, words",
    [
        ([], {}, 1, "interfaces", "ok", "eth0 10 Gb/s, eth1 100 Gb/s"),
        ([], {}, 2, "interfaces", "warning", "NCCL_SOCKET_IFNAME=eth1 GLOO_SOCKET_IFNAME=eth1"),
        ([], {}, 2, "InfiniBand", "warning", "--device=/dev/infiniband"),
        ([PORT], {}, 2, "interfaces", "ok", "eth0"),
        ([PORT], {}, 2, "InfiniBand", "ok", "1 active port, InfiniBand 400 Gb/sec (4X NDR)"),
        ([PORT], {"NCCL_IB_DISABLE": "1"}, 2, "InfiniBand", "warning", "unset NCCL_IB_DISABLE"),
        ([PORT], {"NCCL_IB_HCA": "=mlx5_9:1"}, 1, "NCCL_IB_HCA", "problem", "name one of: mlx5_0"),
        ([PORT], {"NCCL_IB_HCA": "mlx5"}, 1, "NCCL_IB_HCA", "ok", "adapters that NCCL uses"),
        ([("m", "1", "1: DOWN", "InfiniBand", "")], {}, 1, "InfiniBand", "warning", "ibstat"),
        ([(*PORT[:3], "Ethernet", "100 Gb/sec")], {}, 1, "InfiniBand", "ok", "NCCL_IB_GID_INDEX=3"),
        ([], {"NCCL_SOCKET_IFNAME": "ib0"}, 1, "NCCL_SOCKET_IFNAME", "problem", "eth0, eth1, lo"),
        ([], {"NCCL_SOCKET_IFNAME": "^docker"}, 2, "NCCL_SOCKET_IFNAME", "ok", "connects"),
        ([], {"GLOO_SOCKET_IFNAME": "eth2"}, 1, "GLOO_SOCKET_IFNAME", "problem", "eth0, eth1, lo"),
        ([], {"NCCL_P2P_DISABLE": "1"}, 1, "NCCL_P2P_DISABLE", "warning", "unset NCCL_P2P_DISABLE"),
    ],
)
def test_network_findings_say_what_to_set(
    ports, variables, nodes, name, status, words, tmp_path, monkeypatch
):
    for one in doctor.MEANINGS:
        monkeypatch.delenv(one, raising=False)
    for one, value in variables.items():
        monkeypatch.setenv(one, value)
    no_limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: no_limit)
    findings = doctor.check_network(True, nodes, fake_sysfs(tmp_path, NETS, ports), tmp_path)
    (found,) = [finding for finding in findings if finding.name == name]
    assert found.status == status
    assert words in f"{found.text} {found.fix}"
    assert found.fix or found.status == "ok"


def test_adapters_that_a_container_does_not_see_or_lock_memory_for_are_warnings(
    tmp_path, monkeypatch
):
    root = fake_sysfs(tmp_path, NETS, [PORT])
    for limit, verbs, fix in ((2**16, tmp_path, "ulimit -l"), (2**40, tmp_path / "no", "--device")):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        found = doctor.check_network(True, 1, root, verbs)[-1]
        assert found.status == "warning"
        assert fix in found.fix
