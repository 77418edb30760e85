"""CUDA graphs of decoding: fixed shapes give the tokens of an eager decoding, also when completions end early."""

from dataclasses import replace

import pytest
import torch
from families import VISION
from tiny_models import build_model, samples

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.hf import LanguageModel
from mvp_engine.kit import decoding
from mvp_engine.kit.decoding import Decoding, complete
from mvp_engine.model_engine import LanguageModelEngine, Settings

DECODING = Decoding(max_new_tokens=20, temperature=2.0, samples=3, stop={*range(15)})


def built(name, device, precision="fp32"):
    model = build_model(LanguageModel, name)
    texts = [PackedBatch.from_sequences([torch.arange(3, n)]) for n in (9, 30, 6)]
    ones = samples(model, name) if name in VISION else texts
    world = World(0, 1, 0, 1, torch.device(device))
    engine = LanguageModelEngine(model, Layout(world), Settings(precision=precision))
    engine.initialize()
    return engine, PackedBatch.concat(ones)


def tokens(completions):
    return [one.tokens for one in completions]


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma2"])
def test_complete_with_fixed_shapes_is_equal(name, monkeypatch):
    engine, prompts = built(name, "cpu")
    expected = complete(engine, prompts, DECODING)
    assert len({len(one.tokens) for one in expected}) > 2
    captured = []
    monkeypatch.setattr("mvp_engine.kit.decoding.is_supported", lambda _: True)
    monkeypatch.setattr("mvp_engine.kit.decoding.REPLAYS", 2)
    monkeypatch.setattr(decoding, "capture", lambda forward, _: captured.append(forward) or forward)
    found = complete(engine, prompts, DECODING)
    assert tokens(found) == tokens(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=2e-5)
    assert 1 < len(captured) < 8  # fewer sequences


def test_complete_without_graph_if_the_forward_cannot_be_captured(monkeypatch, capsys):
    engine, prompts = built("qwen3", "cpu")
    expected = complete(engine, prompts, DECODING)

    def capture(forward, _):
        forward()
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(
        "mvp_engine.kit.decoding.is_supported",
        lambda engine: engine.model not in decoding._NOT_CAPTURED,
    )
    monkeypatch.setattr(decoding, "capture", capture)
    assert tokens(complete(engine, prompts, DECODING)) == tokens(expected)
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.endswith(
        "without a CUDA graph, more slowly: operation not permitted when stream is capturing"
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3_vl", "qwen2_5_vl", "gemma2", "gemma3", "llava", "qwen3_moe"]
)
def test_cuda_graph_gives_the_tokens_of_eager_decoding(name, monkeypatch, capsys):
    engine, prompts = built(name, "cuda:0")
    found = complete(engine, prompts, DECODING)
    assert "CUDA graph" not in capsys.readouterr().err
    assert decoding.is_supported(engine) == (name != "qwen3_moe")
    monkeypatch.setattr("mvp_engine.kit.decoding.is_supported", lambda _: False)
    assert tokens(found) == tokens(complete(engine, prompts, DECODING))


@pytest.mark.gpu
def test_cuda_graph_in_bf16_has_the_log_probs_of_eager_decoding(
    monkeypatch,
):
    engine, prompts = built("qwen3", "cuda:0", "bf16")
    greedy = replace(DECODING, temperature=0.0, samples=1, stop=())
    found = complete(engine, prompts, greedy)
    assert not torch.is_autocast_enabled("cuda")
    monkeypatch.setattr("mvp_engine.kit.decoding.is_supported", lambda _: False)
    for one, other in zip(found, complete(engine, prompts, greedy), strict=True):
        assert one.log_probs[0] == pytest.approx(other.log_probs[0], abs=0.02)
        assert one.log_probs[1] == pytest.approx(other.log_probs[1], abs=0.05)
