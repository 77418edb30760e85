"""Each section of docs/changes.md is a diff of at most 25 lines that applies to a fresh copy and does what it says."""

import inspect
import math
import re
import shutil

import pytest
from conftest import ROOT, mvp, run_process
from templates.tiny import tokenizer
from tiny_vlm import TEXT, write

PAGE = ROOT / "docs" / "changes.md"
SECTIONS = dict(re.findall(r"^## (.+?)\n.*?```diff\n(.*?)```", PAGE.read_text(), re.M | re.S))
MOST_LINES = 25
WORDS = """data.pack_tokens=64 data.max_length=64 data.global_batch_tokens=null data.global_batch_size=2
    data.num_workers=0 model.activation_checkpointing=none optim.lr=0.01 eval.generation=null
    eval.steps=2 checkpoint.interval=2
    checkpoint.keep_n=null log.interval=1 log.backends=[jsonl,file] export_link=null train.epochs=null""".split()


def apply_diff(folder, text):
    """Apply a unified diff as `git apply` does, but context must be at exactly one place of the file."""
    for part in re.split(r"^(?=--- )", text, flags=re.M)[1:]:
        old_name, new_name = re.match(r"--- (?:a/)?(\S+)\n\+\+\+ b/(\S+)\n", part).groups()
        file = folder / new_name
        is_new = old_name == "/dev/null"
        assert is_new != file.exists()
        content = "" if is_new else file.read_text()
        hunks = re.split(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@\n", part, flags=re.M)
        for num_old, num_new, body in zip(hunks[1::3], hunks[2::3], hunks[3::3], strict=True):
            lines = body.splitlines(keepends=True)
            old = [line[1:] or "\n" for line in lines if line[0] in " \n-"]
            new = [line[1:] or "\n" for line in lines if line[0] in " \n+"]
            assert (len(old), len(new)) == (int(num_old or 1), int(num_new or 1))
            assert is_new or content.count("".join(old)) == 1, (
                f"{new_name} has no, or two, of:\n{body}"
            )
            content = "".join(new) if is_new else content.replace("".join(old), "".join(new))
        file.write_text(content)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny Qwen3."""
    import torch
    import transformers as hf

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    config = hf.Qwen3Config(**TEXT, tie_word_embeddings=False)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer("qwen3").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def uniform(model, tmp_path_factory):
    """The same model with an output embedding of zeros: every token has the probability 1 / vocabulary."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(model, tmp_path_factory.mktemp("uniform") / "model")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"].zero_()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


ROWS = [{"prompt": f"Hi {n}?", "completion": "Hello" + "!" * (n % 4)} for n in range(12)]


@pytest.fixture
def changed(workspace, model):
    """changed(SECTION, *words, rows=...) trains a copy of sft with that change, and returns its run."""
    from mvp_engine.runs import list_runs

    def train(section, *words, rows=ROWS, name="mine", folder=model, ranks=1):
        copy = workspace / name
        if not copy.exists():
            assert mvp(f"recipe {name} --from sft --dir {workspace}") == 0
            apply_diff(copy, SECTIONS[section])
            write(workspace / f"{name}.jsonl", rows)
        source = [f"data.sources.rows.path={name}.jsonl", "data.sources.rows.hold_out=0.2"]
        out = workspace / "runs" / str(len(list((workspace / "runs").glob("*"))))
        command = f"train {copy}/configs/full.yaml output_dir={out} train.max_steps=4"
        words = [*command.split(), *WORDS, f"model.path={folder}", *source, *words]
        if ranks == 1:
            assert mvp("", *words) == 0
        else:
            code, output = run_process(
                "-m", "mvp_engine.cli", *words, "--nproc", str(ranks), cwd=workspace
            )
            assert code == 0, output
        return list_runs(out)[-1]

    return train


def records(run, split="train"):
    return [{**one, "perf": None} for one in run.records() if one["split"] == split]


def saved(run, step):
    """The tensors of a checkpoint by name, without the small state that holds times and folders."""
    from mvp_engine.checkpoint.format import Reader

    reader = Reader(run.checkpoints / f"step_{step:08d}")
    return {
        name: reader.read(name) for name in reader.entries if "." in name and name[:4] != "rank"
    }


