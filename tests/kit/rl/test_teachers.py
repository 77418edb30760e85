"""On-policy distillation: teachers by source, both losses, layouts, resume, images, and what is refused at start."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from conftest import mvp, user_error
from run_files import printed_json
from templates.tiny import tokenizer
from test_policy_loss import sequences
from test_rl_runs import records, trained
from tiny_rl import write_recipe
from tiny_vlm import PATCH, TEXT, model_config, qwen3_vl, with_images, write

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.kit.preference import Head, linear_kl
from mvp_engine.kit.rl.model_groups import Teachers, check_scorer
from mvp_engine.kit.rl.policy import DistilLoss
from mvp_engine.worker.group import WorkerGroup
from mvp_engine.worker.worker import WorkerSpec

TEMPERATURE = 1.3
SOURCES = ("math", "code")


def save(folder, seed, **changed):
    torch.manual_seed(seed)
    config = hf.Qwen3Config(**{**TEXT, **changed}, initializer_range=0.5)
    hf.Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer("qwen2_5").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A policy and two teachers, one of another size."""
    folder = tmp_path_factory.mktemp("teachers")
    sizes: list[dict[str, int]] = [{}, {}, {"hidden_size": 48, "num_hidden_layers": 1}]
    return [save(folder / str(seed), seed, **size) for seed, size in enumerate(sizes)]


def batch_of_rollouts():
    """Seven sequences of two sources; the second teacher is that of the sequences 1, 4 and 5."""
    ids, masks = map(list, zip(*sequences(), strict=True))
    batch = PackedBatch.from_sequences(ids, masks)
    batch.sequence_fields["teacher"] = torch.tensor([0, 1, 0, 0, 1, 1, 0])
    batch.sequence_fields["source"] = batch.sequence_fields["teacher"].clone()
    batch.token_fields["sampler_log_probs"] = torch.zeros(batch.num_tokens)
    return batch


def updated(folders, reverse, where="local", ranks=1):
    """The numbers of one optimizer step with DistilLoss, and the weights after it."""
    policy, *teachers = folders
    parallel = {"shard": ranks}
    spec = WorkerSpec.of(policy, parallel=parallel, optim={"lr": 0.01}, device="cpu", total_steps=9)
    with WorkerGroup.start(spec, ranks=ranks, where=where) as actor:
        for number, path in enumerate(teachers):
            frozen = WorkerSpec.of(path, parallel=parallel, device="cpu")
            WorkerGroup.start(frozen, name=f"teacher_{number}", on=actor)
        actor.run(Teachers.open, teachers, reverse, TEMPERATURE)
        loss = DistilLoss(SOURCES, temperature=TEMPERATURE)
        [numbers] = actor.update(batch_of_rollouts(), loss, budget=24)
        weights = dict(pair for bucket in actor.weights(torch.float32) for pair in bucket)
    return numbers, weights


def divergences(folders, reverse):
    """linear_kl from the hidden states and heads of transformers' own models, for each sequence alone."""
    models: list[Any] = [
        hf.AutoModelForCausalLM.from_pretrained(path).eval().requires_grad_(False)
        for path in folders
    ]
    batch, found = batch_of_rollouts(), []
    for ids, teacher in zip(
        batch.input_ids.split(batch.host_lengths), batch.sequence_fields["teacher"], strict=True
    ):
        pair = []
        for model in (models[0], models[1 + int(teacher)]):
            hidden_TD = model.model(input_ids=ids[None]).last_hidden_state[0]
            pair += [hidden_TD, Head(model.lm_head.weight, None)]
        found.append(linear_kl(*pair, reverse=reverse, temperature=TEMPERATURE))
    return batch, torch.cat(found)


