"""Trials before training: a model that would train on wrong numbers is refused at the start, by name.

A few random tokens go through the model as it stands on its layout, so all ranks call these together, and agree on
what they saw.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed.collective_errors import raise_on_all_ranks
from mvp_engine.errors import UserError
from mvp_engine.hf import attention
from mvp_engine.hf.packed_model import PackedModel

TRIALS = 3  # a router of experts may be on the edge between two of them, and tip over by a rounding


@torch.no_grad()
def check_packing(
    model: PackedModel,
    *,
    exact: bool = True,
    own: bool = True,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Two short sequences packed must give what each gives alone, and what transformers' own forward gives.

    Above all, neither may change with the other: that is seen to the last bit, since nothing else differs.

    Refuses state-space and linear-attention mixers, position schemes that ignore `position_ids`, heads with unknown
    steps, and layers that ask attention for something it does not have. `exact`: the computation is in float32.
    `own`: compare with transformers' forward, which knows nothing of matrices that are shared. `group`: all ranks.

    In half precision the bar is the noise of this very model: a causal model's first tokens do not depend on later
    ones, so what changes when these are left out is rounding. A model with attention of its own may not even be causal
    without a mask: there, what transformers says about the class has to do.
    """
    kind = model.hf.config.model_type  # type: ignore[union-attr]
    if not exact and not _asks_for_attention(model):
        raise UserError(
            f"{kind} cannot be trained on packed sequences: it does not use transformers' attention interface"
        )
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "flex_attention called without torch.compile"
            )  # for once, as is wanted
            for seed in range(TRIALS):
                ones, others = (
                    _sequences(model, (9, 6), seed),
                    _sequences(model, (9, 6), seed + TRIALS),
                )
                packed = _hidden(model, PackedBatch.concat(ones))
                noise = 0.0 if exact else 4 * _noise(model, ones[0])
                moved = max(
                    _worst(
                        packed[9:], _hidden(model, PackedBatch.concat([others[0], ones[1]]))[9:]
                    ),
                    _worst(
                        packed[:9], _hidden(model, PackedBatch.concat([ones[0], others[1]]))[:9]
                    ),
                )
                apart = _difference(packed, torch.cat([_hidden(model, one) for one in ones]))
                unlike = _from_transformers(model, ones) if own else 0.0
                moved, apart, unlike, noise = _agreed([moved, apart, unlike, noise], group)
                near = 1e-5 if exact else min(0.1, max(1e-4, noise))
                if (
                    moved <= max(1e-5, min(0.1, noise))
                    and apart <= near
                    and unlike <= (1e-5 if exact else 3e-2)
                ):
                    return
    except Exception as error:
        what = (
            str(error)
            if isinstance(error, NotImplementedError | UserError)
            else f"{type(error).__name__}: {error}"
        )
        raise UserError(f"{kind} cannot be trained on packed sequences: {what}") from error
    finally:
        for module, mode in modes:
            module.training = mode
    if apart == float("inf"):
        raise UserError(
            f"{kind} gives outputs that are not finite: are there such numbers among its weights?"
        )
    if not apart <= near or unlike <= (1e-5 if exact else 3e-2):
        raise UserError(
            f"{kind} cannot be trained on packed sequences: two in one batch change each other by {moved:.1e} and "
            f"differ from the same two alone by {apart:.1e}. Its layers look across boundaries (state-space or "
            "linear-attention mixers do)."
        )
    raise UserError(
        f"{kind}: log-probs differ from those of transformers' own forward by {unlike:.1e}. "
        "The model does something between its backbone and its logits, or in attention, that is not known here."
    )


def check_gradients(model: PackedModel, mesh: DeviceMesh, group: dist.ProcessGroup | None) -> None:
    """What all tensor ranks hold alike must get the same gradient on all of them. `group`: all ranks of the world.

    A plan that does not say that a weight is used on a part of the heads only would give each rank a part of its
    gradient, and nobody would notice. Here a small batch is run, and such a weight is refused by name.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            batch = PackedBatch.concat(_sequences(model, (15, 9), 0))
            hidden = _hidden(model, batch).float()
            if not hidden.requires_grad:  # all of it is frozen
                return
            direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(
                hidden.device
            )
            (hidden * direction).sum().backward()
    finally:
        for module, mode in modes:
            module.training = mode
    with raise_on_all_ranks(group):
        for name, param in model.named_parameters():
            if param.grad is None or (
                isinstance(param, DTensor) and "tensor" in (param.device_mesh.mesh_dim_names or ())
            ):
                continue
            grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            high, low = grad.clone(), grad.clone()
            dist.all_reduce(high, dist.ReduceOp.MAX, group=mesh.get_group())
            dist.all_reduce(low, dist.ReduceOp.MIN, group=mesh.get_group())
            if high.numel() and float((high - low).max()) > 1e-2 * float(
                torch.maximum(high.abs(), low.abs()).max()
            ):
                raise UserError(
                    f"parallel.tensor={mesh.size()}: {name} gets another gradient on each rank: transformers' plan for "
                    "this model does not say how it is shared. Set parallel.tensor=1."
                )
    for param in model.parameters():
        param.grad = None


def _asks_for_attention(model: PackedModel) -> bool:
    kind = type(model.hf.config.get_text_config())  # type: ignore[union-attr, operator]
    return any(
        getattr(module, "_supports_attention_backend", False) and type(module.config) is kind
        for module in model.hf.modules()
    )


def _noise(model: PackedModel, one: PackedBatch) -> float:
    first = PackedBatch.from_sequences([one.input_ids[: one.num_tokens // 2].cpu()]).to(
        one.input_ids.device
    )
    return _difference(_hidden(model, one)[: first.num_tokens], _hidden(model, first))


def _from_transformers(model: PackedModel, ones: list[PackedBatch]) -> float:
    theirs = [value for one in ones if (value := model.own_log_probs(one)) is not None]
    if not theirs:
        return 0.0
    return _difference(
        torch.cat([model(one, ["log_probs"])["log_probs"] for one in ones]), torch.cat(theirs)
    )


def _hidden(model: PackedModel, batch: PackedBatch) -> Tensor:
    name = "hidden_states" if "hidden_states" in model.provides else model.provides[0]
    return model(batch, [name])[name]


def _agreed(numbers: list[float], group: dist.ProcessGroup | None) -> list[float]:
    """The largest of all ranks, so that all of them go the same way."""
    largest = torch.tensor(numbers, dtype=torch.float64).nan_to_num(nan=torch.inf)
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest.tolist()


def _worst(a: Tensor, b: Tensor) -> float:
    return float((a - b).float().abs().max() / b.float().abs().max().clamp(min=1e-6))


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).float().abs().mean() / b.float().abs().mean().clamp(min=1e-6))


def _sequences(model: PackedModel, lengths: tuple[int, ...], seed: int) -> list[PackedBatch]:
    """Random text: tokens that stand for media, or have a meaning of their own, are left out."""
    config: Any = model.hf.config
    special = {
        token
        for part in attention.config_tree(config)
        for name, value in part.to_dict().items()
        if name.endswith(("token_id", "token_index", "token_ids"))
        for token in (value if isinstance(value, list) else [value])
    }
    words = torch.tensor(
        [token for token in range(config.get_text_config().vocab_size) if token not in special]
    )
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    return [
        PackedBatch.from_sequences(
            [words[torch.randint(len(words), (n,), generator=generator)]]
        ).to(device)
        for n in lengths
    ]
