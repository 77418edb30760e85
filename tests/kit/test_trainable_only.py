"""Checkpoints of what trains only: for plain modules, with and without LoRA, and for Hugging Face models."""

import pytest
import torch
from conftest import mvp, user_error
from families import layout_of
from folders import alone, folder_of, same
from lora_models import adam, exported, steps
from test_api import constant
from torch import nn

from mvp_engine.checkpoint.format import Reader
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.hf.model.model_parts import trained_parts
from mvp_engine.kit import Lora, MLLMModelKit
from mvp_engine.model_engine import FSDPEngine, LanguageModelEngine, ModelSource, Settings

X = torch.linspace(-1, 1, 24).view(3, 8)


class Net(nn.Module):
    """Two blocks, a layer norm next to a buffer, and a new head."""

    fresh = ("head.*",)

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.norm = nn.LayerNorm(8)
        self.register_buffer("count", torch.tensor(float(seed)))
        torch.manual_seed(9)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(self.norm(x))


def plain_engine(seed, lora=None, layout=None, **settings):
    model = MLLMModelKit(lora).adapt(Net(seed))
    engine = FSDPEngine(model, layout or alone(), Settings(**settings))
    engine.initialize(adam, constant)
    return engine


def step(engine):
    engine.train_batch([X], lambda x: (engine.model(x).square().sum(), 3.0))


def tensors(engine):
    return {
        name: full_tensor(value.detach()).clone()
        for name, value in engine.model.state_dict().items()
    }


def saved_by_two_shards(folder):
    with layout_of(shard=2) as layout:
        engine = plain_engine(0, Lora(rank=2), layout)
        step(engine)
        engine.save_checkpoint(folder)
        return tensors(engine)


def test_lora_on_a_plain_module_saves_what_trains_and_needs_the_same_base(ranks2, tmp_path):
    start = plain_engine(0, Lora(rank=2))
    assert torch.equal(start.model(X), Net()(X))
    adapted = [name for name, _ in start.model.named_parameters() if "lora_A" in name]
    # Of the blocks, not of the head.
    assert adapted == [
        "blocks.0.lora_A.weight",
        "blocks.1.lora_A.weight",
    ]
    trained = ranks2.run(saved_by_two_shards, str(tmp_path / "saved"))[0]
    names = {
        name.removeprefix("model.")
        for name in Reader(tmp_path / "saved").entries
        if name.startswith("model.")
    }
    assert names == {n for n in trained if ".lora_" in n or n.startswith("head.")} | {"count"}
    again = plain_engine(0, Lora(rank=2))
    again.load_checkpoint(tmp_path / "saved")
    assert same(tensors(again), trained)
    with user_error(r"leaves out the frozen blocks\.0\.\w+ .*which has other values"):
        plain_engine(1, Lora(rank=2)).load_checkpoint(tmp_path / "saved")


def test_adapters_of_a_plain_module_are_read_by_peft(tmp_path):
    from peft import PeftModel

    engine = plain_engine(0, Lora(rank=2))
    for _ in range(3):
        step(engine)
    MLLMModelKit.export_adapter(engine, tmp_path / "adapter")
    adapted = PeftModel.from_pretrained(Net(), tmp_path / "adapter").eval()
    torch.testing.assert_close(adapted(X), engine.model(X))
    assert not torch.allclose(adapted(X), Net()(X), atol=1e-3)


@pytest.mark.parametrize("trainable_only", [None, False, True])
def test_frozen_plain_module_is_saved_whole_unless_trainable_only(trainable_only, tmp_path):
    settings = {"freeze": ("blocks.*",), "trainable_only": trainable_only}
    engine = plain_engine(0, **settings)
    step(engine)
    engine.save_checkpoint(tmp_path / "saved")
    is_left_out = "model.blocks.0.weight" not in Reader(tmp_path / "saved").entries
    assert is_left_out == bool(trainable_only)
    again = plain_engine(0, freeze=("blocks.*",))  # whatever the setting is when it is read
    again.load_checkpoint(tmp_path / "saved")
    assert same(tensors(again), tensors(engine))
    if trainable_only:
        with user_error(r"no optimizer state for .*blocks.*: was it frozen"):
            plain_engine(0).load_checkpoint(tmp_path / "saved")  # nothing is frozen now


def test_lora_with_trainable_only_false_saves_the_base_too(tmp_path):
    engine = plain_engine(0, Lora(rank=2), trainable_only=False)
    engine.save_checkpoint(tmp_path / "saved")
    other = plain_engine(1, Lora(rank=2))
    other.load_checkpoint(tmp_path / "saved")
    assert same(tensors(other), tensors(engine))


def test_frozen_language_model_with_trainable_only_is_loaded_and_merged_with_its_folder(
    tmp_path,
):
    folder_of("qwen3", tmp_path / "base")

    def built(**settings):
        model = LanguageModelEngine.build_model(ModelSource(str(tmp_path / "base"), {}))
        engine = LanguageModelEngine(model, alone(), Settings(freeze=("*.mlp.*",), **settings))
        engine.initialize(adam, constant)
        return engine

    engine = built(trainable_only=True)
    steps(engine)
    engine.save_checkpoint(tmp_path / "saved")
    saved = Reader(tmp_path / "saved").entries
    assert saved
    assert not [name for name in saved if ".mlp." in name]
    again = built()
    again.load_checkpoint(tmp_path / "saved")
    assert same(tensors(again), tensors(engine))
    engine.export_hf(tmp_path / "export")
    assert mvp(f"export {tmp_path}/saved {tmp_path}/merged") == 0
    assert same(exported(tmp_path / "merged"), exported(tmp_path / "export"))


def test_added_head_is_named_as_new_unless_a_checkpoint_has_it_and_has_a_row_of_its_own(
    tmp_path, logged
):
    folder_of("qwen3", tmp_path / "base")

    def built():
        model = LanguageModelEngine.build_model(ModelSource(str(tmp_path / "base"), {}))
        model.length = nn.Linear(model.hf.config.hidden_size, 3, device="meta")
        model.fresh = ("length.*",)
        model.add_output("length", lambda hidden_TD, _: model.length(hidden_TD))
        engine = LanguageModelEngine(model, alone(), Settings())
        engine.initialize(lambda model: torch.optim.AdamW(model.parameters(), 1e-3), constant)
        return engine

    messages = logged("info")
    engine = built()
    for _ in range(2):
        with engine.train_mode():
            steps(engine)
    new = f"not in {tmp_path}/base, initialized from the seed: length.weight, length.bias"
    assert [text for text in messages if "from the seed" in text] == [new]
    llm, head, everything = trained_parts(engine.model, engine.param_groups)
    assert (llm["part"], head["part"], everything["part"]) == ("llm", "length.*", "all")
    assert head["parameters"] == head["trained"] == 3 * engine.model.hf.config.hidden_size + 3
    assert head["rates"] == [1e-3]
    assert llm["parameters"] + head["parameters"] == everything["parameters"]
    engine.save_checkpoint(tmp_path / "saved")
    messages.clear()
    again = built()
    again.load_checkpoint(tmp_path / "saved")
    with again.train_mode():
        steps(again)
    assert not [text for text in messages if "from the seed" in text]