def check_resume(changed, run, section, *words, step=2, **options):
    """A run from the checkpoint of `step` has the records and the last checkpoint of the run."""
    import torch

    checkpoint = run.checkpoints / f"step_{step:08d}"
    again = changed(section, *words, f"resume={checkpoint}", **options)
    assert records(again) == records(run)
    assert records(again, "eval") == records(run, "eval")
    first, second = (saved(one, records(run)[-1]["step"]) for one in (run, again))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("section", SECTIONS)
def test_changes_section_is_a_short_diff_between_prose_and_what_to_look_at(section):
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith(("+", "-"))]
    assert 0 < len([line for line in lines if line[:3] not in ("+++", "---")]) <= MOST_LINES
    body = PAGE.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    before, _, after = body.partition("```diff")
    assert before.strip().endswith((".", ":"))
    assert "In the\nlog:" in after or "In the log:" in after
    assert f"[{section}](#" in PAGE.read_text()


def test_changes_stale_diff_is_refused(tmp_path):
    shutil.copytree(ROOT / "recipes" / "sft", tmp_path / "sft")
    stale = SECTIONS["Weights of rows"].replace("refuse_preference_rows(micro_batch)", "other()")
    with pytest.raises(AssertionError, match=r"engine.py has no, or two"):
        apply_diff(tmp_path / "sft", stale)


NUMBERED = [{**row, "weight": 0.5 * n, "score": 0.5 * n} for n, row in enumerate(ROWS)]
ALL_ROWS = "train.max_steps=3 optim.schedule=constant optim.warmup=0 optim.lr=0.001 eval.steps=null".split()
ALL_ROWS += [
    "checkpoint.best_metric=null",
    "data.global_batch_size=20",
]  # packs; an epoch is a step


def same_numbers(run, other):
    """Whether two runs have the same metrics, to rounding."""
    for one, two in zip(records(run), records(other), strict=True):
        assert one.keys() == two.keys()
        for name in one.keys() - {"fill", "totals", "perf", "split"}:
            assert one[name] == pytest.approx(two[name], rel=1e-3, abs=1e-6), name


OF_LOSSES = {
    "Weights of rows": [],
    "Focal and DFT loss": ["token_loss=focal"],
    "A loss that needs all logits": [],
    "An auxiliary head": [],
    "An EMA teacher": [],
    "A module of your own on packed batches": ["model.type=module"],
}


@pytest.mark.parametrize("section", OF_LOSSES)
def test_changes_of_losses_do_not_depend_on_micro_batches(changed, section):
    words = [*ALL_ROWS, *OF_LOSSES[section]]
    small = changed(section, *words, "data.pack_tokens=32", "data.max_length=32", rows=NUMBERED)
    large = changed(section, *words, "data.pack_tokens=256", "data.max_length=32", rows=NUMBERED)
    assert records(small)[0]["fill"] != records(large)[0]["fill"]
    same_numbers(small, large)


@pytest.mark.campaign(only=True)
@pytest.mark.parametrize("section", SECTIONS)
def test_changes_on_two_shards_train_as_on_one_rank(changed, section):
    words = [*ALL_ROWS, *OF_LOSSES.get(section, []), "data.pack_tokens=32", "data.max_length=32"]
    words += ["parallel.replicate=1"]
    one = changed(section, *words, rows=NUMBERED)
    two = changed(section, *words, "parallel.shard=2", rows=NUMBERED, ranks=2)
    same_numbers(one, two)


WEIGHTED = [{"prompt": "Hi?", "completion": "Yes", "weight": 3.0}]
WEIGHTED += [{"prompt": "Hello?", "completion": "No!", "weight": 1.0}]


def sources(workspace, **rows):
    """Words for a source of each name; rows of an evaluation, too."""
    words = ["data.sources.rows=null"]
    for name, some in rows.items():
        write(workspace / f"{name}.jsonl", some)
        words.append(f"data.sources.{name}.path={name}.jsonl")
    return [*words, f"data.sources.held.path={name}.jsonl", "data.sources.held.split=eval"]


