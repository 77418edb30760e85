"""References of preference training: adapters off, cached log-probs; mismatched answers of KTO; config errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import user_error
from families import config_of, overrides_of
from folders import alone
from lora_models import BATCH
from templates.tiny import tokenizer
from tiny_vlm import made, model_config, qwen3_vl, write, write_image

from mvp_engine.config import compose
from mvp_engine.config.schema import Experts
from mvp_engine.data.batch import IGNORE
from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.lora.lora_layers import adapted_layers, adapters_off
from mvp_engine.kit import Lora, MLLMModelKit
from mvp_engine.kit.preference import frozen_engine
from mvp_engine.kit.preference.losses import mismatched_batches
from mvp_engine.kit.preference.reference import cache_file
from mvp_engine.model_engine import Settings


def test_adapters_off_gives_base_outputs_and_leaves_gradients_alone():
    torch.manual_seed(0)
    model: Any = LanguageModel.from_config(config_of("qwen3"))
    base = model(BATCH, ["log_probs"])["log_probs"].detach()
    MLLMModelKit(Lora(rank=2)).adapt(model)
    for _, layer in adapted_layers(model):
        torch.nn.init.normal_(layer.lora_B.weight)
    plain = model(BATCH, ["log_probs"])["log_probs"]
    grads = torch.autograd.grad(plain.sum(), [p for p in model.parameters() if p.requires_grad])
    adapted = model(BATCH, ["log_probs"])["log_probs"]
    with torch.no_grad(), adapters_off(model):
        off = model(BATCH, ["log_probs"])["log_probs"]
    assert torch.equal(off, base)
    assert not torch.allclose(adapted, base)
    # The backward of a forward before the switch: its saved tensors must be those of the adapters on.
    again = torch.autograd.grad(adapted.sum(), [p for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(one, two) for one, two in zip(grads, again, strict=True))
    assert torch.equal(model(BATCH, ["log_probs"])["log_probs"], plain)


def test_adapters_off_without_adapters_raises():
    model = LanguageModel.from_config(config_of("qwen3"))
    with user_error("no LoRA adapters"), adapters_off(model):
        pass


@pytest.mark.parametrize("images", [False, True])
def test_mismatched_batches_equal_rows_that_were_written_with_the_other_answer(tmp_path, images):
    processor = qwen3_vl() if images else tokenizer("qwen2_5")
    name = write_image(tmp_path / "a.png", 16, 24)
    rows: list[dict[str, Any]] = []
    for i in range(5):
        row = {"prompt": f"What is {i}?", "completion": f"{'it is ' * (i % 3)}{i}.", "label": i % 2}
        rows.append(
            {**row, "prompt": f"<image>{row['prompt']}", "images": [name]}
            if images and i % 2
            else row
        )
    swapped = [{**row, "completion": rows[(i + 1) % 5]["completion"]} for i, row in enumerate(rows)]
    config = model_config() if images else None
    loaded = []
    for which, some in (("rows", rows), ("swapped", swapped)):
        kit = made(
            write(tmp_path / f"{which}.jsonl", some), processor, config, fields={"label": "int"}
        )
        loaded.append(list(kit.loader("train")))
    parts, count = mismatched_batches(loaded[0], alone(), 256)
    assert count == 5
    found, wanted = ({}, {})
    for batches, by_sample in ((parts, found), (loaded[1], wanted)):
        for batch in batches:
            for s, sample in enumerate(batch.sequence_fields["sample"].tolist()):
                by_sample[sample] = batch.select([s])
    assert found.keys() == wanted.keys() == set(range(5))
    for sample, one in found.items():
        other = wanted[sample]
        count = one.num_tokens  # the other has what the template writes after an answer, too
        assert torch.equal(one.input_ids, other.input_ids[:count])
        assert torch.equal(one.labels, other.labels[:count])
        assert bool((other.labels[count:] == IGNORE).all())
        assert torch.equal(one.position_ids, other.position_ids[..., :count])
        assert {k: v.values.sum() for k, v in one.media.items()} == {
            k: v.values.sum() for k, v in other.media.items()
        }


def test_mismatched_batches_cut_long_answers_to_the_budget(tmp_path):
    rows = [{"prompt": "a " * 20, "completion": "b"}, {"prompt": "c", "completion": "d " * 60}]
    kit = made(write(tmp_path / "rows.jsonl", rows), tokenizer("qwen2_5"))
    parts, _ = mismatched_batches(list(kit.loader("train")), alone(), 100)
    assert max(part.num_tokens for part in parts) <= 100


def test_cached_log_probs_of_fp8_and_of_4_bits_have_files_of_their_own(tmp_path):
    model: Any = LanguageModel.from_config(config_of("qwen3"))
    encoder = SimpleNamespace(fingerprint="rows", max_tokens=8, overlong="drop")
    data = SimpleNamespace(data_id=str, row_encoder=encoder, cache=tmp_path)
    settings = [
        Settings(precision="bf16", **how)
        for how in ({}, {"fp8": True}, {"quantize": {"llm": "nf4"}})
    ]
    files = set()
    for one in settings:
        engine: Any = SimpleNamespace(
            config=SimpleNamespace(seed=0),
            model=model,
            data=data,
            model_engine=SimpleNamespace(settings=one),
        )
        files.add(cache_file(engine, "train"))
    assert len(files) == 3


def test_frozen_model_is_neither_quantized_nor_balanced_as_the_model_that_trains():
    """A teacher without experts; weights in 4 bits are for adapters."""
    model = LanguageModel.on_meta(None, {**overrides_of("qwen3"), "hidden_size": 64})
    config = SimpleNamespace(model=SimpleNamespace(type="language_model", backend="fsdp"))
    engine: Any = SimpleNamespace(config=config, layout=alone())
    settings = Settings(quantize={"llm": "nf4"}, experts=Experts(aux_loss_coef=0.01))
    frozen = frozen_engine(engine, model.requires_grad_(False), settings)
    assert frozen.settings.precision == settings.precision


BASE = """
engine: preference
run_name: pairs
model: {type: language_model, path: model}
train: {max_steps: 1}
"""


@pytest.mark.parametrize(
    "words, said",
    [
        (["data.pairs=false"], "data.pairs=true"),
        (["preference.loss=kto"], "data.fields={label: int}"),
        (["preference.loss=simpo", "preference.reference=copy"], "has no reference model"),
        (["preference.loss=hinge", "preference.label_smoothing=0.1"], "has no label_smoothing"),
        (["preference.reference=adapters_off"], "needs LoRA"),
        (["lora.rank=4", "lora.modules_to_save=[projector]"], "preference.reference=copy"),
        (
            ["lora.rank=4", "preference.reference=copy", "model.quantize={llm: nf4}"],
            "to adapters_off or cached",
        ),
        (
            ["preference.loss=kto", "preference.reference=cached"],
            "set reference to copy or adapters_off",
        ),
    ],
)
def test_preference_config_that_does_not_fit_the_loss_names_the_fix(tmp_path, words, said):
    file = tmp_path / "train.yaml"
    file.write_text(
        BASE + "data: {pairs: true, pack_tokens: 64, sources: {rows: {path: rows.jsonl}}}\n"
    )
    with pytest.raises(UserError) as error:
        compose(file, words)
    assert said in str(error.value).replace('"', "")


def test_preference_reference_follows_loss_and_lora(tmp_path):
    file = tmp_path / "train.yaml"
    file.write_text(
        BASE + "data: {pairs: true, pack_tokens: 64, sources: {rows: {path: rows.jsonl}}}\n"
    )
    found = [
        compose(file, words).config.reference
        for words in ([], ["lora.rank=4"], ["preference.loss=orpo"])
    ]  # type: ignore[attr-defined]
    assert found == ["copy", "adapters_off", "none"]
