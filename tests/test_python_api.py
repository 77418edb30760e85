"""Python API: the same bits as the command line, errors that are raised, and several runs in one process."""

import json
import os
import re
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, mvp, user_error
from kit.test_mllm import CONFIG
from PIL import Image
from run_files import json_lines
from safetensors.torch import load_file
from tiny_vlm import chat, with_images, write
from torch.utils.data import Dataset

import mvp_engine
from mvp_engine import api
from mvp_engine.api import word
from mvp_engine.config.compose import compose, read_draft
from mvp_engine.kit import MLLMEngine

WORDS = ["eval.generation=null", "train.max_steps=2", "eval.steps=2", "checkpoint.interval=2"]


@pytest.fixture
def config(vlm_folder):
    rows = with_images(vlm_folder, 8)
    write(vlm_folder / "images.jsonl", rows)
    write(vlm_folder / "held.jsonl", rows[:2])
    (vlm_folder / "train.yaml").write_text(CONFIG)
    return str(vlm_folder / "train.yaml")


def losses(folder):
    lines = json_lines(folder / "metrics.jsonl")
    return [(line["step"], line["split"], line["loss"]) for line in lines]


def test_a_notebook_has_the_bits_of_the_command_line(config, workspace):
    picture = next(workspace.rglob("*.png"))
    with mvp_engine.train(config, *WORDS, optim={"lr": 1e-3}) as run:
        assert run.step == 2
        assert [one["loss"] for one in run.metrics] == [loss for *_, loss in losses(run.folder)]
        before = run.generate(["What?", "And?"], images=[picture, None], max_new_tokens=4)
        assert run.evaluate()["loss"] == run.metrics[-1]["loss"]
        run.continue_training(steps=2, optim={"lr": 2e-3})
        assert run.step == 4
        after = run.generate(["What?", "And?"], images=[picture, None], max_new_tokens=4)
        assert run.generate("What?", images=picture, max_new_tokens=4) == after[:1]
        drawn = {"temperature": 1.0, "max_new_tokens": 16}
        (text,) = run.generate("What?", **drawn)
        end = f"{text[0]}no such end"
        assert run.generate("What?", stop=end, **drawn) == [text]  # one text, not its letters
        folder = run.export(workspace / "exported")
    assert len(before) == len(after) == 2

    assert mvp(f"train {config} run_id=words optim.lr=1e-3", *WORDS) == 0
    more = [*WORDS, "train.max_steps=4", "optim.lr=2e-3", "resume=outputs/words"]
    assert mvp(f"train {config}", *more) == 0
    assert losses(run.folder) == losses(workspace / "outputs" / "words")
    assert mvp("export outputs/words merged") == 0
    exported, merged = (
        load_file(one / "model.safetensors") for one in (folder, workspace / "merged")
    )
    assert exported.keys() == merged.keys()
    assert all(torch.equal(exported[name], merged[name]) for name in merged)

    with mvp_engine.load(run.folder) as again:  # the same model from its checkpoint
        assert again.generate(["What?", "And?"], images=[picture, None], max_new_tokens=4) == after


def test_an_engine_trains_once(config):
    with mvp_engine.train(config, *WORDS, "eval.steps=null") as run:
        with user_error("this engine has trained already; .*continue_training"):
            run.engine.train()
        assert run.engine.export().is_dir()


