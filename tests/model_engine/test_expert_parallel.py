"""parallel.expert: every gradient of every layout equals that of one rank, to 1e-5 in float32."""

import functools

import pytest
import torch
from conftest import CAMPAIGN
from families import overrides_of, refusal
from tiny_engines import (
    ALONE,
    adamw,
    assert_close,
    assert_equal,
    engine_of,
    packed,
    scores_of,
    shares_of,
    whole_state,
)
from tiny_engines import gradients as gradients_of
from tiny_models import build_model, samples
from transformers import AutoConfig

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed.dtensor import local_shards
from mvp_engine.hf import LanguageModel

# Config settings beyond those of `overrides_of`.
SMALL = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
MORE = {
    "glm4_moe": SMALL,
    "deepseek_v3": {**SMALL, **LATENT, "n_group": 2},
}


def micro_batches(rank):
    """The data of a data-parallel rank: 2, 0, 3 and 1 micro-batches."""
    count = (2, 0, 3, 1)[rank]
    return [packed(7 + rank, 3, 5 + i, seed=rank + 4 * i) for i in range(count)]


def all_batches(ranks):
    return [one for rank in range(ranks) for one in micro_batches(rank)]


def shape_of(family):
    return {**overrides_of(family), **MORE.get(family, {})}


def expert_engine(family, layout, **how):
    settings = {"seed": 5, "clip_grad_norm": 0.1, **how}
    return engine_of(shape_of(family), layout, adamw, **settings)


def gradients(engine, rows):
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(rows, scores_of(engine))
    return gradients_of(engine.model)


def of_families(layout, families, how):
    rows = micro_batches(layout.data_rank)
    return {family: gradients(expert_engine(family, layout, **how), rows) for family in families}


@functools.cache
def expected(family, data_size):
    return gradients(expert_engine(family, ALONE), all_batches(data_size))


LAYOUTS = [
    ({"shard": 2, "expert": 2}, ["qwen3_moe", "gpt_oss", "glm4_moe", "mixtral", "deepseek_v3"]),
    ({"shard": 2, "ulysses": 2, "expert": 4}, ["qwen3_moe"]),
    pytest.param(
        {"shard": 2, "tensor": 2, "expert": 2}, ["qwen3_moe", "mixtral"], marks=pytest.mark.slow
    ),
    pytest.param({"ulysses": 2, "expert": 2}, ["qwen3_moe", "gpt_oss"], marks=CAMPAIGN),
    pytest.param({"shard": 4, "expert": 2}, ["qwen3_moe", "gpt_oss"], marks=CAMPAIGN),
    pytest.param({"shard": 4, "expert": 4}, ["mixtral", "glm4_moe"], marks=CAMPAIGN),
    pytest.param({"replicate": 2, "shard": 2, "expert": 2}, ["qwen3_moe"], marks=CAMPAIGN),
    pytest.param({"replicate": 2, "shard": 2, "expert": 2}, ["gpt_oss"], marks=CAMPAIGN),
]


@pytest.mark.slow
@pytest.mark.parametrize("sizes, families", LAYOUTS, ids=str)
def test_expert_parallel_layout_gives_the_gradients_of_one_rank(on_ranks, sizes, families):
    data_size = sizes.get("replicate", 1) * sizes.get("shard", 1)
    for found in on_ranks(sizes, of_families, families, {}):
        for family in families:
            assert_close(found[family], expected(family, data_size), floor=1e-3, what=family)


COMPILED = [
    {"compile": "aot_eager", "activation_checkpointing": mode}
    for mode in ("none", "full", "selective", "attention")
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        *(pytest.param(how, marks=CAMPAIGN) for how in COMPILED),
    ],
    ids=str,
)
def test_expert_parallel_compiled_and_checkpointed_gives_the_gradients_of_one_rank(on_ranks, how):
    """Also with shared experts (glm4_moe), whose block saves tensors after its experts."""
    families = ["qwen3_moe", "gpt_oss", "glm4_moe"]
    for found in on_ranks({"shard": 2, "expert": 2}, of_families, families, how):
        for family in families:
            assert_close(found[family], expected(family, 2), floor=1e-3, what=family)


