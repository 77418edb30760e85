"""`mvp data inspect`: it shows what is trained on, with and without colours, and as JSON."""

import io
import json
import subprocess
import sys

import pytest
from conftest import mvp
from rich.console import Console
from run_files import printed_json
from templates.tiny import tokenizer
from tiny_vlm import chat, qwen3_vl, with_images, write

from mvp_engine.tools import inspect_rows
from mvp_engine.tools.inspect_page import show

KEYS = [
    "data",
    "model",
    "split",
    "missing",
    "decoded",
    "sources",
    "sample",
    "lengths",
    "loading",
    "plan",
    "overlong",
    "bad",
]
KEYS += ["rows"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("data")
    rows = [
        *with_images(made),
        chat("Hi", "long " * 200),
        {"prompt": "?", "chosen": "A", "rejected": "B"},
    ]
    rows[5], rows[6] = "{broken", {"question": "?"}
    write(made / "rows.jsonl", rows)
    cut_off = made / "4_0.png"
    cut_off.write_bytes(cut_off.read_bytes()[:100])
    qwen3_vl().save_pretrained(made / "model")
    return made


def inspect(capsys, words):
    assert mvp(f"data inspect {words} --json") == 0
    facts = printed_json(capsys)
    assert sorted(facts) == sorted(KEYS)
    return facts


@pytest.fixture(autouse=True)
def cache(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))


def printed(facts, width, colours=False):
    out = io.StringIO()
    show(
        facts,
        Console(
            file=out,
            width=width,
            force_terminal=colours,
            color_system="standard" if colours else None,
        ),
    )
    return out.getvalue()


def test_inspect_file_without_a_model_shows_formats_counts_and_bad_rows(folder, capsys):
    facts = inspect(capsys, f"{folder}/rows.jsonl --limit 2")
    assert facts["sources"][0] | {"name": ""} == {
        "name": "",
        "rows": 14,
        "good": 12,
        "bad": 2,
        "overlong": 0,
        "tokens": None,
        "share": None,
        "share_of": "rows",
    }
    assert facts["sample"]["formats"] == {"messages": 11, "bad": 2, "preference": 1}
    assert {one["where"]: one["reason"] for one in facts["bad"]["rows"]} == {
        "rows.jsonl:6": "bad_json",
        "rows.jsonl:7": "unknown_format",
    }
    assert "--model MODEL" in facts["missing"]
    assert facts["plan"] is None
    for width in (80, 120):
        text = printed(facts, width)
        assert max(map(len, text.splitlines())) <= width
        assert "assistant: «1 pictures.»" in text
        assert "user: [image]How many? 1" in text
        assert "give --model MODEL" in " ".join(text.split())


def test_inspect_file_with_a_model_shows_tokens_loss_and_packing(folder, capsys):
    words = f"{folder}/rows.jsonl --model {folder}/model --tokens 256"
    facts = inspect(capsys, words)
    processor = qwen3_vl()
    row = facts["rows"][1]
    (one,) = row["sequences"]
    assert (row["row"], row["where"], row["format"], one["side"]) == (
        1,
        "rows.jsonl:2",
        "messages",
        0,
    )
    learnt = [piece["text"] for piece in one["text"] if piece.get("learnt")]
    assert learnt == ["1 pictures.<|im_end|>"]
    assert one["learnt"] == len(processor.tokenizer(learnt[0]).input_ids)
    (medium,) = one["media"]
    assert (medium["kind"], medium["width"], medium["height"]) == ("image", 24, 16)
    text = "".join(piece.get("text", "") for piece in one["text"])
    assert one["tokens"] == len(processor.tokenizer(text).input_ids) + medium["tokens"]
    assert facts["overlong"] == {"fate": "drop", "rows": 1, "where": ["rows.jsonl:13"]}
    assert "1 row dropped: rows.jsonl:13; raise data.max_length" in printed(facts, 80)
    assert facts["bad"]["total"] == 2
    plan = facts["plan"]
    assert (plan["rows"], plan["steps"]) == (11, plan["packs"])
    assert plan["fill"] == pytest.approx(plan["tokens"] / plan["packs"] / 256, abs=1e-4)
    assert sum(one["rows"] for one in facts["lengths"]["histogram"]) == 11
    coloured, plain = printed(facts, 80, colours=True), printed(facts, 80)
    assert "\x1b[1;32m1 pictures.<|im_end|>\x1b[0m" in coloured
    assert "«1 pictures.<|im_end|>»" in plain
    assert "\x1b" not in plain
    decoded = inspect(capsys, f"{words} --decode")
    assert (decoded["bad"]["by_reason"]["corrupt"], decoded["sources"][0]["good"]) == (1, 10)