@pytest.mark.parametrize("reverse", [False, True])
def test_distil_loss_of_two_teachers_is_linear_kl_of_each_source(folders, reverse):
    numbers, _ = updated(folders, reverse)
    batch, kl_T = divergences(folders, reverse)
    has_label_T = batch.labels != IGNORE
    assert numbers.loss == pytest.approx(float(kl_T[has_label_T].mean()), rel=1e-6)
    of_source_T = batch.sequence_fields["source"].repeat_interleave(batch.lengths)
    for index, name in enumerate(SOURCES):
        total, weight = numbers.metrics[f"teacher_kl/{name}"]
        wanted = kl_T[has_label_T & (of_source_T == index)]
        assert weight == len(wanted)
        assert total == pytest.approx(float(wanted.sum()), rel=1e-6)


@pytest.mark.slow
def test_distil_loss_on_two_shards_makes_the_step_of_one(folders):
    one, weights = updated(folders, True)
    two, others = updated(folders, True, "spawn", 2)
    assert two.loss == pytest.approx(one.loss, abs=1e-5)
    assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    for name, value in weights.items():
        assert torch.allclose(others[name], value, atol=1e-5), name


def test_distil_loss_of_another_vocabulary_is_refused(folders, tmp_path):
    wide = save(tmp_path / "wide", 3, vocab_size=416)
    with user_error(r"wide has 416 rows in its output embedding, the student has 400"):
        updated([folders[0], wide], True)


def test_distil_teachers_choose_experts_for_themselves(folders):
    batch = batch_of_rollouts()
    batch.token_fields["experts"] = torch.zeros(batch.num_tokens, 2, 2, dtype=torch.int16)
    read = []

    class Teacher:
        def outputs(self, batch, names, budget):
            read.append(batch.token_fields)
            return {"hidden_states": torch.zeros(batch.num_tokens, 3)}

    teachers: Any = SimpleNamespace(teachers=[Teacher(), Teacher()])
    found = Teachers.micro_batches(teachers, batch, 24)
    assert len(read) == 2
    assert not any("experts" in fields for fields in read)
    assert all("experts" in one.token_fields for one in found), "the policy replays its own"


# ---- Whole runs


def distil_recipe(folder, algorithm, teachers, sources=None):
    """The config of a run without any reward on two sources, or on others."""
    write_recipe(folder, "pass")
    (folder / "engine.py").write_text(
        "from mvp_engine.kit.rl import RLEngine\n\nclass Tiny(RLEngine):\n    pass\n"
    )
    rows = str(folder / "rows.jsonl")
    code = str(write(folder / "code.jsonl", [{"prompt": f"add {i}"} for i in range(8)]))
    found = [{"path": path, "name": name} for name, path in {"math": rows, "code": code}.items()]
    found = sources or [*found, {"path": rows, "name": "held_out", "split": "eval"}]
    own = {
        "defaults": ["train", "_self_"],
        "rl": {"algorithm": algorithm, "teachers": teachers},
        "data": {"sources": found},
    }
    (folder / "distil.yaml").write_text(json.dumps(own))
    return str(folder / "distil.yaml")


NUMBERS = ("loss", "grad_norm", "teacher_kl/math", "teacher_kl/code")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["distil", "distil_forward"])
def test_distil_run_has_a_teacher_per_source_and_resumes_bit_for_bit(tmp_path, folders, algorithm):
    teachers = {"math": str(tmp_path / "model"), "*": folders[2]}
    config = distil_recipe(tmp_path, algorithm, teachers)
    words = ["optim.lr=1e-2", "eval.steps=4", "checkpoint.interval=2"]
    whole = trained(config, *words, "train.max_steps=4", "run_id=whole")
    first, *_ = found = records(whole)
    assert first["teacher_kl/math"] == pytest.approx(0, abs=1e-5), "the teacher is the policy"
    assert first["teacher_kl/code"] > 0.5
    assert found[1]["teacher_kl/math"] != first["teacher_kl/math"]
    assert "reward" not in first
    assert "reward" not in records(whole, "eval")[0]
    assert mvp(f"train {config}", *words, "train.max_steps=2", "run_id=two") == 0
    two = tmp_path / "outputs" / "two"
    assert mvp(f"train {config}", *words, "train.max_steps=4", f"resume={two}") == 0
    for name in NUMBERS:
        assert [one[name] for one in records(two)] == [one[name] for one in found], name


