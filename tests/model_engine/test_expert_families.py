"""Every text family with experts in transformers: expert parallel and balanced, with the gradients of one rank."""

import torch
from conftest import CAMPAIGN
from model_sweep import causal_types
from test_expert_parallel import all_batches, gradients, micro_batches
from tiny_configs import tiny_config
from tiny_engines import ALONE, assert_close, engine_of

from mvp_engine.config.schema import Experts
from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.experts import moe_layers


def families():
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


def stepped(layout, name, kind):
    try:
        torch.manual_seed(0)
        model = LanguageModel.from_config(tiny_config(name))
        for param in model.parameters():
            param.data += 0.05 * torch.randn_like(param)
        experts = Experts(aux_loss_coef=1.0 if kind == "loss" else None)
        engine = engine_of(model, layout, experts=experts)
        engine.model.eval()  # routers may add noise
        balance = engine.adapter.expert_balance
        if balance is not None:
            counts = balance.state()["counts"]
            rows = [[float(1 + place) for place in range(len(row))] for row in counts]
            balance.load_state({"counts": rows, "weight": 10.0})
        is_alone = layout.world.size == 1
        return gradients(engine, all_batches(2) if is_alone else micro_batches(layout.data_rank))
    except UserError as error:
        return str(error)


@CAMPAIGN
def test_expert_parallel_of_every_family_gives_the_gradients_of_one_rank(on_ranks):
    wrong = {}
    names = families()
    assert len(names) > 40
    for name in names:
        balance = "loss"
        expected = stepped(ALONE, name, balance)
        if isinstance(expected, str) and "experts: " in expected:  # its routers cannot be balanced
            balance = "none"
            expected = stepped(ALONE, name, balance)
        try:
            for found in on_ranks({"shard": 2, "expert": 2}, stepped, name, balance):
                if isinstance(expected, str) or isinstance(found, str):
                    assert found == expected
                    continue
                # Shards of parameters that no rank used are zeros until the step.
                unused = {key for key in found.keys() - expected.keys() if not found[key].any()}
                used = {key: grad for key, grad in found.items() if key not in unused}
                assert_close(used, expected, floor=1e-3, what=name)
        except (AssertionError, TimeoutError) as error:
            wrong[name] = str(error)[-600:]
    assert wrong == {}
