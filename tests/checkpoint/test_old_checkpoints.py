"""Run folders that an older version wrote: today's code resumes them with the losses that the older one computed."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT, losses
from run_files import read_json

from mvp_engine.cli import main

OLD = Path(__file__).parent / "old"
EXPECTED = read_json(OLD / "expected_losses.json")
LORA = [
    "lora.rank=2",
    "lora.dropout=0.1",
    "lora.modules_to_save=['*.norm.weight']",
    "optim.lr_by_part={llm: 0.02}",
]
OVERRIDES = {
    "tiny": ["tiny.dropout=0.3", "tiny.noise=0.1"],
    "packed_lm": [
        "model.type=language_model",
        f"model.path={OLD / 'base'}",
        "model.activation_checkpointing=full",
        *LORA,
    ],
}
COMMON = (
    "train.max_steps=9 optim.schedule=constant log.interval=1 log.backends=[file,jsonl]".split()
)


@pytest.fixture
def old(tmp_path):
    """A copy of the old run folders, to continue them in."""
    shutil.copytree(OLD, tmp_path / "old", symlinks=True)
    return tmp_path / "old"


def check_losses(found, recipe):
    """Bit-equal to the older version, but for language models: their head sums over tokens with a label alone since.

    Kernels of another CPU or torch may round differently, too.
    """
    expected = EXPECTED["steps_5_to_9"][recipe]
    here = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
    if here == EXPECTED["made_with"] and recipe != "packed_lm":
        assert found == expected
    else:
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("recipe", OVERRIDES)
def test_old_checkpoint_new_run_continues_with_the_old_losses(train, old, tmp_path, recipe):
    config = ROOT / "tests" / "recipes" / recipe / "train.yaml"
    checkpoint = old / recipe / "checkpoints" / "step_00000004"
    words = [*OVERRIDES[recipe], *COMMON, f"resume={checkpoint}"]
    assert train(*words, config=config, dir=tmp_path / "new") == 0
    found = losses(tmp_path / "new")
    assert len(found) == 9  # the metrics of the old run come along
    check_losses(found[4:], recipe)


@pytest.mark.parametrize("recipe", OVERRIDES)
def test_old_run_folder_resumes_and_reports_changed_keys(train, old, tmp_path, recipe):
    config = ROOT / "tests" / "recipes" / recipe / "train.yaml"
    shutil.rmtree(old / ({"tiny", "packed_lm"} - {recipe}).pop())
    before = (old / recipe / "config.yaml").read_text()
    words = [*OVERRIDES[recipe], *COMMON, f"resume={old / recipe}"]
    assert train(*words, config=config, dir=old) == 0
    check_losses(losses(old)[4:], recipe)
    assert (old / recipe / "config.until_step_4.yaml").read_text() == before
    log = (old / recipe / "log.txt").read_text()
    [warning] = [line for line in log.splitlines() if "from step 4 on the config differs" in line]
    assert "train.max_steps: 4 -> 9" in warning
    for key in ("activation_checkpointing", "lr_by_part", "parallel.ulysses"):
        assert key not in warning  # not changed


def test_old_lora_checkpoint_merges(old, tmp_path):
    from transformers import AutoModelForCausalLM

    words = [
        "export",
        str(old / "packed_lm"),
        str(tmp_path / "merged"),
        "--base",
        str(old / "base"),
    ]
    assert main(words) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    base = AutoModelForCausalLM.from_pretrained(old / "base").state_dict()
    changed = {name for name in merged if not torch.equal(merged[name], base[name])}
    assert {name for name in merged if "_proj" in name} <= changed
    assert "model.norm.weight" in changed
    assert "model.embed_tokens.weight" not in changed
