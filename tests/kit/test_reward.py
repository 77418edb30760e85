"""Reward models: Bradley-Terry and regression on any split and layout equal a padded reference; exports score alike."""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from conftest import ROOT, user_error
from families import config_of, overrides_of, parallel
from folders import alone
from test_preference_loss import PLAIN, SPLITS, packed, rows

from mvp_engine.config import compose
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.engine import StepContext
from mvp_engine.hf import ValueModel
from mvp_engine.imports import import_file
from mvp_engine.kit.loss import last_token_scores
from mvp_engine.model_engine import ModelSource, Settings, ValueModelEngine

RECIPE = ROOT / "recipes" / "reward_model"
ReviewsEngine: Any = import_file(RECIPE / "engine.py").ReviewsEngine
RewardLoss: Any = import_file(RECIPE / "settings.py").RewardLoss
LOSSES = [
    RewardLoss(margin="gap", centring=0.05),
    RewardLoss(target="gap"),
    RewardLoss(target="gap", huber=0.2),
]


class NoLog(StepContext):
    def __init__(self): ...

    def log(self, *_): ...  # type: ignore[override]

    def count(self, *_): ...


def engine_on(layout):
    engine = ValueModelEngine(
        ValueModel.on_meta(None, overrides_of("qwen3")), layout, Settings(seed=5)
    )
    engine.initialize(lambda model: torch.optim.SGD(model.parameters(), 0.0))
    return engine


def pairs(chosen):
    batch = packed(chosen)
    batch.sequence_fields["gap"] = 0.1 * batch.sequence_fields["sample"].float()
    return batch


def step(layout, splits):
    engine, found = engine_on(layout), []
    for settings, split in product(LOSSES, splits):
        recipe = object.__new__(ReviewsEngine)
        recipe.config, recipe.model = SimpleNamespace(reward_loss=settings), engine.model
        forward = partial(recipe.forward_step, NoLog())
        own = [pairs(chosen) for chosen in split[layout.data_rank :: layout.data_size]]
        engine.optimizer_zero_grad()
        totals = engine.forward_backward_batch(own, forward)
        loss, weight = (
            sum(each) for each in zip(*layout.world.all_gather(totals.tolist()), strict=True)
        )
        same = layout.model_parallel_size
        named = engine.model.named_parameters()
        grads = {
            n: full_tensor(p.grad).clone() / weight * same for n, p in named if p.grad is not None
        }
        found.append((loss / weight, grads))
    return found


def on_ranks(sizes):
    world = World.join("cpu")
    result = step(Layout.of(world, parallel(**sizes)), SPLITS[1:])
    world.close()
    return result


@cache
def classifier():
    """transformers' own sequence classifier with the weights of the engine."""
    config = config_of("qwen3")
    config.num_labels, config.pad_token_id = 1, 0
    model = hf.Qwen3ForSequenceClassification._from_config(config, attn_implementation="eager")
    state = engine_on(alone()).model.state_dict()
    model.load_state_dict(
        {name.replace("hf.", "model.", 1): value for name, value in state.items()}
    )
    return model


def padded_scores(model, sequences):
    longest = max(map(len, sequences))
    ids = torch.stack([torch.nn.functional.pad(one, (0, longest - len(one))) for one in sequences])
    mask = torch.stack([torch.arange(longest) < len(one) for one in sequences]).long()
    return model(input_ids=ids, attention_mask=mask).logits[:, 0]


def padded_loss(settings):
    model, losses = classifier(), []
    for row, sides in enumerate(rows()):
        scores = padded_scores(model, [ids for ids, _ in sides])
        error = (scores - 0.1 * row).abs()
        if settings.huber is not None:
            d = settings.huber
            losses += list(torch.where(error < d, error**2 / 2, d * (error - d / 2)))
        elif settings.target is not None:
            losses += list(error**2)
        elif row != PLAIN:
            chosen, rejected = scores
            losses.append(
                -torch.sigmoid(chosen - rejected - 0.1 * row).log()
                + 0.05 * (chosen + rejected) ** 2
            )
    return torch.stack(losses).mean()


@cache
def expected():
    found = []
    for settings in LOSSES:
        model = classifier()
        model.zero_grad()
        loss = padded_loss(settings)
        loss.backward()
        named = model.named_parameters()
        grads = {
            n.replace("model.", "hf.", 1): p.grad.clone() for n, p in named if p.grad is not None
        }
        found.append((float(loss.detach()), grads))
    return found


def assert_equal(found):
    splits = len(found) // len(LOSSES)
    for place, (loss, grads) in enumerate(found):
        wanted = expected()[place // splits]
        assert loss == pytest.approx(wanted[0], abs=1e-5)
        for name, grad in grads.items():
            assert torch.allclose(grad, wanted[1][name], rtol=1e-5, atol=1e-5), name


def test_reward_loss_and_gradients_equal_padded_reference_in_any_split():
    assert_equal(step(alone(), SPLITS))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"shard": 2}, {"ulysses": 2}, {"context": 2}], ids=str)
def test_reward_loss_and_gradients_equal_padded_reference_on_two_ranks(ranks2, sizes):
    for found in ranks2.run(on_ranks, sizes):
        assert_equal(found)


def test_reward_export_scores_alike_and_continued_folder_keeps_the_head(tmp_path):
    engine = engine_on(alone())
    engine.export_hf(tmp_path / "reward")
    batch = pairs([0, 1, 2])
    scores = last_token_scores(engine.infer_batch(batch, ["values"])["values"], batch)
    model: Any = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward").eval()
    model.config.pad_token_id = 0
    with torch.no_grad():
        found = padded_scores(model, list(batch.input_ids.split(batch.lengths.tolist())))
    assert torch.allclose(found, scores, atol=1e-6)
    again = ValueModelEngine(
        ValueModelEngine.build_model(ModelSource(str(tmp_path / "reward"))), alone()
    )
    again.initialize()
    assert torch.equal(again.model.score.weight, engine.model.score.weight)


@pytest.mark.parametrize(
    "words, message",
    [
        (["reward_loss.target=points"], "reward_loss.target=points is no column of numbers"),
        (["reward_loss.target=gap", "reward_loss.centring=0.1"], "rows with a score are no pairs"),
        (["reward_loss.target=null"], "or reward_loss.target to a column of scores"),
        (
            ["reward_loss.target=null", "data.pairs=true", "reward_loss.huber=1.0"],
            "pairs have no targets",
        ),
    ],
    ids=str,
)
def test_reward_config_that_does_not_fit_its_rows_raises(words, message):
    file = ROOT / "recipes" / "reward_model" / "configs" / "cpu.yaml"
    valid = "data.pairs=false reward_loss.margin=null reward_loss.centring=0 reward_loss.target=gap".split()
    compose(file, valid)
    with user_error(message):
        compose(file, [*valid, *words])
