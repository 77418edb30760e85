"""resume_data: what a resume does when the rows have changed."""

import pytest
from conftest import mvp
from run_files import json_lines, log_of, read_json
from tiny_vlm import chat, write

from mvp_engine.runs import list_runs

WORDS = (
    "--model model --data rows.jsonl eval.steps=null eval.generation=null data.sources.rows.hold_out=null "
    "data.pack_tokens=64 data.global_batch_tokens=64 data.num_workers=0 log.interval=1 "
    "log.backends=[file,jsonl] run_name=tiny optim.warmup=0 checkpoint.interval=2 export_link=null"
)


def rows(count, word):
    return [chat(f"What is {word} {i}?", f"It is {i}.") for i in range(count)]


def steps(folder):
    return [line["step"] for line in json_lines(folder / "metrics.jsonl")]


def test_changed_data_are_refused_or_begin_with_their_first_epoch_once(vlm_folder, capsys):
    file = vlm_folder / "rows.jsonl"
    write(file, rows(6, "it"))
    assert mvp(f"sft {WORDS} train.epochs=null train.max_steps=4") == 0
    [run] = list_runs(vlm_folder / "outputs")
    write(file, rows(4, "that"))
    more = f"sft {WORDS} resume=auto train.epochs=1"
    assert mvp(more) == 2
    assert "resume_data=restart" in capsys.readouterr().err
    assert mvp(f"{more} resume_data=restart train.max_steps=6") == 0
    log = log_of(vlm_folder / "outputs")
    assert "the first epoch begins at step 4, since the rows" in log
    assert [one["step"] for one in read_json(run.dir / "run.json")["data_restarts"]] == [4]
    at_six = len(json_lines(run.dir / "metrics.jsonl"))
    # The same command again continues the new rows, to the end of their first epoch.
    assert mvp(f"{more} resume_data=restart") == 0
    assert len(read_json(run.dir / "run.json")["data_restarts"]) == 1
    found = steps(run.dir)
    assert found == list(range(1, len(found) + 1))
    assert len(found) >= at_six
    setup = read_json(run.dir / "run.json")["setup"]
    assert setup["total_steps"] == len(found)  # 4, and an epoch of the new rows
    capsys.readouterr()
    assert mvp(more) == 0  # without the key: the position is valid now, and nothing is left to do
    assert steps(run.dir) == found


def test_unchanged_data_continue_with_the_bits_of_a_plain_resume(vlm_folder):
    write(vlm_folder / "rows.jsonl", rows(6, "it"))
    losses = []
    for name, more in (("plain", ""), ("restart", "resume_data=restart")):
        words = f"sft {WORDS} run_name={name} train.epochs=null"
        assert mvp(f"{words} train.max_steps=2") == 0
        assert mvp(f"{words} train.max_steps=5 resume=auto {more}") == 0
        [run] = list_runs(vlm_folder / "outputs", name)
        losses.append([line["loss"] for line in json_lines(run.dir / "metrics.jsonl")])
        assert "data_restarts" not in run.info
    assert losses[0] == losses[1]


def test_resume_does_not_warn_of_its_run_id(train, tmp_path):
    assert train("run_id=mine train.max_steps=2") == 0
    assert train("resume=auto train.max_steps=3") == 0
    log = log_of(tmp_path)
    assert "train.max_steps: 2 -> 3" in log
    assert "run_id" not in log


@pytest.mark.parametrize(
    "freeze, trained", [(["*", "!blocks.0.*"], ["blocks.0.weight", "blocks.0.bias"])]
)
def test_freeze_excepts_what_an_exclamation_mark_names(freeze, trained):
    from torch import nn

    from mvp_engine.model_engine.fsdp.parallelize import freeze as freeze_parameters

    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})
    freeze_parameters(model, freeze)
    assert [name for name, one in model.named_parameters() if one.requires_grad] == trained
