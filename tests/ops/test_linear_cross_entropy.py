"""Chunked linear cross-entropy: the values and gradients of plain PyTorch, without the logits of the whole batch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mvp_engine.distributed import World
from mvp_engine.ops.linear_cross_entropy import IGNORE, linear_log_probs, linear_loss

WAYS: list[dict[str, Any]] = [
    {},
    {"scale": 0.3},
    {"softcap": 2.0},
    {"scale": 1.7, "softcap": 1.5, "temperature": 0.7},
]


def inputs(
    tokens: int = 23, width: int = 8, vocab: int = 50, bias: bool = False
) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, width, generator=g, requires_grad=True)
    weight = torch.randn(vocab, width, generator=g, requires_grad=True)
    labels = torch.randint(vocab, (tokens,), generator=g)
    labels[::4] = IGNORE
    bias_V: Any = torch.randn(vocab, generator=g, requires_grad=True) if bias else None
    return hidden, weight, labels, bias_V


def plain(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Any, **how: Any
) -> tuple[Tensor, ...]:
    logits = torch.nn.functional.linear(hidden, weight, bias) * how.get("scale", 1.0)
    if cap := how.get("softcap"):
        logits = cap * torch.tanh(logits / cap)
    logits = logits / how.get("temperature", 1.0)
    log_p = logits.log_softmax(-1)
    picked = log_p.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return (
        torch.where(labels == IGNORE, 0.0, picked),
        -(log_p.exp() * log_p).sum(-1),
        logits.logsumexp(-1),
        log_p.mean(-1),
    )


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [5, 23, 64])
def test_linear_log_probs_values_and_gradients_equal_plain_pytorch(
    how: dict[str, Any], bias: bool, chunk: int
) -> None:
    ours, theirs = inputs(bias=bias), inputs(bias=bias)
    a = linear_log_probs(*ours, **how, chunk=chunk, mean=True)
    b = plain(*theirs, **how)
    loss_of(*a).backward()
    loss_of(*b).backward()
    for x, y in zip(a, b, strict=True):
        assert torch.allclose(x, y, rtol=1e-5, atol=1e-6)
    for x, y in zip(ours, theirs, strict=True):
        if x is not None and x.requires_grad:
            assert torch.allclose(x.grad, y.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_loss_values_and_gradients_equal_plain_pytorch(
    how: dict[str, Any], bias: bool
) -> None:
    ours, theirs = inputs(bias=bias), inputs(bias=bias)
    (a, each), log_probs = linear_loss(*ours, **how, chunk=5), plain(*theirs, **how)[0]
    b = -log_probs.sum()
    assert torch.allclose(a, b, rtol=1e-5)
    assert torch.allclose(each, -log_probs, rtol=1e-5, atol=1e-6)
    assert not each.requires_grad
    for loss in (a, b):
        (loss * 0.3).backward()
    for x, y in zip(ours, theirs, strict=True):
        if x is not None and x.requires_grad:
            assert torch.allclose(x.grad, y.grad, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(linear_loss(*ours, **how, chunk=5)[0], b, rtol=1e-5)


def test_linear_log_probs_passes_gradcheck() -> None:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 3, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 3, generator=g, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, IGNORE, 5, 2])

    def loss(h: Tensor, w: Tensor) -> Tensor:
        return linear_log_probs(h, w, labels, softcap=3.0, temperature=0.8, chunk=3)[0].sum()

    assert torch.autograd.gradcheck(loss, (hidden, weight), eps=1e-3, atol=2e-3)


class Alive(TorchDispatchMode):
    """Counts the peak of elements in tensors made inside the context, and the collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.collectives = 0
        self._theirs: set[int] = set()  # storages made outside of the context
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._made = {at: made for at, made in self._made.items() if not made[0].expired()}
        given = [
            tensor.untyped_storage()._cdata
            for tensor in tree_leaves(args)
            if isinstance(tensor, Tensor)
        ]
        self._theirs |= set(given) - set(self._made)
        out = func(*args, **(kwargs or {}))
        self.collectives += func.namespace == "c10d"
        for tensor in tree_leaves(out):
            if (
                isinstance(tensor, Tensor)
                and (storage := tensor.untyped_storage())._cdata not in self._theirs
            ):
                self._made[storage._cdata] = (
                    StorageWeakRef(storage),
                    storage.nbytes() // tensor.itemsize,
                )
        self.elements = max(
            self.elements, sum(size for made, size in self._made.values() if not made.expired())
        )
        return out


