"""The columns of the model matrix other than `packed`: LoRA, export, and two ranks with Ulysses or tensor parallel.

Each check returns True, or the reason why the model type does not support it. `on_two_ranks` needs a
`RankPool` of two.
"""

import tempfile
from functools import partial
from pathlib import Path

import probe_once
import torch
from families import parallel
from model_sweep import EXACT, build, sequences, worst_difference
from torch.optim.lr_scheduler import LambdaLR

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.errors import UserError
from mvp_engine.hf.lora.lora_layers import add_adapters
from mvp_engine.hf.lora.lora_settings import Lora
from mvp_engine.hf.model.preflight import check_packing
from mvp_engine.model_engine import LanguageModelEngine, Settings


def lora(name):
    """Adapters on every linear layer of the text layers: the model stays exact, and the adapters get gradients."""
    model = build(name)
    adapters = random_adapters(model)
    if isinstance(adapters, str):
        return adapters
    loss = model(PackedBatch.from_sequences(sequences(model)), ["loss"])["loss"]
    if not loss.requires_grad:
        return "its layers pass no gradient to adapters while the embeddings are frozen"
    loss.backward()
    if not any(
        param.grad is not None and param.grad.abs().max() > 0 for param in adapters.values()
    ):
        return "the adapters get no gradients"
    return True


def random_adapters(model):
    """Add LoRA adapters to a model and return them, or the reason why it does not support them."""
    try:
        add_adapters(model, Lora(rank=2))
        check_packing(model)
    except UserError as error:
        return str(error)
    adapters = {key: param for key, param in model.named_parameters() if ".lora_" in key}
    with torch.no_grad():
        for param in adapters.values():
            param += 0.1 * torch.randn_like(param)
    return adapters


def export(name):
    """A folder that transformers reads, with the log-probs of this model."""
    from transformers import AutoModelForCausalLM

    model = build(name)
    check_packing(model)
    ids = sequences(model)[2]
    with tempfile.TemporaryDirectory() as parent, torch.no_grad():
        folder = Path(parent) / "exported"
        try:
            model.engine_adapter().export(folder, None, World.join("cpu"))
        except UserError as error:
            return str(error)
        read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        logits = read(ids[None], use_cache=False).logits[0]
        own = model(PackedBatch.from_sequences([ids]), ["log_probs"])["log_probs"][:-1]
    expected = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
    difference = float((own - expected).abs().max())
    return (
        True
        if difference <= EXACT
        else f"log-probs of the exported folder differ by {difference:.1e}"
    )


def outputs_and_gradients(model, layout, batch, **settings):
    """Log-probs of one batch and the gradients of its summed loss, on this layout."""
    mode = model.training
    engine = LanguageModelEngine(model, layout, Settings(**settings))
    engine.initialize(
        lambda module: torch.optim.SGD(module.parameters(), 0.0),
        lambda sgd: LambdaLR(sgd, _constant),
    )
    engine.model.train(mode)
    found = {}

    def loss(micro_batch):
        log_probs = engine.model(micro_batch, ["log_probs"])["log_probs"]
        found["log-probs"] = log_probs.detach()
        return log_probs.sum(), micro_batch.num_loss_tokens

    engine.optimizer_zero_grad()
    engine.forward_backward_batch([batch], loss)
    grads = {
        key: param.grad for key, param in engine.model.named_parameters() if param.grad is not None
    }
    return found | {key: full_tensor(grad) / layout.data_size for key, grad in grads.items()}


def on_layout(name, layout, **settings):
    """Log-probs and gradients of the sequences of the sweep, on this layout."""
    model = build(name)
    return outputs_and_gradients(
        model, layout, PackedBatch.from_sequences(sequences(model)), **settings
    )


def on_two_ranks(name, pool, **sizes):
    """Whether a layout of the two ranks of `pool` gives the log-probs and gradients of one."""
    answers = pool.run(_or_reason, name, sizes)
    return compare_ranks(answers, on_layout(name, Layout(World.join("cpu"))), sizes)


def compare_ranks(answers, expected, sizes):
    """Whether all ranks have the tensors of one. `answers`: of each rank, or the reason of its error."""
    for found in answers:
        if isinstance(found, str):
            return found
        difference = worst_difference(found, expected)
        if difference > EXACT:
            layout = ", ".join(f"parallel.{key} > 1" for key in sizes)
            return f"{layout}: in float32, gradients differ from those of one rank by {difference:.1e}, more than 1e-5"
    return True


def _or_reason(name, sizes):
    return tensors_or_reason(partial(on_layout, name), sizes)


def tensors_or_reason(compute, sizes):
    """On each rank: log-probs and gradients, or the error of an engine that refuses the layout."""
    world = World.join("cpu")
    probe_once.forget()
    try:
        return compute(Layout.of(world, parallel(**sizes)))
    except UserError as error:
        return str(error)
    finally:
        world.close()


def _constant(_):
    return 1.0
