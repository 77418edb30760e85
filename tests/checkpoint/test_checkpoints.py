"""CheckpointManager: a checkpoint is complete or absent, old ones are deleted after a new one, no code is unpickled."""

import json
import os
import pickle
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import read_metrics, user_error
from run_files import read_json
from torch import nn

from mvp_engine.checkpoint import CheckpointManager, format, state
from mvp_engine.checkpoint import format as checkpoint_format
from mvp_engine.checkpoint.manager import find_checkpoint
from mvp_engine.config.schema import Checkpoint
from mvp_engine.data import rng_state, set_rng_state
from mvp_engine.distributed import World
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.report.facts import RunFacts
from mvp_engine.runs import complete_checkpoints, list_runs

ALONE = World(0, 1, 0, 1, torch.device("cpu"))
KEYS = {
    "interval": 1,
    "keep_n": None,
    "keep_every": None,
    "best_metric": None,
    "best_mode": "min",
    "trainable_only": None,
    "patience": None,
    "remote": None,
}


def names(folder):
    return [p.name for p in complete_checkpoints(folder)]


def manager(folder, background=False, world=ALONE, **changes):
    """`background`: `save` does not wait for the write."""
    checkpoints = CheckpointManager(folder, Checkpoint(**{**KEYS, **changes}), world)
    checkpoints.write_more = None if background else lambda folder: None
    return checkpoints


def save(to, step):
    to.save(step, {"model.x": torch.full((3,), float(step))}, {})


def test_prune_keeps_the_newest_n_every_mth_and_the_best(tmp_path):
    checkpoints = manager(tmp_path, keep_n=2, keep_every=4)
    for step in range(1, 10):
        save(checkpoints, step)
        if step == 3:
            checkpoints.mark_best(3)
    assert names(tmp_path) == [f"step_{n:08d}" for n in (3, 4, 8, 9)]
    assert (tmp_path / "latest").resolve().name == "step_00000009"
    assert (tmp_path / "best").resolve().name == "step_00000003"


