"""What trainings do with a model on pipeline stages: a second model, several calls, generation, half precision."""

import pytest
import torch
from conftest import CAMPAIGN
from families import overrides_of
from lora_models import pretrained
from test_distil import Distil, recipe_of
from test_reward import NoLog
from tiny_engines import (
    ALONE,
    adamw,
    assert_close,
    engine_of,
    gradients,
    loss_of,
    message_of,
    packed,
    share_of,
    weights,
)
from torch.nn import functional as F

from mvp_engine.hf import LanguageModel
from mvp_engine.kit import Lora, MLLMModelKit
from mvp_engine.kit.decoding import Decoding, complete
from mvp_engine.model_engine import ModelSource, ValueModelEngine
from mvp_engine.ops.linear_cross_entropy import map_logits

PAIRS = [packed(7, 5, 4, 9), packed(3, 8), packed(6, 6)]
TIED = {**overrides_of("qwen3"), "tie_word_embeddings": True}


def model_of(seed, layout, **settings):
    return engine_of(TIED, layout, seed=seed, **settings)


def frozen(layout):
    model = LanguageModel.on_meta(None, TIED).requires_grad_(False)
    return engine_of(model, layout, optimizer=None, seed=6)


def distil(layout):
    student, teacher = model_of(5, layout), frozen(layout)
    settings = Distil(teacher="x", temperature=0.7, nll=0.3)
    engine = recipe_of(settings, student.model, teacher)
    return student, lambda batch: engine.forward_step(NoLog(), batch)


def dpo(layout):
    policy, reference = model_of(5, layout), frozen(layout)

    def sums(engine, batch):
        log_probs_T = engine.model(batch, ["log_probs"])["log_probs"]
        return torch.stack([one.sum() for one in log_probs_T.split(batch.lengths.tolist())])

    def step(batch):
        with reference.eval_mode():
            of_reference = sums(reference, batch)
        ratios = sums(policy, batch) - of_reference
        return -F.logsigmoid(0.3 * (ratios[::2] - ratios[1::2])).sum(), len(ratios) / 2

    return policy, step


def two_calls(layout):
    """Two forwards with gradients, of different lengths, and a third whose outputs the loss does not use."""
    engine = model_of(5, layout)

    def step(batch):
        first = engine.model(batch, ["log_probs"])["log_probs"]
        second = engine.model(batch.select([0]), ["entropy"])["entropy"]
        engine.model(batch.select([1]), ["loss"])
        return -first.sum() * (1 + second.mean()), batch.num_loss_tokens

    return engine, step


def all_logits(layout):
    """An output of its own that needs all logits of a token."""
    model = LanguageModel.on_meta(None, TIED)
    model.add_output("squares", lambda hidden_TD, head: map_logits(squares, hidden_TD, head))
    engine = engine_of(model, layout, seed=5)
    names = ["squares", "log_probs"]
    return engine, lambda batch: (
        sum(engine.model(batch, names)[name].sum() for name in names),
        batch.num_loss_tokens,
    )


def squares(logits_CV):
    return logits_CV.square().mean(-1)


def stepped(layout):
    """The loss and the gradients of each kind of step, and completions."""
    found = {}
    for build in (distil, dpo, two_calls, all_logits):
        engine, step = build(layout)
        engine.train_batch(share_of(layout, PAIRS), step)
        found[build.__name__] = engine.step_status()[0].loss, gradients(engine.model)
    decoding = Decoding(max_new_tokens=5, samples=2, temperature=1.0, seed=3)
    completions = complete(model_of(5, layout), PAIRS[0], decoding)
    return found, [list(one.tokens) for one in completions]


def assert_part(found, expected, what=""):
    """A stage has the gradients of one rank for the parameters that it holds."""
    assert found
    assert_close(found, {name: expected[name] for name in found}, floor=1e-3, what=what)


