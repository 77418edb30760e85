"""Benchmark scripts: counts of FLOPs and tokens, comparisons on equal data, tables that match their results."""

import json
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import CAMPAIGN, ROOT
from run_files import json_lines, read_json
from torch.nn.functional import scaled_dot_product_attention

from mvp_engine.errors import EXIT_INTERRUPTED
from mvp_engine.imports import import_file
from mvp_engine.kit.data.read import decoders


def script(name):
    """The module of a benchmark script."""
    return import_file(ROOT / "benchmarks" / f"{name}.py")


HARDWARE = script("hardware/table")
SCRIPT = ROOT / "benchmarks" / "packed_attention.py"


@pytest.mark.campaign
def test_hardware_cells_are_what_is_estimated(campaign_size):
    cells = read_json(HARDWARE.RESULTS)["cells"]
    for cell in cells[: campaign_size(1, len(cells))]:
        assert HARDWARE.estimate_cell(cell["model"], cell["gpu"], cell["gpus"]) == cell


def test_plan_table_of_the_docs_is_that_of_the_results_and_memory_is_predicted_to_a_tenth():
    plan = script("plan")
    rows = plan.comparisons()
    assert f"{plan.MARKS[0]}{plan.table(rows)}{plan.MARKS[1]}" in plan.PAGE.read_text(), (
        "run python benchmarks/plan.py"
    )
    assert len(rows) > 20
    for row in rows:
        assert row["predicted_gib"] == pytest.approx(row["gib"], rel=0.1), row["training"]


@pytest.fixture
def bench(monkeypatch):
    module = script("packed_attention")
    monkeypatch.setitem(sys.modules, "packed_attention", module)
    monkeypatch.setattr(module, "timed", lambda *_, **__: 2.0)
    return module


def across_boundaries(bench):
    def attend(*qkv):
        q, k, v = (x.transpose(0, 1)[None] for x in qkv)
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(
            0, 1
        )

    return lambda case: bench._with_autograd(case, attend)


