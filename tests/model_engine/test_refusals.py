"""Batches and settings that would train something else, or end in a traceback, are refused with their place."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from families import SMALL, overrides_of, parallel
from test_hf_folders import alone, language_model
from test_packed_layouts import gradients

from mvp_engine.batch import IGNORE, PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.errors import UserError
from mvp_engine.model_engine import FSDPEngine, LanguageModelEngine, ModelSource, Settings, ValueModelEngine


def batch_with(field: str, value: int) -> PackedBatch:
    batch = PackedBatch.from_sequences([torch.arange(3, 9), torch.arange(5, 12)])
    getattr(batch, field)[8] = value
    return batch


@pytest.mark.parametrize(("field", "value"), [("labels", -1), ("labels", 99), ("input_ids", 99), ("input_ids", IGNORE)])
def test_tokens_that_are_none_are_refused_with_their_place(field: str, value: int) -> None:
    engine = language_model(None, **overrides_of("qwen3"))
    with pytest.raises(UserError, match=rf"{field}: {value} at position 2 of sequence 1 is none of the model's 99 tok"):
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


@pytest.mark.parametrize("wrong", [{"precision": "bf17"}, {"recompute": "ful"}, {"offload": "optimiser"}], ids=str)
def test_settings_that_are_none_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(UserError, match=rf"Settings: \w+='{next(iter(wrong.values()))}' is none of"):
        Settings(**wrong)  # type: ignore[arg-type]
