"""Shared fixtures and helpers: the tiny recipe, ways to launch it (in this process, in subprocesses, on warm ranks),
and the meaning of the markers `gpu` and `campaign`."""

import functools
import gc
import importlib.util
import json
import logging
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import probe_once
import pytest
from forked import ForkedModule, save_time
from ranks import RankPool, RankProcesses, reserve_port

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests" / "recipes" / "tiny" / "train.yaml"
MAGIC = ROOT / "recipes" / "magic_transformer" / "configs" / "train.yaml"
CAMPAIGN = pytest.mark.campaign(only=True)

# The files that take longest, by measured CPU seconds. Workers take files from the front: with the long ones
# first, the many short files at the end let all workers finish together.
LONGEST_FILES = [
    "model_engine/test_packed_layouts.py",
    "hf/test_hf_folders.py",
    "engine/test_exactness.py",
    "model_engine/test_plan_ranks.py",
    "engine/test_signals_and_death.py",
    "engine/test_layouts.py",
    "kit/test_plan_advice.py",
    "kit/test_mllm.py",
    "test_docs.py",
    "kit/speech/test_omni_ranks.py",
    "kit/actions/test_action_engine.py",
    "kit/test_auto.py",
    "recipes/test_qwen_audio.py",
    "model_engine/test_expert_parallel.py",
    "test_plan_command.py",
    "test_hub_commands.py",
    "model_engine/test_mixed_ranks.py",
    "recipes/test_qwen3.py",
    "test_recipe_new.py",
    "recipes/test_vit_classification.py",
    "recipes/test_qwen3_vl.py",
    "model_engine/test_pipeline.py",
    "kit/test_plan_step.py",
    "recipes/test_preference.py",
    "skills/test_recipe_skill.py",
    "kit/test_optim_recipe.py",
    "test_wheel.py",
    "test_check.py",
    "model_engine/test_expert_balance.py",
    "kit/test_watch.py",
    "kit/test_sampling.py",
    "hf/test_sparse_attention.py",
    "ops/test_triton_kernels.py",
    "model_engine/test_fp8_all_gather.py",
    "model_engine/test_mixer_layouts.py",
    "model_engine/test_context_layouts.py",
    "recipes/test_reverse_rl.py",
    "recipes/test_any_ranks.py",
    "kit/test_vlm_sweep.py",
    "kit/test_streams.py",
    "engine/test_resume_corners.py",
    "model_engine/test_even_shards.py",
    "test_your_data.py",
]

os.environ["OMP_NUM_THREADS"] = "1"
save_time()
gc.disable()  # until all test files are imported, of which everything stays


def pytest_addoption(parser):
    parser.addoption(
        "--campaign", action="store_true", help="run the tests marked `campaign` at full length"
    )


def pytest_collection_modifyitems(config, items):
    """Put the longest files first. Skip tests that need a GPU, or a package for it, where it is missing, and those
    marked `campaign(only=True)` outside of a campaign."""
    order = {ROOT / "tests" / file: place for place, file in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    for item in items:
        marker = item.get_closest_marker("gpu")
        missing = _missing_for_gpu(**marker.kwargs) if marker else None
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"needs {missing}"))
        campaign_only = any(marker.kwargs.get("only") for marker in item.iter_markers("campaign"))
        if campaign_only and not config.getoption("--campaign"):
            item.add_marker(pytest.mark.skip(reason="only in a campaign: make test-campaign"))


def pytest_collection_finish():
    gc.freeze()
    gc.enable()
    # Frozen objects do not count, so that full collections would be many.
    gc.set_threshold(2000, 10, 20)


def pytest_runtest_setup():
    probe_once.install()
    # A generation of an earlier test that still runs in a thread has set torch's stance, which is one of the process.
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is not None and frames._stance.stance != "default":
        sys.modules["torch"].compiler.set_stance("default")


def pytest_runtest_teardown(item):
    """Under a real-time scheduler, which root may set, this process and its children would starve all others."""
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        warnings.warn(f"{item.nodeid} set a real-time scheduler: an encoder of AV1?", stacklevel=1)


def _missing_for_gpu(required=True, package=None):
    """What a test marked `gpu` lacks here. With `required=False` it runs on the CPU where torch sees no GPU."""
    import torch

    if required and not torch.cuda.is_available():
        return "a GPU"
    if package and not importlib.util.find_spec(package):
        return f"the package {package}"
    return None


@pytest.fixture
def campaign_size(request):
    """campaign_size(short, full): how many random trials to run, in the default suite or with --campaign."""
    is_full = request.config.getoption("--campaign")
    return lambda short, full: full if is_full else short


def user_error(text):
    """A context in which a `UserError` must be raised whose message matches `text`."""
    from mvp_engine.errors import UserError

    return pytest.raises(UserError, match=text)


def mvp(words, *more):
    """The exit code of `mvp` with these words, which are split as by a shell, and `more` as they are."""
    from mvp_engine.cli import main

    return main([*shlex.split(words), *map(str, more)])


