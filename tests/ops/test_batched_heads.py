"""Log-probs and entropies of several heads in batched GEMMs: equal to one head after the other, gradients too."""

import pytest
import torch

from mvp_engine.ops.batched_heads import batched_log_probs
from mvp_engine.ops.logit_stats import IGNORE


def inputs(device):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 11, 16, generator=g)
    weight = torch.randn(3, 20, 16, generator=g)
    labels = torch.randint(0, 20, (3, 11), generator=g)
    labels[0, 2] = labels[2, :3] = IGNORE
    return hidden.to(device).requires_grad_(), weight.to(device).requires_grad_(), labels.to(device)


def one_by_one(hidden, weight, labels):
    log_p = torch.stack(
        [(rows @ head.T).log_softmax(-1) for rows, head in zip(hidden, weight, strict=True)]
    )
    picked = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return torch.where(labels == IGNORE, 0.0, picked), -(log_p.exp() * log_p).sum(-1)


def compare(device, chunk, tolerance):
    found = []
    for compute in (lambda *given: batched_log_probs(*given, chunk=chunk), one_by_one):
        hidden, weight, labels = inputs(device)
        log_probs, entropy = compute(hidden, weight, labels)
        for loss in (log_probs.sum(), (log_probs * log_probs.detach() + 0.3 * entropy).sum()):
            loss.backward(retain_graph=True)
        found.append([log_probs, entropy, hidden.grad, weight.grad])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk", [None, 4])
def test_batched_log_probs_equal_heads_one_by_one_with_gradients(chunk):
    compare("cpu", chunk, 1e-5)


@pytest.mark.gpu
def test_batched_log_probs_in_bf16_on_a_gpu_equal_heads_one_by_one():
    with torch.autocast("cuda", torch.bfloat16):
        compare("cuda", 4, 5e-2)
