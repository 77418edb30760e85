"""Chunked linear cross-entropy: the values and gradients of plain PyTorch, without the logits of the whole batch."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mvp_engine.errors import UserError
from mvp_engine.ops.linear_cross_entropy import IGNORE, linear_log_probs, linear_loss, map_logits

WAYS = [
    {},
    {"scale": 0.3},
    {"softcap": 2.0},
    {"scale": 1.7, "softcap": 1.5, "temperature": 0.7},
]
EXCLUDED = (3, 30, 49)
Inputs = tuple[Tensor, Tensor, Tensor, Any]  # hidden states, weight, labels, bias


def inputs(tokens=23, width=8, vocab=50, bias=False):
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, width, generator=g, requires_grad=True)
    weight = torch.randn(vocab, width, generator=g, requires_grad=True)
    labels = torch.randint(vocab, (tokens,), generator=g)
    labels[::4] = IGNORE
    bias_V = torch.randn(vocab, generator=g, requires_grad=True) if bias else None
    return hidden, weight, labels, bias_V


def inputs_without_excluded_labels(bias=False):
    hidden, weight, labels, bias_V = inputs(bias=bias)
    with torch.no_grad():
        weight[3] *= 30  # would be the most likely in many rows
    is_excluded = torch.isin(labels, torch.tensor(EXCLUDED))
    return hidden, weight, labels.masked_fill(is_excluded, IGNORE), bias_V


def plain(hidden, weight, labels, bias, **how):
    logits = torch.nn.functional.linear(hidden, weight, bias) * how.get("scale", 1.0)
    if cap := how.get("softcap"):
        logits = cap * torch.tanh(logits / cap)
    logits = logits / how.get("temperature", 1.0)
    log_p = logits.log_softmax(-1)
    picked = log_p.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    log_probs = torch.where(labels == IGNORE, 0.0, picked)
    return log_probs, -(log_p.exp() * log_p).sum(-1), logits.logsumexp(-1), log_p.mean(-1)


def plain_without_excluded(hidden, weight, labels, bias, **how):
    """`plain` on the other rows of the vocabulary alone."""
    kept = torch.tensor([row for row in range(len(weight)) if row not in EXCLUDED])
    places = torch.searchsorted(kept, labels.clamp(min=0))
    labels = torch.where(labels == IGNORE, IGNORE, places)
    return plain(hidden, weight[kept], labels, None if bias is None else bias[kept], **how)


def loss_of(log_probs, entropy, log_z, mean=0.0):
    weights = torch.linspace(-1, 1, len(log_probs))
    others = 0.3 * entropy + 0.01 * log_z.square()
    return (log_probs * weights + others * weights.flip(0) + 0.2 * mean).sum()


def assert_close(found, expected, atol=1e-6):
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=atol)


def gradients(given):
    return [tensor.grad for tensor in given if tensor is not None and tensor.requires_grad]


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [5, 23, 64])
def test_linear_log_probs_values_and_gradients_equal_plain_pytorch(how, bias, chunk):
    ours, theirs = inputs(bias=bias), inputs(bias=bias)
    found = linear_log_probs(*ours, **how, chunk=chunk, mean=True)
    expected = plain(*theirs, **how)
    loss_of(*found).backward()
    loss_of(*expected).backward()
    assert_close(found, expected)
    assert_close(gradients(ours), gradients(theirs))


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_loss_values_and_gradients_equal_plain_pytorch(how, bias):
    ours, theirs = inputs(bias=bias), inputs(bias=bias)
    found, losses = linear_loss(*ours, **how, chunk=5)
    log_probs = plain(*theirs, **how)[0]
    expected = -log_probs.sum()
    assert_close((found, losses), (expected, -log_probs))
    assert not losses.requires_grad
    for loss in (found, expected):
        (loss * 0.3).backward()
    assert_close(gradients(ours), gradients(theirs))
    with torch.no_grad():
        assert torch.allclose(linear_loss(*ours, **how, chunk=5)[0], expected, rtol=1e-5)


def test_linear_log_probs_passes_gradcheck():
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 3, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 3, generator=g, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, IGNORE, 5, 2])

    def loss(h, w):
        return linear_log_probs(h, w, labels, softcap=3.0, temperature=0.8, chunk=3)[0].sum()

    assert torch.autograd.gradcheck(loss, (hidden, weight), eps=1e-3, atol=2e-3)


class Alive(TorchDispatchMode):
    """Counts the peak of elements in tensors made inside the context, and the collectives."""

    def __init__(self):
        super().__init__()
        self.elements = self.collectives = 0
        self._theirs = set()  # storages made outside of the context
        self._made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._made = {at: made for at, made in self._made.items() if not made[0].expired()}
        given = [one.untyped_storage() for one in tree_leaves(args) if isinstance(one, Tensor)]
        self._theirs |= {storage._cdata for storage in given} - set(self._made)
        out = func(*args, **(kwargs or {}))
        self.collectives += func.namespace == "c10d"
        for tensor in tree_leaves(out):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._theirs:
                size = storage.nbytes() // tensor.itemsize
                self._made[storage._cdata] = (StorageWeakRef(storage), size)
        held = sum(size for made, size in self._made.values() if not made.expired())
        self.elements = max(self.elements, held)
        return out


def test_linear_log_probs_and_loss_never_hold_all_logits():
    tokens, width, vocab, chunk = 1024, 4, 1000, 64

    def scores(*given):
        scores = linear_log_probs(*given, chunk=chunk, mean=True)
        return torch.stack([score.sum() for score in scores]).sum()

    def peak(loss):
        given = inputs(tokens, width, vocab)
        with Alive() as alive:
            loss(*given).backward()
        return alive.elements

    for loss in (scores, lambda *given: linear_loss(*given, chunk=chunk)[0]):
        assert chunk * vocab <= peak(loss) < 6 * chunk * vocab < tokens * vocab / 2
    # The counter sees them in plain PyTorch.
    assert peak(lambda *given: plain(*given)[0].sum()) >= tokens * vocab


def test_linear_log_probs_under_autocast_keeps_gradients_in_the_dtype_of_the_weight():
    ours, exact = inputs(64, 32, 200), inputs(64, 32, 200)
    with torch.autocast("cpu", torch.bfloat16):
        low = linear_log_probs(*ours, chunk=16)[0]
    low.sum().backward()
    linear_log_probs(*exact, chunk=16)[0].sum().backward()
    assert low.dtype == ours[1].grad.dtype == torch.float32
    difference = float((ours[1].grad - exact[1].grad).norm() / exact[1].grad.norm())
    assert 0 < difference < 2e-2


def test_linear_log_probs_frozen_weight_gets_no_gradient():
    hidden, weight, labels, _ = inputs()
    linear_log_probs(hidden, weight.detach(), labels, chunk=8)[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("only_loss", [False, True])
def test_excluded_rows_have_neither_probability_nor_gradient(how, bias, only_loss):
    ours, theirs = inputs_without_excluded_labels(bias), inputs_without_excluded_labels(bias)
    expected = plain_without_excluded(*theirs, **how)
    if only_loss:
        linear_loss(*ours, **how, chunk=5, excluded=EXCLUDED)[0].backward()
        (-expected[0].sum()).backward()
    else:
        found = linear_log_probs(*ours, **how, chunk=5, excluded=EXCLUDED)
        assert_close(found[:3], expected[:3])
        loss_of(*found[:3]).backward()
        loss_of(*expected[:3]).backward()
    assert_close(gradients(ours), gradients(theirs))


# ---- A vocabulary on two ranks ----------------------------------------------------------------------------------


def rows_of(given, start, end):
    """The inputs of a rank that has these rows of the vocabulary."""
    hidden, weight, labels, bias = given
    weight = weight.detach()[start:end].requires_grad_()
    return (
        hidden,
        weight,
        labels,
        None if bias is None else bias.detach()[start:end].requires_grad_(),
    )


def on_shard(given, start, **how):
    return linear_log_probs(*given, **how, group=dist.group.WORLD, vocab_start=start)


def of_shard(layout, cuts, ways):
    """Values and gradients for each way, from this rank's rows of the vocabulary."""
    start, end = cuts[layout.world.rank : layout.world.rank + 2]
    results = []
    for bias, how in ways:
        mine = rows_of(inputs(bias=bias), start, end)
        out = on_shard(mine, start, **how, mean=True)
        loss_of(*out).backward()
        results.append(([x.detach() for x in out], gradients(mine)))
    return results