def test_changes_weights_of_rows_multiply_the_loss_and_its_divisor(changed, workspace):
    words = sources(workspace, a=WEIGHTED[:1], b=WEIGHTED[1:])
    run = changed("Weights of rows", *words, "data.global_batch_size=1")
    first = records(run)[0]  # both rows in one pack, with equally many labels
    assert first["loss_a"] != first["loss_b"]
    assert first["loss"] == pytest.approx((3 * first["loss_a"] + first["loss_b"]) / 4, rel=1e-5)


def test_changes_focal_and_dft_weight_a_token_by_its_probability(changed, uniform):
    """All tokens have p = 1 / V; a gradient through the weight of DFT would change the gradient norm."""
    section = "Focal and DFT loss"
    of = {
        name: records(changed(section, f"token_loss={name}", "train.max_steps=1", folder=uniform))[
            0
        ]
        for name in ("cross_entropy", "dft", "focal")
    }
    p, plain = 1 / TEXT["vocab_size"], of["cross_entropy"]
    assert plain["loss"] == pytest.approx(math.log(1 / p))
    assert [one["nll"] for one in of.values()] == pytest.approx([plain["loss"]] * 3)
    assert of["dft"]["loss"] == pytest.approx(p * plain["loss"])
    assert of["dft"]["grad_norm"] == pytest.approx(p * plain["grad_norm"], rel=1e-4)
    assert of["focal"]["loss"] == pytest.approx((1 - p) ** 2 * plain["loss"])
    slope = (1 - p) ** 2 - 2 * p * (1 - p) * math.log(p)
    assert of["focal"]["grad_norm"] == pytest.approx(slope * plain["grad_norm"], rel=1e-4)


def moved(run, step, model):
    """The largest change of each parameter since the start, by name."""
    from safetensors.torch import load_file

    before = load_file(model / "model.safetensors")
    after = saved(run, step)
    return {
        name: float((after[f"model.hf.{name}"] - value).abs().max())
        for name, value in before.items()
    }


def test_changes_lion_moves_each_layer_by_its_learning_rate(changed, model):
    section = "An optimizer and learning rates by layer"
    words = ["optim.schedule=constant", "optim.warmup=0", "checkpoint.interval=1"]
    run = changed(section, *words)
    rates = {
        "embed_tokens": 0.8**3,
        "layers.0.": 0.8**2,
        "layers.1.": 0.8,
        "lm_head": 1,
        "model.norm": 1,
    }
    for name, change in moved(run, 1, model).items():
        [rate] = [rate for part, rate in rates.items() if part in name]
        assert change == pytest.approx(0.01 * rate, rel=1e-3), name  # Lion's first update is a sign
    check_resume(changed, run, section, *words)


def test_changes_freeze_trains_the_upper_layers_alone(changed, model):
    run = changed("Train the upper layers", "train.max_steps=2")
    for name, change in moved(run, 2, model).items():
        assert (change > 0) == ("layers.1." in name or name == "model.norm.weight"), name
    states = {name for name in saved(run, 2) if name.startswith("optim.")}
    assert states
    assert all("layers.1." in name or "model.norm" in name for name in states)


def test_changes_auxiliary_head_adds_its_loss_and_stays_out_of_the_exported_model(
    changed, workspace
):
    import transformers as hf
    from safetensors.torch import load_file

    section = "An auxiliary head"
    rows = [{**row, "score": 0.5 * n} for n, row in enumerate(ROWS)]
    words = [f"export_link={workspace}/export", "optim.schedule=constant"]
    run = changed(section, *words, rows=rows)
    plain = changed("A gradient statistic", "train.max_steps=1", rows=rows, name="plain")
    size = TEXT["hidden_size"] + 1
    assert re.search(rf"^score\.\* +{size} +{size} +100 %", (run.dir / "log.txt").read_text(), re.M)
    first = records(run)[0]
    assert first["loss"] == pytest.approx(records(plain)[0]["loss"] + 0.1 * first["score_error"])
    head = load_file(workspace / "export" / "heads.safetensors")
    assert {name: len(value) for name, value in head.items()} == {
        "score.weight": 1,
        "score.bias": 1,
    }
    assert (head["score.bias"] == saved(run, 4)["model.score.bias"]).all()
    assert not (saved(run, 2)["model.score.weight"] == saved(run, 4)["model.score.weight"]).all()
    _, info = hf.AutoModelForCausalLM.from_pretrained(
        workspace / "export", output_loading_info=True
    )
    assert not any(info.values())
    check_resume(changed, run, section, *words, rows=rows)


