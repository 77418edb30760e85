"""Act with an exported folder: camera images, a state and an instruction in, a chunk of actions out.

This file is complete: it needs torch, numpy and transformers, and lies next to the weights it acts with.

    from act import Policy

    policy = Policy.from_pretrained(".")
    actions = policy.act({"observation.images.top": frame_HWC}, state, "put the block on the red plate")

`actions` is (steps, size), in the units of the training data. normalization.json has the statistics by which states
are normalized and actions are brought back to their units.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

FILE = "normalization.json"
FORMAT = 1
MODES = ("mean_std", "min_max", "quantiles", "none")
_TINY = 1e-6  # a dimension that varies less than this is only shifted


class Normalization:
    """How states and actions are normalized, from their statistics; kept as JSON next to the weights.

    `spec` is the content of normalization.json: `mode`, the statistics `state` and `action`, the dimensions of the
    action that are `relative` to the state, the `cameras` in their order, and the `image` size and scaling.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        if spec.get("format") != FORMAT:
            raise ValueError(f"{FILE} has format {spec.get('format')!r}; this code reads {FORMAT}")
        self.spec = dict(spec)
        self.mode = str(spec["mode"])
        self.relative = [int(one) for one in spec["relative"]]
        self.cameras = [str(one) for one in spec["cameras"]]
        self.state = _affine(self.mode, spec["state"])
        self.action = _affine(self.mode, spec["action"])

    @classmethod
    def load(cls, folder: str | Path) -> Normalization:
        file = Path(folder)
        file = file / FILE if file.is_dir() else file
        return cls(json.loads(file.read_text()))

    def save(self, folder: str | Path) -> None:
        (Path(folder) / FILE).write_text(json.dumps(self.spec, indent=1))

    @property
    def state_size(self) -> int:
        return len(self.state[0])

    @property
    def action_size(self) -> int:
        return len(self.action[0])

    def normalize_state(self, state: Any, size: int) -> Tensor:
        """(..., state size) -> (..., size): normalized, then padded with zeros."""
        offset, scale = self.state
        values = (np.asarray(state, np.float64) - offset) / scale
        return F.pad(torch.from_numpy(values).float(), (0, size - values.shape[-1]))

    def normalize_actions(self, actions: Any, state: Any, size: int) -> Tensor:
        """(..., steps, action size) and the state of the first frame -> (..., steps, size), padded with zeros."""
        values = np.array(actions, np.float64)
        if self.relative:
            values[..., self.relative] -= np.asarray(state)[..., None, self.relative]
        offset, scale = self.action
        values = (values - offset) / scale
        return F.pad(torch.from_numpy(values).float(), (0, size - values.shape[-1]))

    def unnormalize_actions(self, chunk: Tensor, state: Any) -> np.ndarray:
        """(..., steps, size) of the model -> (..., steps, action size) in the units of the training data."""
        offset, scale = self.action
        values = chunk.detach().double().cpu().numpy()[..., : self.action_size] * scale + offset
        if self.relative:
            values[..., self.relative] += np.asarray(state)[..., None, self.relative]
        return values.astype(np.float32)

    def image(self, frame: Any) -> Tensor:
        """A frame (H, W, 3) uint8 -> (3, height, width): resized to fit, centred on black, scaled."""
        spec = self.spec["image"]  # null for models whose own processor prepares images
        pixels = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1).float()
        pixels = _resize_with_pad(pixels, spec["height"], spec["width"])
        mean = torch.tensor(spec["mean"])[:, None, None]
        std = torch.tensor(spec["std"])[:, None, None]
        return (pixels / 255 - mean) / std


