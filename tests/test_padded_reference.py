"""Packed log-probs, entropy and values equal those of a padded forward: what PPO needs."""

import pytest
import torch
from families import config_of
from test_batch import padded_batch
from transformers import AutoModelForCausalLM

from mvp_engine.hf import LanguageModel, ValueModel
from mvp_engine.worker.padded import from_padded, responses

PROMPTS, ANSWERS = [3, 6, 1, 5], [4, 2, 7, 1]


@pytest.fixture
def rows():
    return padded_batch(PROMPTS, ANSWERS, seed=7)


def positions(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_moe"])
def test_language_model_packed_log_probs_and_entropy_equal_padded(rows, family):
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(
        config_of(family), attn_implementation="eager"
    ).eval()
    packed = LanguageModel.from_config(config_of(family)).eval()
    packed.hf.load_state_dict(reference.state_dict())
    ids, mask, length = rows["input_ids"], rows["attention_mask"], rows["old"].shape[1]
    with torch.no_grad():
        logits = reference(
            ids, attention_mask=mask, position_ids=positions(mask), use_cache=False
        ).logits
        # The logits that predict each response token.
        before = logits[:, -length - 1 : -1].log_softmax(-1)
        is_token = mask[:, -length:].bool()
        expected = before.gather(-1, ids[:, -length:, None])[..., 0].where(is_token, 0.0)
        entropy = -(before.exp() * before).sum(-1).where(is_token, torch.tensor(0.0))
        batch = from_padded(ids, mask, response_length=length)
        out = packed(batch, ["log_probs", "entropy"])
    assert torch.allclose(responses(out["log_probs"], batch), expected, rtol=1e-5, atol=1e-5)
    assert torch.allclose(responses(out["entropy"], batch), entropy, rtol=1e-5, atol=1e-5)


def test_value_model_packed_values_equal_padded(rows):
    torch.manual_seed(0)
    model = ValueModel.from_config(config_of("qwen3")).eval()
    eager = type(model.hf)._from_config(config_of("qwen3"), attn_implementation="eager").eval()
    eager.load_state_dict(model.hf.state_dict())
    ids, mask, length = rows["input_ids"], rows["attention_mask"], rows["old"].shape[1]
    with torch.no_grad():
        hidden = eager(
            ids, attention_mask=mask, position_ids=positions(mask), use_cache=False
        ).last_hidden_state
        expected = model.score(hidden)[:, -length - 1 : -1, 0].where(
            mask[:, -length:].bool(), torch.tensor(0.0)
        )
        batch = from_padded(ids, mask, response_length=length)
        values = model(batch, ["values"])["values"]
    assert torch.allclose(responses(values, batch), expected, rtol=1e-5, atol=1e-5)
