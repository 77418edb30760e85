"""Parts: one per parameter; freezing, learning rates, activation checkpointing and compiling by part."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
import torch
from conftest import MAGIC
from families import FAMILIES, VISION, parallel
from folders import alone
from tiny_models import build_model, samples, shared_model

from mvp_engine.config import compose
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel, ValueModel
from mvp_engine.hf.model.model_parts import parts_of
from mvp_engine.kit import MLLMModelKit
from mvp_engine.model_engine import LanguageModelEngine, Settings
from mvp_engine.model_engine.optim import build_optimizer

# Name patterns of the parts of each family; parameters that match none belong to the llm.
VISUAL = {"vision": "visual.*", "projector": "visual.merger.*"}
TOWER = {"vision": "vision_tower.*", "projector": "multi_modal_projector.*"}
NEWLINE = {**TOWER, "projector": "multi_modal_projector.* image_newline"}
IDEFICS = {"vision": "vision_model.*", "projector": "connector.*"}
EXPECTED: dict[str, dict[str, str]] = {
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
def test_parts_of_family_cover_each_parameter_once(family: str) -> None:
    models = [shared_model(kind, family) for kind in (LanguageModel, ValueModel)]
    patterns = EXPECTED.get(family, TOWER if family in VISION else {})
    for model in models:
        parts = parts_of(model)
        assert list(parts) == [name for name, _ in model.named_parameters()]
        for name, part in parts.items():
            inner = name.removeprefix("hf.").removeprefix("model.")
            fits = [
                p
                for p, pattern in patterns.items()
                if any(fnmatchcase(inner, one) for one in pattern.split())
            ]
            assert part == ("projector" if "projector" in fits else (*fits, "llm")[0]), name
        assert set(parts.values()) == {*patterns, "llm"}
        sizes = [
            int(row.split()[1].replace(",", ""))
            for row in MLLMModelKit.table(model).splitlines()[1:]
        ]
        assert sum(sizes[:-1]) == sizes[-1] == sum(param.numel() for param in model.parameters())


def trained(
    settings: Settings, layout: Layout | None = None
) -> tuple[LanguageModelEngine, dict[str, torch.Tensor]]:
    """A tiny Qwen3-VL after one step on images, and its weights before the step."""
    model = build_model(LanguageModel, "qwen3_vl")
    batch = PackedBatch.concat(samples(model, "qwen3_vl"))
    engine = LanguageModelEngine(model, layout or alone(), settings)
    engine.initialize(lambda model: torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.5))
    before = {name: full_tensor(param.detach()).clone() for name, param in model.named_parameters()}
    engine.train_batch(
        [batch], lambda b: (-model(b, ["log_probs"])["log_probs"].sum(), b.num_loss_tokens)
    )
    return engine, before


@pytest.mark.parametrize("frozen", [("vision",), ("vision", "llm"), ("projector", "hf.lm_head.*")])
def test_freeze_part_gets_no_gradient_and_no_update(frozen: tuple[str, ...]) -> None:
    engine, before = trained(Settings(freeze=frozen))
    parts = parts_of(engine.model)
    for name, param in engine.model.named_parameters():
        is_frozen = parts[name] in frozen or (
            name == "hf.lm_head.weight" and "hf.lm_head.*" in frozen
        )
        assert param.requires_grad != is_frozen
        if is_frozen:
            assert param.grad is None
            assert torch.equal(param, before[name]), name
        else:
            assert not torch.equal(param, before[name]), name
    shown = {
        line.split()[0]: line
        for line in MLLMModelKit.table(engine.model, engine.optimizer).splitlines()
    }
    assert all(shown[part].endswith("frozen") for part in frozen if part in shown)
    assert "0.01" in shown["projector" if "projector" not in frozen else "vision"]


def train_on_two_ranks(frozen: tuple[str, ...]) -> dict[str, torch.Tensor]:
    world = World.join("cpu")
    engine, before = trained(Settings(freeze=frozen), Layout.of(world, parallel(shard=2)))
    found = {
        name: full_tensor(param.detach()).clone() for name, param in engine.model.named_parameters()
    }
    parts = parts_of(engine.model)
    assert all(
        torch.equal(value, before[name]) == (parts[name] in frozen) for name, value in found.items()
    )
    world.close()
    return found


def test_freeze_part_on_shards_equals_one_rank(ranks2) -> None:
    frozen = ("vision", "llm")
    single, _ = trained(Settings(freeze=frozen))
    for found in ranks2.run(train_on_two_ranks, frozen):
        for name, param in single.model.named_parameters():
            assert torch.allclose(found[name], param, atol=1e-5), name


def test_optimizer_lr_by_part_sets_learning_rates() -> None:
    model = shared_model(LanguageModel, "qwen3_vl")
    settings = compose(MAGIC).config.optim.model_copy(
        update={"lr": 1.0, "lr_by_part": {"*.visual.pos*": 4, "vision": 2, "projector": 3}}
    )
    optimizer = build_optimizer(model, settings)
    found = {param: group["lr"] for group in optimizer.param_groups for param in group["params"]}
    expected = {"vision": 2, "projector": 3, "llm": 1}
    for name, part in parts_of(model).items():
        assert found[model.get_parameter(name)] == (4 if ".visual.pos" in name else expected[part])


def test_activation_checkpointing_and_compile_by_part_change_only_their_blocks() -> None:
    plain, _ = trained(Settings())
    backends = {"llm": "eager", "vision": "auto"}  # auto does not compile on a CPU
    engine, _ = trained(
        Settings(
            activation_checkpointing={"vision": "full", "projector": "selective"}, compile=backends
        )
    )
    changed = {
        name.split(".")[2]
        for name, module in engine.model.named_modules()
        if "forward" in vars(module)
    }
    assert changed == {"visual"}
    compiled = {
        name
        for name, module in engine.model.named_modules()
        if module._compiled_call_impl is not None
    }
    assert compiled == {
        f"hf.model.language_model.{name}" for name in ("layers.0", "layers.1", "norm")
    }
    for name, param in engine.model.named_parameters():
        assert torch.allclose(param, plain.model.get_parameter(name), atol=1e-6), name


def test_settings_part_that_the_model_lacks_is_rejected() -> None:
    for settings, message in (
        (
            Settings(freeze=("audio",)),
            "model.freeze: LanguageModel has no part audio; it has vision, projector, llm",
        ),
        (
            Settings(activation_checkpointing={"audio": "full"}),
            "model.activation_checkpointing: LanguageModel has no part audio; it has vision",
        ),
    ):
        with pytest.raises(UserError, match=message):
            trained(settings)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(
        UserError,
        match=r"model.compile: Linear has no part llm; only Hugging Face models have parts",
    ):
        LanguageModelEngine(model, alone(), Settings(compile={"llm": "eager"})).initialize()
    assert MLLMModelKit.table(model) == ""
