"""Hugging Face folders in and out: each rank reads its slices, every layout starts alike, exports load to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, losses, read_metrics
from families import FAMILIES, VISION, config_of, overrides_of, parallel
from safetensors import safe_open

from mvp_engine.cli import main
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel
from mvp_engine.hf import export as hf_export
from mvp_engine.hf import load as hf
from mvp_engine.model_engine import LanguageModelEngine, ModelSource, Settings, ValueModelEngine
from mvp_engine.runs import list_runs

LM = ROOT / "tests" / "recipes" / "packed_lm" / "train.yaml"
IDS = torch.arange(3, 12)


def alone() -> Layout:
    return Layout(World(0, 1, 0, 1, torch.device("cpu")))


def folder_of(family: str, where: Path, **options: Any) -> Any:
    """A random pretrained folder, as transformers writes it; gives the model."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config_of(family)).eval()
    model.save_pretrained(where, **options)
    return model


def language_model(path: Path | None, layout: Layout | None = None, **config: Any) -> LanguageModelEngine:
    source = ModelSource(None if path is None else str(path), config)
    engine = LanguageModelEngine(LanguageModelEngine.build_model(source), layout or alone(), Settings(seed=7))
    engine.initialize()
    return engine


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_goes_in_and_out_to_the_bit(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = folder_of(family, tmp_path / "in", max_shard_size="100KB")
    engine = language_model(tmp_path / "in")
    assert same(engine.model.hf.state_dict(), theirs.state_dict())
    buffers = dict(theirs.named_buffers())
    assert all(torch.equal(value, buffers[name]) for name, value in engine.model.hf.named_buffers())
    engine.export_hf(tmp_path / "out", torch.float32)
    again = aligned(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert torch.equal(again(IDS[None]).logits, theirs(IDS[None]).logits)
    # The stream for weight sync has the names and tensors of the files.
    written = {key: value for file in (tmp_path / "out").glob("*.safetensors") for key, value in entries(file)}
    assert same(dict(engine.get_per_tensor_param(torch.float32)), written)


def aligned(model: Any) -> Any:
    """In memory of its own: a matmul on a mapped file, which begins at an odd address, may round in another way."""
    for param in model.parameters():
        param.data = param.data.clone()
    return model.eval()


def entries(file: Path) -> list[tuple[str, torch.Tensor]]:
    with safe_open(file, "pt") as opened:
        return [(key, opened.get_tensor(key)) for key in opened.keys()]  # noqa: SIM118 - no mapping


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2", "granite"])
def test_value_models_go_in_and_out_to_the_bit(family: str, tmp_path: Path) -> None:
    from transformers import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        AutoModelForSequenceClassification,
    )

    folder_of(family, tmp_path / "in")
    engines = []
    for path in ("in", "out"):
        source = ModelSource(str(tmp_path / path))
        engines.append(ValueModelEngine(ValueModelEngine.build_model(source), alone(), Settings(seed=7)))
        engines[-1].initialize()
        if path == "in":
            engines[-1].export_hf(tmp_path / "out")
    assert same(*(engine.model.state_dict() for engine in engines))
    if type(config_of(family)) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        theirs = aligned(AutoModelForSequenceClassification.from_pretrained(tmp_path / "out"))
        backbone = engines[0].model.hf.eval()
        backbone.set_attn_implementation(theirs.config._attn_implementation)
        last = backbone(IDS[None]).last_hidden_state
        assert torch.equal(engines[0].model.score(last)[:, -1], theirs(IDS[None]).logits)


@pytest.mark.parametrize("family", VISION)
def test_models_with_encoders_go_in_and_out_to_the_bit(family: str, tmp_path: Path) -> None:
    """The wrapper's names, through transformers' renaming of old keys, and a value head on the same backbone."""
    torch.manual_seed(1)
    theirs = LanguageModel.from_config(config_of(family)).hf
    theirs.config.dtype = torch.float32
    theirs.save_pretrained(tmp_path / "in")
    engine = language_model(tmp_path / "in")
    assert same(engine.model.hf.state_dict(), theirs.state_dict())
    engine.export_hf(tmp_path / "out")
    assert same(type(theirs).from_pretrained(tmp_path / "out").state_dict(), theirs.state_dict())
    drawn = LanguageModelEngine(LanguageModel.on_meta(tmp_path / "in"), alone(), Settings(seed=2))
    drawn.model.source = None
    drawn.initialize()  # by the rules of all its parts
    values = []
    if family == "qwen2_audio":  # transformers does not know these names either, and would draw the weights anew
        with pytest.raises(UserError, match=r"lacks 50 parameter\(s\) of Qwen2AudioModel"):
            ValueModelEngine(ValueModelEngine.build_model(ModelSource(str(tmp_path / "in"))), alone()).initialize()
        return
    for path in ("in", "values"):
        values.append(ValueModelEngine(ValueModelEngine.build_model(ModelSource(str(tmp_path / path))), alone()))
        values[-1].initialize()
        if path == "in":
            values[-1].export_hf(tmp_path / "values")
    assert same(*(engine.model.state_dict() for engine in values))


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_are_one_parameter_and_one_entry(tied: bool, tmp_path: Path) -> None:
    engine = language_model(None, **{**overrides_of("qwen3"), "tie_word_embeddings": tied})
    head, embeddings = engine.model.hf.get_output_embeddings(), engine.model.hf.get_input_embeddings()
    assert (head.weight is embeddings.weight) == tied
    engine.export_hf(tmp_path / "out")
    assert ("lm_head.weight" in dict(entries(tmp_path / "out" / "model.safetensors"))) != tied
    assert same(language_model(tmp_path / "out").model.state_dict(), engine.model.state_dict())


def test_each_rank_reads_only_its_slices_and_every_layout_starts_alike(ranks4, tmp_path: Path) -> None:
    for family in ("qwen3", "qwen3_moe", "mixtral"):
        folder_of(family, tmp_path / family, max_shard_size="50KB")
    for sizes in ({"shard": 4}, {"shard": 2, "tensor": 2}):
        for read, total, good in ranks4.run(read_slices, tmp_path, sizes):
            assert good
            # A quarter of the matrices, and small things whole; experts are read whole by who has a part of them.
            assert read < (0.65 if "tensor" in sizes else 0.45) * total, sizes


def read_slices(path: Path, sizes: dict[str, int]) -> tuple[int, int, bool]:
    """How many numbers this rank read, of how many, and whether the models are those of one rank."""
    world = World.join("cpu")
    layout = Layout.of(world, parallel(**sizes))
    counted = [0]
    real = hf.Folder.read

    def read(self: hf.Folder, key: str, box: Any = None) -> torch.Tensor:
        value = real(self, key, box)
        counted[0] += value.numel()
        return value

    hf.Folder.read = read  # type: ignore[method-assign]
    families = ("qwen3", "qwen3_moe", "mixtral")
    try:
        many = [language_model(path / family, layout) for family in families]
    finally:
        hf.Folder.read = real  # type: ignore[method-assign]
    many += [language_model(None, layout, **overrides_of(family)) for family in families]
    one = [language_model(path / family) for family in families]
    one += [language_model(None, **overrides_of(family)) for family in families]
    good = True
    for a, b in zip(many, one, strict=True):
        state = b.model.state_dict()
        good &= all(torch.equal(full_tensor(value), state[name]) for name, value in a.model.state_dict().items())
    world.close()
    return counted[0], sum(p.numel() for engine in one[:3] for p in engine.model.parameters()), good


def test_another_seed_gives_other_weights() -> None:
    engines = [
        LanguageModelEngine(LanguageModelEngine.build_model(ModelSource(None, overrides_of("qwen3"))), alone(), s)
        for s in (Settings(seed=1), Settings(seed=2))
    ]
    for engine in engines:
        engine.initialize()
    norms, weights = ({n: v for n, v in e.model.state_dict().items() if "proj" in n} for e in engines)
    assert all(not torch.equal(norms[name], weights[name]) for name in norms)


def test_a_folder_is_complete(tmp_path: Path) -> None:
    """Tokenizer, template and generation settings come along; large models come in several files with an index."""
    from transformers import GenerationConfig

    folder_of("llama", tmp_path / "in")
    GenerationConfig(temperature=0.7, do_sample=True).save_pretrained(tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    (tmp_path / "in" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "in" / "notes.txt").write_text("mine")
    engine = language_model(tmp_path / "in")
    tensors = engine.model.state_dict()
    hf_export.export(
        engine.model.export_target(torch.bfloat16),
        tmp_path / "out",
        tensors.__getitem__,
        lambda name: tensors[name].to("meta"),
        engine.world,
        max_file_bytes=20_000,
    )
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert "notes.txt" not in names
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    index = json.loads((tmp_path / "out" / hf.INDEX).read_text())["weight_map"]
    assert len(set(index.values())) > 2
    assert set(index.values()) <= names
    for name, file in index.items():
        assert dict(entries(tmp_path / "out" / file))[name].dtype == torch.bfloat16
    with pytest.raises(UserError, match="exists and is not empty"):
        engine.export_hf(tmp_path / "out")


def test_a_checkpoint_of_four_ranks_is_read_on_any_layout_and_merged(train, ranks2, ranks4, tmp_path: Path) -> None:
    """Save on shard 2 x sequence 2; parameters and moments are the same bits everywhere, and so are the next losses."""
    from transformers import AutoModelForCausalLM

    words = [f"project.dir={tmp_path}", "project.run_id=four", "loop.total_steps=3", "data.micro_batch_size=2"]
    words += ["optim.schedule=constant"]
    assert ranks4.launch(LM, *words, "parallel.shard=2", "parallel.ulysses=2") == [0] * 4
    checkpoint = list_runs(tmp_path)[-1].checkpoint_list()[-1]
    expected = state_of(checkpoint, {})
    assert len(expected) > 100
    for pool, sizes in ((ranks4, {"shard": 4}), (ranks4, {"shard": 2, "tensor": 2}), (ranks2, {"ulysses": 2})):
        for found in pool.run(state_of, checkpoint, sizes):
            assert same(found, expected), sizes
    next_losses = {}
    for name, launch in {
        "1": lambda *w: [train(*w, config=LM, dir=tmp_path / "1")],
        "2": lambda *w: ranks2.launch(LM, *w, "parallel.tensor=2", f"project.dir={tmp_path / '2'}"),
        "4": lambda *w: ranks4.launch(LM, *w, "parallel.shard=4", f"project.dir={tmp_path / '4'}"),
    }.items():
        size = "data.micro_batch_size=2"
        assert set(launch(f"resume={checkpoint}", "loop.total_steps=6", size, "optim.schedule=constant")) == {0}
        next_losses[name] = losses(tmp_path / name)[-3:]
    assert next_losses["2"] == pytest.approx(next_losses["1"], rel=1e-5)
    assert next_losses["4"] == pytest.approx(next_losses["1"], rel=1e-5)
    assert main(["merge", str(checkpoint), str(tmp_path / "out"), "--max-file-gb", "0.00005"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(expected[f"hf.{name}"], value) for name, value in merged.items())
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert read_metrics(tmp_path / "1")


def state_of(checkpoint: Path, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """Every parameter and every moment of a checkpoint, through an engine on some layout."""
    world = World.join("cpu")
    layout = Layout.of(world, parallel(**sizes)) if sizes else Layout(world)
    model = LanguageModelEngine.build_model(ModelSource(str(checkpoint / "hf")))
    model.source = None  # the weights come from the checkpoint
    engine = LanguageModelEngine(model, layout)
    engine.initialize(
        lambda model: torch.optim.AdamW(model.parameters(), 1.0),
        lambda adam: torch.optim.lr_scheduler.LambdaLR(adam, lambda _: 1.0),
    )
    engine.load_checkpoint(checkpoint)
    found = {name: full_tensor(value).clone() for name, value in engine.model.state_dict().items()}
    for name, param in engine.model.named_parameters():
        for key, value in engine.optimizer.state[param].items():
            found[f"{name}.{key}"] = full_tensor(value).clone()
    world.close()
    return found


def test_value_models_are_merged(tmp_path: Path) -> None:
    engine = ValueModelEngine(ValueModelEngine.build_model(ModelSource(None, overrides_of("qwen3"))), alone())
    engine.initialize(
        lambda model: torch.optim.AdamW(model.parameters(), 1.0),
        lambda adam: torch.optim.lr_scheduler.LambdaLR(adam, lambda _: 1.0),
    )
    engine.save_checkpoint(tmp_path / "saved")
    assert main(["merge", str(tmp_path / "saved"), str(tmp_path / "out")]) == 0
    again = ValueModelEngine(ValueModelEngine.build_model(ModelSource(str(tmp_path / "out"))), alone())
    again.initialize()
    assert same(again.model.state_dict(), engine.model.state_dict())
    batch = PackedBatch.from_sequences([IDS, IDS[:4]])
    assert torch.equal(*(e.infer_batch(batch, ["values"])["values"] for e in (engine, again)))
