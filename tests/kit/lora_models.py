"""Shared by the LoRA tests: pretrained folders, an engine with adapters, a few training steps."""

import torch
from conftest import ROOT
from families import config_of
from folders import alone, entries
from test_api import constant

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.hf import LanguageModel
from mvp_engine.kit import MLLMModelKit
from mvp_engine.model_engine import FSDPEngine, ModelSource, Settings, engine_class

LM = ROOT / "tests" / "recipes" / "packed_lm" / "train.yaml"
BATCH = PackedBatch.from_sequences([torch.arange(3, 12), torch.arange(5, 9)])
WIDE = {"hidden_size": 160, "intermediate_size": 320}  # a base much larger than its adapters


def pretrained(folder):
    """A folder of a text model."""
    torch.manual_seed(0)
    config = config_of("qwen3")
    for name, value in WIDE.items():
        setattr(config, name, value)
    LanguageModel.from_config(config).hf.save_pretrained(folder)
    return folder


def engine_of(
    folder,
    lora,
    layout=None,
    kind="language_model",
    train=True,
    **settings,
):
    model = MLLMModelKit(lora).build(ModelSource(str(folder)), kind)
    engine = engine_class(kind)(model, layout or alone(), Settings(seed=3, **settings))
    assert isinstance(engine, FSDPEngine)
    engine.initialize(*((adam, constant) if train else ()))
    return engine


def adam(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)


def steps(engine, batch=BATCH, count=2, output="log_probs"):
    for _ in range(count):
        engine.train_batch(
            [batch], lambda b: (-engine.model(b, [output])[output].sum(), b.num_loss_tokens)
        )


def weights(engine):
    return {
        name: full_tensor(param.detach()).clone() for name, param in engine.model.named_parameters()
    }


def log_probs(engine, batch=BATCH):
    return engine.infer_batch(batch, ["log_probs"])["log_probs"]


def token_log_probs(logits, ids):
    """The log-probs of all tokens of one sequence but the first."""
    return logits[0].log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]


def exported(folder):
    return dict(entries(folder / "model.safetensors"))
