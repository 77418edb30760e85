"""The model engine's API is enforced, and the page that says how to add a type and a backend is true."""

import re

import pytest
import torch
from conftest import CAMPAIGN, ROOT, user_error
from families import overrides_of, refusal
from test_packed_layouts import batch, gradients
from tiny_engines import ALONE, LM, assert_close, engine_of, message_of
from tiny_engines import gradients as gradients_of

from mvp_engine.hf.model import tp_plan
from mvp_engine.model_engine import (
    FSDPEngine,
    LanguageModelEngine,
    ModelEngine,
    engine_class,
    register,
)

PAGE = ROOT / "docs" / "model_engine.md"
CALLS = """initialize train_mode eval_mode forward_backward_batch optimizer_zero_grad optimizer_step lr_scheduler_step
train_batch infer_batch to save_checkpoint load_checkpoint export_hf get_per_tensor_param
data_parallel_rank data_parallel_size data_parallel_group is_mp_src_rank_with_outputs"""


def adam(model):
    return torch.optim.AdamW(model.parameters(), 1e-3)


def constant(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def test_model_engine_api_is_complete_and_on_its_page():
    class Half(ModelEngine):
        def initialize(self, optimizer=None, scheduler=None):
            pass

    with pytest.raises(TypeError, match="abstract method"):
        Half(torch.nn.Linear(2, 2), ALONE)
    page = PAGE.read_text()
    for name in CALLS.split():
        assert hasattr(ModelEngine, name)
        assert f"`{name}`" in page or name in ("optimizer_zero_grad", "lr_scheduler_step")


def test_registry_unknown_and_duplicate_names_are_refused(train, capsys):
    message = r"model\.type=langage_model on model\.backend=fsdp is not registered"
    with user_error(message):
        engine_class("langage_model")
    message = r"model\.backend=megatro is not registered\. Did you mean megatron"
    with user_error(message):
        engine_class("language_model", "megatro")
    with pytest.raises(ValueError, match="is FSDPEngine already"):
        register("module", "fsdp")(LanguageModelEngine)
    assert engine_class("module") is FSDPEngine
    assert train("model.type=language_model model.backend=mcore", config=LM) == 2
    known = "language_model on fsdp, language_model on megatron, module on fsdp"
    assert known in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, how",
    [
        ("qwen3", {"activation_checkpointing": "full"}),
        ("qwen3", {"activation_checkpointing": "selective"}),
        ("gpt_oss", {"activation_checkpointing": "selective"}),  # biases are added in place
        pytest.param("qwen3", {"compile": "aot_eager"}, marks=CAMPAIGN),  # see test_compiled.py
    ],
    ids=str,
)
def test_activation_checkpointing_and_compile_give_equal_gradients(family, how):
    assert_close(gradients(family, ALONE, **how), gradients(family, ALONE), floor=0.1)


def test_activation_checkpointing_of_a_block_used_twice_gives_equal_gradients():
    """For images and for videos, say; autocast would cast their weights only once."""

    def gradients_of_two_forwards(mode):
        engine = engine_of("qwen3", activation_checkpointing=mode, precision="bf16")

        def twice(given):
            loss = engine.model(given, ["loss"])["loss"]
            return loss + engine.model(given, ["entropy"])["entropy"].sum(), 1

        engine.train_batch([batch()], twice)
        return gradients_of(engine.model)

    expected = gradients_of_two_forwards("none")
    assert_close(gradients_of_two_forwards("full"), expected, 0.0)
    # Summed in float32, not in bf16.
    assert_close(gradients_of_two_forwards("selective"), expected, 0.01, floor=0.0)


def test_activation_checkpointing_saves_fewer_activations():
    kept = {"none": 0, "full": 0}
    for mode in kept:
        engine = engine_of("qwen3", activation_checkpointing=mode)

        def keep(tensor, mode=mode):
            kept[mode] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            engine.model(batch(), ["log_probs"])
    assert kept["full"] < 0.4 * kept["none"]


NORMS = {
    **overrides_of("glm4_moe"),
    "use_qk_norm": True,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def without_norms_in_the_plan(layout):
    head_norms = tp_plan._head_norms
    tp_plan._head_norms = lambda *_: set()
    try:
        gradients(NORMS, layout)
    finally:
        tp_plan._head_norms = head_norms


def with_norms(layout):
    return gradients(NORMS, layout)


@pytest.mark.slow
def test_tensor_parallel_norms_missing_in_the_plan_get_reduced_gradients(on_ranks):
    """transformers' plan does not name them, and each rank would have its own part of the gradient without a word."""
    expected = gradients(NORMS, ALONE)
    for found in on_ranks({"tensor": 2}, with_norms):
        assert_close(found, expected)
    message = r"parallel\.tensor=2: \S+[qk]_norm.weight gets a different gradient on each rank"
    for said in on_ranks({"tensor": 2}, message_of, without_norms_in_the_plan):
        assert re.search(message, said)


@pytest.mark.parametrize(
    "sizes, family, message",
    [
        ({"tensor": 4}, "qwen3", "parallel.tensor=4 cannot share 4 query and 2 key/value heads"),
        ({"tensor": 3}, "qwen3", "do not divide the 4 process"),
        ({"ulysses": 2, "tensor": 2}, "gpt2", "gpt2 has no tensor-parallel plan"),
    ],
    ids=str,
)
def test_unsupported_layouts_are_refused_at_start(ranks4, sizes, family, message):
    for said in ranks4.run(refused, sizes, family):
        assert message in said


def refused(sizes, family):
    return refusal(sizes, lambda layout: gradients(family, layout))
