"""Preflight of media: the first real rows with media are compared, packed and alone, before they are trained on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import parallel
from tiny_models import build_model, samples
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel
from mvp_engine.model_engine import LanguageModelEngine, Settings


def start(world: World, precision: str = "fp32", **sizes: int) -> tuple[LanguageModelEngine, list[PackedBatch]]:
    """An engine on a tiny Qwen3-VL, and rows: without media, with one image, with an image and a video."""
    model = build_model(LanguageModel, "qwen3_vl")
    rows = samples(model, "qwen3_vl")
    layout = Layout.of(world, parallel(**sizes))
    engine = LanguageModelEngine(model, layout, Settings(precision=precision))
    engine.initialize(lambda model: torch.optim.SGD(model.parameters(), 1e-3))
    return engine, rows


def step(engine: LanguageModelEngine, rows: list[PackedBatch]) -> None:
    model: Any = engine.model
    engine.train_batch(rows, lambda one: (model(one, ["loss"])["loss"], one.num_loss_tokens))


def mix_patches(_: Any, inputs: Any, output: Tensor) -> Tensor:
    """A forward hook: every patch sees all patches of the micro-batch, as an encoder without boundaries would."""
    return output + output.mean(0)


def fail_on_images(*_: Any) -> None:
    raise IndexError("tuple index out of range")


def test_first_step_encoder_that_mixes_images_of_rows_is_rejected() -> None:
    for precision in ("fp32", "bf16"):
        engine, (text, image, both) = start(World.join("cpu"), precision)
        engine.model.hf.model.visual.merger.register_forward_hook(mix_patches)
        step(engine, [text, text])
        with pytest.raises(UserError, match="qwen3_vl cannot be trained on packed sequences with pixel_values"):
            step(engine, [PackedBatch.concat([image, both]), text])


def test_first_step_encoder_that_fails_is_rejected_with_the_reason() -> None:
    engine, (text, image, _) = start(World.join("cpu"))
    engine.model.hf.model.visual.register_forward_pre_hook(fail_on_images)
    step(engine, [text])
    with pytest.raises(UserError, match="the forward on a row with pixel_values fails: IndexError: tuple index out"):
        step(engine, [text, image])


def test_first_step_outputs_that_differ_from_transformers_are_rejected(monkeypatch) -> None:
    engine, (_, image, _) = start(World.join("cpu"))
    model: Any = engine.model
    plain = model.hidden
    monkeypatch.setattr(model, "hidden", lambda *given, **options: 1.01 * plain(*given, **options))
    with pytest.raises(UserError, match="hidden states differ from those of transformers' own forward by 1"):
        step(engine, [image])


def test_media_preflight_runs_once_for_each_kind_of_media() -> None:
    engine, (text, image, both) = start(World.join("cpu"))
    calls: list[int] = []
    engine.model.hf.model.visual.register_forward_hook(lambda *_: calls.append(1))
    step(engine, [text])
    assert not calls
    step(engine, [image])
    first = len(calls)
    step(engine, [image, both])
    both_kinds = len(calls)
    assert first > 1
    assert both_kinds > first + 3  # an image, an image and a video, and the probe of videos
    step(engine, [image, both])
    assert len(calls) == both_kinds + 3


def reject_on_sharded_ranks() -> str:
    """Only rank 1 has an image; every rank has to run the encoder, and all have to stop."""
    world = World.join("cpu")
    engine, (text, image, _) = start(world, shard=2)
    mine = image if world.rank else text
    step(engine, [mine])
    engine.model.hf.model.visual.merger.register_forward_hook(mix_patches)
    engine.adapter._media.checked.clear()
    try:
        step(engine, [mine])
    except UserError as error:
        return str(error)
    finally:
        world.close()
    return ""


def test_first_step_of_sharded_ranks_compares_the_image_of_one_rank_on_all(ranks2) -> None:
    for error in ranks2.run(reject_on_sharded_ranks):
        assert "cannot be trained on packed sequences with pixel_values: the media of one row change" in error
