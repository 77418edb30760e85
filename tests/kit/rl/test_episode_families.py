"""Episodes with an image in every turn, by all image-text types of transformers: no gap to the trainer, or a reason."""

import importlib.util
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CAMPAIGN
from families import is_supported
from PIL import Image
from test_prompts import kit_of
from tiny_vlm import chat
from vlm_sweep import NotTinyError, random_model, types
from vlm_tiny import special_of, tiny_config, tiny_processor

from mvp_engine.data.batch import IGNORE
from mvp_engine.distributed import Layout, World
from mvp_engine.errors import UserError
from mvp_engine.hf.model.preflight import MediaPreflight, check_packing
from mvp_engine.kit.decoding import complete
from mvp_engine.kit.rl.chat import ChatSettings
from mvp_engine.kit.rl.episodes import Episodes, RewardFailed
from mvp_engine.kit.rl.prompts import prompt_loader
from mvp_engine.kit.rl.rollout import PackedRollout, Sampling, measure_gap, rollout_batch
from mvp_engine.kit.rl.settings import RewardSettings
from mvp_engine.model_engine import LanguageModelEngine

# Different positions, processors and layers; all others in a campaign.
QUICK = ("gemma3", "glm_ocr", "llama4", "mistral3", "qwen3_5", "smolvlm")


def picture(seed, height=24):
    return np.random.default_rng(seed).integers(0, 255, (height, 40, 3), dtype=np.uint8)


def looks(row, chat):
    """Three turns, whose second one reads an image of a tool, and the third another one of another size."""
    chat.answer()
    chat.tool("Closer:", picture(1), name="zoom")
    chat.answer()
    chat.tool("Again:", picture(2, 40), name="zoom")
    chat.answer()
    return 1.0


def measured(name, folder):
    """The gap of episodes by a tiny random model; a UserError where the type is refused."""
    processor = tiny_processor(name)
    config = tiny_config(name, processor)
    model = random_model(config, special_of(name).noise)
    check_packing(model)
    rows = []
    for i in range(2):
        Image.fromarray(picture(10 + i)).save(folder / f"{i}.png")
        question = [{"type": "image", "image": f"{i}.png"}, {"type": "text", "text": f"What? {i}"}]
        rows.append(chat(question[i:], "This."))  # one of them without an image in the prompt
    limits = {"pack_tokens": 32768, "global_batch_tokens": 32768, "max_bad_rows": 0.0}
    kit = kit_of(folder, rows, processor, model.hf.config, **limits)
    settings = ChatSettings(kit.row_encoder, 4, 30_000, 8, ())
    settings.check(has_tools=True)
    engine = LanguageModelEngine(model, Layout(World.join("cpu")))
    engine.initialize()
    (prompts,) = prompt_loader(kit, prompts=2, shuffle=False)
    preflight = MediaPreflight(model)
    preflight.check(
        preflight.unchecked([prompt.batch for prompt in prompts]), exact=True, reference=True
    )
    group: Any = SimpleNamespace(generate=partial(complete, engine))
    rollout = PackedRollout(group, budget=30_000)
    sampling = Sampling(4, seed=1, samples=2)
    episodes = Episodes(
        looks,
        kit.row_encoder.media.tokenizer,
        RewardSettings(workers=4, max_errors=0.0),
        0,
        settings,
    )
    try:
        samples, _ = episodes.play(prompts, rollout, sampling)
    finally:
        episodes.close()
    assert [len(sample.turns) for sample in samples] == [3] * 4
    batch = rollout_batch(prompts, samples)
    sampled = [
        id for sample in samples for start, end in sample.turns for id in sample.tokens[start:end]
    ]
    assert batch.labels[batch.labels != IGNORE].tolist() == sampled
    with torch.no_grad():
        trainer_T = model(batch, ["log_probs"], temperature=1.0)["log_probs"]
    return measure_gap(batch, trainer_T, prompts, samples)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=CAMPAIGN) for name in types()]
)
def test_episode_with_images_of_tools_has_no_gap_or_the_type_is_refused(name, tmp_path):
    needs = special_of(name).needs
    if not is_supported(name) or (needs and importlib.util.find_spec(needs) is None):
        pytest.skip(f"needs {needs or 'a newer transformers'}")
    try:
        gap = measured(name, tmp_path)
    except (UserError, NotTinyError) as error:
        if name in QUICK or (isinstance(error, RewardFailed) and "BadRow: " not in str(error)):
            raise
        print(f"{name}: refused: {str(error)[:300]}")
        return
    (worst,) = gap.by_modality.values()
    print(f"{name}: gap at most {worst.largest:.1e} over {worst.tokens} tokens")
    assert set(gap.by_modality) == {"image"}
    assert worst.largest < 2e-5, [one.text(tiny_processor(name).tokenizer) for one in gap.worst]
    assert gap.by_turn["turn2+"].tokens == 2 * gap.by_turn["turn1"].tokens
