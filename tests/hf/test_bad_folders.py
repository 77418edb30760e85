"""Folders that are damaged, incomplete or unlike their config are refused with an explanation."""

import pytest
import torch
from conftest import mvp, user_error
from families import overrides_of
from folders import entries, folder_of, language_model, same
from run_files import read_json, write_json
from safetensors.torch import save_file
from tiny_engines import ALONE, counting, engine_of, message_of

from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.model.config_source import read_config
from mvp_engine.model_engine import FSDPEngine, ModelSource, ValueModelEngine


@pytest.fixture
def qwen3(tmp_path):
    """The folder of a tiny Qwen3, in one file."""
    folder_of("qwen3", tmp_path / "in")
    return tmp_path / "in"


def weights_in(folder):
    return dict(entries(folder / "model.safetensors"))


def write_weights(folder, state):
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def tie(state):
    return state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}


def test_load_tied_head_is_refused_if_it_differs_from_the_embeddings(qwen3):
    state = weights_in(qwen3)
    config = read_json(qwen3 / "config.json")
    write_json(qwen3 / "config.json", config | {"tie_word_embeddings": True})
    with user_error(r"ties \S+ to \S+, but its files have both, and they differ"):
        language_model(qwen3)
    engine = language_model(qwen3, tie_word_embeddings=False)
    assert same(engine.model.hf.state_dict(), state)
    write_weights(qwen3, tie(state))  # some tools write both of two tied weights
    model = language_model(qwen3).model.hf
    assert torch.equal(model.lm_head.weight, state["model.embed_tokens.weight"])


def test_load_missing_head_is_refused(qwen3):
    state = weights_in(qwen3)
    del state["lm_head.weight"]
    write_weights(qwen3, state)
    with user_error(r"lacks 1 .*lm_head\.weight\. .* set model\.config\.tie_word_embeddings=true"):
        language_model(qwen3)
    model = language_model(qwen3, tie_word_embeddings=True).model.hf
    assert torch.equal(model.lm_head.weight, state["model.embed_tokens.weight"])


def test_load_single_file_and_index_reads_the_single_file_as_transformers_does(tmp_path):
    from transformers import AutoModelForCausalLM

    model = folder_of("qwen3", tmp_path, max_shard_size="50KB")
    write_weights(tmp_path, {name: value * 2 for name, value in model.state_dict().items()})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert same(language_model(tmp_path).model.hf.state_dict(), theirs)


def test_load_tied_head_that_differs_on_one_rank_is_refused_on_all(on_ranks, qwen3):
    state = tie(weights_in(qwen3))
    state["lm_head.weight"][-1] += 1  # a row of the second rank
    write_weights(qwen3, state)
    for message in on_ranks({"shard": 2}, message_of, load_tied, qwen3):
        assert "they differ" in message


def load_tied(layout, path):
    language_model(path, layout, tie_word_embeddings=True)


def test_load_unused_entries_are_logged(qwen3, logged):
    texts = logged()
    extra = {f"vision.{i}": torch.zeros(2) for i in range(7)}
    write_weights(qwen3, weights_in(qwen3) | extra)
    language_model(qwen3)
    [message] = texts
    first = "vision.0, vision.1, vision.2, vision.3, vision.4 and 2 more"
    assert f"not in the model: {first}" in message
    model = ValueModelEngine.build_model(ModelSource(str(qwen3)))
    engine_of(model, optimizer=None, kind=ValueModelEngine)
    assert texts == [message]  # a backbone is expected to leave out the head


@pytest.mark.parametrize("rule", [True, False])
def test_initialize_integer_buffers_without_a_value_are_refused(rule):
    class Counted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)
            self.register_buffer("order", torch.arange(3), persistent=False)

        def reset_parameters(self):
            if rule:
                self.order.copy_(torch.arange(3))

    with torch.device("meta"):
        model = Counted()
    engine = FSDPEngine(model, ALONE)
    if rule:
        engine.initialize()
        assert engine.model.order.tolist() == [0, 1, 2]
    else:
        with user_error(r"order has no value: its model's _init_weights does not set it"):
            engine.initialize()


ONE_KIND = {"num_hidden_layers": 2, "layer_types": ["full_attention"]}


@pytest.mark.parametrize(
    "config, message",
    [
        ({"model_type": "qwen33"}, r"needs a model_type of .*, not qwen33\. Similar names: qwen3"),
        ({"hiden_size": 3}, r"model\.config\.hiden_size: qwen3 has no .* Did you mean hidden"),
        (ONE_KIND, r"model\.config does not fit qwen3"),
    ],
    ids=str,
)
def test_load_bad_config_is_explained(config, message):
    with user_error(message):
        language_model(None, **{"model_type": "qwen3", **config})


