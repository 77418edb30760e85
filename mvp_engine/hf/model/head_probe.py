"""Heads of language models: what follows the output embedding, and forwards that end in logits only.

Models of one text family differ here: Cohere2 multiplies its logits by `logit_scale`, Cohere2-Vision with the same text
config does not. So the forward of the model's class is run with a stand-in for its backbone and no head, on a few known
numbers. That needs no weights, so it works on the meta device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from mvp_engine.errors import UserError

SMALL = 2.0**-10  # a soft cap leaves it as it is
LARGE = 2.0**24  # and gives its own value for this


class LogitSteps(NamedTuple):
    """logits = softcap * tanh(scale * x / softcap), or scale * x without a soft cap."""

    scale: float
    softcap: float | None


def measure_logit_steps(causal_lm: nn.Module) -> LogitSteps | None:
    """The steps of a model whose head follows its backbone; None where its forward cannot be run in this way."""
    base: Any = causal_lm.base_model
    head: Any = causal_lm.get_output_embeddings()  # type: ignore[operator]
    if base is causal_lm or head is None:
        return None
    hidden = torch.tensor([SMALL, LARGE], dtype=torch.float64, device="cpu").view(1, 1, 2)
    stand_in = _HeadOnly(causal_lm, base, head, _BackboneOutput(hidden))
    input_ids = torch.zeros(1, 1, dtype=torch.long, device="cpu")
    try:
        with torch.no_grad():
            forward: Any = type(causal_lm).forward
            logits = forward(stand_in, input_ids=input_ids, use_cache=False).logits
        at_small, at_large = logits.flatten().tolist()
    except Exception:  # noqa: BLE001 - a forward with further steps: the preflight compares its log-probs
        return None
    if not (math.isfinite(at_large) and at_small > 0):
        return None
    if math.isclose(at_large / LARGE, at_small / SMALL, rel_tol=1e-6):
        return LogitSteps(_rounded(at_small / SMALL), None)
    scale = at_large * math.atanh(at_small / at_large) / SMALL
    return LogitSteps(_rounded(scale), _rounded(at_large))


def config_logit_steps(config: Any) -> LogitSteps:
    """The steps by the names that text configs have for them, for forwards that cannot be probed."""
    text = config.get_text_config()
    # Gemma, RecurrentGemma and xLSTM each have a name of their own for it.
    caps = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    found = [getattr(text, name, None) for name in caps]
    softcap = next((cap for cap in found if cap is not None), None)
    # Cohere multiplies its logits, Granite divides them.
    multiplier = float(getattr(text, "logit_scale", None) or 1.0)
    divisor = float(getattr(text, "logits_scaling", None) or 1.0)
    return LogitSteps(multiplier / divisor, softcap)


def _rounded(value: float) -> float:
    """Without the rounding errors of the probe, which are below 1e-9 in float64; some heads compute in float32."""
    return float(f"{value:.7g}")


class _BackboneOutput(dict[str, Any]):
    """Hidden states as any output class of transformers holds them; all other fields are None."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__(last_hidden_state=hidden)

    def __getitem__(self, key: Any) -> Any:
        return self["last_hidden_state"] if key == 0 else self.get(key)

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


class _HeadOnly:
    """Stands for a model in its own forward: the backbone returns known numbers, the head returns its input."""

    def __init__(self, model: Any, base: Any, head: Any, output: _BackboneOutput) -> None:
        self.__dict__.update(_model=model, _base=base, _head=head, _output=output)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        if value is self._base:
            return lambda *args, **kwargs: self._output
        if value is self._head:
            return lambda hidden: hidden
        return value


# ---- Models whose backbone is no module of its own ---------------------------------------------


def open_head(causal_lm: nn.Module) -> None:
    """Let the head of one model instance return its input: the model's `logits` are then its hidden states.

    For models such as Llama 4 whose forward ends in logits, and whose hidden states no part of it returns.
    """
    head: Any = causal_lm.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Linear):
        raise UserError(
            f"{type(causal_lm).__name__} does not separate its backbone from its head, and names no linear "
            "output embedding: choose another model"
        )
    head.__dict__["forward"] = _identity


def _identity(hidden: torch.Tensor) -> torch.Tensor:
    return hidden


@contextmanager
def own_head(causal_lm: nn.Module) -> Iterator[None]:
    """The model with the head that `open_head` took away."""
    head: Any = causal_lm.get_output_embeddings()  # type: ignore[operator]
    opened = head.__dict__.pop("forward", None)
    try:
        yield
    finally:
        if opened is not None:
            head.__dict__["forward"] = opened
