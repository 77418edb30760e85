"""The messages of docs/faq.md are those that its commands print, in a folder with the fault that the page explains."""

import importlib.util
import re
import shlex

import pytest
import torch
from conftest import ROOT
from tiny_vlm import with_images, write

from mvp_engine.cli import main
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.kit import MLLMEngine

CONFIG = """
engine: mvp_engine.kit:MLLMEngine
run_name: digits
model: {type: language_model, path: model}
data:
  pack_tokens: 256
  sources:
    photos: {path: photos.jsonl}
  num_workers: 0
train: {max_steps: 3}
log: {backends: [jsonl]}
"""
PAGE = (ROOT / "docs" / "faq.md").read_text()
ENTRIES = re.findall(r"^## (.+?)\n\n```\n\$ mvp (.+?)\n(.+?)```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(vlm_folder):
    """A tiny Qwen3-VL, rows with images, and a config, as in docs/your_data.md."""
    write(vlm_folder / "photos.jsonl", with_images(vlm_folder, 8))
    (vlm_folder / "train.yaml").write_text(CONFIG)
    return vlm_folder


def without_network(folder, patch):
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))


def without_gpu(_, patch):
    patch.setattr(torch.cuda, "is_available", lambda: False)


def out_of_memory(_, patch):
    def forward_step(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.32 GiB.")

    patch.setattr(MLLMEngine, "forward_step", forward_step)


def without_an_image(folder, _):
    (folder / "4_0.png").unlink()


def without_chat_template(folder, _):
    (folder / "model" / "chat_template.jinja").unlink()


def without_wandb(_, patch):
    find_spec = importlib.util.find_spec
    patch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "wandb" else find_spec(name)
    )


SETUPS = {
    "The Hub cannot be reached": without_network,
    "There is no GPU": without_gpu,
    "Out of memory": out_of_memory,
    "Too many bad rows": without_an_image,
    "The chat template is missing": without_chat_template,
    "A package is missing": without_wandb,
}


def test_faq_has_ten_entries():
    assert len(ENTRIES) == 10
    assert SETUPS.keys() <= {title for title, _, _ in ENTRIES}


@pytest.mark.parametrize("title, command, message", ENTRIES, ids=[title for title, _, _ in ENTRIES])
def test_faq_command_prints_the_message_of_the_page(
    title,
    command,
    message,
    folder,
    monkeypatch,
    capsys,
):
    if title in SETUPS:
        SETUPS[title](folder, monkeypatch)
    assert main(shlex.split(command)) == EXIT_USER_ERROR
    printed = " ".join(capsys.readouterr().err.split())
    parts = [" ".join(part.split()) for part in message.split("[...]")]
    assert re.search(".*?".join(re.escape(part) for part in parts), printed), printed
