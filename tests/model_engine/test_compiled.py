"""Compiled blocks, shards, shared sequences and recomputing, all at once: the numbers of one plain rank, to 1e-5."""

import functools
import os
import re
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from conftest import CAMPAIGN, user_error
from functorch.compile import make_boxed_func
from tiny_engines import (
    ALONE,
    assert_close,
    engine_of,
    fresh_graphs,
    gradients,
    message_of,
)
from tiny_models import build_model, close, packs_of
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.torch_version import TorchVersion

from mvp_engine.distributed.sequence_parallel import UlyssesShard
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.model import attention
from mvp_engine.model_engine.fsdp import compile, parallelize
from mvp_engine.ops import attention as attention_ops

pytestmark = pytest.mark.slow
WARM = 3  # packs after which nothing is compiled any more
KINDS = {"qwen3": 2, "qwen3_vl": 4}  # text blocks, their last norm, encoder, merger
MEMBERS = [[2, 1], [1, 0, 1], [2, 2, 0, 1], [1]]
LENGTHS = [(7, 3, 11), (5, 9), (13, 2, 4, 6), (17,)]


def stepped(layout, name, **how):
    """Log-probs of each pack, which all data ranks have; gradients of a step on all; graphs compiled after each.

    The packs have different lengths, and different numbers of sequences and images.
    """
    model = build_model(LanguageModel, name)
    batches = packs_of(model, name, MEMBERS, LENGTHS)
    engine = engine_of(model, layout, **how)
    stats = fresh_graphs()
    outs, graphs = [], []

    def loss(batch):
        out = engine.model(batch, ["log_probs"])["log_probs"]
        outs.append(out.detach())
        return -out.sum() / 100, batch.num_loss_tokens

    engine.optimizer_zero_grad()
    for batch in batches:
        engine.forward_backward_batch([batch], loss)
        graphs.append(stats["unique_graphs"])
    return outs, gradients(engine.model, layout.data_size), graphs


def dense(q, k, v, spec):
    """Attention that does not look at the values of boundaries, as kernels of GPUs: only so is a block one graph."""
    of_queries = torch.searchsorted(spec.cu_seqlens, torch.arange(q.shape[1]), right=True)
    of_keys = torch.searchsorted(spec.cu_seqlens_k, torch.arange(k.shape[1]), right=True)
    # Among the keys.
    at = torch.arange(q.shape[1]) + (spec.cu_seqlens_k - spec.cu_seqlens)[of_queries]
    before = at[:, None] >= torch.arange(k.shape[1])
    allowed = (of_queries[:, None] == of_keys) & (before | (not spec.causal))
    grouped = q.shape[0] != k.shape[0]
    return F.scaled_dot_product_attention(
        q[None], k[None], v[None], allowed, scale=spec.scale, enable_gqa=grouped
    )[0]


one_graph = patch.multiple(
    attention_ops,
    _has_kernels=lambda *_: True,
    _torch_varlen_is_supported=lambda *_: True,
    _torch_varlen=dense,
)


def stepped_in_ways(layout, name, ways):
    parallelize.SMALL = 64
    with one_graph:
        return [stepped(layout, name, **how) for how in ways]


@functools.cache
def expected(name):
    return stepped(ALONE, name)


def assert_as_expected(found, name, how=""):
    outs, grads, _ = expected(name)
    assert all(close(ours, theirs) for ours, theirs in zip(found[0], outs, strict=True)), how
    assert_close(found[1], grads, what=how)


def compiled_with(mode):
    return {"compile": "aot_eager", "activation_checkpointing": mode}


EVERY = [compiled_with(mode) for mode in ("full", "attention", "offload")]
SOME = [compiled_with("selective")]