@pytest.mark.slow
def test_fsdp_in_fp8_gives_close_to_the_gradients_of_bf16_also_with_a_second_forward(
    on_ranks,
):
    """Of linear layers and of experts, with gathered weights."""
    low = {"precision": "bf16", "fp8": True}
    hows = [{"precision": "bf16"}, low, {**low, "activation_checkpointing": "full"}]
    runs = [on_ranks({"shard": 2}, of_families, ["qwen3_moe"], how)[0] for how in hows]
    bf16, found, again = (run["qwen3_moe"] for run in runs)
    assert_equal(again, found)
    for name, grad in bf16.items():
        assert not torch.equal(found[name], grad), name
        # One token that rounding sends to another expert moves the gradient of its router.
        cosine = float(torch.cosine_similarity(found[name].flatten(), grad.flatten(), dim=0))
        assert cosine > (0.95 if "mlp" in name else 0.97), name


@CAMPAIGN
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_expert_parallel_in_fp8_gives_the_gradients_of_fsdp_in_fp8(on_ranks, checkpointing):
    """Both quantize bf16 weights; without biases, routing weights scale rows after FP8, not before.

    Scales are powers of two, so a row that is scaled before is rounded differently.
    """
    families = ["qwen3_moe", "gpt_oss"]
    bf16 = {"precision": "bf16", "activation_checkpointing": checkpointing}
    low = {**bf16, "fp8": True}
    found = on_ranks({"shard": 2, "expert": 2}, of_families, families, low)[0]
    expected = on_ranks({"shard": 2}, of_families, families, low)[0]
    plain = on_ranks({"shard": 2}, of_families, families, bf16)[0]
    for family, most in (("qwen3_moe", 0.06), ("gpt_oss", 1e-5)):
        for name in (name for name in expected[family] if "experts" in name):
            grad = expected[family][name]
            error = float((found[family][name] - grad).norm() / grad.norm())
            of_bf16 = float((plain[family][name] - grad).norm() / grad.norm())
            assert error < most < of_bf16, (family, name)


# ---- Routers that send every token to the same experts ----------------------------------------------------------


def skewed(layout, family, chosen, rows=None):
    """Gradients where routers choose these experts only, and the experts that this rank holds in a layer."""
    config = {**shape_of(family), "num_experts_per_tok": len(chosen)}
    torch.manual_seed(0)
    model = LanguageModel.from_config(AutoConfig.for_model(**config))
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("router.bias", "e_score_correction_bias")):
            value.data[chosen] = 100.0
    engine = engine_of(model, layout)
    named = model.named_parameters()
    weight = next(param for name, param in named if name.endswith("gate_up_proj"))
    held = [int(offset[0]) for offset, _ in local_shards(weight)]
    return gradients(engine, rows or micro_batches(layout.data_rank)), held


@pytest.mark.parametrize(
    "sizes, family, chosen",
    [({"shard": 2, "expert": 2}, "glm4_moe", [0, 1]), ({"shard": 4, "expert": 4}, "gpt_oss", [3])],
    ids=str,
)
def test_expert_parallel_rank_without_tokens_gives_the_gradients_of_one_rank(
    on_ranks, sizes, family, chosen
):
    results = on_ranks(sizes, skewed, family, chosen)
    assert any(held[0] not in chosen for _, held in results)  # a rank whose experts get no token
    expected, _ = skewed(ALONE, family, chosen, all_batches(sizes["shard"]))
    experts = next(grad for name, grad in expected.items() if name.endswith("gate_up_proj"))
    assert [bool(grad.any()) for grad in experts] == [expert in chosen for expert in range(4)]
    for found, _ in results:
        assert_close(found, expected, floor=1e-3, what=family)


# ---- Media ------------------------------------------------------------------------------------------------------


