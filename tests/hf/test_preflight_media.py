"""Preflight of media: the first real rows with media are compared, packed and alone, before they are trained on."""

import pytest
import torch
from conftest import user_error
from tiny_engines import ALONE, counting, engine_of, message_of, sgd
from tiny_engines import train as step
from tiny_models import build_model, samples, shared_model

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.experts import grouped_mm
from mvp_engine.ops import fp8


def start(layout=ALONE, **settings):
    """An engine on a tiny Qwen3-VL, and rows: without media, with one image, with an image and a video."""
    model = build_model(LanguageModel, "qwen3_vl")
    engine = engine_of(model, layout, lambda model: sgd(model, 1e-3), **settings)
    return engine, samples(shared_model(LanguageModel, "qwen3_vl"), "qwen3_vl")


def mix_patches(_, inputs, output):
    """A forward hook: every patch sees all patches of the micro-batch, as an encoder without boundaries would."""
    return output + output.mean(0)


def fail_on_images(*_):
    raise IndexError("tuple index out of range")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_first_step_encoder_that_mixes_images_of_rows_is_rejected(precision):
    engine, (text, image, both) = start(precision=precision)
    engine.model.hf.model.visual.merger.register_forward_hook(mix_patches)
    step(engine, text, text)
    with user_error("qwen3_vl cannot be trained on packed sequences with pixel_values"):
        step(engine, PackedBatch.concat([image, both]), text)


def test_first_step_encoder_that_fails_is_rejected_with_the_reason():
    engine, (text, image, _) = start()
    engine.model.hf.model.visual.register_forward_pre_hook(fail_on_images)
    step(engine, text)
    with user_error("the forward on a row with pixel_values fails: IndexError: tuple index out"):
        step(engine, text, image)


def test_first_step_outputs_that_differ_from_transformers_are_rejected(monkeypatch):
    engine, (_, image, _) = start()
    plain = engine.model.hidden
    wrong = lambda *given, **options: 1.01 * plain(*given, **options)  # noqa: E731
    monkeypatch.setattr(engine.model, "hidden", wrong)
    with user_error("hidden states differ from those of transformers' own forward by 1"):
        step(engine, image)


def test_media_preflight_runs_once_for_each_kind_of_media():
    engine, (text, image, both) = start()
    calls = []
    engine.model.hf.model.visual.register_forward_hook(lambda *_: calls.append(1))
    step(engine, text)
    assert not calls
    step(engine, image)
    first = len(calls)
    step(engine, image, both)
    both_kinds = len(calls)
    assert first > 1
    assert both_kinds > first + 3  # an image, an image and a video, and the probe of videos
    step(engine, image, both)
    assert len(calls) == both_kinds + 3


def test_preflight_does_not_count_the_rounding_of_fp8(monkeypatch):
    """In a deep model FP8 rounds to other values with every change of a last bit, as noise does here."""
    plain, calls = fp8.quantize, []

    def noisy(rows):
        calls.append(len(rows))
        return plain(rows * (1 + torch.rand_like(rows)))

    for module in (fp8, grouped_mm):
        monkeypatch.setattr(module, "quantize", noisy)
    engine, (_, image, _) = start(precision="bf16", fp8=True)
    engine.adapter.preflight_media(engine, [image])
    assert engine.adapter._media.checked == {"pixel_values"}
    experts = engine_of(build_model(LanguageModel, "qwen3_moe"), precision="bf16", fp8=True)
    assert not calls
    step(engine, image)
    before = len(calls)
    step(experts, counting(9))
    assert len(calls) > before > 0


def step_with_an_image_on_rank_1(layout):
    """Every rank has to run the encoder, and all have to stop."""
    engine, (text, image, _) = start(layout)
    mine = image if layout.world.rank else text
    step(engine, mine)
    engine.model.hf.model.visual.merger.register_forward_hook(mix_patches)
    engine.adapter._media.checked.clear()
    step(engine, mine)


def test_first_step_of_sharded_ranks_compares_the_image_of_one_rank_on_all(on_ranks):
    message = "cannot be trained on packed sequences with pixel_values: the media of one row change"
    for error in on_ranks({"shard": 2}, message_of, step_with_an_image_on_rank_1):
        assert message in error
