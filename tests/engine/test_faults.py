"""What goes wrong in a training, and what the user gets to see."""

import pytest
import torch
from conftest import TINY, losses, read_metrics, user_error
from run_files import json_lines, log_of

from mvp_engine.config import compose
from mvp_engine.errors import EXIT_BUG, EXIT_USER_ERROR
from mvp_engine.model_engine.fsdp.engine import FSDPEngine
from mvp_engine.runs import list_runs


def newest(folder):
    return list_runs(folder)[-1]


def skipped(folder, rank=0):
    name = "skipped_steps.jsonl" if rank == 0 else f"skipped_steps.rank{rank}.jsonl"
    return json_lines(newest(folder).dir / name)


@pytest.mark.parametrize(
    "fault, reason", [("nan_once", "the loss is not finite"), ("nan_grad", "a gradient is not")]
)
def test_non_finite_step_is_skipped_counted_and_logged(train, tmp_path, fault, reason):
    assert train(f"tiny.fault={fault} log.interval=1", dir=tmp_path) == 0
    [entry] = skipped(tmp_path)
    assert entry["step"] == 3
    assert reason in entry["reason"]
    assert len(entry["sample_ids"]) == 8
    records = read_metrics(tmp_path)
    assert records[2]["loss"] is None
    assert entry["nonfinite_micro_batches"] == ([0, 1] if fault == "nan_once" else [])
    assert [r["skipped"] for r in records] == [0, 0, *[1] * 10]
    assert all(r["loss"] is not None for r in records if r["step"] != 3)


def test_non_finite_steps_stay_out_of_means_and_of_the_schedule(train, tmp_path):
    words = ["tiny.fault=nan_once", "optim.schedule=linear"]
    assert train("log.interval=1", *words, dir=tmp_path / "each") == 0
    rates = [record["lr"] for record in read_metrics(tmp_path / "each")]
    assert rates[2] == rates[3]  # the schedule waited
    assert rates[3] > rates[4]
    assert train("log.interval=4", *words, dir=tmp_path / "mean") == 0
    assert all(loss is not None and loss < 100 for loss in losses(tmp_path / "mean"))


def test_consecutive_skips_over_the_limit_end_the_run_with_one_message(train, tmp_path, capsys):
    code = train("tiny.fault=nan_forever guard.max_skips=4 checkpoint.interval=2", dir=tmp_path)
    assert code == EXIT_USER_ERROR
    text = capsys.readouterr().err
    assert "stopped at step 6: skipped 4 steps in a row" in text
    assert "guard.max_skips=4" in text
    assert f"mvp check {newest(tmp_path).dir}" in text
    assert "Traceback" not in text
    assert newest(tmp_path).status() == "failed"
    assert "Traceback" in log_of(tmp_path)


def test_guard_state_is_restored_on_resume(train, tmp_path):
    words = ["tiny.fault=nan_forever", "guard.max_skips=6", "checkpoint.interval=2"]
    assert train(*words, "train.max_steps=6", dir=tmp_path) == 0  # 4 skips
    assert train(*words, "resume=auto", "train.max_steps=12", dir=tmp_path) == EXIT_USER_ERROR
    assert skipped(tmp_path)[-1]["step"] == 8


def test_eval_loader_is_made_while_a_stop_signal_ends_the_launch_at_once(train, tiny_hooks):
    """It may measure rows for minutes; in a step, a signal would wait for that."""
    made = {}

    def watched(self, split):
        made[split] = (self.step, self.signals.early)
        return plain.prepare_dataloader(self, split)

    plain = tiny_hooks(prepare_dataloader=watched)
    assert train("eval.steps=4 log.interval=1") == 0
    assert made == {"train": (0, True), "eval": (0, True)}


@pytest.mark.parametrize("rank", [0, 1])
def test_nan_on_one_rank_skips_the_step_on_both(ranks2, tmp_path, rank):
    words = f"output_dir={tmp_path} tiny.fault=nan_once tiny.fault_rank={rank} data.micro_batch_size=2".split()
    assert ranks2.launch(TINY, *words, "log.interval=1") == [0, 0]
    ids = [skipped(tmp_path, r)[0]["sample_ids"] for r in (0, 1)]
    assert len(set(ids[0]) | set(ids[1])) == 8
    after = read_metrics(tmp_path)[3:]
    assert all(r["loss"] is not None and r["skipped"] == 1 for r in after)


def test_batch_of_zero_weight_is_skipped(train, tmp_path, tiny_hooks):
    def no_weight(self, ctx, micro_batch):
        loss, weight = plain.forward_step(self, ctx, micro_batch)
        return (loss * 0, weight * 0) if ctx.step == 3 and ctx.split == "train" else (loss, weight)

    plain = tiny_hooks(forward_step=no_weight)
    assert train("log.interval=1", dir=tmp_path) == 0
    assert "weight 0" in skipped(tmp_path)[0]["reason"]
    assert all(loss is not None for loss in losses(tmp_path)[3:])


