"""What a model engine finds out before it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import SMALL, config_of, overrides_of, parallel
from torch.optim.lr_scheduler import LambdaLR

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel
from mvp_engine.hf import preflight as probe
from mvp_engine.model_engine import FSDPEngine, LanguageModelEngine, Settings


def start(family: str, world: World, settings: Settings | None = None, **sizes: int) -> str:
    """Why an engine refuses a model, or nothing."""
    model = LanguageModel.on_meta(None, overrides_of(family))
    try:
        LanguageModelEngine(model, Layout.of(world, parallel(**sizes)), settings).initialize()
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("family", ["mamba", "bloom", "minimax", "jamba"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_that_cannot_be_packed_does_not_start(family: str, precision: str) -> None:
    assert f"{family} cannot be trained on packed sequences" in start(
        family, World.join("cpu"), Settings(precision=precision)
    )


def test_the_others_do_in_bf16_too() -> None:
    for family in ("qwen3", "gemma2", "gpt_oss", "qwen3_moe"):
        assert start(family, World.join("cpu"), Settings(precision="bf16")) == ""


def test_nor_does_it_on_several_ranks(ranks2) -> None:
    for answers in ranks2.run(on_two):
        for refused, taken in answers.values():
            assert "jamba cannot be trained on packed sequences" in refused
            assert taken == ""


def on_two() -> dict[str, tuple[str, str]]:
    world = World.join("cpu")
    layouts: list[dict[str, int]] = [{"shard": 2}, {"ulysses": 2}, {}]
    answers = {str(sizes): (start("jamba", world, **sizes), start("qwen3", world, **sizes)) for sizes in layouts}
    world.close()
    return answers


def test_a_wrapped_model_is_tried_too() -> None:
    torch.manual_seed(0)
    model = LanguageModel.from_config(config_of("granite"))
    model.scale = 1.0
    with torch.no_grad():
        model.hf.get_output_embeddings().weight *= 30
    with pytest.raises(UserError, match="granite: log-probs differ from those of transformers' own forward"):
        FSDPEngine(model, Layout(World.join("cpu"))).initialize()


def test_weights_that_are_not_finite_are_told() -> None:
    model = LanguageModel.from_config(config_of("llama"))
    with torch.no_grad():
        model.hf.get_output_embeddings().weight[3] = float("nan")
        model.base().norm.weight[0] = float("inf")
    with pytest.raises(UserError, match="llama returns non-finite outputs"):
        FSDPEngine(model, Layout(World.join("cpu"))).initialize()


def test_fewer_tokens_than_ranks_can_be_shared(ranks4) -> None:
    alone = log_probs({})
    for shared in [*ranks4.run(log_probs, {"ulysses": 4}), *ranks4.run(log_probs, {"ulysses": 2, "shard": 2})]:
        for got, expected in zip(shared, alone, strict=True):
            assert torch.allclose(got, expected, rtol=1e-5, atol=1e-5)


def log_probs(sizes: dict[str, int]) -> list[Any]:
    world = World.join("cpu")
    model = LanguageModel.on_meta(None, overrides_of("qwen3") | {"num_key_value_heads": 4})
    engine = LanguageModelEngine(model, Layout.of(world, parallel(**sizes)), Settings(seed=5))
    engine.initialize()
    batches = [PackedBatch.from_sequences([torch.arange(n)]) for n in (1, 3, 5)]
    outs = [engine.infer_batch(batch, ["log_probs"])["log_probs"] for batch in batches]
    world.close()
    return outs


def test_weights_read_after_an_inference_are_those_that_count(ranks2, tmp_path) -> None:
    for before, after, fresh in ranks2.run(read_late, str(tmp_path)):
        assert not torch.allclose(before, after)
        assert torch.equal(after, fresh)


def read_late(folder: str) -> tuple[Any, Any, Any]:
    """Sharded ranks keep some weights gathered after a forward pass: not when others are read in between."""
    world = World.join("cpu")
    layout = Layout.of(world, parallel(shard=2))
    engines = [
        LanguageModelEngine(LanguageModel.on_meta(None, overrides_of("qwen3")), layout, Settings(seed=seed))
        for seed in (1, 2)
    ]
    for engine in engines:
        engine.initialize(lambda m: torch.optim.SGD(m.parameters(), 0.1), lambda sgd: LambdaLR(sgd, lambda _: 1.0))
    batch = PackedBatch.from_sequences([torch.arange(9)])

    def given(engine: LanguageModelEngine) -> torch.Tensor:
        return engine.infer_batch(batch, ["log_probs"])["log_probs"]

    engines[1].save_checkpoint(Path(folder) / "saved")
    before = given(engines[0])
    engines[0].load_checkpoint(Path(folder) / "saved")
    answer = before, given(engines[0]), given(engines[1])
    world.close()
    return answer


def test_what_runs_along_stays_with_a_batch() -> None:
    one = PackedBatch.from_sequences([torch.arange(3), torch.arange(4)])
    one.beside = [one.filler()]
    assert one.select([1]).beside == one.beside
    assert PackedBatch.concat([one, one]).beside == one.beside * 2


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_sequences_that_would_change_the_positions_of_others_are_refused(kind: str) -> None:
    rope: dict[str, Any] = {
        "rope_type": kind,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 16,
        "factor": 4.0,
    }
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = config_of("phi3" if kind == "longrope" else "llama")
    config.rope_parameters = rope
    config.max_position_embeddings = 64
    config.original_max_position_embeddings = 16
    model = LanguageModel.from_config(config).eval()
    FSDPEngine(model, Layout(World.join("cpu"))).initialize()
    model(PackedBatch.from_sequences([torch.arange(16), torch.arange(9)]), ["log_probs"])
    with pytest.raises(UserError, match=r"a sequence of 17 tokens: .* longer than 16"):
        model(PackedBatch.from_sequences([torch.arange(17), torch.arange(9)]), ["log_probs"])


def test_one_layer_that_looks_across_is_enough() -> None:
    more = {"model_type": "lfm2", "layer_types": ["full_attention", "conv", "full_attention"], "num_hidden_layers": 3}
    for precision in ("fp32", "bf16"):
        model = LanguageModel.on_meta(None, {k: v for k, v in SMALL.items() if k != "head_dim"} | more)
        with pytest.raises(UserError, match="two sequences in one batch change each other"):
            LanguageModelEngine(model, Layout(World.join("cpu")), Settings(precision=precision)).initialize()


def test_ranks_agree_on_what_they_saw(ranks2) -> None:
    """One rank alone sees something in the first trial: both try again, and nobody waits for ever."""
    assert ranks2.run(tipped) == [2, 2]


def tipped() -> int:
    world = World.join("cpu")
    trials, once = [], probe._difference

    def difference(a: torch.Tensor, b: torch.Tensor) -> float:
        trials.append(a)
        return 1.0 if len(trials) == 1 and world.rank == 1 else once(a, b)

    probe._difference = difference
    try:
        start("qwen3", world, shard=2)
    finally:
        probe._difference = once
    world.close()
    return len(trials) // 2
