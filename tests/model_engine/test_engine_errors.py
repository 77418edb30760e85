"""User errors of model engines: settings, call order, layouts and in-place changes get a clear message."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from families import overrides_of, parallel
from folders import alone
from torch import nn

from mvp_engine.cli import main
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.errors import EXIT_USER_ERROR, UserError
from mvp_engine.hf.model import adapter
from mvp_engine.model_engine import (
    FSDPEngine,
    LanguageModelEngine,
    ModelSource,
    Settings,
    ValueModelEngine,
)


def test_settings_unknown_compile_backend_is_rejected() -> None:
    model = LanguageModelEngine.build_model(ModelSource(None, overrides_of("qwen3")))
    with pytest.raises(
        UserError, match=r"model\.compile=inducto is no backend .* Did you mean inductor"
    ):
        LanguageModelEngine(model, alone(), Settings(compile="inducto")).initialize()


def test_forward_outputs_on_shards_are_not_views(ranks2) -> None:
    """FSDP2 warns about views: an in-place change of one would lose the hooks that gather the weights."""
    assert ranks2.run(view_warnings) == [[], []]


def view_warnings() -> list[str]:
    world = World.join("cpu")
    layout = Layout.of(world, parallel(shard=2))
    batch = PackedBatch.from_sequences([torch.arange(3, 9)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for kind, output in ((ValueModelEngine, "values"), (LanguageModelEngine, "hidden_states")):
            engine = kind(kind.build_model(ModelSource(None, overrides_of("qwen3"))), layout)
            engine.initialize(lambda model: torch.optim.SGD(model.parameters(), 0.0))
            engine.train_batch(
                [batch], lambda b, e=engine, o=output: (e.model(b, [o])[o].sum(), 1.0)
            )
    world.close()
    return [str(warning.message) for warning in caught if "view" in str(warning.message)]


@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_offload_during_training_moves_model_and_optimizer_for_evaluations(
    offload: str, train, monkeypatch
) -> None:
    """On a CPU nothing moves: this checks the requests. test_cuda_models checks the memory."""
    seen: dict[str, list[set[str]]] = {}

    def watched(name: str) -> Any:
        real = getattr(FSDPEngine, name)

        def call(self: FSDPEngine, *args: Any) -> Any:
            seen.setdefault(name, []).append(set(self._offloader.on_host))
            return real(self, *args)

        return call

    for name in ("train_batch", "infer_micro_batches", "describe"):
        monkeypatch.setattr(FSDPEngine, name, watched(name))
    assert train(f"model.offload={offload}", "loop.total_steps=4", "loop.eval_interval=2") == 0
    away = {"none": set(), "optimizer": {"optimizer"}, "all": {"model", "optimizer"}}[offload]
    assert seen["describe"] == [away]  # before the first step
    assert seen["train_batch"] == [set()] * 4
    assert seen["infer_micro_batches"] == [away & {"optimizer"}] * len(seen["infer_micro_batches"])
    assert len(seen["infer_micro_batches"]) > 1


@pytest.mark.parametrize(
    "wrong",
    [{"precision": "bf17"}, {"activation_checkpointing": "ful"}, {"offload": "optimiser"}],
    ids=str,
)
def test_settings_unknown_value_is_rejected(wrong: dict[str, str]) -> None:
    with pytest.raises(
        UserError, match=rf"Settings: \w+='{next(iter(wrong.values()))}' is none of"
    ):
        Settings(**wrong)  # type: ignore[arg-type]


def test_engine_calls_out_of_order_or_with_bad_arguments_raise() -> None:
    batch = PackedBatch.from_sequences([torch.arange(3, 9)])
    engine = LanguageModelEngine(
        LanguageModelEngine.build_model(ModelSource(None, overrides_of("qwen3"))), alone()
    )
    with pytest.raises(UserError, match=r"infer_batch\(\) needs initialize\(\)"):
        engine.infer_batch(batch, ["log_probs"])
    engine.initialize()
    with pytest.raises(UserError, match=r"initialize\(\) was called before"):
        engine.initialize()
    with pytest.raises(UserError, match=r"a step needs initialize\(optimizer=\.\.\.\)"):
        engine.train_batch(
            [batch], lambda b: (engine.model(b, ["loss"])["loss"], b.num_loss_tokens)
        )
    with pytest.raises(UserError, match="outputs per token, and loss is one number"):
        engine.infer_batch(batch, ["log_probs", "loss"])
    with pytest.raises(UserError, match="LanguageModel does not provide"):
        engine.infer_batch(batch, ["logprobs"])
    with pytest.raises(UserError, match="costs 6 tokens, more than the budget of 0"):
        engine.infer_batch(batch, ["log_probs"], budget=0)


def test_infer_batch_too_long_sequence_on_one_rank_raises_on_all(ranks2) -> None:
    messages = ranks2.run(too_long)
    assert messages == ["sequence 0 costs 17 tokens, more than the budget of 10"] * 2


def too_long() -> str:
    world = World.join("cpu", timeout=100.0)
    model = LanguageModelEngine.build_model(ModelSource(None, overrides_of("qwen3")))
    engine = LanguageModelEngine(model, Layout.of(world, parallel(shard=2)))
    engine.initialize()
    batch = PackedBatch.from_sequences([torch.arange(3, 20 if world.rank else 9)])
    with pytest.raises(UserError) as caught:
        engine.infer_batch(batch, ["log_probs"], budget=10)
    world.close()
    return str(caught.value).split(":")[0]


def test_layout_with_fewer_ranks_than_processes_is_rejected() -> None:
    """A layout of one rank, on each of two, would give both the same data and reduce over both."""
    with pytest.raises(UserError, match=r"a layout of 1 rank for 2 processes: use Layout\.of"):
        Layout(World(0, 2, 0, 2, torch.device("cpu")))


def test_engine_start_router_logits_config_is_warned_about(monkeypatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(adapter.LOGGER, "warning", warned.append)
    for wanted in (False, True):
        config = overrides_of("qwen3_moe") | {"output_router_logits": wanted}
        LanguageModelEngine(
            LanguageModelEngine.build_model(ModelSource(None, config)), alone()
        ).initialize()
        assert [text.split()[0] for text in warned] == ["output_router_logits"] * wanted


def test_selective_activation_checkpointing_with_in_place_change_raises() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)) for _ in range(2)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](x))

    def step(mode: str) -> None:
        engine = FSDPEngine(Net(), alone(), Settings(activation_checkpointing=mode))
        engine.initialize(lambda model: torch.optim.SGD(model.parameters(), 0.1))
        engine.train_batch([torch.ones(3, 4)], lambda x: (engine.model(x).sum(), 1))

    step("full")
    with pytest.raises(
        UserError,
        match=r"Sequential changes one of them in place\. Set model\.activation_checkpointing=full",
    ):
        step("selective")


@pytest.mark.parametrize("size", ["nan", "inf", "0"])
def test_merge_non_positive_file_size_is_rejected(size: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "meta.json").write_text("{}")
    assert (
        main(["merge", str(tmp_path), str(tmp_path / "out"), "--max-file-gb", size])
        == EXIT_USER_ERROR
    )
    assert "must be a positive size" in capsys.readouterr().err
