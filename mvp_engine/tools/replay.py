"""`mvp check RUN`: run a skipped or failed step of a run again, and find the rows and the parameter that are to blame.

The steps since the nearest checkpoint before it are trained again, which is bit-exact on as many ranks as the run had.
Nothing of the run is changed: the replay has a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mvp_engine.config import Composed
from mvp_engine.data import rng_state, set_rng_state
from mvp_engine.distributed import World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.engine import Engine, StepContext
from mvp_engine.errors import EXIT_USER_ERROR, UserError
from mvp_engine.kit.row_checks import row_groups, row_name, select_rows
from mvp_engine.launch import launch, leave
from mvp_engine.model_engine.fsdp.step_status import first_nonfinite_grad, local_grad_norm_sq
from mvp_engine.process.signals import StopSignals
from mvp_engine.process.watchdog import ignore_broken_pipes
from mvp_engine.runs import DIVERGED_PREFIX, Run, checkpoint_step, open_run

# A replay has the run's numerics, and neither evaluations nor files nor limits.
OVERRIDES = ["workflow=train", "resume=null", "run_id=null", "eval.steps=null"]
OVERRIDES += [
    "log.backends=[]",
    "checkpoint.interval=null",
    "checkpoint.best_metric=null",
    "checkpoint.patience=null",
]
OVERRIDES += ["guard.max_skips=1000000000"]


def replay_step(run: Run, step: int | None) -> dict[str, Any]:
    """The record of the step to replay: by default the first one of the last streak of skipped steps."""
    records: dict[int, dict[str, Any]] = {}
    for file in sorted(run.dir.glob("skipped_steps*.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            records.setdefault(record["step"], record)
    if step is None:
        if not records:
            raise UserError(f"no step of {run.dir} was skipped; --step N replays any step")
        step = max(records)
        while step - 1 in records:
            step -= 1
    return records.get(step, {"step": step, "reason": "it was named", "ranks": 1})


def nearest_checkpoint(run: Run, step: int) -> Path | None:
    """The newest checkpoint before a step, also one that was renamed after a divergence."""
    found = run.checkpoint_list()
    diverged = run.checkpoints.glob(f"{DIVERGED_PREFIX}step_*")
    found += [path for path in diverged if (path / "meta.json").is_file()]
    steps = {_step_of(path): path for path in found if _step_of(path) < step}
    if steps:
        return steps[max(steps)]
    parent = run.info.get("parent")
    return Path(parent) if parent else None


def _step_of(checkpoint: Path) -> int:
    name = checkpoint.name.removeprefix(DIVERGED_PREFIX)
    return checkpoint_step(checkpoint.with_name(name)) or 0


def config_of(run: Run, step: int) -> Path:
    """The config that the run had at a step."""
    earlier = {}
    for file in run.dir.glob("config.until_step_*.yaml"):
        earlier[int(re.findall(r"\d+", file.name)[-1])] = file
    later = [last for last in earlier if last >= step]
    return earlier[min(later)] if later else run.dir / "config.yaml"


def replay(
    name: str, overrides: list[str], root: str, step: int | None, nproc: int | None, as_json: bool
) -> int:
    """The command. It returns 0 if it found the rows."""
    from mvp_engine.tools.launcher import run_module
    from mvp_engine.tools.nodes import Nodes

    run = open_run(name, Path(root))
    record = replay_step(run, step)
    with tempfile.TemporaryDirectory(prefix="mvp-replay-") as folder:
        arguments = [*rank_arguments(run, record["step"], Path(folder)), *overrides]
        code = run_module(
            "mvp_engine.tools.replay", Nodes(nproc or record.get("ranks", 1)), arguments
        )
        file = Path(folder) / "found.json"
        if not file.is_file():
            return code
        found = {"run": str(run.dir), "reason": record["reason"], **json.loads(file.read_text())}
    print(json.dumps(found, indent=2) if as_json else page(found))
    return 0 if found["rows"] else EXIT_USER_ERROR


def rank_arguments(run: Run, step: int, folder: Path) -> list[str]:
    """The arguments of `main`. Their names must not abbreviate options of torchrun."""
    words = ["--config", str(config_of(run, step)), "--replayed", str(run.dir)]
    return [*words, "--step", str(step), "--folder", str(folder)]


def main(argv: list[str] | None = None) -> int:
    """One rank of a replay."""
    ignore_broken_pipes()
    parser = argparse.ArgumentParser(prog="mvp_engine.tools.replay")
    parser.add_argument("--config", required=True)
    parser.add_argument("--replayed", required=True, type=Path)
    parser.add_argument("--step", required=True, type=int)
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args(argv)
    job = partial(_replay, Run(args.replayed), args.step, args.folder)
    silent = logging.NullHandler()  # the run's log has it all
    logging.getLogger("mvp_engine").addHandler(silent)
    try:
        return leave(launch(args.config, [*OVERRIDES, *args.overrides], job))
    finally:
        logging.getLogger("mvp_engine").removeHandler(silent)


def _replay(run: Run, step: int, folder: Path, composed: Composed, world: World) -> int:
    composed.engine_class.check_command(composed.config, "replay", run.dir, step)
    checkpoint = nearest_checkpoint(run, step)
    place: Path | None = None
    if world.is_main:
        place = Run.create(folder, composed.config.run_name, None).dir
    own = Run(world.broadcast(place))
    engine_class: Any = type("Replay", (ReplayEngine, composed.engine_class), {"target": step})
    with engine_class(composed.config, world, own, checkpoint, "a replay") as engine:
        engine.signals = StopSignals()  # read but never entered: Ctrl-C ends a replay at once
        engine.before_train()
        with engine.model_engine.train_mode():
            engine.do_train()
    if engine.found is None:
        raise UserError(f"the training ended at step {engine.step}, before step {step}")
    if world.is_main:
        start = checkpoint.name if checkpoint else None
        found = {"step": step, "checkpoint": start, **engine.found}
        (folder / "found.json").write_text(json.dumps(_without_nan(found)))
    return 0


class ReplayEngine(Engine):
    """A mixin that comes before a recipe's engine: it trains up to the step, and searches it instead of training it."""

    target: int
    found: dict[str, Any] | None = None

    def do_train(self) -> None:
        try:
            super().do_train()
        except _Found as result:
            self.found = result.args[0]

    def train_pre_step(self, ctx: StepContext) -> None:
        super().train_pre_step(ctx)
        if ctx.step == self.target:
            raise _Found(StepSearch(self, ctx).run())

    def save(self) -> None:
        """A replay writes no checkpoint."""


