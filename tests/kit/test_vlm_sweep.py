"""Image-text and audio-text types of transformers from rows to gradients: exact, or refused with a reason.

A few types with different processors and encoders in each run of the tests, all of them in a campaign.
"""

import importlib.util

import pytest
import transformers
from conftest import CAMPAIGN, ROOT
from families import is_supported
from run_files import read_json
from vlm_columns import columns
from vlm_sweep import try_type, types
from vlm_tiny import special_of

from mvp_engine.hf import LanguageModel
from mvp_engine.hf.model.language_model import LogitSteps

LISTED = read_json(ROOT / "mvp_engine" / "tools" / "models_media.json")

# Type -> what its trial covers beyond the families of test_families_kit.py.
QUICK = {
    "cohere2_vision": "a text config with a factor that the head does not apply",
    "hyperclovax_vision_v2": "a head that multiplies its logits by what others divide by",
    "cosmos3_edge": "positions that repeat, token types that the processor does not return",
    "deepseek_vl_hybrid": "a SAM encoder with attention code of its own, two encoders",
    "ernie4_5_vl_moe": "token types for its experts",
    "glm46v": "one placeholder for images and videos",
    "minicpmv4_6": "tiles side by side in one row, numbered expansions",
    "step3p7": "tiles besides a whole image, which small images lack",
    "kimi_k25": "an encoder that gets the keyword arguments of the text layers",
    "lfm2_vl": "tiles with fields of their own, short convolutions",
    "llama4": "a forward that ends in logits, attention in chunks",
    "llava_next_video": "videos of several frames in one tensor",
    "mistral3": "images padded to the largest one",
    "ovis2": "placeholders that are no tokens of the tokenizer's template",
    "audioflamingo3": "a decoder-only model among transformers' encoder-decoders",
    "paligemma": "a processor that formats a prompt and its answer, instead of a chat template",
    "qwen3_5": "gated delta net",
    "qwen3_omni_moe": "the thinker of a whole folder; sounds whose processor pads waveforms",
}


# Other tests of the suite have what these cover: test_processor_runner.py and tests/hf/test_omni_*.py.
COVERED = ("step3p7", "qwen3_omni_moe")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=CAMPAIGN) if name in COVERED else name for name in QUICK]
)
def test_data_kit_and_model_of_unlisted_type_equal_transformers(name):
    if name not in types() or not is_supported(name):
        pytest.skip("needs a newer transformers")
    trial = try_type(name)
    assert trial.outcome == "exact", trial


@CAMPAIGN
@pytest.mark.parametrize("name", types())
def test_media_type_is_as_listed_in_every_column(name, ranks2):
    needs = special_of(name).needs
    if needs and importlib.util.find_spec(needs) is None:
        pytest.skip(f"needs {needs}")
    trial = try_type(name)
    if transformers.__version__ != LISTED["transformers"]:
        assert trial.outcome in ("exact", "refused", "no tiny model"), trial
        return  # it may support more, or less
    assert trial.outcome in ("exact", "refused"), trial
    (entry,) = [one for one in LISTED["models"] if one["name"] == name]
    assert (entry["data_kit"] is True) == (trial.outcome == "exact"), (trial, entry)
    if trial.rows is not None:
        for column, answer in columns(name, trial.rows, ranks2).items():
            assert (entry[column] is True) == (answer is True), (column, answer, entry)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("emu3", "writes <s> in front of any text"),
        ("kosmos-2", "cannot run without pixel_values"),
        ("kyutai_speech_to_text", "codes that are added to each token of text"),
        ("vibevoice_asr", "its encoder adds random noise"),
    ],
)
def test_media_type_that_cannot_be_trained_is_refused_with_the_reason(name, reason):
    if transformers.__version__ != LISTED["transformers"]:
        pytest.skip("another version of transformers than that of the matrix")
    trial = try_type(name)
    assert trial.outcome == "refused", trial
    assert reason in trial.reason


@pytest.mark.parametrize(
    "name, steps",
    [
        ("cohere2", LogitSteps(0.0625, None)),
        ("granite", LogitSteps(0.5, None)),
        ("gemma2", LogitSteps(1.0, 30.0)),
        ("llama", LogitSteps(1.0, None)),
    ],
)
def test_logit_steps_are_those_of_the_models_own_forward(name, steps):
    from families import config_of

    if not is_supported(name):
        pytest.skip("needs a newer transformers")
    model = LanguageModel.from_config(config_of(name))
    assert (model.scale, model.softcap) == steps
