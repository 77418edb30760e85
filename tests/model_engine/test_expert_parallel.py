"""parallel.expert: every gradient of every layout equals that of one rank, to 1e-5 in float32."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from families import overrides_of, parallel, refusal
from ranks import RankPool
from tiny_models import build_model, samples
from torch import Tensor
from transformers import AutoConfig

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor, local_shards
from mvp_engine.hf import LanguageModel
from mvp_engine.model_engine import LanguageModelEngine, Settings

# Config settings beyond those of `overrides_of`.
MORE: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
}


def micro_batches(rank: int) -> list[PackedBatch]:
    """The data of a data-parallel rank: 2, 0, 3 and 1 micro-batches."""
    g = torch.Generator().manual_seed(rank)
    return [
        PackedBatch.from_sequences(
            [torch.randint(99, (n,), generator=g) for n in (7 + rank, 3, 5 + i)]
        )
        for i in range((2, 0, 3, 1)[rank])
    ]


def engine_of(family: str, layout: Layout, **how: Any) -> LanguageModelEngine:
    shape = {**overrides_of(family), **MORE.get(family, {})}
    model = LanguageModel.on_meta(None, shape)
    engine = LanguageModelEngine(
        model, layout, Settings(**{"seed": 5, "clip_grad_norm": 0.1, **how})
    )
    engine.initialize(lambda model: torch.optim.AdamW(model.parameters(), 1e-3))
    return engine


def loss_of(engine: LanguageModelEngine) -> Any:
    def loss(micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
        out = engine.model(micro_batch, ["log_probs", "entropy"])
        return out["log_probs"].sum() - 0.1 * out["entropy"].sum(), micro_batch.num_loss_tokens

    return loss


def gradients(engine: LanguageModelEngine, rows: list[PackedBatch]) -> dict[str, Tensor]:
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(rows, loss_of(engine))
    grads = {
        name: param.grad
        for name, param in engine.model.named_parameters()
        if param.grad is not None
    }
    return {name: full_tensor(grad).clone() for name, grad in grads.items()}


def on_layout(
    sizes: dict[str, int], families: list[str], how: dict[str, Any]
) -> dict[str, dict[str, Tensor]]:
    world = World.join("cpu")
    layout = Layout.of(world, parallel(**sizes))
    found = {}
    for family in families:
        engine = engine_of(family, layout, **how)
        found[family] = gradients(engine, micro_batches(layout.data_rank))
    world.close()
    return found


@functools.cache
def expected(family: str, data_size: int) -> dict[str, Tensor]:
    engine = engine_of(family, Layout(World.join("cpu")))
    return gradients(engine, [one for rank in range(data_size) for one in micro_batches(rank)])


def assert_close(
    found: dict[str, Tensor], wanted: dict[str, Tensor], family: str, most: float = 1e-5
) -> None:
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        error = float((found[name] - grad).abs().max()) / max(float(grad.abs().max()), 1e-3)
        assert error < most, (family, name, error)


CAMPAIGN = pytest.mark.campaign(only=True)
LAYOUTS = [
    ({"shard": 2, "expert": 2}, ["qwen3_moe", "gpt_oss", "glm4_moe", "mixtral", "deepseek_v3"]),
    pytest.param({"ulysses": 2, "expert": 2}, ["qwen3_moe", "gpt_oss"], marks=CAMPAIGN),
    pytest.param({"shard": 4, "expert": 2}, ["qwen3_moe", "gpt_oss"], marks=CAMPAIGN),
    pytest.param({"shard": 4, "expert": 4}, ["mixtral", "glm4_moe"], marks=CAMPAIGN),
    ({"shard": 2, "ulysses": 2, "expert": 4}, ["qwen3_moe"]),
    pytest.param(
        {"replicate": 2, "shard": 2, "expert": 2}, ["qwen3_moe", "gpt_oss"], marks=CAMPAIGN
    ),
    ({"shard": 2, "tensor": 2, "expert": 2}, ["qwen3_moe", "mixtral"]),
]


def pool_of(request: pytest.FixtureRequest, sizes: dict[str, int]) -> RankPool:
    ranks = math.prod(size for name, size in sizes.items() if name != "expert")
    pool: RankPool = request.getfixturevalue(f"ranks{ranks}")
    return pool


@pytest.mark.parametrize(("sizes", "families"), LAYOUTS, ids=str)
def test_expert_parallel_layout_gives_the_gradients_of_one_rank(
    request, sizes: dict[str, int], families: list[str]
) -> None:
    data_size = sizes.get("replicate", 1) * sizes.get("shard", 1)
    for found in pool_of(request, sizes).run(on_layout, sizes, families, {}):
        for family in families:
            assert_close(found[family], expected(family, data_size), family)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        *(
            pytest.param({"compile": "aot_eager", "activation_checkpointing": mode}, marks=CAMPAIGN)
            for mode in ("none", "full", "selective", "attention")
        ),
    ],
    ids=str,
)
def test_expert_parallel_compiled_and_checkpointed_gives_the_gradients_of_one_rank(
    ranks2, how: dict[str, Any]
) -> None:
    """Also with shared experts (glm4_moe), whose block saves tensors after its experts."""
    families = ["qwen3_moe", "gpt_oss", "glm4_moe"]
    for found in ranks2.run(on_layout, {"shard": 2, "expert": 2}, families, how):
        for family in families:
            assert_close(found[family], expected(family, 2), family)


@pytest.mark.slow
def test_fsdp_in_fp8_gives_close_to_the_gradients_of_bf16_also_with_a_second_forward(
    ranks2,
) -> None:
    """Of linear layers and of experts, with gathered weights."""
    low = {"precision": "bf16", "fp8": True}
    hows = [{"precision": "bf16"}, low, {**low, "activation_checkpointing": "full"}]
    runs = [ranks2.run(on_layout, {"shard": 2}, ["qwen3_moe"], how)[0]["qwen3_moe"] for how in hows]
    bf16, found, again = runs
    assert found.keys() == bf16.keys()
    for name, grad in found.items():
        assert torch.equal(again[name], grad), name
        assert not torch.equal(bf16[name], grad), name
        # One token that rounding sends to another expert moves the gradient of its router.
        cosine = float(torch.cosine_similarity(grad.flatten(), bf16[name].flatten(), dim=0))
        assert cosine > (0.95 if "mlp" in name else 0.97), name


@CAMPAIGN
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_expert_parallel_in_fp8_gives_the_gradients_of_fsdp_in_fp8(
    ranks2, checkpointing: str
) -> None:
    """Both quantize bf16 weights; without biases, routing weights scale rows after FP8, not before.

    Scales are powers of two, so a row that is scaled before is rounded differently.
    """
    families = ["qwen3_moe", "gpt_oss"]
    bf16 = {"precision": "bf16", "activation_checkpointing": checkpointing}
    found = ranks2.run(on_layout, {"shard": 2, "expert": 2}, families, {**bf16, "fp8": True})[0]
    wanted = ranks2.run(on_layout, {"shard": 2}, families, {**bf16, "fp8": True})[0]
    plain = ranks2.run(on_layout, {"shard": 2}, families, bf16)[0]
    for family in families:
        for name, grad in wanted[family].items():
            if "experts" in name:
                apart, used = (
                    float((one[family][name] - grad).norm() / grad.norm()) for one in (found, plain)
                )
                assert apart < (1e-5 if family == "gpt_oss" else 0.06) < used, (
                    family,
                    name,
                    apart,
                    used,
                )


# ---- Routers that send every token to the same experts ----------------------------------------------------------


def skewed(family: str, layout: Layout, chosen: list[int]) -> tuple[LanguageModelEngine, list[int]]:
    """An engine whose routers choose these experts only, and the experts that this rank holds in a layer."""
    more = {**MORE.get(family, {}), "num_experts_per_tok": len(chosen)}
    torch.manual_seed(0)
    model = LanguageModel.from_config(AutoConfig.for_model(**{**overrides_of(family), **more}))
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("router.bias", "e_score_correction_bias")):
            value.data[chosen] = 100.0
    engine = LanguageModelEngine(model, layout)
    engine.initialize(lambda model: torch.optim.SGD(model.parameters(), 0.0))
    weight = next(
        param for name, param in model.named_parameters() if name.endswith("gate_up_proj")
    )
    return engine, [int(offset[0]) for offset, _ in local_shards(weight)]


def skewed_gradients(
    sizes: dict[str, int], family: str, chosen: list[int]
) -> tuple[dict[str, Tensor], list[int]]:
    world = World.join("cpu")
    layout = Layout.of(world, parallel(**sizes))
    engine, held = skewed(family, layout, chosen)
    found = gradients(engine, micro_batches(layout.data_rank))
    world.close()
    return found, held


@pytest.mark.parametrize(
    ("sizes", "family", "chosen"),
    [({"shard": 2, "expert": 2}, "glm4_moe", [0, 1]), ({"shard": 4, "expert": 4}, "gpt_oss", [3])],
    ids=str,
)
def test_expert_parallel_rank_without_tokens_gives_the_gradients_of_one_rank(
    request, sizes: dict[str, int], family: str, chosen: list[int]
) -> None:
    results = pool_of(request, sizes).run(skewed_gradients, sizes, family, chosen)
    assert [
        held for _, held in results if held[0] not in chosen
    ]  # a rank whose experts get no token
    engine, _ = skewed(family, Layout(World.join("cpu")), chosen)
    rows = [one for rank in range(sizes["shard"]) for one in micro_batches(rank)]
    wanted = gradients(engine, rows)
    experts = next(grad for name, grad in wanted.items() if name.endswith("gate_up_proj"))
    used = [bool(grad.any()) for grad in experts]
    assert used == [expert in chosen for expert in range(4)]
    for found, _ in results:
        assert_close(found, wanted, family)


# ---- Media ------------------------------------------------------------------------------------------------------


def media_rows(model: LanguageModel, rank: int) -> list[PackedBatch]:
    """Images on the first data rank only."""
    text, one, two = samples(model, "qwen3_vl_moe")
    return [PackedBatch.concat([two, text]), one] if rank == 0 else [text]


def media_gradients(sizes: dict[str, int] | None) -> dict[str, Tensor]:
    world = World.join("cpu")
    layout = Layout(world) if sizes is None else Layout.of(world, parallel(**sizes))
    model = build_model(LanguageModel, "qwen3_vl_moe")
    ranks = range(2) if sizes is None else [layout.data_rank]
    rows = [one for rank in ranks for one in media_rows(model, rank)]
    engine = LanguageModelEngine(model, layout)
    engine.initialize(lambda model: torch.optim.SGD(model.parameters(), 0.0))
    found = gradients(engine, rows)
    world.close()
    return found


@pytest.mark.parametrize(
    "sizes",
    [
        {"shard": 2, "expert": 2},
        pytest.param({"shard": 2, "ulysses": 2, "expert": 2}, marks=CAMPAIGN),
    ],
    ids=str,
)
def test_expert_parallel_with_images_on_one_rank_gives_the_gradients_of_one_rank(
    request, sizes
) -> None:
    wanted = media_gradients(None)
    for found in pool_of(request, sizes).run(media_gradients, sizes):
        assert_close(found, wanted, "qwen3_vl_moe")


# ---- Steps, checkpoints, folders --------------------------------------------------------------------------------


def steps(engine: LanguageModelEngine, count: int, whole: bool = False) -> list[float]:
    """Gradient norms; each step has the data of two data-parallel ranks."""
    rows = [micro_batches(0), micro_batches(2)]
    mine = [*rows[0], *rows[1]] if whole else rows[engine.layout.data_rank % 2]
    return [float(engine.train_batch(mine, loss_of(engine)).grad_norm) for _ in range(count)]


def state_of(engine: LanguageModelEngine) -> dict[str, Tensor]:
    """All weights and moments."""
    found = {}
    for name, param in engine.model.named_parameters():
        found[name] = full_tensor(param.detach()).clone()
        for key, value in engine.optimizer.state[param].items():
            found[f"{name}.{key}"] = full_tensor(value).clone()
    return found


def saved_run(
    sizes: dict[str, int], family: str, folder: str
) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Two steps, a checkpoint, a Hugging Face folder, a third step, and the same from the checkpoint."""
    world = World.join("cpu")
    layout = Layout.of(world, parallel(**sizes))
    engine = engine_of(family, layout)
    norms = steps(engine, 2)
    engine.save_checkpoint(f"{folder}/checkpoint")
    engine.export_hf(f"{folder}/hf")
    norms += steps(engine, 1)
    wanted = state_of(engine)
    again = engine_of(family, layout, seed=6)
    again.load_checkpoint(f"{folder}/checkpoint")
    steps(again, 1)
    resumed = state_of(again)
    world.close()
    return norms, wanted, [name for name in wanted if not torch.equal(wanted[name], resumed[name])]


