"""benchmarks/recipes.py: times and throughput of a log, and a process that takes too long."""

import sys
import time
from argparse import Namespace
from dataclasses import replace

import pytest
from conftest import ROOT
from run_files import read_json

from mvp_engine.imports import import_file

BENCH = import_file(ROOT / "benchmarks" / "recipes.py")
session_members = import_file(ROOT / "benchmarks" / "watch.py").session_members


def record(step, step_s):
    perf = {"step_s": step_s, "tokens_per_s": 100 / step_s, "data_wait": 0.1, "memory_gib": 3.0}
    return {"split": "train", "step": step, "loss": 2.0, "perf": perf}


def test_figures_count_the_second_half_and_find_full_speed():
    seen = [
        (20.0, record(1, 9.0)),
        (40.0, record(5, 4.0)),
        (50.0, record(10, 1.05)),
        (55.0, record(15, 1.0)),
    ]
    seen += [(60.0, record(20, 1.0))]
    found = BENCH.figures(BENCH.Watched(seen, 61.0, 0, ""))
    assert (found["first_step_s"], found["full_speed_s"], found["steps"]) == (20.0, 40.0, 20)
    assert found["tokens_per_s"] == pytest.approx(100)
    assert found["mfu"] is None
    row = {"work": "text_0.6b", "side": "ours", **found}
    assert (
        "| text_0.6b | ours | 100 | - | - | 1.000 s | 10.0 % | - | 3 GiB | 20 s | 40 s |"
        in BENCH.table({"rows": [row]})
    )
    assert "| 50.0 % | 45.0 % |" in BENCH.table({"rows": [row | {"mfu": 0.5}]})
    assert found["tokens_per_step"] == pytest.approx(100)
    assert found["counted_s"] == [50.0, 60.0]
    failed = BENCH.figures(BENCH.Watched(seen, 61.0, 1, "out of memory"))
    assert (failed["why"], failed["output"]) == ("ended with 1, after step 20", "out of memory")
    assert [one["step"] for one in failed["intervals"]] == [5, 10, 15, 20]  # what it had
    late = BENCH.figures(BENCH.Watched([], 25.0, None, "compiling"))
    assert late["why"] == "no step after 25 s"
    rows = [{"work": "text_0.6b", "side": "ours", **one} for one in (failed, late)]
    assert len({line.count("|") for line in BENCH.table({"rows": rows}).splitlines()}) == 1


def test_side_that_fails_is_a_row_and_the_others_are_measured(tmp_path, monkeypatch):
    def ours(*_):
        raise OSError("no space left on device\nmore")

    out = tmp_path / "new" / "out.json"
    seen = []

    def theirs(side, *_):
        seen.append(len(read_json(out)["rows"]))  # what came before is written
        return {"why": f"of {side}"}

    for name, value in {"ours": ours, "theirs": theirs, "compile_bytecode": print}.items():
        monkeypatch.setattr(BENCH, name, value)
    monkeypatch.setattr(
        BENCH, "prepare", lambda name, args: (BENCH.WORKS[name], tmp_path, tmp_path)
    )
    BENCH.main(["--only", "text_0.6b", "lora_8b", "--peers", "TRL + Liger", "--out", str(out)])
    rows = read_json(out)["rows"]
    assert [row["why"] for row in rows] == [
        "OSError: no space left on device",
        "of TRL + Liger",
    ] * 2
    assert seen == [1, 3]


def test_rows_are_made_once_for_each_count(tmp_path):
    work = BENCH.WORKS["text_0.6b"]
    file = BENCH.make_rows(work, 3, tmp_path)
    before = file.stat().st_mtime_ns
    assert len(file.read_text().splitlines()) == 3
    assert BENCH.make_rows(work, 3, tmp_path) == file
    assert file.stat().st_mtime_ns == before
    assert len(BENCH.make_rows(work, 4, tmp_path).read_text().splitlines()) == 4


@pytest.mark.slow
def test_watch_ends_a_process_and_its_children_at_the_limit(tmp_path):
    code = "set -m; sleep 600 & echo step 1 of $$; sleep 600"  # -m: a child in a process group of its own
    seen = BENCH.watch(["bash", "-c", code], tmp_path, 3.0, pattern=BENCH.FIRST_STEP)
    assert seen.code is None
    assert seen.first is not None
    assert seen.seconds < 60
    assert session_members(int(seen.output.split()[-1])) == []


@pytest.mark.parametrize("name", list(BENCH.WORKS))
def test_works_name_shipped_configs_and_shapes(name):
    work = BENCH.WORKS[name]
    assert (ROOT / "recipes" / work.config).is_file()
    assert BENCH.shape(work.shape)["model_type"] == BENCH.shape(work.tiny)["model_type"]


def test_peer_that_is_not_installed_is_a_row_that_says_so(tmp_path):
    peer = replace(BENCH.PEERS["Unsloth"], packages=("no-such-trainer",))
    found = BENCH.train_peer(peer, {"lora": 16}, sys.executable, {}, 60.0, tmp_path)
    assert found == {"why": "not installed: no-such-trainer"}
    row = {"work": "lora_8b", "side": "Unsloth", **found}
    assert "| lora_8b | Unsloth | not installed: no-such-trainer |" in BENCH.table({"rows": [row]})


def test_clock_of_peers_writes_after_each_step(tmp_path):
    clock = import_file(ROOT / "benchmarks" / "recipes_clock.py").Clock(
        str(tmp_path / "peer.json"), time.monotonic() - 100, "sdpa"
    )
    for step in (1, 2):
        history = [{"loss": 2.0 - one} for one in range(step)] + [{"train_runtime": 1}]
        clock.on_step_end(
            None, Namespace(num_input_tokens_seen=50 * step, log_history=history), None
        )
        found = read_json(tmp_path / "peer.json")
        assert (found["tokens"], found["losses"]) == ([50, 100][:step], [2.0, 1.0][:step])
        assert found["first_step_s"] == found["ends"][0] >= 100
        assert [len(found[name]) for name in ("ends", "losses")] == [step, step]
    assert {(ROOT / "benchmarks" / peer.script).is_file() for peer in BENCH.PEERS.values()} == {
        True
    }


def test_starts_table_lists_each_start_and_its_failures():
    times = [{"first_step_s": 14.04, "full_speed_s": 40.0}, {"why": "ended with 1"}]
    text = BENCH.starts_table({"starts": {"text_0.6b": {"cold": times}}})
    assert "| text_0.6b | cold | 14.0, - s | 40.0, - s |" in text
    assert BENCH.starts_table({"rows": []}) == ""


def test_table_of_shipped_configs_in_docs_equals_the_stored_results():
    page = (ROOT / "docs" / "performance.md").read_text()
    lines = page.partition("## The shipped configs")[2].partition("###")[0].splitlines()
    for row in read_json(ROOT / "benchmarks" / "results" / "recipes.json")["rows"]:
        if "mfu" not in row:
            continue
        speed = round(row["tokens_per_s"], -2 if row["tokens_per_s"] > 10_000 else -1)
        figures = f" | {speed:,.0f} | {100 * row['mfu']:.1f} % |"
        assert any(figures in line.replace("**", "") for line in lines), (
            row["work"],
            row["side"],
            figures,
        )