@pytest.mark.parametrize("cuts", [[0, 25, 50], [0, 17, 50], [0, 49, 50]], ids=str)
def test_linear_log_probs_sharded_vocabulary_equals_unsharded(on_ranks, cuts):
    every = itertools.product((False, True), WAYS, (5, 64))
    ways = [(bias, {**how, "chunk": chunk}) for bias, how, chunk in every]
    for (bias, how), *shards in zip(
        ways, *on_ranks({"tensor": 2}, of_shard, cuts, ways), strict=True
    ):
        given = inputs(bias=bias)
        expected = plain(*given, **{name: how[name] for name in how if name != "chunk"})
        loss_of(*expected).backward()
        d_hidden, *d_rows = gradients(given)
        assert all(map(torch.equal, shards[0][0], shards[1][0]))
        for rank, (values, grads) in enumerate(shards):
            assert_close(values, expected)
            assert bool((values[0][given[2] == IGNORE] == 0).all())
            rows = slice(*cuts[rank : rank + 2])
            assert_close(grads, [d_hidden, *(grad[rows] for grad in d_rows)], atol=1e-5)


def of_shard_with_excluded(layout, how):
    """Log-probs and entropy, and the gradients of hidden states and of this rank's rows."""
    start, end = ((0, 49), (49, 50))[layout.world.rank]  # the only row of the last is excluded
    mine = rows_of(inputs_without_excluded_labels(), start, end)
    rows = tuple(row - start for row in EXCLUDED if start <= row < end)
    out = on_shard(mine, start, **how, chunk=5, excluded=rows)
    loss_of(*out[:3]).backward()
    return [out.log_probs.detach(), out.entropy.detach(), *gradients(mine)]


