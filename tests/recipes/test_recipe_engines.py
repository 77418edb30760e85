"""Engines of recipes show their experiment: short, near to EngineHooks, in one order, with the loss in the file."""

import ast
import inspect
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, recipe_step
from test_loss import Logged, batch, model

from mvp_engine.config.engine_class import find_engine
from mvp_engine.engine.hooks import EngineHooks
from mvp_engine.kit import TokenLoss, TokenNormedLossKit

RECIPES = sorted(file.parent.name for file in (ROOT / "recipes").glob("*/engine.py"))
ORDER = ["prepare_model", "prepare_optimizer", "prepare_scheduler", "forward_step"]
EVALUATION = {"eval_step", "eval_end", "score"}


def engine_of(recipe):
    return find_engine(recipe, ROOT)[0]


def depth(engine_class):
    """Classes above an engine, up to EngineHooks: what a reader opens to know all that it does."""
    return sum(issubclass(base, EngineHooks) for base in engine_class.__mro__[1:])


def engine_methods(engine_class):
    """The methods that a class defines itself, in the order of the file."""
    (node,) = ast.parse(inspect.getsource(engine_class)).body
    return [child.name for child in node.body if isinstance(child, ast.FunctionDef)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_engine_of_a_recipe_is_short_and_at_most_three_classes_deep(recipe):
    file = ROOT / "recipes" / recipe / "engine.py"
    assert len(file.read_text().splitlines()) <= 150
    names = {base.__name__ for base in engine_of(recipe).__mro__}
    if {"RLEngine", "MLLMEngine"} <= names:
        pytest.skip("RLEngine derives from MLLMEngine")
    assert depth(engine_of(recipe)) <= 3, names


@pytest.mark.parametrize("recipe", RECIPES)
def test_engine_of_a_recipe_has_model_optimizer_step_and_evaluation_in_this_order(recipe):
    engine_class = engine_of(recipe)
    methods = engine_methods(engine_class)
    if not engine_class.trains_in_process:
        pytest.skip("a controller of worker groups: its optimizers are those of the groups")
    assert {"prepare_model", "forward_step"} <= set(methods)
    assert [name for name in methods if name in ORDER] == [
        name for name in ORDER if name in methods
    ]
    assert not EVALUATION & set(methods[: methods.index("forward_step")])


@pytest.mark.parametrize("recipe", ["sft", "digits_vlm", "qwen_audio"])
@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.2, "z_loss": 1e-3}], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_step_of_a_recipe_is_bit_equal_to_one_call_of_the_loss_kit(recipe, settings, weighted):
    kit = TokenNormedLossKit(TokenLoss(**settings))

    def computed(step_of):
        net, packed, ctx, by_token = model(), batch(), Logged(), []
        if weighted:
            packed.token_fields["weight"] = torch.linspace(0, 2, packed.num_tokens)
        loss, weight = step_of(net, ctx, by_token)(packed)
        loss.backward()
        grads = [param.grad for param in net.parameters()]
        return [loss.detach(), weight, *by_token, *grads], ctx.logged

    def of_recipe(net, ctx, by_token):
        data = SimpleNamespace(log_sources=lambda _ctx, _batch, losses_T: by_token.append(losses_T))
        return recipe_step(recipe, ctx, model=net, loss=kit, data=data)

    values, logged = computed(of_recipe)
    expected, logged_by_kit = computed(
        lambda net, ctx, by_token: lambda packed: kit(ctx, net, packed, by_token.append)
    )
    assert logged == logged_by_kit
    assert len(values) == len(expected) > 3
    assert all(torch.equal(one, other) for one, other in zip(values, expected, strict=True))
