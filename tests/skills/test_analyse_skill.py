"""The check of the skill analyse-a-run passes the right diagnosis of a run with a planted problem, and no other."""

import json
import shutil

import pytest
from conftest import ROOT, mvp, run_process
from templates.tiny import tokenizer
from tiny_vlm import TEXT, write

from mvp_engine.imports import import_file
from mvp_engine.runs import Run, list_runs

CHECK = import_file(ROOT / "skills" / "analyse-a-run" / "check.py")
WORDS = """data.pack_tokens=64 data.max_length=64 data.global_batch_tokens=null data.global_batch_size=2
    data.num_workers=0 model.activation_checkpointing=none optim.lr=0.01 eval.generation=null
    eval.steps=6 checkpoint.interval=24
    log.interval=1 log.backends=[jsonl,file] export_link=null train.epochs=null
    train.max_steps=24 optim.schedule=constant""".split()


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """The folder of a training of a tiny model that learns; the times in its records are those of a good GPU run."""
    import torch
    import transformers as hf

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("run")
    hf.AutoModelForCausalLM.from_config(hf.Qwen3Config(**TEXT)).save_pretrained(folder / "model")
    tokenizer("qwen3").save_pretrained(folder / "model")
    rows = [{"prompt": f"Hi {n}?", "completion": "Hello" + "!" * (n % 4)} for n in range(24)]
    write(folder / "rows.jsonl", rows)
    held = [f"data.sources.rows.path={folder}/rows.jsonl", "data.sources.rows.hold_out=0.2"]
    command = (
        f"train sft/full model.path={folder}/model output_dir={folder}/runs data.cache={folder}"
    )
    assert mvp(command, *WORDS, *held) == 0
    [run] = list_runs(folder / "runs")

    def good(record):
        if record["split"] == "train":
            record["perf"] |= {"data_wait": 0.01, "mfu": 0.45}

    change(run, good)
    return run.dir


def change(run, edit):
    records = list(run.records())
    for record in records:
        edit(record)
    (run.dir / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))


def of_train(**values):
    def edit(record):
        if record["split"] == "train":
            for name, value in values.items():
                section = record["perf"] if name in record["perf"] else record
                section[name] = value

    return edit


def spike(record):
    if record["split"] == "train" and record["step"] == 20:
        record["grad_norm"] = 400.0


def rising(record):
    if record["split"] == "eval":
        record["loss"] = 3.0 + 0.1 * record["step"]


PLANTED = {
    "flat_loss": (of_train(loss=5.9), "loss", "optim.lr=0.1"),
    "spikes": (spike, "grad_norm", "optim.lr=0.001"),
    "overfit": (rising, "loss", "train.max_steps=10"),
    "data_wait": (of_train(data_wait=0.4), "perf.data_wait", "data.num_workers=4"),
    "bad_packing": (of_train(fill=0.5), "fill", "data.pack_tokens=128"),
    "low_mfu": (of_train(mfu=0.1), "perf.mfu", "data.pack_tokens=128"),
}


@pytest.fixture
def planted(healthy, tmp_path):
    """planted(PROBLEM): a copy of the run with that problem, and the right answer."""

    def plant(problem):
        run = Run(shutil.copytree(healthy, tmp_path / "run"))
        edit, metric, fix = PLANTED[problem]
        change(run, edit)
        split = "eval" if problem == "overfit" else "train"
        record = next(one for one in run.records(split) if one["step"] >= 20)
        value = record["perf"][metric[5:]] if metric.startswith("perf.") else record[metric]
        evidence = {"split": split, "step": record["step"], "metric": metric, "value": value}
        return run, {"problem": problem, **evidence, "fix": fix}

    return plant


def found(run, *entries):
    return CHECK.problems(run.dir, {"problems": list(entries)})


@pytest.mark.slow
def test_check_of_a_healthy_run_accepts_no_problem_alone(healthy):
    run = Run(healthy)
    assert found(run) == []
    [text] = found(run, {"problem": "spikes", "fix": "optim.lr=0.001"})
    assert text == "spikes: the records do not show it"
    assert "is none of flat_loss" in found(run, {"problem": "bad luck"})[0]
    assert "the answer is not" in CHECK.problems(healthy, ["spikes"])[0]


@pytest.mark.slow
@pytest.mark.parametrize("problem", PLANTED)
def test_check_of_a_planted_problem_passes_its_diagnosis_alone(planted, problem):
    run, right = planted(problem)
    assert found(run, right) == []
    assert found(run) == [f"{problem}: the records show it, and the answer lacks it"]
    other = "spikes" if problem != "spikes" else "overfit"
    assert f"{other}: the records do not show it" in found(run, {**right, "problem": other})
    for wrong, text in (
        ({"value": right["value"] * 1.5}, "not"),
        ({"step": 999}, "at step 999"),
        ({"metric": "lr"}, "does not show it"),
        ({"fix": "more data"}, "is no key=value"),
        ({"fix": "optim.lrr=1"}, "does not act on it"),
        ({"fix": "seed=3"}, "does not act on it"),
    ):
        [said] = found(run, {**right, **wrong})
        assert text in said, wrong


@pytest.mark.slow
def test_check_of_a_fix_in_the_wrong_direction_or_without_a_change_fails(planted):
    run, right = planted("spikes")
    assert "goes the wrong way" in found(run, {**right, "fix": "optim.lr=0.1"})[0]
    assert "already" in found(run, {**right, "fix": "optim.lr=0.01"})[0]


@pytest.mark.slow
def test_check_of_rows_left_out_counts_them_by_reason(healthy, tmp_path):
    run = Run(shutil.copytree(healthy, tmp_path / "run"))
    line = {"source": "rows", "where": "rows.jsonl:1", "reason": "missing", "detail": "no file"}
    write(run.dir / "bad_rows.jsonl", [{**line, "where": f"rows.jsonl:{n}"} for n in range(5)])
    right = {"problem": "rows_left_out", "file": "bad_rows.jsonl", "reason": "missing", "rows": 5}
    right["fix"] = "data.sources={}"
    assert found(run, right) == []
    assert "lists 5 rows" in found(run, {**right, "rows": 50})[0]
    (tmp_path / "answer.json").write_text(json.dumps({"problems": []}))
    code, said = run_process(
        "skills/analyse-a-run/check.py", str(run.dir), str(tmp_path / "answer.json")
    )
    assert (code, said.strip()) == (
        1,
        "rows_left_out: the records show it, and the answer lacks it",
    )