@pytest.mark.parametrize("how", [WAYS[0], WAYS[3]], ids=str)
def test_excluded_rows_of_a_sharded_vocabulary_equal_unsharded(on_ranks, how):
    given = inputs_without_excluded_labels()
    expected = plain_without_excluded(*given, **how)
    loss_of(*expected[:3]).backward()
    d_hidden, d_weight = gradients(given)
    found = on_ranks({"tensor": 2}, of_shard_with_excluded, how)
    for *values, _ in found:
        assert_close(values, [*expected[:2], d_hidden], atol=1e-5)
    assert_close([torch.cat([one[3] for one in found])], [d_weight], atol=1e-5)


def peak_and_collectives(layout, tokens, vocab, chunk):
    """The peak of elements; the collectives of forward, of backward, and of backward with frozen hidden states."""
    start = layout.world.rank * vocab // 2
    peaks, collectives = [], []
    for frozen in (False, True):
        hidden, *others = rows_of(inputs(tokens, 4, vocab), start, start + vocab // 2)
        with Alive() as forward:
            out = on_shard((hidden.detach() if frozen else hidden, *others), start, chunk=chunk)
        with Alive() as backward:
            (out.log_probs.sum() + out.entropy.sum()).backward()
        peaks += [forward.elements, backward.elements]
        collectives += [forward.collectives, backward.collectives]
    return [max(peaks), *collectives]


def test_linear_log_probs_sharded_vocabulary_makes_one_collective_in_forward(on_ranks):
    tokens, vocab, chunk = 1024, 1000, 64
    found = on_ranks({"tensor": 2}, peak_and_collectives, tokens, vocab, chunk)
    for elements, *collectives in found:
        assert chunk * vocab / 2 <= elements < 6 * chunk * vocab / 2 < tokens * vocab / 2 / 2
        assert collectives == [1, tokens // chunk, 1, 0]


def label_past_the_vocabulary(layout):
    start = 25 * layout.world.rank
    given = inputs(vocab=50)
    given[2][1] = 50
    log_probs = on_shard(rows_of(given, start, start + 25), start)[0]
    return float(log_probs[1]), float(log_probs[2:].sum())


def test_linear_log_probs_label_that_no_rank_owns_gives_minus_infinity(on_ranks):
    for past_the_end, rest in on_ranks({"tensor": 2}, label_past_the_vocabulary):
        assert past_the_end == float("-inf")
        assert abs(rest) < float("inf")


def test_linear_log_probs_vocab_start_without_group_raises():
    with pytest.raises(ValueError, match="group and vocab_start go together"):
        linear_log_probs(*inputs(), vocab_start=0)


@pytest.mark.gpu
def test_linear_loss_on_gpu_in_bf16_equals_log_probs_and_is_close_to_float32():
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(700, 64, generator=g).cuda()
    weight = torch.randn(5000, 64, generator=g).cuda() * 0.2
    labels = torch.randint(5000, (700,), generator=g).cuda()
    labels[::5] = IGNORE
    found = {}
    for kind in ("loss", "log_probs", "float32"):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=kind != "float32"):
            if kind == "loss":
                loss = linear_loss(h, w, labels, chunk=256)[0]
            else:
                loss = -linear_log_probs(h, w, labels, chunk=256)[0].sum()
        loss.backward()
        found[kind] = [loss.detach(), h.grad, w.grad]
    for other, limit in (("log_probs", 1e-5), ("float32", 1e-2)):
        for ours, theirs in zip(found["loss"], found[other], strict=True):
            assert float((ours - theirs).norm() / theirs.norm()) < limit


def hinge(logits_CV, labels_C):
    """By how much the label's logit is not 1 above the best other one."""
    label = labels_C.clamp(min=0)[:, None]
    others = logits_CV.scatter(1, label, float("-inf"))
    return (1 + others.amax(-1) - logits_CV.gather(1, label)[:, 0]).clamp(min=0)


@pytest.mark.parametrize("how", [{}, {"scale": 1.7, "softcap": 1.5}], ids=["plain", "capped"])
def test_linear_logits_of_an_own_output_have_the_values_and_gradients_of_all_logits(how):
    hidden, weight, labels, bias = inputs(bias=True)
    head = {"weight_VD": weight, "bias_V": bias, "scale": 1.0, "softcap": None, "chunk": 5, **how}
    found = map_logits(hinge, hidden, head, labels)
    logits = torch.nn.functional.linear(hidden, weight, bias) * head["scale"]
    if cap := head["softcap"]:
        logits = cap * torch.tanh(logits / cap)
    torch.testing.assert_close(found, expected := hinge(logits, labels))
    leaves = (hidden, weight, bias)
    upstream = torch.arange(len(labels)).float()
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, upstream),
        torch.autograd.grad(expected, leaves, upstream),
    )


def test_linear_logits_of_an_own_output_keep_those_of_one_chunk_alone():
    hidden, weight, labels, _ = inputs(tokens=40)
    head = {"weight_VD": weight, "bias_V": None, "scale": 1.0, "softcap": None, "chunk": 5}
    kept = []

    def pack(tensor):
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        map_logits(hinge, hidden, head, labels)
    assert not [shape for shape in kept if shape[-1:] == (len(weight),)]


def test_linear_logits_of_an_own_output_refuse_parts_of_the_vocabulary_and_of_the_tokens():
    hidden, weight, labels, _ = inputs()
    head = {"weight_VD": weight, "bias_V": None, "scale": 1.0, "softcap": None, "chunk": 5}
    with pytest.raises(UserError, match=r"parallel\.tensor=1"):
        map_logits(hinge, hidden, {**head, "group": None, "vocab_start": 0}, labels)
    with pytest.raises(UserError, match=r"23 tokens and a tensor of 22.*model\.shard\.cut"):
        map_logits(hinge, hidden, head, labels[1:])
