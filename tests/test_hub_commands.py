"""Commands on models and datasets of a fake Hub, online and without a network: inspect, check, train, resume, chat."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, mvp
from fake_hub import FakeHub, use_hub
from PIL import Image
from run_files import read_json

sys.path.append(str(Path(__file__).parent / "kit"))
from tiny_vlm import chat, model_config, qwen3_vl

from mvp_engine.config import compose
from mvp_engine.distributed import World
from mvp_engine.errors import EXIT_USER_ERROR, UserError
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.weights.hub import dataset_files
from mvp_engine.runs import Run, list_runs

CONFIG = """
engine: mvp_engine.kit:MLLMEngine
run_name: hub
cpu_threads: 1
model: {type: language_model, path: org/vlm}
processor: org/vlm
data:
  pack_tokens: 160
  sources:
    shapes: {path: "hf://org/shapes"}
    held_out: {path: "hf://org/shapes:test", split: eval}
  global_batch_size: 2
  num_workers: 0
train: {max_steps: 2}
checkpoint: {interval: 1}
log: {interval: 1, backends: [jsonl]}
lora: {rank: 2}
"""


def parquet(rows):
    """Rows with an image and a chat, as the Hub stores them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = []
    for i in range(rows):
        image = io.BytesIO()
        Image.new("RGB", (16, 12 + i), ["red", "green", "blue"][i % 3]).save(image, "PNG")
        images = [{"bytes": image.getvalue(), "path": None}]
        table.append({**chat("<image>What colour?", "red"), "images": images})
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(table), out)
    return out.getvalue()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "vlm"
    torch.manual_seed(0)
    LanguageModel.from_config(model_config()).hf.save_pretrained(folder)
    qwen3_vl().save_pretrained(folder)
    return folder


@pytest.fixture
def hub(model, workspace, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (workspace / "train.yaml").write_text(CONFIG)
    with FakeHub().serve() as hub:
        use_hub(hub.url, workspace / "home", monkeypatch)
        hub.add("org/vlm", model)
        files = {
            "data/train-00000-of-00001.parquet": parquet(6),
            "data/test-00000-of-00001.parquet": parquet(2),
        }
        hub.add("datasets/org/shapes", files)
        yield hub


@pytest.fixture
def run(capsys):
    """run("train train.yaml", *more, code=0): the output of a command that ends with this exit code."""

    def call(words, *more, code=0):
        assert mvp(words, *more) == code, capsys.readouterr()
        printed = capsys.readouterr()
        return printed.out if code == 0 else printed.err

    return call


@pytest.mark.slow
def test_readme_four_commands_run_on_a_model_of_the_hub_online_then_offline(
    hub, model, tmp_path, run, monkeypatch
):
    title = "## Fine-tune a vision-language model on your images"
    page = (ROOT / "README.md").read_text().partition(title)[2]
    row, text = re.findall(r"```(?:json|bash)\n(.*?)```", page, flags=re.DOTALL)[:2]
    inspect, check, train, ask = [line.removeprefix("mvp ") for line in text.splitlines()]
    hub.add("Qwen/Qwen3-VL-2B-Instruct", model)
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (20, 16), "red").save(tmp_path / "photos" / "0001.jpg")
    (tmp_path / "photos.jsonl").write_text(row * 60)
    small = " data.pack_tokens=256 data.global_batch_tokens=512 data.num_workers=0"
    small += " train.epochs=1 log.backends=[jsonl] cpu_threads=1"
    assert "60 rows" in run(inspect)
    assert "ready to train" in run(check + small)
    run(train + small)
    newest = list_runs(Path("outputs"))[-1]
    first, *_, last = newest.records("train")
    assert last["loss"] < first["loss"]
    steps = [record["step"] for record in newest.records("eval")]
    assert steps == list(range(1, last["step"] + 1))  # ten, of ten steps
    ask += " --max-new-tokens 4"
    assert run(ask).endswith("\n")
    files = hub.downloads()
    assert sorted(files) == sorted(set(files))
    of_hub = "data inspect hf://org/shapes --model Qwen/Qwen3-VL-2B-Instruct --json"
    (source,) = json.loads(run(of_hub))["sources"]
    assert (source["name"], source["good"]) == ("shapes", 6)
    use_hub("http://127.0.0.1:9", Path("home"), monkeypatch)
    run(train + small)
    first, second = [list(one.records("train")) for one in list_runs(Path("outputs"))[-2:]]
    assert [record["loss"] for record in first] == [record["loss"] for record in second]
    run(ask)
    assert "write hf://org/shapes" in run("data inspect org/shapes", code=EXIT_USER_ERROR)
    use_hub("http://127.0.0.1:9", Path("other_home"), monkeypatch)
    error = run(train, code=EXIT_USER_ERROR)
    assert "run `hf download Qwen/Qwen3-VL-2B-Instruct`" in error
    statuses = [one.status() for one in list_runs(Path("outputs"))]
    assert statuses == ["finished"] * 2  # no run of the failed start
    run(ask)
    error = run("data inspect hf://org/shapes", code=EXIT_USER_ERROR)
    assert "hf://org/shapes is not complete in the cache" in error
    assert "run `hf download org/shapes --repo-type dataset`" in error


