"""Hugging Face folders in and out: ranks read their own slices, layouts start equal, exports load bit-equal."""

import weakref

import pytest
import torch
from conftest import CAMPAIGN, mvp, user_error
from families import FAMILIES, VISION, config_of, overrides_of
from folders import entries, folder_of, language_model, realigned, same
from run_files import read_json
from tiny_engines import ALONE, LM, adamw, engine_of, message_of, whole_state
from tiny_models import build_model, samples

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.hf import LanguageModel, ValueModel
from mvp_engine.hf.weights import export as hf_export
from mvp_engine.hf.weights.export import ExportPlan, write_side_files
from mvp_engine.hf.weights.load import INDEX, WeightFiles
from mvp_engine.model_engine import LanguageModelEngine, ModelSource, ValueModelEngine
from mvp_engine.runs import list_runs

IDS = torch.arange(3, 12)
MAX_FILE_BYTES = 30_000


def value_model(path):
    model = ValueModelEngine.build_model(ModelSource(str(path)))
    return engine_of(model, optimizer=None, kind=ValueModelEngine, seed=7)


def exported_value_model(path, out):
    """A value model of a folder, after an export that is bit-equal."""
    engine = value_model(path)
    engine.export_hf(out)
    assert same(value_model(out).model.state_dict(), engine.model.state_dict())
    return engine


@pytest.mark.parametrize("family", FAMILIES)
def test_export_hf_of_a_loaded_folder_is_bit_equal(family, tmp_path):
    from transformers import AutoModelForCausalLM

    theirs = folder_of(family, tmp_path / "in", max_shard_size="100KB")
    engine = language_model(tmp_path / "in")
    assert same(engine.model.hf.state_dict(), theirs.state_dict())
    buffers = dict(theirs.named_buffers())
    assert all(torch.equal(value, buffers[name]) for name, value in engine.model.hf.named_buffers())
    engine.export_hf(tmp_path / "out", torch.float32)
    again = realigned(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert torch.equal(again(IDS[None]).logits, theirs(IDS[None]).logits)
    # Weight sync yields the names and tensors of the files.
    files = (tmp_path / "out").glob("*.safetensors")
    written = {key: value for file in files for key, value in entries(file)}
    assert same(dict(engine.get_per_tensor_param(torch.float32)), written)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2", "granite"])
def test_export_hf_of_a_value_model_is_bit_equal(family, tmp_path):
    from transformers import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        AutoModelForSequenceClassification,
    )

    folder_of(family, tmp_path / "in")
    engine = exported_value_model(tmp_path / "in", tmp_path / "out")
    if type(config_of(family)) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        theirs = realigned(AutoModelForSequenceClassification.from_pretrained(tmp_path / "out"))
        backbone = engine.model.hf.eval()
        backbone.set_attn_implementation(theirs.config._attn_implementation)
        last = backbone(IDS[None]).last_hidden_state
        assert torch.equal(engine.model.score(last)[:, -1], theirs(IDS[None]).logits)


FEW_VISION = ("qwen3_vl", "gemma3", "llava_onevision", "qwen2_audio", "internvl")


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [name if name in FEW_VISION else pytest.param(name, marks=CAMPAIGN) for name in VISION],
)
def test_export_hf_of_a_model_with_encoders_is_bit_equal(family, tmp_path):
    """Also through transformers' renaming of old entries, and with a value head on the same backbone."""
    torch.manual_seed(1)
    theirs = LanguageModel.from_config(config_of(family)).hf
    theirs.config.dtype = torch.float32
    theirs.save_pretrained(tmp_path / "in")
    engine = language_model(tmp_path / "in")
    assert same(engine.model.hf.state_dict(), theirs.state_dict())
    engine.export_hf(tmp_path / "out")
    assert same(type(theirs).from_pretrained(tmp_path / "out").state_dict(), theirs.state_dict())
    drawn = LanguageModelEngine(LanguageModel.on_meta(tmp_path / "in"), ALONE)
    drawn.model.source = None
    drawn.initialize()  # random weights by the rules of all its parts
    # transformers does not map the names of Qwen2-Audio either, and would reinitialize the weights.
    if family == "qwen2_audio":
        with user_error(r"lacks 50 parameters of Qwen2AudioModel"):
            value_model(tmp_path / "in")
    else:
        exported_value_model(tmp_path / "in", tmp_path / "values")


@pytest.mark.parametrize("tied", [True, False])
def test_export_hf_tied_embeddings_are_one_parameter_and_one_entry(tied, tmp_path):
    engine = language_model(None, **{**overrides_of("qwen3"), "tie_word_embeddings": tied})
    hf = engine.model.hf
    is_tied = hf.get_output_embeddings().weight is hf.get_input_embeddings().weight
    assert is_tied == tied
    engine.export_hf(tmp_path / "out")
    assert ("lm_head.weight" in dict(entries(tmp_path / "out" / "model.safetensors"))) != tied
    assert same(language_model(tmp_path / "out").model.state_dict(), engine.model.state_dict())


