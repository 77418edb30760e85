"""Check an action data kit: right frames, chunks inside of episodes, statistics of what is trained, and its inverse.

check.py [FILE.py:NAME]        # NAME is a subclass of ActionDataKit; see SKILL.md
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PI0Config

from mvp_engine.kit import MLLMData
from mvp_engine.kit.actions import ActionData, ActionDataKit
from mvp_engine.kit.actions.write import LeRobotWriter
from mvp_engine.kit.tiny_processors import train_tokenizer
from mvp_engine.tools.skill_check import given, run_check

LENGTHS = (9, 14)
CHUNK = 4
CAMERA = "observation.images.top"
TASK = "go there\n"


def color(frame: int) -> int:
    """The brightness of a frame in its episode."""
    return 20 + 15 * frame


def write(root: Path) -> Path:
    """States far from zero, actions close to the state: relative and absolute statistics differ much."""
    rng = np.random.default_rng(0)
    sizes = {"observation.state": 3, "action": 3}
    with LeRobotWriter(root, fps=10, sizes=sizes, cameras={CAMERA: (32, 32)}, codec="libx264") as writer:
        for length in LENGTHS:
            state = 50 + rng.normal(0, 20, (length, 3)).cumsum(0).astype(np.float32)
            action = (state + rng.normal(0, 1, (length, 3))).astype(np.float32)
            frames = np.stack([np.full((32, 32, 3), color(frame), np.uint8) for frame in range(length)])
            writer.add({"observation.state": state, "action": action}, {CAMERA: frames}, TASK.strip())
    return root


def make_kit(kit_class: Any, root: Path, relative: bool) -> Any:
    text = {"model_type": "gemma", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 300}
    vision = {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 16, "hidden_size": 16}
    vlm = {"model_type": "paligemma", "text_config": text, "vision_config": vision, "image_token_id": 3}
    config = PI0Config(vlm_config=vlm, chunk_size=CHUNK, max_action_dim=4, max_state_dim=4)
    data = MLLMData.model_validate({"sources": [{"path": str(root)}], "pack_tokens": 64, "global_batch_tokens": 64})
    return kit_class(
        data, ActionData(relative=relative), train_tokenizer([TASK], 300, ("<image>",)), model_config=config
    )


def problems(kit_class: Any = ActionDataKit) -> list[str]:
    """The problems of a data kit, one sentence each."""
    with tempfile.TemporaryDirectory() as folder:
        root = write(Path(folder) / "robot")
        found = _problems(make_kit(kit_class, root, False), "absolute")
        return list(dict.fromkeys(found + _problems(make_kit(kit_class, root, True), "relative")))


def _problems(kit: Any, name: str) -> list[str]:
    found = []
    rows = kit.train_folders()[0][0]
    ends = rows.frames.ends[rows.frames.episode]
    chunks = []
    for batch in kit.loader():
        fields = batch.sequence_fields
        for at, sample in enumerate(fields["sample"].tolist()):
            frame = int(rows.frames.frame[sample])
            seen = float((batch.media["pixel_values"].values[at].mean() * 0.5 + 0.5) * 255)
            if abs(seen - color(frame)) > 5:
                found.append(f"frame {frame} shows the image of another time")
            inside = min(CHUNK, int(ends[sample]) - sample)
            mask = fields["action_mask"][at]
            if mask[inside:].any():
                found.append("steps after the end of an episode carry loss: mask them")
            if not mask[:inside, :3].all():
                found.append("steps inside of the episode carry no loss")
            chunk = fields["action_chunk"][at]
            back = kit.normalization.unnormalize_actions(chunk, rows.states[sample])[:inside]
            if not np.allclose(back, rows.actions[sample : sample + inside], rtol=1e-4, atol=1e-3):
                found.append(f"{name} actions do not come back to their units: invert what normalizes them")
            chunks.append(chunk[:inside, :3].numpy())
    spread = np.concatenate(chunks).std(axis=0)
    if not np.allclose(spread, 1, atol=0.3):
        shown = ", ".join(f"{one:.3g}" for one in spread)
        found.append(
            f"normalized {name} actions have the standard deviation {shown}, not 1: the statistics are of other values"
        )
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    run_check(lambda: problems(given(ActionDataKit, "the data kit", "Kit")))
