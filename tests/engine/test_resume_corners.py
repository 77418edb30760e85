"""Corners of saving and going on, each of which was once wrong."""

import os
import time
from pathlib import Path

import pytest
import torch
from conftest import CAMPAIGN, MAGIC, TINY, losses, read_metrics
from run_files import read_json
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from mvp_engine.checkpoint import format as storage
from mvp_engine.checkpoint.manager import recover
from mvp_engine.engine.feed import Feed
from mvp_engine.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_USER_ERROR
from mvp_engine.runs import list_runs


@pytest.fixture
def write_with(monkeypatch):
    """write_with(f): checkpoint files are written by f from now on; returns what wrote them before."""

    def use(write):
        real = storage.write
        monkeypatch.setattr(storage, "write", write)
        return real

    return use


def test_finished_run_in_a_relative_folder_is_not_written_again(train, workspace):
    assert train(dir=Path("rel")) == 0
    [run] = list_runs(Path("rel"))
    files = run.checkpoint_list()[-1] / "meta.json", run.dir / "metrics.jsonl"
    before = [(file.stat().st_ino, file.read_text()) for file in files]
    assert train("resume=auto", dir=Path("rel")) == 0
    assert [(file.stat().st_ino, file.read_text()) for file in files] == before
    assert len(list_runs(Path("rel"))) == 1
    assert "nothing left to do" in (run.dir / "log.txt").read_text()


@pytest.mark.parametrize("loader", ["sample", "iterable"])  # of known and of unknown length
def test_last_step_is_logged_and_evaluated_once(train, tmp_path, loader):
    words = "train.max_steps=null train.epochs=1 log.interval=4 checkpoint.interval=3 eval.steps=4".split()
    words += [f"tiny.loader={loader}", "optim.schedule=constant"]
    for _ in range(2):
        assert train(*words, "resume=auto", dir=tmp_path) == 0
    for split, steps in (("train", [1, 4, 6]), ("eval", [4, 6])):
        assert [r["step"] for r in read_metrics(tmp_path, split)] == steps
    best = read_json(list_runs(tmp_path)[0].checkpoints / "best" / "meta.json")
    assert best["best"]["step"] == best["step"]


def test_kill_between_remove_and_rename_keeps_a_checkpoint(train, tmp_path):
    assert train("checkpoint.interval=3", dir=tmp_path) == 0
    [run] = list_runs(tmp_path)
    last = run.checkpoint_list()[-1]
    last.rename(last.with_name(f".tmp-{last.name}"))
    recover(run.checkpoints)
    assert run.checkpoint_list()[-1] == last
    (last / "meta.json").write_text('{"cut sho')
    last.rename(last.with_name(f".tmp-{last.name}"))
    recover(run.checkpoints)
    assert run.checkpoint_list()[-1] != last


