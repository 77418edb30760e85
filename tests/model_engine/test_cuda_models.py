"""Language models on a GPU: bf16 at stated tolerances, offloading, compiled blocks."""

import gc

import pytest
import torch
from families import VISION, layout_of, overrides_of
from tiny_engines import (
    adamw,
    counting,
    engine_of,
    no_host_sync,
    packed,
    scores_of,
    sgd,
    share_of,
)
from tiny_engines import gradients as gradients_of
from tiny_engines import train as train_step
from tiny_models import build_model, sample

from mvp_engine.config.schema import Experts
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.hf import LanguageModel
from mvp_engine.model_engine.fsdp.lockstep import append_dummies
from mvp_engine.ops import attention

pytestmark = pytest.mark.gpu


def gpu():
    return Layout(World(0, 1, 0, 1, torch.device("cuda", 0)))


def fused_adamw(model):
    return torch.optim.AdamW(model.parameters(), 1e-3, fused=True)


def language_model(shape, **how):
    return engine_of(shape, gpu(), fused_adamw, **how)


def loss_of(engine):
    return scores_of(engine, entropy=0.0)


def mix(vocabulary, lengths):
    return packed(*lengths, seed=0, vocab=vocabulary)


def packs():
    """Eight packs of other lengths each."""
    lengths = [[100 + 37 * i, 3 + i, 200] for i in range(4)]
    lengths += [[90] * (i + 2) for i in range(4)]
    return [mix(512, each).pin_memory() for each in lengths]


def packs_with_media(model, forms):
    """Five packs of rows without media, with one item and with two."""
    g = torch.Generator().manual_seed(5)
    text, one, two = (sample(model, forms, forms[:count], g) for count in range(3))
    members = [[two, one], [one, text, one], [two, two, text, one], [text, two, two], [one]]
    return [PackedBatch.concat(rows).pin_memory() for rows in members]


def gradients(part, micro_batches):
    part.optimizer_zero_grad()
    part.forward_backward_batch(micro_batches, loss_of(part))
    return gradients_of(part.model)


def lowest_cosine(a, b):
    cosines = [torch.cosine_similarity(a[n].flatten(), b[n].flatten(), dim=0) for n in a]
    return min(map(float, cosines))


