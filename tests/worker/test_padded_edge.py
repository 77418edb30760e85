"""The padded edge equals a padded model of transformers: log-probs, loss and gradient norm."""

import pytest
import torch
from conftest import user_error
from test_batch import padded_batch
from transformers import AutoModelForCausalLM
from worker_cases import spec_of

from mvp_engine.kit.rl import PolicyLoss
from mvp_engine.worker import WorkerGroup, padded

ROWS = padded_batch([3, 6, 1, 5], [4, 2, 7, 1], seed=7)
IDS, MASK, R = ROWS["input_ids"] % 64, ROWS["attention_mask"], ROWS["old"].shape[1]
INPUTS = {"input_ids": IDS, "attention_mask": MASK}


def reference_log_probs(folder):
    """Of a padded forward: the model, and (B, R) with a gradient."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    positions = (MASK.cumsum(1) - 1).clamp(min=0)
    logits = model(IDS, attention_mask=MASK, position_ids=positions, use_cache=False).logits
    before = logits[:, -R - 1 : -1].log_softmax(-1)
    log_probs = before.gather(-1, IDS[:, -R:, None])[..., 0]
    return model, log_probs.where(MASK[:, -R:].bool(), 0.0)


def test_padded_infer_and_update_equal_a_padded_reference(tmp_path):
    generator = torch.Generator().manual_seed(3)
    advantages = torch.randn(len(IDS), R, generator=generator)
    loss_mask = MASK[:, -R:].clone()
    loss_mask[2, 3] = 0  # a token of a tool, not of the policy
    with WorkerGroup.start(spec_of()) as group:
        group.export_hf(tmp_path / "hf")
        model, expected = reference_log_probs(tmp_path / "hf")
        found = padded.infer(
            group, {**INPUTS, "advantages": advantages}, ["log_probs"], response_length=R, budget=16
        )
        assert torch.allclose(found["log_probs"], expected, atol=1e-5)
        old = expected.detach() + 0.3 * torch.randn(len(IDS), R, generator=generator)
        rows = {**INPUTS, "loss_mask": loss_mask, "old_log_probs": old, "advantages": advantages}
        rows["group"] = torch.tensor([0, 0, 1, 1])
        [numbers] = padded.update(
            group, rows, PolicyLoss(clip=(0.2, 0.3)), response_length=R, budget=16, together="group"
        )
    ratio = (expected - old).exp()
    terms = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.3) * advantages)
    loss = (terms * loss_mask).sum() / loss_mask.sum()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert numbers.loss == pytest.approx(loss.item(), abs=1e-5)
    assert numbers.grad_norm == pytest.approx(float(norm), rel=1e-4)
    assert numbers.weight == float(loss_mask.sum())


def test_padded_results_have_the_columns_that_were_asked_for():
    wide = {name: torch.nn.functional.pad(value, (0, 3)) for name, value in INPUTS.items()}
    with WorkerGroup.start(spec_of(model={"type": "value_model"}, optim=None)) as group:
        values = padded.infer(group, INPUTS, ["values"], response_length=R, budget=32)["values"]
        more = padded.infer(group, wide, ["values"], response_length=R + 3, budget=32)["values"]
    assert values.shape == (len(IDS), R)
    assert torch.equal(more[:, :R], values)
    assert not more[:, R:].any()


def test_padded_rows_of_a_wrong_shape_are_named():
    with user_error(r"advantages is \(4, 2\): a field of padded rows is \(4, 7\)"):
        padded.pack({**INPUTS, "advantages": torch.zeros(4, 2)}, R)
    with user_error("padded rows need attention_mask; these have: input_ids"):
        padded.pack({"input_ids": IDS}, R)