@pytest.mark.slow
def test_run_records_commits_and_resume_uses_them_when_the_branches_moved(hub, run):
    commit = hub.repos["org/vlm"].branches["main"]
    rows = hub.repos["datasets/org/shapes"].branches["main"]
    run("train train.yaml")
    first = list_runs(Path("outputs"))[-1]
    pins = {"org/vlm": f"org/vlm@{commit}", "hf://org/shapes": f"hf://org/shapes@{rows}"}
    assert first.info["hub"] == {**pins, "hf://org/shapes:test": f"hf://org/shapes:test@{rows}"}
    assert f"org/vlm@{commit} hf://org/shapes@{rows}" in run("runs latest")
    config = yaml.safe_load((first.dir / "config.yaml").read_text())
    assert config["model"]["path"] == f"org/vlm@{commit}"
    assert config["data"]["sources"][1]["path"] == f"hf://org/shapes:test@{rows}"
    base = read_json(first.checkpoint_list()[-1] / "hf" / "mvp.json")["base"]
    assert base["path"] == f"org/vlm@{commit}"  # no path of this machine
    files = hub.repos["org/vlm"].commits[commit]
    hub.add("org/vlm", {**files, "config.json": b"{}"})
    hub.add("datasets/org/shapes", {"data/train-00000-of-00001.parquet": parquet(1)})
    run("train train.yaml resume=auto train.max_steps=3")
    assert [record["step"] for record in first.records("train")] == [1, 2, 3]
    assert first.info["hub"]["org/vlm"] == f"org/vlm@{commit}"
    run(f"train train.yaml resume={first.checkpoint_list()[-1]} train.max_steps=4")  # a new run
    assert list_runs(Path("outputs"))[-1].info["hub"] == first.info["hub"]
    # A new run has the new commit.
    assert "no split test" in run("train train.yaml", code=EXIT_USER_ERROR)


@pytest.mark.slow
def test_profile_runs_on_a_model_of_the_hub(hub, run):
    run("profile train.yaml --out out --steps 1 --first 1 train.max_steps=4")
    assert Path("out/profile.md").is_file()


def error_of_start(config, override):
    """The user error of building an engine on this rank."""
    composed = compose(config, [override])
    world = World.join("cpu")
    folder = Run.create(Path("outputs"), "hub", None).dir if world.is_main else None
    try:
        composed.engine_class(composed.config, world, Run(world.broadcast(folder)))
    except UserError as error:
        return str(error)
    finally:
        world.close()
    return ""


