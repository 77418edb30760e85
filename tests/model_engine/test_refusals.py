"""Batches and settings that would train something else, or end in a traceback, are refused with their place."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from families import SMALL, overrides_of, parallel
from test_hf_folders import alone, language_model
from test_packed_layouts import gradients
from torch import nn

from mvp_engine.cli import main
from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.errors import EXIT_USER_ERROR, UserError
from mvp_engine.model_engine import (
    FSDPEngine,
    LanguageModelEngine,
    ModelSource,
    Settings,
    ValueModelEngine,
)
from mvp_engine.model_engine.fsdp import parallelize as build


def batch_with(field: str, value: int) -> PackedBatch:
    batch = PackedBatch.from_sequences([torch.arange(3, 9), torch.arange(5, 12)])
    getattr(batch, field)[8] = value
    return batch


@pytest.mark.parametrize(("field", "value"), [("labels", -1), ("labels", 99), ("input_ids", 99), ("input_ids", IGNORE)])
def test_tokens_that_are_none_are_refused_with_their_place(field: str, value: int) -> None:
    engine = language_model(None, **overrides_of("qwen3"))
    with pytest.raises(
        UserError, match=rf"{field}: {value} at position 2 of sequence 1 is outside of the model's vocabulary of 99 tok"
    ):
        engine.infer_batch(batch_with(field, value), ["log_probs"])
    good = engine.infer_batch(batch_with(field, 98), ["log_probs"])["log_probs"]
    assert bool(good.isfinite().all())


def test_a_backend_of_compile_that_is_none_is_refused() -> None:
    model = LanguageModelEngine.build_model(ModelSource(None, overrides_of("qwen3")))
    with pytest.raises(UserError, match=r"model\.compile=inducto is no backend .* Did you mean inductor"):
        LanguageModelEngine(model, alone(), Settings(compile="inducto")).initialize()


def test_outputs_of_sharded_models_are_no_views(ranks2) -> None:
    """FSDP2 warns of them: what is done to one in place would lose the hooks that gather the weights."""
    assert ranks2.run(warned) == [[], []]


def warned() -> list[str]:
    world = World.join("cpu")
    layout = Layout.of(world, parallel(shard=2))
    batch = PackedBatch.from_sequences([torch.arange(3, 9)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for kind, output in ((ValueModelEngine, "values"), (LanguageModelEngine, "hidden_states")):
            engine = kind(kind.build_model(ModelSource(None, overrides_of("qwen3"))), layout)
            engine.initialize(lambda model: torch.optim.SGD(model.parameters(), 0.0))
            engine.train_batch([batch], lambda b, e=engine, o=output: (e.model(b, [o])[o].sum(), 1.0))
    world.close()
    return [str(warning.message) for warning in caught if "view" in str(warning.message)]


GEMMA4 = {"model_type": "gemma4_text", **SMALL, "vocab_size_per_layer_input": 99}
GEMMA4 |= {"hidden_size_per_layer_input": 8, "sliding_window": 3}


def test_heads_of_several_sizes_share_their_matrices(ranks2, monkeypatch) -> None:
    monkeypatch.setattr("test_packed_layouts.overrides_of", lambda _: GEMMA4)
    expected = gradients("gemma4_text", alone())
    for found in ranks2.run(on_ranks, GEMMA4, {"tensor": 2}):
        assert found.keys() == expected.keys()
        for name, grad in expected.items():  # its many norms of small numbers magnify the rounding of sums
            assert float((found[name] - grad).abs().max()) < 3e-4 * float(grad.abs().max()), name


def test_norms_with_a_weight_for_each_head_cannot_share_matrices(ranks2) -> None:
    for said in ranks2.run(on_ranks, overrides_of("cohere") | {"use_qk_norm": True}, {"tensor": 2}):
        assert "layers.0.self_attn.q_norm has a weight for each head, and transformers' plan for cohere" in said


def on_ranks(config: dict[str, Any], sizes: dict[str, int]) -> Any:
    import test_packed_layouts as layouts

    world = World.join("cpu")
    before, layouts.overrides_of = layouts.overrides_of, lambda _: config
    try:
        return gradients("any", Layout.of(world, parallel(**sizes)))
    except UserError as error:
        return str(error)
    finally:
        layouts.overrides_of = before
        world.close()


@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_offloading_makes_room_for_the_evaluations_of_a_training(offload: str, train, monkeypatch) -> None:
    """On a CPU nothing moves: here is seen who is asked to be where. test_cuda_models moves memory."""
    seen: dict[str, list[set[str]]] = {}

    def to(self: FSDPEngine, device: str, *, model: bool = True, optimizer: bool = True) -> None:
        named = {name for name, wanted in (("model", model), ("optimizer", optimizer)) if wanted}
        self._on_host ^= named if self.training else set()  # both places are called cpu here

    def watched(name: str) -> Any:
        real = getattr(FSDPEngine, name)

        def call(self: FSDPEngine, *args: Any) -> Any:
            seen.setdefault(name, []).append(set(self._on_host))
            return real(self, *args)

        return call

    monkeypatch.setattr(FSDPEngine, "to", to)
    for name in ("train_batch", "infer_step", "describe"):
        monkeypatch.setattr(FSDPEngine, name, watched(name))
    assert train(f"model.offload={offload}", "loop.total_steps=4", "loop.eval_interval=2") == 0
    away = {"none": set(), "optimizer": {"optimizer"}, "all": {"model", "optimizer"}}[offload]
    assert seen["describe"] == [away]  # before the first step
    assert seen["train_batch"] == [set()] * 4
    assert seen["infer_step"] == [away & {"optimizer"}] * len(seen["infer_step"])
    assert len(seen["infer_step"]) > 1


@pytest.mark.parametrize(
    "wrong", [{"precision": "bf17"}, {"activation_checkpointing": "ful"}, {"offload": "optimiser"}], ids=str
)
def test_settings_that_are_none_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(UserError, match=rf"Settings: \w+='{next(iter(wrong.values()))}' is none of"):
        Settings(**wrong)  # type: ignore[arg-type]


def test_calls_out_of_order_are_told() -> None:
    batch = PackedBatch.from_sequences([torch.arange(3, 9)])
    engine = LanguageModelEngine(LanguageModelEngine.build_model(ModelSource(None, overrides_of("qwen3"))), alone())
    with pytest.raises(UserError, match=r"infer_batch\(\) needs initialize\(\)"):
        engine.infer_batch(batch, ["log_probs"])
    engine.initialize()
    with pytest.raises(UserError, match=r"initialize\(\) was called before"):
        engine.initialize()
    with pytest.raises(UserError, match=r"a step needs initialize\(optimizer=\.\.\.\)"):
        engine.train_batch([batch], lambda b: (engine.model(b, ["loss"])["loss"], b.num_loss_tokens))
    with pytest.raises(UserError, match="outputs per token, and loss is one number"):
        engine.infer_batch(batch, ["log_probs", "loss"])
    with pytest.raises(UserError, match="LanguageModel does not provide"):
        engine.infer_batch(batch, ["logprobs"])
    with pytest.raises(UserError, match="costs 6 tokens, more than the budget of 0"):
        engine.infer_batch(batch, ["log_probs"], budget=0)


def test_a_sequence_that_is_too_long_on_one_rank_is_refused_on_all(ranks2) -> None:
    said = ranks2.run(too_long)
    assert said == ["sequence 0 costs 17 tokens, more than the budget of 10"] * 2


def too_long() -> str:
    world = World.join("cpu", timeout=30.0)
    model = LanguageModelEngine.build_model(ModelSource(None, overrides_of("qwen3")))
    engine = LanguageModelEngine(model, Layout.of(world, parallel(shard=2)))
    engine.initialize()
    batch = PackedBatch.from_sequences([torch.arange(3, 20 if world.rank else 9)])
    with pytest.raises(UserError) as caught:
        engine.infer_batch(batch, ["log_probs"], budget=10)
    world.close()
    return str(caught.value).split(":")[0]


def test_a_layout_has_as_many_ranks_as_there_are_processes() -> None:
    """One of a single rank, on each of two, would say that both have the same data, and reduce over both."""
    with pytest.raises(UserError, match=r"a layout of 1 rank\(s\) for 2 process\(es\): use Layout\.of"):
        Layout(World(0, 2, 0, 2, torch.device("cpu")))


def test_a_loss_of_experts_that_nobody_adds_is_told(monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(build.LOGGER, "warning", said.append)
    for wanted in (False, True):
        config = overrides_of("qwen3_moe") | {"output_router_logits": wanted}
        LanguageModelEngine(LanguageModelEngine.build_model(ModelSource(None, config)), alone()).initialize()
        assert [text.split()[0] for text in said] == ["output_router_logits"] * wanted


def test_results_that_are_kept_and_changed_in_place_are_told_of() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](x))

    def step(how: str) -> None:
        engine = FSDPEngine(Net(), alone(), Settings(activation_checkpointing=how))
        engine.initialize(lambda model: torch.optim.SGD(model.parameters(), 0.1))
        engine.train_batch([torch.ones(3, 4)], lambda x: (engine.model(x).sum(), 1))

    step("full")
    with pytest.raises(
        UserError, match=r"Sequential changes one of them in place\. Set model\.activation_checkpointing=full"
    ):
        step("selective")


@pytest.mark.parametrize("size", ["nan", "inf", "0"])
def test_files_of_no_size_are_refused(size: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "meta.json").write_text("{}")
    assert main(["merge", str(tmp_path), str(tmp_path / "out"), "--max-file-gb", size]) == EXIT_USER_ERROR
    assert "must be a positive size" in capsys.readouterr().err
