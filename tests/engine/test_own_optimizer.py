"""A recipe with an optimizer of its own: `optim.ema`, keys without effect, the example of docs/optim.md, the check."""

import re

import pytest
import torch
from conftest import ROOT, mvp, read_metrics, user_error
from families import overrides_of
from run_files import log_of
from safetensors.torch import load_file
from test_optim import IDS, net, settings

from mvp_engine.checkpoint.format import Reader
from mvp_engine.distributed import Layout, World
from mvp_engine.engine import Engine
from mvp_engine.errors import UserError
from mvp_engine.hf.lora.lora_layers import add_adapters
from mvp_engine.hf.lora.lora_settings import Lora
from mvp_engine.kit import OptimKit
from mvp_engine.model_engine import FSDPEngine, LanguageModelEngine, ModelSource, Settings
from mvp_engine.runs import list_runs
from mvp_engine.worker import WorkerGroup, WorkerSpec

ALONE = Layout(World(0, 1, 0, 1, torch.device("cpu")))


def train_steps(made, steps, bad_step=None):
    def forward(ids):
        loss = torch.nn.functional.cross_entropy(made.model(ids), ids.flip(0), reduction="sum")
        return loss * (float("nan") if step == bad_step else 1.0), float(len(ids))

    for step in range(steps):  # noqa: B007 - forward reads it
        made.train_batch([IDS], forward)
    made.step_status()


def averages(made):
    with made.averaged():
        return {name: param.detach().clone() for name, param in made.model.named_parameters()}


def test_ema_of_an_own_optimizer_equals_that_of_the_kit_and_resumes(tmp_path):
    kit = OptimKit(settings(ema=0.6))
    of_kit = FSDPEngine(net(), ALONE, Settings(ema=0.6))
    of_kit.initialize(kit.build_optimizer)
    assert of_kit.ema is None
    groups = [
        {key: group[key] for key in ("params", "lr", "weight_decay")}
        for group in of_kit.param_groups
    ]
    where = {param: name for name, param in of_kit.model.named_parameters()}

    def adamw(model):
        own = [
            {**group, "params": [model.get_parameter(where[p]) for p in group["params"]]}
            for group in groups
        ]
        return torch.optim.AdamW(own, betas=(0.9, 0.95), fused=True)

    def engine():
        made = FSDPEngine(net(), ALONE, Settings(ema=0.6))
        made.initialize(adamw)
        return made

    own = engine()
    for made in (of_kit, own):
        train_steps(made, 5, bad_step=2)
    expected, found = averages(of_kit), averages(own)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not any("ema" in state for state in own.optimizer.state.values())
    own.save_checkpoint(tmp_path / "own")
    of_kit.save_checkpoint(tmp_path / "kit")
    for saved in ("own", "kit"):
        again = engine()
        again.load_checkpoint(tmp_path / saved)
        assert all(torch.equal(value, expected[name]) for name, value in averages(again).items())
    train_steps(of_kit, 2)
    train_steps(own, 2)
    again = engine()
    again.load_checkpoint(tmp_path / "own")
    train_steps(again, 2)
    assert all(torch.equal(value, averages(own)[name]) for name, value in averages(again).items())
    with own.averaged(), pytest.raises(RuntimeError, match="the EMA weights are swapped in"):
        train_steps(own, 1)


