"""`mvp plan`: what it prints, which ranks it simulates, the memory of all ranks, and its model of the network."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import replace

import pytest
from conftest import CAMPAIGN, ROOT, mvp
from run_files import write_json
from test_even_shards import MODELS

from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.kit.plan.hardware import Network
from mvp_engine.kit.plan.planner import Question
from mvp_engine.kit.plan.record import Collective, find_differences, ranks_text
from mvp_engine.kit.plan.simulate import Simulation
from mvp_engine.model_engine.fsdp import base_engine
from mvp_engine.tools.plan import make_planner, plan

CONFIG = str(ROOT / "recipes" / "qwen3" / "configs" / "pretrain_cpu.yaml")
ACTIONS = str(ROOT / "recipes" / "table_vla" / "configs" / "cpu.yaml")
LAYOUT = ["parallel.shard=8", "parallel.tensor=2"]


@pytest.mark.slow
def test_plan_command_prints_memory_collectives_and_no_hang(monkeypatch, capsys):
    # A rank of 1,024 has no memory for weights here.
    monkeypatch.setattr(base_engine, "materialize_weights", None)
    assert (
        mvp(
            f"plan {CONFIG}",
            *LAYOUT,
            "--gpus",
            "32",
            "--gpu",
            "H100",
            "--tokens",
            "256",
            "--simulate",
        )
        == 0
    )
    text = capsys.readouterr().out
    for part in (
        "weights",
        "all-gather      shard (8)",
        "all-reduce      tensor (2)",
        "all ranks (32)",
    ):
        assert part in text
    assert "All simulated ranks call the same collectives in the same order." in text


@CAMPAIGN
def test_plan_json_counts_collectives_of_all_micro_batches():
    def facts(micro_batches):
        words = [
            "parallel.shard=4",
            f"data.global_batch_size={4 * micro_batches}",
            "model.config.num_hidden_layers=1",
        ]
        question = Question(CONFIG, words, gpu="H100", gpus=4, tokens=64, simulate=True)
        return plan(question)

    of_two = facts(2)
    of_five = facts(5)
    assert of_five["micro_batches"] == 5
    for two, five in zip(
        of_two["kinds"][0]["collectives"], of_five["kinds"][0]["collectives"], strict=True
    ):
        once = two["kind"] == "all-reduce"  # of the loss and the gradient norm
        assert five["calls"] == (1 if once else two["calls"] * 5 // 2)
    assert json.dumps(of_five)


def test_plan_on_several_gpus_includes_communication_where_it_is_simulated():
    words = ["parallel.ulysses=2", "model.config.num_hidden_layers=1"]
    question = Question(CONFIG, words, gpu="A100", gpus=2, tokens=64)
    quick = plan(question)
    near, far = (plan(replace(question, simulate=True, gpus_per_node=number)) for number in (8, 1))
    exposed = near["communication"]["exposed_s"]
    assert 0 < exposed < far["communication"]["exposed_s"]
    assert near["seconds"].pop("exposed communication") == exposed
    assert near["seconds"] == quick["seconds"]
    assert near["compute_s"] == quick["step_s"]
    assert near["step_s"] == pytest.approx(quick["step_s"] + exposed)
    assert near["tokens_per_s"] * near["step_s"] == pytest.approx(
        quick["tokens_per_s"] * quick["step_s"]
    )


def test_plan_simulates_first_and_last_rank_of_each_group():
    question = Question(CONFIG, LAYOUT, gpu="H100", gpus=64, tokens=64)
    simulation = Simulation(make_planner(question).config, 64)
    assert simulation.ranks() == [
        0,
        1,
        14,
        48,
        63,
    ]  # the last of tensor, shard, replicate, and of all
    assert simulation.ranks("5, 62") == [0, 1, 5, 14, 48, 62, 63]
    assert len(simulation.ranks("all")) == 64


@pytest.mark.slow
def test_plan_of_pipeline_and_experts_has_a_kind_for_each_stage():
    shape = "model_type=qwen3_moe num_hidden_layers=2 num_experts=4 num_experts_per_tok=2".split()
    words = [f"model.config.{word}" for word in [*shape, "moe_intermediate_size=64"]]
    words += (
        "parallel.pipeline=2 parallel.shard=16 parallel.expert=4 data.global_batch_size=48".split()
    )
    facts = plan(Question(CONFIG, words, gpu="H100", gpus=32, tokens=64))
    assert facts["hangs"] == []
    assert facts["micro_batches"] == 3
    assert [kind["stage"] for kind in facts["kinds"]] == [0, 1]
    rows = [row for row in facts["kinds"][1]["collectives"] if row["dtype"] == "bfloat16"]
    calls = {(row["group"], row["kind"]): row["calls"] for row in rows}
    assert calls["expert", "all-to-all"] == 3 * 4  # there and back, in forward and backward
    assert calls["pipeline", "receive"] == 3
    first, last = (kind["memory_gib"]["activations"] for kind in facts["kinds"])
    assert first == 2 * last  # 1F1B: the first stage keeps two micro-batches


@pytest.mark.slow
def test_plan_bytes_of_chosen_ranks_are_the_smallest_and_largest_of_all():
    # 1,024 rows of embeddings on 6 ranks, 4 of attention: uneven shards.
    words = ["parallel.shard=3", "parallel.tensor=2", "model.config.hidden_size=100"]
    words += ["model.config.num_hidden_layers=1"]
    question = Question(CONFIG, words, gpu="H100", gpus=6, tokens=64, simulate=True)
    chosen, every = (plan(replace(question, ranks=ranks))["kinds"] for ranks in (None, "all"))
    for name, pick in {"held_gib_smallest": min, "held_gib_largest": max}.items():
        assert pick(kind[name] for kind in chosen) == pick(kind[name] for kind in every)
    assert min(kind["held_gib_smallest"] for kind in every) < max(
        kind["held_gib_largest"] for kind in every
    )


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["parallel.shard=3"],
            "--gpus 32: the parallel layout of the config needs a multiple of 3",
        ),
        (["--ranks", "7,99"], "--ranks 7,99: '99' is no rank below 32"),
        (
            ["parallel.tensor=2", "train.precision=bf16", "model.fp8=true"],
            "model.fp8 does not support parallel.tensor",
        ),
    ],
)
def test_plan_wrong_options_are_user_errors(words, message, capsys):
    assert mvp(f"plan {CONFIG}", *words, "--gpus", "32", "--tokens", "64") == EXIT_USER_ERROR
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        (["parallel.tensor=2", "model.fp8=true"], "model.fp8 does not support parallel.tensor"),
        (["parallel.ulysses=32"], "parallel.ulysses=32 cannot share"),
        (["parallel.shard=2", "parallel.expert=2"], "qwen3 has no experts"),
        (
            ["model.activation_checkpointing=auto", "parallel.pipeline=2"],
            "without parallel.pipeline: set a number",
        ),
    ],
)
def test_plan_refuses_what_a_training_refuses(words, message, capsys):
    words = [
        *words,
        "train.precision=bf16",
        "model.config.num_hidden_layers=1",
        "optim.offload=true",
    ]
    assert mvp(f"plan {CONFIG}", *words) == EXIT_USER_ERROR
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("precision, refused", [("fp32", False), ("bf16", True)])
def test_plan_of_experts_with_unaligned_rows_is_refused_in_half_precision(
    precision, refused, capsys
):
    shape = "model_type=qwen3_moe num_hidden_layers=1 num_experts=4 num_experts_per_tok=2".split()
    words = [f"model.config.{word}" for word in [*shape, "moe_intermediate_size=24"]]
    words += f"parallel.tensor=2 train.precision={precision} --gpus 2 --tokens 64 --ranks 0".split()
    assert mvp(f"plan {CONFIG}", *words) == (EXIT_USER_ERROR if refused else 0)
    assert ("rows have 24 bytes on a rank" in capsys.readouterr().err) == refused


def test_network_seconds_follow_bytes_groups_and_nodes():
    network = Network(gpus_per_node=8, nvlink=400.0, network=50.0)
    size = 4 * 10**9

    def seconds(kind, ranks):
        whole = size // len(ranks) if kind == "all-gather" else size
        return network.seconds(Collective(kind, tuple(ranks), whole, "bfloat16"))

    inside = size * 7 / 8 / (network.efficiency * 400e9)
    assert seconds("all-gather", range(8)) == pytest.approx(inside, rel=1e-2)
    assert seconds("reduce-scatter", range(8)) == pytest.approx(inside, rel=1e-2)
    assert seconds("all-reduce", range(8)) == pytest.approx(2 * inside, rel=1e-2)
    # One rank of each of 8 nodes has its own network card; 64 ranks on 8 nodes use all eight of each node.
    assert seconds("all-gather", range(0, 64, 8)) == pytest.approx(8 * inside, rel=1e-2)
    assert seconds("all-gather", range(64)) == pytest.approx(inside * 64 * 63 / 64 / 56, rel=1e-2)
    assert seconds("all-to-all", range(8)) == pytest.approx(inside, rel=1e-2)
    assert seconds("all-to-all", range(16)) == pytest.approx(
        size / 2 / (network.efficiency * 50e9), rel=1e-2
    )


def test_all_to_all_of_other_sizes_differs_unless_ranks_have_exchanged_them():
    """Expert parallel on Ulysses ranks with an odd number of tokens, of which a simulated rank knows its own."""
    calls_of: dict[int, list[Collective]] = {}
    for rank, rows in enumerate((6, 4)):
        calls_of[rank] = [
            Collective("all-to-all", (0, 1), rows, "float32", (rows, rows), (rows, rows))
        ]
    assert len(find_differences(calls_of)) == 1
    counts = Collective("all-to-all", (0, 1), 16, "int64")
    assert find_differences({rank: [counts, *calls] for rank, calls in calls_of.items()}) == []


def test_ranks_text_shortens_even_steps():
    assert ranks_text((0, 1, 2, 3, 4, 5)) == "ranks 0-5"
    assert ranks_text((0, 8, 16, 24, 32)) == "ranks 0, 8, ..., 32"
    assert ranks_text((3,)) == "rank 3"
    assert ranks_text((0, 5, 6)) == "ranks 0, 5, 6"


QWEN3_235B = {
    **MODELS["qwen3_235b"],
    "dtype": "bfloat16",
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}


@CAMPAIGN
def test_plan_of_qwen3_235b_on_1024_ranks_takes_a_minute_and_two_gib(tmp_path):
    """Pipeline 4, expert 8, shard 32 of each expert; in a process of its own, for its peak memory."""
    write_json(tmp_path / "config.json", QWEN3_235B)
    words = "parallel.pipeline=4 parallel.expert=8 parallel.shard=256 model.activation_checkpointing=full".split()
    options = "--gpus 1024 --gpu H100 --tokens 8192 --json".split()
    command = [sys.executable, "-m", "mvp_engine.cli", "plan", str(tmp_path), *words, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    facts = json.loads(done.stdout)
    assert facts["hangs"] == []
    assert facts["parameters"] == 235_093_634_560
    assert [kind["stage"] for kind in facts["kinds"]] == [0, 1, 2, 3]
    largest = max(kind["held_gib_largest"] for kind in facts["kinds"])
    assert largest <= 1.05 * min(kind["held_gib_smallest"] for kind in facts["kinds"])
    assert used.ru_utime + used.ru_stime < 60  # CPU seconds, of one core
    assert used.ru_maxrss / 2**20 < 2


@pytest.mark.slow
def test_plan_of_a_model_that_acts_is_refused(capsys):
    assert mvp(f"plan {ACTIONS} --gpus 2 --simulate") == EXIT_USER_ERROR
    assert (
        "mvp plan does not simulate the loss of model.type=action_model" in capsys.readouterr().err
    )


def test_estimate_names_its_new_command(capsys):
    with pytest.raises(SystemExit, match="2"):
        mvp(f"estimate {CONFIG}")
    assert "`mvp estimate` is now `mvp plan CONFIG`" in capsys.readouterr().err


def test_only_the_command_and_other_plugins_import_the_plan_kit():
    package = ROOT / "mvp_engine"
    files = [file for file in package.rglob("*.py") if file.parent != package / "kit" / "plan"]
    importers = {file for file in files if "from mvp_engine.kit.plan" in file.read_text()}
    assert {file.name for file in importers} == {"cli.py", "plan.py", "costs.py"}