def read_metrics(folder, split="train"):
    """The metric records of the newest run in `folder`, without their timings (`perf`)."""
    from mvp_engine.runs import list_runs

    records = [
        json.loads(line)
        for line in (list_runs(folder)[-1].dir / "metrics.jsonl").read_text().splitlines()
    ]
    return [{k: v for k, v in r.items() if k != "perf"} for r in records if r["split"] == split]


def readme_commands(recipe):
    """The words of each `mvp` command in a recipe's README, without trailing comments."""
    text = (ROOT / "recipes" / recipe / "README.md").read_text().replace("\\\n", "")
    lines = [
        line
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("mvp ")]


def recipe_step(recipe, ctx=None, **parts):
    """The `forward_step` of a shipped recipe, for an engine with these parts alone."""
    from mvp_engine.config.engine_class import find_engine
    from mvp_engine.tools.skill_check import NoLog

    engine_class, _ = find_engine(recipe, ROOT)
    return functools.partial(engine_class.forward_step, SimpleNamespace(**parts), ctx or NoLog())


def losses(folder):
    return [record["loss"] for record in read_metrics(folder)]


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """`tmp_path` as the current folder, with a cache folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def vlm_folder(workspace, tmp_path_factory):
    """The workspace, with a tiny Qwen3-VL in `model`."""
    from tiny_vlm import saved_model

    shutil.copytree(saved_model(tmp_path_factory.getbasetemp()), workspace / "model")
    return workspace


@pytest.fixture
def lazy_streams(monkeypatch):
    """Every side stream is lazy; the list of those that were made."""
    from lazy_streams import use_lazy_streams

    return use_lazy_streams(monkeypatch)


@pytest.fixture
def tiny_hooks(monkeypatch):
    """tiny_hooks(NAME=f, ...): hooks of the tiny recipe's engine from now on; returns those before, by name."""
    from mvp_engine.config import compose

    def replace(**hooks):
        engine = compose(TINY).engine_class
        before = SimpleNamespace(**{name: getattr(engine, name) for name in hooks})
        for name, hook in hooks.items():
            monkeypatch.setattr(engine, name, hook)
        return before

    return replace


@pytest.fixture
def own_registry(monkeypatch):
    """What a test registers is forgotten afterwards."""
    from mvp_engine.model_engine import base

    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))


@pytest.fixture
def train(tmp_path):
    """Launch the tiny recipe in this process: train("train.max_steps=3 seed=1", *more, dir=...) -> exit code."""
    from mvp_engine.launch import launch

    def run(words="", *more, config=TINY, dir=tmp_path):
        first = re.split(r" (?=\S+=)", words) if words else []  # values may have blanks
        return launch(str(config), [f"output_dir={dir}", *first, *more])

    return run


def spawn(
    *args,
    env=None,
    cwd=ROOT,
    fresh=False,
    fresh_workers=False,
    **options,
):
    """Start a Python process in its own session and capture its output.

    `-m module` or a file is forked from the fork server, which saves the imports; with `fresh` it starts from nothing.
    So are the workers of torchrun; with `fresh_workers` they are its children, and start from nothing.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
    if not fresh and (args[0] == "-m" or args[0].endswith(".py")):
        module = args[args[0] == "-m" :]
        return ForkedModule(module[0], list(module[1:]), environment, str(cwd), fresh_workers)
    return subprocess.Popen(
        [sys.executable, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
        cwd=cwd,
        **options,
    )


def run_process(*args, **options):
    """Run a Python process to its end and return its exit code and output. `options`: see `spawn`."""
    process = spawn(*args, **options)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def wait_until(happened, seconds=60.0):
    """Wait for what takes a moment, and on a busy machine seconds."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)


def is_gone(pid):
    """Whether a process has ended, also as a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    # The latter: it ended between `open` and `read`.
    except (
        FileNotFoundError,
        ProcessLookupError,
    ):
        return True


@pytest.fixture
def port():
    """Held: a server of the test may listen on it, and no other process is given it meanwhile."""
    with reserve_port() as held:
        yield held.getsockname()[1]


@pytest.fixture(scope="session")
def rank_processes():
    processes = RankProcesses()
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def ranks2(rank_processes):
    return RankPool(2, rank_processes)


@pytest.fixture(scope="session")
def ranks4(rank_processes):
    return RankPool(4, rank_processes)


@pytest.fixture
def on_ranks(rank_processes):
    """on_ranks(sizes, f, *args): what `f(layout, *args)` returns on each rank of a layout of these sizes."""
    from families import on_layout

    def run(sizes, f, *args, **options):
        ranks = math.prod(size for name, size in sizes.items() if name not in ("expert", "reshard"))
        return RankPool(ranks, rank_processes).run(on_layout, sizes, f, *args, **options)

    return run


@pytest.fixture
def logged():
    """logged(*levels): the messages that the package logs from now on, at these levels; by default warnings."""
    logger = logging.getLogger("mvp_engine")
    level, filters = logger.level, []

    def watch(*levels):
        texts = []

        def note(record):
            if record.levelname.lower() in (levels or ("warning",)):
                texts.append(record.getMessage())
            return True

        filters.append(note)
        logger.addFilter(note)
        logger.setLevel(logging.INFO)
        return texts

    yield watch
    for note in filters:
        logger.removeFilter(note)
    logger.setLevel(level)