def test_changes_curriculum_reads_one_more_source_in_each_epoch(changed, workspace):
    section = "A curriculum over sources"
    words = sources(workspace, easy=ROWS[:4], hard=ROWS[4:])
    words += (
        "train.max_steps=null train.epochs=2 data.global_batch_size=1 checkpoint.interval=1".split()
    )
    run = changed(section, *words)
    by_epoch = {0: [], 1: []}
    for record in records(run):
        by_epoch[record["epoch"]].append(record.get("loss_hard"))
    assert by_epoch[0]
    assert set(by_epoch[0]) == {None}
    assert any(by_epoch[1])
    assert all(record["lr"] > 0 for record in records(run))  # the schedule ends with the last step
    check_resume(changed, run, section, *words, step=1)


def test_changes_ema_teacher_is_the_average_of_the_weights(changed):
    section = "An EMA teacher"
    words = [
        "optim.schedule=constant",
        "optim.warmup=0",
        "eval.steps=null",
        "checkpoint.best_metric=null",
    ]
    run = changed(section, *words)
    kl = [record["teacher_kl"] for record in records(run)]
    assert kl[0] == pytest.approx(0, abs=1e-6)  # nothing is averaged before the first step
    assert min(kl[1:]) > 1e-5
    check_resume(changed, run, section, *words)
    near = changed(section, *words, "optim.ema=1e-6")  # the average is the last weights
    assert [record["teacher_kl"] for record in records(near)] == pytest.approx([0] * 4, abs=1e-6)


def test_changes_best_checkpoint_follows_the_own_metric(changed):
    section = "A metric that chooses the checkpoint"
    words = ["eval.generation.max_new_tokens=6", "eval.steps=1", "checkpoint.interval=1"]
    run = changed(section, *words)
    values = {record["step"]: record["similarity"] for record in records(run, "eval")}
    assert len(set(values.values())) > 1
    best = max(values, key=lambda step: (values[step], -step))
    assert (run.checkpoints / "best").resolve().name == f"step_{best:08d}"
    check_resume(changed, run, section, *words)


def test_changes_two_optimizers_have_their_own_states_and_schedules(changed):
    section = "Two optimizers"
    run = changed(section)
    states = {name for name in saved(run, 2) if name.startswith("optim.")}
    momentum = {
        name.removesuffix(".momentum_buffer") for name in states if name.endswith("momentum_buffer")
    }
    adam = {name.removesuffix(".exp_avg") for name in states if name.endswith("exp_avg")}
    assert "optim.hf.model.layers.1.mlp.up_proj.weight" in momentum
    assert {"optim.hf.lm_head.weight", "optim.hf.model.layers.1.input_layernorm.weight"} <= adam
    assert not momentum & adam
    rates = [(record["lr/0"], record["lr/1"]) for record in records(run)]
    assert {muon for muon, _ in rates} == {1e-3}
    assert rates[-1][1] < rates[0][1]
    check_resume(changed, run, section)


def test_changes_own_module_gives_a_row_the_same_loss_packed_and_alone(changed, workspace):
    import torch

    from mvp_engine.data.batch import PackedBatch
    from mvp_engine.imports import import_file

    section = "A module of your own on packed batches"
    words = ["model.type=module"]
    run = changed(section, *words)
    assert records(run)[-1]["loss"] < records(run)[0]["loss"]
    check_resume(changed, run, section, *words)
    module = import_file(workspace / "mine" / "model.py").PackedTransformer(50, 16, 2)
    ids = [torch.arange(n, 2 * n) for n in (7, 3, 11)]
    packed = module(PackedBatch.from_sequences(ids), ["log_probs"])["log_probs"]
    alone = [module(PackedBatch.from_sequences([one]), ["log_probs"])["log_probs"] for one in ids]
    torch.testing.assert_close(packed, torch.cat(alone))


