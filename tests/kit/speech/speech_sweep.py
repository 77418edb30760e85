"""Trials of model types that speak, on tiny folders that transformers wrote: talker, LoRA, export of whole folders."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from folders import alone, entries
from model_sweep import EXACT, worst_difference
from omni_models import OMNI
from test_csm import gradients_of, on_ranks
from test_csm import whole as csm
from test_csm_folders import test_data_kit_makes_rows_of_csm_from_codes

from mvp_engine.errors import UserError
from mvp_engine.hf.lora.lora_layers import add_adapters
from mvp_engine.hf.lora.lora_settings import Lora
from mvp_engine.kit.speech.omni_model import OmniModelEngine, check_speech
from mvp_engine.model_engine import LanguageModelEngine, ModelSource, Settings

SPEAKING: dict[str, Any] = {**OMNI, "csm": csm}


@contextmanager
def folder_of(name):
    with tempfile.TemporaryDirectory() as parent:
        SPEAKING[name]().save_pretrained(Path(parent) / "in")
        if name == "qwen2_5_omni":
            torch.save({}, Path(parent) / "in" / "spk_dict.pt")
        yield Path(parent) / "in"


def engine_of(folder, engine_class):
    """An engine whose preflight passed."""
    engine = engine_class(
        engine_class.build_model(ModelSource(str(folder))), alone(), Settings(seed=0)
    )
    engine.initialize(lambda model: torch.optim.SGD(model.parameters(), lr=0.0))
    return engine


def talker(name):
    """Whether the talker of a folder trains: packed turns are exact. Or the reason why not."""
    try:
        with folder_of(name) as folder:
            engine_of(folder, OmniModelEngine)
    except UserError as error:
        return str(error)
    return True


def data_kit(name):
    """Rows of CSM through the data kit."""
    assert name == "csm", "others are in tests/kit/vlm_sweep.py"
    with tempfile.TemporaryDirectory() as folder:
        test_data_kit_makes_rows_of_csm_from_codes(Path(folder))
    return True


def lora(name):
    """Adapters on the talker: it stays exact."""
    try:
        with folder_of(name) as folder:
            model = engine_of(folder, OmniModelEngine).model
            add_adapters(model, Lora(rank=2, target_modules=["talker"]))
            check_speech(model, exact=True, group=None)
    except UserError as error:
        return str(error)
    return True


def export(name):
    """Whether the export of a folder is the whole folder: bit-equal, and transformers opens it."""
    engine_class = OmniModelEngine if name == "csm" else LanguageModelEngine
    model = SPEAKING[name]()
    try:
        with folder_of(name) as folder:
            engine_of(folder, engine_class).export_hf(folder.parent / "out")
            old, new = (_tensors(folder.parent / one) for one in ("in", "out"))
            read = type(model).from_pretrained(folder.parent / "out").state_dict()
    except UserError as error:
        return str(error)
    if old.keys() != new.keys() or not all(
        torch.equal(new[key], value) for key, value in old.items()
    ):
        return "tensors of the exported folder differ"
    if not all(torch.equal(read[key], value) for key, value in model.state_dict().items()):
        return "transformers reads other weights from the exported folder"
    return True


def _tensors(folder):
    return dict(entry for file in sorted(folder.glob("*.safetensors")) for entry in entries(file))


def on_two_ranks(name, pool, **sizes):
    """Whether a layout of the two ranks of `pool` gives the gradients of one."""
    assert name == "csm", "others are in tests/kit/vlm_columns.py"
    expected = gradients_of(alone(), [[1, 0, 2, 1, 3]])
    for found in pool.run(_or_reason, {**sizes, "replicate": 1}):
        if isinstance(found, str):
            return found
        difference = worst_difference(found, expected)
        if difference > EXACT:
            return f"gradients differ from those of one rank by {difference:.1e}"
    return True


def _or_reason(sizes):
    """On each rank: the gradients, or the error of an engine that refuses the layout."""
    try:
        return on_ranks(sizes)
    except UserError as error:
        return str(error)
