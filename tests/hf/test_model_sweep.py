"""The sweep over text model types: what the shipped matrix says holds for tiny random models of each type."""

import pytest
import transformers
from conftest import CAMPAIGN, ROOT
from model_sweep import causal_types, kind_of, measure
from run_files import read_json
from tiny_configs import tiny_config

from mvp_engine.tools.models import read_models

FILE = read_json(ROOT / "mvp_engine" / "tools" / "models_text.json")
ENTRIES = {entry["name"]: entry for entry in FILE["models"]}

# Types that no other test builds, one for each way in which a model may differ.
SAMPLE = [
    "gemma3n_text",  # activation sparsity, inputs per layer
    "gemma4_text",  # head sizes by kind of layer
    "modernbert-decoder",  # a dense layer before the head
    "inkling_text",  # position bias in attention, short convolutions
    "llama4_text",  # chunked attention
    "mpt",  # ALiBi
    "falcon",  # attention classes by name
    "nemotron",  # keyword arguments that end in the model
    "openai-gpt",  # no mask interface
    "opt",  # learned positions with an offset
    "blt",  # patches of bytes
    "bert",  # an encoder
]


@pytest.mark.parametrize("name", SAMPLE)
def test_sweep_sampled_type_is_as_the_matrix_says(name):
    check(name)


@CAMPAIGN
@pytest.mark.parametrize("name", causal_types())
def test_sweep_every_type_is_as_the_matrix_says(name):
    check(name)


def check(name):
    if name not in causal_types():
        pytest.skip("this transformers does not have it")
    is_listed = transformers.__version__ == FILE["transformers"]
    try:
        tiny_config(name)
    except Exception:
        if is_listed:
            raise
        pytest.skip("its tiny config is for another transformers")
    result = measure(name)
    assert result.verdict != "wrong", result.reason
    if is_listed:  # others may support more, or less
        assert (result.verdict == "exact") is (ENTRIES[name]["packed"] is True), result.reason
        assert kind_of(name) == ENTRIES[name]["kind"]


def test_matrix_lists_every_causal_type_of_its_transformers():
    if transformers.__version__ != FILE["transformers"]:
        pytest.skip("another version of transformers than that of the matrix")
    assert sorted(causal_types()) == sorted(ENTRIES)


def test_matrix_95_percent_of_causal_decoders_are_exact():
    decoders = [entry for entry in read_models().values() if entry["kind"] == "text"]
    assert len([entry for entry in decoders if entry["packed"] is True]) >= 0.95 * len(decoders)
