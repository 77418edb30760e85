"""The graft skill's check passes on the recipe's graft and fails on variants with typical mistakes."""

import json

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file, save_file

from mvp_engine.imports import import_file

check = import_file(ROOT / "skills" / "graft-a-vlm" / "check.py")


def edit_weights(folder, change):
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name in weights:
        weights[name] = change(name, weights[name]).contiguous()
    save_file(weights, file, {"format": "pt"})


def fresh_encoder(folder):
    edit_weights(folder, lambda name, w: torch.randn_like(w) if "vision" in name else w)


def fresh_language_model(folder):
    edit_weights(folder, lambda name, w: torch.randn_like(w) if "down_proj" in name else w)


def dead_projector(folder):
    edit_weights(folder, lambda name, w: w * 0 if "projector.linear_2" in name else w)


def class_token_counted(folder):
    file = folder / "processor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_additional_image_tokens": 2}))


def template_of_the_language_model(folder):
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text().rpartition("{%- set messages = as_text.messages %}")[2])


def no_processor(folder):
    (folder / "processor_config.json").unlink()


def test_check_of_the_recipes_graft_passes():
    assert check.problems(check.recipe_graft) == []


@pytest.mark.parametrize(
    "mistake, said",
    [
        (fresh_encoder, "of the encoder is not in the model"),
        (fresh_language_model, "the logits differ from those of the language model"),
        (dead_projector, "another image does not change the logits"),
        (class_token_counted, "an image of 16 patches becomes 17 tokens"),
        (template_of_the_language_model, "the chat template writes 0 of"),
        (no_processor, "transformers does not load the folder"),
    ],
)
def test_check_of_a_wrong_graft_names_the_error(mistake, said):
    def graft(vision, language, folder):
        check.recipe_graft(vision, language, folder)
        mistake(folder)

    found = check.problems(graft)
    assert any(said in problem for problem in found), found
