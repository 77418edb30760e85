"""The graft recipe: composed folders, their processors, errors, the stages, and plain transformers on the export."""

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers as hf
from conftest import CAMPAIGN, ROOT, mvp, read_metrics, readme_commands, user_error
from PIL import Image

from mvp_engine.imports import import_file
from mvp_engine.kit.decoding import Decoding
from mvp_engine.kit.tiny_processors import train_tokenizer
from mvp_engine.tools.chat import ChatModel

graft_module = import_file(ROOT / "recipes" / "graft" / "graft.py")
Graft = graft_module.Graft
RECIPE = ROOT / "recipes" / "graft"
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
TEXT = {**SIZES, "num_key_value_heads": 1, "head_dim": 16}


def save_encoder(folder, kind):
    """A random encoder with 32 x 32 pixels, and its image processor."""
    torch.manual_seed(0)
    image = {"image_size": 32, "patch_size": 8}
    square = {"height": 32, "width": 32}
    processor = hf.SiglipImageProcessor(size=square)
    if kind == "siglip":
        model = hf.SiglipVisionModel(hf.SiglipVisionConfig(**SIZES, **image))
    elif kind == "siglip_with_text":
        vision, text = {**SIZES, **image}, {**SIZES, "vocab_size": 20}
        model = hf.SiglipModel(hf.SiglipConfig(vision_config=vision, text_config=text))
    elif kind == "clip":
        model = hf.CLIPVisionModel(hf.CLIPVisionConfig(**SIZES, **image))
        processor = hf.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=square)
    else:
        config = hf.Dinov2WithRegistersConfig(**SIZES, **image, num_register_tokens=2)
        model = hf.Dinov2WithRegistersModel(config)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def save_language_model(folder, tied=False, template=True, **options):
    torch.manual_seed(1)
    tokenizer = train_tokenizer(["user what is this assistant"] * 2, 270)
    if not template:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    config = hf.Qwen3Config(**TEXT, vocab_size=len(tokenizer), tie_word_embeddings=tied, **options)
    hf.Qwen3ForCausalLM(config).save_pretrained(folder)


def grafted(tmp_path, kind="siglip", tied=False, **options):
    save_encoder(tmp_path / "vision", kind)
    save_language_model(tmp_path / "language", tied)
    return write(tmp_path, **options)


def write(tmp_path, **options):
    folders = {name: str(tmp_path / name) for name in ("vision", "language")}
    return graft_module.graft(Graft(**folders, folder=str(tmp_path / "model"), **options))


def load(folder):
    model = hf.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return model, hf.AutoProcessor.from_pretrained(folder)


def inputs_of(processor, sizes):
    content = [{"type": "image"}] * len(sizes) + [{"type": "text", "text": "what is this"}]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    images = [Image.effect_noise(size, 90).convert("RGB") for size in sizes]
    return processor(text=[prompt], images=images, return_tensors="pt")


@pytest.mark.parametrize(
    "kind, tied, tokens",
    [
        ("siglip", True, 16),
        ("siglip_with_text", False, 16),
        ("clip", False, 16),
        ("dinov2_with_registers", False, 18),  # registers stay, the class token goes
    ],
)
@torch.no_grad()
def test_grafted_folder_has_both_models_and_a_processor_that_fits(tmp_path, kind, tied, tokens):
    model, processor = load(grafted(tmp_path, kind, tied))
    language = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "language")
    ids = torch.randint(0, 200, (1, 9))
    rows = language.config.vocab_size
    assert torch.allclose(model(input_ids=ids).logits[..., :rows], language(ids).logits, atol=1e-6)
    inputs = inputs_of(processor, [(50, 30), (20, 40)])
    assert int((inputs["input_ids"] == model.config.image_token_id).sum()) == 2 * tokens
    encoder = hf.AutoModel.from_pretrained(tmp_path / "vision")
    encoder = getattr(encoder, "vision_model", encoder)
    pixels = inputs["pixel_values"]
    ours = model.model.vision_tower(pixels, output_hidden_states=True).hidden_states[-2]
    theirs = encoder(pixels, output_hidden_states=True).hidden_states[-2]
    assert torch.allclose(ours, theirs, atol=1e-6)
    assert model(**inputs).logits.isfinite().all()
    table = model.get_input_embeddings().weight
    assert len(table) == model.config.text_config.vocab_size == 320
    assert torch.allclose(table[model.config.image_token_id], table[:rows].mean(0), atol=1e-6)
    assert (model.get_output_embeddings().weight is table) == tied


