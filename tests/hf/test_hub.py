"""The resolver of the Hugging Face Hub against a fake Hub: downloads, cache, no network, errors that name the fix."""

from pathlib import Path

import pytest
import torch
from conftest import user_error
from fake_hub import FakeHub, use_hub
from folders import folder_of, language_model, same

from mvp_engine.hf.model.config_source import read_config
from mvp_engine.hf.weights.hub import HubRepo, _glob, hub_model, local_folder, pin, portable_name

MODEL = "org/model"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with FakeHub().serve() as hub:
        use_hub(hub.url, tmp_path / "home", monkeypatch)
        yield hub


@pytest.fixture
def qwen3(tmp_path):
    folder_of("qwen3", tmp_path / "qwen3", max_shard_size="20KB")
    return tmp_path / "qwen3"


def disconnect(monkeypatch):
    """As without a network: nothing listens at this port."""
    use_hub("http://127.0.0.1:9", Path("home"), monkeypatch)


def test_hub_model_accepts_ids_and_leaves_local_paths_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "run").mkdir(parents=True)
    assert hub_model("Qwen/Qwen3-VL-2B-Instruct") == HubRepo("Qwen/Qwen3-VL-2B-Instruct")
    assert hub_model("Qwen/Qwen3@refs/pr/1") == HubRepo("Qwen/Qwen3", "refs/pr/1")
    assert hub_model("hf://outputs/model") == HubRepo("outputs/model")
    assert hub_model("https://huggingface.co/Qwen/Qwen3") == HubRepo("Qwen/Qwen3")
    assert hub_model("outputs/model@v1") == HubRepo("outputs/model", "v1")
    local = [
        "outputs/run",
        "outputs/missing",
        "./org/name",
        "/org/name",
        "a/b/c",
        "name",
        "~/name",
        "../x",
        None,
    ]
    assert [path for path in local if hub_model(path) is not None] == []


def test_model_of_the_hub_equals_its_folder_and_is_downloaded_once(hub, qwen3):
    commit = hub.add(MODEL, qwen3)
    hub.add(
        MODEL,
        {**hub.repos[MODEL].commits[commit], "onnx/model.onnx": b"0", "pytorch_model.bin": b"0"},
    )
    assert read_config(MODEL, {}).to_json_string() == read_config(qwen3, {}).to_json_string()
    assert not [name for name in hub.downloads() if name.endswith(".safetensors")]
    engine = language_model(Path(MODEL))
    assert same(engine.model.state_dict(), language_model(qwen3).model.state_dict())
    files = hub.downloads()
    assert len(files) == len(set(files))
    assert {"model.onnx", "pytorch_model.bin"}.isdisjoint(files)
    pinned = str(pin(HubRepo(MODEL)))
    hub.requests.clear()
    assert same(language_model(Path(pinned)).model.state_dict(), engine.model.state_dict())
    assert hub.requests == []  # a commit in the cache needs no request at all


def test_pin_keeps_the_commit_when_the_branch_moves(hub):
    first = hub.add(MODEL, {"config.json": b'{"model_type": "qwen3"}'})
    pinned = pin(HubRepo(MODEL))
    assert pinned == HubRepo(MODEL, first)
    hub.add(MODEL, {"config.json": b'{"model_type": "llama"}'})
    assert read_config(str(pinned), {}).model_type == "qwen3"
    assert read_config(MODEL, {}).model_type == "llama"
    folder = local_folder(str(pinned))
    assert portable_name(folder) == f"{MODEL}@{first}"


def test_cached_model_loads_without_network(hub, qwen3, monkeypatch):
    hub.add(MODEL, qwen3)
    local_folder(MODEL, weights=True)
    disconnect(monkeypatch)
    torch.testing.assert_close(
        language_model(Path(MODEL)).model.state_dict(),
        language_model(qwen3).model.state_dict(),
        rtol=0,
        atol=0,
    )


def test_missing_model_without_network_names_the_download_command(hub, qwen3, monkeypatch):
    hub.add(MODEL, qwen3)
    read_config(MODEL, {})
    disconnect(monkeypatch)
    for path, command in [
        (MODEL, f"hf download {MODEL}"),
        ("org/other@v2", "hf download org/other --revision v2"),
    ]:
        with user_error(rf"the Hub cannot be reached \(.*refused.*\): run `{command}"):
            local_folder(path, weights=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with user_error("HF_HUB_OFFLINE is set: run `hf download org/other`"):
        local_folder("org/other")


def test_refused_repositories_name_the_fix(hub):
    hub.add(MODEL, {"config.json": b"{}"})
    hub.add("org/gated", {"config.json": b"{}"}, gated=True)
    hub.add("org/pickle", {"config.json": b"{}", "pytorch_model.bin": b"0"})
    hub.add("org/adapter", {"adapter_config.json": b"{}"})
    with user_error(
        r"org/modle is neither a folder .* Did you mean org/model\? .*hf auth login",
    ):
        local_folder("org/modle")
    with user_error(r"org/gated is gated: accept its terms at http\S+/org/gated, then .*login"):
        local_folder("org/gated")
    with user_error("org/model has no revision v9"):
        local_folder("org/model@v9")
    with user_error(r"org/pickle@\w+ has no model.safetensors"):
        local_folder("org/pickle", weights=True)
    with user_error("base_model_name_or_path=None is not a model's folder"):
        read_config("org/adapter", {})


@pytest.mark.parametrize(
    "pattern, file, fits",
    [
        ("data/train-[0-9]*.parquet", "data/train-00.parquet", True),
        ("data/train-[!0-9]*.parquet", "data/train-00.parquet", False),
        ("data/{train,test}.parquet", "data/test.parquet", True),
        ("data/*.parquet", "data/more/train.parquet", False),
        ("**/train.parquet", "data/more/train.parquet", True),
    ],
)
def test_data_files_pattern_reads_stars_sets_and_choices(pattern, file, fits):
    assert (_glob(pattern).fullmatch(file) is not None) == fits