@pytest.mark.parametrize(
    ("sizes", "family"),
    [
        ({"shard": 2, "expert": 2}, "gpt_oss"),
        pytest.param(
            {"replicate": 1, "shard": 2, "tensor": 2, "expert": 2}, "qwen3_moe", marks=CAMPAIGN
        ),
        pytest.param({"shard": 2, "ulysses": 2, "expert": 2}, "deepseek_v3", marks=CAMPAIGN),
    ],
    ids=str,
)
def test_expert_parallel_run_saves_resumes_and_exports_as_one_rank(
    request, tmp_path: Path, sizes: dict[str, int], family: str
) -> None:
    norms, state, changed = pool_of(request, sizes).run(saved_run, sizes, family, str(tmp_path))[0]
    assert changed == []  # resumed bit-equal
    alone = engine_of(family, Layout(World.join("cpu")))
    assert steps(alone, 3, whole=True) == pytest.approx(norms, rel=1e-5)
    for name, value in state_of(alone).items():
        assert torch.allclose(value, state[name], rtol=1e-4, atol=1e-5), name
    one = engine_of(family, Layout(World.join("cpu")), seed=7)
    one.load_checkpoint(tmp_path / "checkpoint")
    one.export_hf(tmp_path / "alone")
    files = sorted(file.name for file in (tmp_path / "alone").glob("*.safetensors"))
    assert files
    for file in files:
        assert (tmp_path / "alone" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()
    steps(one, 1, whole=True)
    for name, value in state_of(one).items():
        assert torch.allclose(value, state[name], rtol=1e-4, atol=1e-5), name


# ---- Errors -----------------------------------------------------------------------------------------------------


def refused(sizes: dict[str, int], shape: dict[str, Any]) -> str:
    return refusal(
        sizes,
        lambda layout: LanguageModelEngine(LanguageModel.on_meta(None, shape), layout).initialize(),
    )


@pytest.mark.parametrize(
    ("sizes", "family", "more", "message"),
    [
        (
            {"shard": 1, "expert": 2},
            "qwen3_moe",
            {},
            "parallel.expert=2 does not divide the 1 FSDP ranks",
        ),
        ({"shard": 2, "expert": 2}, "qwen3", {}, "parallel.expert=2: qwen3 has no experts"),
        (
            {"shard": 2, "expert": 2},
            "qwen3_moe",
            {"num_experts": 3},
            "does not divide the 3 experts of hf.model.layers",
        ),
    ],
)
def test_expert_parallel_that_cannot_be_is_refused(
    ranks2, sizes, family: str, more: dict[str, Any], message: str
) -> None:
    for answer in ranks2.run(refused, sizes, {**overrides_of(family), **more}):
        assert message in answer
