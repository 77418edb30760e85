"""The vit_classification recipe: digits, a user's folder with broken files, export, two ranks."""

import json

import numpy as np
import pytest
import torch
from conftest import CAMPAIGN, ROOT, read_metrics, readme_commands, user_error
from PIL import Image
from run_files import json_lines, read_json, write_json
from safetensors.torch import load_file, save_file

from mvp_engine.checkpoint.format import Reader
from mvp_engine.checkpoint.state import ema_name
from mvp_engine.cli import main
from mvp_engine.config import compose
from mvp_engine.errors import EXIT_USER_ERROR, UserError
from mvp_engine.launch import launch
from mvp_engine.runs import list_runs

pytestmark = pytest.mark.slow
CONFIGS = ROOT / "recipes" / "vit_classification" / "configs"
SMALL = [
    "model.config.num_hidden_layers=1",
    "model.config.hidden_size=16",
    "model.config.intermediate_size=16",
]
QUICK = "data.num_workers=0 log.interval=1 eval.steps=null optim.warmup=0".split()
QUICK += ["log.backends=[terminal,file,jsonl]"]  # a plot takes half a second


def run(folder, *more):
    return launch(str(CONFIGS / "cpu.yaml"), [f"output_dir={folder}", *SMALL, *QUICK, *more])


def write_images(folder, count=12):
    """Two classes, red and blue, of many sizes and modes; three files are broken."""
    random = np.random.default_rng(0)
    for name, colour in (("blue", 2), ("red", 0)):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = random.integers(0, 60, (20 + i, 30, 3), dtype=np.uint8)
            pixels[:, :, colour] += 180
            Image.fromarray(pixels).convert("P" if i == 3 else "RGB").save(
                folder / name / f"{i}.{'png' if i % 2 else 'jpg'}"
            )
    (folder / "red" / "half.jpg").write_bytes((folder / "red" / "2.jpg").read_bytes()[:200])
    (folder / "red" / "text.png").write_text("not an image")
    (folder / "blue" / "none.jpg").touch()
    (folder / "blue" / "notes.txt").write_text("not looked at")
    return folder