def test_linear_log_probs_and_loss_never_hold_all_logits() -> None:
    tokens, width, vocab, chunk = 1024, 4, 1000, 64

    def scores(*given: Any) -> Tensor:
        scores: Any = linear_log_probs(*given, chunk=chunk, mean=True)
        return torch.stack([score.sum() for score in scores]).sum()

    for loss in (scores, lambda *given: linear_loss(*given, chunk=chunk)[0]):
        hidden, weight, labels, _ = inputs(tokens, width, vocab)
        with Alive() as alive:
            loss(hidden, weight, labels).backward()
        assert chunk * vocab <= alive.elements < 6 * chunk * vocab < tokens * vocab / 2
    hidden, weight, labels, _ = inputs(tokens, width, vocab)
    with Alive() as alive:
        plain(hidden, weight, labels, None)[0].sum().backward()
    assert alive.elements >= tokens * vocab  # the counter sees them in plain PyTorch


def test_linear_log_probs_under_autocast_keeps_gradients_in_the_dtype_of_the_weight() -> None:
    ours, exact = inputs(64, 32, 200), inputs(64, 32, 200)
    with torch.autocast("cpu", torch.bfloat16):
        low = linear_log_probs(*ours, chunk=16)[0]
    low.sum().backward()
    linear_log_probs(*exact, chunk=16)[0].sum().backward()
    assert low.dtype == ours[1].grad.dtype == torch.float32
    difference = float((ours[1].grad - exact[1].grad).norm() / exact[1].grad.norm())
    assert 0 < difference < 2e-2


