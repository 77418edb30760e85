"""Parts: one per parameter; freezing, learning rates, activation checkpointing and compiling by part."""

from fnmatch import fnmatchcase

import pytest
import torch
from conftest import MAGIC, user_error
from families import FAMILIES, VISION
from tiny_engines import ALONE, assert_close, engine_of, scores_of, weights
from tiny_models import build_model, samples, shared_model

from mvp_engine.config import compose
from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf import LanguageModel, ValueModel
from mvp_engine.hf.model.model_parts import parts_of
from mvp_engine.kit import MLLMModelKit
from mvp_engine.model_engine.optim import build_optimizer

# Name patterns of the parts of each family; parameters that match none belong to the llm.
VISUAL = {"vision": "visual.*", "projector": "visual.merger.*"}
TOWER = {"vision": "vision_tower.*", "projector": "multi_modal_projector.*"}
NEWLINE = {**TOWER, "projector": "multi_modal_projector.* image_newline"}
IDEFICS = {"vision": "vision_model.*", "projector": "connector.*"}
EXPECTED = {
    "qwen2_vl": VISUAL,
    "qwen2_5_vl": VISUAL,
    "qwen3_vl": {**VISUAL, "projector": "visual.merger.* visual.deepstack_merger_list.*"},
    "qwen3_vl_moe": {**VISUAL, "projector": "visual.merger.* visual.deepstack_merger_list.*"},
    "glm4v": {**VISUAL, "projector": "visual.merger.* visual.downsample.*"},
    "gemma4": {"vision": "vision_tower.*", "projector": "embed_vision.*"},
    "paddleocr_vl": {"vision": "visual.*", "projector": "projector.*"},
    "video_llama_3": {"vision": "vision_model.*", "projector": "projector.*"},
    "idefics2": IDEFICS,
    "idefics3": IDEFICS,
    "smolvlm": IDEFICS,
    "llava_next": NEWLINE,
    "llava_onevision": NEWLINE,
    "qwen2_audio": {"audio": "audio_tower.*", "projector": "multi_modal_projector.*"},
    "qwen2_5_omni_thinker": {
        **VISUAL,
        "audio": "audio_tower.*",
        "projector": "visual.merger.* audio_tower.proj.*",
    },
}


@pytest.mark.parametrize("family", [*FAMILIES, *VISION])
def test_parts_of_family_cover_each_parameter_once(family):
    models = [shared_model(kind, family) for kind in (LanguageModel, ValueModel)]
    patterns = EXPECTED.get(family, TOWER if family in VISION else {})
    for model in models:
        parts = parts_of(model)
        assert list(parts) == [name for name, _ in model.named_parameters()]
        for name, part in parts.items():
            inner = name.removeprefix("hf.").removeprefix("model.")
            fits = [key for key, names in patterns.items() if matches(inner, names)]
            assert part == ("projector" if "projector" in fits else (*fits, "llm")[0]), name
        assert set(parts.values()) == {*patterns, "llm"}
        rows = [row.split()[1] for row in MLLMModelKit.table(model).splitlines()[1:]]
        sizes = [int(size.replace(",", "")) for size in rows]
        assert sum(sizes[:-1]) == sizes[-1] == sum(param.numel() for param in model.parameters())


def matches(name, patterns):
    return any(fnmatchcase(name, pattern) for pattern in patterns.split())


def trained(settings, layout=ALONE):
    """A tiny Qwen3-VL after one step on images, and its weights before the step."""
    model = build_model(LanguageModel, "qwen3_vl")
    batch = PackedBatch.concat(samples(model, "qwen3_vl"))
    engine = engine_of(model, layout, decayed_adamw, **settings)
    before = weights(model)
    engine.train_batch([batch], scores_of(engine, entropy=0.0))
    return engine, before


def decayed_adamw(model):
    return torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.5)


@pytest.mark.parametrize("frozen", [("vision",), ("vision", "llm"), ("projector", "hf.lm_head.*")])
def test_freeze_part_gets_no_gradient_and_no_update(frozen):
    engine, before = trained({"freeze": frozen})
    parts = parts_of(engine.model)
    for name, param in engine.model.named_parameters():
        is_frozen = parts[name] in frozen or matches(name, frozen[-1])
        assert param.requires_grad != is_frozen
        assert torch.equal(param, before[name]) == is_frozen, name
        assert param.grad is None or not is_frozen
    table = MLLMModelKit.table(engine.model, engine.optimizer)
    shown = {line.split()[0]: line for line in table.splitlines()}
    assert all(shown[part].endswith("frozen") for part in frozen if part in shown)
    assert "0.01" in shown["projector" if "projector" not in frozen else "vision"]


def weights_of_frozen(layout, frozen):
    engine, before = trained({"freeze": frozen}, layout)
    found = weights(engine.model)
    for name, part in parts_of(engine.model).items():
        assert torch.equal(found[name], before[name]) == (part in frozen)
    return found


@pytest.mark.slow
def test_freeze_part_on_shards_equals_one_rank(on_ranks):
    frozen = ("vision", "llm")
    expected = weights_of_frozen(ALONE, frozen)
    for found in on_ranks({"shard": 2}, weights_of_frozen, frozen):
        assert_close(found, expected)


def test_optimizer_lr_by_part_sets_learning_rates():
    model = shared_model(LanguageModel, "qwen3_vl")
    by_part = {"*.visual.pos*": 4, "vision": 2, "projector": 3}
    optim = compose(MAGIC).config.optim
    update = {"lr": 1.0, "lr_by_part": by_part}
    optimizer = build_optimizer(model, optim.model_copy(update=update))
    found = {param: group["lr"] for group in optimizer.param_groups for param in group["params"]}
    expected = {"vision": 2, "projector": 3, "llm": 1}
    for name, part in parts_of(model).items():
        assert found[model.get_parameter(name)] == (4 if ".visual.pos" in name else expected[part])


@pytest.mark.slow
def test_activation_checkpointing_and_compile_by_part_change_only_their_blocks():
    plain, _ = trained({})
    backends = {"llm": "eager", "vision": "auto"}  # auto does not compile on a CPU
    modes = {"vision": "full", "projector": "selective"}
    engine, _ = trained({"activation_checkpointing": modes, "compile": backends})
    modules = dict(engine.model.named_modules())
    changed = {name.split(".")[2] for name, module in modules.items() if "forward" in vars(module)}
    assert changed == {"visual"}
    compiled = {name for name, module in modules.items() if module._compiled_call_impl is not None}
    blocks = ("layers.0", "layers.1", "norm")
    assert compiled == {f"hf.model.language_model.{name}" for name in blocks}
    for name, param in engine.model.named_parameters():
        assert torch.allclose(param, plain.model.get_parameter(name), atol=1e-6), name


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"freeze": ("audio",)},
            "model.freeze: LanguageModel has no part audio; it has vision, projector, llm",
        ),
        (
            {"activation_checkpointing": {"audio": "full"}},
            "model.activation_checkpointing: LanguageModel has no part audio; it has vision",
        ),
    ],
    ids=str,
)
def test_settings_part_that_the_model_lacks_is_rejected(settings, message):
    with user_error(message):
        trained(settings)


def test_settings_part_of_a_plain_module_is_rejected():
    model = torch.nn.Linear(2, 2)
    with user_error(r"model.compile: Linear has no part llm; only Hugging Face models have parts"):
        engine_of(model, optimizer=None, compile={"llm": "eager"})
    assert MLLMModelKit.table(model) == ""
