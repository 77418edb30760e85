"""Compiled blocks, shards, shared sequences and recomputing, all at once: the numbers of one plain rank, to 1e-5."""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from families import parallel
from functorch.compile import make_boxed_func
from tiny_models import build_model, close, packs_of
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.torch_version import TorchVersion

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.distributed.ulysses import UlyssesShard
from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.model import attention
from mvp_engine.model_engine import LanguageModelEngine, Settings
from mvp_engine.model_engine.fsdp import activation_offload, compile, parallelize
from mvp_engine.ops import attention as attention_ops
from mvp_engine.ops.attention import AttnSpec

pytestmark = pytest.mark.slow
Found = tuple[list[Tensor], dict[str, Tensor], list[int]]
PLAIN = Layout(World(0, 1, 0, 1, torch.device("cpu")))
WARM = 3  # packs after which nothing is compiled any more
KINDS = {
    "qwen3": 2,
    "qwen3_vl": 4,
}  # of what is compiled: text blocks, their last norm, encoder, merger


def packs(model: LanguageModel, name: str) -> list[PackedBatch]:
    """Each with other lengths, and other numbers of sequences and images."""
    members = [[2, 1], [1, 0, 1], [2, 2, 0, 1], [1]]
    return packs_of(model, name, members, [(7, 3, 11), (5, 9), (13, 2, 4, 6), (17,)])


def found(name: str, layout: Layout, **how: Any) -> Found:
    """Log-probs of each pack, which all data ranks have; gradients of a step on all; graphs compiled after each."""
    model = build_model(LanguageModel, name)
    batches = packs(model, name)
    engine = LanguageModelEngine(model, layout, Settings(**how))
    engine.initialize(lambda m: torch.optim.SGD(m.parameters(), 0.0))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    outs, graphs = [], []

    def loss(batch: PackedBatch) -> tuple[Tensor, Tensor]:
        out = engine.model(batch, ["log_probs"])["log_probs"]
        outs.append(out.detach())
        return -out.sum() / 100, batch.num_loss_tokens

    engine.optimizer_zero_grad()
    for batch in batches:
        engine.forward_backward_batch([batch], loss)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    grads = {n: p.grad for n, p in engine.model.named_parameters() if p.grad is not None}
    return outs, {n: full_tensor(grad) / layout.data_size for n, grad in grads.items()}, graphs


def dense(q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec) -> Tensor:
    """Attention that does not look at the values of boundaries, as kernels of GPUs: only so is a block one graph."""
    of_queries = torch.searchsorted(spec.cu_seqlens, torch.arange(q.shape[1]), right=True)
    of_keys = torch.searchsorted(spec.cu_seqlens_k, torch.arange(k.shape[1]), right=True)
    at = (
        torch.arange(q.shape[1]) + (spec.cu_seqlens_k - spec.cu_seqlens)[of_queries]
    )  # among the keys
    before = at[:, None] >= torch.arange(k.shape[1])
    allowed = (of_queries[:, None] == of_keys) & (before | (not spec.causal))
    grouped = q.shape[0] != k.shape[0]
    return F.scaled_dot_product_attention(
        q[None], k[None], v[None], allowed, scale=spec.scale, enable_gqa=grouped
    )[0]


def on_ranks(name: str, sizes: dict[str, int], ways: list[dict[str, Any]]) -> list[Found]:
    world = World.join("cpu")
    activation_offload.SMALL = 64
    with patch.multiple(
        attention_ops, _torch_varlen_is_supported=lambda *_: True, _torch_varlen=dense
    ):
        results = [found(name, Layout.of(world, parallel(**sizes)), **how) for how in ways]
    world.close()
    return results


@functools.cache
def expected(name: str) -> Found:
    return found(name, PLAIN)


FULL = {"compile": "aot_eager", "activation_checkpointing": "full"}
SOME = {"compile": "aot_eager", "activation_checkpointing": "selective"}
KEPT = {"compile": "aot_eager", "activation_checkpointing": "attention"}
HOST = {"compile": "aot_eager", "activation_checkpointing": "offload"}


