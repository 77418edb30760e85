"""Configs on public data: rows in the published schema, on a fake Hub at the revision that the config names.

Each config of docs/public_data.md is inspected and trained for two steps, with a tiny model under the real one's id.
"""

import io
import json
import re
import wave
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers as hf
import yaml
from conftest import ROOT, mvp, read_metrics, user_error
from fake_hub import FakeHub, use_hub
from PIL import Image
from run_files import printed_json, read_json
from safetensors.torch import load_file
from templates.tiny import tokenizer
from test_action_model import transformers_pi0
from test_lerobot import color
from tiny_pi0 import tiny_pi0
from tiny_vlm import TEXT, saved_model

from mvp_engine.config import compose
from mvp_engine.config.engine_class import find_engine
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.hf.weights.hub import dataset_files
from mvp_engine.imports import import_file
from mvp_engine.kit.actions.write import LeRobotWriter
from mvp_engine.kit.plan.planner import Question
from mvp_engine.kit.rl import Answer
from mvp_engine.kit.tiny_processors import word_tokenizer
from mvp_engine.runs import list_runs
from mvp_engine.tools.plan import plan

pytestmark = pytest.mark.slow
RECIPES = ROOT / "recipes"
LLAVA_ALIGN = "qwen3_vl/llava_align"
LLAVA_INSTRUCT = "qwen3_vl/llava_instruct"
ULTRAFEEDBACK = ["preference/ultrafeedback_gpu8", "preference/ultrafeedback_gpu1"]
GSM8K = "math_rl/gsm8k"
LIBRISPEECH = "qwen_audio/librispeech"
PUSHT = "table_vla/pusht"
CONFIGS = [LLAVA_ALIGN, LLAVA_INSTRUCT, *ULTRAFEEDBACK, GSM8K, LIBRISPEECH, PUSHT]
REFERENCE = re.compile(r"(?:hf://)?(?P<name>[\w.-]+/[\w.-]+)[\w.:]*@(?P<revision>[0-9a-f]{40})")
SMALL = "cpu_threads=1 train.precision=fp32 train.max_steps=2 log.interval=1 log.backends=[jsonl] "
SMALL += "data.num_workers=0 parallel.shard=1 checkpoint.interval=2 model.compile=null"
PACKS = "data.pack_tokens=640 data.max_length=640 data.global_batch_tokens=640 optim.warmup=0"
TASK = "Push the T-shaped block onto the T-shaped target."


def config_file(name):
    recipe, _, config = name.partition("/")
    return RECIPES / recipe / "configs" / f"{config}.yaml"


def references(name):
    """The revision of each model and dataset that a config names, by repository."""
    text = config_file(name).read_text()
    without_comments = re.sub(r"#.*", "", text)
    return {found["name"]: found["revision"] for found in REFERENCE.finditer(without_comments)}


def parquet(rows, schema):
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(schema)), out)
    return out.getvalue()


def picture(i):
    out = io.BytesIO()
    Image.new("RGB", (16 + 4 * i, 16), ["red", "green", "blue"][i % 3]).save(out, "JPEG")
    return {"bytes": out.getvalue(), "path": f"00{i}/00{i}.jpg"}


def sound(seconds):
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        noise = np.random.default_rng(0).integers(-999, 999, int(16000 * seconds))
        file.writeframes(noise.astype("<i2").tobytes())
    return {"bytes": out.getvalue(), "path": "103-1240-0000.flac"}


MEDIA = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
SHAREGPT = pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())]))
MESSAGES = pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))
LLAVA = [("id", pa.string()), ("image", MEDIA), ("conversations", SHAREGPT)]
LLAVA += [("data_source", pa.string())]


def llava_row(i, turns, image):
    said = [{"from": ("human", "gpt")[j % 2], "value": text} for j, text in enumerate(turns)]
    return {"id": f"{i:09}", "image": image, "conversations": said, "data_source": "LCS-558K"}


def llava_align():
    ask = "<image>\nPlease generate detailed descriptions of the given image."
    rows = [llava_row(i, [ask, f"The image is plain {i}."], picture(i % 3)) for i in range(12)]
    return {"data/train-00000-of-00027.parquet": parquet(rows, LLAVA)}