@pytest.mark.slow
def test_distil_run_on_two_shards_and_with_teachers_on_ranks_of_their_own(tmp_path, folders):
    config = distil_recipe(tmp_path, "distil", {"math": folders[1], "*": folders[2]})
    words = ["generation.max_new_tokens=3"]
    one = records(trained(config, *words, "run_id=one"))
    words += ["workers.where=spawn", "groups.actor={ranks: 2, parallel: {shard: 2}}"]
    two = records(trained(config, *words, "groups.teacher.ranks=1", "run_id=two"))
    for name in NUMBERS:
        wanted = [each[name] for each in one]
        assert [each[name] for each in two] == pytest.approx(wanted, rel=1e-5, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm, steps", [("distil", 2), ("distil_reverse", 1)])
def test_distil_run_ahead_of_its_teachers_has_a_correction_for_a_ratio_alone(
    tmp_path, folders, algorithm, steps
):
    config = distil_recipe(tmp_path, algorithm, {"*": folders[1]})
    words = [f"rl.async_steps={steps}", "train.max_steps=3", "checkpoint.interval=1"]
    found = records(trained(config, *words, "run_id=ahead"))
    assert all(one["teacher_kl/math"] for one in found)
    assert all(("ess" in one) == (algorithm == "distil") for one in found)
    checkpoint = tmp_path / "outputs" / "ahead" / "checkpoints" / "step_00000002"
    again = records(trained(config, *words, f"resume={checkpoint}", "run_id=again"))
    assert again[-1]["totals"].get("episodes_hash") == found[-1]["totals"].get("episodes_hash")


@pytest.mark.slow
def test_distil_run_with_tools_needs_no_reward(tmp_path, folders, capsys):
    config = distil_recipe(tmp_path, "distil", {"*": folders[1]})
    tool = (
        '\n    def look(self, word: str) -> str:\n        """Look up.\n\n        Args:\n'
        '            word: what\n        """\n        return word\n\n    tools = (look,)\n'
    )
    engine = tmp_path / "engine.py"
    engine.write_text(engine.read_text().replace("    pass\n", tool))
    found = records(trained(config, "reward.max_errors=0", "data.pack_tokens=512"))
    assert all(one["teacher_kl/math"] > 0 for one in found)
    assert not any("reward" in one for one in found)
    assert mvp(f"train {tmp_path}/train.yaml") == EXIT_USER_ERROR
    assert "Tiny has no reward: define reward" in capsys.readouterr().err


def save_vlm(folder, seed):
    torch.manual_seed(seed)
    hf.AutoModelForImageTextToText.from_config(model_config()).save_pretrained(folder)
    qwen3_vl().save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_vlm_teacher_reads_the_images_of_the_rollouts(tmp_path):
    write_recipe(tmp_path, "pass")
    rows = write(tmp_path / "images.jsonl", with_images(tmp_path, 9))
    policy, teacher = (save_vlm(tmp_path / name, seed) for seed, name in enumerate("pt"))
    for algorithm in ("distil", "distil_reverse"):
        for name, path in (("self", policy), ("other", teacher)):
            sources = [{"path": str(rows), "name": "images"}]
            sources.append({**sources[0], "name": "held_out", "split": "eval"})
            config = distil_recipe(tmp_path, algorithm, {"*": path}, sources)
            words = [f"model.path={policy}", "rl.prompts_per_step=6"]
            words.append(f"run_id={algorithm}_{name}")
            first = records(trained(config, *words, "train.max_steps=1"))[0]
            is_same = name == "self"
            assert (abs(first["teacher_kl/images"]) < 1e-5) == is_same, (algorithm, name)


@pytest.mark.slow
def test_teachers_next_to_a_reward_add_their_divergence_to_its_advantages(tmp_path, folders):
    config = write_recipe(tmp_path, "return len(set(answer.tokens)) / 4")
    words = [f"rl.teachers={{*: {folders[1]}}}", "rl.kl_coef=0.1"]
    both = records(trained(config, *words, "run_id=both"))
    plain = records(trained(config, "run_id=plain"))
    assert both[0]["reward"] == plain[0]["reward"]
    assert both[0]["grad_norm"] != plain[0]["grad_norm"]
    assert both[0]["teacher_kl/rows"] > 0.1
    assert "kl" not in both[0], "there is no reference"


# ---- What is refused


@pytest.mark.parametrize(
    "words, message",
    [
        ("rl.algorithm=distil", "rl.algorithm=distil needs teachers"),
        ("rl.algorithm=distil rl.teachers={*:x} rl.kl_coef=0.1", "in place of a reference"),
        ("rl.teachers={*:x}", "rl.algorithm=grpo would not use them"),
        ("rl.teachers={*:x} rl.kl_coef=1 groups.reference={}", "take the place of the reference"),
        ("groups.teacher={}", "rl.teachers, which is empty"),
        ("rl.algorithm=distil_reverse rl.teachers={*:x} groups.teacher={}", "groups.teacher: "),
        ("rl.algorithm=distil_reverse rl.teachers={*:x} rl.clip=[1,1]", "rl.clip: "),
        ("rl.algorithm=distil_reverse rl.teachers={*:x} rl.correction={}", "rl.correction: "),
        ("rl.algorithm=distil rl.teachers={*:x} rl.dynamic_sampling=2", "rl.dynamic_sampling: "),
        ("rl.algorithm=remax rl.async_steps=1", "rl.async_steps: the greedy completions"),
    ],
)
def test_config_of_teachers_that_contradicts_itself_is_refused(tmp_path, capsys, words, message):
    config = write_recipe(tmp_path, "return 1.0")
    assert mvp(f"train {config} {words}") == EXIT_USER_ERROR
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "teachers, message",
    [
        ({"mth": "1"}, "rl.teachers.mth: there is no such source for training.*Did you mean math"),
        ({"math": "1"}, "rl.teachers has no teacher for the source code"),
        ({"*": "none"}, r"rl.teachers.\*=.*none is not the Hugging Face folder of a language mod"),
        ({"*": "score"}, r"rl.teachers.\*=.* has a score.weight, so it is a reward model"),
        ({"*": "zephyr"}, r"rl.teachers.\*=.*: its tokenizer is not the policy's"),
    ],
)
def test_distil_run_with_a_wrong_teacher_ends_at_start(
    tmp_path, folders, capsys, teachers, message
):
    (tmp_path / "none").mkdir()
    save(tmp_path / "zephyr", 1)
    tokenizer("zephyr").save_pretrained(tmp_path / "zephyr")
    config = hf.Qwen3Config(**TEXT, num_labels=1)
    hf.Qwen3ForSequenceClassification(config).save_pretrained(tmp_path / "score")
    tokenizer("qwen2_5").save_pretrained(tmp_path / "score")
    paths = {"1": folders[1]}
    teachers = {name: paths.get(path, str(tmp_path / path)) for name, path in teachers.items()}
    file = distil_recipe(tmp_path, "distil", teachers)
    assert mvp(f"train {file}") == EXIT_USER_ERROR
    assert re.search(message, capsys.readouterr().err)