def test_inspect_prints_a_headline_and_one_example_per_reason(tmp_path, capsys):
    good = chat("Hi", "Hello")
    image = {**chat("<image>?", "A cat"), "images": ["nowhere.png"]}
    write(tmp_path / "rows.jsonl", [good, {"x": 1}, {"x": 2}, "{broken", image])
    text = printed(inspect(capsys, f"{tmp_path}/rows.jsonl"), 300)
    reasons = "2 unknown_format, 1 bad_json, 1 missing_file"
    assert (
        text.splitlines()[0]
        == f"{tmp_path}/rows.jsonl: 4 of 5 rows cannot be trained on: {reasons}"
    )
    examples = text.partition("one example of each reason")[2].partition("Rows as they")[0]
    assert [examples.count(f"rows.jsonl:{line}: ") for line in (2, 3, 4, 5)] == [1, 0, 1, 1]
    write(tmp_path / "good.jsonl", [good, good])
    text = printed(inspect(capsys, f"{tmp_path}/good.jsonl"), 160)
    assert text.startswith(f"{tmp_path}/good.jsonl: all 2 rows can be read")


def test_inspect_strict_exits_with_2_if_a_row_is_bad_or_dropped(folder, tmp_path, capsys):
    write(tmp_path / "rows.jsonl", [chat("Hi", "Hello"), chat("Hi", "long " * 99)])
    words = f"data inspect {tmp_path}/rows.jsonl --strict --json"
    assert mvp(words) == 0
    capsys.readouterr()
    assert mvp(f"{words} --model {folder}/model --tokens 64") == 2
    out = capsys.readouterr()
    assert json.loads(out.out)["overlong"]["rows"] == 1
    assert "--strict: 1 of 2 rows" in out.err
    assert mvp(f"data inspect {folder}/rows.jsonl --strict") == 2
    assert "--strict: 2 of 14 rows" in capsys.readouterr().err


def test_inspect_file_without_a_model_imports_no_torch(folder):
    code = f"""
import sys
from mvp_engine.cli import main
assert main(["data", "inspect", {str(folder / "rows.jsonl")!r}]) == 0
print({{"torch", "transformers"}} & set(sys.modules), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "set()")


def test_inspect_row_is_found_by_index_and_by_place(folder, capsys):
    words = f"{folder}/rows.jsonl --model {folder}/model"
    for row in ("5", "rows.jsonl:6"):
        (shown,) = inspect(capsys, f"{words} --row {row}")["rows"]
        assert (shown["row"], shown["bad"]["reason"], shown["sequences"]) == (5, "bad_json", [])
    assert mvp(f"data inspect {words} --row 99") == 2
    assert "the data has 14 rows" in capsys.readouterr().err
    assert mvp(f"data inspect {folder}/none.jsonl") == 2


RECIPE = """
from mvp_engine.config import Config
from mvp_engine.engine import Engine
from mvp_engine.kit import MLLMData

class MyConfig(Config):
    data: MLLMData

class MyEngine(Engine):
    config_class = MyConfig
"""
YAML = """
run_name: mine
model: {{path: {0}/words}}
data:
  global_batch_size: 2
  pack_tokens: 512
  pairs: true
  sources: [{{path: {0}/a.jsonl}}, {{path: {0}/b.jsonl, split: eval}}]