def test_packed_attention_dry_run_prints_each_mix_with_its_flops(bench, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--dry"])
    bench.main()
    output = capsys.readouterr().out
    assert [line.split(" | ")[0].strip("| ") for line in output.strip().splitlines()[2:]] == [
        m.name for m in bench.MIXES
    ]
    assert "| 8 x 4096 | 8 | 32768 | 4096 | 0.5499 | 1.3747 |" in output
    # Causal pairs of sequences with 9 tokens and 1.
    pairs = sum(key <= query for query in range(9) for key in range(9)) + 1
    assert bench.Mix("", (9, 1)).forward_flops == pairs * 16 * 128 * 4


def test_context_share_shares_have_the_pairs_of_the_pack_and_less_keys_than_two_packs(
    monkeypatch, capsys
):
    share = script("context_share")
    monkeypatch.setattr(sys, "argv", "context_share.py --dry --context 4".split())
    share.main()
    assert len(capsys.readouterr().out.strip().splitlines()) == 2 + 4 * len(share.MIXES)
    lengths, cpu = [300, 40, 7], share.torch.device("cpu")
    for window in (None, 16):
        shares = [share.share_of(rank, 4, lengths, window, cpu) for rank in range(4)]
        pairs = sum(min(at + 1, window or at + 1) for length in lengths for at in range(length))
        assert sum(one.pairs for one in shares) == pairs
        assert all(len(one.keys.rows) <= 2 * sum(lengths) for one in shares)


def test_packed_attention_correct_kernels_get_timings_and_wrong_ones_a_reason(bench, monkeypatch):
    case = bench.Case.of(bench.Mix("tiny", (9, 1, 5)), "cpu")
    monkeypatch.setitem(bench.KERNELS, "leaky", across_boundaries(bench))
    monkeypatch.setitem(bench.KERNELS, "broken", lambda case: 1 / 0)
    names = ["as chosen: FlashAttention 4 on Hopper", "SDPA per sequence", "leaky", "broken"]
    ours, fallback, leaky, broken = rows = [bench.measure(name, case, 2) for name in names]
    for row in (ours, fallback):
        assert max(row["error"].values()) < 2e-2
        assert row["forward_tflops"] == pytest.approx(case.mix.forward_flops / 2e-3 / 1e12)
        assert row["backward_tflops"] == pytest.approx(2.5 * row["forward_tflops"])
    assert "wrong by out" in leaky["why"]
    assert "ZeroDivisionError" in broken["why"]
    assert "forward_ms" not in leaky
    assert bench.measure("cuDNN SDPA, dense (ceiling)", case, 2) is None  # lengths differ
    assert "time was up" in bench.measure("cuDNN, ragged", case, 2, late=True)["why"]
    assert len({line.count("|") for line in bench.table(rows).splitlines()}) == 1


@pytest.fixture
def sft(monkeypatch):
    """sft(NAME): a module of the folder benchmarks/sft."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "sft"))
    return lambda name: script(f"sft/{name}")


@pytest.fixture
def compare(sft):
    return sft("compare")


def stored(name):
    return read_json(ROOT / "benchmarks" / "results" / f"{name}.json")


def test_sft_tables_in_docs_equal_the_stored_results(compare, tmp_path):
    docs = (ROOT / "docs" / "performance.md").read_text()
    page = tmp_path / "page.md"
    page.write_text(docs.replace("| ours |", "| theirs |"))
    for name in ("text_sft", "vlm_sft"):
        compare.into_page(name, stored(name), page)
    assert page.read_text() == docs
    readme = (ROOT / "README.md").read_text()
    for name, key, value in (
        ("text_sft", "mix", "mix"),
        ("recipes", "work", "text_1.7b_fp8"),
        ("vlm_sft", "mix", "images"),
    ):
        rows = stored(name)["rows"]
        mine = next(row for row in rows if (row["side"], row[key]) == ("ours", value))
        assert f"| {mine['tokens_per_s']:,.0f} | {100 * mine['mfu']:.1f} % |" in readme
    assert len(compare.rows("mix", 1)) == 32
    assert [len(row.ids) for row in compare.rows("full", 1)] == [4096] * 8


def test_sft_side_that_ends_at_its_limit_counts_the_steps_it_had(compare, tmp_path, monkeypatch):
    perf = {"step_s": 2.0, "data_wait": 0.1, "memory_gib": 3.0}
    totals = {"tokens": 100, "flops": 1e9}
    records = [
        (9.0, {"step": step, "loss": 1.0, "perf": perf, "totals": totals}) for step in (1, 5, 10)
    ]
    args = Namespace(shape="tiny", steps=20, longest=64, packs=2, keys=[], limit=60)
    for seen, code in ((records, None), (records[:2], None), (records, 1)):
        ended = Namespace(records=seen, code=code, output="")
        monkeypatch.setattr(compare, "watch", lambda *_, ended=ended, **__: ended)
        row = compare.measure(args, "ours", "mix")
        if (len(seen), code) == (3, None):
            assert (row["steps"], row["tokens_per_s"], row["data_wait"]) == (
                5,
                10.0,
                pytest.approx(0.1),
            )
        else:
            assert row["why"] == f"ended with {code or 124}"


@pytest.mark.slow
def test_sft_rows_with_images_are_equal_packed_and_padded(sft):
    data, trainer = sft("data"), sft("trainer")
    chosen = data.rows("images", 1)[:12]
    assert {len(row.grids) for row in chosen} == {0, 1, 2, 3, 4}
    packed, padded = (
        data.packed(chosen, "tiny_vl", data.Pixels()),
        trainer.padded(chosen, data.Pixels()),
    )
    real = padded["attention_mask"].bool()
    assert packed.input_ids.equal(padded["input_ids"][real])
    assert packed.media["pixel_values"].values.equal(padded["pixel_values"])
    with_loss = padded["labels"][:, 1:]  # transformers shifts labels itself
    assert packed.labels[packed.labels >= 0].equal(with_loss[with_loss >= 0])


@CAMPAIGN
def test_sft_rows_from_jpeg_files_equal_the_rows_in_memory(compare, tmp_path, monkeypatch, train):
    pytest.importorskip("sklearn")
    engine = script("sft/engine")
    data = sys.modules[engine.rows.__module__]
    monkeypatch.setitem(data.PER_STEP, "images", 6)
    keys = [
        "sft.source=files",
        "sft.mix=images",
        "sft.shape=tiny_vl",
        f"sft.folder={tmp_path / 'files'}",
    ]
    keys += "data.micro_batch_size=1 data.global_batch_size=2 data.num_workers=0 model.compile=null".split()
    keys += ["train.precision=fp32", "train.max_steps=2", "log.interval=1"]
    assert train(*keys, config=ROOT / "benchmarks" / "sft" / "train.yaml") == 0

    # Two steps are trained, two more are read.
    expected, found = (
        data.rows("images", 4),
        [],
    )
    for pack in engine.data_kit("tiny_vl", 4, 2, tmp_path / "files", 0).loader(global_batch_size=2):
        found += [pack.select([i]) for i in range(pack.num_sequences)]
    # One pack holds a quarter of a step's rows.
    four = engine.data_kit("tiny_vl", 4, 4, tmp_path / "files", 0)
    assert 4 * four.settings.pack_tokens == pytest.approx(
        sum(len(row.ids) for row in expected) / 4, rel=0.02
    )
    found.sort(key=lambda one: int(one.sequence_fields["sample"]))
    assert len(found) == len(expected)
    for got, row in zip(found, expected, strict=True):
        wanted = data.packed([row], "tiny_vl", data.Pixels())
        # The last token ends the assistant turn.
        assert got.input_ids[:-1].equal(wanted.input_ids[:-1])
        assert got.labels[:-2].equal(wanted.labels[:-2])
        assert got.num_loss_tokens == wanted.num_loss_tokens
        assert got.position_ids.equal(wanted.position_ids)
        grids = [
            one.media["pixel_values"].fields["image_grid_thw"].tolist() for one in (got, wanted)
        ]
        assert grids[0] == grids[1]
        if row.grids:
            # A photo, not one colour.
            assert 0.02 < got.media["pixel_values"].values.float().var() < 2

    (log,) = tmp_path.glob("*/metrics.jsonl")
    records = json_lines(log)
    monkeypatch.setattr(compare, "INTERVAL", 1)
    figures = compare.figures(records)
    assert figures["tokens"] == records[1]["totals"]["tokens"]
    assert figures["data_wait"] == pytest.approx(records[1]["perf"]["data_wait"])
    assert 0 < figures["tokens"] < sum(len(row.ids) for row in expected)


def test_loss_curves_table_compares_the_steps_that_both_sides_have(tmp_path, sft):
    curves = sft("curves")
    losses = {
        "ours": [4.0, 3.0, 2.0, 1.0],
        "ours, 4 packs": [4.0, 3.0, 2.0, 1.001],
        "Trainer": [4.0, 3.5],
    }
    code = (
        "import json, sys; json.dump({'losses': [4.0, 3.5]}, open(sys.argv[1], 'w')); sys.exit(3)"
    )
    job = curves.Job(
        "text", "Trainer", [sys.executable, "-c", code, str(tmp_path / "trainer.json")], tmp_path
    )
    rows = [{"kind": "text", "side": side, "losses": losses[side]} for side in curves.PACKS]
    curves.run_all([job], 1, 60, rows.append)
    assert rows[-1] == {
        "kind": "text",
        "side": "Trainer",
        "losses": losses["Trainer"],
        "why": "ended with 3",
    }
    *_, line = curves.table({"steps": 4, "rows": rows}).splitlines()
    shown = "4.0000 / 3.0000 / 1.0000 | 4.0000 / 3.5000 / - (ended with 3) | 0.5, 0.25 (2 steps) | 0.001, 0.00025 |"
    assert line == f"| text | {shown}"


def test_trl_sequence_lengths_are_read_from_packed_labels():
    side = script("sft/trl_side")
    labels = torch.tensor([[-100, 1, 2, -100, 3, 4], [5, -100, 6, -100, -100, -100]])
    tokens = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])  # the last three are padding
    assert side.lengths(labels, tokens) == [3, 3, 1, 2]
    assert side.lengths(labels[:1], None) == [3, 3]


def test_trl_token_counts_equal_what_it_trained_on(compare, sft, tmp_path, monkeypatch):
    pytest.importorskip("trl")
    data, trainer = sft("data"), sft("trainer")
    make, made = trainer.trl_trainer, []

    def run_in_process(command, check):
        how = json.loads(command[-1])
        trainer.run(**{**how, "out": Path(how["out"])})

    monkeypatch.setattr(trainer, "trl_trainer", lambda *how: made.append(make(*how)) or made[-1])
    monkeypatch.setattr(compare.subprocess, "run", run_in_process)
    monkeypatch.setattr(compare, "INTERVAL", 1)
    monkeypatch.setitem(data.PER_STEP, "mix", 8)
    args = Namespace(shape="tiny", steps=2, batch=2, longest=512, checkpointing=False)
    whole = Counter(len(row.ids) for row in data.rows("mix", 2, 512))
    for side, packing in compare.TRL.items():
        found = compare.theirs(args, "mix", tmp_path, side)
        steps, own = (
            made[-1].sequences(),
            [log["num_tokens"] for log in made[-1].state.log_history[:2]],
        )
        assert own == [sum(steps[0]), sum(steps[0]) + sum(steps[1])]
        assert found["tokens"] == sum(steps[1]) > 1000
        # Bfd keeps rows whole, the other packing cuts them.
        assert (Counter(steps[0] + steps[1]) <= whole) == (packing == "bfd")


def test_loader_benchmark_counts_the_same_tokens_on_both_sides(tmp_path):
    pytest.importorskip("datasets")
    bench = script("loader")
    ours, padded = bench.compare(tmp_path, 24, rounds=1, workers=0)
    assert ours["rounds"][0]["useful"] == padded["rounds"][0]["useful"] > 24 * 20
    assert ours["empty"] < padded["empty"]
    assert padded["rounds"][0]["slots"] > padded["rounds"][0]["useful"]


@CAMPAIGN
def test_generation_benchmark_compares_equal_tokens(tmp_path):
    bench = script("generation")
    words = "--shape tiny --prompts 3 --new 4 --held 20 --packs 1 --steps 1".split()
    bench.main([*words, "--out", str(tmp_path / "out.json")])
    result = read_json(tmp_path / "out.json")
    assert [row.get("same_tokens") for row in result["rows"]] == [1.0, 1.0, None]
    assert result["evaluation"]["answers"] == 2
    page = tmp_path / "page.md"
    page.write_text("<!-- generation -->\nold\n<!-- /generation -->\n")
    bench.into_page(result, page)
    assert "| KV cache |" in page.read_text()
    assert "old" not in page.read_text()


def test_generation_table_in_docs_equals_the_stored_results_which_reach_their_targets():
    bench = script("generation")
    result = read_json(ROOT / "benchmarks" / "results" / "generation.json")
    assert bench.table(result) in (ROOT / "docs" / "performance.md").read_text()
    seconds = {row["side"]: row["seconds"] for row in result["rows"]}
    assert seconds["no cache"] > 10 * seconds["KV cache"]
    assert result["evaluation"]["share"] < 0.05


@pytest.mark.slow
@CAMPAIGN
def test_measure_rows_after_changes_and_signals_opens_only_what_is_missing(
    tmp_path, monkeypatch, campaign_size
):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(decoders, "open_image", decoders.open_image)  # the script replaces it
    bench = script("measure_rows")
    bench.TRAINED_PACKS = campaign_size(1, 20)
    count = campaign_size(400, 50_000)
    delay = campaign_size(2, 50) / 1e3
    found = bench.compare(
        tmp_path, count, delay, workers=1, stop_after=campaign_size(70, count // 4)
    )
    assert [one["opened"] for one in found[:5]] == [count, 0, 100, 1, 0]
    assert found[5]["opened"] == found[5]["images"]  # in training
    stopped = found[6:9]
    assert [one["exit_code"] for one in stopped] == [EXIT_INTERRUPTED, EXIT_INTERRUPTED, -9]
    assert not any(one["orphans"] for one in stopped)
    assert found[9]["exit_code"] == 0


def test_hardware_table_of_the_docs_is_that_of_its_data():
    cells = read_json(HARDWARE.RESULTS)["cells"]
    assert HARDWARE.table(cells) in (ROOT / "docs" / "hardware.md").read_text()


@CAMPAIGN
def test_activation_offload_benchmark_finds_equal_results(tmp_path):
    out = tmp_path / "found.json"
    words = f"benchmarks/activation_offload.py --tiny --layers 3 --steps 1 --out {out}".split()
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, timeout=120)
    rows = {row["mode"]: row for row in read_json(out)["rows"]}
    assert rows["offload"]["equal"]
    assert rows["offload"]["host_gib"] > rows["full"]["host_gib"] == 0
