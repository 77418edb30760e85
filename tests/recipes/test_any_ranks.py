"""Every shipped config for a CPU, unchanged on 1, 2, 3 and 4 processes: the same losses, and the same metrics of one
checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, read_metrics
from ranks import RankPool, RankProcesses

from mvp_engine.launch import launch
from mvp_engine.runs import list_runs

RECIPES = ROOT / "recipes"
FEW_STEPS = [
    "loop.total_steps=3",
    "data.num_workers=0",
    "log.interval=1",
    "log.backends=[jsonl]",
    "checkpoint.interval=null",
]
FEW_TOKENS = ["eval_generation.max_new_tokens=2", "eval_generation.every_n_samples=50"]
# Little data for each config. Stages stand after those whose exports they start from.
SIZES = {
    "magic_transformer/train": ["task.train_problems=1000", "task.eval_problems=500"],
    "vit_classification/cpu": [],
    "digits_vlm/train": ["digits.count=60", "digits.drawings=1", *FEW_TOKENS],
    "digits_vlm/qlora_base": ["digits.count=60", "digits.drawings=1", *FEW_TOKENS],
    "digits_vlm/qlora": ["digits.count=60", "digits.drawings=1", *FEW_TOKENS],
    "qwen3/pretrain_cpu": ["made.modules=20", "made.chats=20", *FEW_TOKENS],
    "qwen3/sft_cpu": ["made.modules=20", "made.chats=20", *FEW_TOKENS],
    "qwen3_vl/words": ["shapes.rows=60", *FEW_TOKENS],
    "qwen3_vl/align": ["shapes.rows=60", *FEW_TOKENS],
    "qwen3_vl/pretrain": ["shapes.rows=60", *FEW_TOKENS],
    "qwen3_vl/instruct": ["shapes.rows=60", *FEW_TOKENS],
    "qwen3_vl/instruct_lora": ["shapes.rows=60", *FEW_TOKENS],
    "preference/sft_text": ["made.rows=60"],
    "preference/dpo_text": ["made.rows=60", *FEW_TOKENS],
    "preference/kto_text": ["made.rows=60", *FEW_TOKENS],
    "preference/sft_images": ["made.rows=60"],
    "preference/dpo_images": ["made.rows=60", *FEW_TOKENS],
    "reward_model/cpu": ["made.rows=60"],
    "reward_model/cpu_images": ["made.rows=60"],
    "distil/teacher_cpu": ["made.rows=60", *FEW_TOKENS],
    "distil/cpu": ["made.rows=60", *FEW_TOKENS],
    "contrastive/train": [],
    "digits_flow/train": ["dit.width=16", "generated=20"],
    "table_vla/cpu": ["table.demonstrations=40", "rollouts.episodes=4", "rollouts.max_steps=8"],
    "reverse_rl/sft": ["made.rows=60", *FEW_TOKENS],
    "digits_rl/sft": ["made.digits=60", *FEW_TOKENS],
    "qwen_audio/cpu": ["speech.sentences=60", "speech.held_out=10", *FEW_TOKENS],
    "qwen_omni/cpu": [
        "spoken.sentences=120",
        "spoken.held_out=10",
        "eval_generation.speech=null",
        *FEW_TOKENS,
    ],
}
# One controller starts the ranks of these.
RL_SIZES = {
    "reverse_rl/grpo": ["made.rows=60"],
    "reverse_rl/ppo": ["made.rows=60", "rl.prompts=8"],
    "digits_rl/grpo": ["made.digits=60"],
}
NO_HELD_OUT_ROWS = {"preference/sft_text", "preference/sft_images"}
SHARDED = "2, sharded"
# Ranks. The default suite has uneven parts of a step: samples of one micro-batch, packs, and fewer packs than ranks.
CAMPAIGN = {name: ["2", "3", "4", SHARDED] for name in SIZES}
DEFAULT_SUITE = {"magic_transformer/train": ["3"], "digits_vlm/train": ["4"]}


@pytest.fixture(scope="module")
def ranks3(rank_processes: RankProcesses) -> RankPool:
    return RankPool(3, rank_processes)


def config_file(name: str) -> Path:
    recipe, _, config = name.partition("/")
    return RECIPES / recipe / "configs" / f"{config}.yaml"


def test_any_ranks_table_holds_every_config_for_a_cpu() -> None:
    shared = {"base", "made", "shapes", "text", "images"}
    found = {f"{file.parents[1].name}/{file.stem}" for file in RECIPES.glob("*/configs/*.yaml")}
    on_cpu = {name for name in found if "gpu" not in name and name.partition("/")[2] not in shared}
    without = {"sft/lora", "sft/full"}  # these need a pretrained model
    assert on_cpu - without == SIZES.keys() | RL_SIZES.keys()


@pytest.mark.slow
@pytest.mark.campaign
def test_shipped_configs_on_1_to_4_processes_give_the_same_losses(
    ranks2: RankPool,
    ranks3: RankPool,
    ranks4: RankPool,
    tmp_path: Path,
    campaign_size: Callable[[int, int], int],
) -> None:
    pools = {"2": ranks2, "3": ranks3, "4": ranks4, SHARDED: ranks2}
    for name, layouts in (CAMPAIGN if campaign_size(0, 1) else DEFAULT_SUITE).items():
        words = [f"project.dir={tmp_path}", *FEW_STEPS, *SIZES[name]]
        assert launch(str(config_file(name)), words) == 0, name
        alone = {split: read_metrics(tmp_path, split) for split in ("train", "eval")}
        for layout in layouts:
            pool = pools[layout]
            shard = ["parallel.shard=2"] if layout == SHARDED else []
            assert pool.launch(config_file(name), *words, *shard) == [0] * pool.size, name
            for split, records in alone.items():
                compare(
                    records, read_metrics(tmp_path, split), f"{name} on {layout} ranks, {split}"
                )


@pytest.mark.slow
@pytest.mark.campaign
def test_one_checkpoint_evaluated_on_1_to_4_processes_gives_the_same_metrics(
    ranks2: RankPool,
    ranks3: RankPool,
    ranks4: RankPool,
    tmp_path: Path,
    campaign_size: Callable[[int, int], int],
) -> None:
    """All metrics, of the whole split and of a part of it."""
    pools = {"2": ranks2, "3": ranks3, "4": ranks4, SHARDED: ranks2}
    layouts = ["2", "3", "4", SHARDED] if campaign_size(0, 1) else ["3", SHARDED]
    names = [*SIZES, *RL_SIZES] if campaign_size(0, 1) else ["digits_vlm/train"]
    different: list[str] = []
    for name in names:
        sizes = [f"project.dir={tmp_path}", *FEW_STEPS, *{**SIZES, **RL_SIZES}[name]]
        # Enough training for some right answers.
        steps = [] if name in RL_SIZES else [f"loop.total_steps={campaign_size(3, 30)}"]
        assert launch(str(config_file(name)), [*sizes, *steps, "loop.eval_interval=null"]) == 0, (
            name
        )
        if name in NO_HELD_OUT_ROWS:
            continue
        if FEW_TOKENS[0] in sizes:
            sizes += ["eval_generation.max_new_tokens=8", "eval_generation.every_n_samples=3"]
        for limit in ("null", str(campaign_size(2, 1))):
            words = [*sizes, "workflow=evaluate", "resume=auto", f"loop.eval_batches={limit}"]
            assert launch(str(config_file(name)), words) == 0, name
            alone = last_evaluation(tmp_path)
            print(f"{name:24} eval_batches={limit:5} {'1':11} {figures(alone)}")
            for layout in layouts:
                if name in RL_SIZES:
                    ranks = ["workers.where=spawn", f"groups.actor.ranks={layout[0]}"]
                    shard = ["groups.actor.parallel.shard=2"] if layout == SHARDED else []
                    assert launch(str(config_file(name)), [*words, *ranks, *shard]) == 0, name
                else:
                    shard = ["parallel.shard=2"] if layout == SHARDED else []
                    pool = pools[layout]
                    assert pool.launch(config_file(name), *words, *shard) == [0] * pool.size, name
                found = last_evaluation(tmp_path)
                print(f"{name:24} eval_batches={limit:5} {layout:11} {figures(found)}")
                if found != pytest.approx(alone, rel=1e-6, abs=1e-6, nan_ok=True):
                    different.append(f"{name} eval_batches={limit} on {layout}")
    assert not different


def last_evaluation(folder: Path) -> dict[str, Any]:
    lines = (list_runs(folder)[-1].dir / "evaluate.jsonl").read_text().splitlines()
    record = {key: value for key, value in json.loads(lines[-1]).items() if key != "split"}
    return {
        key: math.nan if value is None else value for key, value in record.items()
    }  # a mean of nothing


def figures(record: dict[str, Any]) -> str:
    shown = {key: value for key, value in record.items() if key not in ("step", "epoch")}
    return ", ".join(f"{key} {value:.9f}" for key, value in shown.items())


def compare(alone: list[dict[str, Any]], together: list[dict[str, Any]], where: str) -> None:
    assert len(alone) == len(together), where
    assert alone or where.endswith("eval"), where  # stages without held-out rows
    for one, many in zip(alone, together, strict=True):
        assert one.keys() == many.keys(), where
        assert one.get("totals") == many.get("totals"), where
        for key in one:
            if key.startswith(("loss", "grad_norm", "lr")):
                assert one[key] == pytest.approx(many[key], rel=1e-5), (where, one["step"], key)
