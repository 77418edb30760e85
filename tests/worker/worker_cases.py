"""A tiny model, batches and losses for worker groups; ranks import them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from mvp_engine.data.batch import PackedBatch
from mvp_engine.worker import WorkerSpec

TINY = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def spec_of(**changes):
    model = {"config": TINY, **changes.pop("model", {})}
    optim = changes.pop("optim", {"lr": 1e-2, "schedule": "constant"})
    return WorkerSpec.of(model=model, optim=optim, **{"cpu_threads": 1, "device": "cpu", **changes})


def batch_of(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, 64, (length,), generator=generator) for length in lengths]
    groups = torch.arange(len(lengths)) // 2
    return PackedBatch.from_sequences(ids, sequence_fields={"group": groups})


@dataclass(frozen=True)
class TokenLoss:
    def __call__(self, model, batch, log):
        loss = model(batch, ["loss"])["loss"]
        log("tokens", batch.num_loss_tokens, 1.0)
        return loss, batch.num_loss_tokens


@dataclass(frozen=True)
class ValueLossOne:
    """Values towards 1."""

    def __call__(self, model, batch, log):
        values_T = model(batch, ["values"])["values"]
        return (values_T - 1.0).square().sum(), torch.tensor(float(batch.num_tokens))


@dataclass(frozen=True)
class FailingLoss:
    """Raises on one rank, or on all."""

    rank: int | None

    def __call__(self, model, batch, log):
        if self.rank in (None, torch.distributed.get_rank()):
            1 / 0  # noqa: B018
        return TokenLoss()(model, batch, log)


@dataclass(frozen=True)
class EndlessLoss:
    def __call__(self, model, batch, log):
        while True:
            time.sleep(1.0)


def pids(group):
    ranks = group.processes.ranks
    return [rank.process.pid if hasattr(rank, "process") else rank.home.pid for rank in ranks]
