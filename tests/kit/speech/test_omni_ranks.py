"""Omni models on engines: shards, ranks without speech, accumulation, checkpointing, compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import CAMPAIGN
from families import parallel
from omni_models import batch_of, qwen3_omni_settings, speech_step, spoken_row
from torch.optim.lr_scheduler import LambdaLR

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.kit.speech.omni_model import OmniModelEngine
from mvp_engine.kit.speech.settings import SpeechLoss
from mvp_engine.model_engine import ModelSource, Settings

# Rows: silent, spoken, two spoken turns with an image, audio and the second turn spoken.
ROWS = [
    spoken_row(seed=6, spoken=()),
    spoken_row(seed=7),
    spoken_row(turns=2, spoken=(0, 1), media="image", seed=8),
    spoken_row(turns=2, spoken=(1,), media="audio", seed=9),
    spoken_row(seed=10, frames=1),
]
SHARES = [[[2, 0], [0]], [[0, 1, 3]]]  # the micro-batches of two ranks: rows
SILENT = [[[0], [0]], [[1], [1, 2]]]  # the first rank has no speech and no media
TEXT = [[[0]], [[1], [0, 1]]]  # no media at all: no thinker block runs for speech alone


def config():
    from transformers import Qwen3OmniMoeConfig

    return Qwen3OmniMoeConfig(**qwen3_omni_settings())


def micro_batch(members):
    return PackedBatch.concat([batch_of(config(), ROWS[member]) for member in members])


def adamw(model):
    return torch.optim.AdamW(
        [param for param in model.parameters() if param.requires_grad], 1e-2, weight_decay=0.1
    )


def engine_on(layout, optimizer=None, **settings):
    source = ModelSource(None, {"model_type": "qwen3_omni_moe", **qwen3_omni_settings()})
    engine = OmniModelEngine(
        OmniModelEngine.build_model(source), layout, Settings(seed=3, **settings)
    )
    optimizer = optimizer or (lambda m: torch.optim.SGD(m.parameters(), 0.0))
    engine.initialize(optimizer, lambda o: LambdaLR(o, lambda _: 1.0))
    return engine


def step(engine, batches, text=True):
    """Gradients after one step: of the mean over all target positions, text and speech."""
    engine.train_batch(batches, speech_step(engine.model, SpeechLoss(residual_weight=0.3), text))
    params = engine.model.named_parameters()
    return {name: full_tensor(param.grad) for name, param in params if param.grad is not None}


def on_ranks(shares, sizes, text, settings):
    world = World.join("cpu")
    layout = Layout.of(world, parallel(**sizes))
    mine = [one for share in shares[layout.data_rank :: layout.data_size] for one in share]
    found = step(engine_on(layout, **settings), [micro_batch(members) for members in mine], text)
    world.close()
    return found


def alone(shares, text=True):
    """One process, all rows of all ranks in one micro-batch."""
    world = World(0, 1, 0, 1, torch.device("cpu"))
    members = [member for share in shares for one in share for member in one]
    return step(engine_on(Layout(world)), [micro_batch(members)], text)


def check_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(
            found[name], grad, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_random_weights_of_an_omni_model_are_finite_and_export_loads(tmp_path):
    from transformers import Qwen3OmniMoeForConditionalGeneration

    engine = engine_on(Layout(World(0, 1, 0, 1, torch.device("cpu"))))
    assert all(bool(param.isfinite().all()) for param in engine.model.parameters())
    engine.export_hf(tmp_path / "out")
    model, info = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(model.talker.codec_head.weight, engine.model.talker.codec_head.weight)


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=CAMPAIGN)])
def test_accumulation_and_checkpointing_give_the_gradients_of_one_micro_batch(
    backend,
):
    layout = Layout(World(0, 1, 0, 1, torch.device("cpu")))
    engine = engine_on(layout, compile=backend, activation_checkpointing="full")
    found = step(engine, [micro_batch([member]) for member in (2, 0, 0, 1, 3)])
    check_equal(found, alone([[[2, 0, 0, 1, 3]]]))


CASES: dict[str, tuple[list[Any], dict[str, int], bool, dict[str, Any]]] = {
    "shard": (SHARES, {"shard": 2}, True, {}),
    "a sharded rank without speech, checkpointed": (
        SILENT,
        {"shard": 2},
        True,
        {"activation_checkpointing": {"talker": "full", "llm": "selective"}},
    ),
    "ulysses": (SHARES, {"ulysses": 2, "replicate": 1}, True, {}),
    "ulysses, speech alone with media": (SILENT, {"ulysses": 2, "replicate": 1}, False, {}),
    "ulysses, fewer frames than ranks": ([[[4]]], {"ulysses": 2, "replicate": 1}, True, {}),
    "context": (SHARES, {"context": 2, "replicate": 1}, True, {}),
    "speech alone on text rows": (TEXT, {"shard": 2}, False, {}),
    "speech alone with media": (SILENT, {"shard": 2}, False, {}),
    "replicas, a rank without speech": (SILENT, {"replicate": 2}, True, {}),
}


IN_SUITE = ("ulysses", "a sharded rank without speech, checkpointed", "speech alone with media")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in IN_SUITE else CAMPAIGN) for case in CASES]
)
def test_ranks_with_and_without_speech_give_the_gradients_of_one(ranks2, case):
    shares, sizes, text, settings = CASES[case]
    found = ranks2.run(on_ranks, shares, sizes, text, settings)
    wanted = alone(shares, text)
    for of_rank in found:
        check_equal(of_rank, wanted)


# ---- Checkpoints and exports ------------------------------------------------------------------------------------


def losses_of(engine, steps, ranks):
    """The loss sum and the weight of each step, on the rows of these ranks of two; rows depend on the step."""
    forward_step = speech_step(engine.model, SpeechLoss(residual_weight=0.3), text=True)
    found = []
    for step in steps:
        rows = [[step % 4], [(step + 1) % 4, 0]]
        batches = [micro_batch(rows[rank]) for rank in ranks]
        numbers = engine.train_batch(batches, forward_step)
        found.append((float(numbers.loss_sum), float(numbers.weight)))
    return found


def resumed(folder):
    """The losses of steps 2 and 3 of a training on two shards, and the same after a resume."""
    world = World.join("cpu")
    layout = Layout.of(world, parallel(shard=2))
    straight = engine_on(layout, adamw)
    losses_of(straight, range(2), [layout.data_rank])
    straight.save_checkpoint(folder)
    found = [losses_of(straight, range(2, 4), [layout.data_rank])]
    again = engine_on(layout, adamw)
    again.load_checkpoint(folder)
    found.append(losses_of(again, range(2, 4), [layout.data_rank]))
    world.close()
    return found


@pytest.mark.slow
@CAMPAIGN
def test_resume_is_bit_equal_and_one_rank_continues_a_training_of_two(
    ranks2: Any, tmp_path: Any
) -> None:
    found = ranks2.run(resumed, str(tmp_path / "step_00000002"))
    for straight, again in found:
        assert straight == again
    engine = engine_on(Layout(World(0, 1, 0, 1, torch.device("cpu"))), adamw)
    engine.load_checkpoint(tmp_path / "step_00000002")
    of_one = losses_of(engine, range(2, 4), [0, 1])
    for step, numbers in enumerate(of_one):
        of_two = [sum(of_rank[0][step][i] for of_rank in found) for i in range(2)]
        assert numbers == pytest.approx(of_two, rel=1e-5)


@pytest.mark.slow
@CAMPAIGN
@pytest.mark.parametrize("text", [True, False])
def test_shards_with_ulysses_give_the_gradients_of_one(ranks4, text):
    found = ranks4.run(on_ranks, SILENT, {"shard": 2, "ulysses": 2, "replicate": 1}, text, {})
    for of_rank in found:
        check_equal(of_rank, alone(SILENT, text))
