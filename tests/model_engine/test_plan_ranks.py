"""mvp plan is true: bytes held and the sequence of collectives of a step, on real ranks and simulated."""

import probe_once
import pytest
import torch
import torch.distributed as dist
from conftest import CAMPAIGN
from families import overrides_of, parallel
from tiny_engines import adamw, counting, engine_of, loss_of

from mvp_engine.data.loader import StepPlan
from mvp_engine.distributed import Layout
from mvp_engine.kit.plan.record import CollectiveRecorder, find_differences
from mvp_engine.kit.plan.simulate import balance_routing, fake_world, held_bytes, simulated_step
from mvp_engine.model_engine import LanguageModelEngine

LAYOUTS = [
    ("qwen3_moe", {"tensor": 2, "shard": 2}, {"activation_checkpointing": "full"}),
    ("qwen3", {"shard": 2, "replicate": 2}, {"precision": "bf16", "fp8": True}),
]
MORE_LAYOUTS = [
    ("qwen3", {"ulysses": 2, "shard": 2}, {}),
    ("qwen3", {"pipeline": 2, "shard": 2}, {}),
    ("qwen3", {"pipeline": 2, "tensor": 2}, {}),
    ("llama", {"pipeline": 4}, {"model": {"num_hidden_layers": 4, "tie_word_embeddings": True}}),
    ("qwen3", {"context": 2, "shard": 2}, {}),
    ("qwen3_moe", {"expert": 2, "shard": 4}, {}),
    ("qwen3_moe", {"expert": 2, "pipeline": 2, "shard": 2}, {"activation_checkpointing": "full"}),
    ("qwen3", {"replicate": 4}, {}),
    ("qwen3", {"shard": 4}, {}),
    ("qwen3_moe", {"shard": 2, "replicate": 2}, {}),
    ("qwen3", {"tensor": 2, "shard": 2}, {}),
    ("gpt_oss", {"ulysses": 4}, {}),
    ("gpt_oss", {"shard": 4}, {"activation_checkpointing": "selective"}),
]


def build(kind, layout, family, how):
    settings = {name: value for name, value in how.items() if name != "model"}
    shape = {**overrides_of(family), **how.get("model", {})}
    return engine_of(shape, layout, adamw, kind, seed=5, **settings)


def train_step(engine):
    """One step of two micro-batches, with an odd number of tokens."""
    plan = StepPlan(((frozenset(),) * 2,) * engine.layout.data_size)
    engine.train_batch([counting(7, 3, 11, modulus=50)] * 2, loss_of(engine), plan)


def on_real_rank(layout, family, how):
    probe_once.forget()  # stages exchange the dtype of activations in the probe, not in the step
    engine = build(LanguageModelEngine, layout, family, how)
    balance_routing(engine.model)
    with CollectiveRecorder() as recorder:
        train_step(engine)
    return held_bytes(engine), recorder.calls


def on_fake_rank(
    rank,
    family,
    sizes,
    how,
    step=train_step,
    codes=None,
):
    with fake_world(rank, 4, gpus_per_node=8) as world:
        layout = Layout.of(world, parallel(**sizes))
        engine, recorder = simulated_step(
            LanguageModelEngine, lambda kind: build(kind, layout, family, how), step, codes
        )
        return held_bytes(engine), recorder.calls


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize(
    "family, sizes, how",
    [*LAYOUTS, *(pytest.param(*one, marks=CAMPAIGN) for one in MORE_LAYOUTS)],
)
def test_plan_of_four_ranks_equals_their_bytes_and_collectives(
    on_ranks, campaign_size, family, sizes, how
):
    """The first and the last rank are simulated; in a campaign, all four."""
    real = on_ranks(sizes, on_real_rank, family, how)
    codes = dict[int, int]()
    planned = {}
    for rank in range(0, 4, campaign_size(3, 1)):
        planned_bytes, planned[rank] = on_fake_rank(rank, family, sizes, how, codes=codes)
        held, calls = real[rank]
        assert planned_bytes == held
        assert len(calls) > 1
        assert planned[rank] == calls
    assert find_differences(planned) == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", [pytest.param("skipped", marks=CAMPAIGN), "other size"])
def test_plan_with_faulty_rank_names_rank_and_call(fault):
    """A forward hook with a collective of its own, which rank 2 skips, or calls with another size."""

    def faulty_step(engine):
        is_odd = engine.world.rank == 2

        def reduce_something(*_):
            if not (is_odd and fault == "skipped"):
                dist.all_reduce(torch.zeros(5 if is_odd else 3))

        block = engine.model.decoder().layers[0]
        block.register_forward_pre_hook(reduce_something)
        train_step(engine)

    sizes = {"shard": 4}
    calls = {rank: on_fake_rank(rank, "qwen3", sizes, {}, faulty_step)[1] for rank in (0, 1, 2)}
    (difference,) = find_differences(calls)
    assert difference.rank == 2
    expected = "all-reduce of 12 bytes of float32 over ranks 0, 1, 2, 3"
    assert str(difference.expected).startswith(expected)
    assert difference.expected.where.startswith("test_plan_ranks.py:")
    if fault == "skipped":
        assert difference.call != difference.expected
    else:
        assert "all-reduce of 20 bytes" in str(difference)
