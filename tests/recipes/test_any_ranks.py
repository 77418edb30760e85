"""Every shipped config for a CPU, unchanged on 1, 2, 3 and 4 processes: the same losses, and the same metrics of one
checkpoint."""

import math

import pytest
from conftest import CAMPAIGN, ROOT, read_metrics
from ranks import RankPool
from run_files import json_lines

from mvp_engine.launch import launch
from mvp_engine.runs import list_runs

RECIPES = ROOT / "recipes"
FEW_STEPS = (
    "train.max_steps=3 data.num_workers=0 log.interval=1 log.backends=[jsonl] "
    "checkpoint.interval=null"
).split()
FEW_TOKENS = ["eval.generation.max_new_tokens=2", "eval.generation.max_samples=4"]
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
    "table_vla/cpu": ["table.demonstrations=40", "simulation.episodes=4", "simulation.max_steps=8"],
    "reverse_rl/sft": ["made.rows=60", *FEW_TOKENS],
    "digits_rl/sft": ["made.digits=60", *FEW_TOKENS],
    "graft/language": ["digits.count=60", *FEW_TOKENS],
    "graft/align": ["digits.count=60", *FEW_TOKENS],
    "graft/instruct": ["digits.count=60", *FEW_TOKENS],
    "calculator_rl/sft": ["made.rows=60", *FEW_TOKENS],
    "grid_rl/sft": ["made.rows=60", *FEW_TOKENS],
    "zoom_rl/sft": ["made.rows=60", *FEW_TOKENS],
    "agent_rl/sft": ["made.chats=60", *FEW_TOKENS],
    "qwen_audio/cpu": ["speech.sentences=60", "speech.held_out=10", *FEW_TOKENS],
    "qwen_omni/cpu": [
        "spoken.sentences=120",
        "spoken.held_out=10",
        "eval.generation.speech=null",
        *FEW_TOKENS,
    ],
}
# One controller starts the ranks of these.
RL_SIZES = {
    "reverse_rl/grpo": ["made.rows=60"],
    "reverse_rl/ppo": ["made.rows=60", "rl.prompts_per_step=8"],
    "digits_rl/grpo": ["made.digits=60"],
    "calculator_rl/rl": ["made.rows=60", "rl.prompts_per_step=8"],
    "grid_rl/rl": ["made.rows=60", "rl.prompts_per_step=8"],
    "zoom_rl/rl": ["made.rows=60", "rl.prompts_per_step=4"],
    "agent_rl/rl": ["made.chats=60", "rl.prompts_per_step=4", "rl.num_generations=2"],
}
NO_HELD_OUT_ROWS = {"preference/sft_text", "preference/sft_images"}
SHARDED = "2, sharded"


def config_file(name):
    recipe, _, config = name.partition("/")
    return RECIPES / recipe / "configs" / f"{config}.yaml"


def test_any_ranks_table_holds_every_config_for_a_cpu():
    shared = {"base", "made", "shapes", "text", "images", "digits"}
    found = {f"{file.parents[1].name}/{file.stem}" for file in RECIPES.glob("*/configs/*.yaml")}
    on_cpu = {name for name in found if "gpu" not in name and name.partition("/")[2] not in shared}
    # These need a pretrained model, or data of the Hub.
    without = {"sft/lora", "sft/full", "sft/mixture", "sft/token_documents", "qwen3_vl/llava_align"}
    without |= {"qwen3_vl/llava_instruct", "math_rl/gsm8k", "table_vla/pusht"}
    without |= {"qwen_audio/librispeech", "tools_rl/search", "tools_rl/code"}
    # distil starts from the export of teacher: tests/kit/rl/test_teachers.py.
    without |= {"math_rl/lora", "calculator_rl/distil", "calculator_rl/teacher"}
    assert on_cpu - without == SIZES.keys() | RL_SIZES.keys()


@pytest.fixture(scope="module")
def pools(rank_processes):
    """The ranks of each layout."""
    made = {str(size): RankPool(size, rank_processes) for size in (2, 3, 4)}
    return {**made, SHARDED: made["2"]}


def train_on(pools, name, layout, words):
    shard = ["parallel.shard=2"] if layout == SHARDED else []
    pool = pools[layout]
    assert pool.launch(config_file(name), *words, *shard) == [0] * pool.size, name


@pytest.mark.slow
@pytest.mark.campaign
def test_shipped_configs_on_1_to_4_processes_give_the_same_losses(pools, tmp_path, campaign_size):
    # The default suite has fewer packs than ranks; test_exactness.py has uneven parts of samples.
    suites = {"digits_vlm/train": ["4"]}, dict.fromkeys(SIZES, pools)
    for name, layouts in suites[campaign_size(0, 1)].items():
        words = [f"output_dir={tmp_path}", *FEW_STEPS, *SIZES[name]]
        assert launch(str(config_file(name)), words) == 0, name
        alone = {split: read_metrics(tmp_path, split) for split in ("train", "eval")}
        for layout in layouts:
            train_on(pools, name, layout, words)
            for split, records in alone.items():
                where = f"{name} on {layout} ranks, {split}"
                compare(records, read_metrics(tmp_path, split), where)


@CAMPAIGN
@pytest.mark.parametrize("name", [*SIZES, *RL_SIZES])
def test_one_checkpoint_evaluated_on_1_to_4_processes_gives_the_same_metrics(pools, stages, name):
    """All metrics, of the whole split and of a part of it."""
    words = [f"output_dir={stages}", *FEW_STEPS, *{**SIZES, **RL_SIZES}[name]]
    # Enough training for some right answers.
    steps = [] if name in RL_SIZES else ["train.max_steps=30"]
    assert launch(str(config_file(name)), [*words, *steps, "eval.steps=null"]) == 0
    if name in NO_HELD_OUT_ROWS:
        return
    if FEW_TOKENS[0] in words:
        words += ["eval.generation.max_new_tokens=8", "eval.generation.max_samples=24"]
    words += ["workflow=evaluate", "resume=auto"]
    for limit in ("eval.batches=null", "eval.batches=1"):
        assert launch(str(config_file(name)), [*words, limit]) == 0
        alone = last_evaluation(stages)
        for layout in pools:
            if name in RL_SIZES:
                ranks = ["workers.where=spawn", f"groups.actor.ranks={layout[0]}"]
                shard = ["groups.actor.parallel.shard=2"] if layout == SHARDED else []
                assert launch(str(config_file(name)), [*words, limit, *ranks, *shard]) == 0
            else:
                train_on(pools, name, layout, [*words, limit])
            expected = pytest.approx(alone, rel=1e-6, abs=1e-6, nan_ok=True)
            assert last_evaluation(stages) == expected, (limit, layout)


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """One folder for all configs: stages start from the exports of others."""
    return tmp_path_factory.mktemp("stages")


def last_evaluation(folder):
    record = json_lines(list_runs(folder)[-1].dir / "evaluate.jsonl")[-1]
    del record["split"]
    # Of nothing.
    return {key: math.nan if value is None else value for key, value in record.items()}


def compare(alone, together, where):
    assert len(alone) == len(together), where
    assert alone or where.endswith("eval"), where  # stages without held-out rows
    for one, many in zip(alone, together, strict=True):
        assert one.keys() == many.keys(), where
        assert one.get("totals") == many.get("totals"), where
        for key in one:
            if key.startswith(("loss", "grad_norm", "lr")):
                assert one[key] == pytest.approx(many[key], rel=1e-5), (where, one["step"], key)