def test_interrupt_whose_save_fails_exits_with_an_error_code(train, tmp_path, write_with, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    write_with(full)
    assert train("tiny.fault=sigterm", dir=tmp_path) == EXIT_USER_ERROR
    assert "the state at step 3 could not be saved" in capsys.readouterr().err


def test_failed_interval_save_is_repeated_at_the_end(train, tmp_path, write_with):
    calls = []

    def first_fails(*args):
        calls.append(args)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        write(*args)

    write = write_with(first_fails)
    assert train("train.max_steps=6 checkpoint.interval=6", dir=tmp_path) == 0
    assert [p.name for p in list_runs(tmp_path)[0].checkpoint_list()] == ["step_00000006"]


def test_checkpoint_written_during_training_holds_the_state_of_its_step(
    train, tmp_path, write_with
):
    """The write is slow, and the steps meanwhile must not get into it."""

    def slow(*args):
        time.sleep(0.3)
        write(*args)

    assert train("train.max_steps=4 optim.schedule=constant", dir=tmp_path / "short") == 0
    write = write_with(slow)
    words = "checkpoint.interval=4 checkpoint.keep_n=null train.max_steps=7 optim.schedule=constant".split()
    assert train(*words, dir=tmp_path / "long") == 0
    found = []
    for folder in ("short", "long"):
        checkpoint = list_runs(tmp_path / folder)[0].checkpoints / "step_00000004"
        found.append(storage.Reader(checkpoint).read("model.0.weight"))
    assert torch.equal(*found)


def test_old_checkpoints_are_deleted_after_the_new_one_is_complete(train, tmp_path, write_with):
    seen = []

    def look(folder, *args):
        seen.append(sorted(p.name for p in folder.parent.glob("step_*")))
        write(folder, *args)

    write = write_with(look)
    assert train("checkpoint.interval=4 checkpoint.keep_n=1", dir=tmp_path) == 0
    assert seen == [[], ["step_00000004"], ["step_00000008"]]


def test_best_checkpoint_is_kept_on_resume(train, tmp_path):
    words = "eval.steps=2 optim.schedule=constant log.backends=[jsonl] checkpoint.keep_n=1".split()
    assert train(*words, "train.max_steps=6", dir=tmp_path) == 0
    [run] = list_runs(tmp_path)
    best = (run.checkpoints / "best").resolve().name
    (run.checkpoints / "best").unlink()  # as if killed just before the link was made
    worse = ["optim.lr=3.0", "optim.max_grad_norm=null", "train.max_steps=10"]
    assert train(*words, *worse, "resume=auto", dir=tmp_path) == 0
    assert (run.checkpoints / "best").resolve(strict=True).name == best


def test_evaluation_does_not_change_training_nor_modules_in_eval_mode(train, tmp_path, tiny_hooks):
    modes = []

    def before_train(self):
        plain.before_train(self)
        self.model[1].eval()

    def prepare_dataloader(self, split):
        torch.rand(3 if split == "eval" else 0)
        return plain.prepare_dataloader(self, split)

    def eval_step(self, ctx, batch):
        torch.rand(5)
        plain.eval_step(self, ctx, batch)

    def train_post_step(self, ctx):
        modes.append(self.model[1].training)

    hooks = (before_train, prepare_dataloader, eval_step, train_post_step)
    plain = tiny_hooks(**{hook.__name__: hook for hook in hooks})
    for interval in ("null", "2", "5"):
        words = ["tiny.dropout=0.3", f"eval.steps={interval}"]
        assert train(*words, dir=tmp_path / interval) == 0
    assert losses(tmp_path / "null") == losses(tmp_path / "2") == losses(tmp_path / "5")
    assert modes == [False] * 36


def test_nan_eval_metric_is_not_logged_and_never_the_best(train, tmp_path, tiny_hooks):
    tiny_hooks(eval_step=lambda self, ctx, batch: ctx.log("loss", float("nan"), 1))
    assert train("eval.steps=6", dir=tmp_path) == 0
    assert [r["loss"] for r in read_metrics(tmp_path, "eval")] == [None, None]
    assert not (list_runs(tmp_path)[0].checkpoints / "best").exists()


def test_resume_auto_ignores_launches_without_a_step(train, tmp_path):
    assert train("train.max_steps=6", dir=tmp_path) == 0
    assert train("tiny.loader=none", dir=tmp_path) == EXIT_USER_ERROR
    assert train("workflow=shout", dir=tmp_path) == 0
    assert train("workflow=evaluate resume=auto", dir=tmp_path) == 0
    assert train("resume=auto", dir=tmp_path) == 0
    assert [r["step"] for r in list_runs(tmp_path)[0].records("train")] == [1, 2, 4, 6, 8, 10, 12]


def test_failed_resume_leaves_the_run_as_it_was_and_no_copy(train, tmp_path):
    assert train("train.max_steps=2", dir=tmp_path) == 0
    [run] = list_runs(tmp_path)
    before = run.info, sorted(run.dir.iterdir())
    assert (run.info["status"], run.info["step"]) == ("finished", 2)
    for source in ("auto", run.checkpoint_list()[-1]):
        for word in ("tiny.loader=none", "model.freeze=[nothing]"):
            assert train(f"resume={source} {word}", dir=tmp_path) == EXIT_USER_ERROR
            assert (run.info, sorted(run.dir.iterdir())) == before
            assert len(list_runs(tmp_path)) == 1


def test_branch_killed_before_its_first_checkpoint_restarts_from_its_source(train, tmp_path):
    assert train("checkpoint.interval=4 log.interval=2", dir=tmp_path) == 0
    first = list_runs(tmp_path)[-1]
    branch = [
        f"resume={first.checkpoints / 'step_00000004'}",
        "log.interval=2",
        "tiny.fault=raise",
        "tiny.fault_step=7",
    ]
    assert train(*branch, dir=tmp_path) == EXIT_BUG
    second = list_runs(tmp_path)[-1]
    second.note(status="running")  # as kill -9 leaves it
    assert train("resume=auto log.interval=2", dir=tmp_path) == 0
    assert [(r["step"], r["loss"]) for r in second.records("train")] == [
        (r["step"], r["loss"]) for r in first.records("train")
    ]
    assert "starts again from" in (second.dir / "log.txt").read_text()


def test_folder_of_a_launch_killed_at_start_is_reused(train, tmp_path):
    (tmp_path / "mine").mkdir()
    assert train("run_id=mine resume=auto", dir=tmp_path) == 0


def test_own_loader_generator_and_momentum_schedule_resume_bit_equal(train, tmp_path, tiny_hooks):
    def own_generator(self, split):
        loader = plain.prepare_dataloader(self, split)
        if split == "eval":
            return loader
        generator = torch.Generator().manual_seed(3)
        return DataLoader(loader.dataset, 4, shuffle=True, generator=generator)

    def one_cycle(self, optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)

    plain = tiny_hooks(prepare_dataloader=own_generator, prepare_scheduler=one_cycle)
    words = ["train.max_steps=20", "resume=auto"]
    assert train(*words, dir=tmp_path / "straight") == 0
    for step in (8, 15):
        cut = [*words, "tiny.fault=sigterm", f"tiny.fault_step={step}"]
        assert train(*cut, dir=tmp_path / "cut") == EXIT_INTERRUPTED
    assert train(*words, dir=tmp_path / "cut") == 0
    assert read_metrics(tmp_path / "straight") == read_metrics(tmp_path / "cut")


def test_state_that_cannot_be_loaded_is_refused_at_save(train, tmp_path, tiny_hooks, capsys):
    tiny_hooks(extra_state=lambda self: {"where": Path("/tmp")})
    assert train(dir=tmp_path) == EXIT_USER_ERROR
    assert "Look at extra_state()" in capsys.readouterr().err


def test_set_epoch_reaches_nested_samplers():
    from torch.utils.data import BatchSampler

    from mvp_engine.distributed import World

    sampler = DistributedSampler(list(range(8)), 2, 0)
    loader = DataLoader(list(range(8)), batch_sampler=BatchSampler(sampler, 2, False))
    feed = Feed(loader, 1, World(0, 2, 0, 2, torch.device("cpu")))
    feed.take()
    feed.advance(1)
    feed.next_epoch()
    assert sampler.epoch == 1


def test_resume_gives_every_rank_its_own_cursor(ranks2, tmp_path):
    assert ranks2.run(own_cursors) == [[[4, 6], [8]], [[5, 7], [9]]]


class Stateful:
    def __init__(self, rank):
        self.rank, self.at = rank, 0

    def state_dict(self):
        return {"at": self.at, "rank": self.rank}

    def load_state_dict(self, state):
        assert state["rank"] == self.rank
        self.at = state["at"]

    def __iter__(self):
        while self.at < 5:
            self.at += 1
            yield 2 * (self.at - 1) + self.rank


def own_cursors():
    from mvp_engine.distributed import World

    world = World.join("cpu")
    first, second = (Feed(Stateful(world.rank), 2, world) for _ in range(2))
    first.take()
    first.advance(2)
    saved = world.all_gather(first.rank_state_dict())
    second.load_state_dict(first.state_dict(), len(saved), saved.__getitem__)
    rest = [second.take(), second.take()]
    world.close()
    return rest


def test_ranks_with_loaders_of_different_lengths_take_equal_steps(ranks2, tmp_path):
    words = (
        "tiny.loader=uneven train.max_steps=null train.epochs=2 eval.steps=3 log.interval=1".split()
    )
    assert ranks2.launch(TINY, *words, f"output_dir={tmp_path}", "data.global_batch_size=8") == [
        0,
        0,
    ]
    # 4 and 8 micro-batches an epoch.
    assert [r["step"] for r in read_metrics(tmp_path)] == list(range(1, 17))


def test_replicas_start_with_the_weights_of_rank_0(ranks2):
    assert ranks2.run(same_start) == [0.0, 0.0]


def same_start():
    from mvp_engine.distributed import World

    world = World.join("cpu")
    weight = torch.full((2,), float(world.rank))
    world.broadcast_from_rank0_([weight])
    world.close()
    return float(weight.sum())


def test_ddp_gradient_ready_twice_in_one_backward_raises(ranks2):
    for text in ranks2.run(twice):
        assert "use_reentrant=False" in text


def twice():
    from torch.utils.checkpoint import checkpoint

    from mvp_engine.distributed import DDPReducer, World

    world = World.join("cpu")
    layer = nn.Linear(4, 4)
    assert world.host_group is not None
    reducer = DDPReducer(list(layer.parameters()))
    reducer.zero_grad()
    reducer.arm()
    x = torch.randn(2, 4, requires_grad=True)
    try:
        checkpoint(
            layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True
        ).sum().backward()
        return "no error"
    except RuntimeError as error:
        return str(error)
    finally:
        reducer.finish()
        world.close()


@CAMPAIGN
def test_magic_transformer_trained_sorts(train, tmp_path, capsys):
    words = "task.digits=4 train.max_steps=200 eval.steps=200 task.eval_problems=200".split()
    words += ["data.micro_batch_size=64", "data.global_batch_size=64", "log.backends=[jsonl]"]
    assert train(*words, config=MAGIC, dir=tmp_path) == 0
    assert read_metrics(tmp_path, "eval")[-1]["exact_match"] > 0.95
    capsys.readouterr()
    assert train(*words, "workflow=solve", "resume=auto", config=MAGIC, dir=tmp_path) == 0
    assert capsys.readouterr().out.count("right") >= 4


def test_reserved_metric_names_are_refused():
    from mvp_engine.distributed import World
    from mvp_engine.log import MetricStore

    with pytest.raises(ValueError, match="a metric cannot be called 'step'"):
        MetricStore(World(0, 1, 0, 1, torch.device("cpu"))).add("step", 1.0)


def test_user_error_before_the_process_group_is_printed_once_per_machine(capsys, monkeypatch):
    from mvp_engine.launch import launch

    for rank, local, told in (("0", "0", 1), ("1", "1", 0), ("2", "0", 1)):
        monkeypatch.setitem(os.environ, "RANK", rank)
        monkeypatch.setitem(os.environ, "LOCAL_RANK", local)
        assert launch("/nowhere.yaml", []) == EXIT_USER_ERROR
        assert capsys.readouterr().err.count("config file not found") == told