SLICED = ("qwen3", "qwen3_moe", "mixtral")


@pytest.mark.slow
def test_load_ranks_read_only_their_slices_and_layouts_start_equal(on_ranks, tmp_path):
    for family in SLICED:
        folder_of(family, tmp_path / family, max_shard_size="50KB")
    expected = started(ALONE, tmp_path)
    total = sum(p.numel() for engine in expected[:3] for p in engine.model.parameters())
    for sizes, most in (({"shard": 4}, 0.45), ({"shard": 2, "tensor": 2}, 0.65)):
        for read, states in on_ranks(sizes, read_slices, tmp_path):
            # A quarter of the matrices; small tensors, and experts that are split themselves, are read completely.
            assert read < most * total, sizes
            for state, engine in zip(states, expected if states else [], strict=True):
                assert same(state, engine.model.state_dict())


def started(layout, path):
    """Engines on the folders, and on random weights."""
    loaded = [language_model(path / family, layout) for family in SLICED]
    return loaded + [language_model(None, layout, **overrides_of(family)) for family in SLICED]


def read_slices(layout, path):
    """The number of elements that this rank read of the folders; on rank 0 also the whole weights of all models."""
    counted = [0]
    real = WeightFiles.read

    def read(self, key, index=()):
        value = real(self, key, index)
        counted[0] += value.numel()
        return value

    WeightFiles.read = read
    try:
        states = [engine.model.state_dict() for engine in started(layout, path)]
    finally:
        WeightFiles.read = real
    whole = [{name: full_tensor(value) for name, value in one.items()} for one in states]
    return counted[0], whole if layout.world.is_main else []


def test_initialize_another_seed_gives_other_weights():
    one, two = (engine_of("qwen3", seed=seed).model.state_dict() for seed in (1, 2))
    assert not any(torch.equal(one[name], two[name]) for name in one if "proj" in name)


def test_export_writes_side_files_and_an_index(tmp_path):
    """Tokenizer, template and generation config are copied; large models have several files with an index."""
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
    copied = {"generation_config.json", "tokenizer.json", "chat_template.jinja"}
    assert copied | {"config.json"} <= names
    assert "notes.txt" not in names
    assert read_json(tmp_path / "out" / "config.json")["dtype"] == "bfloat16"
    index = read_json(tmp_path / "out" / INDEX)["weight_map"]
    assert len(set(index.values())) > 2
    assert set(index.values()) <= names
    for name, file in index.items():
        assert dict(entries(tmp_path / "out" / file))[name].dtype == torch.bfloat16
    with user_error("exists and is not empty"):
        engine.export_hf(tmp_path / "out")


@pytest.mark.parametrize("family", [name for name in VISION if "three axes" in VISION[name][0]])
def test_export_says_where_positions_are_interleaved(family, tmp_path):
    """vLLM reads `mrope_interleaved` and takes a config without it as not interleaved; transformers has its own way."""
    model = LanguageModel.from_config(config_of(family))
    write_side_files(model.export_target(), tmp_path)
    config = read_json(tmp_path / "config.json")
    rope = config.get("text_config", config)["rope_parameters"]
    assert rope.get("mrope_interleaved", False) == family.startswith("qwen3_vl")


@pytest.mark.slow
def test_export_ranks_write_files_in_turn_and_hold_one_at_a_time(on_ranks, tmp_path):
    from transformers import AutoModelForCausalLM

    expected = folder_of("qwen3_moe", tmp_path / "in").state_dict()
    answers = on_ranks({"shard": 2}, export_on_two_ranks, tmp_path, False)
    out = tmp_path / "out"
    index = read_json(out / INDEX)["weight_map"]
    names = sorted(set(index.values()))
    assert len(names) > 3
    for rank, (files, error) in enumerate(answers):
        assert [name for name, _, _ in files] == names[rank::2]
        assert all(size <= MAX_FILE_BYTES for _, size, _ in files)
        assert all(alive == 0 for _, _, alive in files)
        assert error == ""
    # Readable by others, as the other files are.
    assert (out / names[0]).stat().st_mode == (out / INDEX).stat().st_mode
    assert same(AutoModelForCausalLM.from_pretrained(out).state_dict(), expected)


@pytest.mark.slow
def test_export_failure_on_one_rank_is_raised_on_all_and_leaves_nothing(on_ranks, tmp_path):
    folder_of("qwen3", tmp_path / "in")
    reason = "OSError: [Errno 28] No space left on device"
    for _, error in on_ranks({"shard": 2}, export_on_two_ranks, tmp_path, True):
        assert f"{tmp_path / 'out'} could not be written: {reason}" in error
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


