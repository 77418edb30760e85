"""Hugging Face models on every layout: each gradient of the first step, and the loss over five, to 1e-5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, read_metrics
from families import config_of

from mvp_engine.batch import PackedBatch
from mvp_engine.config.schema import Parallel
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.sequence import check_heads
from mvp_engine.distributed.sharding import shard_model
from mvp_engine.errors import UserError
from mvp_engine.model_engine.packed import LanguageModel

LM = ROOT / "tests" / "recipes" / "packed_lm" / "train.yaml"

# ranks, shard, sequence; the rest are replicas
LAYOUTS = [(2, 2, 1), (2, 1, 2), (4, 2, 1), (4, 2, 2), (4, 1, 4), (4, 1, 2)]
FAMILIES = ["qwen3", "gpt_oss", "gemma2", "qwen3_moe", "gpt2"]


def batch() -> PackedBatch:
    g = torch.Generator().manual_seed(3)
    return PackedBatch.from_sequences([torch.randint(99, (n,), generator=g) for n in (7, 3, 11, 2)])


def gradients(model: LanguageModel) -> dict[str, torch.Tensor]:
    out = model(batch(), ["log_probs", "entropy"])
    (out["log_probs"].sum() - 0.1 * out["entropy"].sum()).backward()
    found = {}
    for name, param in model.named_parameters():
        if param.grad is not None:
            found[name] = param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad
    return found


def on_layout(shard: int, sequence: int, families: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    """The gradients of each family, from ranks that all have the same batch: summed over data ranks."""
    world = World.join("cpu")
    layout = Layout.of(world, Parallel(replicate=-1, shard=shard, sequence=sequence, timeout=60.0))
    result = {}
    for family in families:
        torch.manual_seed(0)
        model = LanguageModel.from_config(config_of(family), chunk=6).eval()
        if layout.sequence_group is not None:
            model.share_sequences(layout.sequence_group)
        assert layout.shard_mesh is not None
        shard_model(model, layout.shard_mesh)
        result[family] = {name: grad / layout.data_size for name, grad in gradients(model).items()}
    world.close()
    return result


@pytest.mark.parametrize(("ranks", "shard", "sequence"), LAYOUTS)
def test_every_gradient_is_that_of_one_rank(request, ranks: int, shard: int, sequence: int) -> None:
    results = request.getfixturevalue(f"ranks{ranks}").run(on_layout, shard, sequence, FAMILIES)
    for family in FAMILIES:
        torch.manual_seed(0)
        expected = gradients(LanguageModel.from_config(config_of(family), chunk=6).eval())
        for result in results:
            assert result[family].keys() == expected.keys()
            for name, grad in expected.items():
                assert torch.allclose(result[family][name], grad, rtol=1e-5, atol=1e-5), (family, name)


@pytest.mark.parametrize(("ranks", "shard", "sequence"), LAYOUTS)
def test_losses_over_five_steps_are_those_of_one_rank(
    request, train, tmp_path: Path, ranks: int, shard: int, sequence: int
) -> None:
    words = ["loop.eval_interval=5"]
    assert train(*words, "data.micro_batch_size=8", config=LM, dir=tmp_path / "one") == 0
    pool = request.getfixturevalue(f"ranks{ranks}")
    layout = [f"parallel.shard={shard}", f"parallel.sequence={sequence}", "data.micro_batch_size=2"]
    assert pool.launch(LM, *words, *layout, f"project.dir={tmp_path / 'many'}") == [0] * ranks
    for split in ("train", "eval"):
        one, many = read_metrics(tmp_path / "one", split), read_metrics(tmp_path / "many", split)
        assert [r["loss"] for r in one] == pytest.approx([r["loss"] for r in many], rel=1e-5)
        assert [r.get("totals") for r in one] == [r.get("totals") for r in many]  # counted once


def test_a_run_goes_on_over_layouts(train, ranks2, ranks4, tmp_path: Path) -> None:
    words = ["data.micro_batch_size=2", "optim.schedule=constant"]  # so that a shorter run is the same run, cut
    assert train(*words, "loop.total_steps=8", config=LM, dir=tmp_path / "straight") == 0
    cut = [*words, "resume=auto", f"project.dir={tmp_path / 'cut'}"]
    both = ["parallel.shard=2", "parallel.sequence=2"]
    assert ranks4.launch(LM, *cut, *both, "loop.total_steps=3") == [0] * 4
    assert ranks2.launch(LM, *cut, "parallel.sequence=2", "loop.total_steps=5") == [0] * 2
    assert ranks4.launch(LM, *cut, "parallel.shard=4", "data.micro_batch_size=1", "loop.total_steps=6") == [0] * 4
    assert train(*cut, "loop.total_steps=8", config=LM, dir=tmp_path / "cut") == 0
    one, many = read_metrics(tmp_path / "straight"), read_metrics(tmp_path / "cut")
    assert [r["step"] for r in many] == list(range(1, 9))
    assert [r["loss"] for r in one] == pytest.approx([r["loss"] for r in many], rel=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(4, 2, 3), (6, 3, 2), (4, 4, 8)])
def test_heads_that_cannot_be_shared_are_explained(heads: int, kv_heads: int, ranks: int) -> None:
    with pytest.raises(UserError, match=f"parallel.sequence={ranks} cannot share {heads} query and {kv_heads}"):
        check_heads(heads, kv_heads, ranks)


def test_two_engines_with_different_layouts_live_in_one_process(ranks4) -> None:
    for answer in ranks4.run(two_layouts):
        assert answer["same"]


def two_layouts() -> dict[str, Any]:
    world = World.join("cpu")
    both = []
    for shard, sequence in ((4, 1), (2, 2)):
        torch.manual_seed(0)
        layout = Layout.of(world, Parallel(replicate=-1, shard=shard, sequence=sequence, timeout=60.0))
        model = LanguageModel.from_config(config_of("qwen3")).eval()
        if layout.sequence_group is not None:
            model.share_sequences(layout.sequence_group)
        assert layout.shard_mesh is not None
        shard_model(model, layout.shard_mesh)
        both.append(model)
    with torch.no_grad():
        outs = [model(batch(), ["log_probs"])["log_probs"] for model in both for _ in range(2)]
    world.close()
    return {"same": all(torch.allclose(out, outs[0], rtol=1e-5, atol=1e-5) for out in outs)}
