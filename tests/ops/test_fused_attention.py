"""FlashAttention 4 and cuDNN over packed sequences: the results of torch's varlen kernel, repeatable gradients, few
plans, no reads out of bounds."""

import sys
import tomllib
import types
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from conftest import ROOT
from torch import nn
from torch.utils.checkpoint import checkpoint

from mvp_engine.hf.model.attention import boundaries, packed_attention
from mvp_engine.kit import model as model_kit
from mvp_engine.ops import cudnn_attention, flash_attention
from mvp_engine.ops.attention import AttnSpec, varlen_attention
from mvp_engine.ops.cudnn_attention import Plan

needs_cudnn = pytest.mark.gpu(package="cudnn")
MODULES = {"flash": flash_attention, "cudnn": cudnn_attention}


def use_only(monkeypatch, kernel):
    """Let `varlen_attention` find one of the kernels, or none."""
    if kernel is not None and not MODULES[kernel].INSTALLED:
        pytest.skip(f"the package of {kernel} is not installed")
    for name, module in MODULES.items():
        if name != kernel:
            monkeypatch.setattr(module, "INSTALLED", False)


def count_calls(monkeypatch, module, name, calls, what):
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: (calls.append(what), real(*args))[1])


def cu_seqlens_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int().cuda()


def assert_near(found, expected, most=1e-2):
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours.float() - theirs.float()).norm() / theirs.float().norm()) < most


def test_plan_packs_of_all_sizes_share_few_plans():
    """A plan takes a tenth of a second or more to build; one per pack would cost more than the kernel saves."""
    g = torch.Generator().manual_seed(0)
    plans = set()
    for _ in range(500):
        count = int(torch.randint(4, 33, (), generator=g))
        lengths = torch.randint(64, 4097, (count,), generator=g)
        q = torch.empty(int(lengths.sum()), 16, 128, device="meta")
        longest = int(lengths.max())
        plan = Plan.of(q, q[:, :8], len(lengths), longest, longest, 0.1, True, 0)
        assert plan.sequences >= len(lengths)
        assert plan.max_seqlen >= int(lengths.max())
        assert plan.tokens >= len(q)
        plans.add(plan)
    assert len(plans) < 30


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", MODULES)
@pytest.mark.parametrize("way", ["plain", "compiled", "checkpointed"])
@pytest.mark.parametrize(
    "options, heads, size",
    [
        ({}, (8, 2), 128),
        ({"sliding_window": 50}, (8, 4), 64),
        ({"is_causal": False}, (4, 4), 80),
        ({"is_causal": False}, (4, 4), 64),
        ({"sliding_window": 130}, (4, 4), 128),
        ({"scaling": 0.3}, (8, 8), 32),
        ({"is_causal": False}, (8, 1), 256),
        ({}, (8, 2), 256),
    ],
    ids=str,
)
def test_fused_attention_output_and_gradients_equal_torch_varlen(
    monkeypatch, kernel, way, options, heads, size
):
    if kernel == "flash" and size not in flash_attention.HEADS:
        pytest.skip(f"cuDNN computes heads of {size}")
    is_common = size <= cudnn_attention.COMMON_HEAD
    if kernel == "cudnn" and not is_common and not cudnn_attention.can_build(0, size):
        pytest.skip(f"this cuDNN has no kernels for heads of {size}")
    use_only(monkeypatch, kernel)
    calls = []
    count_calls(monkeypatch, flash_attention, "_arguments", calls, "flash")
    count_calls(monkeypatch, cudnn_attention, "run", calls, "cudnn")
    lengths = [5, 1, 140, 70, 300]
    where = boundaries(cu_seqlens_of(lengths), max(lengths))
    g = torch.Generator().manual_seed(0)
    shapes = [(1, count, sum(lengths), size) for count in (*heads, heads[1])]
    given = [torch.randn(shape, generator=g).cuda().bfloat16() for shape in shapes]
    weight = torch.randn(1, sum(lengths), heads[0], size, generator=g).cuda().bfloat16()

    def once(kind):
        tensors = [x.clone().requires_grad_() for x in given]

        def attended(*qkv):
            return packed_attention(nn.Identity(), *qkv, None, **where, **options)[0]

        if kind == "compiled":
            out = torch.compile(attended, fullgraph=True, dynamic=True)(*tensors)
        elif kind == "checkpointed":
            out = checkpoint(attended, *tensors, use_reentrant=False)
        else:
            out = attended(*tensors)
        return [out.detach(), *torch.autograd.grad(out, tensors, weight)]

    ours = once(way)
    assert calls == [kernel] * (3 if way == "checkpointed" else 2)
    use_only(monkeypatch, None)
    assert_near(ours, once("plain"))


