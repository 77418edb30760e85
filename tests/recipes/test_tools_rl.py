"""The recipe tools_rl: its search, the limits of its programs, and both engines for two steps on a CPU."""

import json
import time
from pathlib import Path

import pytest
import torch
import transformers as hf
from conftest import ROOT, is_gone, mvp, read_metrics, wait_until
from run_files import json_lines
from templates.tiny import tokenizer
from tiny_vlm import TEXT, write

from mvp_engine.hf.model.config_source import tool_schema
from mvp_engine.imports import import_file
from mvp_engine.kit.rl.episodes import Episodes
from mvp_engine.kit.rl.rollout_log import read_rollouts
from mvp_engine.runs import list_runs

RECIPE = ROOT / "recipes" / "tools_rl"
index = import_file(RECIPE / "index.py")
sandbox = import_file(RECIPE / "sandbox.py")
answers = import_file(RECIPE / "answers.py")
DOCUMENTS = [
    {"title": "Oslo", "text": "Oslo is the capital of Norway."},
    {"title": "Bergen", "text": "Bergen is a rainy city in Norway. " + "Rain. " * 1000},
    {"title": "Rain", "text": "Water that falls from clouds."},
]


@pytest.fixture
def documents(tmp_path):
    return write(tmp_path / "documents.jsonl", DOCUMENTS)


def test_search_ranks_documents_and_takes_any_query(documents, tmp_path):
    index.build(tmp_path, documents)
    search = index.Index(tmp_path).search
    assert search("capitals of norway", 1) == "Oslo\nOslo is the capital of Norway."
    titles = [text.partition("\n")[0] for text in search("clouds, rain", 3).split("\n\n")]
    assert titles == ["Rain", "Bergen"]
    assert len(search("bergen", 1)) < 1600
    assert search("zebra", 3) == "nothing found"
    assert search("?!", 3) == "error: the query has no words"
    for query in ('"', "NEAR(", "title:x AND", "a* OR", "'; DROP TABLE documents; --"):
        assert isinstance(search(query, 3), str)
    assert "Oslo" in search("oslo", 1)


def test_search_document_that_is_none_is_named_with_its_line(documents, tmp_path):
    documents.write_text(documents.read_text() + '{"title": "no text"}\n')
    with pytest.raises(ValueError, match=r"documents.jsonl:4: wanted a JSON object with title and"):
        index.build(tmp_path, documents)


def program(code, seconds=5.0):
    return sandbox.run(code, seconds=seconds, memory_mib=512)


@pytest.mark.parametrize(
    "code, end",
    [
        ("print(6 * 7)", "42"),
        ("1 / 0", "ZeroDivisionError: division by zero\nerror: exit code 1"),
        ("x = bytearray(2**30)", "MemoryError\nerror: exit code 1"),
        ("import os; os.kill(os.getpid(), 11)", "error: SIGSEGV"),
        ("open('f', 'wb').write(b'x' * 2**21)", "File too large\nerror: exit code 1"),
        ("for _ in range(2**10): print('x' * 2**20)", "x\nerror: exit code 1"),
        ("print(input())", "EOFError: EOF when reading a line\nerror: exit code 1"),
        ("[open(f'{i}', 'w') for i in range(99)]", "error: exit code 1"),
        ("pass", "(no output)"),
        ("print('\\ud800')", "error: exit code 1"),
    ],
)
def test_program_output_and_limits(code, end):
    begin = time.monotonic()
    text = program(code, 30.0)
    assert end in text[-100:]
    assert len(text) < 2100
    assert time.monotonic() - begin < 20


def test_program_that_runs_too_long_ends_with_its_processes(tmp_path):
    children = (
        "import os, time; os.fork() or os.setsid(); print(os.getpid(), flush=True); time.sleep(600)"
    )
    text = program(children, 2.0)
    assert text.endswith("error: no end after 2 s")
    pids = list(map(int, text.splitlines()[:-1]))
    assert len(pids) == 2
    wait_until(lambda: all(map(is_gone, pids)))


