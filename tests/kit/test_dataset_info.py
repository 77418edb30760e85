"""LLaMA-Factory's dataset_info.json as the path of a source."""

import pytest
from conftest import mvp, user_error
from run_files import printed_json, write_json
from templates.tiny import tokenizer
from tiny_vlm import chat, made, qwen3_vl, write, write_image

from mvp_engine.kit.data.read.rows import read_row

TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
}
INFO = {
    "alpaca": {"file_name": "a.json"},
    "renamed": {
        "file_name": "b.jsonl",
        "columns": {"prompt": "q", "response": "r", "system": "s", "kto_tag": "good"},
    },
    "mllm": {
        "file_name": "sub/c.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "pics"},
        "tags": TAGS,
    },
    "ranking": {
        "file_name": "d.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "best", "rejected": "worst"},
    },
    "texts": {"file_name": "parts", "columns": {"prompt": "body"}},
    "hub": {"hf_hub_url": "someone/data"},
    "tagged": {"file_name": "a.json", "formatting": "sharegpt", "tags": {"user_tag": "customer"}},
    "sampled": {"file_name": "a.json", "num_samples": 3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("info")
    (root / "sub").mkdir()
    (root / "parts").mkdir()
    write_image(root / "1.png", 16, 16)  # media paths are relative to dataset_info.json
    turns = [{"from": "human", "value": "q"}]
    best, worst = ({"from": "gpt", "value": value} for value in "ab")
    files = {
        "dataset_info.json": INFO,
        "a.json": [{"instruction": "q", "input": "", "output": "a"}],
        "sub/c.json": [chat("<image>q", "a") | {"pics": ["1.png"]}],
        "d.json": [{"conversations": turns, "best": best, "worst": worst}],
        "parts/1.json": [{"body": "one"}],
        "parts/2.json": [{"body": "two"}],
    }
    for name, value in files.items():
        write_json(root / name, value)
    write(
        root / "b.jsonl",
        [{"q": "q", "r": "a", "s": "s", "good": True}, {"q": "q", "r": "a", "good": False}],
    )
    return root


def rows(folder, name):
    kit = made(
        folder / f"dataset_info.json:{name}",
        qwen3_vl() if name == "mllm" else tokenizer("zephyr"),
        pairs=True,
    )
    assert kit.source_names() == [name]
    mixture, _ = kit.measured("train")
    assert [bad.reason for bad in kit.bad_rows()] == (["label_false"] if name == "renamed" else [])
    return [kit.row("train", i)[1:] for i in range(sum(len(one) for one in mixture.sources))]


@pytest.mark.parametrize(
    "name, expected",
    [
        ("alpaca", "user: q | assistant: a"),
        ("renamed", "system: s | user: q | assistant: a"),
        ("mllm", "user: q | assistant: a"),
        ("ranking", "user: q | assistant: a | user: q | assistant: b"),
    ],
)
def test_dataset_info_columns_give_the_conversation(folder, name, expected):
    row = read_row(*rows(folder, name)[0])
    turns = [f"{message.role}: {message.text}" for message in (*row.messages, *row.rejected)]
    assert " | ".join(turns) == expected
    assert [part.value for part in row.media()] == (["1.png"] if name == "mllm" else [])


def test_dataset_info_folder_of_texts_is_read_as_text(folder):
    assert [read_row(*row).text for row in rows(folder, "texts")] == ["one", "two"]


def test_dataset_info_is_inspected_without_a_model(folder, capsys):
    assert mvp(f"data inspect {folder}/dataset_info.json:renamed --json") == 0
    facts = printed_json(capsys)
    assert facts["sources"][0] | {"rows": 2, "good": 1} == facts["sources"][0]
    assert facts["bad"]["by_reason"] == {"label_false": 1}


@pytest.mark.parametrize(
    "path, words",
    [
        ("dataset_info.json", "one of the datasets in it: alpaca, renamed"),
        ("dataset_info.json:alpacca", "one of the datasets in it: alpaca"),
        ("dataset_info.json:hub", "Only local files are read"),
        ("dataset_info.json:sampled", "remove num_samples"),
        (
            "dataset_info.json:tagged",
            "tags.user_tag='customer' is not supported, only user or human",
        ),
        ("none/dataset_info.json", "nothing at"),
    ],
)
def test_dataset_info_unsupported_entry_is_a_user_error(folder, path, words):
    with user_error(words):
        made(folder / path, tokenizer("zephyr"))


def test_folder_with_a_dataset_info_of_one_dataset_is_read_and_of_several_names_them(
    folder, tmp_path, capsys
):
    assert mvp(f"data inspect {folder}") == 2
    assert "is LLaMA-Factory's: write" in (error := capsys.readouterr().err)
    assert "dataset_info.json:NAME with one of the datasets in it: alpaca, renamed" in error
    info = {
        "one": {"file_name": "b.jsonl", "columns": INFO["renamed"]["columns"]},
        "far": {"hf_hub_url": "a/b"},
    }
    write_json(tmp_path / "dataset_info.json", info)
    write(tmp_path / "b.jsonl", [{"q": "q", "r": "a", "s": "s", "good": True}])
    assert mvp(f"data inspect {tmp_path} --json") == 0
    facts = printed_json(capsys)
    assert (facts["sources"][0]["name"], facts["sources"][0]["good"]) == ("one", 1)