def llava_instruct():
    turns = ["<image>\nWhat colour?", "Red.", "Is it large?", "No."]
    rows = [llava_row(i, turns, picture(i % 3)) for i in range(11)]
    rows.append(llava_row(11, ["Hello", "Hello! How can I help?"], None))  # a chat of ShareGPT
    return {"data/train-00000-of-00250.parquet": parquet(rows, LLAVA)}


def ultrafeedback():
    schema = [("prompt", pa.string()), ("prompt_id", pa.string()), ("chosen", MESSAGES)]
    schema += [("rejected", MESSAGES), ("messages", MESSAGES)]
    schema += [("score_chosen", pa.float64()), ("score_rejected", pa.float64())]

    def turns(i, answer):
        asked = {"content": f"say {i}", "role": "user"}
        return [asked, {"content": answer, "role": "assistant"}]

    rows = [
        {
            "prompt": f"say {i}",
            "prompt_id": f"{i:064}",
            "chosen": turns(i, f"It is {i}."),
            "rejected": turns(i, "no"),
            "messages": turns(i, f"It is {i}."),
            "score_chosen": 8.5,
            "score_rejected": 5.0,
        }
        for i in range(40)
    ]
    splits = ["train_prefs", "train_sft", "test_prefs", "test_sft", "train_gen", "test_gen"]
    files = [{"split": split, "path": f"data/{split}-*"} for split in splits]
    card = yaml.safe_dump({"configs": [{"config_name": "default", "data_files": files}]})
    data = {f"data/{split}-00000-of-00001.parquet": parquet(rows, schema) for split in splits}
    return {"README.md": f"---\n{card}---\n".encode(), **data}


def gsm8k():
    rows = [
        {
            "question": f"What is {i} plus 1?",
            "answer": f"{i} + 1 = <<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}",
        }
        for i in range(8)
    ]
    table = parquet(rows, [("question", pa.string()), ("answer", pa.string())])
    configs = []
    files = {}
    for config in ("main", "socratic"):
        splits = [{"split": split, "path": f"{config}/{split}-*"} for split in ("train", "test")]
        configs.append({"config_name": config, "data_files": splits})
        for split in ("train", "test"):
            files[f"{config}/{split}-00000-of-00001.parquet"] = table
    card = f"---\n{yaml.safe_dump({'configs': configs})}---\n"
    return {"README.md": card.encode(), **files}


def librispeech():
    schema = [("file", pa.string()), ("audio", MEDIA), ("text", pa.string())]
    schema += [("speaker_id", pa.int64()), ("chapter_id", pa.int64()), ("id", pa.string())]

    def rows(count):
        place = {"speaker_id": 103, "chapter_id": 1240}
        names = [f"103-1240-{i:04}" for i in range(count)]
        return [
            {
                "file": f"{name}.flac",
                "audio": sound(0.5),
                "text": "CHAPTER ONE",
                "id": name,
                **place,
            }
            for name in names
        ]

    splits = {"train.100": 6, "train.360": 1, "validation": 2, "test": 2}
    return {
        f"clean/{name}/0000.parquet": parquet(rows(count), schema) for name, count in splits.items()
    }


def pusht(folder):
    """Version 3.0, with videos: two episodes of one camera."""
    names = {"observation.state": ["motor_0", "motor_1"], "action": ["motor_0", "motor_1"]}
    camera = {"observation.image": (96, 96)}
    sizes = {"observation.state": 2, "action": 2}
    writer = LeRobotWriter(
        folder, fps=10, sizes=sizes, names=names, cameras=camera, version="v3.0", codec="libx264"
    )
    with writer:
        for episode in range(2):
            places = np.linspace(10, 500, 12, dtype=np.float32)
            columns = {key: np.stack([places, places + episode], 1) for key in sizes}
            frames = np.stack([np.tile(color(episode, i), (96, 96, 1)) for i in range(12)])
            writer.add(columns, {"observation.image": frames}, TASK)
    return folder