def test_teacher_of_an_engine_whose_step_ignores_it_is_refused(tmp_path, folders, capsys):
    config = write_recipe(tmp_path, "return 1.0")
    engine = Path(tmp_path / "engine.py")
    step = "\n    def train_step(self, ctx, experience):\n        pass\n"
    engine.write_text(engine.read_text() + step)
    words = ["rl.kl_coef=1", f"rl.teachers={{*: {folders[1]}}}"]
    assert mvp(f"train {config}", *words) == EXIT_USER_ERROR
    assert (
        "this engine has a train_step of its own, which does not use them"
        in capsys.readouterr().err
    )


def test_teacher_that_start_models_does_not_start_is_refused(tmp_path, folders, capsys):
    config = write_recipe(tmp_path, "return 1.0")
    engine = Path(tmp_path / "engine.py")
    start = "\n    def start_models(self, models):\n        models.start_actor()\n"
    engine.write_text(engine.read_text() + start)
    words = ["rl.kl_coef=1", f"rl.teachers={{*: {folders[1]}}}"]
    assert mvp(f"train {config}", *words) == EXIT_USER_ERROR
    assert "Call models.start_teachers() there" in capsys.readouterr().err


def test_vlm_teacher_with_other_features_or_none_is_refused(tmp_path):
    processor = qwen3_vl()
    save_vlm(tmp_path, 0)
    check_scorer("rl.teachers.math", tmp_path, processor)
    file = tmp_path / "preprocessor_config.json"
    if not file.exists():
        file = tmp_path / "processor_config.json"
    text = file.read_text()
    assert f'"patch_size": {PATCH["patch_size"]}' in text
    file.write_text(text.replace('"patch_size": 4', '"patch_size": 8'))
    with user_error(r"patch_size of its image_processor is 8, the policy's is 4"):
        check_scorer("rl.teachers.math", tmp_path, processor)
    text_only = tmp_path / "text"
    save(text_only, 1)
    tokenizer("qwen_vl").save_pretrained(text_only)
    with user_error(r"rl.teachers.math=.* has no image_processor, and the policy has"):
        check_scorer("rl.teachers.math", text_only, processor)


