"""New tokens (`data.new_tokens`): their rows start as means, train, and are in exports, under LoRA and in full."""

import json

import pytest
import torch
from conftest import mvp, user_error
from families import config_of, parallel
from folders import alone, entries
from lora_models import adam, log_probs, steps, weights
from test_api import constant
from tiny_vlm import write

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.weights.load import FolderParameter, NewRows
from mvp_engine.hf.weights.merge import merge
from mvp_engine.kit import DataSource, Lora, MLLMData, MLLMDataKit, MLLMModelKit
from mvp_engine.kit.data import load_processor
from mvp_engine.kit.tiny_processors import train_tokenizer
from mvp_engine.model_engine import ModelSource, Settings, engine_class
from mvp_engine.runs import list_runs
from mvp_engine.tools.merge import build_model

LORA = Lora(rank=4)
TOKENS = {"<turn>": "", "<goal>": "the answer"}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders of text models, whose vocabulary is that of their tokenizer, or has spare rows."""
    folder = tmp_path_factory.mktemp("bases")
    tokenizer = train_tokenizer(["user the answer is assistant"] * 2, 270)
    for name, tied, spare in (("tied", True, 0), ("untied", False, 0), ("spare", False, 30)):
        torch.manual_seed(0)
        config = config_of("qwen3")
        config.vocab_size, config.tie_word_embeddings = len(tokenizer) + spare, tied
        LanguageModel.from_config(config).hf.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def new_rows(folder, tokens=TOKENS):
    settings = MLLMData(sources=[DataSource(name="x", path="x")], pack_tokens=64, new_tokens=tokens)
    kit = MLLMDataKit(settings, load_processor(folder))
    return kit.new_rows, kit.processor


def sgd(model):
    """Linear in the gradients: Adam's first steps turn rounding of tiny ones into whole steps."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)


def engine_of(folder, lora, layout=None, tokens=TOKENS, optimizer=adam):
    rows = new_rows(folder, tokens)[0]
    model = MLLMModelKit(lora).build(ModelSource(str(folder)), new_rows=rows)
    engine = engine_class("language_model")(model, layout or alone(), Settings(seed=3))
    engine.initialize(optimizer, constant)
    return engine


def batch_of(folder):
    ids = list(new_rows(folder)[0].sources)
    first = torch.tensor([3, 9, ids[0], 12, ids[1], 7])
    return PackedBatch.from_sequences([first, torch.tensor([ids[1], 5, 4])])


def embedding_names(folder):
    names = ["model.embed_tokens.weight"]
    return names if folder.name == "tied" else [*names, "lm_head.weight"]


def test_new_rows_start_as_means_and_pad_the_vocabulary():
    table = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    source = FolderParameter(table.shape, table.__getitem__)
    rows = NewRows(8, {9: (), 10: (2, 3)}).extend(source, 64)
    whole = rows.read(())
    assert whole.shape == rows.shape == (64, 4)
    assert torch.equal(whole[:9], table[:9])
    assert torch.allclose(whole[9], table[:8].mean(0))
    assert torch.allclose(whole[63], whole[9])
    assert torch.allclose(whole[10], table[2:4].mean(0))
    for start, stop in ((0, 4), (7, 11), (10, 64), (63, 64), (5, 5)):
        assert torch.equal(rows.read((slice(start, stop), slice(1, 3))), whole[start:stop, 1:3])


@pytest.mark.parametrize("base", ["tied", "untied", "spare"])
@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_new_tokens_train_and_transformers_loads_the_export(bases, base, lora, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = bases / base
    before = dict(entries(folder / "model.safetensors"))
    rows, processor = new_rows(folder)
    engine = engine_of(folder, lora)
    engine.model.use_side_files(tmp_path / "processor")
    processor.save_pretrained(tmp_path / "processor")
    start = log_probs(engine, batch_of(folder))
    steps(engine, batch_of(folder), count=3)
    after = log_probs(engine, batch_of(folder))
    assert not torch.allclose(start, after, atol=1e-2)
    engine.export_hf(tmp_path / "out")

    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    num_rows = len(hf.get_input_embeddings().weight)
    assert num_rows == hf.config.vocab_size == len(hf.get_output_embeddings().weight)
    assert num_rows % 64 == 0 if base != "spare" else num_rows == len(before["lm_head.weight"])
    assert tokenizer.convert_tokens_to_ids(list(TOKENS)) == list(rows.sources)
    ids = batch_of(folder).input_ids[:6]
    with torch.no_grad():
        of_hf = hf(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
    assert torch.allclose(of_hf, after[:5], atol=1e-5)
    trained = dict(entries(tmp_path / "out" / "model.safetensors"))
    for name in embedding_names(folder):
        new = [*rows.sources]
        first = rows.extend(FolderParameter(before[name].shape, before[name].__getitem__), num_rows)
        change = (trained[name] - first.read(())).abs().amax(1)
        assert (change[new] > 1e-3).all()
        others = [id for id in range(num_rows) if id not in new]
        if lora:  # only the new rows
            assert not change[others].any()


@pytest.mark.parametrize("base", ["tied", "untied"])
def test_new_tokens_with_lora_resume_merge_and_load_in_peft(bases, base, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = bases / base
    batch = batch_of(folder)
    engine = engine_of(folder, LORA)
    steps(engine, batch)
    engine.save_checkpoint(tmp_path / "saved")
    MLLMModelKit.export_adapter(engine, tmp_path / "adapter")
    engine.export_hf(tmp_path / "out")
    expected = log_probs(engine, batch)

    resumed = engine_of(folder, LORA)
    resumed.load_checkpoint(tmp_path / "saved")
    assert torch.equal(log_probs(resumed, batch), expected)
    for engine_in_training in (engine, resumed):
        steps(engine_in_training, batch)
    for name, value in weights(engine).items():
        assert torch.equal(value, weights(resumed)[name])

    merge(tmp_path / "saved", build_model(tmp_path / "saved"), tmp_path / "merged")
    merged = dict(entries(tmp_path / "merged" / "model.safetensors"))
    for name, value in entries(tmp_path / "out" / "model.safetensors"):
        assert torch.allclose(value, merged[name], atol=1e-6), name

    with user_error(r"trained with data.new_tokens=\['<turn>', '<goal>'\]"):
        engine_of(folder, LORA, tokens={"<turn>": "", "<other>": ""}).load_checkpoint(
            tmp_path / "saved"
        )

    plain = AutoModelForCausalLM.from_pretrained(folder)
    plain.resize_token_embeddings(merged["model.embed_tokens.weight"].shape[0])
    peft = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    ids = batch.input_ids[:6]
    with torch.no_grad():
        of_peft = peft(input_ids=ids[None]).logits[0]
    # The padding rows of the vocabulary are transformers' here, so logits of tokens are compared.
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        of_export = hf(ids[None]).logits[0]
    num_tokens = max(new_rows(folder)[0].sources) + 1
    assert torch.allclose(of_peft[:, :num_tokens], of_export[:, :num_tokens], atol=1e-5)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert set(config["trainable_token_indices"]) == {
        name.removesuffix(".weight") for name in embedding_names(folder)
    }


def results(folder, lora, layout):
    """The log-probs after three steps, and the weights."""
    engine = engine_of(folder, lora, layout, optimizer=sgd)
    batch = batch_of(folder)
    steps(engine, batch, count=3)
    return log_probs(engine, batch), weights(engine)


def on_ranks(folders, sizes):
    world = World.join("cpu")
    layout = Layout.of(world, parallel(**sizes))
    found = [results(folder, lora, layout) for folder in folders for lora in (LORA, None)]
    world.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"shard": 2}], ids=["tensor", "fsdp"])