@CAMPAIGN
@pytest.mark.parametrize(
    "name, sizes, ways",
    [
        ("qwen3", {"shard": 2, "ulysses": 2}, EVERY),
        ("qwen3_vl", {"ulysses": 2}, SOME),
        ("qwen3", {"context": 2, "ulysses": 2}, EVERY[:1]),
        ("qwen3_vl", {"context": 2}, EVERY),
        ("qwen3", {"ulysses": 2}, SOME),
        ("qwen3", {"context": 2}, SOME),
    ],
    ids=str,
)
def test_compiled_checkpointed_layouts_equal_one_eager_rank(on_ranks, name, sizes, ways):
    for results in on_ranks(sizes, stepped_in_ways, name, ways):
        for how, found in zip(ways, results, strict=True):
            assert_as_expected(found, name, how)
            graphs = found[2]
            assert graphs[-1] <= 3 * KINDS[name], how  # for the first sizes, then for all others
            # A rank that no other sends keys to has one more, in the last pack.
            assert graphs[-1] - graphs[WARM - 1] <= ("context" in sizes), how
            assert graphs[0] >= KINDS[name], how


def compiled_with_tensor_parallel(layout, found):
    with one_graph:
        found.append(stepped(layout, "qwen3", compile="aot_eager"))


def message_and_result(layout):
    found = []
    return message_of(layout, compiled_with_tensor_parallel, found), found


def test_compile_with_tensor_parallel_runs_where_torch_supports_it(on_ranks):
    """torch 2.13 fails in its tracing, once the number of tokens is a variable."""
    for message, found in on_ranks({"tensor": 2}, message_and_result):
        if torch.__version__ >= "2.13":
            assert message.startswith(f"model.compile: torch {torch.__version__} cannot compile")
        else:
            assert_as_expected(found[0], "qwen3")


@pytest.mark.parametrize("version, backend", [("2.12.1", "inductor"), ("2.13.0+cu130", None)])
def test_compile_default_with_tensor_parallel_on_gpus_follows_the_torch_version(
    monkeypatch, logged, version, backend
):
    texts = logged()
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    world = SimpleNamespace(device=torch.device("cuda"))
    layout = SimpleNamespace(world=world, tensor_mesh="a mesh")
    model = build_model(LanguageModel, "qwen3")
    backends = compile.compile_backends(model, "auto", layout, by_default=True)
    assert set(backends.values()) == {backend}
    assert ["blocks run uncompiled" in text for text in texts] == [True] * (backend is None)


@pytest.mark.parametrize(
    "mode, warning",
    [
        (
            "selective",
            "Qwen3DecoderLayer runs uncompiled.*Set model.activation_checkpointing=full",
        ),
        pytest.param("attention", "Qwen3DecoderLayer keeps nothing.*as with full", marks=CAMPAIGN),
        pytest.param("full", None, marks=CAMPAIGN),
    ],
)
def test_compile_with_attention_per_sequence_runs_or_warns_once(logged, mode, warning):
    texts = logged()
    parallelize._warn_of_attention.cache_clear()
    found = stepped(ALONE, "qwen3", **compiled_with(mode))
    assert_as_expected(found, "qwen3")
    graphs = found[2]
    assert (graphs[0] > 1) == (mode != "selective")  # the last norm is compiled in any case
    assert graphs[-1] == graphs[WARM - 1]  # not one for each number of sequences
    assert len(texts) == (warning is not None)  # once for all blocks
    assert warning is None or re.search(warning, texts[0])


WHOLE = [
    torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for shape in ((4, 7, 6), (1, 7, 6), (1, 7, 10))
]


def layer(q, k, v, shard=None):
    """Attention of one layer, (T, H, d)."""
    where = attention.boundaries(torch.tensor([0, 4, 7]).int(), 4)
    inputs = (q[None], k[None], v[None])
    out = attention.packed_attention(nn.Identity(), *inputs, None, ulysses_shard=shard, **where)
    return out[0][0]


def on_part(layout):
    """What each graph, forward and backward, exchanges; output and gradients; and the output in inference."""
    sent = []

    def keep(graph, examples):
        targets = [str(node.target) for node in graph.graph.nodes]
        sent.append([target for target in targets if "all_to_all" in target])
        return make_boxed_func(graph)

    shard = UlyssesShard.of(torch.distributed.group.WORLD, 7)
    own = [shard.cut(x, dim=1).clone().requires_grad_() for x in WHOLE]
    with one_graph:
        out = torch.compile(layer, backend=aot_autograd(fw_compiler=keep))(*own, shard)
        grads = torch.autograd.grad(out.square().sum(), own)
        with torch.inference_mode():
            again = layer(*own, shard).clone()
    return sent, out.detach(), grads, again