def test_ema_with_an_own_optimizer_is_evaluated_saved_and_merged(train, tmp_path, monkeypatch):
    monkeypatch.setattr(
        Engine,
        "prepare_optimizer",
        lambda engine, model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    words = ["train.max_steps=4", "eval.steps=4", "log.backends=[jsonl,file]"]
    assert train(*words, "optim.ema=0.9", "optim.weight_decay=0.2", dir=tmp_path / "ema") == 0
    assert train(*words, dir=tmp_path / "plain") == 0
    with_ema, plain = (
        read_metrics(tmp_path / name, "eval")[-1]["loss"] for name in ("ema", "plain")
    )
    assert with_ema != pytest.approx(plain, rel=1e-3)
    run = list_runs(tmp_path / "ema")[-1]
    assert train(f"workflow=evaluate resume={run.dir} optim.ema=0.9", dir=tmp_path / "ema") == 0
    assert mvp(f"export --ema {run.dir} {tmp_path}/out") == 0
    merged = load_file(tmp_path / "out" / "model.safetensors")
    saved = Reader(run.checkpoint_list()[-1])
    for name, value in merged.items():
        assert torch.equal(value, saved.read(f"optim.{name}.ema")), name
        assert not torch.equal(value, saved.read(f"model.{name}")), name
    log = (run.dir / "log.txt").read_text()
    (line,) = [line for line in log.splitlines() if "without effect" in line]
    assert "optim.weight_decay" in line
    assert "returns SGD and does not read this" in line
    assert "optim.ema" not in line


def test_keys_that_an_optimizer_reads_are_no_warning(train, tmp_path, monkeypatch):
    def own(engine, model):
        return torch.optim.SGD(model.parameters(), lr=engine.config.optim.lr)

    words = "train.max_steps=1 log.backends=[file] optim.lr=0.3 optim.weight_decay=0.2 optim.eps=1e-6".split()
    assert train(*words, dir=tmp_path / "default") == 0
    monkeypatch.setattr(Engine, "prepare_optimizer", own)
    assert train(*words, dir=tmp_path / "own") == 0
    assert "without effect" not in log_of(tmp_path / "default")
    text = log_of(tmp_path / "own")
    assert "optim.eps, optim.weight_decay: set, but without effect" in text


def without(end):
    """An optimizer with two groups, and without the parameters whose name ends like this."""

    def build(model):
        kept = [
            param
            for name, param in model.named_parameters()
            if param.requires_grad and not name.endswith(end)
        ]
        groups = [[param for param in kept if (param.ndim < 2) == few] for few in (True, False)]
        return torch.optim.SGD([{"params": params} for params in groups if params], 0.1)

    return build


def test_parameters_in_no_group_of_the_optimizer_are_refused_unless_frozen():
    made = FSDPEngine(net(), ALONE)
    message = r"^1 trainable parameter of Net in no parameter group of SGD.*: head.weight\. Put.* freeze it"
    with user_error(message):
        made.initialize(without("head.weight"))

    def freezing(model):
        for name, param in model.named_parameters():
            param.requires_grad_(not name.endswith("head.weight"))
        return without("head.weight")(model)

    FSDPEngine(net(), ALONE).initialize(freezing)
    FSDPEngine(net(), ALONE).initialize(without("nothing"))


def refused(layout, end, lora):
    """The error on this rank for a language model whose optimizer lacks some of its parameters."""
    model = LanguageModelEngine.build_model(ModelSource(None, overrides_of("qwen3")))
    if lora:
        add_adapters(model, Lora(rank=2))
    made = LanguageModelEngine(model, layout, Settings())
    with pytest.raises(UserError) as caught:
        made.initialize(without(end))
    return str(caught.value)


@pytest.mark.parametrize(
    "sizes, end, lora",
    [
        ({"shard": 2}, "lm_head.weight", False),
        ({"pipeline": 2}, "lm_head.weight", False),  # the last stage alone has it
        ({"shard": 2}, "q_proj.lora_B.weight", True),
    ],
)
def test_parameters_in_no_group_are_refused_on_all_ranks(on_ranks, sizes, end, lora):
    for message in on_ranks(sizes, refused, end, lora):
        assert "in no parameter group of SGD" in message
        assert end in message


@pytest.mark.parametrize("kind", ["language_model", "value_model"])
def test_parameters_of_an_actor_or_critic_in_no_group_are_refused(kind, monkeypatch):
    monkeypatch.setattr(
        OptimKit, "build_optimizer", lambda kit, model: without("norm.weight")(model)
    )
    model = {"type": kind, "config": overrides_of("qwen3")}
    spec = WorkerSpec.of(model=model, optim={}, total_steps=2, device="cpu")
    with pytest.raises(UserError, match=r"in no parameter group of SGD.*norm\.weight"):
        WorkerGroup.start(spec)


# ---- The example of docs/optim.md -----------------------------------------------------------------------------------

CONFIG = """
run_name: plane
train: {max_steps: 60}
data: {micro_batch_size: 16, global_batch_size: 32}
optim: {lr: 0.05, schedule: constant}
checkpoint: {interval: 33, keep_n: null}
log: {backends: [jsonl], interval: 1}
"""


@pytest.fixture
def example(tmp_path):
    page = (ROOT / "docs" / "optim.md").read_text()
    (code,) = re.findall(r"`plane/engine.py`:\n\n```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "engine.py").write_text(code)
    (tmp_path / "train.yaml").write_text(CONFIG)
    return tmp_path / "train.yaml"


@pytest.mark.slow
def test_full_matrix_optimizer_of_the_docs_under_fsdp_resumes_bit_equal(
    ranks2, train, example, tmp_path
):
    shard = ["parallel.shard=2", "optim.ema=0.9"]
    assert ranks2.launch(example, *shard, f"output_dir={tmp_path / 'all'}") == [0, 0]
    middle = list_runs(tmp_path / "all")[-1].checkpoint_list()[0]
    assert ranks2.launch(
        example, *shard, f"resume={middle}", f"output_dir={tmp_path / 'resumed'}"
    ) == [0, 0]
    assert train(config=example, dir=tmp_path / "one") == 0
    # Eigenvectors of close eigenvalues turn with rounding, so the losses differ later.
    for name in (
        "all",
        "one",
    ):
        losses = [record["loss"] for record in read_metrics(tmp_path / name)]
        assert losses[0] == pytest.approx(read_metrics(tmp_path / "all")[0]["loss"], rel=1e-5)
        assert losses[-1] < 0.5 * losses[0]
    saved, again = (
        Reader(list_runs(tmp_path / name)[-1].checkpoint_list()[-1]) for name in ("all", "resumed")
    )
    assert {"optim.0.weight.left_basis", "optim.0.weight.ema"} < saved.entries.keys()
    for name in saved.entries:
        if name.startswith(("model.", "optim.")):
            assert torch.equal(saved.read(name), again.read(name)), name


def check_rank(config, folder, *more):
    from mvp_engine.tools.check.stages import main

    words = f"--config {config} --folder {folder} --quiet output_dir={folder}".split()
    return main([*words, *more])


def checked(example, folder, ranks=None, *words):
    from mvp_engine.tools.check.record import read_facts

    folder.mkdir()
    run = ranks.run if ranks else lambda function, *args: [function(*args)]
    run(check_rank, str(example), str(folder), *words)
    return read_facts(folder)


@pytest.mark.slow
def test_check_saves_and_loads_the_optimizer_and_reports_what_changes(ranks2, example, tmp_path):
    sound = checked(example, tmp_path / "sound", ranks2, "parallel.shard=2")
    assert sound["problems"] == []
    assert not any("attribute" in text for text in sound["warnings"])
    code = example.with_name("engine.py").read_text()
    doubles = """
    def load_state_dict(self, saved):
        super().load_state_dict(saved)
        for state in self.state.values():
            state["mean"] = state["mean"] * 2

    @torch.no_grad()
    def step(self, closure=None):
        self.calls = getattr(self, "calls", 0) + 1
"""
    broken = code.replace(
        "    @torch.no_grad()\n    def step(self, closure=None):\n", doubles.lstrip("\n")
    )
    example.with_name("engine.py").write_text(broken)
    found = checked(example, tmp_path / "broken")
    assert len(found["problems"]) == 1
    assert found["problems"][0].startswith(
        "Eigenbasis does not come back from a checkpoint as it was: "
    )
    assert "has another state 'mean'" in found["problems"][0]
    assert any("changes its 1 attribute calls in training" in text for text in found["warnings"])
    local = code.replace(
        'state["mean"].lerp_',
        'state["mine"] = param.to_local().sum()[None]\n        state["mean"].lerp_',
    )
    other = tmp_path / "other" / "train.yaml"  # the ranks have imported the first one
    other.parent.mkdir()
    other.with_name("engine.py").write_text(local)
    other.write_text(CONFIG)
    found = checked(other, tmp_path / "local", ranks2, "parallel.shard=2")
    assert any("the state 'mine' of 0." in text for text in found["problems"])
