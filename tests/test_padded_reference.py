"""Packed log-probs, entropy and values equal those of a padded forward: what PPO needs."""

import pytest
import torch
from families import config_of
from transformers import AutoModelForCausalLM

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.hf import LanguageModel, ValueModel

PROMPTS, ANSWERS = torch.tensor([3, 6, 1, 5]), torch.tensor([4, 2, 7, 1])
LONGEST_PROMPT, R = int(PROMPTS.max()), int(ANSWERS.max())


@pytest.fixture
def rows():
    """Ids and attention mask of `[pad, prompt, response, pad]` rows, whose responses have R columns."""
    column = torch.arange(LONGEST_PROMPT + R)
    begin, end = LONGEST_PROMPT - PROMPTS[:, None], LONGEST_PROMPT + ANSWERS[:, None]
    mask = (column >= begin) & (column < end)
    generator = torch.Generator().manual_seed(7)
    return torch.where(mask, torch.randint(1, 50, mask.shape, generator=generator), 0), mask.long()


def packed_rows(ids, mask):
    """The rows without padding, as docs/models.md packs them: responses are learned."""
    learned = mask.bool() & (torch.arange(mask.shape[1]) >= LONGEST_PROMPT)
    return PackedBatch.from_sequences(
        [row[there] for row, there in zip(ids, mask.bool(), strict=True)],
        [row[there] for row, there in zip(learned, mask.bool(), strict=True)],
    )


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
    ids, mask = rows
    is_token = mask[:, -R:].bool()
    with torch.no_grad():
        logits = reference(
            ids, attention_mask=mask, position_ids=positions(mask), use_cache=False
        ).logits
        # The logits that predict each response token.
        before = logits[:, -R - 1 : -1].log_softmax(-1)
        expected = before.gather(-1, ids[:, -R:, None])[..., 0]
        entropy = -(before.exp() * before).sum(-1)
        batch = packed_rows(ids, mask)
        out = packed(batch, ["log_probs", "entropy"])
    assert torch.allclose(
        out["log_probs"][batch.labels != IGNORE], expected[is_token], rtol=1e-5, atol=1e-5
    )
    assert torch.allclose(
        out["entropy"][batch.labels != IGNORE], entropy[is_token], rtol=1e-5, atol=1e-5
    )


def test_value_model_packed_values_equal_padded(rows):
    torch.manual_seed(0)
    model = ValueModel.from_config(config_of("qwen3")).eval()
    eager = type(model.hf)._from_config(config_of("qwen3"), attn_implementation="eager").eval()
    eager.load_state_dict(model.hf.state_dict())
    ids, mask = rows
    is_token = mask[:, -R:].bool()
    with torch.no_grad():
        hidden = eager(
            ids, attention_mask=mask, position_ids=positions(mask), use_cache=False
        ).last_hidden_state
        expected = model.score(hidden)[:, -R - 1 : -1, 0]
        batch = packed_rows(ids, mask)
        values = model(batch, ["values"])["values"]
    assert torch.allclose(values[batch.labels != IGNORE], expected[is_token], rtol=1e-5, atol=1e-5)
