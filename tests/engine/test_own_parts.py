"""Parts of a plain PyTorch script in a recipe: its seed, its order of rows, its loader."""

from types import SimpleNamespace

import pytest
import torch
from conftest import mvp
from run_files import log_of
from safetensors.torch import load_file, load_model
from torch import nn

from mvp_engine.checkpoint.format import Reader
from mvp_engine.distributed import World
from mvp_engine.engine.feed import Feed
from mvp_engine.engine.hooks import EngineHooks
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.runs import list_runs

ENGINE = """
import itertools

import torch
from torch import nn
from torch.utils.data import TensorDataset

from mvp_engine.engine import Engine


class Rows:
    def __init__(self, chosen, size):
        self.chosen = chosen
        self.size = size

    def __iter__(self):
        rows = torch.arange(64.0)
        if self.chosen == "constant":
            rows = torch.zeros(64)
        if isinstance(self.chosen, slice):
            rows = rows[self.chosen]
        for part in rows.split(self.size):
            yield part[:, None].repeat(1, 3), part


class Plane(Engine):
    def prepare_model(self):
        torch.manual_seed(self.config.seed)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.Tanh(), nn.Linear(4, 1))

    def prepare_dataloader(self, split):
        return LOADER

    def forward_step(self, ctx, micro_batch):
        x, y = micro_batch
        return (self.model(x / 64).squeeze(-1) - y).square().sum(), len(y)
"""
CONFIG = """
run_name: plane
train: {max_steps: 2}
data: {micro_batch_size: 4, global_batch_size: 8}
optim: {lr: 0.01}
log: {backends: [jsonl]}
"""


def recipe(folder, loader="Rows(None, 4)"):
    folder.mkdir(exist_ok=True)
    (folder / "engine.py").write_text(ENGINE.replace("LOADER", loader))
    (folder / "train.yaml").write_text(CONFIG)
    return folder / "train.yaml"