class ListDataset(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def test_rows_in_memory_train_as_the_same_rows_of_a_file(config, workspace):
    rows = json_lines(workspace / "images.jsonl")
    in_memory = json.loads(json.dumps(rows))
    for part in (part for row in in_memory for part in row["messages"][0]["content"]):
        if part["type"] == "image":
            part["image"] = Image.open(workspace / part["image"])
    words = [*WORDS, "eval.steps=null", "~data.sources.images", "~data.sources.held"]
    with mvp_engine.train(config, *words, data=workspace / "images.jsonl") as run:
        expected = losses(run.folder)
    for data in (in_memory, ListDataset(in_memory), (row for row in in_memory)):
        with mvp_engine.train(config, *words, data=data) as run:
            assert losses(run.folder) == expected
    assert len(list((workspace / "outputs" / "rows").iterdir())) == 1


def test_a_dataset_of_the_datasets_package_trains_as_its_rows(config):
    datasets = pytest.importorskip("datasets")  # of make test-harness
    rows = [chat(f"How many? {i}", f"{i} pictures.") for i in range(8)]
    words = [*WORDS, "eval.steps=null", "~data.sources.images", "~data.sources.held"]
    found = []
    for data in (rows, datasets.Dataset.from_list(rows)):
        with mvp_engine.train(config, *words, data=data) as run:
            found.append(losses(run.folder))
    assert found[0] == found[1]


class DoubledLoss(MLLMEngine):
    def forward_step(self, ctx, micro_batch):
        loss_sum, weight = super().forward_step(ctx, micro_batch)
        return 2 * loss_sum, weight


def test_an_engine_of_the_notebook_in_a_thread(config):
    words = [*WORDS, "eval.steps=null", "train.max_steps=1"]
    with mvp_engine.train(config, *words) as run:
        (expected,) = [loss for *_, loss in losses(run.folder)]
    found = []

    def work():
        with mvp_engine.train(config, *words, engine=DoubledLoss) as doubled:
            found.extend(loss for *_, loss in losses(doubled.folder))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [2 * expected]


def test_trainings_in_two_threads_do_not_see_the_log_of_each_other(config):
    words = [*WORDS, "eval.steps=null", "log.backends=[file,jsonl]"]
    together = threading.Barrier(2, timeout=60)

    class Waits(MLLMEngine):
        def train_post_step(self, ctx):
            together.wait()  # in the loop of both
            self.logger.info("a message of %s", self.config.run_id)

    found = {}

    def work(name):
        with mvp_engine.train(config, *words, engine=Waits, run_id=name) as run:
            found[name] = (run.folder / "log.txt").read_text()

    threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, other in (("one", "two"), ("two", "one")):
        assert found[name].count(f"a message of {name}") == 2
        assert f"a message of {other}" not in found[name]


def test_messages_of_a_second_run_are_printed_once(config, capsys):
    words = [*WORDS, "log.backends=[terminal]", "eval.steps=null"]
    first = mvp_engine.train(config, *words)
    capsys.readouterr()
    second = mvp_engine.train(config, *words)
    assert capsys.readouterr().out.count("finished at step 2; everything is in") == 1
    first.close()
    second.close()


def test_errors_are_raised_and_leave_the_training_as_it_is(config):
    with user_error("unknown key 'optim.lrr'"):
        mvp_engine.train(config, optim={"lrr": 1.0})
    with user_error("data: row 1 is a str"):
        mvp_engine.train(config, *WORDS, data=[{"text": "x"}, "y"])
    with user_error("data is a int: give a path, or rows"):
        mvp_engine.train(config, *WORDS, data=3)
    with user_error("has no such workflow; it has: evaluate"):
        mvp_engine.train(config, *WORDS, "workflow=evaluat")
    with user_error("data: row 0: .*object"):
        mvp_engine.train(config, *WORDS, data=[{"text": object()}])
    with mvp_engine.train(config, *WORDS, "eval.steps=null") as run:
        with user_error("unknown key 'optim.lrr'"):
            run.continue_training(steps=1, optim={"lrr": 1.0})
        with user_error("1 images for 2 prompts"):
            run.generate(["a", "b"], images=[None])
        with user_error("exists; give a path that does not"):
            run.export(run.folder)
        assert run.generate("a", max_new_tokens=2)
    with user_error("is closed: mvp_engine.load"):
        run.generate("a")


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            3,
            1e-5,
            "a b",
            "it's",
            "c:\\dir\\",
            "x\\'y",
            "a,b=[1]{}",
            "",
            [1, "a", None],
        ),
        *("./model", "../a-b/c.d", "hf://org/name:train", ".5", "a:", {"a": "hf://b:c", "d": "e:"}),
    ],
)
def test_keywords_are_the_values_of_overrides(value):
    draft = read_draft("recipes/sft/configs/lora.yaml", [word("run_name", value)])
    assert draft.values["run_name"] == value