@torch.no_grad()
def test_graft_with_tiles_gives_larger_images_more_tokens(tmp_path):
    model, processor = load(grafted(tmp_path, tiles=4))
    small, large = (inputs_of(processor, [size]) for size in ((32, 32), (64, 128)))
    assert small["pixel_values"].shape[1] == 3  # the image as a whole, and the smallest grid
    assert large["input_ids"].shape[1] > small["input_ids"].shape[1] > 2 * 16
    assert model(**large).logits.isfinite().all()


def test_template_of_a_graft_writes_images_and_keeps_the_language_models_text(tmp_path):
    _, processor = load(grafted(tmp_path))
    plain = hf.AutoTokenizer.from_pretrained(tmp_path / "language")
    parts = [{"type": "image"}, {"type": "text", "text": "what?"}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "this"}]
    as_text = [{"role": "user", "content": "<image>\nwhat?"}, chat[1]]
    rendered = processor.apply_chat_template(chat)
    assert rendered == plain.apply_chat_template(as_text, tokenize=False)


def test_graft_is_written_once_and_only_from_the_same_weights(tmp_path):
    folder = grafted(tmp_path)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert write(tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    torch.manual_seed(5)
    encoder = hf.SiglipVisionModel(hf.SiglipVisionConfig(**SIZES, image_size=32, patch_size=8))
    encoder.save_pretrained(tmp_path / "vision")
    with user_error("model was made with .*: remove it, or set graft.folder to another"):
        write(tmp_path)


def test_models_that_cannot_be_grafted_are_user_errors(tmp_path):
    def fails(text, **options):
        with user_error(text):
            write(tmp_path, **options)

    fails("graft.vision=.* is no folder of a model")
    save_encoder(tmp_path / "vision", "siglip")
    save_language_model(tmp_path / "language", template=False)
    fails("its tokenizer has no chat template")
    hf.Gemma2ForCausalLM(hf.Gemma2Config(**TEXT, vocab_size=280)).save_pretrained(
        tmp_path / "language"
    )
    fails("gemma2 scales or caps its logits")
    hf.SiglipVisionModel(
        hf.SiglipVisionConfig(**SIZES, image_size=32, patch_size=8)
    ).save_pretrained(tmp_path / "language")
    fails("siglip_vision_model is no model of text alone")
    save_language_model(tmp_path / "language")
    (tmp_path / "vision" / "preprocessor_config.json").unlink(missing_ok=True)
    (tmp_path / "vision" / "processor_config.json").unlink(missing_ok=True)
    fails("has no image processor")
    hf.SiglipImageProcessor(size={"height": 40, "width": 40}).save_pretrained(tmp_path / "vision")
    fails("fails on images of 40 x 40 pixels")
    hf.Qwen2VLImageProcessor().save_pretrained(tmp_path / "vision")
    fails("returns .* of images in sizes of their own")


QUICK = ["data.num_workers=0", "data.pack_tokens=256", "log.backends=[jsonl]", "digits.count=60"]
STEPS = {"language": 6, "align": 6, "instruct": 4}


def run_stages(folder, options):
    """Run the commands of the README in a folder; `options(stage)` are added to each training."""
    for words in readme_commands("graft"):
        if "gpu" not in words[2] and words[1] == "train":
            config = words[2].replace("recipes/", f"{ROOT}/recipes/", 1)
            assert mvp(" ".join(["train", config, *words[3:], *options(Path(config).stem)])) == 0
    return folder / "outputs"


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graft")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(import_data(), "ENCODER_STEPS", 3)
        return run_stages(folder, lambda stage: [*QUICK, f"train.max_steps={STEPS[stage]}"])


@cache
def import_data():
    from mvp_engine.config.engine_class import find_engine

    engine_class, _ = find_engine("graft", ROOT / "train.yaml")
    return __import__(engine_class.__module__.rpartition(".")[0] + ".data", fromlist=["data"])


@pytest.mark.slow
def test_stages_train_their_parts_and_export_what_transformers_computes(stages):
    weights = {}
    for stage in ("model", "align", "instruct"):
        folder = stages / "graft" / stage
        weights[stage] = load(folder)[0].state_dict()
    moved = {}
    for before, stage in (("model", "align"), ("align", "instruct")):
        moved[stage] = {
            name.split(".")[1]
            for name, value in weights[stage].items()
            if not torch.equal(value, weights[before][name])
        }
    assert moved["align"] == {"multi_modal_projector"}
    assert moved["instruct"] == {"multi_modal_projector", "language_model", "weight"}
    check_export(stages)


def check_export(stages):
    """Plain transformers and the engine write equal answers to held-out questions, with equal log-probs."""
    folder = (stages / "graft" / "instruct").resolve()
    model, processor = load(folder)
    chat = ChatModel(folder, device="cpu")
    digits = stages / "graft" / "digits"
    for kind in ("one", "two"):
        for line in (digits / f"eval_{kind}.jsonl").read_text().splitlines()[:4]:
            question, _ = json.loads(line)["messages"]
            paths = [str(digits / part["image"]) for part in question["content"][:-1]]
            for part, path in zip(question["content"], paths, strict=False):
                part["image"] = path
            batch = chat.prompt([question])
            text = processor.apply_chat_template([question], add_generation_prompt=True)
            images = [Image.open(path).convert("RGB") for path in paths]
            inputs = processor(text=[text], images=images, return_tensors="pt")
            assert torch.equal(inputs["input_ids"][0], batch.input_ids.cpu())
            with torch.no_grad():
                theirs = model(**inputs).logits[0, -1]
                written = model.generate(**inputs, do_sample=False, max_new_tokens=8)
                ours = chat.engine.model(batch, ["next_logits"])["next_logits"][0]
            assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-5)
            completion = written[0, inputs["input_ids"].shape[1] :]
            answer = chat.answer([question], Decoding(max_new_tokens=8))
            assert list(answer.tokens) == completion.tolist()