@pytest.mark.parametrize(
    "sizes", [{"pipeline": 2}, pytest.param({"pipeline": 2, "shard": 2}, marks=CAMPAIGN)], ids=str
)
def test_pipeline_with_two_models_several_calls_and_generation_equals_one_rank(on_ranks, sizes):
    expected, completions = stepped(ALONE)
    for found, tokens in on_ranks(sizes, stepped):
        assert tokens == completions
        for name, (loss, grads) in found.items():
            assert loss == pytest.approx(expected[name][0], rel=1e-5), name
            assert_part(grads, expected[name][1], name)


def in_precision(layout, precision):
    engine = model_of(5, layout, precision=precision)
    numbers = engine.train_batch(PAIRS, loss_of(engine))
    hidden = engine.infer_batch(PAIRS[0], ["hidden_states"])["hidden_states"].float()
    return float(engine.step_status()[0].loss or 0), float(numbers.grad_norm), hidden


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_pipeline_in_half_precision_equals_one_rank_in_half_precision(on_ranks, precision):
    expected = in_precision(ALONE, precision)
    for loss, norm, hidden in on_ranks({"pipeline": 2}, in_precision, precision):
        assert loss == pytest.approx(expected[0], rel=1e-5)
        assert norm == pytest.approx(expected[1], rel=1e-3)
        assert torch.allclose(hidden, expected[2], rtol=1e-5, atol=1e-5)


def call_outside_of_a_step(layout):
    engine = model_of(5, layout)
    try:
        engine.model(PAIRS[0], ["loss"])
    finally:
        engine._link.flush()


def test_model_of_stages_called_with_gradients_outside_of_a_step_raises(on_ranks):
    for error in on_ranks({"pipeline": 2}, message_of, call_outside_of_a_step):
        assert "outside of forward_step" in error


def with_lora(layout, base, folder, load):
    """Adapters after two steps, or those of a checkpoint; saved and exported."""
    model = MLLMModelKit(Lora(rank=3)).build(ModelSource(str(base)))
    engine = engine_of(model, layout, lambda model: adamw(model, 1e-2), seed=5)
    if load is not None:
        engine.load_checkpoint(load)
    for _ in range(0 if load else 2):
        engine.train_batch(PAIRS, loss_of(engine))
    engine.save_checkpoint(folder / "saved")
    engine.export_hf(folder / "hf")
    return {name: value for name, value in weights(engine.model).items() if ".lora_" in name}


def test_pipeline_with_lora_trains_saves_and_merges_as_one_rank(on_ranks, tmp_path):
    pretrained(tmp_path / "base")
    one, two, back, again = (tmp_path / name for name in ("one", "two", "back", "again"))
    expected = with_lora(ALONE, tmp_path / "base", one, None)
    results = on_ranks({"pipeline": 2}, with_lora, tmp_path / "base", two, None)
    assert set().union(*results) == set(expected)
    for adapters in results:
        for name, adapter in adapters.items():
            assert torch.allclose(adapter, expected[name], rtol=1e-4, atol=1e-5), name
    with_lora(ALONE, tmp_path / "base", back, two / "saved")
    on_ranks({"pipeline": 2}, with_lora, tmp_path / "base", again, back / "saved")
    exported = [(folder / "hf" / "model.safetensors").read_bytes() for folder in (two, back, again)]
    assert exported[0] == exported[1] == exported[2]


def values(layout):
    engine = engine_of("qwen3", layout, kind=ValueModelEngine, seed=5)

    def step(batch):
        return engine.model(batch, ["values"])["values"].sub(1).square().sum(), batch.num_tokens

    engine.train_batch(PAIRS, step)
    of_tokens = engine.infer_batch(PAIRS[0], ["values"])["values"]
    return engine.step_status()[0].loss, gradients(engine.model), of_tokens


def test_pipeline_of_a_value_model_gives_the_gradients_of_one_rank(on_ranks):
    loss, grads, of_tokens = values(ALONE)
    results = on_ranks({"pipeline": 2}, values)
    assert set(results[0][1]) | set(results[1][1]) == set(grads)
    for result in results:
        assert result[0] == pytest.approx(loss, rel=1e-5)
        assert torch.allclose(result[2], of_tokens, rtol=1e-5, atol=1e-5)
        assert_part(result[1], grads)
