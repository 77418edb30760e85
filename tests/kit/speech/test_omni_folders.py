"""Omni folders: the thinker trains, an export is the whole folder again, its other parts bit-equal."""

import pytest
import torch
from conftest import mvp, user_error
from folders import alone, entries
from omni_models import FIRST_TEXT, OMNI, VOCAB, omni_folder

from mvp_engine.cli import main
from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.lora.lora_settings import Lora
from mvp_engine.kit.model import MLLMModelKit
from mvp_engine.model_engine import LanguageModelEngine, ModelSource, Settings


def trained(folder, lora=None, steps=1, **settings):
    """An engine of the folder's thinker after one update on random text."""
    model = MLLMModelKit(lora).build(ModelSource(str(folder)))
    engine = LanguageModelEngine(model, alone(), Settings(seed=7, **settings))
    engine.initialize(
        lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    )
    ids = torch.randint(FIRST_TEXT, VOCAB, (12,), generator=torch.Generator().manual_seed(0))
    batch = PackedBatch.from_sequences([ids[:5], ids[5:]])

    def loss(micro_batch):
        return engine.model(micro_batch, ["loss"])["loss"], micro_batch.num_loss_tokens

    for _ in range(steps):
        engine.train_batch([batch], loss)
    return engine


def files_of(folder):
    return {key: value for file in folder.glob("*.safetensors") for key, value in entries(file)}


def loaded(model_class, folder):
    """`from_pretrained`, and what it says of keys. That of Qwen2.5-Omni does not return the second."""
    from transformers import PreTrainedModel

    load = PreTrainedModel.from_pretrained.__func__
    return load(model_class, folder, output_loading_info=True)


def check_export(before, after, model_class):
    """The whole folder: every key, the thinker changed, everything else bit-equal."""
    old, new = files_of(before), files_of(after)
    assert old.keys() == new.keys()
    others = [name for name in old if not name.startswith("thinker.")]
    assert others
    assert all(torch.equal(old[name], new[name]) for name in others)
    assert not torch.equal(old["thinker.lm_head.weight"], new["thinker.lm_head.weight"]) or any(
        not torch.equal(old[name], new[name]) for name in old if name not in others
    )
    model, info = loaded(model_class, after)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model) is model_class
    model_class.from_pretrained(after)


@pytest.mark.parametrize("family", OMNI)
def test_export_hf_of_a_trained_thinker_keeps_talker_and_vocoder(family, tmp_path):
    theirs = omni_folder(family, tmp_path / "in", max_shard_size="200KB")
    engine = trained(tmp_path / "in")
    engine.export_hf(tmp_path / "out")
    check_export(tmp_path / "in", tmp_path / "out", type(theirs))
    untouched = trained(tmp_path / "in", steps=0)
    untouched.export_hf(tmp_path / "same")
    before = files_of(tmp_path / "in")
    assert all(
        torch.equal(value, before[name]) for name, value in files_of(tmp_path / "same").items()
    )


@pytest.mark.parametrize("family", OMNI)
def test_merge_of_a_thinker_with_lora_writes_the_whole_folder(family, tmp_path):
    theirs = omni_folder(family, tmp_path / "in")
    engine = trained(tmp_path / "in", Lora(rank=2), steps=2)  # the first one leaves A as it was
    engine.save_checkpoint(tmp_path / "step_00000001")
    engine.export_hf(tmp_path / "out")
    assert mvp(f"export {tmp_path}/step_00000001 {tmp_path}/merged") == 0
    check_export(tmp_path / "in", tmp_path / "merged", type(theirs))
    merged = files_of(tmp_path / "merged")
    for name, value in files_of(tmp_path / "out").items():
        assert torch.equal(value, merged[name]), name


def test_merge_of_a_fully_trained_thinker_copies_other_parts_from_the_base(tmp_path):
    theirs = omni_folder("qwen3_omni_moe", tmp_path / "in")
    engine = trained(tmp_path / "in")
    engine.save_checkpoint(tmp_path / "step_00000001")
    (tmp_path / "in").rename(tmp_path / "moved")
    command = ["export", str(tmp_path / "step_00000001"), str(tmp_path / "merged")]
    assert main(command) == 2
    assert main([*command, "--base", str(tmp_path / "moved")]) == 0
    check_export(tmp_path / "moved", tmp_path / "merged", type(theirs))


def test_language_model_of_an_omni_config_without_folder_names_the_thinker():
    with user_error("model_type=qwen3_omni_moe_thinker"):
        LanguageModel.on_meta(None, {"model_type": "qwen3_omni_moe"})
