"""The optimizer kit in one process: parameter groups, schedules, Muon, EMA, skipped steps, loading of states."""

import pytest
import torch
import yaml
from conftest import ROOT, user_error
from torch import nn

from mvp_engine.distributed import Layout, World
from mvp_engine.kit import OptimKit, OptimSettings
from mvp_engine.kit.optim.optimizer import orthogonalize
from mvp_engine.kit.optim.state_tensor import chunks
from mvp_engine.model_engine import FSDPEngine, base
from mvp_engine.model_engine.optim import build_optimizer

DEFAULTS = yaml.safe_load((ROOT / "mvp_engine" / "config" / "default.yaml").read_text())["optim"]


def settings(**options):
    return OptimSettings(**{**DEFAULTS, "lr": 0.01, "weight_decay": 0.1, **options})


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.stack = nn.Parameter(torch.randn(3, 12, 12) / 4)

    def forward(self, x):
        return torch.einsum("bd,edf->bf", x, self.stack)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(12, 140)
        self.down = nn.Linear(140, 12, bias=False)
        self.norm = nn.LayerNorm(12)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.experts = Experts()

    def forward(self, x):
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return x + 0.1 * self.experts(self.conv(x[:, None])[:, 0])


class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.table = nn.Embedding(11, 12)
        self.place_embed = nn.Parameter(torch.zeros(1, 12))
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(12, 11)
        self.scale = nn.Parameter(torch.tensor(0.0))

    def forward(self, ids):
        x = self.table(ids) * self.scale.exp() + self.place_embed
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def net(layers=2):
    torch.manual_seed(0)
    return Net(layers)


IDS = torch.arange(11)


def loss_of(model):
    return nn.functional.cross_entropy(model(IDS), (3 * IDS + 1) % 11)


