"""Text model families: packed equals one by one, per token and per parameter, to 1e-5."""

import pytest
import torch
from conftest import ROOT, user_error
from families import FAMILIES, config_of, table
from tiny_engines import assert_close, gradients
from tiny_models import shared_model

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf import LanguageModel, ValueModel
from mvp_engine.hf.model.preflight import check_packing

LENGTHS = [7, 1, 12, 5]


def sequences():
    """Token ids and loss masks."""
    g = torch.Generator().manual_seed(2)
    ids = [torch.randint(99, (n,), generator=g) for n in LENGTHS]
    return ids, [torch.rand(n, generator=g) < 0.8 for n in LENGTHS]


def outputs(model, batch):
    """Log-probs and entropy; adds the gradients of both."""
    out = model(batch, ["log_probs", "entropy"])
    (out["log_probs"].sum() - 0.1 * out["entropy"].sum()).backward()
    return {name: value.detach() for name, value in out.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_language_model_packed_equals_single(name, monkeypatch):
    model = shared_model(LanguageModel, name)
    monkeypatch.setattr(model, "chunk", 10)  # several chunks of logits
    check_packing(model)
    ids, masks = sequences()
    rows = zip(ids, masks, strict=True)
    alone = [outputs(model, PackedBatch.from_sequences([i], [mask])) for i, mask in rows]
    expected = gradients(model)
    model.zero_grad()
    packed = outputs(model, PackedBatch.from_sequences(ids, masks))
    assert_close(packed, {key: torch.cat([one[key] for one in alone]) for key in packed})
    assert_close(gradients(model), expected)


def test_preflight_unknown_step_before_logits_is_rejected():
    model = LanguageModel.from_config(config_of("gemma2"))
    model.softcap = None
    with torch.no_grad():
        model.hf.get_input_embeddings().weight *= 300  # large enough for the soft cap to matter
    with user_error("differ from those of transformers' own forward"):
        check_packing(model)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen3_moe"])
def test_value_model_packed_equals_single(name):
    model = shared_model(ValueModel, name)
    check_packing(model)
    batch = PackedBatch.from_sequences(sequences()[0])
    values = model(batch, ["values"])["values"]
    alone = [model(batch.select([i]), ["values"])["values"] for i in range(len(LENGTHS))]
    assert values.shape == (sum(LENGTHS),)
    assert torch.allclose(values, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_docs_table_of_families_is_up_to_date():
    page = (ROOT / "docs" / "models.md").read_text()
    expected = f"<!-- families -->\n{table()}\n<!-- /families -->"
    assert expected in page, "run python tests/hf/families.py"


def test_forward_returns_the_named_outputs_and_raises_for_unknown_names():
    model = shared_model(LanguageModel, "llama")
    batch = PackedBatch.from_sequences(sequences()[0])
    assert set(model(batch, ["hidden_states", "entropy"])) == {"hidden_states", "entropy"}
    with user_error(r"LanguageModel does not provide \['values'\]; it provides log_probs, entropy"):
        model(batch, ["values"])
