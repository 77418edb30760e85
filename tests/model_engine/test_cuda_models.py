"""Language models on a GPU: bf16 at stated tolerances, offloading, compiled blocks."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from families import VISION, overrides_of, parallel
from tiny_models import build_model, sample
from torch.optim.lr_scheduler import LambdaLR

from mvp_engine.config.schema import Experts
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.hf import LanguageModel
from mvp_engine.model_engine import LanguageModelEngine, ModelSource, Settings
from mvp_engine.model_engine.fsdp.dummy_sequences import append_dummies
from mvp_engine.ops import attention

pytestmark = pytest.mark.gpu


def language_model(shape: dict[str, Any], **how: Any) -> LanguageModelEngine:
    layout = Layout(World(0, 1, 0, 1, torch.device("cuda", 0)))
    part = LanguageModelEngine(
        LanguageModelEngine.build_model(ModelSource(None, shape)), layout, Settings(**how)
    )
    part.initialize(
        lambda m: torch.optim.AdamW(m.parameters(), 1e-3, fused=True),
        lambda o: LambdaLR(o, lambda _: 1.0),
    )
    return part


def loss(model: torch.nn.Module) -> Any:
    return lambda batch: (-model(batch, ["log_probs"])["log_probs"].sum(), batch.num_loss_tokens)


def mix(vocabulary: int, lengths: list[int]) -> PackedBatch:
    g = torch.Generator().manual_seed(0)
    return PackedBatch.from_sequences(
        [torch.randint(vocabulary, (n,), generator=g) for n in lengths]
    )


def gradients(
    part: LanguageModelEngine, micro_batches: list[PackedBatch]
) -> dict[str, torch.Tensor]:
    part.optimizer_zero_grad()
    part.forward_backward_batch(micro_batches, loss(part.model))
    return {name: param.grad.clone().flatten() for name, param in part.model.named_parameters()}


def lowest_cosine(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return min(float(torch.cosine_similarity(a[name], b[name], dim=0)) for name in a)


@pytest.mark.parametrize("compile", [None, "inductor"])
@pytest.mark.parametrize("balance", ["none", "loss"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_step_of_experts_on_one_rank_has_no_host_sync(
    name: str, balance: Any, compile: str | None
) -> None:
    """Grouped GEMMs on offsets that stay on the device; counts for the balance of experts stay there, too."""
    shape = {**overrides_of(name), "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    if name == "qwen3_moe":
        shape["moe_intermediate_size"] = 64
    part = language_model(
        shape, precision="bf16", compile=compile, experts=Experts(balance=balance, z=0.001)
    )
    batches = [mix(99, [40, 13, 30]).pin_memory(), mix(99, [25, 50]).pin_memory()]
    for _ in range(3):  # allocate and compile
        part.train_batch(batches, loss(part.model))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        part.train_batch(batches, loss(part.model))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bf16_on_a_model_of_a_billion_parameters_is_close_to_fp32() -> None:
    """Stated for bf16: packed is no further from fp32 than transformers' own forward on each sequence alone (within a
    fifth), log-probs of about -10 are within 0.04 on average and 0.2 at worst, and no gradient's direction is off."""
    shape = {
        "model_type": "qwen3",
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 6144,
    }
    shape |= {
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    batch = mix(32000, [700, 33, 2, 1500, 250, 64])
    exact, low = language_model(shape), language_model(shape, precision="bf16")
    assert sum(param.numel() for param in exact.model.parameters()) > 1e9
    alone = [batch.select([i]) for i in range(batch.num_sequences)]
    outputs, grads = {}, {}
    for name, part, micro_batches in (
        ("fp32", exact, [batch]),
        ("packed", low, [batch]),
        ("alone", low, alone),
    ):
        outputs[name] = torch.cat(
            [part.infer_batch(b, ["log_probs"])["log_probs"] for b in micro_batches]
        )
        grads[name] = gradients(part, micro_batches)
    with torch.no_grad(), low.autocast():
        theirs = torch.cat([low.model.eval().reference_log_probs(b.to("cuda")) for b in alone])
    apart = {name: (outputs[name] - outputs["fp32"]).abs() for name in ("packed", "alone")}
    apart["transformers"] = (theirs - outputs["fp32"]).abs()
    for name, difference in apart.items():
        print(
            f"bf16 {name}: log-probs {difference.mean():.1e} mean, {difference.max():.1e} max off fp32"
        )
    print(
        "cosines", {name: lowest_cosine(grads["packed"], grads[name]) for name in ("fp32", "alone")}
    )
    assert apart["packed"].mean() < 1.2 * apart["transformers"].mean()
    assert apart["packed"].mean() < 0.04
    assert apart["packed"].max() < 0.2
    assert lowest_cosine(grads["packed"], grads["fp32"]) > 0.99
    assert lowest_cosine(grads["packed"], grads["alone"]) > 0.99


@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_offload_frees_gpu_memory_and_keeps_the_state(offload: str) -> None:
    shape = {
        **overrides_of("qwen3"),
        "hidden_size": 256,
        "intermediate_size": 1024,
        "vocab_size": 8000,
    }
    batch = mix(8000, [100, 50, 7])
    seen = {}
    for name in ("none", offload):
        gc.collect()
        before = torch.cuda.memory_allocated()
        part = language_model(shape, seed=4, offload=name)
        norms = []
        for _ in range(3):
            with part.train_mode():
                norms.append(float(part.train_batch([batch], loss(part.model)).grad_norm))
            part.optimizer.zero_grad()
        outputs = part.infer_batch(batch, ["log_probs"])["log_probs"].cpu()
        seen[name] = (norms, outputs, torch.cuda.memory_allocated() - before)
        moments = [state["exp_avg"] for state in part.optimizer.state.values()]
        assert {moment.device.type for moment in moments} == (
            {"cuda"} if name == "none" else {"cpu"}
        )
        if name != "none":
            assert all(moment.is_pinned() for moment in moments)
            part.to("cuda")
            assert {param.device.type for param in part.model.parameters()} == {"cuda"}
        del part, moments
    assert seen["none"][0] == pytest.approx(seen[offload][0], rel=1e-6)
    assert torch.allclose(seen["none"][1], seen[offload][1], atol=1e-6)
    assert seen[offload][2] < (0.5 if offload == "optimizer" else 0.1) * seen["none"][2]


def test_offload_on_sharded_ranks_keeps_the_state(ranks2) -> None:
    for seen in ranks2.run(sharded_and_offloaded):
        assert seen["none"] == pytest.approx(seen["all"], rel=1e-6)


def sharded_and_offloaded() -> dict[str, list[float]]:
    world = World.join("cuda")
    seen = {}
    for offload in ("none", "all"):
        source = ModelSource(None, overrides_of("qwen3"))
        settings = Settings(seed=4, offload=offload)
        part = LanguageModelEngine(
            LanguageModelEngine.build_model(source), Layout.of(world, parallel(shard=2)), settings
        )
        part.initialize(
            lambda m: torch.optim.AdamW(m.parameters(), 1e-3), lambda o: LambdaLR(o, lambda _: 1.0)
        )
        norms = []
        for _ in range(3):
            with part.train_mode():
                norms.append(
                    float(part.train_batch([mix(99, [20, 30])], loss(part.model)).grad_norm)
                )
        seen[offload] = norms
        assert {p.device.type for p in part.model.parameters()} == {
            "cpu" if offload == "all" else "cuda"
        }
    world.close()
    return seen


def test_compiled_blocks_are_close_to_eager_ones() -> None:
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


def test_compiled_ranks_are_close_to_one_eager_rank(ranks2) -> None:
    """Two ranks on one GPU, with shards and with shared sequences, over packs of other sizes in each step. On a CPU
    they are held to 1e-5 (test_compiled.py); this is for the kernels of bf16."""
    alone = steps(
        Layout(World(0, 1, 0, 1, torch.device("cuda", 0))), Settings(seed=4, precision="bf16")
    )
    ways = [({"shard": 2}, "none"), ({"ulysses": 2}, "full")]
    for seen in ranks2.run(compiled_steps, ways, timeout=180.0):
        for way, (losses, norms) in zip(ways, seen, strict=True):
            assert losses == pytest.approx(alone[0], rel=1e-2), way
            assert norms == pytest.approx(alone[1], rel=5e-2), way


def compiled_steps(ways: list[tuple[dict[str, int], str]]) -> list[tuple[list[float], list[float]]]:
    world = World.join("cuda")
    seen = []
    for sizes, mode in ways:
        settings = Settings(
            seed=4, precision="bf16", compile="inductor", activation_checkpointing=mode
        )
        seen.append(steps(Layout.of(world, parallel(**sizes)), settings))
    world.close()
    return seen


def steps(layout: Layout, settings: Settings) -> tuple[list[float], list[float]]:
    """Losses and norms of gradients; two micro-batches in each step, of which data ranks have their share."""
    shape = {**overrides_of("qwen3"), "head_dim": 32, "hidden_size": 128, "vocab_size": 512}
    part = LanguageModelEngine(
        LanguageModelEngine.build_model(ModelSource(None, shape)), layout, settings
    )
    part.initialize(
        lambda m: torch.optim.SGD(m.parameters(), 0.1), lambda o: LambdaLR(o, lambda _: 1.0)
    )
    losses, norms = [], []
    for step in range(4):
        both = [mix(512, [100 + 37 * step, 3 + step, 80]), mix(512, [90] * (step + 1))]
        result = part.train_batch(both[layout.data_rank :: layout.data_size], loss(part.model))
        sums = layout.world.all_gather((float(result.loss_sum), float(result.weight)))
        losses.append(sum(one for one, _ in sums) / sum(weight for _, weight in sums))
        norms.append(float(result.grad_norm))
    return losses, norms


def compiles_few_times_and_never_waits(
    part: LanguageModelEngine, packs: list[PackedBatch], graphs: int
) -> None:
    def forward(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return part.model(batch, ["loss"])["loss"], batch.num_loss_tokens

    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        for pack in packs:
            part.train_batch([pack], forward)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= graphs
    torch.cuda.set_sync_debug_mode("error")
    try:
        for pack in packs:
            part.train_batch([pack], forward)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_packs_of_all_sizes_compile_few_graphs_without_host_sync() -> None:
    shape = {**overrides_of("qwen3"), "head_dim": 32, "vocab_size": 512}
    part = language_model(shape, precision="bf16", compile="inductor", clip_grad_norm=1.0)
    packs = [mix(512, [100 + 37 * i, 3 + i, 200]).pin_memory() for i in range(4)]
    packs += [mix(512, [90] * (i + 2)).pin_memory() for i in range(4)]
    compiles_few_times_and_never_waits(part, packs, graphs=3)


@pytest.mark.parametrize("other", ["patches", "frame"])
def test_packs_with_images_compile_few_graphs_without_host_sync(other: str) -> None:
    """Encoder and text layers, images of two sizes, or images and videos in one pack."""
    model, g = build_model(LanguageModel, "qwen3_vl"), torch.Generator().manual_seed(5)
    looks = ["patches", other]
    text, one, two = (sample(model, looks, looks[:count], g) for count in range(3))
    members = [[two, one], [one, text, one], [two, two, text, one], [text, two, two], [one]]
    batches = [PackedBatch.concat(ones).pin_memory() for ones in members]
    layout = Layout(World(0, 1, 0, 1, torch.device("cuda", 0)))
    part = LanguageModelEngine(
        model, layout, Settings(precision="bf16", compile="inductor", clip_grad_norm=1.0)
    )
    part.initialize(lambda m: torch.optim.AdamW(m.parameters(), 1e-3, fused=True))
    compiles_few_times_and_never_waits(part, batches, graphs=9)  # three kinds of blocks


@pytest.mark.parametrize(
    ("name", "how"), [("gemma2", {"compile": "inductor"}), ("gpt_oss", {"compile": None})]
)
def test_soft_caps_and_sinks_compile_few_graphs_without_host_sync(
    monkeypatch, name: str, how: dict[str, Any]
) -> None:
    """FlexAttention in both kinds of layers, with and without a window."""
    shape = {
        **overrides_of(name),
        "head_dim": 32,
        "vocab_size": 512,
        "sliding_window": 64,
        "num_hidden_layers": 2,
    }
    part = language_model(shape, precision="bf16", clip_grad_norm=1.0, **how)
    monkeypatch.setattr(
        attention, "untraced_reference_attention", None
    )  # nothing goes sequence by sequence
    packs = [mix(512, [100 + 37 * i, 3 + i, 200]).pin_memory() for i in range(4)]
    packs += [mix(512, [90] * (i + 2)).pin_memory() for i in range(4)]
    compiles_few_times_and_never_waits(part, packs, graphs=2 if how["compile"] is None else 24)


def test_bidirectional_image_attention_has_no_host_sync(monkeypatch) -> None:
    monkeypatch.setitem(VISION["gemma3"][1]["text_config"], "head_dim", 32)
    model, g = build_model(LanguageModel, "gemma3"), torch.Generator().manual_seed(5)
    text, one, two = (sample(model, ["tiles"], ["tiles"] * count, g) for count in range(3))
    members = [[two, one], [one, text, one], [two, two, text, one], [text, two, two], [one]]
    batches = [PackedBatch.concat(ones).pin_memory() for ones in members]
    layout = Layout(World(0, 1, 0, 1, torch.device("cuda", 0)))
    part = LanguageModelEngine(
        model, layout, Settings(precision="bf16", compile=None, clip_grad_norm=1.0)
    )
    part.initialize(lambda m: torch.optim.AdamW(m.parameters(), 1e-3, fused=True))
    monkeypatch.setattr(attention, "untraced_reference_attention", None)
    compiles_few_times_and_never_waits(part, batches, graphs=2)  # full and sliding


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_soft_caps_and_sinks_in_bf16_are_close_to_fp32(name: str) -> None:
    shape = {
        **overrides_of(name),
        "head_dim": 32,
        "hidden_size": 256,
        "vocab_size": 512,
        "sliding_window": 64,
    }
    shape["num_hidden_layers"] = 2
    if name == "gpt_oss":  # or rounding would choose other experts
        shape |= {"num_local_experts": 2, "num_experts_per_tok": 2}
    batch = mix(512, [100, 50, 7, 200])
    exact = gradients(language_model(shape, seed=4), [batch])
    for mode in (
        ("none", "full", "selective", "attention") if name == "gemma2" else ("none", "full")
    ):
        found = gradients(
            language_model(shape, seed=4, precision="bf16", activation_checkpointing=mode), [batch]
        )
        print("cosine", name, mode, lowest_cosine(exact, found))
        assert lowest_cosine(exact, found) > 0.98, mode


def test_lockstep_batch_changed_on_the_gpu_is_joined_there() -> None:
    one = PackedBatch.from_sequences([torch.arange(3, 9), torch.arange(4, 8)])
    moved = append_dummies(one, [PackedBatch.from_sequences([torch.arange(5)])]).to("cuda")
    chosen = moved.select([1])
    assert chosen.join().num_tokens == 9
    assert chosen.to("cpu").join().input_ids.is_cpu
    moved.labels.fill_(-100)
    assert moved.join().labels.is_cuda