def test_numbers_of_numpy_and_torch_are_the_values_of_overrides():
    for value in (np.float64(1e-5), np.float32(0.5), np.int64(3), np.bool_(True), torch.tensor(2)):
        draft = read_draft("recipes/sft/configs/lora.yaml", [word("run_name", value)])
        assert draft.values["run_name"] == value.item()


@pytest.fixture
def composed(monkeypatch):
    """The configs that calls of `train` would train."""
    found = []
    monkeypatch.setattr(
        api, "Training", lambda config, words, engine: found.append(compose(config, words).config)
    )
    return found


def paths(config):
    return [(one.path, one.split, one.hold_out) for one in config.data.sources]


def test_data_takes_the_place_of_the_source_of_its_split(config, composed, workspace):
    mvp_engine.train(config, data="mine.jsonl")
    assert paths(composed[-1]) == [("mine.jsonl", "train", None), ("held.jsonl", "eval", None)]
    mvp_engine.train("sft/lora", model="org/model", data="mine.jsonl")
    assert paths(composed[-1]) == [("mine.jsonl", "train", 0.02)]
    mvp_engine.train("sft/lora", model="org/model", data="mine.jsonl", eval_data="others.jsonl")
    assert paths(composed[-1]) == [("mine.jsonl", "train", None), ("others.jsonl", "eval", None)]
    with user_error("data stands for one source of split train, and .* has 2"):
        mvp_engine.train(config, "data.sources.more={path: more.jsonl}", data="mine.jsonl")


def test_model_and_data_are_sections_too(config, composed):
    mvp_engine.train(config, model={"path": "other"}, data={"pack_tokens": 512})
    assert (composed[0].model.path, composed[0].data.pack_tokens) == ("other", 512)
    assert composed[0].model.type == "language_model"


def train_twice(config, words):
    """Losses of a training that is continued, losses of another one in the same process, and an answer of the first."""
    os.chdir(Path(config).parent)
    with mvp_engine.train(config, *words) as run:
        run.continue_training(steps=1)
        answer = run.generate("What?", max_new_tokens=3)
        found = losses(run.folder)
    with mvp_engine.train(config, *words) as run:
        return found, losses(run.folder), answer


def train_inside(config, words):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        found = train_twice(config, words)
        assert dist.is_initialized()
        one = torch.ones(1)
        dist.all_reduce(one)  # the group of the caller still works
        assert one.item() == dist.get_world_size()
    finally:
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("work", [train_twice, train_inside], ids=["torchrun", "inside a group"])
def test_two_ranks_equal_one(config, ranks2, work):
    words = [*WORDS, "eval.steps=null", "data.global_batch_size=2", "parallel.shard=2"]
    first, second = ranks2.run(work, config, words)
    alone = train_twice(config, [*words, "parallel.shard=1"])
    assert first == second
    assert first[2] == alone[2]
    for ours, expected in zip(first[:2], alone[:2], strict=True):
        assert [loss for *_, loss in ours] == pytest.approx(
            [loss for *_, loss in expected], abs=1e-5
        )


@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: make test-ray")
@pytest.mark.campaign(only=True)
def test_a_training_in_a_ray_task_has_the_bits_of_this_process(config):
    import ray

    words = [*WORDS, "eval.steps=null"]
    expected = train_twice(config, words)
    paths = [path for path in sys.path if path]
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}},
    )
    try:
        task = ray.remote(num_cpus=1)(train_twice)
        found = ray.get([task.remote(config, [*words, f"run_name={n}"]) for n in "ab"], timeout=240)
    finally:
        ray.shutdown()
    assert found == [expected, expected]  # two tasks at once, in processes of their own


def test_the_script_of_the_docs_runs(config, workspace):
    (script,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL
    )
    assert len(script.splitlines()) <= 25
    picture = next(workspace.rglob("*.png"))
    made = {
        "Qwen/Qwen3-VL-2B-Instruct": "model",
        "photos.jsonl": "images.jsonl",
        "photo.jpg": str(picture),
    }
    for name, here in made.items():
        assert name in script
        script = script.replace(name, here)
    exec(compile(script, "docs/python.md", "exec"), {})
    assert (workspace / "my_model" / "config.json").is_file()