# ---- ReMax


@pytest.mark.slow
def test_remax_run_compares_each_completion_with_the_greedy_one(tmp_path):
    config = write_recipe(tmp_path, "return float(sum(answer.tokens) % 7)")
    engine = tmp_path / "engine.py"
    more = """
    def train_pre_step(self, ctx):
        [batch] = ctx.micro_batches
        fields = batch.sequence_fields
        first_T = batch.cu_seqlens[1:].long() - 2
        wanted_S = fields["reward"] - fields["baseline"]
        assert (batch.token_fields["advantages"][first_T] - wanted_S).abs().max() < 1e-6
        ctx.log("distance", wanted_S.abs().sum(), 1)
        ctx.log("baseline", fields["baseline"].sum(), len(fields["baseline"]))
"""
    engine.write_text(engine.read_text() + more)
    words = ["rl.algorithm=remax", "rl.num_generations=1", "rl.prompts_per_step=8"]
    words += ["generation.temperature=2", "train.max_steps=1"]
    folder = trained(config, *words)
    [first] = records(folder)
    assert first["distance"] > 0
    cold = trained(config, *words, "generation.temperature=1e-4", "run_id=cold")
    [same] = records(cold)
    assert same["distance"] == pytest.approx(0), "samples at temperature 0 are the greedy ones"
    assert same["baseline"] == pytest.approx(first["baseline"])


@pytest.mark.slow
def test_check_of_a_distillation_prints_divergences_and_warns_of_a_teacher_that_is_the_policy(
    tmp_path, folders, capsys
):
    config = distil_recipe(
        tmp_path, "distil_reverse", {"math": str(tmp_path / "model"), "*": folders[2]}
    )
    assert mvp(f"check {config} --json train.max_steps=20") == 0
    found = printed_json(capsys)
    facts = found["rollouts"]["teacher_kl"]
    assert facts["code"][0] > 0.5 > 1e-4 > abs(facts["math"][0])
    assert any("teacher of math is the policy at the start" in text for text in found["warnings"])
    assert not any("reward" in text for text in found["warnings"])