def save_models(folder):
    """A tiny model for each id, with the tokenizer or processor of its family."""
    torch.manual_seed(0)
    sizes = {**TEXT, "initializer_range": 0.5}
    texts = {
        "alignment-handbook/zephyr-7b-sft-full": (
            "zephyr",
            hf.MistralForCausalLM,
            hf.MistralConfig,
        ),
        "Qwen/Qwen2.5-1.5B-Instruct": ("qwen2_5", hf.Qwen2ForCausalLM, hf.Qwen2Config),
    }
    for name, (words, model, config) in texts.items():
        model(config(**sizes)).save_pretrained(folder / name)
        tokenizer(words).save_pretrained(folder / name)
    audio = yaml.safe_load((RECIPES / "qwen_audio/configs/cpu.yaml").read_text())["model"]["config"]
    name = folder / "Qwen/Qwen2-Audio-7B-Instruct"
    config = hf.AutoConfig.for_model(**audio)
    hf.Qwen2AudioForConditionalGeneration(config).save_pretrained(name)
    import_file(RECIPES / "qwen_audio/data.py").make_processor().save_pretrained(name)
    transformers_pi0(tiny_pi0()).save_pretrained(folder / "lerobot/pi0_base")
    words = word_tokenizer(re.findall(r"\w+|[^\w ]", TASK))
    words.save_pretrained(folder / "google/paligemma-3b-pt-224")
    saved_model(folder).rename(folder / "vlm")
    return {
        "Qwen/Qwen3-VL-2B-Instruct": folder / "vlm",
        **{name: folder / name for name in (*texts, "Qwen/Qwen2-Audio-7B-Instruct")},
        "lerobot/pi0_base": folder / "lerobot/pi0_base",
        "google/paligemma-3b-pt-224": folder / "google/paligemma-3b-pt-224",
    }


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """All models and datasets, at the revisions of the configs alone: on `main` there is nothing to train with."""
    folder = tmp_path_factory.mktemp("public")
    contents = {
        **save_models(folder),
        "datasets/lmms-lab/LLaVA-ReCap-558K": llava_align(),
        "datasets/lmms-lab/LLaVA-NeXT-Data": llava_instruct(),
        "datasets/HuggingFaceH4/ultrafeedback_binarized": ultrafeedback(),
        "datasets/openai/gsm8k": gsm8k(),
        "datasets/openslr/librispeech_asr": librispeech(),
        "datasets/lerobot/pusht": pusht(folder / "pusht"),
    }
    revisions = {
        name: revision for config in CONFIGS for name, revision in references(config).items()
    }
    with FakeHub().serve() as hub, pytest.MonkeyPatch.context() as patch:
        for name, files in contents.items():
            hub.add(name, {"README.md": b"moved"})
            current = hub.repos[name].branches["main"]
            commit = hub.add(name, files)
            repo = hub.repos[name]
            repo.commits[revisions[name.removeprefix("datasets/")]] = repo.commits.pop(commit)
            repo.branches["main"] = current
        use_hub(hub.url, folder / "home", patch)
        patch.delenv("HF_TOKEN", raising=False)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.chdir(folder)
        yield hub


@pytest.fixture(scope="module")
def answers():
    return import_file(RECIPES / "math_rl/answers.py")


@pytest.fixture
def run(hub, tmp_path, capsys):
    """run("qwen3_vl/llava_align", words): what `mvp data inspect` shows of a config, then two steps of training."""

    def call(name, words=""):
        words = f"{SMALL} {words}".split()
        assert mvp(f"data inspect {config_file(name)} --json --limit 20", *words) == 0
        facts = printed_json(capsys)
        assert mvp(f"train {config_file(name)} output_dir={tmp_path}", *words) == 0
        [run] = list_runs(tmp_path)
        records = read_metrics(tmp_path)
        assert [record["step"] for record in records] == [1, 2]
        assert all(np.isfinite(record["loss"]) for record in records)
        pins = read_json(run.dir / "run.json").get("hub", {})
        assert pins == {}  # the config names commits already
        return facts, records, run

    return call


def texts_of(row, side=0):
    """The text of a row as the model sees it, with media as <kind>, and the parts with loss."""
    sequence = row["sequences"][side]
    text = ""
    learnt = []
    for segment in sequence["text"]:
        if "media" in segment:
            text += f"<{sequence['media'][segment['media']]['kind']}>"
            continue
        text += segment["text"]
        learnt += [segment["text"]] if segment["learnt"] else []
    return text, learnt