def _affine(mode: str, stats: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """(offset, scale): a normalized value is (value - offset) / scale."""
    low_high = {"min_max": ("min", "max"), "quantiles": ("q01", "q99")}
    if mode == "none":
        size = len(stats["mean"])
        return np.zeros(size), np.ones(size)
    if mode == "mean_std":
        offset = np.array(stats["mean"], np.float64)
        scale = np.array(stats["std"], np.float64)
    elif mode in low_high:
        low, high = (np.array(stats[name], np.float64) for name in low_high[mode])
        offset = (high + low) / 2
        scale = (high - low) / 2
    else:
        raise ValueError(f"{FILE}: mode {mode!r} is none of {', '.join(MODES)}")
    return offset, np.where(scale < _TINY, 1.0, scale)


def _resize_with_pad(pixels: Tensor, height: int, width: int) -> Tensor:
    """(3, H, W) in 0..255 to (3, height, width), its aspect ratio kept, zeros around it."""
    old_height, old_width = pixels.shape[1:]
    if (old_height, old_width) == (height, width):
        return pixels
    ratio = max(old_height / height, old_width / width)
    new_height = int(old_height / ratio)
    new_width = int(old_width / ratio)
    pixels = F.interpolate(
        pixels[None], (new_height, new_width), mode="bilinear", align_corners=False, antialias=True
    )[0]
    top = (height - new_height) // 2
    left = (width - new_width) // 2
    edges = (left, width - new_width - left, top, height - new_height - top)
    return F.pad(pixels.round().clamp(0, 255), edges)


def prompt_ids(tokenizer: Any, task: str, image_tokens: int, image_token_id: int) -> list[int]:
    """The token ids of pi0's prefix: image placeholders, the start token, the instruction and a line break."""
    text = tokenizer(f"{task.strip()}\n", add_special_tokens=False)["input_ids"]
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return [image_token_id] * image_tokens + start + list(text)


class Policy:
    """A pi0 model of transformers with its tokenizer and normalization."""

    def __init__(self, model: Any, tokenizer: Any, normalization: Normalization) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.normalization = normalization
        vision = model.config.vlm_config.vision_config
        self.image_tokens = (vision.image_size // vision.patch_size) ** 2

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> Policy:
        """`options` are those of `PI0ForConditionalGeneration.from_pretrained`, such as dtype and device_map."""
        from transformers import AutoTokenizer, PI0ForConditionalGeneration

        model = PI0ForConditionalGeneration.from_pretrained(folder, **options)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return cls(model, tokenizer, Normalization.load(folder))

    def act(
        self,
        images: Mapping[str, Any],
        state: Any,
        task: str,
        noise: Tensor | None = None,
        num_steps: int | None = None,
    ) -> np.ndarray:
        """The actions (steps, size) for one observation. `noise` (steps, max_action_dim) makes them repeatable."""
        noises = None if noise is None else noise[None]
        return self.act_batch([images], np.asarray(state)[None], [task], noises, num_steps)[0]

    @torch.no_grad()
    def act_batch(
        self,
        images: Sequence[Mapping[str, Any]],
        states: Any,
        tasks: Sequence[str],
        noise: Tensor | None = None,
        num_steps: int | None = None,
    ) -> np.ndarray:
        """The actions (observations, steps, size). An observation may lack cameras."""
        config = self.model.config
        device = self.model.device
        counts = [sum(name in seen for name in self.normalization.cameras) for seen in images]
        ids = []
        for task, count in zip(tasks, counts, strict=True):
            token = config.vlm_config.image_token_id
            ids.append(prompt_ids(self.tokenizer, task, count * self.image_tokens, token))
        longest = max(map(len, ids))
        input_ids = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
        size = self.normalization.spec["image"]
        shape = (len(ids), max(counts), 3, size["height"], size["width"])
        pixels = torch.zeros(shape)
        has_camera = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
        for row, seen in enumerate(images):
            cameras = [name for name in self.normalization.cameras if name in seen]
            for place, name in enumerate(cameras):
                pixels[row, place] = self.normalization.image(seen[name])
        state = self.normalization.normalize_state(states, config.max_state_dim)
        dtype = self.model.dtype
        chunk = self.model.sample_actions(
            state=state.to(device, dtype),
            input_ids=input_ids.to(device),
            pixel_values=pixels.to(device, dtype),
            noise=None if noise is None else noise.to(device, dtype),
            attention_mask=mask.to(device),
            pixel_attention_mask=has_camera.to(device),
            num_steps=num_steps,
        )
        return self.normalization.unnormalize_actions(chunk, states)
