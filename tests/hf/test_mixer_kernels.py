"""Kernels of mixers: what they are called with. In their place stand plain loops with the same arguments."""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from mixer_families import mixer_model
from test_mixers import sequences

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf.mixers import kernels
from mvp_engine.hf.mixers.kernels import KERNELS, Loaded, mixer_error
from mvp_engine.hf.mixers.per_sequence import Packing
from mvp_engine.hf.model.config_source import read_config


def linear_attention(
    q,
    k,
    v,
    g,
    beta=None,
    scale=None,
    use_qk_l2norm_in_kernel=False,
    *,
    cu_seqlens,
    cu_seqlens_cpu,
):
    """flash-linear-attention's functions with a decay `g` per head or per channel; with `beta` by the delta rule."""
    assert torch.equal(cu_seqlens, cu_seqlens_cpu)
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    g = g if g.ndim == 4 else g[..., None]
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    out = []
    for t in range(q.shape[1]):
        if t in cu_seqlens.tolist():
            state = torch.zeros(v.shape[2], k.shape[-1], v.shape[-1])
        state = state * g[0, t].exp()[..., None]
        value = v[0, t]
        if beta is not None:
            value = beta[0, t, :, None] * (value - torch.einsum("hk,hkv->hv", k[0, t], state))
        state = state + k[0, t, :, :, None] * value[:, None]
        out.append(torch.einsum("hk,hkv->hv", q[0, t] * scale, state))
    return torch.stack(out)[None], None


def fla_convolution(
    x,
    weight,
    bias=None,
    residual=None,
    activation=None,
    *,
    cu_seqlens,
    cu_seqlens_cpu,
):
    sizes = cu_seqlens.diff().tolist()
    return by_part(x.transpose(1, 2), sizes, weight, bias, activation).transpose(1, 2), None


def convolution(x, weight, bias, activation):
    padded = F.pad(x, (weight.shape[-1] - 1, 0))
    out = F.conv1d(padded, weight[:, None], bias, groups=len(weight))
    return out if activation is None else F.silu(out)


def by_part(x, sizes, *options):
    return torch.cat([convolution(part, *options) for part in x.split(sizes, dim=-1)], dim=-1)


def sizes_of(seq_idx):
    return seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()


def package_convolution(
    x,
    weight,
    bias=None,
    seq_idx=None,
    activation=None,
):
    assert seq_idx is not None
    assert (seq_idx.dtype, x.stride(1)) == (torch.int32, 1)
    return by_part(x, sizes_of(seq_idx), weight, bias, activation)


def mamba_package(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    seq_idx,
    **options,
):
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    split = [value.split(sizes_of(seq_idx), dim=1) for value in (x, dt, B, C)]
    outs = []
    for part_x, part_dt, part_B, part_C in zip(*split, strict=True):
        out = mamba2_chunk_scan(part_x, part_dt, A, part_B, part_C, chunk_size, **options)
        outs.append(out)
    return torch.cat(outs, 1)


FLA = dict.fromkeys(KERNELS, linear_attention) | {"short convolution": fla_convolution}
PACKAGES = {"short convolution": package_convolution, "Mamba 2 scan": mamba_package}


@pytest.mark.parametrize(
    "name, doubles, by_channel",
    [
        ("qwen3_5_text", FLA, False),
        ("qwen3_5_text", FLA, True),
        ("kimi_linear", FLA, False),
        ("mamba2", FLA, False),
        ("mamba2", FLA, True),
        ("mamba2", PACKAGES, False),
        ("lfm2_moe", PACKAGES, False),
    ],
)
def test_kernels_give_what_the_reference_gives(name, doubles, by_channel, monkeypatch):
    model = mixer_model(name)
    batch = PackedBatch.from_sequences(sequences())
    expected = model(batch, ["log_probs"])["log_probs"]
    called = set()

    def kernel_for(operation, tensor):
        called.add(operation)
        if operation not in doubles:
            return None
        is_fla = [(kernel, kernel.package == kernels.FLA) for kernel in KERNELS[operation]]
        of_package = [kernel for kernel, of_fla in is_fla if of_fla == (doubles is FLA)]
        return Loaded(of_package[-1 if by_channel else 0], doubles[operation])

    monkeypatch.setattr(kernels, "kernel_for", kernel_for)
    monkeypatch.setattr(kernels, "SMALLEST_HEAD", 1)
    found = model(batch, ["log_probs"])["log_probs"]
    assert called == model.mixers.operations
    assert not torch.equal(found, expected)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_load_without_packages_returns_none_and_describe_says_what_to_install():
    assert kernels.load("gated delta rule") is None  # the tests run without it
    assert kernels.kernel_for("gated delta rule", torch.zeros(1)) is None
    assert "mvp-engine[linear]" in kernels.describe("gated delta rule", torch.device("cuda"))


@pytest.mark.parametrize(
    "capability, triton, expected",
    [
        ((9, 0), "3.6.0", True),
        ((9, 0), "3.7.1", False),
        ((9, 0), "3.3.1", False),
        ((8, 0), "3.6.0", False),
    ],
)
def test_kernel_that_triton_miscompiles_on_hopper_is_not_loaded(
    capability, triton, expected, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(kernels, "_version", lambda package: triton)
    modules = {"fla.ops.gated_delta_rule": "chunk_gated_delta_rule", "fla.ops.kda": "chunk_kda"}
    for module, function in modules.items():
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{function: linear_attention}))
    kernels.load.cache_clear()
    loaded = kernels.load("gated delta rule")
    said = kernels.describe("gated delta rule", torch.device("cuda"))
    kernels.load.cache_clear()
    assert loaded is not None
    assert loaded.kernel.has_decay_per_channel == expected
    assert ("Triton 3.7.1" in said) == expected


def test_read_config_of_a_type_that_another_package_registered_is_that_of_transformers(
    monkeypatch,
):
    from transformers import CONFIG_MAPPING, AutoConfig, Mamba2Config

    class Theirs(Mamba2Config):
        model_type = "mamba2"

    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", {})
    monkeypatch.setitem(sys.modules, "fla.models", SimpleNamespace())
    AutoConfig.register("mamba2", Theirs, exist_ok=True)  # as `import fla` does
    assert type(AutoConfig.for_model("mamba2")) is Theirs
    assert type(read_config(None, {"model_type": "mamba2"})) is Mamba2Config


@pytest.mark.parametrize("operation", KERNELS)
def test_mixer_error_of_torch_is_rounding_and_of_a_leak_is_not(operation, monkeypatch):
    assert mixer_error(operation, "cpu") < 2e-2

    def leaks(function, packing, original, args, kwargs):
        is_half = args[0].dtype == torch.bfloat16
        one = Packing([packing.num_tokens], packing.cu_seqlens[[0, -1]]) if is_half else packing
        return run(function, one, original, args, kwargs)

    run = kernels._with_gradients
    monkeypatch.setattr(kernels, "_with_gradients", leaks)
    assert mixer_error(operation, "cpu") > 2e-2


def test_copy_of_a_model_has_boundaries_of_its_own():
    model = mixer_model("qwen3_5_text")
    other = copy.deepcopy(model)
    batch = PackedBatch.from_sequences(sequences())
    expected = model(batch, ["log_probs"])["log_probs"]
    model.mixers = None  # whatever the copy uses is its own
    assert torch.equal(other(batch, ["log_probs"])["log_probs"], expected)
