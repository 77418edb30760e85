"""Engines of tiny models, what one of their steps computes, and how two results are compared."""

from contextlib import contextmanager

import pytest
import torch
from conftest import CAMPAIGN, ROOT  # noqa: F401 - a marker of many engine tests
from families import overrides_of
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.errors import UserError
from mvp_engine.model_engine import LanguageModelEngine, ModelSource, Settings

LM = ROOT / "tests" / "recipes" / "packed_lm" / "train.yaml"
ALONE = Layout(World(0, 1, 0, 1, torch.device("cpu")))
Tensors = dict[str, Tensor]


def packed(*lengths, seed=3, vocab=99):
    """Random sequences of these lengths."""
    g = torch.Generator().manual_seed(seed)
    return PackedBatch.from_sequences([torch.randint(vocab, (n,), generator=g) for n in lengths])


def counting(*lengths, start=0, modulus=99):
    """Sequences of these lengths that count up from `start`."""
    sequences = [torch.arange(start, start + length) % modulus for length in lengths]
    return PackedBatch.from_sequences(sequences)


# ---- Engines ----------------------------------------------------------------------------------------------------


def sgd(model, lr=0.0):
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr)


def adamw(model, lr=1e-3):
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr)


def engine_of(
    model,
    layout=ALONE,
    optimizer=sgd,
    kind=LanguageModelEngine,
    **settings,
):
    """An initialized engine of a module, or of a family or config, whose weights come from the seed."""
    if isinstance(model, str):
        model = overrides_of(model)
    if isinstance(model, dict):
        model = kind.build_model(ModelSource(None, model))
    if settings.get("compile"):
        torch._dynamo.reset()  # a graph of another test may fit: Dynamo has no guards on forward hooks
    engine = kind(model, layout, Settings(**settings))
    engine.initialize(optimizer)
    return engine


def loss_of(engine):
    """The `forward_step` of an SFT."""
    return lambda batch: (engine.model(batch, ["loss"])["loss"], batch.num_loss_tokens)


def scores_of(engine, entropy=-0.1):
    """A `forward_step` of two outputs per token."""

    def loss(batch):
        out = engine.model(batch, ["log_probs", "entropy"])
        return out["log_probs"].sum() + entropy * out["entropy"].sum(), batch.num_loss_tokens

    return loss


def train(engine, *batches):
    return engine.train_batch(list(batches), loss_of(engine))


def share_of(layout, batches):
    """The micro-batches of this data-parallel rank."""
    return batches[layout.data_rank :: layout.data_size]


def shares_of(layout, shares):
    """The same where `shares` has a list of micro-batches for each rank of the largest layout."""
    return [one for share in share_of(layout, shares) for one in share]


def fresh_graphs():
    """Forget compiled graphs; returns torch's statistics, such as `unique_graphs`."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch._dynamo.utils.counters["stats"]


@contextmanager
def no_host_sync():
    """On a GPU: waiting for a value of the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- Results ----------------------------------------------------------------------------------------------------


def gradients(model, scale=1.0):
    """The whole gradient, on all ranks, of each parameter that has one."""
    grads = {name: param.grad for name, param in model.named_parameters()}
    return {name: full_tensor(g).clone() / scale for name, g in grads.items() if g is not None}


def weights(model):
    """Whole parameters, on all ranks."""
    named = model.named_parameters()
    return {name: full_tensor(param.detach()).clone() for name, param in named}


def whole_state(engine):
    """Whole parameters and states of the optimizer, on all ranks."""
    found = weights(engine.model)
    for name, param in engine.model.named_parameters():
        for key, value in engine.optimizer.state[param].items():
            found[f"{name}.{key}"] = full_tensor(value).clone()
    return found


def message_of(layout, build, *args):
    """The text of the user error that `build(layout, *args)` ends with; empty without one."""
    try:
        build(layout, *args)
    except UserError as error:
        return str(error)
    return ""


def assert_close(found, expected, rel=1e-5, floor=1.0, what=""):
    """The same names, and each tensor equal to `rel` of its largest value, or of `floor`."""
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        bound = rel * max(float(value.abs().max()) if value.numel() else 0.0, floor)
        assert float((found[name] - value).abs().max()) <= bound, (what, name)


def assert_equal(found, expected):
    """The same names, and bit-equal tensors."""
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def assert_metrics(found, expected, **rel):
    """The same steps; metrics within these relative tolerances, and the same counts of data."""
    for exact in ("step", "totals"):
        assert [one.get(exact) for one in found] == [one.get(exact) for one in expected]
    for name, tolerance in rel.items():
        values = [one.get(name, 0.0) for one in expected]
        assert [one.get(name, 0.0) for one in found] == pytest.approx(values, rel=tolerance)