def error_of_download():
    """The error of work that one rank of the node does, and how often this rank did it."""
    calls = []

    def fail():
        calls.append(1)
        raise UserError("cannot be stored")

    world = World.join("cpu")
    try:
        world.once_per_node(fail, "test")
    except UserError as error:
        return str(error), len(calls)
    finally:
        world.close()
    return "", len(calls)


@pytest.mark.slow
def test_two_ranks_download_each_file_once_and_share_errors(hub, ranks2):
    home = Path("home").absolute()
    settings = [f"output_dir={Path('outputs').absolute()}", "data.global_batch_size=2"]
    try:
        ranks2.run(use_hub, hub.url, home)
        assert ranks2.launch(Path("train.yaml").absolute(), *settings) == [0, 0]
        files = hub.downloads()
        assert sorted(files) == sorted(set(files))
        assert "model.safetensors" in files
        config = str(Path("train.yaml").absolute())
        for error in ranks2.run(error_of_start, config, "model.path=org/vml"):
            assert "model.path=org/vml is neither a folder" in error
        assert ranks2.run(error_of_download) == [("cannot be stored", 1), ("cannot be stored", 0)]
    finally:
        ranks2.run(use_hub, "https://huggingface.co", Path.home() / ".cache" / "huggingface")


@pytest.mark.slow
def test_push_uploads_model_and_card_that_chat_reads_back(hub, run, monkeypatch):
    run("train train.yaml eval.steps=2")
    newest = list_runs(Path("outputs"))[-1]
    newest.note(setup={**newest.info["setup"], "versions": {"torch": "1.2.3"}})
    shown = run(f"export {newest.id} --push me/reader --dry-run")
    assert "would upload to me/reader (private)" in shown
    assert "model.safetensors" in shown
    assert "me/reader" not in hub.repos
    error = run(f"export {newest.id} --push me/reader", code=EXIT_USER_ERROR)
    assert "run `hf auth login` with a token that may write to me, or set HF_TOKEN" in error
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    assert f"{hub.url}/me/reader" in run(f"export {newest.id} --push me/reader")
    repo = hub.repos["me/reader"]
    assert repo.private
    card = repo.commits[repo.branches["main"]]["README.md"].decode()
    metadata = yaml.safe_load(card.split("---\n")[1])
    assert (metadata["base_model"], metadata["datasets"]) == ("org/vlm", ["org/shapes"])
    assert metadata["pipeline_tag"] == "image-text-to-text"
    for text in (
        "| held-out loss |",
        "| `optim.lr` | 0.001 |",
        "Qwen3VLForConditionalGeneration.from_pretrained",
    ):
        assert text in card
    assert str(Path.cwd()) not in card
    assert "| torch | 1.2.3 |" in card  # of the training, not of this machine

    def answer(model):
        return json.loads(run(f"chat {model} -p 'What colour?' --max-new-tokens 2 --json"))[
            "answer"
        ]

    answers = {answer(newest.dir), answer("me/reader")}
    run(f"export {newest.id} --push me/adapter --adapter --public")
    files = hub.repos["me/adapter"].commits[hub.repos["me/adapter"].branches["main"]]
    assert not hub.repos["me/adapter"].private
    snippet = 'PeftModel.from_pretrained(Qwen3VLForConditionalGeneration.from_pretrained("org/vlm"), "me/adapter")'
    assert snippet in files["README.md"].decode()
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "org/vlm"
    assert answers == {answer("me/adapter")}
    error = run(f"export {newest.id} --push me/adapter", code=EXIT_USER_ERROR)
    assert "exists on the Hub and is public: add --public" in error
    config = newest.dir / "config.yaml"
    config.write_text(config.read_text().replace("path: org/vlm@", "path: /models/vlm@"))
    error = run(f"export {newest.id} --push me/local --adapter", code=EXIT_USER_ERROR)
    assert "started from a local folder, which others cannot load with the adapter" in error
    assert "me/local" not in hub.repos
    use_hub("http://127.0.0.1:9", Path("home"), monkeypatch)
    error = run(f"export {newest.id} --push me/reader", code=EXIT_USER_ERROR)
    assert "me/reader: nothing was uploaded, since the Hub cannot be reached" in error