def export_on_two_ranks(layout, path, fail):
    """The files that this rank wrote: name, bytes, and how many tensors of its file before were still in memory."""
    engine = language_model(path / "in", layout)
    written = []
    before = []
    real = hf_export.write_safetensors

    def write(tensors, file, metadata):
        alive = sum(reference() is not None for reference in before)
        written.append((file.name, sum(value.nbytes for value in tensors.values()), alive))
        before[:] = [weakref.ref(value) for value in tensors.values()]
        if fail and layout.world.rank == 1:
            raise OSError(28, "No space left on device")
        real(tensors, file, metadata)

    state = engine.model.state_dict()

    def on_meta(name):
        return torch.empty(state[name].shape, dtype=state[name].dtype, device="meta")

    def export(layout):
        hf_export.export(
            engine.model.export_target(torch.float32),
            path / "out",
            lambda name: full_tensor(state[name]).clone(),
            on_meta,
            layout.world,
            max_file_bytes=MAX_FILE_BYTES,
        )

    hf_export.write_safetensors = write
    try:
        error = message_of(layout, export)
    finally:
        hf_export.write_safetensors = real
    return written, error


@pytest.mark.slow
def test_checkpoint_of_four_ranks_loads_on_any_layout_and_merges(ranks4, on_ranks, tmp_path):
    """Saved on shard 2 x ulysses 2: parameters and moments are bit-equal on every layout."""
    from transformers import AutoModelForCausalLM

    words = [f"output_dir={tmp_path}", "run_id=four", "train.max_steps=3"]
    words += ["data.micro_batch_size=2", "optim.schedule=constant"]
    assert ranks4.launch(LM, *words, "parallel.shard=2", "parallel.ulysses=2") == [0] * 4
    checkpoint = list_runs(tmp_path)[-1].checkpoint_list()[-1]
    expected = state_of(ALONE, checkpoint)
    assert len(expected) > 50
    for sizes in ({"shard": 4}, {"shard": 2, "tensor": 2}, {"ulysses": 2}):
        for found in on_ranks(sizes, state_of, checkpoint):
            assert same(found, expected), sizes
    out = tmp_path / "out"
    assert mvp(f"export {checkpoint} {out} --max-file-gb 0.00003") == 0
    merged = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(expected[f"hf.{name}"], value) for name, value in merged.items())
    assert len(list(out.glob("*.safetensors"))) > 2


def state_of(layout, checkpoint):
    """All parameters and moments of a checkpoint, loaded by an engine on some layout."""
    model = LanguageModelEngine.build_model(ModelSource(str(checkpoint / "hf")))
    model.source = None  # the weights come from the checkpoint
    engine = engine_of(model, layout, adamw)
    engine.load_checkpoint(checkpoint)
    return whole_state(engine)


def test_merge_of_a_value_model_is_bit_equal(tmp_path):
    engine = engine_of("qwen3", optimizer=adamw, kind=ValueModelEngine)
    engine.save_checkpoint(tmp_path / "saved")
    assert mvp(f"export {tmp_path}/saved {tmp_path}/out") == 0
    again = value_model(tmp_path / "out")
    assert same(again.model.state_dict(), engine.model.state_dict())
    batch = PackedBatch.from_sequences([IDS, IDS[:4]])
    assert torch.equal(*(e.infer_batch(batch, ["values"])["values"] for e in (engine, again)))


@pytest.mark.parametrize("max_file_bytes", [None, MAX_FILE_BYTES])
def test_export_of_a_value_model_without_a_class_in_transformers_says_how_to_read_it(
    tmp_path, monkeypatch, max_file_bytes
):
    from transformers import AutoModel

    whole = ExportPlan.files
    files = lambda plan, limit: whole(plan, max_file_bytes or limit)  # noqa: E731
    monkeypatch.setattr(ExportPlan, "files", files)
    model = build_model(ValueModel, "qwen3_vl")
    engine = engine_of(model, optimizer=None, kind=ValueModelEngine)
    engine.export_hf(tmp_path / "out")
    _, info = AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    batch = samples(model, "qwen3_vl")[1]
    media = batch.media["pixel_values"]
    inputs = {"input_ids": batch.input_ids[None], "position_ids": batch.position_ids[:, None]}
    inputs |= {"pixel_values": media.values, **media.fields}
    code = (tmp_path / "out" / "README.md").read_text().split("```")[1].removeprefix("python")
    found = {"folder": str(tmp_path / "out"), "inputs": inputs}
    with torch.no_grad():
        exec(code, found)
    expected = engine.infer_batch(batch, ["values"])["values"]
    torch.testing.assert_close(found["values"][0, :, 0], expected, atol=1e-5, rtol=1e-5)
    again = value_model(tmp_path / "out")
    assert same(again.model.state_dict(), engine.model.state_dict())