@pytest.mark.parametrize("name", CONFIGS)
def test_public_config_pins_every_model_and_dataset_to_a_commit(name):
    text = re.sub(r"#.*", "", config_file(name).read_text())
    named = set(re.findall(r"hf://[\w./:@-]+|(?<=path: )[A-Z][\w.-]+/[\w.@-]+", text))
    assert all(REFERENCE.fullmatch(one) for one in named), named
    assert named or name == "preference/ultrafeedback_gpu1"


def test_llava_align_learns_captions_by_the_projector_alone(run):
    facts, _, run = run(LLAVA_ALIGN, f"{PACKS} data.sources.captions.hold_out=0.2 eval.steps=null")
    assert facts["bad"]["total"] == 0
    assert facts["sample"]["formats"] == {"sharegpt": 10}
    text, learnt = texts_of(facts["rows"][0])
    assert re.search(r"<image>.*Please generate detailed descriptions", text, re.DOTALL)
    [answer] = learnt
    assert re.fullmatch(r"The image is plain \d+\.<\|im_end\|>\n?", answer)
    before = load_file("vlm/model.safetensors")
    [export] = run.dir.glob("hf_step_*")
    after = load_file(export / "model.safetensors")
    changed = [name for name in after if not torch.equal(before[name], after[name])]
    assert changed
    assert all("merger" in name for name in changed)


def test_llava_instruct_learns_all_answers_and_keeps_chats_without_image(run, hub):
    words = f"{PACKS} data.sources.chats.hold_out=null eval.steps=null model.path=vlm"
    facts, _, _ = run(LLAVA_INSTRUCT, words)
    assert facts["bad"]["total"] == 0
    rows = [texts_of(row) for row in facts["rows"]]
    with_image = [learnt for text, learnt in rows if "<image>" in text]
    assert len(with_image) == 11
    assert all(learnt == ["Red.<|im_end|>", "No.<|im_end|>"] for learnt in with_image)
    [of_text] = [learnt for text, learnt in rows if "<image>" not in text]
    assert "How can I help?" in of_text[0]


@pytest.mark.parametrize("name", ULTRAFEEDBACK)
def test_ultrafeedback_pairs_learn_the_answers_of_both_sides(run, name):
    words = "data.global_batch_size=1 data.pack_tokens=256 data.max_length=256 eval.steps=2"
    facts, records, run = run(name, f"{words} optim.warmup=0")
    assert facts["bad"]["total"] == 0
    assert facts["sample"]["formats"] == {"preference": 40}
    row = facts["rows"][0]
    [chosen, rejected] = [texts_of(row, side) for side in (0, 1)]
    assert chosen[0].count("say") == rejected[0].count("say") == 1  # the prompt is in three columns
    assert re.match(r"It is \d+\.", chosen[1][0])
    assert rejected[1][0].startswith("no")
    assert records[0]["loss"] == pytest.approx(np.log(2), abs=1e-3)
    assert "accuracy" in next(iter(run.records("eval")))


def test_gsm8k_rewards_the_number_and_the_model_sees_the_question_alone(run):
    words = "rl.prompts_per_step=2 rl.num_generations=2 rl.updates=1 generation.max_new_tokens=8 reward.workers=0"
    words += " data.pack_tokens=512 data.max_length=400 generation.max_gap=null eval.steps=2 eval.batches=1"
    facts, records, run = run(GSM8K, words)
    text, learnt = texts_of(facts["rows"][0])
    assert "<|im_start|>system\nReason step by step." in text
    assert re.search(r"What is \d plus 1\?", text)
    assert "<<" not in text
    assert not learnt
    assert {"reward_right", "reward_format", "kl"} <= records[0].keys()
    assert "reward_right" in next(iter(run.records("eval")))
    [export] = run.dir.glob("hf_step_*")
    exported = hf.AutoTokenizer.from_pretrained(export)
    question = [{"role": "user", "content": "2+2?"}]
    assert "Reason step by step." in exported.apply_chat_template(question, tokenize=False)
    own = [{"role": "system", "content": "Be brief."}, *question]
    assert "Reason step by step." not in exported.apply_chat_template(own, tokenize=False)