@needs_cudnn
@pytest.mark.parametrize(
    "heads, size, causal",
    [((32, 8), 128, True), ((16, 16), 64, False), ((16, 16), 80, False)],
    ids=str,
)
def test_cudnn_nan_around_the_tensors_leaves_outputs_finite(monkeypatch, heads, size, causal):
    """NaN before and after all tensors, in the outputs and in the workspace; lengths around those of tiles."""

    def inside(*shape, dtype=torch.bfloat16, fill=None):
        values = torch.randn(shape, device="cuda")
        if fill is not None:
            values.fill_(fill)
        around = torch.full((values.numel() + (2 << 20),), torch.nan, device="cuda", dtype=dtype)
        return around[1 << 20 : -1 << 20].view(shape).copy_(values)

    def filled(*sizes, **options):
        made = empty(*sizes, **options)
        return made.fill_(255) if options.get("dtype") == torch.uint8 else made

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", filled)
    for lengths in ([1, 129, 64, 700], [2000], [63, 65, 127, 128, 1, 300, 2]):
        total = sum(lengths)
        q, do = (inside(total, heads[0], size) for _ in "qo")
        k, v = (inside(total, heads[1], size) for _ in "kv")
        like = {"o": q, "dq": q, "dk": k, "dv": v}
        made = {name: inside(*x.shape, fill=torch.nan) for name, x in like.items()}
        made["stats"] = inside(total, heads[0], 1, dtype=torch.float32, fill=torch.nan)
        plan = Plan.of(q, k, len(lengths), max(lengths), max(lengths), 0.1, causal, 0)
        given = {"q": q, "k": k, "v": v, "o": made["o"], "stats": made["stats"]}
        cudnn_attention.run(plan, cu_seqlens_of(lengths), False, given)
        cudnn_attention.run(plan, cu_seqlens_of(lengths), True, {**given, **made, "do": do})
        assert all(bool(x.isfinite().all()) for x in made.values()), lengths


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", MODULES)
def test_fused_attention_slices_of_one_tensor_equal_their_copies(monkeypatch, kernel):
    """Encoders compute queries, keys and values by one GEMM."""
    use_only(monkeypatch, kernel)
    spec = AttnSpec(cu_seqlens_of([500, 200, 300]), 500, causal=False)
    fused = torch.randn(1000, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    results = []
    for qkv in (fused.unbind(1), [x.clone() for x in fused.unbind(1)]):
        tensors = [x.transpose(0, 1).detach().requires_grad_() for x in qkv]
        out = varlen_attention(*tensors, spec)
        results.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), tensors)])
    assert_near(*results, most=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", MODULES)
def test_fused_attention_deterministic_algorithms_enabled_repeats_gradients_bit_by_bit(
    monkeypatch, kernel
):
    use_only(monkeypatch, kernel)
    spec = AttnSpec(cu_seqlens_of([500, 200, 1300]), 1300)
    made = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    qkv = [torch.randn(2000, heads, 128, **made) for heads in (8, 4, 4)]
    torch.use_deterministic_algorithms(True)
    try:
        q_k_v = [x.transpose(0, 1) for x in qkv]
        out = [varlen_attention(*q_k_v, spec) for _ in range(2)]
        grads = [torch.autograd.grad(o.float().square().sum(), qkv) for o in out]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, *grads))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", MODULES)
def test_fused_attention_huge_values_in_other_sequences_leave_a_sequence_as_it_is(
    monkeypatch, kernel
):
    """Lengths around those of tiles, and an empty sequence. FlashAttention 4 reads keys behind the end of a sequence
    and multiplies them by zero, so its neighbours must be finite; cuDNN's may be NaN."""
    use_only(monkeypatch, kernel)
    value = torch.nan if kernel == "cudnn" else 1e15
    lengths = [1, 129, 0, 64, 700, 63, 65, 127, 128]
    ends = cu_seqlens_of(lengths)
    g = torch.Generator().manual_seed(0)
    given = [torch.randn(h, sum(lengths), 128, generator=g).cuda().bfloat16() for h in (8, 2, 2, 8)]

    def gradients(tensors, offsets):
        *qkv, d_out = (x.clone().requires_grad_() for x in tensors)
        out = varlen_attention(*qkv, AttnSpec(offsets, 700))
        return [out.detach(), *torch.autograd.grad(out, qkv, d_out.detach())]

    for at in (4, 7):
        rows = slice(int(ends[at]), int(ends[at + 1]))
        broken = [torch.full_like(x, value) for x in given]
        for x, whole in zip(broken, given, strict=True):
            x[:, rows] = whole[:, rows]
        whole = [x[:, rows].contiguous() for x in given]
        alone = gradients(whole, cu_seqlens_of([lengths[at]]))
        assert_near([x[:, rows] for x in gradients(broken, ends)], alone)


@pytest.mark.parametrize(
    "version, used", [(flash_attention.VERSION, True), ("4.0.0b37", False), (None, False)]
)
def test_flash_attention_other_versions_are_not_used(monkeypatch, version, used):
    """The extra `cuda` installs the one that is."""

    def installed(name):
        if version is None:
            raise PackageNotFoundError(name)
        return version

    monkeypatch.setattr(flash_attention.importlib.metadata, "version", installed)
    assert flash_attention._is_installed() is used
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = f"flash-attn-4[cu13]=={flash_attention.VERSION};"
    assert any(one.startswith(pinned) for one in project["optional-dependencies"]["cuda"])


