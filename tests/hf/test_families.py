"""Text model families: packed equals one by one, per token and per parameter, to 1e-5."""

from __future__ import annotations

import pytest
import torch
from conftest import ROOT
from families import FAMILIES, config_of, table
from tiny_models import shared_model

from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel, PackedModel, ValueModel
from mvp_engine.hf.model.preflight import check_packing

LENGTHS = [7, 1, 12, 5]


def sequences() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Token ids and loss masks."""
    g = torch.Generator().manual_seed(2)
    ids = [torch.randint(99, (n,), generator=g) for n in LENGTHS]
    return ids, [torch.rand(n, generator=g) < 0.8 for n in LENGTHS]


def gradients(model: PackedModel) -> dict[str, torch.Tensor]:
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("name", FAMILIES)
def test_language_model_packed_equals_single(name: str, monkeypatch) -> None:
    model = shared_model(LanguageModel, name)
    monkeypatch.setattr(model, "chunk", 10)  # several chunks of logits
    check_packing(model)
    ids, masks = sequences()
    alone: dict[str, list[torch.Tensor]] = {"log_probs": [], "entropy": []}
    for i, mask in zip(ids, masks, strict=True):
        one = model(PackedBatch.from_sequences([i], [mask]), ["log_probs", "entropy"])
        (one["log_probs"].sum() - 0.1 * one["entropy"].sum()).backward()
        for key, values in alone.items():
            values.append(one[key].detach())
    expected = {key: value.clone() for key, value in gradients(model).items()}
    model.zero_grad()
    packed = model(PackedBatch.from_sequences(ids, masks), ["log_probs", "entropy"])
    (packed["log_probs"].sum() - 0.1 * packed["entropy"].sum()).backward()
    for key, values in alone.items():
        assert torch.allclose(packed[key], torch.cat(values), rtol=1e-5, atol=1e-5), key
    assert gradients(model).keys() == expected.keys()
    for key, value in gradients(model).items():
        assert torch.allclose(value, expected[key], rtol=1e-5, atol=1e-5), key


def test_preflight_unknown_step_before_logits_is_rejected() -> None:
    model = LanguageModel.from_config(config_of("gemma2"))
    model.softcap = None
    with torch.no_grad():
        model.hf.get_input_embeddings().weight *= 300  # large enough for the soft cap to matter
    with pytest.raises(UserError, match="differ from those of transformers' own forward"):
        check_packing(model)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen3_moe"])
def test_value_model_packed_equals_single(name: str) -> None:
    model = shared_model(ValueModel, name)
    check_packing(model)
    ids, _ = sequences()
    values = model(PackedBatch.from_sequences(ids), ["values"])["values"]
    alone = torch.cat([model(PackedBatch.from_sequences([i]), ["values"])["values"] for i in ids])
    assert values.shape == (sum(LENGTHS),)
    assert torch.allclose(values, alone, rtol=1e-5, atol=1e-5)


def test_docs_table_of_families_is_up_to_date() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    assert f"<!-- families -->\n{table()}\n<!-- /families -->" in page, (
        "run python tests/hf/families.py"
    )


def test_forward_returns_the_named_outputs_and_raises_for_unknown_names() -> None:
    model = shared_model(LanguageModel, "llama")
    batch = PackedBatch.from_sequences(sequences()[0])
    assert set(model(batch, ["hidden_states", "entropy"])) == {"hidden_states", "entropy"}
    with pytest.raises(
        UserError,
        match=r"LanguageModel does not provide \['values'\]; it provides log_probs, entropy",
    ):
        model(batch, ["values"])
