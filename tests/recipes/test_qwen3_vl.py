"""The qwen3_vl recipe at a small size: the README's commands in order, what trains, exports, held-out data."""

import json
from pathlib import Path

import pytest
import torch
from conftest import ROOT, mvp, readme_commands, user_error
from folders import entries
from run_files import json_lines, write_json

from mvp_engine.checkpoint.format import Reader
from mvp_engine.cli import main
from mvp_engine.config import compose
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.kit import MLLMModelKit
from mvp_engine.model_engine import ModelSource

pytestmark = pytest.mark.slow
RECIPE = ROOT / "recipes" / "qwen3_vl"
QUICK = ["shapes.rows=60", "data.num_workers=0"]
SIZES = [
    "data.pack_tokens=320",
    "eval.generation.max_new_tokens=3",
    "log.backends=[file,jsonl]",
]
STEPS = {"words": 12, "align": 6, "pretrain": 10, "instruct": 6, "instruct_lora": 6}


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """The folder in which all commands of the README ran."""
    folder = tmp_path_factory.mktemp("qwen3_vl")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for words in readme_commands("qwen3_vl"):
            if "gpu" not in words[2]:
                words = [word.replace("recipes/", f"{ROOT}/recipes/", 1) for word in words[1:]]
                small = {"train": [*QUICK, *SIZES], "data": QUICK}.get(words[0], [])
                if words[0] == "train":
                    small = [*small, f"train.max_steps={STEPS[Path(words[1]).stem]}"]
                assert main([*words, *small]) == 0, words
    return folder / "outputs"


def exported(chain, stage):
    return dict(entries(chain / "qwen3_vl" / stage / "model.safetensors"))


def held_out(chain, stage):
    (file,) = {path.resolve().parent / "metrics.jsonl" for path in [chain / "qwen3_vl" / stage]}
    return [r for r in map(json.loads, file.read_text().splitlines()) if r["split"] == "eval"][-1]


def test_qwen3_vl_stages_start_from_the_previous_export_and_train_their_parts(chain):
    weights = {stage: exported(chain, stage) for stage in STEPS}
    parts = MLLMModelKit.parts(MLLMModelKit().build(ModelSource(str(chain / "qwen3_vl" / "words"))))
    before = {
        "align": "words",
        "pretrain": "align",
        "instruct": "pretrain",
        "instruct_lora": "pretrain",
    }
    moves = {stage: {"vision", "projector", "llm"} for stage in before}
    moves |= {"align": {"projector"}, "instruct_lora": {"projector", "llm"}}
    for stage, earlier in before.items():
        same = {}
        for name, value in weights[stage].items():
            same.setdefault(parts[f"hf.{name}"], []).append(
                torch.equal(value, weights[earlier][name])
            )
        assert {part for part, equal in same.items() if not all(equal)} == moves[stage], stage
        assert same.keys() == {"vision", "projector", "llm"}
    losses = [held_out(chain, stage)["loss_captions"] for stage in ("words", "align", "pretrain")]
    assert losses == sorted(losses, reverse=True)
    assert {
        f"exact_{name}" for name in ("captions", "several", "films", "colour", "move")
    } <= held_out(chain, "align").keys()


def test_qwen3_vl_lora_checkpoint_peft_export_and_merged_export_agree(chain):
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    saved = Reader((chain / "lora" / "checkpoints" / "latest").resolve()).entries
    trained = [name for name in saved if name.startswith("model.")]
    assert trained
    assert all(
        ".lora_" in name or ".merger." in name or ".deepstack_merger_list." in name
        for name in trained
    )
    base = AutoModelForImageTextToText.from_pretrained(chain / "qwen3_vl" / "pretrain")
    ids = torch.arange(7, 60)[None]
    before = base(ids).logits
    by_peft = PeftModel.from_pretrained(base, str(chain / "lora" / "adapter")).eval()(ids).logits
    merged = (
        AutoModelForImageTextToText.from_pretrained(chain / "qwen3_vl" / "instruct_lora")
        .eval()(ids)
        .logits
    )
    assert torch.allclose(merged, by_peft, atol=1e-5)
    assert not torch.allclose(before, by_peft, atol=1e-3)


def test_qwen3_vl_report_shows_images_and_video_frames(chain):
    page = ((chain / "qwen3_vl" / "instruct").resolve().parent / "report.html").read_text()
    assert "Which way does it move?" in page
    assert page.count("data:image/png") > 24  # a video has several


def test_qwen3_vl_data_held_out_files_differ_and_videos_are_files_and_frames(chain):
    from qwen3_vl import data

    files = {
        split: {
            file.read_bytes()
            for file in (chain / "shapes" / split).rglob("*.*")
            if file.suffix != ".jsonl"
        }
        for split in ("train", "eval")
    }
    assert len(files["train"]) > 100
    assert not files["train"] & files["eval"]
    rows = json_lines(chain / "shapes" / "train" / "films.jsonl")
    assert {type(row["video"]) for row in rows} == {str, list}
    texts = [
        (chain / "shapes" / split / "texts.jsonl").read_text().splitlines()
        for split in ("train", "eval")
    ]
    assert not set(texts[0]) & set(texts[1])
    processor = data.prepare(str(chain / "shapes"), 60)
    about = compose(str(RECIPE / "configs" / "words.yaml"), []).config.model.config
    for kind in ("image", "video"):
        assert (
            processor.tokenizer.convert_tokens_to_ids(f"<|{kind}_pad|>")
            == about[f"{kind}_token_id"]
        )
    assert len(processor.tokenizer) <= about["text_config"]["vocab_size"]


def test_qwen3_vl_stage_without_the_previous_export_is_a_user_error(tmp_path, capsys):
    assert mvp(f"train {RECIPE}/configs/align.yaml output_dir={tmp_path}") == EXIT_USER_ERROR
    assert "it is what the stage before exports, so train that first" in capsys.readouterr().err


REAL = {  # the sizes of Qwen3-VL-2B
    "model_type": "qwen3_vl",
    "tie_word_embeddings": True,
    "text_config": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
        },
    },
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "out_hidden_size": 2048,
    },
}


@pytest.mark.parametrize(
    "name, sources",
    [
        ("align_gpu1", ["captions", "held_captions"]),
        ("pretrain_gpu8", ["captions", "interleaved", "videos", "texts", "held"]),
        ("instruct_gpu1", ["chats", "held_chats"]),
        ("instruct_gpu1_lora", ["chats", "held_chats"]),
        ("instruct_gpu1_qlora", ["chats", "held_chats"]),
        ("instruct_gpu8", ["chats", "held_chats"]),
    ],
)
def test_qwen3_vl_gpu_configs_compose_and_name_missing_keys(name, sources, tmp_path):
    config = str(RECIPE / "configs" / f"{name}.yaml")
    with user_error(rf"has keys without a value.* data\.sources\.{sources[0]}\.path=\.\.\."):
        compose(config, [])
    write_json(tmp_path / "config.json", REAL)
    words = [
        f"model.path={tmp_path}",
        *(f"data.sources.{source}.path=rows.jsonl" for source in sources),
    ]
    found = compose(config, words).config
    assert found.train.precision == "bf16"
    assert found.parallel.shard == (8 if name.endswith("8") else 1)
    model = MLLMModelKit(found.lora).build(found.model)
    assert set(MLLMModelKit.parts(model).values()) == {"vision", "projector", "llm"}
    assert sum(p.numel() for p in model.parameters()) > 2e9
