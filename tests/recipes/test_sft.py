"""The sft recipe: its engine, which spells the step out, trains bit for bit as MLLMEngine does."""

import pytest
from conftest import ROOT, mvp, read_metrics
from tiny_vlm import with_images, write

from mvp_engine.config.engine_class import find_engine
from mvp_engine.engine.hooks import EngineHooks

CONFIG = """
model: {type: language_model, path: model}
data:
  pack_tokens: 256
  sources:
    images: {path: images.jsonl}
    others: {path: others.jsonl}
    held: {path: held.jsonl, split: eval}
  global_batch_size: 2
  num_workers: 0
train: {max_steps: 2}
eval: {steps: 1, generation: {max_new_tokens: 2, max_samples: 1}}
log: {interval: 1, backends: [jsonl]}
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["loss.label_smoothing=0.1", "loss.z_loss=0.01"]], ids=str)
def test_sft_engine_trains_bit_for_bit_as_mllm_engine(vlm_folder, monkeypatch, words):
    rows = with_images(vlm_folder, 8)
    for name, some in (("images", rows[:5]), ("others", rows[5:]), ("held", rows[:3])):
        write(vlm_folder / f"{name}.jsonl", some)
    (vlm_folder / "train.yaml").write_text(CONFIG)
    monkeypatch.chdir(vlm_folder)
    results = []
    for engine in ("sft", "mvp_engine.kit:MLLMEngine"):
        folder = vlm_folder / engine.rpartition(":")[2]
        assert mvp(f"train train.yaml engine={engine} output_dir={folder}", *words) == 0
        results.append(read_metrics(folder) + read_metrics(folder, "eval"))
    assert results[0] == results[1]
    assert {"loss", "loss_images", "loss_others", "fill"} <= results[0][0].keys()
    assert {"loss", "exact_held"} <= results[0][-1].keys()


@pytest.mark.slow
def test_sft_mixture_config_trains_two_steps_on_sources_with_other_columns_and_tags(
    vlm_folder, monkeypatch
):
    rows = with_images(vlm_folder, 16)
    write(vlm_folder / "images.jsonl", rows)
    write(vlm_folder / "answers.jsonl", [{"question": "1+1", "reply": "2"}] * 50)
    pages = [{"question": "What is <image> in HTML?", "answer": "no tag"}] * 50
    write(vlm_folder / "pages.jsonl", pages)
    monkeypatch.chdir(vlm_folder)
    words = "model.path=model train.max_steps=2 data.global_batch_tokens=512 data.max_length=256 log.interval=1"
    words += " data.num_workers=0 data.pack_tokens=256 model.activation_checkpointing=none export_link=null"
    words += (
        " checkpoint.interval=null eval.steps=2 eval.generation=null data.sources.rows.hold_out=0.2"
    )
    paths = {"rows": "images", "answers": "answers", "pages": "pages"}
    words += "".join(f" data.sources.{name}.path={file}.jsonl" for name, file in paths.items())
    assert mvp(f"train sft/mixture {words}") == 0
    first = read_metrics(vlm_folder / "outputs")[0]
    assert {"loss_rows", "loss_answers", "loss_pages"} <= first.keys()


RECIPES = "sft qwen3 qwen3_vl preference reward_model distil contrastive reverse_rl digits_rl"


@pytest.mark.parametrize("name", RECIPES.split())
def test_engine_of_a_recipe_has_at_most_three_levels_below_it(name):
    engine_class, _ = find_engine(name, ROOT / "train.yaml")
    assert len([base for base in engine_class.mro()[1:] if issubclass(base, EngineHooks)]) <= 3