def test_vit_readme_commands_run_and_reach_accuracy(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    seen = []
    for words in readme_commands("vit_classification"):
        if "--nproc" in words or any("gpu" in word for word in words):
            continue
        fewer = ["train.max_steps=60", "optim.warmup=20", "data.num_workers=0"]
        assert main([*words[1:], *fewer, f"output_dir={tmp_path}"]) == 0, words
        seen.append(words[1])
    assert seen == ["train", "train", "evaluate"]
    accuracy = read_metrics(tmp_path, "eval")[-1]["accuracy"]
    assert accuracy > 0.25  # of ten classes, after 60 of 920 steps


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A run on a user's folder, with bad files in it."""
    folder = tmp_path_factory.mktemp("vit")
    words = [
        f"images.root={write_images(folder / 'images')}",
        "images.held_out=4",
        "images.crop=0.5",
        "images.flip=true",
    ]
    words += "data.micro_batch_size=4 data.global_batch_size=8 train.epochs=6 optim.lr=0.01".split()
    assert run(folder, *words, "checkpoint.interval=3") == 0
    return folder, words


def test_vit_broken_files_are_listed_counted_and_left_out(own):
    folder, words = own
    newest = list_runs(folder)[0].dir
    named = [
        json.loads(line)["image"]
        for line in (newest / "bad_images.0.jsonl").read_text().splitlines()
    ]
    in_training = {name.partition(": ")[0].rpartition("/")[2] for name in named}
    assert in_training <= {"half.jpg", "text.png", "none.jpg"}
    assert in_training
    assert len(named) == len(in_training)  # once each, not in every epoch
    assert all(": corrupt: " in name for name in named)
    records = read_metrics(folder)
    assert sum(record["totals"].get("bad_images", 0) for record in records) == 6 * len(in_training)
    assert "left out: " in (newest / "log.txt").read_text()
    assert run(folder, *words, "workflow=evaluate", f"resume={newest}") == 0
    [line] = json_lines(newest / "evaluate.jsonl")
    assert line["accuracy"] > 0.9


def test_vit_resumed_run_with_other_workers_is_bit_equal(own):
    folder, words = own
    checkpoint = list_runs(folder)[0].checkpoint_list()[0]
    straight = [record["loss"] for record in read_metrics(folder)]
    assert run(folder, *words, f"resume={checkpoint}", "data.num_workers=2") == 0
    assert [record["loss"] for record in read_metrics(folder)] == straight


def test_vit_augmentation_depends_on_seed_epoch_and_index_only(own):
    from vit_classification.data import ImageDataset, Images, collate
    from vit_classification.model import make_processor

    from mvp_engine.data import SampleLoader

    images = Images(root=None, held_out=5, size=32, bend=0.15)
    digits = ImageDataset("train", images, make_processor(None, 32))
    assert not {bytes(item) for item in digits.items} & {
        bytes(item) for item in ImageDataset("eval", images, digits.processor).items
    }

    def epoch(number, size, **options):
        loader = SampleLoader(
            digits, micro_batch_size=size, seed=3, shuffle=False, collate_fn=collate, **options
        )
        loader.set_epoch(number)
        batch = next(iter(loader))
        return dict(zip(batch["index"].tolist(), batch["pixel_values"], strict=True))

    first, other = epoch(0, 4), epoch(0, 2, rank=1, world_size=2, num_workers=1)
    assert torch.equal(first[1], other[1])
    assert torch.equal(first[3], other[3])
    assert not torch.equal(first[1], epoch(1, 4)[1])


def test_vit_export_has_the_ema_weights_on_one_rank_and_on_two_shards(ranks2, own):
    from transformers import pipeline

    folder, words = own
    newest = list_runs(folder)[0].dir
    again = [*words, "workflow=report", f"resume={newest}"]
    assert run(folder, *again) == 0
    page = (newest / "report.html").read_text()
    assert "What was taken for what" in page
    assert page.count("data:image/png") >= 5
    [export] = newest.glob("hf_step_*")
    classify = pipeline("image-classification", str(export), device="cpu")
    for file in sorted((folder / "images").glob("*/1*.*")):
        assert classify(Image.open(file).convert("RGB"))[0]["label"] == file.parent.name
    raw = classify.model.state_dict()
    saved = Reader(newest / "checkpoints" / "latest")
    for name, tensor in raw.items():
        average = torch.empty_like(tensor)
        saved.fill({ema_name(name): average})
        assert torch.equal(tensor, average), name
    # The same from two ranks with sharded weights.
    words2 = [
        f"output_dir={folder}",
        *SMALL,
        *QUICK,
        *again,
        "parallel.shard=2",
        "data.global_batch_size=8",
    ]
    assert ranks2.launch(CONFIGS / "cpu.yaml", *words2) == [0, 0]
    shared = pipeline("image-classification", str(export), device="cpu").model
    assert type(shared).__name__ == "ViTForImageClassification"
    for name, tensor in shared.state_dict().items():
        assert torch.equal(tensor, raw[name]), name


def test_vit_gpu_configs_compose_and_pretrained_folder_gets_a_new_head(
    own,
):
    from transformers import AutoModelForImageClassification
    from vit_classification.model import make_model

    folder, words = own
    for name in ("gpu1", "gpu8"):
        with user_error(r"give on the command line: images.root=..."):
            compose(str(CONFIGS / f"{name}.yaml"), [])
        composed = compose(str(CONFIGS / f"{name}.yaml"), ["images.root=/somewhere"])
        with torch.device("meta"):
            model = make_model(composed.config.model, composed.config.images.size, ["cat", "dog"])
        assert 85e6 < sum(p.numel() for p in model.parameters()) < 87e6
    newest = list_runs(folder)[0].dir
    assert run(folder, *words, "workflow=export", f"resume={newest}") == 0
    [export] = newest.glob("hf_step_*")
    more = [f"output_dir={folder / 'next'}", *QUICK, f"model.path={export}", "images.root=null"]
    more += ["train.max_steps=1", "optim.lr=1e-9"]
    assert launch(str(CONFIGS / "cpu.yaml"), [*more, "model.config=null"]) == 0
    trained = Reader(list_runs(folder / "next")[0].dir / "checkpoints" / "latest")
    before = AutoModelForImageClassification.from_pretrained(export).state_dict()
    for name, value in before.items():
        if not name.startswith("classifier."):
            torch.testing.assert_close(trained.read(f"model.{name}"), value, atol=1e-6, rtol=0)
    assert trained.entries["model.classifier.weight"].shape == (10, 16)


SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
SIZES |= {"image_size": 16, "patch_size": 8}
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
TEXT |= {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def write_folder(folder, kind):
    """A pretrained folder without a classifier; CLIP and SigLIP with a nested vision config and a text encoder."""
    import transformers

    nested = {"vision_config": SIZES, "text_config": TEXT}
    config = transformers.CONFIG_MAPPING[kind](**(SIZES if kind == "vit" else nested))
    torch.manual_seed(0)
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    square = {"height": 16, "width": 16}
    transformers.ViTImageProcessor(size=square).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["vit", "clip", pytest.param("siglip", marks=CAMPAIGN)])
def test_vit_from_a_folder_of_another_size_trains_its_weights_and_lora_saves_what_trains_only(
    kind, tmp_path, capsys
):
    from peft import PeftModel
    from transformers import AutoModelForImageClassification

    base = write_folder(tmp_path / "base", kind)
    words = [
        f"output_dir={tmp_path / 'refused'}",
        *QUICK,
        f"model.path={base}",
        "train.max_steps=2",
    ]
    words += "lora.rank=2 optim.ema=null optim.lr=0.01 data.micro_batch_size=8".split()
    config = str(CONFIGS / "cpu.yaml")
    assert launch(config, [*words, "images.size=16"]) == EXIT_USER_ERROR
    key, there = ("hidden_size=64", 16) if kind == "vit" else ("model_type=vit", kind)
    assert f"model.config.{key}, but the model in {base} has {there}" in capsys.readouterr().err
    words += ["model.config=null"]
    assert launch(config, words) == EXIT_USER_ERROR
    assert "images.size=32, but" in capsys.readouterr().err
    words += ["images.size=16", f"output_dir={tmp_path / 'runs'}"]
    assert launch(config, words) == 0
    run = list_runs(tmp_path / "runs")[0].dir
    saved = Reader(run / "checkpoints" / "latest").entries
    trained = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
    assert trained == {
        name for name in trained if ".lora_" in name or name.startswith("classifier.")
    }
    assert sum(".lora_A." in name for name in trained) == 12
    assert launch(config, [*words, "workflow=export", f"resume={run}"]) == 0
    merged = AutoModelForImageClassification.from_pretrained(run / "hf_step_2").eval()
    labels = {"id2label": merged.config.id2label, "label2id": merged.config.label2id}
    plain = AutoModelForImageClassification.from_pretrained(base, **labels)
    pixels = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    adapted = PeftModel.from_pretrained(plain, run / "hf_step_2_adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(
            adapted(pixel_values=pixels).logits, merged(pixel_values=pixels).logits
        )
    if kind != "vit":
        return
    assert launch(config, [*words, "resume=auto", "train.max_steps=3"]) == 0
    changed = load_file(base / "model.safetensors")
    changed["layernorm.weight"] += 1.0
    save_file(changed, base / "model.safetensors", {"format": "pt"})
    assert launch(config, [*words, "resume=auto", "train.max_steps=4"]) == EXIT_USER_ERROR
    assert "leaves out the frozen vit.layernorm.weight" in capsys.readouterr().err


def test_vit_folder_whose_processor_makes_other_sizes_or_without_a_classifier_is_refused(
    tmp_path,
):
    import transformers
    from vit_classification.model import make_model, make_processor

    base = write_folder(tmp_path / "base", "siglip")
    transformers.SiglipImageProcessor(size={"height": 24, "width": 24}).save_pretrained(base)
    with user_error(
        r"images\.size=16, but the image processor in .* makes tensors of \(3, 24, 24\)",
    ):
        make_processor(str(base), 16)
    settings = read_json(base / "config.json")["vision_config"]
    write_json(base / "config.json", settings)
    model = compose(
        str(CONFIGS / "cpu.yaml"), ["model.config=null", f"model.path={base}"]
    ).config.model
    with user_error(r"no image classifier for siglip_vision_model: .* give the whole folder"):
        make_model(model, 16, ["a", "b"])


def test_vit_folder_that_lacks_weights_other_than_the_head_is_refused(tmp_path):
    base = write_folder(tmp_path / "base", "vit")
    model = compose(
        str(CONFIGS / "cpu.yaml"), ["model.config=null", f"model.path={base}"]
    ).config.model
    from vit_classification.model import make_model  # compose has made it importable

    with user_error(r"model\.config\.qkv_bias=False, but the model in .* has True"):
        make_model(model.model_copy(update={"config": {"qkv_bias": False}}), 16, ["a", "b"])
    weights = load_file(base / "model.safetensors")
    del weights["layernorm.bias"]
    weights["layernorm.weight"] = torch.ones(5)
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    with user_error(r"layernorm\.weight has the shape \(5,\) there and \(16,\)"):
        make_model(model, 16, ["a", "b"])
    del weights["layernorm.weight"]
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    with user_error(r"lacks 2 weights of ViTForImageClassification, such as vit\.layernorm"):
        make_model(model, 16, ["a", "b"])


def test_vit_dataset_user_errors_name_the_fix(tmp_path):
    from vit_classification.data import ImageDataset, Images

    def mistake(**images):
        with pytest.raises(UserError) as raised:
            ImageDataset("train", Images(size=32, **images), None)
        return str(raised.value)

    assert "images.root=/path/to/images is not a folder" in mistake(root="/path/to/images")
    assert "0 folders" in mistake(root=str(tmp_path))
    (tmp_path / "cats").mkdir()
    (tmp_path / "dogs").mkdir()
    assert "cats has no image to train on" in mistake(root=str(tmp_path))