class _Found(Exception):
    """Ends a replay with its result."""


def _without_nan(value: Any) -> Any:
    """JSON has no non-finite numbers: they become text."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def page(result: dict[str, Any]) -> str:
    """The result as text."""
    start = result["checkpoint"] or "the start"
    lines = [
        f"step {result['step']} of {result['run']}, replayed from {start}; recorded: {result['reason']}"
    ]
    for entry in result["rows"]:
        rows = entry["rows"]
        names = ", ".join(map(str, rows[:5])) + (f" and {len(rows) - 5} more" if rows[5:] else "")
        together = "rows, only together: " if len(rows) > 1 else "row "
        place = f"rank {entry['rank']}, micro-batch {entry['micro_batch']}"
        lines.append(f"  {place}, {together}{names}")
        if entry["error"]:
            lines.append(f"    error: {entry['error']}")
            continue
        is_finite = math.isfinite(float(entry["loss"]))
        nowhere = "only gradients are" if is_finite else "the loss is computed after them"
        module = entry["module"] or f"none, {nowhere}"
        lines += [
            f"    loss {entry['loss']}, weight {entry['weight']}",
            f"    first module with a non-finite output: {module}",
            f"    first parameter with a non-finite gradient: {entry['parameter'] or 'none'}",
        ]
    if result["weights_blamed"]:
        largest = result["largest_weight"]
        lines.append(
            "  all or many of the rows are non-finite, so the weights are to blame and not the data: the largest is "
            f"{largest['value']} in {largest['parameter']}, the learning rate {result['lr']:g}. Lower optim.lr."
        )
    if not result["rows"]:
        lines.append("  no micro-batch is non-finite here. Their losses (sum):")
        for entry in result["micro_batches"]:
            place = f"rank {entry['rank']}, micro-batch {entry['micro_batch']}"
            lines.append(f"    {place}: {entry['loss']}")
    return "\n".join(lines)


# The search for the rows of a step with a non-finite loss or gradient: each micro-batch alone, then halves of it.

NUM_TRIED = 5  # rows of a micro-batch; if all of them are non-finite, the weights are to blame,
BLAMED_SHARE = 0.25  # or if this share of the rows of a step is, and
BLAMED_ROWS = 3  # at least so many
MAX_ROWS = 20  # rows that are searched for


@dataclass(frozen=True)
class Outcome:
    """Forward and backward on some rows."""

    loss: float | None
    weight: float | None
    parameter: str | None  # the first, in backward order, with a non-finite gradient
    module: str | None  # the first with a non-finite output
    error: str | None

    @property
    def is_bad(self) -> bool:
        numbers = (self.loss, self.weight)
        is_finite = all(number is None or math.isfinite(number) for number in numbers)
        return not is_finite or self.parameter is not None or self.error is not None


class StepSearch:
    """Finds the rows of one step. All ranks search together; in each trial one data-parallel rank has rows."""

    def __init__(self, engine: Engine, ctx: StepContext) -> None:
        self.engine = engine
        self.ctx = ctx
        self.world = engine.world
        self.rng = rng_state()
        self.rows: list[dict[str, Any]] = []
        self.num_rows = 0
        self.num_found = 0  # rows that are non-finite alone
        self.weights_blamed = False

    def run(self) -> dict[str, Any]:
        counts = self.world.all_gather(len(self.ctx.micro_batches))
        layout = self.engine.layout
        owners = dict(zip(self.world.all_gather(layout.data_rank), counts, strict=True))
        losses = []
        for owner, count in sorted(owners.items()):
            for index in range(count):
                micro_batch = self.ctx.micro_batches[index] if layout.data_rank == owner else None
                groups = row_groups(micro_batch) if micro_batch is not None else []
                groups = self._gather(owner, groups)[0]
                self.num_rows += len(groups)
                outcome = self.trial(owner, micro_batch)
                losses.append({"rank": owner, "micro_batch": index + 1, "loss": outcome.loss})
                if outcome.is_bad and self.num_found < MAX_ROWS and not self.weights_blamed:
                    self._search(owner, index, micro_batch, groups, outcome)
        most = self.num_found >= max(BLAMED_ROWS, BLAMED_SHARE * self.num_rows)
        has_error = any(entry["error"] for entry in self.rows)
        return {
            "micro_batches": losses,
            "rows": self.rows,
            "weights_blamed": (self.weights_blamed or most) and not has_error,
            "largest_weight": self._largest_weight(),
            "lr": self.engine.model_engine.optimizer.param_groups[0]["lr"],
        }

    def _search(
        self, owner: int, index: int, micro_batch: Any, groups: list[list[int]], whole: Outcome
    ) -> None:
        chosen = groups[:: max(1, len(groups) // NUM_TRIED)][:NUM_TRIED]
        tried = [self.trial(owner, self._select(micro_batch, [group])) for group in chosen]
        if len(chosen) >= NUM_TRIED and all(outcome.is_bad for outcome in tried):
            self.weights_blamed = True
            bad_sets = [([chosen[0]], tried[0])]
        else:
            bad_sets = self._bisect(owner, micro_batch, groups) if groups else []
        for rows, outcome in bad_sets or [(groups, whole)]:
            entry = {"step": self.ctx.step, "rank": owner, "micro_batch": index + 1}
            entry["rows"] = self._names(owner, index, micro_batch, rows)
            self.rows.append({**entry, **vars(outcome)})

    def _bisect(
        self, owner: int, micro_batch: Any, groups: list[list[int]]
    ) -> list[tuple[list[list[int]], Outcome]]:
        """The smallest sets of rows that are non-finite; usually single rows."""
        if self.num_found >= MAX_ROWS:
            return []
        outcome = self.trial(owner, self._select(micro_batch, groups))
        if not outcome.is_bad:
            return []
        if len(groups) == 1:
            self.num_found += 1
            return [(groups, outcome)]
        middle = len(groups) // 2
        halves = (groups[:middle], groups[middle:])
        bad_sets = [bad for half in halves for bad in self._bisect(owner, micro_batch, half)]
        return bad_sets or [(groups, outcome)]  # only together

    def trial(self, owner: int, micro_batch: Any) -> Outcome:
        """Forward and backward of one micro-batch on rank `owner`; the others compute nothing of their own."""
        model_engine: Any = self.engine.model_engine
        set_rng_state(self.rng)
        model_engine.optimizer_zero_grad()
        mine = [micro_batch] if micro_batch is not None else []
        forward = partial(self.engine._forward_step, self.ctx)
        error: str | None = None
        totals: list[float] = []
        with watch_outputs(model_engine.model) as nonfinite:
            try:
                totals = model_engine.forward_backward_batch(mine, forward).tolist()
            except UserError:
                raise
            except Exception as failure:
                if "CUDA error" in str(failure):
                    raise UserError(
                        f"the GPU cannot compute after this: {str(failure).splitlines()[0]}. Replay on the CPU: add "
                        "device=cpu"
                    ) from failure
                if self.world.size > 1:  # the other ranks wait in a collective
                    failure.add_note("mvp check RUN --nproc 1 finds the row of such an error")
                    raise
                error = f"{type(failure).__name__}: {failure}"
        params = [param for param in model_engine.params if param.grad is not None]
        _, norms = local_grad_norm_sq(params, self.world.size)
        parameter = first_nonfinite_grad(model_engine.model, norms)
        loss, weight = totals or (None, None)
        module = nonfinite[0] if nonfinite else None
        outcomes = self.world.all_gather(Outcome(loss, weight, parameter, module, error))
        parameters = [outcome.parameter for outcome in outcomes if outcome.parameter]
        owned = outcomes[self.world.all_gather(micro_batch is not None).index(True)]
        return replace(owned, parameter=None if error or not parameters else parameters[0])

    def _select(self, micro_batch: Any, groups: list[list[int]]) -> Any:
        if micro_batch is None:
            return None
        return select_rows(micro_batch, [row for group in groups for row in group])

    def _gather(self, owner: int, value: Any) -> list[Any]:
        """The values of the ranks that hold the owner's rows."""
        pairs = self.world.all_gather((self.engine.layout.data_rank, value))
        return [value for rank, value in pairs if rank == owner]

    def _names(self, owner: int, index: int, micro_batch: Any, groups: list[list[int]]) -> Any:
        names = []
        if micro_batch is not None:
            feed = self.engine.feed
            number = feed.used - len(self.ctx.micro_batches) + index
            names = [row_name(feed.loader, number, rows[0], micro_batch) for rows in groups]
        return self._gather(owner, names)[0]

    def _largest_weight(self) -> dict[str, Any]:
        """The parameter with the largest value; a non-finite one is the largest."""
        best: dict[str, Any] = {"parameter": None, "value": -1.0}
        for name, param in self.engine.model.named_parameters():
            value = float(full_tensor(param.detach()).abs().max()) if param.numel() else 0.0
            if not math.isfinite(value):
                return {"parameter": name, "value": value}
            if value > best["value"]:
                best = {"parameter": name, "value": value}
        return best


@contextmanager
def watch_outputs(model: nn.Module) -> Iterator[list[str]]:
    """A context that lists the modules without children that have a non-finite output, in the order of the forward."""
    names: list[str] = []

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for value in output if isinstance(output, tuple | list) else [output]:
            is_float = isinstance(value, Tensor) and value.is_floating_point()
            if is_float and not bool(torch.isfinite(value).all()):
                names.append(name)

    handles = []
    for name, module in model.named_modules():
        if not any(module.children()):
            handles.append(module.register_forward_hook(partial(look, name)))
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()


if __name__ == "__main__":
    sys.exit(main())
