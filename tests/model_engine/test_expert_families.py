"""Every text family with experts in transformers: expert parallel and balanced, with the gradients of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import parallel
from model_sweep import causal_types
from ranks import RankPool
from test_expert_parallel import assert_close, gradients, micro_batches
from tiny_configs import tiny_config
from torch import Tensor

from mvp_engine.config.schema import Experts
from mvp_engine.distributed import Layout, World
from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.experts import moe_layers
from mvp_engine.model_engine import LanguageModelEngine, Settings


def families() -> list[str]:
    """Those whose tiny model has experts of transformers' interface."""
    found = []
    for name in causal_types():
        try:
            with torch.device("meta"):
                model = LanguageModel.from_config(tiny_config(name))
        except Exception:  # noqa: BLE001 - `test_model_sweep.py` says why it cannot be built
            continue
        if moe_layers.modules(model):
            found.append(name)
    return found


def stepped(name: str, sizes: dict[str, int] | None, balance: str) -> dict[str, Tensor] | str:
    world = World.join("cpu")
    try:
        layout = Layout(world) if sizes is None else Layout.of(world, parallel(**sizes))
        torch.manual_seed(0)
        model = LanguageModel.from_config(tiny_config(name))
        for param in model.parameters():
            param.data += 0.05 * torch.randn_like(param)
        settings = Settings(experts=Experts(balance=balance, weight=1.0))  # type: ignore[arg-type]
        engine = LanguageModelEngine(model, layout, settings)
        engine.initialize(lambda model: torch.optim.SGD(model.parameters(), 0.0))
        engine.model.eval()  # routers may add noise
        if engine.adapter.expert_balance is not None:
            state: dict[str, Any] = engine.adapter.expert_balance.state()
            rows = [[float(1 + place) for place in range(len(row))] for row in state["counts"]]
            engine.adapter.expert_balance.load_state({"counts": rows, "weight": 10.0})
        ranks = range(2) if sizes is None else [layout.data_rank]
        return gradients(engine, [one for rank in ranks for one in micro_batches(rank)])
    except UserError as error:
        return str(error)
    finally:
        world.close()


@pytest.mark.campaign(only=True)
def test_expert_parallel_of_every_family_gives_the_gradients_of_one_rank(ranks2: RankPool) -> None:
    wrong = {}
    names = families()
    assert len(names) > 40
    for name in names:
        balance = "loss"
        wanted = stepped(name, None, balance)
        if isinstance(wanted, str) and "experts: " in wanted:  # its routers cannot be balanced
            balance = "none"
            wanted = stepped(name, None, balance)
        try:
            for found in ranks2.run(stepped, name, {"shard": 2, "expert": 2}, balance):
                if isinstance(wanted, str) or isinstance(found, str):
                    assert found == wanted
                else:
                    # Shards of parameters that no rank used are zeros until the step.
                    used = {key: grad for key, grad in found.items() if key in wanted or grad.any()}
                    assert_close(used, wanted, name)
        except (AssertionError, TimeoutError) as error:
            wrong[name] = str(error)[-600:]
            continue
        print(name, balance, wanted if isinstance(wanted, str) else "equal", flush=True)
    assert wrong == {}