def test_dataset_paths_choose_config_and_split(hub):
    def names(path, split="train"):
        return [Path(file).name for file in dataset_files(path, split)]

    assert names("hf://org/shapes", "test") == ["test-00000-of-00001.parquet"]
    assert names("hf://datasets/org/shapes:train") == ["train-00000-of-00001.parquet"]
    files = {
        f"{config}/{split}.parquet": b"PAR1"
        for config in ("en", "de")
        for split in ("train", "valid")
    }
    hub.add("datasets/org/words", files)
    assert names("hf://org/words:de:validation") == ["valid.parquet"]
    assert "/de/" in dataset_files("hf://org/words:de")[0]
    readme = b"---\nconfigs:\n- config_name: big\n  default: true\n  data_files:\n"
    readme += b"  - {split: train_sft, path: data/sft-*}\n  - {split: gen, path: [data/g*/**]}\n---\n# Card\n"
    shards = {
        "data/sft-1.parquet": b"PAR1",
        "data/sft-2.parquet": b"PAR1",
        "data/gen/x/1.parquet": b"PAR1",
    }
    hub.add("datasets/org/card", {"README.md": readme, **shards})
    assert names("hf://org/card:train_sft") == ["sft-1.parquet", "sft-2.parquet"]
    assert names("hf://org/card:big:gen") == ["1.parquet"]
    readme = b"---\nconfigs:\n- {config_name: default, data_dir: v2}\n---\n"
    files = {
        f"{folder}/{split}-00000-of-00001.parquet": b"PAR1"
        for folder in ("v1", "v2")
        for split in ("train", "test")
    }
    hub.add("datasets/org/folder", {"README.md": readme, **files})
    assert dataset_files("hf://org/folder")[0].endswith("v2/train-00000-of-00001.parquet")
    assert names("hf://org/folder") == ["train-00000-of-00001.parquet"]
    assert names("hf://org/folder:test") == ["test-00000-of-00001.parquet"]
    hub.add("datasets/org/json", {"rows.jsonl": b"{}"})
    hub.add(
        "datasets/org/json", {"default/train/0000.parquet": b"PAR1"}, branch="refs/convert/parquet"
    )
    assert names("hf://org/json") == ["0000.parquet"]


@pytest.mark.parametrize(
    "path, message",
    [
        ("hf://org", "write hf://org/name"),
        ("hf://./x", "write hf://org/name.* a local folder without hf://"),
        ("hf://org/a--b", "no name that the Hub allows"),
        ("hf://org/shaps", r"not a dataset of the Hub .* Did you mean org/shapes\?"),
        ("hf://org/shapes:tets", r"no split tets\. Did you mean test\? It has: test, train"),
        ("hf://org/shapes@v2", "has no revision v2"),
        ("hf://org/words", "has several configs: hf://org/words:de, hf://org/words:en"),
        ("hf://org/words:fr:train", "no config fr"),
        (
            "hf://org/raw",
            r"has no parquet files.* It has rows.jsonl: run `hf download org/raw --repo-type dataset",
        ),
    ],
)
def test_dataset_path_errors_name_the_choices(hub, path, message):
    hub.add("datasets/org/words", {"de/train.parquet": b"PAR1", "en/train.parquet": b"PAR1"})
    hub.add("datasets/org/raw", {"rows.jsonl": b"{}"})
    with pytest.raises(ValueError, match=message):
        dataset_files(path)


def test_held_out_source_without_a_split_of_that_name_is_an_error(hub):
    with pytest.raises(
        ValueError, match="has no split eval: name one of its splits, hf://org/shapes:test"
    ):
        dataset_files("hf://org/shapes", "eval")