def test_changes_gradient_statistic_is_the_share_of_each_layer(changed):
    section = "A gradient statistic"
    run = changed(section, "train.max_steps=2")
    for record in records(run):
        shares = {name: value for name, value in record.items() if name.startswith("grad_share_")}
        assert shares.keys() == {"grad_share_0", "grad_share_1", "grad_share_others"}
        assert sum(shares.values()) == pytest.approx(1)
    frozen = changed(section, "train.max_steps=1", "model.freeze=['*layers.0.*']")
    assert "grad_share_0" not in records(frozen)[0]
    first, without = records(run)[0], records(frozen)[0]
    rest = first["grad_share_1"] / (1 - first["grad_share_0"])
    assert without["grad_share_1"] == pytest.approx(rest, rel=1e-4)


def test_changes_margin_is_that_of_the_label_to_the_best_other_token(changed, uniform):
    """All logits are 0, so no label leads: the margin is 1, with a gradient of its own."""
    section = "A loss that needs all logits"
    words = ["train.max_steps=1"]
    first = records(changed(section, *words, folder=uniform))[0]
    plain = records(changed("A gradient statistic", *words, folder=uniform, name="plain"))[0]
    assert first["margin"] == 1
    assert first["loss"] == pytest.approx(plain["loss"] + 0.1)
    assert first["grad_norm"] != pytest.approx(plain["grad_norm"], rel=1e-3)
    run = changed(section)
    assert records(run)[-1]["margin"] < records(run)[0]["margin"]
    check_resume(changed, run, section)


STAGES = "Two stages with different optimizers"


@pytest.mark.parametrize("step", [1, 2, 4])
def test_changes_two_stages_switch_the_optimizer_and_restart_the_schedule(changed, step):
    words = ["checkpoint.interval=1", "optim.schedule=linear", "train.max_steps=5"]
    run = changed(STAGES, *words)
    for state, expected in (("exp_avg", [1, 1, 0, 0, 0]), ("momentum_buffer", [0, 0, 1, 1, 1])):
        has = [any(name.endswith(state) for name in saved(run, n)) for n in range(1, 6)]
        assert has == expected, state
    # Each has a warm-up of a step and then decays, over two steps and over the three that are left.
    assert [record["lr"] for record in records(run)] == pytest.approx([0.01, 0.01, 0.1, 0.1, 0.05])
    check_resume(changed, run, STAGES, *words, step=step)


def test_changes_two_stages_train_every_parameter_in_both(changed, model):
    words = ["checkpoint.interval=1", "optim.schedule=constant", "optim.warmup=0"]
    run = changed(STAGES, *words)
    assert all(change > 0 for change in moved(run, 1, model).values())
    third, fourth = saved(run, 3), saved(run, 4)
    parameters = [name for name in third if name.startswith("model.")]
    assert parameters
    assert not [name for name in parameters if (third[name] == fourth[name]).all()]


def test_changes_two_stages_are_one_optimizer_after_the_other_with_all_its_options(tmp_path):
    import torch

    from mvp_engine.config import compose

    assert mvp(f"recipe mine --from sft --dir {tmp_path}") == 0
    apply_diff(tmp_path / "mine", SECTIONS[STAGES])
    words = [f"model.path={tmp_path}", f"data.sources.rows.path={tmp_path}"]
    engine_class = compose(tmp_path / "mine" / "configs" / "full.yaml", words).engine_class
    two_stages = inspect.getmodule(engine_class).TwoStages

    def optimizers(params):
        groups = [{"params": params[:1], "weight_decay": 0.2}, {"params": params[1:]}]
        first = torch.optim.AdamW(groups, 0.01, betas=(0.5, 0.6))
        groups = [{"params": params[:1], "weight_decay": 0.3}, {"params": params[1:]}]
        return first, torch.optim.SGD(groups, 0.7, momentum=0.9, nesterov=True)

    def trained(make):
        params = [torch.nn.Parameter(torch.full((4,), float(n))) for n in (1, 2, 3)]
        of_step = make(params)
        for step in range(5):
            for n, param in enumerate(params):
                param.grad = torch.tensor([1.0, -2.0, 3.0, 0.5]) * (n + 1 + step)
            of_step(step).step()
        return torch.stack(params)

    def joined(params):
        both = two_stages(*optimizers(params), 2)
        return lambda step: both

    def plain(params):
        first, second = optimizers(params)
        for group in second.param_groups:
            group["lr"] = 0.01  # the schedule's, which is that of the first
        return lambda step: second if step >= 2 else first

    assert torch.equal(trained(joined), trained(plain))