def test_librispeech_learns_the_transcript_and_logs_word_errors(run):
    words = "data.pack_tokens=128 data.max_length=128 data.global_batch_tokens=128 optim.warmup=0"
    words += " eval.steps=2 eval.generation.max_new_tokens=4 lora.rank=2"
    facts, _, run = run(LIBRISPEECH, words)
    assert facts["bad"]["total"] == 0
    assert facts["sources"][0]["rows"] == 6  # train.100, not train.360
    text, learnt = texts_of(facts["rows"][0])
    assert "<audio>" in text
    assert "".join(learnt).startswith("CHAPTER ONE<|im_end|>")
    assert "wer_eval" in next(iter(run.records("eval")))
    of_test = re.search(r"mvp evaluate CONFIG (.+)", config_file(LIBRISPEECH).read_text())[1]
    parent = run.dir.parent
    assert (
        mvp(f"evaluate {config_file(LIBRISPEECH)} output_dir={parent} {SMALL} {words} {of_test}")
        == 0
    )


def test_pusht_trains_pi0_on_frames_of_a_lerobot_folder_of_the_hub(run, hub):
    words = "data.pack_tokens=64 data.sources.pusht.hold_out=0.5 data.global_batch_size=1 optim.warmup=0"
    facts, _, _ = run(PUSHT, f"{words} simulation=null eval.steps=2")
    assert facts["bad"]["total"] == 0
    assert facts["sources"][0]["rows"] == 12  # one of two episodes
    row = facts["rows"][0]["sequences"][0]
    assert [one["kind"] for one in row["media"]] == ["image"]
    assert len(row["actions"]) == 4
    assert "Push the T - shaped block" in texts_of(facts["rows"][0])[0]
    assert {"file-000.mp4", "info.json"} <= set(hub.downloads())


def test_llava_pretrain_as_downloaded_trains_like_the_parquet_files(hub, tmp_path, capsys):
    """A json list, and images in folders next to it, as LLaVA-Pretrain has them."""
    rows = []
    for i in range(3):
        image = picture(i)
        file = tmp_path / "images" / image["path"]
        file.parent.mkdir(parents=True)
        file.write_bytes(image["bytes"])
        rows.append(llava_row(i, ["<image>\nDescribe it.", f"Plain {i}."], image["path"]))
    (tmp_path / "blip_laion_cc_sbu_558k.json").write_text(json.dumps(rows))
    words = f"{PACKS} data.sources.captions.path={tmp_path}/blip_laion_cc_sbu_558k.json"
    words += f" data.sources.captions.root={tmp_path}/images data.sources.captions.hold_out=null"
    assert mvp(f"data inspect {config_file(LLAVA_ALIGN)} --json {words}") == 0
    facts = printed_json(capsys)
    assert facts["sources"][0]["good"] == 3
    assert texts_of(facts["rows"][0])[1] == ["Plain 0.<|im_end|>"]


def test_pusht_without_the_simulator_says_what_to_install(hub, tmp_path, capsys):
    if find_spec("gymnasium"):
        pytest.skip("gymnasium is installed")
    words = f"{SMALL} data.pack_tokens=64 output_dir={tmp_path}"
    assert mvp(f"train {config_file(PUSHT)} {words}") == EXIT_USER_ERROR
    assert "mvp-engine[sim]" in capsys.readouterr().err
    assert not any(run.checkpoint_list() for run in list_runs(tmp_path))


def test_lerobot_dataset_of_the_hub_has_no_splits(hub):
    with user_error(r"hf://lerobot/pusht:train\S*: it is one folder, .*hold_out"):
        revision = references(PUSHT)["lerobot/pusht"]
        dataset_files(f"hf://lerobot/pusht:train@{revision}")


