"""Distillation: chunked divergences equal those of full logits, packed on any split and layout, with any two heads."""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT, user_error
from families import overrides_of, parallel
from test_policy_loss import LAYOUTS, SPLITS, alone, assert_equal, padded, padded_model, sequences
from test_reward import NoLog

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.hf import LanguageModel
from mvp_engine.imports import import_file
from mvp_engine.kit.preference import Head, Teacher, linear_kl
from mvp_engine.model_engine import LanguageModelEngine, Settings

RECIPE = ROOT / "recipes" / "distil"
StudentEngine: Any = import_file(RECIPE / "engine.py").StudentEngine
Distil: Any = import_file(RECIPE / "settings.py").Distil
STUDENT, TEACHER = 5, 6  # seeds of their weights
LOSSES = [
    Distil(teacher="x"),
    Distil(teacher="x", divergence="reverse", temperature=1.7),
    Distil(teacher="x", temperature=0.6, nll=0.3),
]


def engine_of(seed, layout, **changed):
    model = LanguageModel.on_meta(None, {**overrides_of("qwen3"), **changed})
    model.chunk = 7  # several chunks in each micro-batch
    engine = LanguageModelEngine(model, layout, Settings(seed=seed))
    engine.initialize(lambda model: torch.optim.SGD(model.parameters(), 0.0))
    return engine


def recipe_of(settings, student, teacher):
    """The engine of the recipe, without a run: a student and its teacher."""
    engine = object.__new__(StudentEngine)
    engine.config, engine.model = SimpleNamespace(distil=settings), student
    engine.teacher = Teacher(settings.teacher, student, teacher, engine.divergence)
    return engine


def packed(rows):
    ids, masks = ([sequences()[row][place] for row in rows] for place in range(2))
    return PackedBatch.from_sequences(ids, masks)


def all_losses(sizes, splits):
    world = World.join("cpu")
    layout = Layout.of(world, parallel(**sizes))
    student, teacher = (engine_of(seed, layout) for seed in (STUDENT, TEACHER))
    found = []
    for settings, split in product(LOSSES, splits):
        forward = partial(recipe_of(settings, student.model, teacher).forward_step, NoLog())
        student.optimizer_zero_grad()
        own = [packed(rows) for rows in split[layout.data_rank :: layout.data_size]]
        totals = student.forward_backward_batch(own, forward)
        loss, weight = (sum(each) for each in zip(*world.all_gather(totals.tolist()), strict=True))
        named = student.model.named_parameters()
        grads = {
            n: full_tensor(p.grad).clone() / weight * layout.model_parallel_size for n, p in named
        }
        found.append((loss / weight, grads))
        assert all(param.grad is None for param in teacher.model.parameters())
    world.close()
    return found


def padded_loss(settings):
    """From the full logits of both models on one padded batch."""
    input_ids = padded([ids for ids, _ in sequences()])
    attention = padded([torch.ones_like(ids) for ids, _ in sequences()])
    mask = padded([mask.long() for _, mask in sequences()])[:, 1:].bool()
    logits = [
        padded_model(seed)(input_ids=input_ids, attention_mask=attention).logits
        for seed in (STUDENT, TEACHER)
    ]
    p, q = (each[:, :-1].float().div(settings.temperature).log_softmax(-1) for each in logits)
    q = q.detach()
    forward, reverse = (q.exp() * (q - p)).sum(-1), (p.exp() * (p - q)).sum(-1)
    nll = -logits[0][:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]
    terms = (reverse if settings.divergence == "reverse" else forward) + settings.nll * nll
    return terms[mask].mean()


@cache
def expected():
    found = []
    for settings in LOSSES:
        model = padded_model(STUDENT)
        model.zero_grad()
        loss = padded_loss(settings)
        loss.backward()
        found.append(
            (float(loss.detach()), {f"hf.{n}": p.grad.clone() for n, p in model.named_parameters()})
        )
    return found


def test_distil_losses_and_gradients_equal_full_logits_in_any_split():
    for place, one in enumerate(all_losses({}, SPLITS)):
        assert_equal(one, expected()[place // len(SPLITS)], LOSSES[place // len(SPLITS)])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_distil_losses_and_gradients_equal_full_logits_on_two_ranks(ranks2, sizes):
    for of_rank in ranks2.run(all_losses, sizes, SPLITS[1:]):
        for one, wanted, settings in zip(of_rank, expected(), LOSSES, strict=True):
            assert_equal(one, wanted, (sizes, settings))


@pytest.mark.parametrize("reverse", [False, True])
def test_linear_kl_of_heads_with_bias_softcap_and_scale_equals_full_logits(reverse):
    torch.manual_seed(0)
    T, V = 11, 23
    student = Head(
        torch.randn(V, 6, requires_grad=True), torch.randn(V, requires_grad=True), 1.5, 3.0
    )
    teacher = Head(torch.randn(V, 9), torch.randn(V), 0.5, 2.0)
    hidden, of_teacher = torch.randn(T, 6, requires_grad=True), torch.randn(T, 9)
    weights = torch.randn(T)

    def full(head, states):
        logits = (states @ head.weight.T + head.bias) * head.scale
        return (head.softcap * torch.tanh(logits / head.softcap) / 0.8).log_softmax(-1)  # type: ignore[operator]

    p, q = full(student, hidden), full(teacher, of_teacher)
    wanted = (p.exp() * (p - q)).sum(-1) if reverse else (q.exp() * (q - p)).sum(-1)
    found = linear_kl(
        hidden, student, of_teacher, teacher, reverse=reverse, temperature=0.8, chunk=4
    )
    assert torch.allclose(found, wanted, atol=1e-6)
    leaves = (hidden, student.weight, student.bias)
    grads = [torch.autograd.grad((each * weights).sum(), leaves) for each in (found, wanted)]
    for one, two in zip(*grads, strict=True):
        assert torch.allclose(one, two, atol=1e-5)


def test_distil_student_equal_to_teacher_has_no_divergence_and_no_gradient():
    student, teacher = engine_of(STUDENT, alone()), engine_of(STUDENT, alone())
    engine = recipe_of(LOSSES[0], student.model, teacher)
    loss, _ = engine.forward_step(NoLog(), packed([0, 1, 2]))
    loss.backward()
    assert abs(float(loss.detach())) < 1e-5
    assert all(param.grad.abs().max() < 1e-5 for param in student.model.parameters())


def test_distil_teacher_of_another_vocabulary_raises():
    teacher = engine_of(TEACHER, alone(), vocab_size=100)
    with user_error("100 rows in its output embedding, the student has 99"):
        recipe_of(LOSSES[0], engine_of(STUDENT, alone()).model, teacher)
