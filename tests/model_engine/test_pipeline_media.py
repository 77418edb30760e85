"""Pipeline parallel on models with encoders: images on some packs, DeepStack features, ranks without data."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from conftest import CAMPAIGN, user_error
from families import TOKENS, VISION, mean_of_copies
from tiny_engines import ALONE, engine_of, gradients, scores_of, shares_of
from tiny_models import build_model, media_packs

from mvp_engine.hf import LanguageModel, ValueModel
from mvp_engine.hf.model.pipeline import check_supported, cut_model
from mvp_engine.model_engine import ValueModelEngine
from mvp_engine.model_engine.fsdp.parallelize import freeze
from mvp_engine.ops.fp8 import Fp8Linear

# What each of two data ranks has: [], or micro-batches of samples 0 (text), 1 (one item), 2 (two, of two kinds if any)
SHARES = [[[0], [1], [2, 0]], [[0]], [], [[1, 2], [0]]]
MORE = [
    ({"pipeline": 2}, "qwen3_vl", 3, ("vision",)),
    ({"pipeline": 2}, "llava", 2, ()),
    ({"pipeline": 4}, "qwen3_vl", 4, ()),
    ({"pipeline": 2, "shard": 2}, "qwen3_vl", 3, ()),
    ({"pipeline": 2, "ulysses": 2}, "qwen3_vl", 3, ()),
    ({"pipeline": 2, "context": 2}, "qwen3_vl", 2, ()),
    ({"pipeline": 2, "shard": 2, "expert": 2}, "qwen3_vl_moe", 3, ()),
]
CASES = [
    ({"pipeline": 2}, "qwen3_vl", 2, ()),
    *(pytest.param(*case, marks=CAMPAIGN) for case in MORE),
]


def model_on_meta(name, layers, model_class=LanguageModel):
    from transformers import AutoConfig

    special = copy.deepcopy({**TOKENS, **VISION[name][1]})
    special["text_config"]["num_hidden_layers"] = layers
    with torch.device("meta"):
        return model_class.from_config(AutoConfig.for_model(name, **special))


def trained(layout, name, layers, freeze):
    """Gradients, norm and evaluated losses of a step."""
    mine = media_packs(build_model(LanguageModel, name), name, shares_of(layout, SHARES))
    engine = engine_of(model_on_meta(name, layers), layout, seed=3, freeze=freeze)
    engine.model.eval()
    numbers = engine.train_batch(mine, scores_of(engine))
    found = {**gradients(engine.model), "norm": numbers.grad_norm.float()}
    with engine.eval_mode():
        losses = [loss_sum for loss_sum, _ in engine.infer_micro_batches(mine, scores_of(engine))]
    return {**found, "evaluated": mean_of_copies(layout, sum(losses, torch.zeros(())))}


@functools.cache
def expected(*case):
    return trained(ALONE, *case)


@pytest.mark.parametrize("sizes, name, layers, freeze", CASES, ids=str)
def test_pipeline_with_images_on_some_packs_gives_the_gradients_of_one_rank(
    on_ranks, sizes, name, layers, freeze
):
    results = on_ranks(sizes, trained, name, layers, freeze)
    one = expected(name, layers, freeze)
    assert any("visual.blocks" in key or "vision" in key for key in one) != ("vision" in freeze)
    assert set().union(*results) == set(one)
    for result in results:
        for key, value in result.items():
            bound = 1e-5 * float(one[key].abs().max()) + 1e-8
            assert float((value - one[key]).abs().max()) <= bound, key


def fp8_layers(layout):
    model = model_on_meta("qwen3_vl", 2)
    engine = engine_of(model, layout, optimizer=None, precision="bf16", fp8={"vision": True})
    return sum(isinstance(module, Fp8Linear) for module in engine.model.modules())


def test_pipeline_with_fp8_of_a_part_that_one_stage_has_alone(on_ranks):
    first, last = on_ranks({"pipeline": 2}, fp8_layers)
    assert first > 0 == last


def export_value_model(layout, folder):
    model = model_on_meta("qwen3_vl", 2, ValueModel)
    engine_of(model, layout, optimizer=None, kind=ValueModelEngine, seed=3).export_hf(folder)


def test_pipeline_exports_a_head_that_one_stage_has_alone(on_ranks, tmp_path):
    export_value_model(ALONE, tmp_path / "one")
    on_ranks({"pipeline": 2}, export_value_model, tmp_path / "two")
    files = [file.name for file in (tmp_path / "one").glob("*.safetensors")]
    assert len(files) == 2  # the backbone, and the head, for which transformers has no class
    for file in files:
        assert (tmp_path / "two" / file).read_bytes() == (tmp_path / "one" / file).read_bytes()


def test_pipeline_refuses_a_stage_without_trained_parameters():
    model = model_on_meta("qwen3_vl", 2)
    skeleton = copy.deepcopy(model)
    freeze(model, ["llm"])
    link = SimpleNamespace(stages=2, stage=0, is_first=True, is_last=False)
    with user_error("stage 1 would have no trained parameters"):
        cut_model(model, link, skeleton)


def test_pipeline_refuses_masks_that_depend_on_images():
    with user_error("gemma3 cannot be cut into stages: a mask that depends on media"):
        check_supported(model_on_meta("gemma3", 2), "parallel.pipeline=2")