def test_new_tokens_on_ranks_train_as_on_one_rank(ranks2, bases, sizes):
    folders = [bases / "tied", bases / "untied"]
    expected = [results(folder, lora, alone()) for folder in folders for lora in (LORA, None)]
    for rank in ranks2.run(on_ranks, folders, sizes):
        for ours, theirs in zip(rank, expected, strict=True):
            assert torch.allclose(ours[0], theirs[0], atol=1e-4)
            assert ours[1].keys() == theirs[1].keys()
            for name, value in ours[1].items():
                assert torch.allclose(value, theirs[1][name], atol=1e-4), name


def test_new_tokens_that_cannot_be_added_are_user_errors(bases):
    with user_error("the tokenizer has <|im_end|> already"):
        new_rows(bases / "tied", ["<|im_end|>"])
    with user_error("does not read '<a' as one token"):
        new_rows(bases / "tied", ["<a", "x<a"])
    with pytest.raises(ValueError, match="each token once"):
        new_rows(bases / "tied", ["<a>", "<a>"])


def test_new_tokens_with_lora_on_pipeline_stages_are_a_user_error(bases):
    rows = new_rows(bases / "tied")[0]
    model = MLLMModelKit(LORA).build(ModelSource(str(bases / "tied")), new_rows=rows)
    with user_error("data.new_tokens: with LoRA .* parallel.pipeline > 1"):
        model.engine_adapter().cut_stage(None, None)


CONFIG = """
model: {type: language_model, path: model}
data:
  pack_tokens: 256
  sources: {rows: {path: rows.jsonl}}
  new_tokens: {<yes>: "yes", <no>: ""}
  global_batch_size: 1
  num_workers: 0
train: {max_steps: 4}
optim: {lr: 0.02}
lora: {rank: 2}
checkpoint: {interval: 2}
log: {interval: 1, backends: [jsonl]}
"""


@pytest.mark.slow
def test_commands_on_a_training_with_new_tokens_know_them(vlm_folder, capsys):
    rows = [{"prompt": f"Is it {i}?", "completion": ["<yes>", "<no>"][i % 2]} for i in range(6)]
    write(vlm_folder / "rows.jsonl", rows)
    (vlm_folder / "train.yaml").write_text(CONFIG)
    assert mvp("check train.yaml engine=sft output_dir=out") == 0
    assert mvp("train train.yaml engine=sft output_dir=out train.max_steps=2") == 0
    assert mvp("train train.yaml engine=sft output_dir=out resume=auto") == 0
    (vlm_folder / "other.yaml").write_text(CONFIG.replace("<no>", "<other>"))
    capsys.readouterr()
    assert mvp("train other.yaml engine=sft output_dir=out resume=auto train.max_steps=5") == 2
    assert "was trained with data.new_tokens=['<yes>', '<no>']" in capsys.readouterr().err
    assert mvp("data inspect train.yaml engine=sft --json") == 0
    assert "<yes>" in capsys.readouterr().out
    run = list_runs(vlm_folder / "out")[-1].dir
    assert mvp(f"export {run} merged") == 0
    assert "<yes>" in load_processor(vlm_folder / "merged").tokenizer.get_vocab()
    assert mvp(f"chat {run} -p 'Is it <yes>?'") == 0
    assert mvp("train train.yaml engine=sft output_dir=out model.path=merged") == 2
    assert "the tokenizer has <yes> already" in capsys.readouterr().err
