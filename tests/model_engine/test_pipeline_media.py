"""Pipeline parallel on models with encoders: images on some packs, DeepStack features, ranks without data."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import TOKENS, VISION, layout_of, mean_of_copies
from tiny_models import build_model, samples
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel, ValueModel
from mvp_engine.hf.model.pipeline_cut import check_supported, cut_model
from mvp_engine.model_engine import LanguageModelEngine, Settings, ValueModelEngine
from mvp_engine.model_engine.fsdp.parallelize import freeze
from mvp_engine.ops.fp8 import Fp8Linear

# What each of two data ranks has: [], or micro-batches of samples 0 (text), 1 (one item), 2 (two, of two kinds if any)
SHARES = [[[0], [1], [2, 0]], [[0]], [], [[1, 2], [0]]]
CASES: list[Any] = [(2, {"pipeline": 2}, "qwen3_vl", 2, ())]
MORE: list[Any] = [
    (2, {"pipeline": 2}, "qwen3_vl", 3, ("vision",)),
    (2, {"pipeline": 2}, "llava", 2, ()),
    (4, {"pipeline": 4}, "qwen3_vl", 4, ()),
    (4, {"pipeline": 2, "shard": 2}, "qwen3_vl", 3, ()),
    (4, {"pipeline": 2, "ulysses": 2}, "qwen3_vl", 3, ()),
    (4, {"pipeline": 2, "context": 2}, "qwen3_vl", 2, ()),
    (4, {"pipeline": 2, "shard": 2, "expert": 2}, "qwen3_vl_moe", 3, ()),
]
CASES += [
    pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.campaign(only=True)]) for case in MORE
]


def model_on_meta(name: str, layers: int, model_class: Any = LanguageModel) -> Any:
    from transformers import AutoConfig

    special = copy.deepcopy({**TOKENS, **VISION[name][1]})
    special["text_config"]["num_hidden_layers"] = layers
    with torch.device("meta"):
        return model_class.from_config(AutoConfig.for_model(name, **special))


def batches(name: str, share: list[list[int]]) -> list[PackedBatch]:
    ones = samples(build_model(LanguageModel, name), name)
    text = PackedBatch(
        ones[0].input_ids,
        ones[0].labels,
        ones[0].position_ids,
        ones[0].cu_seqlens,
        ones[0].token_fields,
    )
    return [
        text if members == [0] else PackedBatch.concat([ones[i] for i in members])
        for members in share
    ]


def trained(name: str, layout: Layout, layers: int, freeze: tuple[str, ...]) -> dict[str, Any]:
    """Gradients, norm and evaluated losses of a step."""
    mine = batches(
        name, [one for part in SHARES[layout.data_rank :: layout.data_size] for one in part]
    )
    engine = LanguageModelEngine(
        model_on_meta(name, layers), layout, Settings(seed=3, freeze=freeze)
    )
    engine.initialize(lambda model: torch.optim.SGD(model.parameters(), 0.0))
    engine.model.eval()

    def loss(batch: PackedBatch) -> tuple[Tensor, Tensor]:
        out = engine.model(batch, ["log_probs", "entropy"])
        return out["entropy"].sum() - out["log_probs"].sum(), batch.num_loss_tokens

    numbers = engine.train_batch(mine, loss)
    params = engine.model.named_parameters()
    found: dict[str, Any] = {
        name: full_tensor(param.grad) for name, param in params if param.grad is not None
    }
    found["norm"] = numbers.grad_norm.float()
    with engine.eval_mode():
        losses = [loss_sum for loss_sum, _ in engine.infer_micro_batches(mine, loss)]
    found["evaluated"] = sum(losses, torch.zeros(()))
    return found


@functools.cache
def expected(name: str, layers: int, freeze: tuple[str, ...]) -> dict[str, Any]:
    return trained(name, Layout(World(0, 1, 0, 1, torch.device("cpu"))), layers, freeze)


def on_ranks(
    sizes: dict[str, int], name: str, layers: int, freeze: tuple[str, ...]
) -> dict[str, Any]:
    with layout_of(**sizes) as layout:
        found = trained(name, layout, layers, freeze)
        found["evaluated"] = mean_of_copies(layout, found["evaluated"])
        return found


@pytest.mark.parametrize(("ranks", "sizes", "name", "layers", "freeze"), CASES)
def test_pipeline_with_images_on_some_packs_gives_the_gradients_of_one_rank(
    request: pytest.FixtureRequest,
    ranks: int,
    sizes: dict[str, int],
    name: str,
    layers: int,
    freeze: tuple[str, ...],
) -> None:
    results = request.getfixturevalue(f"ranks{ranks}").run(on_ranks, sizes, name, layers, freeze)
    one = expected(name, layers, freeze)
    assert any("visual.blocks" in key or "vision" in key for key in one) != ("vision" in freeze)
    assert set().union(*results) == set(one)
    for result in results:
        for key, value in result.items():
            bound = 1e-5 * float(one[key].abs().max()) + 1e-8
            assert float((value - one[key]).abs().max()) <= bound, key


def fp8_layers() -> int:
    with layout_of(pipeline=2) as layout:
        settings = Settings(precision="bf16", fp8={"vision": True})
        engine = LanguageModelEngine(model_on_meta("qwen3_vl", 2), layout, settings)
        engine.initialize()
        return sum(isinstance(module, Fp8Linear) for module in engine.model.modules())


def test_pipeline_with_fp8_of_a_part_that_one_stage_has_alone(ranks2) -> None:
    first, last = ranks2.run(fp8_layers)
    assert first > 0
    assert last == 0


def export_value_model(folder: str, sizes: dict[str, int]) -> None:
    with layout_of(**sizes) as layout:
        engine = ValueModelEngine(
            model_on_meta("qwen3_vl", 2, ValueModel), layout, Settings(seed=3)
        )
        engine.initialize()
        engine.export_hf(folder)


def test_pipeline_exports_a_head_that_one_stage_has_alone(ranks2, tmp_path: Path) -> None:
    export_value_model(str(tmp_path / "one"), {})
    ranks2.run(export_value_model, str(tmp_path / "two"), {"pipeline": 2})
    files = [file.name for file in (tmp_path / "one").glob("*.safetensors")]
    assert len(files) == 2  # the backbone, and the head, for which transformers has no class
    for file in files:
        assert (tmp_path / "two" / file).read_bytes() == (tmp_path / "one" / file).read_bytes()


def test_pipeline_refuses_a_stage_without_trained_parameters() -> None:
    model = model_on_meta("qwen3_vl", 2)
    skeleton = copy.deepcopy(model)
    freeze(model, ["llm"])
    link: Any = SimpleNamespace(stages=2, stage=0, is_first=True, is_last=False)
    with pytest.raises(UserError, match="stage 1 would have no trained parameters"):
        cut_model(model, link, skeleton)


def test_pipeline_refuses_masks_that_depend_on_images() -> None:
    with pytest.raises(
        UserError, match="gemma3 cannot be cut into stages: a mask that depends on media"
    ):
        check_supported(model_on_meta("gemma3", 2), "parallel.pipeline=2")