def train(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def contents(model, optimizer):
    """Copies of all weights and optimizer states."""
    found = {}
    for name, param in model.named_parameters():
        found[name] = param.detach().clone()
        for key, value in optimizer.state.get(param, {}).items():
            found[f"{name}/{key}"] = value.clone()
    return found


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def read_state(optimizer, param, which):
    """A state of a parameter as float32: 0 is `exp_avg`, 1 is `exp_avg_sq`."""
    (chunk,) = chunks(param)
    (group, *_) = optimizer.param_groups
    return optimizer._state_tensors(param, group, optimizer.state[param])[which].read(chunk)


def test_parameter_groups_with_muon_give_matrices_of_blocks_to_muon_and_decay_only_matrices():
    model = net()
    kit = OptimKit(settings(name="muon", lr_by_part={"layers.1.*": 0.1}, muon_exclude=["*.down.*"]))
    optimizer = kit.build_optimizer(model)
    names = {param: name for name, param in model.named_parameters()}
    groups = {group["name"]: group for group in optimizer.param_groups}
    found = {name: {names[p] for p in group["params"]} for name, group in groups.items()}
    assert found["decay"] == {"layers.0.down.weight", "layers.0.conv.weight", "head.weight"}
    assert found["muon"] == {"layers.0.up.weight", "layers.0.experts.stack"}
    assert found["layers.1.*/muon"] == {"layers.1.up.weight", "layers.1.experts.stack"}
    assert found["no_decay"] >= {"table.weight", "place_embed", "layers.0.norm.weight", "head.bias"}
    assert {name for group in found.values() for name in group} == set(names.values())
    for name, group in groups.items():
        assert group["weight_decay"] == (0.0 if "no_decay" in name else 0.1)
    assert groups["layers.1.*/muon"]["lr"] == 0.1


def test_build_optimizer_with_muon_and_no_blocks_raises_a_user_error():
    with user_error(r"optim\.name=muon: Linear has no trainable matrix for Muon"):
        OptimKit(settings(name="muon")).build_optimizer(nn.Linear(2, 2))


def test_kit_optimizer_with_default_settings_is_bit_equal_to_fused_adamw():
    ours, theirs = net(), net()
    our_optimizer = OptimKit(settings()).build_optimizer(ours)
    their_optimizer = build_optimizer(theirs, settings())
    assert train(ours, our_optimizer, 5) == train(theirs, their_optimizer, 5)
    assert same(contents(ours, our_optimizer), contents(theirs, their_optimizer))


# ---- Muon ---------------------------------------------------------------------------------------------------------


def test_orthogonalize_random_matrices_brings_singular_values_near_one():
    torch.manual_seed(3)
    for shape in ((40, 12), (12, 40), (3, 16, 16)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
        assert 0.6 < float(values.min()) <= float(values.max()) < 1.2
    stack = torch.randn(2, 6, 9)
    assert torch.allclose(orthogonalize(stack)[1], orthogonalize(stack[1]), atol=1e-5)


@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
def test_muon_in_training_lowers_the_loss_with_updates_of_the_size_of_adamw(
    state_dtype,
):
    model = net()
    optimizer = OptimKit(
        settings(name="muon", weight_decay=0.0, state_dtype=state_dtype)
    ).build_optimizer(model)
    before = model.layers[0].up.weight.detach().clone()
    losses = train(model, optimizer, 1)
    update = (model.layers[0].up.weight.detach() - before) / 0.01
    # The usual RMS of AdamW's updates.
    assert float(update.square().mean().sqrt()) == pytest.approx(0.2, rel=0.15)
    losses += train(model, optimizer, 39)
    assert losses[-1] < 0.3 * losses[0]


# ---- Skipped steps ------------------------------------------------------------------------------------------------

KINDS = [{}, {"state_dtype": "bfloat16"}, {"state_dtype": "int8"}, {"name": "muon"}]


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_step_with_found_inf_changes_nothing_and_grad_scale_divides_gradients(
    options,
):
    """As the engine requests it on a GPU: by flags on the device."""
    model = net()
    optimizer = OptimKit(settings(ema=0.9, **options)).build_optimizer(model)
    train(model, optimizer, 3)
    before = contents(model, optimizer)
    loss_of(model).backward()
    for param in model.parameters():
        assert param.grad is not None
        param.grad *= float("nan")
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert same(contents(model, optimizer), before)

    optimizer.found_inf = torch.zeros(())
    optimizer.grad_scale = torch.tensor(4.0)
    optimizer.zero_grad()
    (4 * loss_of(model)).backward()
    optimizer.step()
    scaled = contents(model, optimizer)
    unflagged = net()
    other = OptimKit(settings(ema=0.9, **options)).build_optimizer(unflagged)
    train(unflagged, other, 4)
    for name, value in contents(unflagged, other).items():
        assert torch.allclose(value.float(), scaled[name].float(), atol=1e-6), name


# ---- EMA ----------------------------------------------------------------------------------------------------------


def test_averaged_after_training_swaps_the_ema_weights_in_and_out():
    model = net()
    optimizer = OptimKit(settings(ema=0.75)).build_optimizer(model)
    weight = model.head.weight
    ema = weight.detach().clone()
    for step in range(1, 13):
        train(model, optimizer, 1)
        decay = min(0.75, (1 + step) / (10 + step))
        ema += (1 - decay) * (weight.detach() - ema)
    before = contents(model, optimizer)
    with optimizer.averaged():
        assert torch.allclose(weight, ema, atol=1e-6)
        assert not torch.allclose(weight, before["head.weight"], atol=1e-4)
        with pytest.raises(RuntimeError, match="the EMA weights are swapped in"):
            optimizer.step()
    assert same(contents(model, optimizer), before)


def test_averaged_without_ema_raises_a_user_error():
    optimizer = OptimKit(settings()).build_optimizer(net())
    with user_error("no EMA of the weights is kept"), optimizer.averaged():
        pass


def engine(kit=None):
    made = FSDPEngine(net(), Layout(World(0, 1, 0, 1, torch.device("cpu"))))
    made.initialize(None if kit is None else kit.build_optimizer)
    return made


def test_eval_weights_in_training_and_without_an_optimizer_are_the_same_ema_weights(
    tmp_path,
):
    training = OptimKit(settings(ema=0.9))
    trained = engine(training)
    train(trained.model, trained.optimizer, 4)
    trained.save_checkpoint(tmp_path / "saved")
    weights = {name: param.detach().clone() for name, param in trained.model.named_parameters()}
    with training.eval_weights(trained, None):
        averages = {
            name: param.detach().clone() for name, param in trained.model.named_parameters()
        }
    assert not same(averages, weights)
    assert same(dict(trained.model.named_parameters()), weights)

    evaluating = OptimKit(settings(ema=0.9))
    evaluated = engine()
    evaluated.load_checkpoint(tmp_path / "saved")
    assert same(dict(evaluated.model.named_parameters()), weights)
    with evaluating.eval_weights(evaluated, tmp_path / "saved"):
        assert same(dict(evaluated.model.named_parameters()), averages)
    # For the export that may follow.
    assert same(dict(evaluated.model.named_parameters()), averages)


def test_eval_weights_without_an_optimizer_are_loaded_once(tmp_path, monkeypatch):
    kit = OptimKit(settings(ema=0.9))
    loaded = []
    monkeypatch.setattr(
        base,
        "_load_ema_weights",
        lambda *engine_and_checkpoint: loaded.append(engine_and_checkpoint),
    )
    evaluated = engine()
    for _ in range(3):
        with kit.eval_weights(evaluated, tmp_path):
            pass
    assert loaded == [(evaluated, tmp_path)]


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_eval_weights_without_ema_are_the_weights(tmp_path, has_optimizer):
    kit = OptimKit(settings())
    evaluated = engine(kit if has_optimizer else None)
    before = {name: param.detach().clone() for name, param in evaluated.model.named_parameters()}
    with kit.eval_weights(evaluated, tmp_path / "not-read"):
        assert same(dict(evaluated.model.named_parameters()), before)


# ---- Loading ------------------------------------------------------------------------------------------------------


def test_load_state_dict_of_another_kind_starts_from_zero_with_a_warning(logged):
    model = net()
    first = OptimKit(settings(ema=0.9)).build_optimizer(model)
    train(model, first, 3)
    saved = first.state_dict()
    second = OptimKit(settings(name="muon", ema=0.9)).build_optimizer(model)
    first_order = [p for group in first.param_groups for p in group["params"]]
    states = {p: saved["state"][i] for i, p in enumerate(first_order)}
    renumbered = second.state_dict()
    second_order = [p for group in second.param_groups for p in group["params"]]
    renumbered["state"] = {i: states[p] for i, p in enumerate(second_order)}
    warnings = logged()
    second.load_state_dict(renumbered)
    assert warnings == [
        "the optimizer states of 6 parameters start from zero, such as of layers.0.up.weight"
    ]
    weight = model.layers[0].up.weight
    assert torch.equal(second.state[weight]["ema"], first.state[weight]["ema"])
    train(model, second, 1)
    assert float(second.state[weight]["step"]) == 1
    assert float(second.state[model.head.weight]["step"]) == 4
