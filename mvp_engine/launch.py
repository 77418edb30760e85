"""The one entry: `--config FILE key=value ...` -> checked config -> `engine.<workflow>()`.

Runs as `python -m mvp_engine.launch`, under `torchrun -m mvp_engine.launch`, and inside `mvp train`. Exit codes: 0 for
done, 1 for a bug (with its traceback), 2 for a mistake of the user (with one message), 75 for interrupted and
saved.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import traceback

from mvp_engine.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_USER_ERROR, Interrupted, UserError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mvp_engine.launch", description="Run a recipe's config.")
    parser.add_argument("--config", required=True, metavar="FILE", help="the recipe's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override any key of the config")
    # parse_intermixed_args: options and overrides may come in any order
    args = parser.parse_intermixed_args(argv)
    return launch(args.config, args.overrides)


def launch(config_file: str, overrides: list[str]) -> int:
    try:
        _quiet_threads()
        from mvp_engine.config import compose

        composed = compose(config_file, overrides)
        workflow = _workflow(composed.engine_class, composed.config.workflow)
    except BaseException as error:  # noqa: BLE001 - shown, with its exit code
        return _failed(error, None)
    return _run(composed, workflow)


def _run(composed, workflow: str) -> int:  # type: ignore[no-untyped-def]
    from mvp_engine.distributed import World
    from mvp_engine.engine.resume import choose_start

    config = composed.config
    world: World | None = None
    try:
        _make_deterministic(config.deterministic)
        world = World.join(config.device, config.parallel.timeout)
        _check_layout(config, world.size)
        start = _agree(world, lambda: choose_start(config))
        if world.is_main:
            print(f"mvp_engine: {start.message}", flush=True)
        engine = composed.engine_class(config, world, start.run, start.checkpoint)
        getattr(engine, workflow)()
        world.close()
        return 0
    except Interrupted as stop:
        if world and world.is_main:
            print(f"mvp_engine: {stop}", file=sys.stderr, flush=True)
        if world:
            world.close()
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        print("mvp_engine: interrupted", file=sys.stderr)
        return 130
    except BaseException as error:  # noqa: BLE001 - shown, with its exit code
        return _failed(error, world)


def _agree(world, choose):  # type: ignore[no-untyped-def]
    """Rank 0 chooses, the others hear of it; its mistake is everybody's mistake."""
    answer = error = None
    if world.is_main:
        try:
            answer = choose()
        except UserError as problem:
            error = problem
    run_dir, checkpoint, message, failure = world.broadcast(
        (answer.run.dir, answer.checkpoint, answer.message, None) if answer else (None, None, None, str(error))
    )
    if failure is not None:
        raise error or UserError(failure)
    from mvp_engine.engine.resume import Start
    from mvp_engine.runs import Run

    return answer or Start(Run(run_dir), checkpoint, message)


def workflows(engine_class: type) -> list[str]:
    """The public methods that can be called with no arguments and are no hooks."""
    from mvp_engine.engine import Engine

    hooks = {n for n in vars(Engine) if not n.startswith("_")} - {"train", "evaluate"}
    names = []
    for name, method in inspect.getmembers(engine_class, inspect.isfunction):
        needed = [p for p in list(inspect.signature(method).parameters.values())[1:] if p.default is p.empty]
        if not name.startswith("_") and name not in hooks and not needed:
            names.append(name)
    return names


def _workflow(engine_class: type, name: str) -> str:
    known = workflows(engine_class)
    if name not in known:
        raise UserError(f"workflow={name}: {engine_class.__name__} has no such workflow; it has: {', '.join(known)}")
    return name


def _check_layout(config, size: int) -> None:  # type: ignore[no-untyped-def]
    if config.parallel.replicate not in (-1, size):
        raise UserError(
            f"parallel.replicate={config.parallel.replicate}, but {size} process(es) were started. "
            f"Start {config.parallel.replicate} (torchrun --nproc_per_node), or set parallel.replicate=-1."
        )


def _make_deterministic(wanted: bool) -> None:
    if not wanted:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    import torch

    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def _quiet_threads() -> None:
    """Share the cores between the ranks of this machine where nobody has chosen a number of threads."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if local > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // local)))


def _failed(error: BaseException, world) -> int:  # type: ignore[no-untyped-def]
    """The rank that failed first speaks, with its traceback if it is a bug; the others only failed with it."""
    rank = world.rank if world else int(os.environ.get("RANK", "0"))
    first = world.failed_first() if world else 0
    code = EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_BUG
    if first != rank:
        if code == EXIT_BUG and world:
            print(f"mvp_engine: rank {rank} stops because rank {first} failed", file=sys.stderr)
    elif code == EXIT_USER_ERROR:
        print(f"mvp_engine: error: {error}", file=sys.stderr)
    else:
        where = f"rank {rank} " if world and world.size > 1 else ""
        print(f"mvp_engine: {where}failed\n{traceback.format_exc()}", file=sys.stderr)
    sys.stderr.flush()
    sys.stdout.flush()
    if world and world.size > 1:
        os._exit(code)  # a clean exit would wait for collectives that can never complete
    return code


if __name__ == "__main__":
    sys.exit(main())
