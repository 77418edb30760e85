"""ModelAdapter: plain modules have one, and that of Hugging Face models has the same methods."""

import inspect

import torch
from conftest import user_error
from torch import nn

from mvp_engine.hf.model.adapter import HFAdapter, ModelAdapter, adapter_of


def test_hf_adapter_has_the_methods_and_parameters_of_the_plain_adapter():
    for name, method in vars(ModelAdapter).items():
        if name.startswith("_"):
            continue
        own = getattr(HFAdapter, name)
        if inspect.isfunction(method):
            assert list(inspect.signature(own).parameters) == list(
                inspect.signature(method).parameters
            ), name


def test_plain_module_without_a_folder_cannot_be_exported():
    adapter = adapter_of(nn.Linear(2, 2))
    assert type(adapter) is ModelAdapter
    with user_error("Linear is no Hugging Face model"):
        adapter.named_full_tensors(torch.float32)


def test_model_with_its_own_adapter_is_used_through_it():
    class Model(nn.Module):
        def engine_adapter(self):
            return "own"

    assert adapter_of(Model()) == "own"
