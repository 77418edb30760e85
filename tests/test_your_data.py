"""docs/your_data.md, run word by word: from rows with images, some of them bad, to an exported model that generates."""

import json
import re
import shlex
import shutil

import pytest
from conftest import ROOT, mvp
from PIL import Image

from mvp_engine.cli import main
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.runs import list_runs

PAGE = (ROOT / "docs" / "your_data.md").read_text()
SMALL = "train.max_steps=3 eval.steps=3 data.num_workers=0 log.backends=[jsonl]".split()
COLOURS = ["red", "green", "blue"]


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def run(words, *more):
    assert words[0] == "mvp"
    return main([*words[1:], *more])


@pytest.fixture
def folder(workspace):
    """Images, rows as on the page, and a model: the demo's, after one step."""
    (workspace / "shapes" / "drawings").mkdir(parents=True)
    row = json.loads(blocks("json")[0])
    rows = []
    for i in range(40):
        Image.new("RGB", (24 + i % 8, 28), COLOURS[i % 3]).save(
            workspace / "shapes" / "drawings" / f"{i:04d}.png"
        )
        row["messages"][0]["content"][0]["image"] = f"drawings/{i:04d}.png"
        row["messages"][1]["content"] = COLOURS[i % 3]
        rows.append(json.loads(json.dumps(row)))
    (workspace / "shapes" / "held_out.jsonl").write_text(
        "".join(json.dumps(one) + "\n" for one in rows[30:])
    )
    others = [json.loads(line) for line in blocks("json")[1].splitlines()]
    rows = rows[:30] + others
    rows[7]["messages"][0]["content"][0]["image"] = "drawings/9999.png"
    rows[12]["messages"][1]["content"] = 7
    (workspace / "shapes" / "train.jsonl").write_text(
        "".join(json.dumps(one) + "\n" for one in rows)
    )
    digits = "digits.drawings=1 digits.count=60 train.max_steps=1 eval.steps=null export_link=model".split()
    assert mvp(f"train {ROOT}/recipes/digits_vlm/configs/train.yaml", *SMALL, *digits) == 0
    # A copy in place of the link into the demo's run.
    shutil.copytree(workspace / "model", workspace / "folder")
    (workspace / "model").unlink()
    (workspace / "folder").rename(workspace / "model")
    shutil.rmtree(workspace / "outputs")
    return workspace


@pytest.mark.slow
def test_your_data_page_commands_give_the_outputs_it_shows(folder, capsys):
    commands = [
        shlex.split(line, comments=True) for block in blocks("bash") for line in block.splitlines()
    ]
    inspect, decode, check, train, evaluate, report, chat, ask = commands
    capsys.readouterr()
    assert run(inspect) == 0
    assert (
        "wrong_type train.jsonl:13: messages[1].content is int, wanted a string or a list"
        in _printed(capsys)
    )
    assert run(decode) == 0
    assert "rows cannot be trained on: 1 missing_file, 1 wrong_type" in _printed(capsys)
    (config,) = blocks("yaml")
    file = folder / "shapes" / "train.yaml"
    file.write_text(config.replace("warmup:", "warm_up:"))
    assert run(check, *SMALL) == EXIT_USER_ERROR
    expected = r"train.yaml:\d+: unknown key 'optim.warm_up'. Did you mean 'optim.warmup'"
    assert re.search(expected, _printed(capsys))
    file.write_text(config)
    assert run(check, *SMALL) == EXIT_USER_ERROR  # two of 35 rows are more than 1 %
    assert "missing_file train.jsonl:8: " in _printed(capsys)
    allowed = [*SMALL, "data.max_bad_rows=0.1", "optim.lr=1e-4"]
    assert run(check, *allowed) == 0
    assert "ready to train" in _printed(capsys)
    assert not (folder / "outputs").exists()
    assert run(train, *allowed) == 0
    assert run(evaluate, *allowed) == 0
    (trained,) = list_runs(folder / "outputs")
    assert [record["step"] for record in trained.records("eval") if "exact_held_out" in record] == [
        3
    ]
    (folder / "shapes" / "engine.py").write_text(blocks("python")[0])
    file.write_text(config.replace("engine: mvp_engine.kit:MLLMEngine\n", ""))
    assert run(report, *allowed) == 0
    page = (trained.dir / "report.html").read_text()
    assert "What it sees" in page
    assert page.count("data:image/png") >= 10
    assert "first_letter_held_out" in page
    capsys.readouterr()
    assert run(chat, "--max-new-tokens", "4") == 0
    assert capsys.readouterr().out.strip()
    assert ask[:3] == ["python", "recipes/digits_vlm/ask.py", "outputs/shapes_model"]
    assert (folder / ask[2] / "model.safetensors").is_file()
    script = {}
    exec((ROOT / ask[1]).read_text(), script)
    assert isinstance(script["ask"](ask[2], [([ask[4]], ask[3])])[0], str)


def _printed(capsys):
    output = capsys.readouterr()
    return " ".join((output.out + output.err).split())
