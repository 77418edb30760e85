"""User errors of model engines: settings, call order, layouts and in-place changes get a clear message."""

import warnings

import pytest
import torch
from conftest import user_error
from families import overrides_of
from tiny_engines import ALONE, counting, engine_of, message_of
from tiny_engines import train as train_step
from torch import nn

from mvp_engine.cli import main
from mvp_engine.distributed import Layout, World
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.model_engine import (
    FSDPEngine,
    LanguageModelEngine,
    ModelSource,
    Settings,
    ValueModelEngine,
)

BATCH = counting(6, start=3)


def language_model(**config):
    return LanguageModelEngine.build_model(ModelSource(None, {**overrides_of("qwen3"), **config}))


def test_settings_unknown_compile_backend_is_rejected():
    with user_error(r"model\.compile=inducto is no backend .* Did you mean inductor"):
        engine_of("qwen3", optimizer=None, compile="inducto")


def test_forward_outputs_on_shards_are_not_views(on_ranks):
    """FSDP2 warns about views: an in-place change of one would lose the hooks that gather the weights."""
    assert on_ranks({"shard": 2}, view_warnings) == [[], []]


def view_warnings(layout):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for kind, name in ((ValueModelEngine, "values"), (LanguageModelEngine, "hidden_states")):
            model = engine_of("qwen3", layout, kind=kind)
            model.train_batch([BATCH], lambda b, e=model, n=name: (e.model(b, [n])[n].sum(), 1.0))
    return [str(warning.message) for warning in caught if "view" in str(warning.message)]


@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_offload_during_training_moves_model_and_optimizer_for_evaluations(
    offload, train, monkeypatch
):
    """On a CPU nothing moves: this checks the requests. test_cuda_models checks the memory."""
    seen = {}

    def watched(name):
        real = getattr(FSDPEngine, name)

        def call(self, *args):
            seen.setdefault(name, []).append(set(self._offloader.on_host))
            return real(self, *args)

        return call

    for name in ("train_batch", "infer_micro_batches", "describe"):
        monkeypatch.setattr(FSDPEngine, name, watched(name))
    assert train(f"model.offload_outside_steps={offload}", "train.max_steps=4", "eval.steps=2") == 0
    away = {"none": set(), "optimizer": {"optimizer"}, "all": {"model", "optimizer"}}[offload]
    assert seen["describe"] == [away]  # before the first step
    assert seen["train_batch"] == [set()] * 4
    assert seen["infer_micro_batches"] == [away & {"optimizer"}] * len(seen["infer_micro_batches"])
    assert len(seen["infer_micro_batches"]) > 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"precision": "bf17"},
        {"activation_checkpointing": "ful"},
        {"offload_outside_steps": "optimiser"},
    ],
    ids=str,
)
def test_settings_unknown_value_is_rejected(wrong):
    value = next(iter(wrong.values()))
    with user_error(rf"Settings: \w+='{value}' is none of"):
        Settings(**wrong)


def test_settings_unknown_activation_checkpointing_lists_the_known_ones():
    for wrong in ("offloaded", {"llm": "offloaded"}):
        with user_error("'offloaded' is none of none, selective, attention, full, offload"):
            Settings(activation_checkpointing=wrong)


def test_engine_calls_out_of_order_or_with_bad_arguments_raise():
    engine = LanguageModelEngine(language_model(), ALONE)
    with user_error(r"infer_batch\(\) needs initialize\(\)"):
        engine.infer_batch(BATCH, ["log_probs"])
    engine.initialize()
    with user_error(r"initialize\(\) was called before"):
        engine.initialize()
    with user_error(r"a step needs initialize\(optimizer=\.\.\.\)"):
        train_step(engine, BATCH)
    with user_error("outputs per token, and loss is one number"):
        engine.infer_batch(BATCH, ["log_probs", "loss"])
    with user_error("LanguageModel does not provide"):
        engine.infer_batch(BATCH, ["logprobs"])
    with user_error("costs 6 tokens, more than the budget of 0"):
        engine.infer_batch(BATCH, ["log_probs"], budget=0)


def test_infer_batch_too_long_sequence_on_one_rank_raises_on_all(on_ranks):
    for message in on_ranks({"shard": 2}, message_of, infer_too_long):
        assert message.startswith("sequence 0 costs 17 tokens, more than the budget of 10:")


def infer_too_long(layout):
    batch = counting(17 if layout.world.rank else 6)
    engine_of("qwen3", layout, optimizer=None).infer_batch(batch, ["log_probs"], budget=10)


def test_layout_with_fewer_ranks_than_processes_is_rejected():
    """A layout of one rank, on each of two, would give both the same data and reduce over both."""
    with user_error(r"a layout of 1 rank for 2 processes: use Layout\.of"):
        Layout(World(0, 2, 0, 2, torch.device("cpu")))


def test_engine_start_router_logits_config_is_warned_about(logged):
    texts = logged()
    for wanted in (False, True):
        config = overrides_of("qwen3_moe") | {"output_router_logits": wanted}
        engine_of(config, optimizer=None)
        assert [text.split()[0] for text in texts] == ["output_router_logits"] * wanted


def test_selective_activation_checkpointing_with_in_place_change_raises():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            blocks = [nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)) for _ in range(2)]
            self.layers = nn.ModuleList(blocks)

        def forward(self, x):
            return self.layers[1](self.layers[0](x))

    def step(mode):
        engine = engine_of(Net(), kind=FSDPEngine, activation_checkpointing=mode)
        engine.train_batch([torch.ones(3, 4)], lambda x: (engine.model(x).sum(), 1))

    step("full")
    message = r"Sequential changes one of them in place\. Set model\.activation_checkpointing=full"
    with user_error(message):
        step("selective")


@pytest.mark.parametrize("size", ["nan", "inf", "0"])
def test_merge_non_positive_file_size_is_rejected(size, tmp_path, capsys):
    (tmp_path / "meta.json").write_text("{}")
    words = ["export", str(tmp_path), str(tmp_path / "out"), "--max-file-gb", size]
    assert main(words) == EXIT_USER_ERROR
    assert "must be a positive size" in capsys.readouterr().err
