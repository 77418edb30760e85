"""A sweep over the text model types of transformers: which of them train packed, exactly, and why others do not.

`measure` builds a tiny random model of a type and compares its log-probs and gradients, packed, with those of the
sequences alone and with those of transformers' own forward. Every number must agree to 1e-5. `scripts/model_matrix.py`
writes the results to `mvp_engine/tools/models_text.json`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from tiny_configs import tiny_config

from mvp_engine.data.batch import PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.model import attention
from mvp_engine.hf.model.language_model import own_head
from mvp_engine.hf.model.preflight import check_packing

EXACT = 1e-5
LENGTHS = [7, 1, 12, 5]
MAX_PARAMETERS = (
    10_000_000  # of a tiny model; a config that stays large is an error of `tiny_configs`
)

# Decoders that read the outputs of an encoder, and drafters that read the keys and values of another model. Their
# configs do not say so.
DECODERS_OF_OTHERS = {"musicgen", "musicgen_melody", "trocr"}
PARTS_OF_OTHERS = {"gemma4_assistant", "gemma4_unified_assistant"}
TRAIN_MODE = {"reformer"}  # its backward raises in eval mode


@dataclass(frozen=True)
class Result:
    """What one model type gives: exact, refused with a reason, or wrong with the difference."""

    name: str
    verdict: str  # exact, refused, or wrong: a model that passes the preflight and is not exact
    reason: str = ""
    padded_rows: str = ""  # why it runs on padded rows; empty where it is packed


def causal_types():
    """All types that transformers' AutoModelForCausalLM knows, except those with encoders for media."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    return [
        name
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if name not in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    ]


def kind_of(name):
    """`text` for causal decoders, `encoder` for models whose tokens see later ones, or `encoder-decoder`."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    if getattr(CONFIG_MAPPING[name], "is_encoder_decoder", False) or name in DECODERS_OF_OTHERS:
        return "encoder-decoder"
    if name in PARTS_OF_OTHERS:
        return "text"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name)).eval()
    ids = torch.arange(3, 12)[None]
    changed = ids.clone()
    changed[0, 5:] += 20
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
        other = model(changed, use_cache=False).logits
    return "text" if torch.allclose(logits[:, :5], other[:, :5], atol=1e-5) else "encoder"


def build(name, **more):
    """A tiny random model without zero weights, in eval mode."""
    config = tiny_config(name, **more)
    with torch.device("meta"):
        size = sum(
            param.numel() for param in LanguageModel.from_config(copy.deepcopy(config)).parameters()
        )
    assert size < MAX_PARAMETERS, (
        f"the tiny {name} has {size:,} parameters: add rules or exceptions to tiny_configs.py"
    )
    torch.manual_seed(0)
    model = LanguageModel.from_config(config)
    with torch.no_grad():
        for param in model.parameters():
            param += 0.02 * torch.randn_like(param)
    return model.train(name in TRAIN_MODE)


def measure(name):
    """Run the preflight and the comparison. Only a `UserError` is a refusal; other errors are raised."""
    try:
        model = build(name)
        check_packing(model)
    except UserError as error:
        return Result(name, "refused", str(error))
    worst = differences(model)
    if max(worst.values()) <= EXACT:
        return Result(name, "exact", padded_rows=model.padded_rows)
    found = ", ".join(f"{what} {value:.1e}" for what, value in worst.items())
    return Result(name, "wrong", found)


def differences(model):
    """The largest relative difference of packed log-probs and gradients from both references."""
    ids = sequences(model)
    packed = model(PackedBatch.from_sequences(ids), ["log_probs"])["log_probs"]
    gradients = _gradients(model, packed)
    alone = torch.cat(
        [model(PackedBatch.from_sequences([one]), ["log_probs"])["log_probs"] for one in ids]
    )
    alone_gradients = _gradients(model, alone)
    own = torch.cat([_transformers_log_probs(model, one) for one in ids])
    own_gradients = _gradients(model, own)
    return {
        "log-probs, alone": _difference(packed, alone),
        "log-probs, transformers": _difference(packed, own),
        "gradients, alone": worst_difference(gradients, alone_gradients),
        "gradients, transformers": worst_difference(gradients, own_gradients),
    }


def sequences(model):
    """Token ids without special tokens."""
    vocab_size = model.hf.config.get_text_config().vocab_size
    g = torch.Generator().manual_seed(2)
    return [torch.randint(3, min(90, vocab_size), (length,), generator=g) for length in LENGTHS]


def _transformers_log_probs(model, ids):
    with attention.eager_attention(model.hf.config), own_head(model.hf):
        logits = model.hf(ids[None], use_cache=False).logits[0]
    log_probs = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
    return torch.cat([log_probs, log_probs.new_zeros(1)])


def _gradients(model, log_probs):
    model.zero_grad()
    log_probs.sum().backward()
    return {
        name: param.grad.clone()
        for name, param in model.named_parameters()
        if param.grad is not None
    }


def _difference(a, b):
    """The largest difference, relative to the largest value where that is above 1."""
    value = (a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1.0)
    return float(value.nan_to_num(nan=torch.inf))


def worst_difference(a, b):
    """The largest difference of any gradient; a gradient that only one side has counts where it is not zero."""
    worst = 0.0
    for name in a.keys() | b.keys():
        one = a.get(name, b.get(name))
        assert one is not None
        zero = torch.zeros_like(one)
        worst = max(worst, _difference(a.get(name, zero), b.get(name, zero)))
    return worst
