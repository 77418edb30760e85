"""The qwen3 recipe: the README's commands run in order, held-out data is held out, GPU configs name missing keys."""

import math
import re

import pytest
from conftest import ROOT, read_metrics, readme_commands, user_error
from run_files import json_lines

from mvp_engine.cli import main
from mvp_engine.config import compose
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.launch import launch
from mvp_engine.runs import list_runs

pytestmark = pytest.mark.slow
FOLDER = ROOT / "recipes" / "qwen3"
TASKS = ("count", "largest", "next", "reverse")
SMALL = "made.modules=20 made.chats=60 log.interval=1 log.backends=[terminal,file,jsonl]".split()
QUICK = {
    "pretrain_cpu": [
        "train.max_steps=8",
        "eval.generation.max_samples=3",
        "eval.generation.max_new_tokens=4",
    ],
    "sft_cpu": ["eval.generation.max_samples=8"],
}
QUICK["sft_cpu"] += [
    "train.max_steps=6",
    "eval.steps=6",
    "eval.generation.max_new_tokens=4",
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A folder in which all commands of the README ran, in order, with little data and few steps."""
    folder = tmp_path_factory.mktemp("qwen3")
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.chdir(ROOT)
    seen = []
    for _, *words in readme_commands("qwen3"):
        stage = next(
            (name for name in QUICK if any(word.endswith(f"{name}.yaml") for word in words)), None
        )
        if stage is None or "--nproc" in words:  # needs GPUs or several processes
            continue
        more = [] if words[0] == "data" else QUICK[stage]
        assert main([*words, f"output_dir={folder}", *SMALL, *more]) == 0, words
        seen.append((words[0], stage, "workflow=report" in words))
    monkeypatch.undo()
    wanted = [("train", stage, report) for stage in QUICK for report in (False, True)]
    assert [one for one in seen if one[0] == "train"] == wanted
    assert ("data", "sft_cpu", False) in seen
    return folder


def run_of(folder, stage):
    return next(run.dir for run in list_runs(folder) if run.id.startswith(f"qwen3_{stage}-"))


def records(folder, stage, split):
    found = json_lines(run_of(folder, stage) / "metrics.jsonl")
    return [record for record in found if record["split"] == split]


def kit_of(folder, stage, *words):
    composed = compose(
        FOLDER / "configs" / f"{stage}_cpu.yaml", [f"output_dir={folder}", *SMALL, *words]
    )
    engine = composed.engine_class
    return engine.data_kit(composed.config)


def test_qwen3_stages_chain_through_exports_and_reduce_the_loss(ran):
    base, chat = ran / "qwen3_base", ran / "qwen3_chat"
    assert base.resolve() == run_of(ran, "pretrain") / "hf_step_8"
    assert chat.resolve() == run_of(ran, "sft") / "hf_step_6"
    for stage in ("pretrain", "sft"):
        train = records(ran, stage, "train")
        assert train[-1]["loss"] < 0.97 * train[0]["loss"]
    assert {"loss_docs", "loss_code", "bits_per_byte"} <= records(ran, "pretrain", "eval")[
        -1
    ].keys()
    held_out = records(ran, "sft", "eval")[-1]
    assert {f"{what}_{task}" for what in ("loss", "exact") for task in TASKS} <= set(held_out)
    assert not [name for name in records(ran, "pretrain", "eval")[-1] if name.startswith("exact")]


def test_qwen3_log_has_the_packing_plan_before_training(ran):
    for stage in ("pretrain", "sft"):
        assert (
            "% full"
            in (run_of(ran, stage) / "log.txt").read_text().partition("parameters train")[0]
        )


def test_qwen3_reports_show_continuations_and_answers_without_verdicts(ran):
    for stage in ("pretrain", "sft"):
        page = (run_of(ran, stage) / "report.html").read_text()
        assert "the model's completion" in page
        assert "expected answer" not in page
    assert "system: Answer in a sentence." in page


def test_qwen3_export_has_eos_tokens_and_generates_with_transformers(ran):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(ran / "qwen3_chat")
    ends = GenerationConfig.from_pretrained(ran / "qwen3_chat").eos_token_id
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|endoftext|>", "<|im_end|>"]
    model = AutoModelForCausalLM.from_pretrained(ran / "qwen3_chat").eval()
    messages = [{"role": "user", "content": "What comes after 41?"}]
    given = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert (
        model.generate(**given, max_new_tokens=2, do_sample=False).shape[1]
        > given["input_ids"].shape[1]
    )


def test_qwen3_bits_per_byte_equal_the_bytes_of_the_text(ran):
    kit, losses = kit_of(ran, "pretrain"), records(ran, "pretrain", "eval")[-1]
    batches = list(kit.loader("eval", global_batch_size=1))
    trained = [
        ids[ids >= 0].tolist()
        for batch in batches
        for ids in batch.labels.split(batch.lengths.tolist())
    ]
    size = sum(len(kit.processor.decode(ids, skip_special_tokens=True).encode()) for ids in trained)
    bits = losses["loss"] * sum(map(len, trained)) / math.log(2)
    # A first token may split a character.
    assert losses["bits_per_byte"] == pytest.approx(bits / size, rel=2e-3)


def test_qwen3_bits_per_byte_do_not_depend_on_the_loss_that_trains(ran, capsys):
    words = [str(FOLDER / "configs" / "pretrain_cpu.yaml"), f"output_dir={ran}", *SMALL]
    words += ["resume=auto", "eval.generation=null"]
    found = []
    for smoothing in (0.0, 0.5):
        assert main(["evaluate", *words, f"loss.label_smoothing={smoothing}"]) == 0
        line = re.search(r" loss (\S+).* bits_per_byte (\S+)", capsys.readouterr().out)
        found.append([float(value) for value in line.groups()])
    assert found[1][0] > found[0][0] + 0.1
    assert found[1][1] == found[0][1]


def test_qwen3_data_held_out_modules_and_numbers_are_not_in_training_rows(ran):
    made = ran / "qwen3_data"
    rows = {file.stem: json_lines(file) for file in made.glob("*.jsonl")}
    seen, kept = (
        {row["text"].split("\n")[0].split(".")[0] for row in rows[f"{s}_docs"]}
        for s in ("train", "eval")
    )
    assert len(seen) > len(kept) > 0
    assert not seen & kept
    numbers = {"train": set(), "eval": set()}
    for split in numbers:
        for message in (
            m for task in TASKS for row in rows[f"{split}_{task}"] for m in row["messages"]
        ):
            if message["role"] == "user":
                numbers[split] |= set(re.findall(r"\d+", message["content"]))
    assert numbers["eval"]
    assert not numbers["train"] & numbers["eval"]


def test_qwen3_sft_loss_mask_covers_assistant_turns_only(ran):
    kit = kit_of(ran, "sft")
    row = (
        {"role": "system", "content": "Give the answer alone."},
        {"role": "user", "content": "What comes after 5?"},
    )
    row += (
        {"role": "assistant", "content": "6"},
        {"role": "user", "content": "What is 89 backwards?"},
    )
    (one,) = kit.row_encoder.encode(
        {"messages": [*row, {"role": "assistant", "content": "98"}]}, None, ran
    )
    trained = [id for id, loss in zip(one.ids, one.loss, strict=True) if loss]
    assert kit.processor.decode(trained) == "6<|im_end|>98<|im_end|>"


CHATS = ["data.sources.chats.path=a.jsonl", "data.sources.held_chats.path=b.jsonl", "model.path=x"]
TEXTS = ["data.sources.texts.path=a.jsonl", "data.sources.held_texts.path=b.jsonl", "processor=x"]
WANTED = {"pretrain_gpu8": TEXTS, "sft_gpu1": CHATS, "sft_gpu1_lora": CHATS, "sft_gpu8": CHATS}
WANTED |= {"sft_long_gpu8": CHATS, "sft_fp8_gpu1": CHATS, "sft_moe_gpu8": CHATS}
WANTED |= {"pretrain_moe_gpu8": TEXTS, "sft_megatron_gpu8": CHATS}


@pytest.mark.parametrize("name", WANTED)
def test_qwen3_gpu_configs_compose_and_name_missing_keys(name):
    file, words = FOLDER / "configs" / f"{name}.yaml", WANTED[name]
    config = compose(file, words).config
    assert (config.train.precision, config.data.micro_batch_size) == ("bf16", 1)
    assert config.model.compile == (None if config.model.backend == "megatron" else "inductor")
    ranks = 8 if name.endswith("gpu8") else 1
    sizes = config.parallel.model_dump(
        include={"shard", "context", "ulysses", "tensor", "pipeline"}
    )
    assert math.prod(sizes.values()) == ranks
    data_ranks = config.parallel.shard
    assert config.data.global_batch_tokens % (data_ranks * config.data.max_length) == 0
    for i, word in enumerate(words):
        with user_error(f"{word.partition('=')[0]}="):
            compose(file, words[:i] + words[i + 1 :])


def test_qwen3_pretrain_gpu8_has_the_shape_of_qwen3_1_7b():
    from mvp_engine.model_engine import ModelSource, engine_class

    config = compose(FOLDER / "configs" / "pretrain_gpu8.yaml", TEXTS).config
    model = engine_class("language_model").build_model(ModelSource(None, config.model.config))
    assert sum(param.numel() for param in model.parameters()) == 1_720_574_976
    assert (config.optim.schedule, config.guard.spike_sigmas, config.data.sources[0].stream) == (
        "wsd",
        6.0,
        True,
    )


SMALL_RUNS = [
    "sft_gpu1_lora",
    "pretrain_gpu8",
    "pretrain_moe_gpu8",
    "sft_fp8_gpu1",
    "sft_long_gpu8",
]


@pytest.mark.parametrize("name", SMALL_RUNS)
def test_qwen3_gpu_configs_train_at_small_sizes(name, ran, tmp_path):
    kind, task = ("texts", "docs") if "pretrain" in name else ("chats", "next")
    names = {"train": kind, "eval": f"held_{kind}"}
    words = [
        f"data.sources.{names[split]}.path={ran}/qwen3_data/{split}_{task}.jsonl" for split in names
    ]
    words += [
        f"output_dir={tmp_path}",
        f"train.precision={'bf16' if 'fp8' in name else 'fp32'}",
        "model.compile=null",
        "data.pack_tokens=512",
    ]
    words += [
        "data.num_workers=0",
        "train.max_steps=2",
        "data.global_batch_tokens=512",
        "eval.generation=null",
        "parallel={shard: 1, expert: 1, ulysses: 1, context: 1}",
    ]
    words += "log.interval=1 eval.batches=1 optim.warmup=0 optim.lr=1e-3".split()
    if "pretrain" in name:
        tiny = ["n_routed_experts=8"] if "moe" in name else []
        tiny += [
            f"num_hidden_layers={2 if 'moe' in name else 1}",
            "hidden_size=32",
            "intermediate_size=48",
            "head_dim=8",
            "vocab_size=1024",
        ]
        words += [f"model.config.{one}" for one in tiny] + [
            "data.max_length=512",
            f"processor={ran / 'qwen3_base'}",
        ]
    else:
        words += [f"model.path={ran / 'qwen3_base'}"]
    assert launch(str(FOLDER / "configs" / f"{name}.yaml"), words) == 0
    assert len(read_metrics(tmp_path)) == 2


def test_qwen3_sft_without_pretraining_export_is_a_user_error(tmp_path, capsys):
    words = [f"output_dir={tmp_path}", *SMALL]
    assert launch(str(FOLDER / "configs" / "sft_cpu.yaml"), words) == EXIT_USER_ERROR
    assert "qwen3_base is not a folder" in capsys.readouterr().err
