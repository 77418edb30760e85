"""`mvp plan` of RL configs: the actor's ranks with generation, log-probs, reference and critic."""

from pathlib import Path

import pytest
from conftest import mvp
from run_files import printed_json, write_json
from templates.tiny import tokenizer
from tiny_rl import write_recipe

from mvp_engine.errors import EXIT_USER_ERROR

QWEN3_1_7B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("estimate")
    config = write_recipe(folder, "return 1.0")
    (folder / "large").mkdir()
    write_json(folder / "large" / "config.json", QWEN3_1_7B)
    tokenizer("qwen2_5").save_pretrained(folder / "large")
    return config


def estimated(capsys, config, *words, gpu="H100", code=0):
    capsys.readouterr()
    model = f"model.path={Path(config).parent / 'large'}"
    assert mvp(f"plan {config} --json --gpu {gpu} {model}", *words) == code
    return printed_json(capsys)


@pytest.mark.slow
def test_plan_of_an_rl_config_counts_generation_reference_and_critic(config, capsys):
    plain = estimated(capsys, config)
    assert (plain["gpus"], plain["steps"]) == (1, 2)
    assert {"generation", "log-probs"} <= plain["seconds"].keys()
    longer = estimated(capsys, config, "generation.max_new_tokens=8")
    # 4 prompts with 2 completions; the last pack of a step is not full.
    assert longer["tokens_per_step"] - plain["tokens_per_step"] == 4 * 2 * 4
    assert longer["seconds"]["generation"] == pytest.approx(
        2 * plain["seconds"]["generation"], rel=0.01
    )
    with_kl = estimated(capsys, config, "rl.kl_coef=0.1")
    assert with_kl["seconds"]["log-probs"] == pytest.approx(2 * plain["seconds"]["log-probs"])
    assert with_kl["memory_gib"]["reference model"] == pytest.approx(3.2, abs=0.1)
    ppo = estimated(capsys, config, "rl.algorithm=ppo", "rl.num_generations=1")
    # AdamW in float32.
    assert ppo["memory_gib"]["critic"] == pytest.approx(4 * ppo["memory_gib"]["weights"])
    sharded = estimated(
        capsys, config, "workers.where=spawn", "groups.actor={ranks: 4, parallel: {shard: 4}}"
    )
    assert sharded["gpus"] == 4
    assert sharded["memory_gib"]["weights"] == pytest.approx(plain["memory_gib"]["weights"] / 4)


@pytest.mark.slow
def test_plan_of_an_rl_config_that_does_not_fit_names_keys_of_its_groups(config, capsys):
    facts = estimated(capsys, config, gpu="T4", code=EXIT_USER_ERROR)
    more = [option for option in facts["advice"] if option["gpus"] > 1]
    assert (
        "workers.where=spawn groups.actor.ranks=2 groups.actor.parallel.shard=2" in more[0]["words"]
    )
    again = estimated(capsys, config, *more[0]["words"].split(), gpu="T4")
    assert again["peak_gib"] == pytest.approx(more[0]["peak_gib"])


@pytest.mark.slow
def test_plan_of_an_rl_config_counts_teachers_on_the_actors_ranks(config, capsys):
    large = Path(config).parent / "large"
    words = ["rl.algorithm=distil", f"rl.teachers={{*: {large}}}"]
    plain, taught = estimated(capsys, config), estimated(capsys, config, *words)
    assert taught["memory_gib"]["teacher"] == pytest.approx(3.2, abs=0.1)
    assert "reference model" not in taught["memory_gib"]
    assert taught["seconds"]["teacher"] == pytest.approx(plain["seconds"]["log-probs"])
    own = ["workers.where=spawn", "groups.actor.ranks=1", "groups.teacher.ranks=1"]
    assert "teacher" not in estimated(capsys, config, *words, *own)["memory_gib"]