@pytest.mark.parametrize("compile", [None, "inductor"])
@pytest.mark.parametrize("aux_loss_coef", [None, 0.01])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_step_of_experts_on_one_rank_has_no_host_sync(name, aux_loss_coef, compile):
    """Grouped GEMMs on offsets that stay on the device; counts for the balance of experts stay there, too."""
    shape = {**overrides_of(name), "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    if name == "qwen3_moe":
        shape["moe_intermediate_size"] = 64
    part = language_model(
        shape,
        precision="bf16",
        compile=compile,
        experts=Experts(aux_loss_coef=aux_loss_coef, router_z_loss_coef=0.001),
    )
    batches = [mix(99, [40, 13, 30]).pin_memory(), mix(99, [25, 50]).pin_memory()]
    for _ in range(3):  # allocate and compile
        part.train_batch(batches, loss_of(part))
    torch.cuda.synchronize()
    with no_host_sync():
        part.train_batch(batches, loss_of(part))


def test_bf16_on_a_model_of_a_billion_parameters_is_close_to_fp32():
    """Stated for bf16: packed is no further from fp32 than transformers' own forward on each sequence alone (within a
    fifth), log-probs of about -10 are within 0.04 on average and 0.2 at worst, and no gradient's direction is off."""
    shape = {
        "model_type": "qwen3",
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    batch = mix(32000, [700, 33, 2, 1500, 250, 64])
    exact, low = language_model(shape), language_model(shape, precision="bf16")
    assert sum(param.numel() for param in exact.model.parameters()) > 1e9
    alone = [batch.select([i]) for i in range(batch.num_sequences)]
    outputs = {}
    grads = {}
    parts = [("fp32", exact, [batch]), ("packed", low, [batch]), ("alone", low, alone)]
    for name, part, rows in parts:
        log_probs = [part.infer_batch(row, ["log_probs"])["log_probs"] for row in rows]
        outputs[name] = torch.cat(log_probs)
        grads[name] = gradients(part, rows)
    with torch.no_grad(), low.autocast():
        theirs = torch.cat([low.model.eval().reference_log_probs(b.to("cuda")) for b in alone])
    apart = {name: (outputs[name] - outputs["fp32"]).abs() for name in ("packed", "alone")}
    apart["transformers"] = (theirs - outputs["fp32"]).abs()
    print("bf16 log-probs off fp32", {name: (x.mean(), x.max()) for name, x in apart.items()})
    assert apart["packed"].mean() < 1.2 * apart["transformers"].mean()
    assert apart["packed"].mean() < 0.04
    assert apart["packed"].max() < 0.2
    assert lowest_cosine(grads["packed"], grads["fp32"]) > 0.99
    assert lowest_cosine(grads["packed"], grads["alone"]) > 0.99


def norms_of(part, batch):
    """Gradient norms of three steps."""
    norms = []
    for _ in range(3):
        with part.train_mode():
            norms.append(float(part.train_batch([batch], loss_of(part)).grad_norm))
        part.optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_offload_frees_gpu_memory_and_keeps_the_state(offload):
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 8000}
    shape = {**overrides_of("qwen3"), **sizes}
    batch = mix(8000, [100, 50, 7])
    seen = {}
    for name in ("none", offload):
        gc.collect()
        before = torch.cuda.memory_allocated()
        part = language_model(shape, seed=4, offload_outside_steps=name)
        norms = norms_of(part, batch)
        outputs = part.infer_batch(batch, ["log_probs"])["log_probs"].cpu()
        seen[name] = (norms, outputs, torch.cuda.memory_allocated() - before)
        moments = [state["exp_avg"] for state in part.optimizer.state.values()]
        expected = "cuda" if name == "none" else "cpu"
        assert {moment.device.type for moment in moments} == {expected}
        if name != "none":
            assert all(moment.is_pinned() for moment in moments)
            part.to("cuda")
            assert {param.device.type for param in part.model.parameters()} == {"cuda"}
        del part, moments
    assert seen["none"][0] == pytest.approx(seen[offload][0], rel=1e-6)
    assert torch.allclose(seen["none"][1], seen[offload][1], atol=1e-6)
    assert seen[offload][2] < (0.5 if offload == "optimizer" else 0.1) * seen["none"][2]


def test_offload_on_sharded_ranks_keeps_the_state(ranks2):
    for kept, offloaded in ranks2.run(sharded_and_offloaded):
        assert kept == pytest.approx(offloaded, rel=1e-6)


def sharded_and_offloaded():
    seen = []
    with layout_of("cuda", shard=2) as layout:
        for offload, device in (("none", "cuda"), ("all", "cpu")):
            part = engine_of("qwen3", layout, adamw, seed=4, offload_outside_steps=offload)
            seen.append(norms_of(part, mix(99, [20, 30])))
            assert {p.device.type for p in part.model.parameters()} == {device}
    return seen


def test_compiled_blocks_are_close_to_eager_ones():
    shape = {**overrides_of("qwen3"), "head_dim": 64, "hidden_size": 256, "intermediate_size": 512}
    batch = mix(99, [100, 50, 7, 200])
    eager = gradients(language_model(shape, seed=4, precision="bf16"), [batch])
    for how in (
        {"compile": "inductor"},
        {"compile": "inductor", "activation_checkpointing": "full"},
        {"compile": "inductor", "activation_checkpointing": "attention"},
        {"activation_checkpointing": "selective"},
    ):
        found = gradients(language_model(shape, seed=4, precision="bf16", **how), [batch])
        assert lowest_cosine(eager, found) > 0.995, how


def test_compiled_ranks_are_close_to_one_eager_rank(ranks2):
    """Two ranks on one GPU, with shards and with shared sequences, over packs of other sizes in each step. On a CPU
    they are held to 1e-5 (test_compiled.py); this is for the kernels of bf16."""
    alone = steps(gpu(), seed=4, precision="bf16")
    ways = [({"shard": 2}, "none"), ({"ulysses": 2}, "full")]
    for seen in ranks2.run(compiled_steps, ways, timeout=180.0):
        for way, (losses, norms) in zip(ways, seen, strict=True):
            assert losses == pytest.approx(alone[0], rel=1e-2), way
            assert norms == pytest.approx(alone[1], rel=5e-2), way


def compiled_steps(ways):
    seen = []
    for sizes, mode in ways:
        how = {"compile": "inductor", "activation_checkpointing": mode}
        with layout_of("cuda", **sizes) as layout:
            seen.append(steps(layout, seed=4, precision="bf16", **how))
    return seen


def steps(layout, **how):
    """Losses and norms of gradients; two micro-batches in each step, of which data ranks have their share."""
    shape = {**overrides_of("qwen3"), "head_dim": 32, "hidden_size": 128, "vocab_size": 512}
    part = engine_of(shape, layout, lambda model: sgd(model, 0.1), **how)
    losses, norms = [], []
    for step in range(4):
        both = [mix(512, [100 + 37 * step, 3 + step, 80]), mix(512, [90] * (step + 1))]
        result = part.train_batch(share_of(layout, both), loss_of(part))
        sums = layout.world.all_gather((float(result.loss_sum), float(result.weight)))
        losses.append(sum(one for one, _ in sums) / sum(weight for _, weight in sums))
        norms.append(float(result.grad_norm))
    return losses, norms


def compiles_few_times_and_never_waits(part, batches, graphs):
    torch._dynamo.utils.counters.clear()
    for batch in batches * 2:
        train_step(part, batch)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= graphs
    with no_host_sync():
        for batch in batches:
            train_step(part, batch)


LOW = {"precision": "bf16", "clip_grad_norm": 1.0}


def test_packs_of_all_sizes_compile_few_graphs_without_host_sync():
    shape = {**overrides_of("qwen3"), "head_dim": 32, "vocab_size": 512}
    part = language_model(shape, compile="inductor", **LOW)
    compiles_few_times_and_never_waits(part, packs(), graphs=3)


@pytest.mark.parametrize("other", ["patches", "frame"])
def test_packs_with_images_compile_few_graphs_without_host_sync(other):
    """Encoder and text layers, images of two sizes, or images and videos in one pack."""
    model = build_model(LanguageModel, "qwen3_vl")
    batches = packs_with_media(model, ["patches", other])
    part = language_model(model, compile="inductor", **LOW)
    compiles_few_times_and_never_waits(part, batches, graphs=9)  # three kinds of blocks


@pytest.mark.parametrize(
    "name, compile, graphs", [("gemma2", "inductor", 24), ("gpt_oss", None, 2)]
)
def test_soft_caps_and_sinks_compile_few_graphs_without_host_sync(
    monkeypatch, name, compile, graphs
):
    """FlexAttention in both kinds of layers, with and without a window."""
    sizes = {"head_dim": 32, "vocab_size": 512, "sliding_window": 64, "num_hidden_layers": 2}
    part = language_model({**overrides_of(name), **sizes}, compile=compile, **LOW)
    # Nothing goes sequence by sequence.
    monkeypatch.setattr(attention, "untraced_reference_attention", None)
    compiles_few_times_and_never_waits(part, packs(), graphs)


def test_bidirectional_image_attention_has_no_host_sync(monkeypatch):
    monkeypatch.setitem(VISION["gemma3"][1]["text_config"], "head_dim", 32)
    model = build_model(LanguageModel, "gemma3")
    batches = packs_with_media(model, ["tiles", "tiles"])
    part = language_model(model, compile=None, **LOW)
    monkeypatch.setattr(attention, "untraced_reference_attention", None)
    compiles_few_times_and_never_waits(part, batches, graphs=2)  # full and sliding


@pytest.mark.parametrize(
    "name, modes, more",
    [
        ("gemma2", ["none", "full", "selective", "attention"], {}),
        # With more experts, rounding would choose other ones.
        ("gpt_oss", ["none", "full"], {"num_local_experts": 2, "num_experts_per_tok": 2}),
    ],
)
def test_soft_caps_and_sinks_in_bf16_are_close_to_fp32(name, modes, more):
    sizes = {"head_dim": 32, "hidden_size": 256, "vocab_size": 512, "sliding_window": 64}
    shape = {**overrides_of(name), **sizes, **more, "num_hidden_layers": 2}
    batch = mix(512, [100, 50, 7, 200])
    exact = gradients(language_model(shape, seed=4), [batch])
    for mode in modes:
        low = language_model(shape, seed=4, precision="bf16", activation_checkpointing=mode)
        found = gradients(low, [batch])
        print("cosine", name, mode, lowest_cosine(exact, found))
        assert lowest_cosine(exact, found) > 0.98, mode


def test_lockstep_batch_changed_on_the_gpu_is_joined_there():
    moved = append_dummies(counting(6, 4), [counting(5)]).to("cuda")
    chosen = moved.select([1])
    assert chosen.join().num_tokens == 9
    assert chosen.to("cpu").join().input_ids.is_cpu
    moved.labels.fill_(-100)
    assert moved.join().labels.is_cuda
