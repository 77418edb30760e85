"""The entry point of a run: `--config FILE key=value ...` -> checked config -> `engine.<workflow>()`.

Runs as `python -m mvp_engine.launch`, under `torchrun -m mvp_engine.launch`, and inside `mvp train`. Exit codes: 0 for
done, 1 for a bug (with its traceback), 2 for a user error (with one message), 75 for interrupted and saved.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from mvp_engine.config import Composed, Config, compose
from mvp_engine.config.engine_class import check_workflow
from mvp_engine.data.loader import make_deterministic
from mvp_engine.distributed import World
from mvp_engine.engine import Engine
from mvp_engine.engine.state import Start, agree_on_start
from mvp_engine.errors import (
    ERROR_FILE,
    EXIT_BUG,
    EXIT_CODE_FILE,
    EXIT_INTERRUPTED,
    EXIT_TRY_AGAIN,
    EXIT_USER_ERROR,
    TRY_AGAIN_FILE,
    Interrupted,
    TryAgain,
    UserError,
)
from mvp_engine.log import EarlyMessages
from mvp_engine.process.watchdog import ignore_broken_pipes
from mvp_engine.report.page import end_of_run
from mvp_engine.runs import launcher_id


def main(argv: list[str] | None = None, composed: Composed | None = None) -> int:
    """`composed`: the config that the words in `argv` describe, where this process has composed it."""
    ignore_broken_pipes()
    if not faulthandler.is_enabled():
        faulthandler.enable()  # a crash in native code prints the Python stack
    parser = argparse.ArgumentParser(prog="mvp_engine.launch", description="Run a recipe's config.")
    parser.add_argument("--config", required=True, metavar="FILE", help="the recipe's YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="override any key of the config"
    )
    args = parser.parse_intermixed_args(argv)
    return leave(launch(args.config, args.overrides, composed=composed))


def leave(code: int) -> int:
    """One rank of each node writes its exit code for `mvp train --nproc`: torchrun does not pass it on."""
    file = os.environ.get(EXIT_CODE_FILE)
    if file and os.environ.get("LOCAL_RANK") == "0":
        Path(file).write_text(str(code))
    return code


def launch(
    config_file: str,
    overrides: list[str],
    job: Callable[[Composed, World], int] | None = None,
    failed: Callable[[BaseException], None] | None = None,
    composed: Composed | None = None,
) -> int:
    """Run a config; returns the exit code.

    `job` replaces the config's workflow. `failed` is called with an error before it is shown.
    """
    world: World | None = None
    try:
        composed = composed or compose(config_file, overrides)
        if job is None:
            check_workflow(composed.engine_class, composed.config.workflow)
        world = join(composed.config)
        code = (job or _run)(composed, world)
        world.close()
        return code
    except KeyboardInterrupt as stop:
        if world is None or (world.is_main and not world.has_failed()):
            over_echo = "\r" if sys.stderr.isatty() else ""  # of `^C`
            print(f"{over_echo}mvp_engine: {stop or 'interrupted'}", file=sys.stderr, flush=True)
        code = EXIT_INTERRUPTED if stop.args else 130
        if world and world.size > 1:
            os._exit(leave(code))  # a clean exit would wait for ranks that got no signal
        return code
    except BaseException as error:  # noqa: BLE001 - shown, with its exit code
        if failed is not None:
            failed(error)
        return _failed(error, world)


def join(config: Config) -> World:
    """The world of a run, with the settings of the process that its config asks for."""
    if config.deterministic:
        make_deterministic()
    if config.cpu_threads is not None:
        torch.set_num_threads(config.cpu_threads)
    return World.join(config.device, config.parallel.timeout)


def _run(composed: Composed, world: World) -> int:
    try:
        run_workflow(composed, world)
    except Interrupted as stop:
        if world.is_main:
            print(f"mvp_engine: {stop}", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    return 0


def run_workflow(
    composed: Composed, world: World, work: Callable[[Engine], None] | None = None
) -> Engine:
    """Run the workflow of a config; returns its engine, closed. With `work`, run that and leave the engine open."""
    start = agree_on_start(composed.config, world)
    while True:
        try:
            return _attempt(composed, world, start, work)
        except TryAgain as again:
            text = str(again)
        # Here the error, and with it the frames that hold the engine's tensors, is gone.
        if world.size > 1:
            _end_ranks(world, text)
        print(f"mvp_engine: {text}", file=sys.stderr, flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        start.run.rewind_metrics(0)


def _end_ranks(world: World, text: str) -> None:
    """Of several ranks, the others may wait in a collective: all end, and `mvp train --nproc` starts them again."""
    file = os.environ.get(EXIT_CODE_FILE)
    launcher = launcher_id()
    if file and launcher and os.environ.get("GROUP_WORLD_SIZE") == "1":
        Path(file).with_name(TRY_AGAIN_FILE).write_text(launcher)
    else:  # several nodes, or torchrun without `mvp train`
        text += " Launch it again with resume=auto"
    _show(f"mvp_engine: {text}")
    sys.stderr.flush()
    world.said_why(EXIT_TRY_AGAIN)
    os._exit(leave(EXIT_TRY_AGAIN))


def _attempt(
    composed: Composed, world: World, start: Start, work: Callable[[Engine], None] | None
) -> Engine:
    config = composed.config
    engine: Engine | None = None
    status: str | None = "failed"  # None: `run.json` stays as it is
    reason: str | None = None
    trained = True  # steps, before an error
    first = 0  # the rank that notes how the run ended: the one that failed first
    started = time.time()
    try:
        with EarlyMessages(config.log.backends, world.rank):
            engine = composed.engine_class(
                config, world, start.run, start.checkpoint, start.message
            )
            engine.can_start_again = True
            with contextlib.ExitStack() as closing:
                closing.enter_context(engine)
                if work is None:
                    getattr(engine, config.workflow)()
                else:
                    work(engine)
                    closing.pop_all()
        status = "finished"
        return engine
    except TryAgain:
        status = None
        raise
    except Interrupted:
        status = "interrupted"
        raise
    except KeyboardInterrupt:  # torchrun sends SIGTERM to the other ranks when one has failed
        status = None if world.has_failed() else "interrupted"
        raise
    except Exception as error:
        first, reason = world.failed_first(error)
        is_own = first == world.rank and not isinstance(error, UserError)
        if is_own and world.watch and world.watch.has_dead_rank():
            status = "killed"  # the collective broke because another rank was: resume=auto continues the run
        trained = engine is not None and engine.step > start.step
        if start.before and isinstance(error, UserError) and not trained:
            status = None  # the launch failed, not the run
            if world.rank in (0, first):
                with contextlib.suppress(OSError):
                    start.run.note(**start.before)
        raise
    finally:
        if start.owned and status is not None and world.rank == first:
            with contextlib.suppress(OSError):  # a full disk must not hide how the run ended
                step = engine.step if engine else 0
                start.run.note(status=status, error=reason, step=step, ended=time.time())
                if status == "failed" and start.is_new and not trained:
                    start.run.remove_failed_start()
            if config.workflow == "train" and engine and engine.step and status != "failed":
                end_of_run(
                    start.run,
                    time.time() - started,
                    page="plot" in config.log.backends,
                    summary="terminal" in config.log.backends and status == "finished",
                )
                if manager := getattr(engine, "checkpoints", None):
                    manager.copy_files()


def _show(text: str, mode: str = "a") -> None:
    """Print why this rank failed, or leave it to `mvp train --nproc`, which prints it after the last rank has ended.

    `mode` of its file: with "x" the first rank alone writes to it.
    """
    file = os.environ.get(EXIT_CODE_FILE)
    if file is not None:
        with contextlib.suppress(OSError), open(Path(file).with_name(ERROR_FILE), mode) as out:
            out.write(f"{text}\n")
            return
    print(text, file=sys.stderr)


def _failed(error: BaseException, world: World | None) -> int:
    """Print the error of the rank that failed first, with its traceback if it is a bug; the others only followed.

    They exit after it, with its exit code. Ranks on other machines say that they follow.
    """
    if world and world.watch:
        world.watch.end()  # no collective follows
    if isinstance(error, torch.OutOfMemoryError):
        error = UserError(f"{error} `mvp plan CONFIG` prints settings that fit")
    rank = world.rank if world else int(os.environ.get("RANK", "0"))
    code = EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_BUG
    why = ""
    if world:
        first, why = world.failed_first(error)
    else:  # all ranks found the error in the config: one of each machine prints it
        speaks = EXIT_CODE_FILE in os.environ or os.environ.get("LOCAL_RANK", "0") == "0"
        first = rank if code == EXIT_BUG or speaks else -1
    mode = "a" if world else "x"
    sys.stdout.flush()  # the error comes last
    elsewhere = world is not None and first // world.local_size != rank // world.local_size
    is_speaker = first == rank or (elsewhere and os.environ.get("LOCAL_RANK") == "0")
    if is_speaker and code == EXIT_USER_ERROR:
        _show(f"mvp_engine: error: {error}", mode)
    elif is_speaker and elsewhere:
        _show(f"mvp_engine: rank {rank} stops because rank {first} failed: {why}")
    elif is_speaker:
        where = f"rank {rank} " if world and world.size > 1 else ""
        _show(f"mvp_engine: {where}failed\n{traceback.format_exc().rstrip()}", mode)
    sys.stderr.flush()
    if world and world.size > 1:
        if first == rank:
            world.said_why(code)
        else:
            code = world.wait_for_first(code)
        os._exit(leave(code))  # a clean exit would wait for collectives that can never complete
    return code


if __name__ == "__main__":
    sys.exit(main())