@pytest.mark.parametrize(
    ("name", "ranks", "sizes", "ways"),
    [
        pytest.param(
            "qwen3",
            4,
            {"shard": 2, "ulysses": 2},
            [FULL, KEPT, HOST],
            marks=pytest.mark.campaign(only=True),
        ),
        pytest.param("qwen3_vl", 2, {"ulysses": 2}, [SOME], marks=pytest.mark.campaign(only=True)),
        pytest.param(
            "qwen3", 4, {"context": 2, "ulysses": 2}, [FULL], marks=pytest.mark.campaign(only=True)
        ),
        pytest.param(
            "qwen3_vl", 2, {"context": 2}, [FULL, KEPT, HOST], marks=pytest.mark.campaign(only=True)
        ),
        pytest.param("qwen3", 2, {"ulysses": 2}, [SOME], marks=pytest.mark.campaign(only=True)),
        pytest.param("qwen3", 2, {"context": 2}, [SOME], marks=pytest.mark.campaign(only=True)),
    ],
    ids=str,
)
def test_compiled_checkpointed_layouts_equal_one_eager_rank(
    request, name: str, ranks: int, sizes: dict[str, int], ways: list[dict[str, Any]]
) -> None:
    outs, grads, _ = expected(name)
    for results in request.getfixturevalue(f"ranks{ranks}").run(on_ranks, name, sizes, ways):
        for how, (its_outs, its_grads, graphs) in zip(ways, results, strict=True):
            assert all(close(mine, one) for mine, one in zip(its_outs, outs, strict=True)), how
            assert its_grads.keys() == grads.keys()
            assert all(close(its_grads[n], grad) for n, grad in grads.items()), how
            assert graphs[-1] <= 3 * KINDS[name], how  # for the first sizes, then for all others
            # A rank that no other sends keys to has one more, in the last pack.
            assert graphs[-1] - graphs[WARM - 1] <= ("context" in sizes), how
            assert graphs[0] >= KINDS[name], how


def test_compile_with_tensor_parallel_runs_where_torch_supports_it(ranks2) -> None:
    """torch 2.13 fails in its tracing, once the number of tokens is a variable."""
    outs, grads, _ = expected("qwen3")
    for told, its_outs, its_grads in ranks2.run(sharing_matrices):
        if torch.__version__ >= "2.13":
            assert told.startswith(f"model.compile: torch {torch.__version__} cannot compile")
            continue
        assert all(close(mine, one) for mine, one in zip(its_outs, outs, strict=True))
        assert all(close(its_grads[n], grad) for n, grad in grads.items())


@pytest.mark.parametrize(("version", "backend"), [("2.12.1", "inductor"), ("2.13.0+cu130", None)])
def test_compile_default_with_tensor_parallel_on_gpus_follows_the_torch_version(
    monkeypatch, version: str, backend: str | None
) -> None:
    said: list[str] = []
    monkeypatch.setattr(compile.LOGGER, "warning", lambda text, *words: said.append(text % words))
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    layout: Any = SimpleNamespace(
        world=SimpleNamespace(device=torch.device("cuda")), tensor_mesh="a mesh"
    )
    backends = compile.compile_backends(
        build_model(LanguageModel, "qwen3"), "auto", layout, by_default=True
    )
    assert set(backends.values()) == {backend}
    assert ["blocks run uncompiled" in one for one in said] == [True] * (backend is None)


def sharing_matrices() -> tuple[str, list[Tensor], dict[str, Tensor]]:
    world = World.join("cpu")
    try:
        with patch.multiple(
            attention_ops, _torch_varlen_is_supported=lambda *_: True, _torch_varlen=dense
        ):
            outs, grads, _ = found(
                "qwen3", Layout.of(world, parallel(tensor=2)), compile="aot_eager"
            )
        return "", outs, grads
    except UserError as error:
        return str(error), [], {}
    finally:
        world.close()


@pytest.mark.parametrize(
    "how",
    [
        "selective",
        *(
            pytest.param(one, marks=pytest.mark.campaign(only=True))
            for one in ("full", "attention")
        ),
    ],
)
def test_compile_with_attention_per_sequence_runs_or_warns_once(monkeypatch, how: str) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        parallelize.LOGGER, "warning", lambda text, *words: said.append(text % words)
    )
    parallelize._warn_of_attention.cache_clear()
    outs, grads, _ = expected("qwen3")
    its_outs, its_grads, graphs = found(
        "qwen3", PLAIN, compile="aot_eager", activation_checkpointing=how
    )
    assert all(close(mine, one) for mine, one in zip(its_outs, outs, strict=True))
    assert all(close(its_grads[n], grad) for n, grad in grads.items())
    assert (graphs[0] > 1) == (how != "selective")  # the last norm is compiled in any case
    assert graphs[-1] == graphs[WARM - 1]  # not one for each number of sequences
    assert len(said) == (how != "full")  # once for all blocks
    words = {
        "selective": (
            "Qwen3DecoderLayer runs uncompiled",
            "Set model.activation_checkpointing=full",
        ),
        "attention": ("Qwen3DecoderLayer keeps nothing", "as with full"),
    }
    assert all(word in one for one in said for word in words[how])


WHOLE = [
    torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for shape in ((4, 7, 6), (1, 7, 6), (1, 7, 10))
]


def layer(q: Tensor, k: Tensor, v: Tensor, shard: UlyssesShard | None = None) -> Tensor:
    """Attention of one layer, (T, H, d)."""
    how: dict[str, Any] = {
        "ulysses_shard": shard,
        **attention.boundaries(torch.tensor([0, 4, 7]).int(), 4),
    }
    return attention.packed_attention(nn.Identity(), q[None], k[None], v[None], None, **how)[0][0]