def test_ulysses_layer_has_one_functional_all_to_all_each_way(on_ranks):
    """Two at a time, or operators of our own, came in another order on one rank than on the other. Tokens do not divide
    here, both ranks need the one key/value head, and values have a head size of their own."""
    inputs = [x.clone().requires_grad_() for x in WHOLE]
    out = layer(*inputs)
    grads = torch.autograd.grad(out.square().sum(), inputs)
    sent, outs, grads_of_ranks, again = zip(*on_ranks({"ulysses": 2}, on_part), strict=True)
    each_way = ["_c10d_functional.all_to_all_single.default"] * 2
    assert list(sent) == [[each_way] * 2] * 2
    assert close(torch.cat(outs), out)
    assert all(map(torch.equal, outs, again))
    for grad, *parts in zip(grads, *grads_of_ranks, strict=True):
        assert close(torch.cat(parts, dim=1), grad)


def test_graphs_that_are_compiled_late_are_counted_with_their_reason(logged):
    texts = logged()
    fresh_graphs()
    torch._dynamo.utils.clear_compilation_metrics()  # other tests reset the numbers of graphs
    watch = compile.RecompileWatch()
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    for step in range(1, 6):
        double(torch.ones(2 if step < 5 else 3))
        watch.after_step()
    assert watch.recompiles == len(texts) == 1
    assert "size mismatch" in texts[0]
    double(torch.ones(4))
    watch.forget()  # as after an evaluation
    watch.after_step()
    assert watch.recompiles == 1


def test_graph_breaks_are_a_warning_with_their_reason(logged):
    texts = logged()
    fresh_graphs()
    meant = torch.compiler.disable(lambda x: x.tolist())
    for read, warnings in ((lambda x: x, 0), (meant, 0), (lambda x: x.tolist(), 1)):
        torch.compile(lambda x, read=read: (x * 2, read(x)), backend="eager")(torch.ones(2))
        watch = compile.RecompileWatch()
        for _ in range(5):
            watch.after_step()
        assert sum("divides blocks into several graphs" in text for text in texts) == warnings
    assert "tolist" in texts[-1]


def test_compile_cache_is_the_folder_of_the_environment_or_user(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "of the environment")
    compile.use_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "of the environment"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compile.use_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "mvp_engine" / "compile")
    (tmp_path / "file").touch()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with user_error(r"file/mvp_engine/compile.*Set \$TORCHINDUCTOR_CACHE_DIR"):
        compile.use_cache()


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def double_views(block, *sizes):
    """Run the block on views of these sizes; returns the number of graphs."""
    for size in sizes:
        view = (torch.ones(size, 5, 4, requires_grad=True) * 1).flatten(0, 1)
        assert torch.equal(block(block(view)), 4 * view)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_block_that_gets_a_view_has_one_graph():
    graphs = []
    for change in (lambda _: None, compile.copy_views):
        fresh_graphs()
        block = Doubled()
        block.compile(backend="eager", dynamic=True)
        change(block)
        graphs.append(double_views(block, 3))
    assert graphs == [2, 1]


def test_block_that_gets_views_of_any_size_has_one_graph_with_marked_sizes():
    fresh_graphs()
    block = Doubled()
    parallelize._compile(block, "eager")
    assert double_views(block, 3, 7, 5) == 1


@CAMPAIGN
@pytest.mark.parametrize(
    "name, mode", [("qwen3_moe", "none"), ("qwen3", "selective"), ("qwen3", "attention")]
)
def test_graphs_of_blocks_are_kept_on_disk(name, mode):
    """Those with autograd functions (experts), and those whose checkpointing has a policy."""
    with one_graph:
        stepped(ALONE, name, compile="inductor", activation_checkpointing=mode)
    counted = torch._dynamo.utils.counters["aot_autograd"]
    assert counted["total"] > 0
    kept = counted["autograd_cache_hit"] + counted["autograd_cache_saved"]
    assert kept == counted["total"], dict(counted)
