"""Pretrained folders of tiny random models, and engines on them, for the tests of loading and exporting."""

import json

import torch
from families import config_of
from safetensors import safe_open

from mvp_engine.distributed import Layout, World
from mvp_engine.model_engine import LanguageModelEngine, ModelSource, Settings


def alone():
    """The layout of a single process."""
    return Layout(World(0, 1, 0, 1, torch.device("cpu")))


def folder_of(family, where, **options):
    """Write a random pretrained folder as transformers does; returns the model."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config_of(family)).eval()
    model.save_pretrained(where, **options)
    return model


def language_model(path, layout=None, **config):
    source = ModelSource(None if path is None else str(path), config)
    engine = LanguageModelEngine(
        LanguageModelEngine.build_model(source), layout or alone(), Settings(seed=7)
    )
    engine.initialize()
    return engine


def same(a, b):
    """Whether two state dicts are bit-equal."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def entries(file):
    """The entries of a safetensors file."""
    with safe_open(file, "pt") as opened:
        return [(key, opened.get_tensor(key)) for key in opened.keys()]  # noqa: SIM118 - not a mapping


def realigned(model):
    """The model with its weights in fresh memory: a matmul on a mapped file at an odd address may round differently."""
    for param in model.parameters():
        param.data = param.data.clone()
    return model.eval()


def without_checksums(checkpoint):
    """As versions before checksums wrote it: its files may be changed."""
    meta = checkpoint / "meta.json"
    facts = json.loads(meta.read_text())
    del facts["files"]
    meta.write_text(json.dumps(facts))