@pytest.mark.parametrize(
    "words, expected",
    [
        ("tiny.loader=empty", "gave no batch at all in a whole epoch"),
        ("tiny.loader=none", "prepare_dataloader('train') gave None"),
        ("train.max_steps=null", "Set train.max_steps or train.epochs"),
        (
            "tiny.loader=torch data.global_batch_size=7",
            "DataLoader makes its micro-batches itself: set data.glob",
        ),
        (
            "parallel.shard=2",
            "parallel.tensor=1 do not divide the 1 process of this job: a replica of the model takes 2. Use --nproc 2",
        ),
        ("workflow=trian", "it has: evaluate, shout, train"),
        ("workflow=save", "no such workflow"),
        ("workflow=_build_model", "no such workflow"),
        ("device=cuda", "torch sees no GPU here"),
        ("log.backends=[papyrus]", "unknown backend 'papyrus'; known: terminal, file"),
        ("log.backends=[wandb]", "but wandb is not installed: pip install wandb"),
        (
            "train.epochs=1 train.max_steps=null tiny.loader=iterable",
            "needs the number of steps",
        ),
        ("resume=/nowhere", "/nowhere does not exist"),
        ("resume=", "resume= is empty: write resume=auto"),
        ("workflow=evaluate resume=auto", "no run named 'tiny'"),
        ("eval.steps=1 checkpoint.best_metric=iq", "is not among the eval metrics: loss"),
    ],
)
def test_user_error_is_one_message_and_leaves_no_run_folder(
    train, tmp_path, capsys, words, expected
):
    if torch.cuda.is_available() and words == "device=cuda":
        pytest.skip("there is a GPU here")
    assert train(*words.split()) == EXIT_USER_ERROR
    text = capsys.readouterr().err
    assert expected in text
    assert text.count("error:") == 1
    assert "Traceback" not in text
    assert "best_metric" in words or not list(tmp_path.iterdir())  # that error is of step 1


@pytest.mark.parametrize("where", ["/proc/nowhere", "{file}/below"])
def test_unwritable_output_folder_is_named_with_the_key_to_set(train, tmp_path, capsys, where):
    (tmp_path / "file").write_text("")
    folder = where.format(file=tmp_path / "file")
    assert train(f"output_dir={folder}") == EXIT_USER_ERROR
    text = capsys.readouterr().err
    assert f"cannot write run folders to {folder}" in text
    assert "Set output_dir" in text


@pytest.mark.parametrize(
    "fault, sign", [("stop_iteration", "StopIteration"), ("raise", "the bug of a user")]
)
def test_exception_in_a_hook_is_raised_with_its_traceback(train, tmp_path, capsys, fault, sign):
    assert train(f"tiny.fault={fault}", dir=tmp_path) == EXIT_BUG
    text = capsys.readouterr().err
    assert sign in text
    assert "inject_fault" in text
    assert sign in log_of(tmp_path)


@pytest.mark.parametrize("step", ["train_pre_step", "optimizer_step"])
def test_error_outside_of_forward_and_backward_has_no_hint_to_find_its_row(
    train, tmp_path, monkeypatch, capsys, step
):
    def fail(*_):
        raise ValueError("no row caused it")

    owner = compose(TINY).engine_class if step == "train_pre_step" else FSDPEngine
    monkeypatch.setattr(owner, step, fail)
    assert train(dir=tmp_path) == EXIT_BUG
    text = "".join(capsys.readouterr())
    assert "ValueError: no row caused it" in text
    assert "mvp check" not in text
    assert not list(tmp_path.rglob("skipped_steps*"))


def test_forward_step_without_sum_and_weight_is_refused(train, tmp_path, tiny_hooks, capsys):
    tiny_hooks(forward_step=lambda self, ctx, batch: torch.ones(()))
    assert train(dir=tmp_path) == EXIT_BUG
    assert "forward_step must return (loss_sum, weight)" in capsys.readouterr().err


def test_existing_run_id_is_not_overwritten(train, capsys):
    assert train("run_id=mine") == 0
    assert train("run_id=mine") == EXIT_USER_ERROR
    assert "Set resume=auto to continue it" in capsys.readouterr().err
    assert train("run_id=mine resume=auto train.max_steps=14") == 0


