"""Chunked head and loss: the numbers of the plain way, without its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mvp_engine.ops.linear_cross_entropy import IGNORE, linear_log_probs

WAYS: list[dict[str, Any]] = [{}, {"scale": 0.3}, {"softcap": 2.0}, {"scale": 1.7, "softcap": 1.5, "temperature": 0.7}]


def inputs(tokens: int = 23, width: int = 8, vocab: int = 50, bias: bool = False) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, width, generator=g, requires_grad=True)
    weight = torch.randn(vocab, width, generator=g, requires_grad=True)
    labels = torch.randint(vocab, (tokens,), generator=g)
    labels[::4] = IGNORE
    return hidden, weight, labels, torch.randn(vocab, generator=g, requires_grad=True) if bias else None  # type: ignore[return-value]


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Any, **how: Any) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias) * how.get("scale", 1.0)
    if cap := how.get("softcap"):
        logits = cap * torch.tanh(logits / cap)
    log_p = (logits / how.get("temperature", 1.0)).log_softmax(-1)
    picked = log_p.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return torch.where(labels == IGNORE, 0.0, picked), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [5, 23, 64])
def test_values_and_gradients_are_those_of_the_plain_way(how: dict[str, Any], bias: bool, chunk: int) -> None:
    ours, theirs = inputs(bias=bias), inputs(bias=bias)
    weights = torch.linspace(-1, 1, 23)
    for result in (a := linear_log_probs(*ours, **how, chunk=chunk), b := plain(*theirs, **how)):
        (result[0] * weights + 0.3 * result[1] * weights.flip(0)).sum().backward()
    for x, y in zip(a, b, strict=True):
        assert torch.allclose(x, y, rtol=1e-5, atol=1e-6)
    for x, y in zip(ours, theirs, strict=True):
        if x is not None and x.requires_grad:
            assert torch.allclose(x.grad, y.grad, rtol=1e-5, atol=1e-6)


def test_it_passes_the_numerical_gradient_check() -> None:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 3, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 3, generator=g, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, IGNORE, 5, 2])

    def loss(h: Tensor, w: Tensor) -> Tensor:
        return linear_log_probs(h, w, labels, softcap=3.0, temperature=0.8, chunk=3)[0].sum()

    assert torch.autograd.gradcheck(loss, (hidden, weight), eps=1e-3, atol=2e-3)


class Biggest(TorchDispatchMode):
    """The size of the biggest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_full_logits_are_never_alive() -> None:
    tokens, width, vocab, chunk = 512, 16, 1000, 64
    hidden, weight, labels, _ = inputs(tokens, width, vocab)
    with Biggest() as biggest:
        log_probs, entropy = linear_log_probs(hidden, weight, labels, chunk=chunk)
        (log_probs.sum() + entropy.sum()).backward()
    assert biggest.elements == chunk * vocab < tokens * vocab / 4
    hidden, weight, labels, _ = inputs(tokens, width, vocab)
    with Biggest() as biggest:
        plain(hidden, weight, labels, None)[0].sum().backward()
    assert biggest.elements == tokens * vocab  # the counter does see them


def test_under_autocast_it_computes_low_and_keeps_its_gradients_in_the_weights_dtype() -> None:
    ours, exact = inputs(64, 32, 200), inputs(64, 32, 200)
    with torch.autocast("cpu", torch.bfloat16):
        low = linear_log_probs(*ours, chunk=16)[0]
    low.sum().backward()
    linear_log_probs(*exact, chunk=16)[0].sum().backward()
    assert low.dtype == ours[1].grad.dtype == torch.float32
    difference = float((ours[1].grad - exact[1].grad).norm() / exact[1].grad.norm())
    assert 0 < difference < 2e-2


def test_frozen_parts_get_no_gradient() -> None:
    hidden, weight, labels, _ = inputs()
    linear_log_probs(hidden, weight.detach(), labels, chunk=8)[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
