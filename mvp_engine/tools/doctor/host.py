"""The machine without its GPUs: cores, memory, shared memory, open files, disks."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from pathlib import Path

from mvp_engine.tools.doctor.finding import Finding, ok, problem, warning

GIB = 2**30
SHARED_MEMORY = Path("/dev/shm")
# A loader worker keeps three batches in shared memory, 130 MB each with large images.
SHARED_MEMORY_GIB = 2.0
OPEN_FILES = 4096
# Float32 weights and the two states of AdamW, per parameter.
CHECKPOINT_BYTES = 12


def check_host() -> list[Finding]:
    return [_check_cores(), _check_shared_memory(SHARED_MEMORY), _check_open_files()]


def _check_cores() -> Finding:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = min(memory, _container_memory())
    text = f"{cores} CPU cores, {memory / GIB:.0f} GiB of memory"
    if cores < (os.cpu_count() or 1):
        text += f" (the machine has {os.cpu_count()} cores)"
    return ok("host", text, cores=cores, memory_gib=round(memory / GIB, 1))


def _container_memory() -> int:
    """The memory limit of this process's control group, as in a container."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return 2**62
    return int(text) if text.isdigit() else 2**62


def _check_shared_memory(folder: Path) -> Finding:
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


def _check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft:,} files may be open at a time"
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        text += ": few for loader workers, which open one per tensor that they pass on"
        return warning("open files", text, f"ulimit -n {min(hard, 65536)}", limit=soft)
    return ok("open files", text, limit=soft)


def check_disk(folder: Path, checkpoints: tuple[int, int] | None) -> Finding:
    """Free space for checkpoints. `checkpoints`: bytes of one, and how many exist at a time; None: unknown."""
    place = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        fix = "set project.dir to a folder that you can write to (mvp doctor --dir DIR checks another)"
        return problem("disk", f"{place} is not writable: {error.strerror}", fix)
    free = shutil.disk_usage(place).free
    text = f"{free / GIB:,.0f} GiB are free in {place}"
    if checkpoints is None:
        billions = free / CHECKPOINT_BYTES / 1e9
        text += f": one checkpoint of a full training of up to {billions:.2g}B parameters"
        return ok("disk", text, free_gib=round(free / GIB, 1))
    size, count = checkpoints
    needed = size * count
    text += f"; {count} checkpoints of {size / GIB:,.2f} GiB need {needed / GIB:,.2f} GiB"
    facts = {"free_gib": round(free / GIB, 1), "checkpoint_bytes": size, "checkpoints": count}
    if free < needed:
        fix = "set project.dir to a larger disk, or checkpoint.keep_n to fewer"
        return problem("disk", text, fix, **facts)
    return ok("disk", text, **facts)


def check_hub_cache() -> Finding:
    """Where models and datasets from the Hub are kept."""
    home = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    base = Path(os.environ.get("HF_HOME", f"{home}/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", base / "hub")).expanduser()
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


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    return folder
