"""Check a loss: exact for every split into micro-batches, equal to its formula on full logits, without a host sync.

check.py [FILE.py:LOSS [FILE.py:FORMULA]]        # see SKILL.md
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.hf import LanguageModel
from mvp_engine.kit import TokenNormedLossKit
from mvp_engine.tools.skill_check import NoLog, given, run_check

Formula = Callable[[Tensor, Tensor], Tensor]


def plain(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    return cross_entropy(logits_NV, labels_N, reduction="none")


class ValueReads(TorchDispatchMode):
    """Collects the lines of a file that read the value of a tensor, such as `.item()` or `if tensor`."""

    def __init__(self, file: str | None) -> None:
        super().__init__()
        self.file = file
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.file and func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            caller = next(
                (frame for frame in reversed(traceback.extract_stack()[:-1]) if "/torch/" not in frame.filename), None
            )
            if caller is not None and caller.filename == self.file:
                self.lines.append(f"{Path(self.file).name}:{caller.lineno}: {caller.line}")
        return func(*args, **(kwargs or {}))


def problems(loss: Any, formula: Formula = plain) -> list[str]:
    """The problems of a loss, one sentence each."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        head_dim=8,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = LanguageModel.from_config(config, chunk=5)
    ids = [torch.randint(40, (length,)) for length in (11, 3, 6, 2)]
    batch = PackedBatch.from_sequences(ids, [torch.arange(len(one)) > 1 for one in ids])
    head: Tensor = model.hf.lm_head.weight

    def run(micro_batches: list[PackedBatch]) -> tuple[float, Tensor]:
        """The mean loss as the engine computes it, and the gradient of the output head."""
        model.zero_grad()
        results = [loss(NoLog(), model, micro_batch) for micro_batch in micro_batches]
        loss_sum = sum(result[0] for result in results)
        weight = sum(result[1] for result in results)
        mean = loss_sum / weight
        mean.backward()
        return float(mean.detach()), _gradient(head)

    reads = ValueReads(getattr(getattr(loss, "__code__", None), "co_filename", None))
    with reads:
        value, gradient = run([batch])
    found = [f"{line} reads the value of a tensor: a host sync on a GPU" for line in dict.fromkeys(reads.lines)]
    if not gradient.isfinite().all():
        return [*found, "the gradient is not finite"]
    for budget in (11, 13):
        other, its_gradient = run(batch.split(budget).parts)
        if abs(other - value) > 1e-5 or not _is_close(gradient, its_gradient):
            found.append(
                f"with micro-batches of at most {budget} tokens the loss is {other:.6f}, with one it is {value:.6f}"
            )
    model.zero_grad()
    hidden_TD = model(batch, ["hidden_states"])["hidden_states"].detach()
    has_label_T = batch.labels != IGNORE
    expected = formula(hidden_TD[has_label_T] @ head.T, batch.labels[has_label_T]).mean()
    expected.backward()
    if abs(float(expected.detach()) - value) > 1e-5:
        found.append(
            f"the loss is {value:.6f}, its formula on full logits is {float(expected.detach()):.6f}: does one of them "
            "have another term or divisor? Without FORMULA it is the cross-entropy"
        )
    elif not _is_close(gradient, _gradient(head)):
        found.append("the gradient is not that of the formula on full logits: does one of them lack a detach()?")
    return found


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad.clone()


def _is_close(one: Tensor, two: Tensor) -> bool:
    return torch.allclose(one, two, rtol=1e-4, atol=1e-6)


def _of_command_line() -> list[str]:
    loss = given(TokenNormedLossKit(), "the loss", "loss")
    del sys.argv[1:2]
    return problems(loss, given(plain, "the formula", "formula"))


if __name__ == "__main__":
    run_check(_of_command_line)
