"""What a training of the fault campaign left: last step, metrics, and how it differs from an undisturbed one."""

import contextlib
import json

import torch

from mvp_engine.checkpoint.format import Reader, verify
from mvp_engine.runs import list_runs


def size_of(runs, name):
    return sum(file.stat().st_size for file in runs.glob(f"*/{name}"))


def last_step(runs):
    """The step of the last line of `metrics.jsonl`."""
    for file in runs.glob("*/metrics.jsonl"):
        with open(file, "rb") as lines:
            lines.seek(max(0, file.stat().st_size - 2000))
            with contextlib.suppress(json.JSONDecodeError, IndexError):
                return int(json.loads(lines.read().splitlines()[-1])["step"])
    return -1


def records(run, cut_short=False):
    """All metrics of a run but its timings, by step and split; `cut_short`: the last line may not be complete."""
    found = {}
    file = run.dir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.is_file() or not cut_short else []
    if cut_short and lines and not lines[-1].endswith("\n"):
        lines.pop()
    for line in lines:
        record = {key: value for key, value in json.loads(line).items() if key != "perf"}
        place = (record["step"], record["split"])
        assert place not in found, f"step {place} is logged twice"
        found[place] = record
    return found


def difference(expected, found, all_records):
    """How two trainings differ: in the metrics of a step, in a bit of the last checkpoint, in its position.

    Of several runs the newest counts: a launch that fails before the first checkpoint is not resumed.
    """
    if not list_runs(found):
        return "there is no run"
    try:
        want = records(list_runs(expected)[-1])
        have = records(list_runs(found)[-1])
    except (AssertionError, ValueError) as error:
        return f"metrics: {error}"
    if all_records and want.keys() != have.keys():
        return f"steps without a record, or too many: {sorted(want.keys() ^ have.keys())[:5]}"
    for place, record in have.items():
        if want.get(place) != record:
            return f"{place}: {record} instead of {want.get(place)}"
    last = [list_runs(runs)[-1].checkpoint_list()[-1] for runs in (expected, found)]
    for folder in list_runs(found)[-1].checkpoint_list():
        for model in models(folder):
            verify(folder / model)
    if last[0].name != last[1].name or not models(last[0]) or models(last[0]) != models(last[1]):
        return f"last checkpoints {last[0].name} and {last[1].name}, or their models, differ"
    for model in models(last[0]):
        readers = [Reader(folder / model) for folder in last]
        if readers[0].entries.keys() != readers[1].entries.keys():
            return f"the contents of {last[0].name}/{model} differ"
        for name in readers[0].entries:
            if name.startswith(("model.", "optim.")) and not torch.equal(
                *(reader.read(name) for reader in readers)
            ):
                return f"{model}/{name} differs"
    return None


def models(checkpoint):
    """The folders of a checkpoint with weights: its own, or in reinforcement learning those of several models."""
    return sorted(
        str(file.parent.relative_to(checkpoint))
        for file in checkpoint.rglob("rank_00000.safetensors")
    )