@pytest.mark.parametrize("error", [ImportError, AttributeError])
def test_flash_attention_broken_package_is_a_warning_and_unused(monkeypatch, logged, error):
    """The package needs libraries of its own, which may be of another version."""

    class Broken(types.ModuleType):
        def __getattr__(self, name):
            raise error(name)

    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", Broken("flash_attn.cute"))
    monkeypatch.setattr(flash_attention, "runs_on", lambda _: True)
    warned = logged()
    flash_attention.load.cache_clear()
    try:
        assert not flash_attention._can_run(0)
        assert not flash_attention._can_run(0)
    finally:
        flash_attention.load.cache_clear()
    assert len(warned) == 1
    assert "mvp-engine[cuda]" in warned[0]


@pytest.mark.parametrize(
    "cuda, capability, runs",
    [("13.0", 9, True), ("12.8", 9, False), (None, 9, False), ("13.0", 10, False)],
)
def test_flash_attention_runs_on_hopper_with_cuda_13(monkeypatch, cuda, capability, runs):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (capability, 0))
    assert flash_attention.runs_on(0) is runs


@pytest.mark.parametrize(
    "change, used",
    [
        ({}, True),
        ({"dtype": torch.float16}, False),
        ({"size": 80}, False),
        ({"longest": 128}, False),
        ({"sequences": 257}, False),
        ({"keys": 2**28 // 128 + 1}, False),
        ({"window": 50, "causal": False}, False),
    ],
    ids=str,
)
def test_flash_attention_is_used_for_what_was_compared_on_a_gpu(monkeypatch, change, used):
    asked = {"dtype": torch.bfloat16, "size": 128, "longest": 129, **change}
    options = {key: asked[key] for key in ("window", "causal") if key in asked}
    monkeypatch.setattr(flash_attention, "INSTALLED", True)
    monkeypatch.setattr(flash_attention, "_can_run", lambda _: True)
    shape = (4, 300, asked["size"])
    q = types.SimpleNamespace(is_cuda=True, dtype=asked["dtype"], shape=shape)
    q.device = torch.device("cuda", 0)
    q.numel = lambda: 4 * 300 * asked["size"]
    keys = types.SimpleNamespace(numel=lambda: asked.get("keys", 300) * 128)
    boundaries = torch.zeros(asked.get("sequences", 256) + 1)
    spec = AttnSpec(boundaries, asked["longest"], **options)
    assert flash_attention.is_supported(q, spec, keys) is used


@pytest.mark.parametrize("window, left", [(0, None), (3, 2)])
def test_flash_attention_arguments_have_boundaries_scale_and_window(monkeypatch, window, left):
    given = []

    def kernel(*tensors, **options):
        given.append(options)
        return tensors

    package = types.SimpleNamespace(_flash_attn_fwd=kernel, _flash_attn_bwd=kernel)
    monkeypatch.setattr(flash_attention, "load", lambda: package)
    q = torch.zeros(5, 2, 64)
    offsets = (torch.tensor([0, 2, 5]), torch.tensor([0, 3, 7]))
    values = (*offsets, 3, 4, 0.3, True, window, True)
    flash_attention._forward(q, q, q, *values)
    flash_attention._backward(q, q, q, q, q, torch.zeros(2, 5), *values)
    expected = {"max_seqlen_q": 3, "max_seqlen_k": 4, "softmax_scale": 0.3}
    expected |= {"causal": True, "window_size_left": left}
    for options in given:
        assert expected.items() <= {name: options.get(name) for name in expected}.items()
        assert options["cu_seqlens_q"] is offsets[0]
        assert options["cu_seqlens_k"] is offsets[1]
    assert given[0]["return_lse"]
    assert given[1]["deterministic"] is False


@pytest.mark.parametrize(
    "capability, installed, loaded, hints",
    [(9, True, 1, 0), (9, False, 0, 1), (8, False, 0, 0)],
)
def test_flash_attention_on_hopper_is_loaded_in_a_thread_or_named_in_the_log(
    monkeypatch, capability, installed, loaded, hints
):
    calls = []
    monkeypatch.setattr(flash_attention, "runs_on", lambda _: capability == 9)
    monkeypatch.setattr(flash_attention, "INSTALLED", installed)
    monkeypatch.setattr(flash_attention, "load", lambda: calls.append("load"))
    monkeypatch.setattr(model_kit.LOGGER, "info", lambda text, *_: calls.append(text))
    thread = lambda target, daemon: types.SimpleNamespace(start=target)  # noqa: E731
    monkeypatch.setattr(model_kit.threading, "Thread", thread)
    model_kit.prepare_attention(torch.device("cuda"))
    assert [call for call in calls if call == "load"] == ["load"] * loaded
    assert sum("mvp-engine[cuda]" in call for call in calls) == hints