def test_save_of_states_on_the_host_of_a_gpu_copies_none_and_waits(tmp_path, monkeypatch):
    checkpoints = manager(tmp_path, background=True)
    checkpoints.world = replace(ALONE, device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    state = torch.ones(3)
    tensors = {
        "optim.x.exp_avg": state,
        "optim.x.step": torch.ones(()),
        "model.x": torch.ones(2),
    }
    checkpoints.save(1, tensors, {})
    assert checkpoints._thread is None  # written: the next step may change the state
    state.fill_(2.0)
    assert {name for name, _ in checkpoints._host_copies} == {"optim.x.step", "model.x"}
    saved = checkpoint_format.Reader(tmp_path / "step_00000001")
    assert saved.read("optim.x.exp_avg").tolist() == [1.0, 1.0, 1.0]


def test_mark_best_of_a_checkpoint_being_written_is_linked_afterwards(tmp_path):
    checkpoints = manager(tmp_path, keep_n=1, background=True)
    for step in (1, 2, 3):
        save(checkpoints, step)
        if step < 3:
            checkpoints.mark_best(step)
    checkpoints.wait()
    assert names(tmp_path) == ["step_00000002", "step_00000003"]


def test_mark_best_on_a_read_only_disk_is_linked_after_a_later_checkpoint(tmp_path, monkeypatch):
    checkpoints = manager(tmp_path)
    save(checkpoints, 1)
    with monkeypatch.context() as patch:
        patch.setattr("mvp_engine.checkpoint.manager.atomic_symlink", _refuse)
        checkpoints.mark_best(1)
        checkpoints.wait()
    assert not (tmp_path / "best").exists()
    save(checkpoints, 2)
    assert (tmp_path / "best").resolve().name == "step_00000001"


def test_manager_unrelated_files_are_ignored_and_kept(tmp_path):
    strays = ["notes.txt", "step_best", "step_00000007", "step_12.bak"]
    for stray in strays:
        (tmp_path / stray).mkdir() if "." not in stray else (tmp_path / stray).write_text("mine")
    checkpoints = manager(tmp_path, keep_n=1)
    for step in (1, 2):
        save(checkpoints, step)
    assert names(tmp_path) == ["step_00000002"]
    assert all((tmp_path / stray).exists() for stray in strays)
    save(checkpoints, 7)  # replaces the stray folder of that name
    assert names(tmp_path) == ["step_00000007"]


def test_manager_start_removes_leftovers_of_a_crash(tmp_path):
    (tmp_path / ".tmp-step_00000005").mkdir()
    manager(tmp_path)
    assert not list(tmp_path.glob(".tmp*"))


def test_save_failed_write_keeps_old_checkpoints_and_the_training(
    train, tmp_path, monkeypatch, capsys
):
    write = checkpoint_format.write

    def disk_full(folder, tensors, group):
        if folder.name.endswith("6"):
            (folder / "half").parent.mkdir(parents=True)
            raise OSError(28, "No space left on device")
        write(folder, tensors, group)

    monkeypatch.setattr(checkpoint_format, "write", disk_full)
    words = ["checkpoint.interval=3", "checkpoint.keep_n=1", "train.max_steps=7"]
    assert train(*words, dir=tmp_path) == 0
    [run] = list_runs(tmp_path)
    message = "CHECKPOINT AT STEP 6 WAS NOT WRITTEN: OSError: [Errno 28] No space left"
    assert message in capsys.readouterr().out
    assert [p.name for p in run.checkpoint_list()] == ["step_00000007"]
    assert not list(run.checkpoints.glob(".tmp*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount a small file system")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's
def test_save_on_a_full_disk_leaves_complete_checkpoints_only(train, tmp_path, capsys):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size=700k none {disk} 2>/dev/null") != 0:
        pytest.skip("mounting is not allowed here")
    try:
        words = ["checkpoint.interval=3", "checkpoint.keep_n=null", "train.max_steps=90"]
        words += ["log.interval=1", "log.backends=[terminal,file,jsonl,tensorboard,plot]"]
        # Trained to the end, but the last state could not be saved.
        assert train(*words, dir=disk) == EXIT_USER_ERROR
        output, errors = capsys.readouterr()
        assert "the state at step 90 could not be saved" in errors
        assert "WAS NOT WRITTEN: RuntimeError: rank 0: " in output
        assert "No space left on device" in output
        [run] = list_runs(disk)
        steps = [record["step"] for record in run.records("train")]
        assert steps == list(range(1, len(steps) + 1))  # no half line
        complete = run.checkpoint_list()
        assert complete
        for checkpoint in complete:
            state.restore(checkpoint, _tiny_model(), None, None)
    finally:
        os.system(f"umount -l {disk}")  # TensorBoard still has a file open


def _tiny_model():
    layers = [nn.Linear(4, 16), nn.LayerNorm(16), nn.Tanh(), nn.Dropout(), nn.Linear(16, 1)]
    return nn.Sequential(*layers)


def test_save_failure_on_one_rank_fails_on_all(on_ranks, tmp_path):
    found = on_ranks({"replicate": 2}, _one_rank_cannot_write, tmp_path)
    assert found == [["step_00000001", "step_00000003"]] * 2


def _one_rank_cannot_write(layout, folder):
    world = layout.world
    checkpoints = manager(folder, background=True, world=world)
    real = format.save_file
    for step in (1, 2, 3):
        if step == 2 and world.rank == 1:
            format.save_file = _refuse
        checkpoints.save(step, {f"x.{world.rank}": torch.ones(3)}, {})
        checkpoints.wait()
        format.save_file = real
        assert checkpoints.failed == (step == 2)
    world.barrier()
    return names(folder)


def _refuse(*_):
    raise OSError(28, "No space left on device")


class Harmful:
    def __reduce__(self):
        return os.system, ("touch harmed",)


def test_reader_file_with_pickled_code_is_refused(workspace):
    save(manager(workspace), 1)
    [file] = (workspace / "step_00000001").glob("rank_*")
    file.write_bytes(pickle.dumps(Harmful()))
    with user_error(str(file)):
        checkpoint_format.Reader(workspace / "step_00000001").read("model.x")
    assert not (workspace / "harmed").exists()


def test_from_bytes_with_pickled_code_is_refused(workspace):
    torch.save(Harmful(), "harmful.pt")
    data = torch.frombuffer(bytearray(Path("harmful.pt").read_bytes()), dtype=torch.uint8)
    with user_error("could run code"):
        checkpoint_format.from_bytes(data)
    assert not (workspace / "harmed").exists()


@pytest.mark.parametrize("make", ["adamw", "sgd", "two_groups", "unused"])
def test_restore_model_and_optimizer_is_bit_equal(tmp_path, make):
    def build(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        if make == "sgd":
            return model, torch.optim.SGD(model.parameters(), 0.1)
        if make == "two_groups":
            second = {"params": model[2].parameters(), "lr": 0.5}
            groups = [second, {"params": model[0].parameters()}]
            return model, torch.optim.AdamW(groups, 0.1, fused=True)
        return model, torch.optim.AdamW(model.parameters(), 0.1)

    def step(model, optimizer):
        optimizer.zero_grad()
        torch.manual_seed(9)
        part = model[:2] if make == "unused" else model  # the last layer never gets a gradient
        part(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()

    model, optimizer = build(1)
    step(model, optimizer)
    tensors = state.collect(model, optimizer, {"a": 1}, {"b": [2.5, None]}, rank=0)
    manager(tmp_path).save(1, tensors, {})
    other, other_optimizer = build(2)
    saved = state.restore(tmp_path / "step_00000001", other, other_optimizer, None)
    assert saved.shared["a"] == 1
    assert list(saved.ranks) == [{"b": [2.5, None]}]
    for _ in range(2):
        step(model, optimizer)
        step(other, other_optimizer)
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_to_bytes_rng_state_round_trips():
    random.gauss(0, 1)
    np.random.randn(1)  # both generators cache half a draw
    kept = checkpoint_format.from_bytes(checkpoint_format.to_bytes(rng_state()))
    draws = [random.gauss(0, 1), float(np.random.randn()), float(torch.rand(()))]
    set_rng_state(kept)
    assert draws == [random.gauss(0, 1), float(np.random.randn()), float(torch.rand(()))]


def test_find_checkpoint_accepts_run_checkpoints_folder_checkpoint_or_symlink(train, tmp_path):
    assert train("checkpoint.interval=4", dir=tmp_path) == 0
    [run] = list_runs(tmp_path)
    last = run.checkpoints / "step_00000012"
    for path in (run.dir, run.checkpoints, last, run.checkpoints / "latest"):
        assert find_checkpoint(path) == last.resolve()
    with user_error("neither a complete checkpoint nor a run folder"):
        find_checkpoint(tmp_path)


def test_best_symlink_follows_the_metric(train, tmp_path):
    words = "eval.steps=2 optim.lr=0.05 checkpoint.keep_n=1 train.max_steps=9".split()
    assert train(*words, dir=tmp_path) == 0
    [run] = list_runs(tmp_path)
    evaluations = read_metrics(tmp_path, "eval")
    assert [e["step"] for e in evaluations] == [2, 4, 6, 8, 9]
    best = min(evaluations, key=lambda e: e["loss"])
    meta = read_json(run.checkpoints / "best" / "meta.json")
    assert meta["best"] == {"metric": "loss", "value": best["loss"], "step": best["step"]}
    assert meta["step"] == best["step"]


def test_patience_ends_the_training_and_evaluate_uses_the_best_checkpoint(train, tmp_path, capsys):
    # The loss falls, so the first evaluation is the best one.
    words = ["eval.steps=1", "checkpoint.best_mode=max", "checkpoint.keep_n=1"]
    words += ["train.max_steps=9"]
    assert train(*words, "checkpoint.patience=2", dir=tmp_path) == 0
    [run] = list_runs(tmp_path)
    assert [e["step"] for e in read_metrics(tmp_path, "eval")] == [1, 2, 3]
    assert "the training ends: loss was not better than" in (run.dir / "log.txt").read_text()
    assert RunFacts(run).next_steps()["Train longer"].endswith("checkpoint.patience=4")
    assert train(*words, "checkpoint.patience=2", "resume=auto", dir=tmp_path) == 0
    message = "nothing left to do: raise train.max_steps or train.epochs, or checkpoint.patience"
    assert message in (run.dir / "log.txt").read_text()
    assert train(*words, "checkpoint.patience=4", "resume=auto", dir=tmp_path) == 0
    assert [e["step"] for e in read_metrics(tmp_path, "eval")] == [1, 2, 3, 4, 5]
    assert run.status() == "finished"
    assert (run.checkpoints / "best").resolve().name == "step_00000001"
    assert train(*words, "workflow=evaluate", "resume=auto", dir=tmp_path) == 0
    [found] = [json.loads(line) for line in (run.dir / "evaluate.jsonl").read_text().splitlines()]
    assert found == read_metrics(tmp_path, "eval")[0]
    text = (run.dir / "log.txt").read_text()
    assert "step_00000001, the best one; the last is" in text
    words += ["resume=auto", "checkpoint.best_metric=null", "train.max_steps=6"]
    assert train(*words, dir=tmp_path) == 0
    assert not (run.checkpoints / "best").exists()  # of another metric
    assert train("checkpoint.patience=2", dir=tmp_path) == EXIT_USER_ERROR
    assert "set eval.steps and checkpoint.best_metric too" in capsys.readouterr().err


def test_workflow_evaluate_reads_the_checkpoint_and_keeps_the_metrics(train, tmp_path):
    assert train("eval.steps=6", dir=tmp_path) == 0
    [run] = list_runs(tmp_path)
    before = (run.dir / "metrics.jsonl").read_text()
    assert train("workflow=evaluate resume=auto", dir=tmp_path) == 0
    assert train("workflow=evaluate", f"resume={run.checkpoints / 'best'}", dir=tmp_path) == 0
    assert (run.dir / "metrics.jsonl").read_text() == before
    results = [json.loads(line) for line in (run.dir / "evaluate.jsonl").read_text().splitlines()]
    assert results[0] == read_metrics(tmp_path, "eval")[-1]
    assert run.status() == "finished"


def test_workflow_of_a_recipe_runs_by_name(train, tmp_path):
    assert train("workflow=shout", dir=tmp_path) == 0
    assert (list_runs(tmp_path)[0].dir / "shouted").read_text() == "tiny"
