"""`mvp doctor`: does this machine train? Each finding is ok, or has a fix. This module imports no torch.

The checks that import torch are in `doctor_checks.py` and run in processes of their own: a broken library may end its
process with a signal, and a broken network hangs.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from mvp_engine import __version__
from mvp_engine.errors import EXIT_USER_ERROR, count
from mvp_engine.tools.nodes import Nodes

OK = "ok"
WARNING = "warning"  # a training runs, but slower or without some kind of data
PROBLEM = "problem"  # a training fails
STYLES = {OK: "bold green", WARNING: "bold yellow", PROBLEM: "bold red"}
SUMMARY = {
    OK: "this machine is ready to train",
    WARNING: "this machine can train; the fixes above make it faster or more complete",
    PROBLEM: "this machine cannot train as it is; start with the first fix above",
}
GIB = 2**30
# The checks of `doctor_checks.py`, by the heading under which the terminal shows them.
SECTIONS = {
    "GPUs": ["driver", "cuDNN", "GPUs"],
    "Kernels": ["attention", "loss", "torch.compile", "FP8", "NF4", "mixers"],
    "Media": ["image", "video", "audio"],
    "Disk": ["disk", "stores"],
}
HEADINGS = {checks[0]: heading for heading, checks in SECTIONS.items()}
MODULE = "mvp_engine.tools.doctor_checks"
CHECKS_PROCESS = [sys.executable, "-m", MODULE, "checks"]
CHECKS_SECONDS = 300.0
ALL_REDUCE_SECONDS = 180.0
SLOW = 5e9  # bytes per second between GPUs: PCIe without peer access
NCCL_FIX = (
    "NCCL_DEBUG=INFO mvp doctor shows where it stops. Common: NCCL_P2P_DISABLE=1 (virtual machines without peer "
    "access), NCCL_SOCKET_IFNAME=eth0 (the network interface), a larger /dev/shm"
)
GLOO_FIX = (
    "the host name must resolve (add it to /etc/hosts), or set GLOO_SOCKET_IFNAME=lo on one machine"
)
NODES_FIX = "run mvp doctor on all nodes within three minutes, with the options of the training (docs/several_nodes.md)"


@dataclass(frozen=True)
class Finding:
    """One line of the output."""

    name: str
    status: str
    text: str
    fix: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def lines(self) -> Iterator[Text]:
        yield Text.assemble(
            (f"{self.status:<9}", STYLES[self.status]), f"{self.name:<16}{self.text}"
        )
        if self.fix:
            yield Text.assemble((f"{'':<9}{'fix':<16}", "dim"), self.fix)


def ok(name: str, text: str, **facts: Any) -> Finding:
    return Finding(name, OK, text, None, facts)


def warning(name: str, text: str, fix: str, **facts: Any) -> Finding:
    return Finding(name, WARNING, text, fix, facts)


def problem(name: str, text: str, fix: str, **facts: Any) -> Finding:
    return Finding(name, PROBLEM, text, fix, facts)


@dataclass(frozen=True)
class Request:
    """What the command was asked for: a config, its overrides, and the folder of the runs."""

    config: str | None = None
    overrides: list[str] = field(default_factory=list)
    dir: str | None = None


def doctor(
    request: Request, nodes: Nodes, nproc: int | None = None, *, as_json: bool = False
) -> int:
    """Check this machine and print one line per finding. Returns exit code 2 if a training would fail.

    `nproc`: ranks of the all-reduce on this machine; None: one per GPU, or two without GPUs.
    """
    console = Console(highlight=False, quiet=as_json)
    findings: list[Finding] = []
    for item in _findings(request, nodes, nproc):
        if isinstance(item, str):
            console.print(Text(f"\n{item}", "bold"))
            continue
        findings.append(item)
        for line in item.lines():
            console.print(line, soft_wrap=True)
    counts = {status: sum(f.status == status for f in findings) for status in STYLES}
    worst = next((status for status in (PROBLEM, WARNING) if counts[status]), OK)
    numbers = (
        f"\n{counts[OK]} ok, {count(counts[WARNING], WARNING)}, {count(counts[PROBLEM], PROBLEM)}: "
    )
    console.print(Text.assemble(numbers, (SUMMARY[worst], STYLES[worst])), soft_wrap=True)
    if as_json:
        facts = {"ok": worst != PROBLEM, "mvp_engine": __version__, "host": platform.node()}
        facts["findings"] = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps(facts, indent=2))
    return EXIT_USER_ERROR if worst == PROBLEM else 0


def _findings(request: Request, nodes: Nodes, nproc: int | None) -> Iterator[Finding | str]:
    """Findings, and the headings (str) above them, in the order of the terminal."""
    yield f"mvp_engine {__version__} on {platform.node()}: versions"
    yield from check_software()
    yield "Host"
    yield from (_check_cores(), _check_shared_memory(), _check_open_files(), _check_hub_cache())
    gpus = 0
    for item in run_checks([*chain(*SECTIONS.values())], request):
        if isinstance(item, Finding):
            gpus += item.name.startswith("GPU ")
            yield item
        elif item in HEADINGS:
            yield HEADINGS[item]
    yield "Network"
    yield from check_network(gpus > 0, nodes.count)
    yield "Ranks"
    ranks_here = nproc or gpus or (2 if nodes.count == 1 else nodes.nproc)
    yield check_all_reduce(dataclasses.replace(nodes, nproc=ranks_here), on_gpus=gpus > 0)


# ---- Versions, against those that the tests ran on ---------------------------------------------------


@dataclass(frozen=True)
class Package:
    """The lowest and the newest version that the tests ran on."""

    lowest: str
    newest: str
    use: str = ""  # what it is needed for, if a training can do without
    extra: str = ""
    module: str = ""  # the name to import, if it is another
    only: str = ""  # the setting that needs it: it is not missing on other machines


PYTHON = Package("3.11", "3.12")
PACKAGES = {
    "torch": Package("2.11", "2.15"),
    "transformers": Package("5.19", "5.22"),
    "huggingface-hub": Package("1.31", "2.4", module="huggingface_hub"),
    "numpy": Package("2", "2.4"),
    "safetensors": Package("0.8", "0.8"),
    "hydra-core": Package("1.3.2", "1.3.8", module="hydra"),
    "pydantic": Package("2.11", "2.14"),
    "pillow": Package("11", "13", module="PIL"),
    "torchvision": Package("0.26", "0.29"),
    "pyarrow": Package("17", "26", "parquet and arrow files", "data"),
    "av": Package("18.1", "19", "video", "data"),
    "soundfile": Package("0.13", "0.14", "audio", "data"),
    "soxr": Package("0.5", "1.1", "audio of another sampling rate", "data"),
    "pylance": Package(
        "14", "14", extra="lance", module="lance", only="a stream of Lance datasets"
    ),
    "ray": Package("2.44", "2.60", extra="ray", only="workers.where=ray"),
}


def check_software() -> list[Finding]:
    version = platform.python_version()
    python = _compare("python", version, f"{version} ({sys.executable})", PYTHON)
    return [python, *(_check_package(name, package) for name, package in PACKAGES.items())]


def _check_package(name: str, package: Package) -> Finding:
    install = (
        f"pip install 'mvp-engine[{package.extra}]'" if package.extra else f"pip install {name}"
    )
    if importlib.util.find_spec(package.module or name) is None:
        if package.only:
            return ok(name, f"not installed: only {package.only} needs it ({install})")
        if package.use:
            return warning(name, f"not installed: needed for {package.use}", install)
        return problem(name, "not installed", install)
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ok(name, "found on the path, without a version")
    return _compare(name, version, version, package)


def _compare(name: str, version: str, text: str, tested: Package) -> Finding:
    lowest, newest = tested.lowest, tested.newest
    is_python = name == "python"
    facts = {"version": version, "lowest": lowest, "newest": newest}
    if _numbers(version) < _numbers(lowest):
        fix = f"install Python {newest}" if is_python else f"pip install -U {name}"
        return problem(name, f"{text} is older than the lowest supported, {lowest}", fix, **facts)
    # 2.13.1 is a patch release of a tested 2.13.
    if _numbers(version)[: len(_numbers(newest))] > _numbers(newest):
        fix = f"install the newest tested version: pip install '{name}=={newest}.*'"
        fix = f"if something fails, {f'use Python {newest}' if is_python else fix}"
        return warning(name, f"{text} is newer than the newest tested, {newest}", fix, **facts)
    versions = lowest if lowest == newest else f"{lowest} to {newest}"
    return ok(name, f"{text} (tested: {versions})", **facts)


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, to compare: (2, 13, 0) of 2.13.0+cu130."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", version)[0])))


# ---- The machine without its GPUs ---------------------------------------------------------------------

SHARED_MEMORY = Path("/dev/shm")
# A loader worker keeps three batches in shared memory, 130 MB each with large images.
SHARED_MEMORY_GIB = 2.0
OPEN_FILES = 4096
CHECKPOINT_BYTES = 12  # float32 weights and the two states of AdamW, per parameter


def _check_cores() -> Finding:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")  # of this process's control group, as in a container
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        memory = min(memory, int(text))
    text = f"{cores} CPU cores, {memory / GIB:.0f} GiB of memory"
    if cores < (os.cpu_count() or 1):
        text += f" (the machine has {os.cpu_count()} cores)"
    return ok("host", text, cores=cores, memory_gib=round(memory / GIB, 1))


def _check_shared_memory(folder: Path = SHARED_MEMORY) -> Finding:
    fix = "in a container: docker run --shm-size=16g (or --ipc=host); else: mount -o remount,size=16G /dev/shm"
    if not folder.is_dir():
        return problem("/dev/shm", "missing: loader workers and NCCL need it", fix)
    if not os.access(folder, os.W_OK):
        return problem("/dev/shm", "not writable for this user", "chmod 1777 /dev/shm")
    usage = shutil.disk_usage(folder)
    free = usage.free / GIB
    text = f"{free:.1f} GiB of shared memory are free"
    facts = {"free_gib": round(free, 2), "total_gib": round(usage.total / GIB, 2)}
    if free < SHARED_MEMORY_GIB:
        text += f"; loader workers with images or video need {SHARED_MEMORY_GIB:g} GiB or more"
        return problem("/dev/shm", text, fix, **facts)
    return ok("/dev/shm", text, **facts)


# ---- The network: interfaces, InfiniBand, and the variables by which NCCL and gloo choose among them ----

SYSFS = Path("/sys/class")
VERBS = Path("/dev/infiniband")
# What the variables mean that people set, for those that are set here.
MEANINGS = {
    "NCCL_SOCKET_IFNAME": "the interfaces over which NCCL connects, and sends without InfiniBand",
    "NCCL_IB_HCA": "the InfiniBand adapters that NCCL uses",
    "NCCL_IB_DISABLE": "1: NCCL sends over sockets, not over InfiniBand",
    "NCCL_IB_GID_INDEX": "the address of an adapter on Ethernet (RoCE); 3 is usual for RoCE v2",
    "NCCL_IB_TC": "the traffic class, where switches give RoCE one of its own",
    "NCCL_IB_TIMEOUT": "how long an adapter waits for an answer; 22 is usual in large networks",
    "NCCL_NET_GDR_LEVEL": "how far GPU and adapter may be apart to exchange data without the CPU",
    "NCCL_P2P_DISABLE": "1: GPUs of a machine do not read each other's memory",
    "NCCL_SHM_DISABLE": "1: GPUs of a machine do not exchange data through shared memory",
    "NCCL_CROSS_NIC": "whether rings may use other adapters on other nodes",
    "NCCL_DEBUG": "what NCCL prints; INFO: also the network that it chose",
    "GLOO_SOCKET_IFNAME": "the interface of gloo, over which ranks agree on the host",
}


@dataclass(frozen=True)
class Adapter:
    """A port of an InfiniBand or RoCE adapter."""

    name: str
    port: str
    is_active: bool
    link: str  # InfiniBand or Ethernet
    rate: str  # such as "400 Gb/sec (4X NDR)"


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # of an interface that is down
        return ""


def interfaces(root: Path = SYSFS) -> dict[str, float]:
    """The interfaces that are up, with their speed in Gb/s, or 0 where it is not known; without the loopback."""
    found = {}
    for folder in sorted((root / "net").glob("*")):
        if folder.name != "lo" and _read(folder / "operstate") in ("up", "unknown"):
            speed = _read(folder / "speed")
            found[folder.name] = (
                max(0, int(speed or 0)) / 1000 if speed.lstrip("-").isdigit() else 0
            )
    return found


def adapters(root: Path = SYSFS) -> list[Adapter]:
    ports = sorted((root / "infiniband").glob("*/ports/*"))
    return [
        Adapter(
            port.parent.parent.name,
            port.name,
            "ACTIVE" in _read(port / "state"),
            _read(port / "link_layer") or "InfiniBand",
            _read(port / "rate"),
        )
        for port in ports
    ]


def check_network(
    on_gpus: bool, nodes: int = 1, root: Path = SYSFS, verbs: Path = VERBS
) -> list[Finding]:
    """What ranks of several nodes will use, and which variables to set. Variables that name nothing are problems."""
    up, ports = interfaces(root), adapters(root)
    active = [port for port in ports if port.is_active]
    given = {name: os.environ[name] for name in MEANINGS if os.environ.get(name)}
    devices = {port.name for port in ports}
    findings = []
    for name, known, what in (
        ("NCCL_SOCKET_IFNAME", {*up, "lo"}, "interface that is up"),
        ("GLOO_SOCKET_IFNAME", {*up, "lo"}, "interface that is up"),
        ("NCCL_IB_HCA", devices, "InfiniBand adapter"),
    ):
        if name in given and not _names_some(given[name], known):
            listed = ", ".join(sorted(known)) or "none"
            fix = f"unset {name}, or name one of: {listed}"
            findings.append(problem(name, f"{given[name]} names no {what} of this machine", fix))
    findings.append(_interfaces_finding(up, given, nodes, bool(active)))
    if ports:
        findings += _adapter_findings(ports, given, on_gpus, verbs)
    elif on_gpus and nodes > 1:
        text = "none: NCCL sends over sockets between nodes, which is several times slower"
        fix = "in a container: --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1; else nothing to set"
        findings.append(warning("InfiniBand", text, fix))
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
        if given.get(name, "0") != "0":
            fix = f"unset {name}, unless the all-reduce below hangs without it"
            findings.append(warning(name, f"{MEANINGS[name]}: slower", fix))
    said = {finding.name for finding in findings}
    findings += [
        ok(name, f"{value}: {MEANINGS[name]}") for name, value in given.items() if name not in said
    ]
    return findings


def _names_some(value: str, known: set[str]) -> bool:
    """Whether a variable of NCCL or gloo matches a name: a list of prefixes, `=` before exact names, `^` excludes."""
    if value.startswith("^"):
        return True
    is_exact = value.startswith("=")
    wanted = [one.partition(":")[0] for one in value.removeprefix("=").split(",")]
    return any(
        name == one or (not is_exact and name.startswith(one)) for one in wanted for name in known
    )


def _interfaces_finding(
    up: dict[str, float], given: dict[str, str], nodes: int, has_adapters: bool
) -> Finding:
    shown = [f"{name}{f' {speed:g} Gb/s' if speed else ''}" for name, speed in up.items()]
    text = ", ".join(shown) or "none is up"
    facts = {"interfaces": up}
    if not up and nodes > 1:
        return problem("interfaces", text, "connect the machine, or start on one node", **facts)
    fastest = max(up, key=lambda name: up[name], default="")
    first = min((name for name in up if not name.startswith(("docker", "veth", "br-"))), default="")
    is_slower = first and up[first] < up[fastest]
    if nodes > 1 and is_slower and not has_adapters and "NCCL_SOCKET_IFNAME" not in given:
        fix = f"NCCL_SOCKET_IFNAME={fastest} GLOO_SOCKET_IFNAME={fastest}, on all nodes"
        return warning("interfaces", f"{text}: NCCL may take {first}", fix, **facts)
    return ok("interfaces", text, **facts)


def _adapter_findings(
    ports: list[Adapter], given: dict[str, str], on_gpus: bool, verbs: Path
) -> Iterator[Finding]:
    active = [port for port in ports if port.is_active]
    facts = {"adapters": [dataclasses.asdict(port) for port in ports]}
    if not active:
        names = ", ".join(port.name for port in ports)
        fix = "ibstat shows why: the cable, or the subnet manager; without this network: NCCL_IB_DISABLE=1"
        yield warning(
            "InfiniBand", f"no port is active ({names}): NCCL sends over sockets", fix, **facts
        )
        return
    rates = {(port.link, port.rate) for port in active}
    shown = ", ".join(f"{link} {rate}" for link, rate in sorted(rates))
    text = f"{count(len(active), 'active port')}, {shown}"
    if given.get("NCCL_IB_DISABLE", "0") != "0":
        fix = "unset NCCL_IB_DISABLE, unless ranks of other nodes do not connect without it"
        yield warning(
            "InfiniBand", f"{text}, and NCCL_IB_DISABLE={given['NCCL_IB_DISABLE']}", fix, **facts
        )
        return
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if not verbs.is_dir():
        fix = "in a container: docker run --device=/dev/infiniband --cap-add=IPC_LOCK, or a device plugin on Kubernetes"
        yield warning(
            "InfiniBand", f"{text}, but {verbs} is missing: NCCL cannot use them", fix, **facts
        )
    elif locked != resource.RLIM_INFINITY and locked < GIB:
        fix = "ulimit -l unlimited; in a container: --ulimit memlock=-1"
        yield warning(
            "InfiniBand", f"{text}, but only {locked / 2**20:.0f} MiB may be locked", fix, **facts
        )
    else:
        if len(rates) > 1:
            text += "; name those of the fast network in NCCL_IB_HCA"
        if "Ethernet" in {port.link for port in active} and "NCCL_IB_GID_INDEX" not in given:
            text += "; RoCE: if ranks of other nodes do not connect, NCCL_IB_GID_INDEX=3"
        if on_gpus and not Path("/sys/module/nvidia_peermem").is_dir():
            text += "; nvidia_peermem is not loaded, so GPUDirect needs the open driver (dma-buf)"
        yield ok("InfiniBand", text, **facts)


def _check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft:,} files may be open at a time"
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        text += ": few for loader workers, which open one per tensor that they pass on"
        return warning("open files", text, f"ulimit -n {min(hard, 65536)}", limit=soft)
    return ok("open files", text, limit=soft)


def _check_hub_cache() -> Finding:
    """Where models and datasets from the Hub are kept. huggingface_hub, which may be missing, is not imported."""
    home = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", f"{home}/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    place = _existing(cache)
    fix = "set HF_HOME to a folder with more space, such as on a shared disk"
    if not os.access(place, os.W_OK):
        return warning("Hub cache", f"{cache} is not writable: models cannot be downloaded", fix)
    free = shutil.disk_usage(place).free / GIB
    text = f"{cache}, {free:,.0f} GiB free"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        text += "; HF_HUB_OFFLINE is set, so only what is there can be used"
    if free < 20:
        return warning("Hub cache", f"{text}: too little for a model of 8B parameters", fix)
    return ok("Hub cache", text, folder=str(cache), free_gib=round(free, 1))


def check_disk(folder: Path, checkpoints: tuple[int, int] | None) -> Finding:
    """Free space for checkpoints. `checkpoints`: bytes of one, and how many exist at a time; None: unknown."""
    place = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        fix = (
            "set output_dir to a folder that you can write to (mvp doctor --dir DIR checks another)"
        )
        return problem("disk", f"{place} is not writable: {error.strerror}", fix)
    free = shutil.disk_usage(place).free
    facts: dict[str, Any] = {"free_gib": round(free / GIB, 1)}
    text = f"{free / GIB:,.0f} GiB are free in {place}"
    if checkpoints is None:
        billions = free / CHECKPOINT_BYTES / 1e9
        text += f": one checkpoint of a full training of up to {billions:.2g}B parameters"
        return ok("disk", text, **facts)
    size, number = checkpoints
    text += f"; {number} checkpoints of {size / GIB:,.2f} GiB need {size * number / GIB:,.2f} GiB"
    facts |= {"checkpoint_bytes": size, "checkpoints": number}
    if free < size * number:
        fix = "set output_dir to a larger disk, or checkpoint.keep_n to fewer"
        return problem("disk", text, fix, **facts)
    return ok("disk", text, **facts)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.expanduser().absolute()
    return next(place for place in (folder, *folder.parents) if place.exists())


# ---- Checks in other processes ------------------------------------------------------------------------


def run_checks(checks: list[str], request: Request) -> Iterator[Finding | str]:
    """Run checks in a process that imports torch: yields the name of each (str), then its findings.

    A check that ends the process is a problem, and the rest run in another process.
    """
    while checks:
        name = ""
        reader, writer = os.pipe()
        words = [str(writer), json.dumps([checks, dataclasses.asdict(request)])]
        with tempfile.TemporaryFile("w+") as output, os.fdopen(reader) as lines:
            process = subprocess.Popen(
                [*CHECKS_PROCESS, *words],
                pass_fds=[writer],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            os.close(writer)
            deadline = time.monotonic() + CHECKS_SECONDS
            timer = threading.Timer(CHECKS_SECONDS, process.kill)
            timer.start()
            for line in map(json.loads, lines):
                if isinstance(line, str):
                    name = line
                    checks = checks[checks.index(name) + 1 :]
                yield line if isinstance(line, str) else Finding(**line)
            code = process.wait()
            timer.cancel()
            if code == 0:
                return
            output.seek(0)
            is_late = time.monotonic() > deadline
            yield _ended(name or "torch", None if is_late else code, output.read())
        if not name:
            return  # it ended before the first check: torch does not import


def _ended(name: str, code: int | None, output: str) -> Finding:
    if code is None:
        fix = "set CUDA_VISIBLE_DEVICES to leave out a GPU that does not answer, or restart its driver"
        return problem(name, f"the check did not finish within {CHECKS_SECONDS:g} s", fix)
    last = (output.strip().splitlines() or ["no message"])[-1][:300]
    end = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    fix = (
        "reinstall the package that the message names; torch and its CUDA packages belong together"
    )
    return problem(name, f"the check ended its process with {end}: {last}", fix)


def check_all_reduce(nodes: Nodes, on_gpus: bool) -> Finding:
    """One all-reduce over all ranks of these nodes."""
    fix = NCCL_FIX if on_gpus else GLOO_FIX
    ranks = f"{nodes.count * nodes.nproc} ranks"
    if nodes.count > 1:
        fix = f"{NODES_FIX}. {fix}"
    with tempfile.TemporaryDirectory(prefix="mvp-doctor-") as folder:
        out = Path(folder) / "facts.json"
        command = [sys.executable, "-m", MODULE, "all-reduce", str(out)]
        # With it, this process is one rank of several, as under srun.
        if "WORLD_SIZE" not in os.environ:
            command.append(json.dumps(dataclasses.asdict(nodes)))
        code, output = run_with_limit(command, ALL_REDUCE_SECONDS)
        if code is None:
            text = f"{ranks} did not finish within {ALL_REDUCE_SECONDS:.0f} s"
            return problem("all-reduce", text, fix)
        if code != 0:
            last = (output.strip().splitlines() or [f"exit code {code}"])[-1]
            return problem("all-reduce", f"{ranks}: {last[:300]}", fix)
        if not out.is_file():
            return ok("all-reduce", f"{ranks} agree; rank 0 prints the bandwidth")
        return describe_all_reduce(json.loads(out.read_text()))


def describe_all_reduce(facts: dict[str, Any]) -> Finding:
    """The finding of a completed all-reduce."""
    hosts = len(facts["hosts"])
    is_gloo = facts["backend"] == "gloo"
    text = count(facts["ranks"], "rank") + (f" on {hosts} hosts" if hosts > 1 else "")
    text += f", {facts['backend']}"
    if not facts["right"]:
        fix = GLOO_FIX if is_gloo else NCCL_FIX
        return problem("all-reduce", f"{text}: wrong values", fix, **facts)
    if facts["ranks"] == 1:
        return ok("all-reduce", f"{text} loads; with one GPU there is nothing to send", **facts)
    text += f", {facts['bytes_per_s'] / 1e9:.3g} GB/s"
    if not is_gloo and facts["bytes_per_s"] < SLOW and hosts == 1:
        fix = "nvidia-smi topo -m shows how the GPUs are connected; unset NCCL_P2P_DISABLE and NCCL_SHM_DISABLE"
        return warning("all-reduce", f"{text}: slow", fix, **facts)
    return ok("all-reduce", text, **facts)


def run_with_limit(command: list[str], seconds: float) -> tuple[int | None, str]:
    """Exit code and output of a command; a code of None after the time limit, when all its processes are killed."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return code, output.read()