def script_model():
    """The model of a plain script that begins with `torch.manual_seed(7)`."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.Tanh(), nn.Linear(4, 1)
    )


def test_model_seeded_in_prepare_model_has_the_weights_of_the_plain_script(train, tmp_path):
    config = recipe(tmp_path / "plane")
    assert (
        train("seed=7 optim.lr=0 optim.weight_decay=0", config=config, dir=tmp_path / "runs") == 0
    )
    saved = Reader(list_runs(tmp_path / "runs")[-1].checkpoint_list()[-1])
    for name, weight in script_model().named_parameters():
        assert torch.equal(saved.read(f"model.{name}"), weight), name


def test_merge_of_a_plain_module_writes_a_state_dict_that_plain_torch_loads(
    train, tmp_path, capsys
):
    config = recipe(tmp_path / "plane")
    assert train(config=config, dir=tmp_path / "runs") == 0
    run = list_runs(tmp_path / "runs")[-1]
    saved = Reader(run.checkpoint_list()[-1])
    assert mvp(f"export {run.dir} {tmp_path}/out") == 0
    assert (
        f"is now the state dict {tmp_path / 'out' / 'model.safetensors'}\n"
        in capsys.readouterr().out
    )
    model = script_model()
    load_model(model, str(tmp_path / "out" / "model.safetensors"))
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved.read(f"model.{name}")), name
    assert int(model.state_dict()["1.num_batches_tracked"]) == 4

    assert mvp(f"export {run.dir} {tmp_path}/half --dtype bfloat16") == 0
    half = load_file(tmp_path / "half" / "model.safetensors")
    assert half["0.weight"].dtype == torch.bfloat16
    assert half["1.num_batches_tracked"].dtype == torch.int64
    for words, text in [
        ([str(tmp_path / "out")], "exists and is not empty"),
        ([str(tmp_path / "new"), "--adapter"], "is of a plain module"),
        ([str(tmp_path / "new"), "--ema"], "has no averaged weights"),
    ]:
        capsys.readouterr()
        assert mvp(f"export {run.dir}", *words) == EXIT_USER_ERROR
        assert text in capsys.readouterr().err


@pytest.mark.parametrize("shuffle, is_ordered", [(None, False), (False, True), (True, False)])
def test_sample_loader_shuffle_option_overrides_the_default_of_the_split(shuffle, is_ordered):
    engine = SimpleNamespace(
        config=SimpleNamespace(data=SimpleNamespace(micro_batch_size=4, num_workers=0), seed=3),
        global_batch_size=8,
        layout=SimpleNamespace(data_rank=0, data_size=1),
        device=torch.device("cpu"),
    )
    data = torch.arange(32)
    rows = torch.cat(list(EngineHooks.sample_loader(engine, data, "train", shuffle=shuffle)))
    assert sorted(rows.tolist()) == data.tolist()
    assert (rows.tolist() == data.tolist()) is is_ordered
    of_eval = torch.cat(list(EngineHooks.sample_loader(engine, data, "eval", shuffle=shuffle)))
    assert (of_eval.tolist() == data.tolist()) is (shuffle is not True)


# ---- Loaders that ignore their rank --------------------------------------------------------------------------------

SAME = "data-parallel ranks 0 and 1 of 2 got the same micro-batches in the first 2 steps: Rows ignores its rank"


def warnings_of(folder):
    return log_of(folder)


@pytest.mark.parametrize(
    "rows, warns",
    [
        ("None", True),
        ("slice(self.layout.data_rank, None, self.layout.data_size)", False),
        ("'constant'", False),
    ],
    ids=["ignores its rank", "divides", "constant data"],
)
def test_ranks_with_the_same_micro_batches_are_a_warning(ranks2, tmp_path, rows, warns):
    config = recipe(tmp_path / "plane", f"Rows({rows}, 4)")
    assert ranks2.launch(config, "log.backends=[file]", f"output_dir={tmp_path / 'runs'}") == [
        0,
        0,
    ]
    assert (SAME in warnings_of(tmp_path / "runs")) is warns


@pytest.mark.parametrize(
    "data_ranks", [[0, 0, 1, 1], [0, 1, 2, 3]], ids=["model parallel", "data parallel"]
)
def test_same_data_of_model_parallel_ranks_is_no_warning(data_ranks):
    """Four ranks: the first two have the same micro-batches, and so have the other two."""

    class FourRanks(World):
        def all_gather(self, own):
            others = [(rank, [place // 2, 7]) for place, rank in enumerate(data_ranks)]
            return [own if rank == 0 else (rank, found) for rank, found in others[1:]] + [
                (0, [0, 7])
            ]

    world = FourRanks(0, 4, 0, 4, torch.device("cpu"))
    layout = SimpleNamespace(data_rank=0, data_size=len(set(data_ranks)))
    feed = Feed([torch.zeros(1), torch.ones(1)], 1, world, layout)
    feed.take()
    feed.take()
    assert (feed.same_data is not None) is (len(set(data_ranks)) == 4)


def check_rank(config, folder):
    from mvp_engine.tools.check.stages import main

    words = f"--config {config} --folder {folder} --quiet output_dir={folder}".split()
    return main(words)


@pytest.mark.slow
def test_check_of_ranks_with_the_same_micro_batches_is_a_problem(ranks2, tmp_path):
    from mvp_engine.tools.check.record import read_facts

    config = recipe(tmp_path / "plane", "Rows(None, 4)")
    (tmp_path / "facts").mkdir()
    assert ranks2.run(check_rank, str(config), str(tmp_path / "facts")) == [EXIT_USER_ERROR] * 2
    facts = read_facts(tmp_path / "facts")
    assert [text for text in facts["problems"] if text.startswith(SAME)] == facts["problems"]
    assert "islice(rows, layout.data_rank, None, layout.data_size)" in facts["problems"][0]
    assert not any(SAME in text for text in facts["warnings"])