ANSWERS = [
    ("So she has 5 + 37 = 42.\n#### 42", "42"),
    ("#### 1,234", "1234"),
    ("#### 1\u202f234", "1234"),
    ("#### $1,234.50", "1234.5"),
    ("#### €9.99", "9.99"),
    ("#### 42 apples", "42"),
    ("#### 42.", "42"),
    ("#### 2.0", "2"),
    ("#### .5", "1/2"),
    ("#### 50%", "50"),
    ("#### 007", "7"),
    ("#### 3/4", "0.75"),
    ("#### 1 3/4 cups", "1.75"),
    ("#### -5", "-5"),
    ("#### \u22125", "-5"),
    ("#### -$5", "-5"),
    ("#### $-5", "-5"),
    ("The answer is 42.", "42"),
    ("The answer is:\n42", "42"),
    ("The final answer is: $42$", "42"),
    ("**Answer:** 42\nThat took 3 steps.", "42"),
    ("The answer is 3 + 4 = 7", "7"),
    ("First answer: 3. Then the answer is 4.", "4"),
    ("To answer this we need 3 steps. In total 12", "12"),
    (r"Thus \boxed{42}, in 3 steps.", "42"),
    (r"\boxed{3} is wrong, so \boxed{4}", "4"),
    (r"\boxed{x = 7}", "7"),
    (r"\boxed{\$1{,}234}", "1234"),
    (r"\boxed{42\text{ apples}}", "42"),
    (r"\boxed{\frac{1}{2}}", "0.5"),
    (r"\boxed{-\frac{3}{4}}", "-0.75"),
    (r"\boxed{\dfrac12}", "0.5"),
    (r"\boxed{1\frac{1}{2}}", "1.5"),
    (r"\[ 12 \times 3 = 36 \]", "36"),
    ("10-3 = 7", "7"),
    ("from 10-7", "7"),
    ("between 3\u20135", "5"),
    ("60 miles/hour", "60"),
    ("a total of 3,000.", "3000"),
    ("2^10 = 1024", "1024"),
]


@pytest.mark.parametrize("written, expected", ANSWERS)
def test_answer_of_a_completion_is_read_as_an_exact_number(answers, written, expected):
    assert answers.is_right(written, f"some steps, 99 of them\n#### {expected}")
    assert not answers.is_right(written, "#### 99")


@pytest.mark.parametrize(
    "written", ["", "I do not know.", "#### ", "#### 5/0", "#### 42.5", "9" * 5000]
)
def test_completion_without_the_number_is_wrong(answers, written):
    assert not answers.is_right(written, "#### 42")
    with pytest.raises(ValueError, match="ends with no number"):
        answers.is_right(written, "no solution")


def test_math_reward_counts_the_number_and_the_last_line():
    config = compose(str(config_file(GSM8K)), ["format_weight=0.25"]).config
    engine_class, _ = find_engine("math_rl", config_file(GSM8K))
    engine = SimpleNamespace(config=config)
    row = {"question": "", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"}
    texts = {"It is 42.\n#### 42": (1, 0.25), "It is 42.": (1, 0), "#### 41\n": (0, 0.25)}
    texts |= {"#### 42 apples": (1, 0), "#### 42\nI hope this helps.": (1, 0)}
    for text, (right, last_line) in texts.items():
        answer = Answer(text, [1], "stop", [-1.0], version=0)
        assert engine_class.reward(engine, row, answer) == {"right": right, "format": last_line}


FIGURES = re.findall(
    r"^\| `(\w+/\w+)` \| (\d)(?: `(.+?)`)? \| (\d+) \| ([\d.]+) GiB \| ([\d.]+) s \| ([\d.]+) k \|",
    (ROOT / "docs/public_data.md").read_text(),
    re.MULTILINE,
)
SHAPES = yaml.safe_load((ROOT / "benchmarks/hardware/shapes.yaml").read_text())


def test_public_data_page_has_the_figures_of_the_plan(tmp_path, monkeypatch):
    assert {figure[0] for figure in FIGURES} == set(CONFIGS)
    monkeypatch.chdir(tmp_path)
    for name, gpus, more, tokens, gib, seconds, speed in FIGURES:
        found = re.search(
            r"# Fits on 80 GB: mvp plan CONFIG .*(model\.path=(\S+))", config_file(name).read_text()
        )
        hf.AutoConfig.for_model(**SHAPES[found[2]]).save_pretrained(tmp_path / found[2])
        words = [found[1], *more.split()]
        options = {"gpu": "H100", "gpus": int(gpus), "tokens": int(tokens)}
        facts = plan(Question(str(config_file(name)), words, **options))
        figures = facts["peak_gib"], facts["step_s"], facts["tokens_per_s"] / 1000
        expected = [float(gib), float(seconds), float(speed)]
        assert list(figures) == pytest.approx(expected, rel=0.02, abs=0.006), (name, gpus)
        assert facts["fits"]