@CAMPAIGN
def test_grafted_model_learns_the_digits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stages = run_stages(tmp_path, lambda stage: [])
    folder = (stages / "graft" / "instruct").resolve().parent.parent
    last = [r for r in read_metrics(folder, "eval") if "accuracy_two" in r][-1]
    assert last["accuracy_one"] >= 0.9
    assert last["accuracy_two"] >= 0.9
    check_export(stages)


def patched(tmp_path, recipe, heading):
    """A copy of a recipe with the diff of a section of docs/graft.md, which changes at most 25 lines."""
    section = (ROOT / "docs" / "graft.md").read_text().partition(f"# {heading}\n")[2]
    diff = re.search(r"```diff\n(.*?)```", section, re.DOTALL)[1]
    lines = [line for line in diff.splitlines() if line[:1] in "+-"]
    assert len([line for line in lines if line[:4] not in ("+++ ", "--- ")]) <= 25
    shutil.copytree(ROOT / "recipes" / recipe, tmp_path / "recipes" / recipe)
    subprocess.run(["patch", "-p1"], input=diff, text=True, cwd=tmp_path, check=True)
    return tmp_path / "recipes" / recipe


@pytest.mark.slow
def test_projector_of_the_docs_trains_and_loads_with_its_class(stages, tmp_path):
    recipe = patched(tmp_path, "graft", "A projector of your own")
    options = ["train.max_steps=2", f"graft.folder={tmp_path}/model"]
    options += [f"export_link={tmp_path}/export", *QUICK]
    assert mvp(f"train {recipe}/configs/align.yaml output_dir={stages}", *options) == 0
    model, processor = load(tmp_path / "export")
    assert type(model).__name__ == "RowLlava"
    inputs = inputs_of(processor, [(24, 24)])
    assert int((inputs["input_ids"] == model.config.image_token_id).sum()) == 3
    assert model(**inputs).logits.isfinite().all()


@pytest.mark.slow
def test_new_tokens_of_the_docs_train(vlm_folder):
    recipe = patched(vlm_folder, "sft", "New tokens")
    rows = [{"prompt": f"Is it {i}?", "completion": ["<yes>", "<no>"][i % 2]} for i in range(60)]
    (vlm_folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["model.path=model", "data.sources.rows.path=rows.jsonl", "train.max_steps=1"]
    assert mvp(f"train {recipe}/configs/lora.yaml", *options, "data.num_workers=0") == 0
    processor = hf.AutoProcessor.from_pretrained("outputs/sft_lora_model")
    assert {"<yes>", "<no>"} <= processor.tokenizer.get_vocab().keys()