def media_rows(model, layout):
    """Images on the first of two data ranks only; all of them on one rank."""
    text, one, two = samples(model, "qwen3_vl_moe")
    rows = [[PackedBatch.concat([two, text]), one], [text]]
    return shares_of(layout, rows)


def media_gradients(layout):
    model = build_model(LanguageModel, "qwen3_vl_moe")
    rows = media_rows(model, layout)
    return gradients(engine_of(model, layout), rows)


@pytest.mark.parametrize(
    "sizes",
    [
        {"shard": 2, "expert": 2},
        pytest.param({"shard": 2, "ulysses": 2, "expert": 2}, marks=CAMPAIGN),
    ],
    ids=str,
)
def test_expert_parallel_with_images_on_one_rank_gives_the_gradients_of_one_rank(on_ranks, sizes):
    expected = media_gradients(ALONE)
    for found in on_ranks(sizes, media_gradients):
        assert_close(found, expected, floor=1e-3)


# ---- Steps, checkpoints, folders --------------------------------------------------------------------------------


def steps(engine, count):
    """Gradient norms; each step has the data of two data-parallel ranks."""
    mine = shares_of(engine.layout, [micro_batches(0), micro_batches(2)])
    return [float(engine.train_batch(mine, scores_of(engine)).grad_norm) for _ in range(count)]


def saved_run(layout, family, folder):
    """Two steps, a checkpoint, a Hugging Face folder, a third step, and the same from the checkpoint."""
    engine = expert_engine(family, layout)
    norms = steps(engine, 2)
    engine.save_checkpoint(folder / "checkpoint")
    engine.export_hf(folder / "hf")
    norms += steps(engine, 1)
    again = expert_engine(family, layout, seed=6)
    again.load_checkpoint(folder / "checkpoint")
    steps(again, 1)
    return norms, whole_state(engine), whole_state(again)


def assert_near(found, expected):
    for name, value in found.items():
        assert torch.allclose(value, expected[name], rtol=1e-4, atol=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, family",
    [
        ({"shard": 2, "expert": 2}, "gpt_oss"),
        pytest.param({"shard": 2, "tensor": 2, "expert": 2}, "qwen3_moe", marks=CAMPAIGN),
        pytest.param({"shard": 2, "ulysses": 2, "expert": 2}, "deepseek_v3", marks=CAMPAIGN),
    ],
    ids=str,
)
def test_expert_parallel_run_saves_resumes_and_exports_as_one_rank(
    on_ranks, tmp_path, sizes, family
):
    norms, state, resumed = on_ranks(sizes, saved_run, family, tmp_path)[0]
    assert_equal(resumed, state)
    alone = expert_engine(family, ALONE)
    assert steps(alone, 3) == pytest.approx(norms, rel=1e-5)
    assert_near(whole_state(alone), state)
    one = expert_engine(family, ALONE, seed=7)
    one.load_checkpoint(tmp_path / "checkpoint")
    one.export_hf(tmp_path / "alone")
    files = sorted(file.name for file in (tmp_path / "alone").glob("*.safetensors"))
    assert files
    for file in files:
        assert (tmp_path / "alone" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()
    steps(one, 1)
    assert_near(whole_state(one), state)


@pytest.mark.parametrize(
    "sizes, family, more, message",
    [
        ({"replicate": 2, "expert": 2}, "qwen3_moe", {}, "does not divide the 1 FSDP ranks"),
        ({"shard": 2, "expert": 2}, "qwen3", {}, "parallel.expert=2: qwen3 has no experts"),
        ({"shard": 2, "expert": 2}, "qwen3_moe", {"num_experts": 3}, "does not divide the 3 exp"),
    ],
)
def test_expert_parallel_that_cannot_be_is_refused(ranks2, sizes, family, more, message):
    for answer in ranks2.run(refused, sizes, {**overrides_of(family), **more}):
        assert message in answer


def refused(sizes, shape):
    return refusal(sizes, lambda layout: engine_of(shape, layout, optimizer=None))