def test_linear_log_probs_frozen_weight_gets_no_gradient() -> None:
    hidden, weight, labels, _ = inputs()
    linear_log_probs(hidden, weight.detach(), labels, chunk=8)[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def loss_of(log_probs: Tensor, entropy: Tensor, log_z: Tensor, mean: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, len(log_probs))
    return (
        log_probs * weights + (0.3 * entropy + 0.01 * log_z.square()) * weights.flip(0) + 0.2 * mean
    ).sum()


def of_shard(cuts: list[int], ways: list[dict[str, Any]]) -> list[list[Tensor | None]]:
    """Values and gradients for each way, from this rank's rows of the vocabulary."""
    world = World.join("cpu")
    start, end = cuts[world.rank : world.rank + 2]
    results: list[list[Tensor | None]] = []
    for way in ways:
        way = dict(way)
        hidden, weight, labels, bias = inputs(bias=way.pop("bias"))
        weight = weight.detach()[start:end].requires_grad_()
        bias = None if bias is None else bias.detach()[start:end].requires_grad_()
        out = linear_log_probs(
            hidden,
            weight,
            labels,
            bias,
            **way,
            mean=True,
            group=dist.group.WORLD,
            vocab_start=start,
        )
        loss_of(*out).backward()
        results.append(
            [
                *(x.detach() for x in out),
                hidden.grad,
                weight.grad,
                None if bias is None else bias.grad,
            ]
        )
    world.close()
    return results


@pytest.mark.parametrize("cuts", [[0, 25, 50], [0, 17, 50], [0, 49, 50]], ids=str)
def test_linear_log_probs_sharded_vocabulary_equals_unsharded(ranks2, cuts: list[int]) -> None:
    ways = [
        {"chunk": c, "bias": b, **how}
        for how, b, c in itertools.product(WAYS, (False, True), (5, 64))
    ]
    for way, first, second in zip(ways, *ranks2.run(of_shard, cuts, ways), strict=True):
        how = {name: value for name, value in way.items() if name not in ("bias", "chunk")}
        hidden, weight, labels, bias = inputs(bias=way["bias"])
        expected = plain(hidden, weight, labels, bias, **how)
        loss_of(*expected).backward()
        for mine, other, right in zip(first[:4], second[:4], expected, strict=True):
            assert torch.equal(mine, other)
            assert torch.allclose(mine, right, rtol=1e-5, atol=1e-6)
        assert bool((first[0][labels == IGNORE] == 0).all())
        for rank, (*_, d_hidden, d_weight, d_bias) in enumerate([first, second]):
            rows = slice(*cuts[rank : rank + 2])
            assert torch.allclose(d_hidden, hidden.grad, rtol=1e-5, atol=1e-5)
            assert torch.allclose(d_weight, weight.grad[rows], rtol=1e-5, atol=1e-5)
            assert bias is None or torch.allclose(d_bias, bias.grad[rows], rtol=1e-5, atol=1e-5)


EXCLUDED = (3, 30, 49)


def without_excluded(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Any, **how: Any
) -> tuple[Tensor, ...]:
    """`plain` on the other rows of the vocabulary alone."""
    kept = torch.tensor([row for row in range(len(weight)) if row not in EXCLUDED])
    is_label = labels != IGNORE
    labels = torch.where(is_label, torch.searchsorted(kept, labels.clamp(min=0)), IGNORE)
    return plain(hidden, weight[kept], labels, None if bias is None else bias[kept], **how)


def inputs_without_excluded_labels(bias: bool) -> tuple[Tensor, ...]:
    hidden, weight, labels, bias_V = inputs(bias=bias)
    with torch.no_grad():
        weight[3] *= 30  # would be the most likely in many rows
    return (
        hidden,
        weight,
        labels.masked_fill(torch.isin(labels, torch.tensor(EXCLUDED)), IGNORE),
        bias_V,
    )


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_excluded_rows_have_neither_probability_nor_gradient(
    how: dict[str, Any], bias: bool
) -> None:
    for only_loss in (False, True):
        ours, theirs = inputs_without_excluded_labels(bias), inputs_without_excluded_labels(bias)
        expected = without_excluded(*theirs, **how)
        if only_loss:
            linear_loss(*ours, **how, chunk=5, excluded=EXCLUDED)[0].backward()
            (-expected[0].sum()).backward()
        else:
            found = linear_log_probs(*ours, **how, chunk=5, excluded=EXCLUDED)
            for x, y in zip(found[:3], expected, strict=False):
                assert torch.allclose(x, y, rtol=1e-5, atol=1e-6)
            loss_of(*found[:3], torch.zeros(())).backward()
            loss_of(*expected[:3], torch.zeros(())).backward()
        for x, y in zip(ours, theirs, strict=True):
            if x is not None and x.requires_grad:
                assert torch.allclose(x.grad, y.grad, rtol=1e-5, atol=1e-6)


def of_shard_with_excluded(how: dict[str, Any]) -> tuple[Tensor, ...]:
    """Log-probs and entropy, and the gradients of hidden states and of this rank's rows."""
    world = World.join("cpu")
    start = (0, 49)[world.rank]  # the only row of the last rank is excluded
    end = (49, 50)[world.rank]
    hidden, weight, labels, _ = inputs_without_excluded_labels(False)
    weight = weight.detach()[start:end].requires_grad_()
    rows = tuple(row - start for row in EXCLUDED if start <= row < end)
    shard: dict[str, Any] = {"group": dist.group.WORLD, "vocab_start": start}
    out = linear_log_probs(hidden, weight, labels, **how, chunk=5, excluded=rows, **shard)
    loss_of(*out[:3], torch.zeros(())).backward()
    world.close()
    return out.log_probs.detach(), out.entropy.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("how", [WAYS[0], WAYS[3]], ids=str)
def test_excluded_rows_of_a_sharded_vocabulary_equal_unsharded(ranks2, how: dict[str, Any]) -> None:
    hidden, weight, labels, _ = inputs_without_excluded_labels(False)
    expected = without_excluded(hidden, weight, labels, None, **how)
    loss_of(*expected[:3], torch.zeros(())).backward()
    found = ranks2.run(of_shard_with_excluded, how)
    for log_probs, entropy, d_hidden, _ in found:
        assert torch.allclose(log_probs, expected[0], rtol=1e-5, atol=1e-6)
        assert torch.allclose(entropy, expected[1], rtol=1e-5, atol=1e-6)
        assert torch.allclose(d_hidden, hidden.grad, rtol=1e-5, atol=1e-5)
    assert torch.allclose(torch.cat([one[3] for one in found]), weight.grad, rtol=1e-5, atol=1e-5)


def peak_and_collectives(tokens: int, vocab: int, chunk: int) -> list[int]:
    """The peak of elements; the collectives of forward, of backward, and of backward with frozen hidden states."""
    world = World.join("cpu")
    rows = slice(world.rank * vocab // 2, (world.rank + 1) * vocab // 2)
    found = [0]
    for frozen in (False, True):
        hidden, weight, labels, _ = inputs(tokens, 4, vocab)
        weight = weight.detach()[rows].requires_grad_()
        with Alive() as forward:
            out = linear_log_probs(
                hidden.detach() if frozen else hidden,
                weight,
                labels,
                chunk=chunk,
                group=dist.group.WORLD,
                vocab_start=rows.start,
            )
        with Alive() as backward:
            (out.log_probs.sum() + out.entropy.sum()).backward()
        found = [max(found[0], forward.elements, backward.elements), *found[1:]]
        found += [backward.collectives] if frozen else [forward.collectives, backward.collectives]
    world.close()
    return found


def test_linear_log_probs_sharded_vocabulary_makes_one_collective_in_forward(ranks2) -> None:
    tokens, vocab, chunk = 1024, 1000, 64
    for elements, *collectives in ranks2.run(peak_and_collectives, tokens, vocab, chunk):
        assert chunk * vocab / 2 <= elements < 6 * chunk * vocab / 2 < tokens * vocab / 2 / 2
        assert collectives == [1, tokens // chunk, 0]


def label_past_the_vocabulary() -> tuple[float, float]:
    world = World.join("cpu")
    hidden, weight, labels, _ = inputs(vocab=50)
    labels[1] = 50
    rows = slice(25 * world.rank, 25 * world.rank + 25)
    out = linear_log_probs(
        hidden, weight[rows], labels, group=dist.group.WORLD, vocab_start=rows.start
    )[0]
    world.close()
    return float(out[1]), float(out[2:].sum())


def test_linear_log_probs_label_that_no_rank_owns_gives_minus_infinity(ranks2) -> None:
    for past_the_end, rest in ranks2.run(label_past_the_vocabulary):
        assert past_the_end == float("-inf")
        assert abs(rest) < float("inf")


def test_linear_log_probs_vocab_start_without_group_raises() -> None:
    with pytest.raises(ValueError, match="group and vocab_start go together"):
        linear_log_probs(*inputs(), vocab_start=0)


@pytest.mark.gpu
def test_linear_loss_on_gpu_in_bf16_equals_log_probs_and_is_close_to_float32() -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(700, 64, generator=g).cuda(),
        torch.randn(5000, 64, generator=g).cuda() * 0.2,
    )
    labels = torch.randint(5000, (700,), generator=g).cuda()
    labels[::5] = IGNORE
    found = []
    for kind in ("loss", "log_probs", "float32"):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=kind != "float32"):
            if kind == "loss":
                loss = linear_loss(h, w, labels, chunk=256)[0]
            else:
                loss = -linear_log_probs(h, w, labels, chunk=256)[0].sum()
        loss.backward()
        found.append([loss.detach(), h.grad, w.grad])
    for mine, theirs, limit in ((found[0], found[1], 1e-5), (found[0], found[2], 1e-2)):
        assert all(
            float((a - b).norm() / b.norm()) < limit for a, b in zip(mine, theirs, strict=True)
        )