def test_program_has_a_folder_that_is_deleted_and_no_keys(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    folder = Path(program("import os; open('f', 'w'); print(os.getcwd())"))
    assert not folder.exists()
    assert "secret" not in program("import os; print(dict(os.environ))")


def test_program_reaches_no_network_where_the_kernel_allows_namespaces():
    if not sandbox.has_no_network():
        pytest.skip("no namespaces for this user")
    code = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=9)"
    assert "Network is unreachable" in program(code)


def test_answer_is_the_line_after_the_last_mark():
    is_right = answers.is_right
    assert is_right("Answer: 3\nno, Answer: $1,042.00.", "so it is\n#### 1042")
    assert is_right("Answer: the  Oslo!\nbye", "oslo")
    assert not is_right("Oslo", "Oslo")
    assert not is_right("Answer: Oslo or Bergen", "Oslo")
    assert not is_right("Answer:", "Oslo")


def test_tool_that_is_a_method_is_declared_without_self():
    engine = import_file(RECIPE / "code_engine.py").CodeEngine
    function = tool_schema(engine.python)["function"]
    assert function["name"] == "python"
    assert list(function["parameters"]["properties"]) == ["code"]


CALLS = {
    "search": {"name": "search", "arguments": {"query": "capital of Norway"}},
    "code": {"name": "python", "arguments": {"code": "print('Oslo')"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("config", CALLS)
def test_engine_with_a_tool_trains_for_two_steps(config, documents, tmp_path, monkeypatch):
    """A tiny random policy calls nothing: its first answers are replaced by a call, as they are decoded."""
    words = tokenizer("qwen3")
    torch.manual_seed(0)
    hf.Qwen3ForCausalLM(hf.Qwen3Config(**TEXT)).save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "model")
    questions = [{"question": f"Capital {i}?", "answer": "Oslo"} for i in range(8)]
    file = write(tmp_path / "questions.jsonl", questions)
    call = f"<tool_call>{json.dumps(CALLS[config])}</tool_call>"
    answer = Episodes.answer

    def with_call(self, sample):
        found = answer(self, sample)
        text = call if sum(found.tokens) % 2 else "Answer: Oslo"
        return type(found)(text, *list(vars(found).values())[1:])

    monkeypatch.setattr(Episodes, "answer", with_call)
    options = [f"output_dir={tmp_path}", f"model.path={tmp_path}/model", "export_link=null"]
    source = "problems" if config == "code" else "questions"
    options += [
        f"data.sources.{source}.path={file}",
        f"data.sources.test={{path: {file}, split: eval}}",
    ]
    options += "rl.prompts_per_step=4 rl.num_generations=2 rl.updates=1 train.max_steps=2".split()
    options += "generation.max_new_tokens=4 generation.max_turns=3 data.pack_tokens=6000".split()
    options += "cpu_threads=1 train.precision=fp32 data.num_workers=0 reward.workers=4".split()
    options += "eval.steps=null log.backends=[jsonl] log.interval=1 reward.max_errors=0".split()
    options += [f"data.cache={tmp_path}/cache", "lora.rank=4", "checkpoint.best_metric=null"]
    options += [f"search.documents={documents}"] if config == "search" else []
    assert mvp(f"train {RECIPE}/configs/{config}.yaml", *options) == 0
    records = read_metrics(tmp_path)
    assert [record["step"] for record in records] == [1, 2]
    assert all(record["reward_errors"] == 0 for record in records)
    assert max(record["turns"] for record in records) > 1
    assert max(record["reward_right"] for record in records) > 0
    assert "tool_wait_s" in json_lines(list_runs(tmp_path)[-1].dir / "metrics.jsonl")[0]["perf"]
    rollouts = json.dumps(list(read_rollouts(list_runs(tmp_path)[-1].dir / "rollouts.jsonl")))
    assert "Oslo is the capital of Norway." in rollouts or config == "code"
    assert "<tool_response>" in rollouts