def test_load_bad_folder_is_explained(qwen3, tmp_path, capsys):
    with user_error("is not a folder"):
        language_model(tmp_path / "nowhere")
    with user_error(r"weight has the shape \(99, 32\) there and \(120, 32\) in the model's config"):
        language_model(qwen3, vocab_size=120)
    with user_error(r"lacks .* parameter"):
        language_model(qwen3, num_hidden_layers=6, layer_types=["full_attention"] * 6)
    weights = qwen3 / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with user_error(r"cannot be read: .* Is the download complete"):
        language_model(qwen3)
    weights.rename(qwen3 / "pytorch_model.bin")
    with user_error("is a pickle: save it again as safetensors"):
        language_model(qwen3)
    assert mvp(f"export {qwen3} {tmp_path}/out") == 2
    assert "neither a complete checkpoint nor a run folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "config, message",
    [
        ({"model_type": "t5"}, "t5 is an encoder-decoder model"),
        ({"model_type": "whisper"}, "whisper is an encoder-decoder model"),
        ({"model_type": "vit"}, "transformers has no vit model for AutoModelForCausalLM"),
        (
            {"model_type": "gpt2", "n_embd": 30, "n_head": 4},
            "gpt2 cannot be built from this config: ValueError",
        ),
        (
            {"model_type": "gemma3", "hidden_size": 8},
            "Did you mean model.config.text_config.hidden_size?",
        ),
        (
            {"model_type": "qwen3", "rope_theta": 8},
            "Did you mean model.config.rope_parameters.rope_theta?",
        ),
        ({"model_type": "qwen3", "to_dict": 1}, "model.config.to_dict: qwen3 has no such setting"),
        (
            {"model_type": "gemma4_text", "rope_parameters": {"rope_theta": 8}},
            "set per layer type (sliding_attention, full_attention)",
        ),
        (
            {"model_type": "bert", "num_hidden_layers": 1, "vocab_size": 99},
            "the mask of bert contains bidirectional",
        ),
    ],
    ids=str,
)
def test_build_unsupported_models_are_explained(config, message):
    with pytest.raises(UserError) as refused:
        language_model(None, **config).infer_batch(counting(4), ["log_probs"])
    assert message in str(refused.value)


def test_read_config_overrides_replace_those_of_the_folder(tmp_path):
    """Also one key of a nested dict, and one that may differ by layer."""
    config = folder_of("qwen3", tmp_path / "in").config
    config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
    config.save_pretrained(tmp_path / "in")
    found = read_config(tmp_path / "in", {"rope_parameters": {"rope_theta": 200.0}})
    assert found.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 200.0}
    gemma4 = read_config(None, {"model_type": "gemma4_text", "head_dim": 8})
    assert gemma4.to_dict()["head_dim"] == 8


def test_read_config_name_that_only_model_code_reads_is_a_setting():
    sizes = {**overrides_of("qwen3_moe"), "head_dim": 16}
    attention = LanguageModel.from_config(read_config(None, sizes)).hf.model.layers[0].self_attn
    assert attention.q_proj.weight.shape == (4 * 16, 32)
    with user_error(r"model\.config\.head_dims: qwen3_moe has no such setting"):
        read_config(None, {"model_type": "qwen3_moe", "head_dims": 16})
    for kind in ("qwen3_vl", "qwen3_vl_moe"):  # the text layers read it, from their own config
        with user_error(r"Did you mean model\.config\.text_config\.head_dim\?"):
            read_config(None, {"model_type": kind, "head_dim": 16})
    nested = read_config(None, {"model_type": "qwen3_vl_moe", "text_config": {"head_dim": 16}})
    assert nested.text_config.head_dim == 16


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_load_damaged_file_is_named(tmp_path, name):
    folder_of("qwen3", tmp_path, max_shard_size="50KB")
    for text in ('{"half', "[]", "{}", '{"weight_map": 3, "model_type": "own"}'):
        (tmp_path / name).write_text(text)
        with user_error(f"{name} cannot be read"):
            language_model(tmp_path)


def test_load_missing_file_is_named(tmp_path):
    folder_of("qwen3", tmp_path / "in", max_shard_size="50KB")
    shard = min((tmp_path / "in").glob("model-*.safetensors"))
    shard.unlink()
    with user_error(f"{shard.name} cannot be read: .* Is the download complete"):
        language_model(tmp_path / "in")
    (tmp_path / "empty").mkdir()
    with user_error(r"has no config\.json"):
        language_model(tmp_path / "empty")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_load_quantized_weights_are_refused_whatever_the_config_says(dtype, qwen3):
    state = weights_in(qwen3)
    write_weights(qwen3, state | {"lm_head.weight": state["lm_head.weight"].to(dtype)})
    with user_error(rf"lm_head\.weight is quantized \({dtype}\)"):
        language_model(qwen3)


def test_export_hf_refuses_existing_folders_and_unknown_dtypes(qwen3, tmp_path):
    engine = language_model(qwen3)
    for path in (qwen3, qwen3 / "config.json"):
        with user_error("exists and is not empty"):
            engine.export_hf(str(path))
    message = r"dtype=.*: a folder is exported as one of torch\.float32"
    for dtype in ("bfloat16", torch.int8):
        with user_error(message):
            engine.export_hf(tmp_path / "out", dtype)
    for path in (tmp_path / "nowhere", qwen3):
        with user_error("is not a checkpoint: it has no rank_"):
            engine.load_checkpoint(path)