def test_run_locked_by_another_process_is_refused(train, tmp_path, capsys, monkeypatch):
    from conftest import spawn

    monkeypatch.setattr("mvp_engine.runs.LOCK_TIMEOUT", 0.2)
    assert train("train.max_steps=4", dir=tmp_path) == 0
    lock = newest(tmp_path).dir / ".lock"
    code = f"import fcntl,time; f=open({str(lock)!r},'a+'); fcntl.lockf(f,fcntl.LOCK_EX); print('held',flush=True)"
    holder = spawn("-c", f"{code}; time.sleep(60)")
    try:
        assert holder.stdout.readline() == "held\n"
        assert train("resume=auto", dir=tmp_path) == EXIT_USER_ERROR
        assert "is in use by" in capsys.readouterr().err
    finally:
        holder.kill()
        holder.communicate()


def test_stop_set_by_a_hook_on_one_rank_ends_training_on_all(ranks2, tmp_path):
    words = f"output_dir={tmp_path} tiny.fault=stop tiny.fault_rank=1 tiny.fault_step=5".split()
    assert ranks2.launch(TINY, *words) == [0, 0]
    assert newest(tmp_path).checkpoint_list()[-1].name == "step_00000005"
    assert newest(tmp_path).status() == "finished"


def test_loader_with_equal_data_on_all_ranks_is_refused(train, tmp_path):
    from torch.utils.data import DataLoader, DistributedSampler

    from mvp_engine.distributed import World
    from mvp_engine.engine.feed import Feed

    two = World(0, 2, 0, 2, torch.device("cpu"))
    with user_error("would train on the same samples"):
        Feed(DataLoader([1, 2, 3], shuffle=True), 1, two)
    Feed(DataLoader([1, 2, 3], sampler=DistributedSampler([1, 2, 3], 2, 0)), 1, two)


def test_start_that_fails_with_a_bug_leaves_a_run_folder_only_for_files_worth_keeping(
    train, tmp_path, tiny_hooks
):
    def fail(self, split):
        (self.run.dir / "bad_rows.jsonl").write_text(self.config.run_name * (self.config.seed == 1))
        raise RuntimeError("a bug")

    tiny_hooks(prepare_dataloader=fail)
    assert train("seed=2", dir=tmp_path) == EXIT_BUG
    assert not list(tmp_path.iterdir())
    assert train("seed=1", dir=tmp_path) == EXIT_BUG
    assert newest(tmp_path).status() == "failed"


def test_changed_config_on_resume_takes_effect_and_is_logged(train, tmp_path):
    assert train("train.max_steps=6 optim.schedule=constant log.interval=1", dir=tmp_path) == 0
    words = "resume=auto train.max_steps=12 optim.schedule=constant optim.lr=0.005 log.interval=1".split()
    assert train(*words, dir=tmp_path) == 0
    assert [r["lr"] for r in read_metrics(tmp_path)][4:8] == [0.02, 0.02, 0.005, 0.005]
    log = log_of(tmp_path)
    assert "optim.lr: 0.02 -> 0.005" in log
    assert (newest(tmp_path).dir / "config.until_step_6.yaml").is_file()


def test_resume_of_a_folder_continues_its_run_and_of_a_checkpoint_starts_a_new_one(train, tmp_path):
    words = ["log.interval=2", "checkpoint.interval=4", "checkpoint.keep_n=null"]
    assert train(*words, "train.max_steps=6", "optim.schedule=constant", dir=tmp_path) == 0
    first = newest(tmp_path)
    words.append("optim.schedule=constant")
    assert train(*words, f"resume={first.dir}", dir=tmp_path) == 0
    assert len(list_runs(tmp_path)) == 1
    assert first.checkpoint_list()[-1].name == "step_00000012"
    assert train(*words, f"resume={first.checkpoints / 'step_00000004'}", dir=tmp_path) == 0
    second = newest(tmp_path)
    assert second.id != first.id
    before, after = (list(run.records("train")) for run in (first, second))
    assert after[:2] == before[:2]
    assert [record["loss"] for record in after] == [record["loss"] for record in before]
    assert second.info["parent"].endswith("step_00000004")


def test_resume_auto_without_a_run_prints_a_message(train, tmp_path, capsys):
    assert train("resume=auto", dir=tmp_path) == 0
    assert "resume=auto found no run named 'tiny'" in capsys.readouterr().out


def test_resume_with_a_changed_shape_is_refused_with_the_parameter_name(
    train, tmp_path, tiny_hooks, capsys
):
    assert train("train.max_steps=4", dir=tmp_path) == 0
    from torch import nn

    wider = nn.Sequential(
        nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 1)
    )
    tiny_hooks(prepare_model=lambda self: wider)
    assert train("resume=auto", dir=tmp_path) == EXIT_USER_ERROR
    assert (
        "model.0.weight has the shape (16, 4) there and (8, 4) in this model"
        in capsys.readouterr().err
    )
