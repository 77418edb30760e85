"""Every shipped config for a CPU, unchanged on 1, 2, 3 and 4 processes: the same losses, evaluation included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, read_metrics
from ranks import RankPool, RankProcesses

from mvp_engine.launch import launch

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
    "magic_transformer/train": ["task.train_problems=1000", "task.eval_problems=50"],
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
    "qwen_omni/cpu": ["spoken.sentences=120", "spoken.held_out=10", "eval_generation.speech=null", *FEW_TOKENS],
}
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
    without |= {"reverse_rl/grpo", "reverse_rl/ppo"}  # one controller starts their ranks: test_reverse_rl.py
    without |= {"digits_rl/grpo"}
    assert on_cpu - without == SIZES.keys()


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
                compare(records, read_metrics(tmp_path, split), f"{name} on {layout} ranks, {split}")


def compare(alone: list[dict[str, Any]], together: list[dict[str, Any]], where: str) -> None:
    assert len(alone) == len(together), where
    assert alone or where.endswith("eval"), where  # stages without held-out rows
    for one, many in zip(alone, together, strict=True):
        assert one.keys() == many.keys(), where
        assert one.get("totals") == many.get("totals"), where
        for key in one:
            if key.startswith(("loss", "grad_norm", "lr")):
                assert one[key] == pytest.approx(many[key], rel=1e-5), (where, one["step"], key)