def on_part() -> tuple[Any, ...]:
    """What each graph, forward and backward, exchanges; output and gradients; and the output in inference."""
    sent: list[list[str]] = []

    def kept(graph: Any, examples: Any) -> Any:
        sent.append(
            [str(node.target) for node in graph.graph.nodes if "all_to_all" in str(node.target)]
        )
        return make_boxed_func(graph)

    world = World.join("cpu")
    shard = UlyssesShard.of(torch.distributed.group.WORLD, 7)  # type: ignore[arg-type]
    own = [shard.cut(x, dim=1).clone().requires_grad_() for x in WHOLE]
    with patch.multiple(
        attention_ops, _torch_varlen_is_supported=lambda *_: True, _torch_varlen=dense
    ):
        out = torch.compile(layer, backend=aot_autograd(fw_compiler=kept))(*own, shard)
        grads = torch.autograd.grad(out.square().sum(), own)
        with torch.inference_mode():
            again = layer(*own, shard).clone()
    world.close()
    return sent, out.detach(), grads, again


def test_ulysses_layer_has_one_functional_all_to_all_each_way(ranks2) -> None:
    """Two at a time, or operators of our own, came in another order on one rank than on the other. Tokens do not divide
    here, both ranks need the one key/value head, and values have a head size of their own."""
    inputs = [x.clone().requires_grad_() for x in WHOLE]
    out = layer(*inputs)
    grads = torch.autograd.grad(out.square().sum(), inputs)
    results = ranks2.run(on_part)
    assert all(
        sent == [["_c10d_functional.all_to_all_single.default"] * 2] * 2 for sent, *_ in results
    )
    assert close(torch.cat([one for _, one, _, _ in results]), out)
    assert all(torch.equal(one, again) for _, one, _, again in results)
    for i, grad in enumerate(grads):
        assert close(torch.cat([its_grads[i] for _, _, its_grads, _ in results], dim=1), grad)


def test_graphs_that_are_compiled_late_are_counted_with_their_reason(monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(compile.LOGGER, "warning", lambda text, *words: said.append(text % words))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()  # other tests reset the numbers of graphs
    watch = compile.RecompileWatch()
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    for step in range(1, 6):
        double(torch.ones(2 if step < 5 else 3))
        watch.after_step()
    assert watch.recompiles == len(said) == 1
    assert "size mismatch" in said[0]
    double(torch.ones(4))
    watch.forget()  # as after an evaluation
    watch.after_step()
    assert watch.recompiles == 1


def test_graph_breaks_are_a_warning_with_their_reason(monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(compile.LOGGER, "warning", lambda text, *words: said.append(text % words))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    meant = torch.compiler.disable(lambda x: x.tolist())
    for read, warnings in ((lambda x: x, 0), (meant, 0), (lambda x: x.tolist(), 1)):
        torch.compile(lambda x, read=read: (x * 2, read(x)), backend="eager")(torch.ones(2))
        watch = compile.RecompileWatch()
        for _ in range(5):
            watch.after_step()
        assert len([one for one in said if "divides blocks into several graphs" in one]) == warnings
    assert "tolist" in said[-1]


def test_compile_cache_is_the_folder_of_the_config_or_environment_or_user(
    monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "of the environment")
    compile.use_cache(None)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "of the environment"
    compile.use_cache(str(tmp_path / "own"))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "own")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compile.use_cache(None)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "mvp_engine" / "compile")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"model\.compile_cache"):
        compile.use_cache(str(tmp_path / "file" / "below"))


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_block_that_gets_a_view_has_one_graph() -> None:
    graphs = []
    for change in (lambda _: None, compile.copy_views):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        block = Doubled()
        block.compile(backend="eager", dynamic=True)
        change(block)
        view = (torch.ones(3, 5, 4, requires_grad=True) * 1).flatten(0, 1)
        assert torch.equal(block(block(view)), 4 * view)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs == [2, 1]


def test_block_that_gets_views_of_any_size_has_one_graph_with_marked_sizes() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    block = Doubled()
    parallelize._compile(block, "eager", Settings(compile_dynamic=True))
    for tokens in (3, 7, 5):
        view = (torch.ones(tokens, 5, 4, requires_grad=True) * 1).flatten(0, 1)
        assert torch.equal(block(block(view)), 4 * view)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.campaign(only=True)
@pytest.mark.parametrize(
    ("name", "mode"), [("qwen3_moe", "none"), ("qwen3", "selective"), ("qwen3", "attention")]
)
def test_graphs_of_blocks_are_kept_on_disk(name: str, mode: str) -> None:
    """Those with autograd functions (experts), and those whose checkpointing has a policy."""
    with patch.multiple(
        attention_ops, _torch_varlen_is_supported=lambda *_: True, _torch_varlen=dense
    ):
        found(name, PLAIN, compile="inductor", activation_checkpointing=mode)
    counted = torch._dynamo.utils.counters["aot_autograd"]
    assert counted["total"] > 0
    assert counted["autograd_cache_hit"] + counted["autograd_cache_saved"] == counted["total"], (
        dict(counted)
    )
