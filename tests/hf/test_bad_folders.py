"""Folders that are damaged, incomplete or unlike their config are refused with an explanation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import parallel
from folders import alone, entries, folder_of, language_model, same
from safetensors.torch import save_file

from mvp_engine.cli import main
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.model.config_source import read_config
from mvp_engine.hf.weights import pretrained
from mvp_engine.model_engine import FSDPEngine, ModelSource, ValueModelEngine


@pytest.mark.parametrize("changed", [True, False])
def test_load_tied_head_that_differs_from_the_embeddings_is_refused(
    changed: bool, tmp_path: Path
) -> None:
    theirs = folder_of("qwen3", tmp_path / "in")
    weights = tmp_path / "in" / "model.safetensors"
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    if changed:
        with pytest.raises(
            UserError, match=r"ties \S+ to \S+, but its files have both, and they differ"
        ):
            language_model(tmp_path / "in")
        engine = language_model(tmp_path / "in", tie_word_embeddings=False)
        assert same(engine.model.hf.state_dict(), theirs.state_dict())
    else:  # some tools write both of two tied weights
        state = dict(entries(weights))
        save_file(
            state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()},
            weights,
            {"format": "pt"},
        )
        model = language_model(tmp_path / "in").model.hf
        assert torch.equal(model.lm_head.weight, state["model.embed_tokens.weight"])


def test_load_missing_head_is_refused(tmp_path: Path) -> None:
    folder_of("qwen3", tmp_path / "in")
    weights = tmp_path / "in" / "model.safetensors"
    state = dict(entries(weights))
    save_file({n: v for n, v in state.items() if n != "lm_head.weight"}, weights, {"format": "pt"})
    with pytest.raises(
        UserError,
        match=r"lacks 1 .*lm_head\.weight\. .* set model\.config\.tie_word_embeddings=true",
    ):
        language_model(tmp_path / "in")
    model = language_model(tmp_path / "in", tie_word_embeddings=True).model.hf
    assert torch.equal(model.lm_head.weight, state["model.embed_tokens.weight"])


def test_load_single_file_and_index_reads_the_single_file_as_transformers_does(
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    folder_of("qwen3", tmp_path / "in", max_shard_size="50KB")
    state = {
        name: value * 2 for name, value in folder_of("qwen3", tmp_path / "one").state_dict().items()
    }
    save_file(state, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "in").state_dict()
    assert same(language_model(tmp_path / "in").model.hf.state_dict(), theirs)


def test_load_tied_head_that_differs_on_one_rank_is_refused_on_all(ranks2, tmp_path: Path) -> None:
    folder_of("qwen3", tmp_path / "in")
    weights = tmp_path / "in" / "model.safetensors"
    state = dict(entries(weights))
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["lm_head.weight"][-1] += 1  # a row of the second rank
    save_file(state, weights, {"format": "pt"})
    for message in ranks2.run(load_tied, tmp_path / "in"):
        assert "they differ" in message


def load_tied(path: Path) -> str:
    world = World.join("cpu")
    try:
        language_model(path, Layout.of(world, parallel(shard=2)), tie_word_embeddings=True)
    except UserError as error:
        return str(error)
    finally:
        world.close()
    return "nothing"


def test_load_unused_entries_are_logged(tmp_path: Path, monkeypatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(
        pretrained.LOGGER, "warning", lambda text, *args: logged.append(text % args)
    )
    folder_of("qwen3", tmp_path / "in")
    weights = tmp_path / "in" / "model.safetensors"
    extra = {f"vision.{i}": torch.zeros(2) for i in range(7)}
    save_file(dict(entries(weights)) | extra, weights, {"format": "pt"})
    language_model(tmp_path / "in")
    [message] = logged
    assert (
        "not in the model: vision.0, vision.1, vision.2, vision.3, vision.4 and 2 more" in message
    )
    ValueModelEngine(
        ValueModelEngine.build_model(ModelSource(str(tmp_path / "in"))), alone()
    ).initialize()
    assert logged == [message]  # a backbone is expected to leave out the head


@pytest.mark.parametrize("rule", [True, False])
def test_initialize_integer_buffers_without_a_value_are_refused(rule: bool) -> None:
    class Counted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)
            self.register_buffer("order", torch.arange(3), persistent=False)

        def reset_parameters(self) -> None:
            if rule:
                self.order.copy_(torch.arange(3))

    with torch.device("meta"):
        model = Counted()
    engine = FSDPEngine(model, alone())
    if rule:
        engine.initialize()
        assert engine.model.order.tolist() == [0, 1, 2]
    else:
        with pytest.raises(
            UserError, match=r"order has no value: its model's _init_weights does not set it"
        ):
            engine.initialize()


def test_load_bad_folders_and_configs_are_explained(tmp_path: Path, capsys) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        language_model(tmp_path / "nowhere")
    with pytest.raises(
        UserError, match=r"needs a model_type of transformers, not qwen33\. Similar names: qwen3"
    ):
        language_model(None, model_type="qwen33")
    with pytest.raises(
        UserError,
        match=r"model\.config\.hiden_size: qwen3 has no such setting\. Did you mean hidden",
    ):
        language_model(None, model_type="qwen3", hiden_size=3)
    with pytest.raises(UserError, match=r"model\.config does not fit qwen3"):
        language_model(
            None, model_type="qwen3", num_hidden_layers=2, layer_types=["full_attention"]
        )
    folder_of("qwen3", tmp_path / "good")
    with pytest.raises(
        UserError,
        match=r"weight has the shape \(99, 32\) there and \(120, 32\) in the model's config",
    ):
        language_model(tmp_path / "good", vocab_size=120)
    with pytest.raises(UserError, match=r"lacks .* parameter"):
        language_model(tmp_path / "good", num_hidden_layers=6, layer_types=["full_attention"] * 6)
    weights = tmp_path / "good" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"cannot be read: .* Is the download complete"):
        language_model(tmp_path / "good")
    weights.rename(tmp_path / "good" / "pytorch_model.bin")
    with pytest.raises(UserError, match="is a pickle: save it again as safetensors"):
        language_model(tmp_path / "good")
    assert main(["merge", str(tmp_path / "good"), str(tmp_path / "out")]) == 2
    assert "neither a complete checkpoint nor a run folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "message"),
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
def test_build_unsupported_models_are_explained(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        language_model(None, **config).infer_batch(
            PackedBatch.from_sequences([torch.arange(4)]), ["log_probs"]
        )
    assert message in str(refused.value)


def test_read_config_overrides_replace_those_of_the_folder(tmp_path: Path) -> None:
    """Also one key of a nested dict, and one that may differ by layer."""
    config = folder_of("qwen3", tmp_path / "in").config
    config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
    config.save_pretrained(tmp_path / "in")
    found = read_config(tmp_path / "in", {"rope_parameters": {"rope_theta": 200.0}})
    assert found.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 200.0}
    assert (
        read_config(None, {"model_type": "gemma4_text", "head_dim": 8}).to_dict()["head_dim"] == 8
    )


def test_read_config_name_that_only_model_code_reads_is_a_setting() -> None:
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
    }
    sizes |= {
        "vocab_size": 32,
        "moe_intermediate_size": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    }
    config = read_config(None, {"model_type": "qwen3_moe", "head_dim": 16, **sizes})
    assert LanguageModel.from_config(config).hf.model.layers[0].self_attn.q_proj.weight.shape == (
        4 * 16,
        32,
    )
    with pytest.raises(UserError, match=r"model\.config\.head_dims: qwen3_moe has no such setting"):
        read_config(None, {"model_type": "qwen3_moe", "head_dims": 16})
    for kind in ("qwen3_vl", "qwen3_vl_moe"):  # the text layers read it, from their own config
        with pytest.raises(UserError, match=r"Did you mean model\.config\.text_config\.head_dim\?"):
            read_config(None, {"model_type": kind, "head_dim": 16})
    nested = read_config(None, {"model_type": "qwen3_vl_moe", "text_config": {"head_dim": 16}})
    assert nested.text_config.head_dim == 16


def test_load_damaged_files_are_named(tmp_path: Path) -> None:
    folder_of("qwen3", tmp_path / "in", max_shard_size="50KB")
    files = {
        name: (tmp_path / "in" / name).read_text()
        for name in ("config.json", "model.safetensors.index.json")
    }
    for name, text in [
        (n, t)
        for n in files
        for t in ('{"half', "[]", "{}", '{"weight_map": 3, "model_type": "own"}')
    ]:
        (tmp_path / "in" / name).write_text(text)
        with pytest.raises(UserError, match=f"{name} cannot be read"):
            language_model(tmp_path / "in")
        (tmp_path / "in" / name).write_text(files[name])
    shard = min((tmp_path / "in").glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(
        UserError, match=f"{shard.name} cannot be read: .* Is the download complete"
    ):
        language_model(tmp_path / "in")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no config\.json"):
        language_model(tmp_path / "empty")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_load_quantized_weights_are_refused_whatever_the_config_says(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    folder_of("qwen3", tmp_path / "in")
    weights = tmp_path / "in" / "model.safetensors"
    state = dict(entries(weights))
    save_file(
        state | {"lm_head.weight": state["lm_head.weight"].to(dtype)}, weights, {"format": "pt"}
    )
    with pytest.raises(UserError, match=rf"lm_head\.weight is quantized \({dtype}\)"):
        language_model(tmp_path / "in")


def test_export_hf_refuses_existing_folders_and_unknown_dtypes(tmp_path: Path) -> None:
    folder_of("qwen3", tmp_path / "in")
    engine = language_model(tmp_path / "in")
    for path in (tmp_path / "in", tmp_path / "in" / "config.json"):
        with pytest.raises(UserError, match="exists and is not empty"):
            engine.export_hf(str(path))
    for dtype in ("bfloat16", torch.int8):
        with pytest.raises(
            UserError, match=r"dtype=.*: a folder is exported as one of torch\.float32"
        ):
            engine.export_hf(tmp_path / "out", dtype)
    for path in (tmp_path / "nowhere", tmp_path / "in"):
        with pytest.raises(UserError, match="is not a checkpoint: it has no rank_"):
            engine.load_checkpoint(path)