"""


def test_inspect_config_shows_its_sources_and_steps(tmp_path, capsys):
    tokenizer("zephyr").save_pretrained(tmp_path / "words")
    write(
        tmp_path / "a.jsonl",
        [{"prompt": f"Is it {i}?", "chosen": "Yes\x1b[2J", "rejected": "No"} for i in range(30)],
    )
    write(tmp_path / "b.jsonl", [{"text": "hello"}])
    (tmp_path / "engine.py").write_text(RECIPE)
    (tmp_path / "train.yaml").write_text(YAML.format(tmp_path))
    facts = inspect(capsys, f"{tmp_path}/train.yaml")
    assert [one["side"] for one in facts["rows"][0]["sequences"]] == [1, -1]
    assert facts["plan"]["packs_per_step"] == 2
    text = printed(facts, 80)
    assert "\x1b" not in text  # control characters of a row must not reach the terminal
    assert "«Yes\\x1b[2J" in text
    words = "--split eval data.pack_tokens=99"
    facts = inspect(capsys, f"{tmp_path}/train.yaml {words}")
    assert facts["plan"]["micro_batch_tokens"] == 99
    (tmp_path / "train.yaml").write_text(YAML.format(tmp_path).replace("model:", "# "))
    assert mvp(f"data inspect {tmp_path}/train.yaml") == 2
    assert "give --model MODEL" in capsys.readouterr().err
    kit = "    @classmethod\n    def data_kit(cls, config):\n        raise SystemExit(7)\n"
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "engine.py").write_text(RECIPE + kit)
    (tmp_path / "own" / "train.yaml").write_text(YAML.format(tmp_path))
    with pytest.raises(SystemExit, match="7"):
        mvp(f"data inspect {tmp_path}/own/train.yaml")


def test_inspect_stream_shows_its_first_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(inspect_rows, "SAMPLE", 6)
    tokenizer("zephyr").save_pretrained(tmp_path / "words")
    rows = [chat("Hi", f"Yes {i}") for i in range(9)]
    rows[2], rows[3] = "{broken", chat("Hi", "long " * 999)
    write(tmp_path / "a.jsonl", rows)
    (tmp_path / "engine.py").write_text(RECIPE)
    config = YAML.format(tmp_path).replace("a.jsonl}", "a.jsonl, stream: true}")
    (tmp_path / "train.yaml").write_text(config)
    facts = inspect(capsys, f"{tmp_path}/train.yaml")
    about = {"name": "a", "rows": 6, "good": 4, "bad": 1, "overlong": 1}
    assert {key: facts["sources"][0][key] for key in about} == about
    assert (facts["bad"]["rows"][0]["where"], facts["bad"]["by_reason"]) == (
        "a.jsonl:3",
        {"bad_json": 1},
    )
    assert [row["where"] for row in facts["rows"]] == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"]
    assert "only the first 6 rows" in " ".join(printed(facts, 80).split())
    (row,) = inspect(capsys, f"{tmp_path}/train.yaml --row a.jsonl:4")["rows"]
    assert row["bad"]["reason"] == "overlong"


def test_inspect_mixture_shows_shares_unused_and_misspelt_columns(tmp_path, capsys, logged):
    tokenizer("zephyr").save_pretrained(tmp_path / "words")
    write(tmp_path / "a.jsonl", [{"prompt": "Is it?", "reply": "Yes", "id": i} for i in range(30)])
    write(tmp_path / "b.jsonl", [{"text": "hello"}] * 10)
    (tmp_path / "engine.py").write_text(RECIPE)
    sources = (
        "[{path: A, weight: 3, columns: {reply: completion, pic: image}}, {path: B, weight: 1}]"
    )
    sources = sources.replace("A", f"{tmp_path}/a.jsonl").replace("B", f"{tmp_path}/b.jsonl")
    config = YAML.partition("  pairs")[0].format(tmp_path) + "  sources: "
    (tmp_path / "train.yaml").write_text(f"{config}{sources}\n")
    warnings = logged()
    facts = inspect(capsys, f"{tmp_path}/train.yaml")
    assert [source["share"] for source in facts["sources"]] == [0.75, 0.25]
    assert facts["sample"]["unused_columns"] == {"id": 30}
    text = printed(facts, 120)
    assert "75.0% of the rows of an epoch" in text
    assert "id 30: no reader uses these columns" in text
    assert warnings == ["a: columns names pic, but the first rows have only id, prompt, reply"]
    streams = sources.replace("weight", "stream: true, weight")
    (tmp_path / "train.yaml").write_text(f"{config}{streams}\n")
    facts = inspect(capsys, f"{tmp_path}/train.yaml")
    assert [source["share"] for source in facts["sources"]] == [0.75, 0.25]
