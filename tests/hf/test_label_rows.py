"""The head runs on the tokens with a label where nothing else is asked for, with the results of all tokens."""

import pytest
import torch
from tiny_engines import assert_close, gradients
from tiny_models import shared_model

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.model import language_model


def batch_with(share):
    """A batch of which this share of the tokens has a label."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(99, (length,), generator=generator) for length in (9, 1, 14)]
    masks = [torch.rand(len(one), generator=generator) < share for one in ids]
    return PackedBatch.from_sequences(ids, masks)


def computed(model, names, temperature):
    """Outputs and gradients."""
    model.zero_grad()
    outputs = model(batch_with(0.4), names, temperature=temperature)
    for value in outputs.values():
        weights = 1 + torch.arange(value.numel()).view_as(value)
        (value * weights).sum().backward(retain_graph=True)
    return {name: value.detach() for name, value in outputs.items()}, gradients(model)


@pytest.mark.parametrize(
    "names, temperature", [(["loss"], None), (["log_probs", "label_entropy"], 0.7)]
)
def test_head_on_labelled_tokens_equals_head_on_all(names, temperature, monkeypatch):
    model = shared_model(LanguageModel, "qwen3")
    sizes = []
    head = model._head_outputs

    def spy(hidden, *rest):
        sizes.append(len(hidden))
        return head(hidden, *rest)

    monkeypatch.setattr(model, "_head_outputs", spy)
    few = computed(model, names, temperature)
    monkeypatch.setattr(language_model, "MOST_LABELS", 0.0)
    full = computed(model, names, temperature)
    batch = batch_with(0.4)
    assert sizes == [int((batch.labels != IGNORE).sum()), batch.num_tokens]
    for found, expected in zip(few, full, strict=True):
        assert_close(found, expected)


def test_batch_without_labels_has_a_loss_with_gradient():
    model = shared_model(LanguageModel, "qwen3")
    loss = model(batch_with(0.0), ["loss"])["loss"]
    loss.backward()
    assert loss.item() == 0


def test_labels_changed_on_the_device_are_not_read_on_the_host():
    batch = batch_with(0.4)
    moved = batch.to("meta")
    assert moved.host_labels is batch.labels
    moved.labels = moved.labels.clone()
    assert moved.host_labels is None
