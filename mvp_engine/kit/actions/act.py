"""Act with an exported folder: camera images, a state and an instruction in, a chunk of actions out.

This file is complete: it needs torch, numpy and transformers, and lies next to the weights it acts with.

    from act import Policy

    policy = Policy.from_pretrained(".")
    actions = policy.act({"observation.images.top": frame_HWC}, state, "put the block on the red plate")

`actions` is (steps, size), in the units of the training data. normalization.json has the statistics by which states
are normalized and actions are brought back to their units. The folder holds a pi0, or a vision-language model with a
head that decodes a chunk of actions (heads.safetensors).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

FILE = "normalization.json"
FORMAT = 1
HEADS = "heads.safetensors"
# How values are normalized, and by which of their statistics.
MODES = {
    "mean_std": ("mean", "std"),
    "min_max": ("min", "max"),
    "quantiles": ("q01", "q99"),
    "none": ("mean",),
}
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
        given = np.shape(state)[-1]
        if given != self.state_size:
            raise ValueError(f"a state has {given} values; the policy needs {self.state_size}")
        values = (np.asarray(state, np.float64) - offset) / scale
        if not np.isfinite(values).all():
            raise ValueError(f"a state has values that are not finite: {state}")
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

    def frames(self, images: Mapping[str, Any]) -> list[Any]:
        """The images of one observation in the order of the cameras; it may lack some of them."""
        found = {name: images[name] for name in self.cameras if name in images}
        # A camera under another name would be left out, and the actions wrong without an error.
        if not found or len(found) < min(len(images), len(self.cameras)):
            raise ValueError(f"the observation has {list(images)}; the policy needs {self.cameras}")
        for name, frame in found.items():
            # Values from 0 to 1 would be black, and the actions wrong without an error.
            pixels = np.asarray(frame)
            if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
                is_now = f"{name} is {pixels.shape} of {pixels.dtype}"
                raise ValueError(f"{is_now}; the policy needs (height, width, 3) of uint8")
        return list(found.values())

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
    if mode not in MODES:
        raise ValueError(f"{FILE}: mode {mode!r} is none of {', '.join(MODES)}")
    if mode == "none":
        size = len(stats["mean"])
        return np.zeros(size), np.ones(size)
    offset, scale = (np.array(stats[name], np.float64) for name in MODES[mode])
    if mode != "mean_std":  # the low and the high end
        offset, scale = (offset + scale) / 2, (scale - offset) / 2
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
    """A model of transformers that acts."""

    normalization: Normalization

    @staticmethod
    def from_pretrained(folder: str | Path, **options: Any) -> Policy:
        """The policy of an exported folder. `options` are those of transformers, such as dtype and device_map."""
        from transformers import AutoConfig

        normalization = Normalization.load(folder)
        config = AutoConfig.from_pretrained(folder)
        kind = Pi0 if config.model_type == "pi0" else ChunkRegressor
        return kind.load(Path(folder), config, normalization, options)

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
        frames = [self.normalization.frames(seen) for seen in images]
        chunk = self.chunks(frames, states, tasks, noise, num_steps)
        return self.normalization.unnormalize_actions(chunk, states)

    def chunks(
        self,
        frames: Sequence[Sequence[Any]],
        states: Any,
        tasks: Sequence[str],
        noise: Tensor | None,
        num_steps: int | None,
    ) -> Tensor:
        """Normalized actions (observations, steps, max_action_dim)."""
        raise NotImplementedError


class Pi0(Policy):
    """A pi0 with its tokenizer. Its actions begin as noise."""

    def __init__(self, model: Any, tokenizer: Any, normalization: Normalization) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.normalization = normalization
        vision = model.config.vlm_config.vision_config
        self.image_tokens = (vision.image_size // vision.patch_size) ** 2

    @classmethod
    def load(
        cls, folder: Path, config: Any, normalization: Normalization, options: Mapping[str, Any]
    ) -> Pi0:
        from transformers import AutoTokenizer, PI0ForConditionalGeneration

        model = PI0ForConditionalGeneration.from_pretrained(folder, **options)
        return cls(model, AutoTokenizer.from_pretrained(folder), normalization)

    def chunks(
        self,
        frames: Sequence[Sequence[Any]],
        states: Any,
        tasks: Sequence[str],
        noise: Tensor | None,
        num_steps: int | None,
    ) -> Tensor:
        if num_steps is not None and num_steps < 1:
            raise ValueError(f"num_steps={num_steps}: noise becomes actions in one step or more")
        config = self.model.config
        device = self.model.device
        ids = []
        for task, seen in zip(tasks, frames, strict=True):
            token = config.vlm_config.image_token_id
            ids.append(prompt_ids(self.tokenizer, task, len(seen) * self.image_tokens, token))
        longest = max(map(len, ids))
        input_ids = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
        counts = torch.tensor([len(seen) for seen in frames])
        most = int(counts.max())
        size = self.normalization.spec["image"]
        pixels = torch.zeros(len(ids), most, 3, size["height"], size["width"])
        for row, seen in enumerate(frames):
            for place, frame in enumerate(seen):
                pixels[row, place] = self.normalization.image(frame)
        has_camera = torch.arange(most) < counts[:, None]
        state = self.normalization.normalize_state(states, config.max_state_dim)
        dtype = self.model.dtype
        actions: Tensor = self.model.sample_actions(
            state=state.to(device, dtype),
            input_ids=input_ids.to(device),
            pixel_values=pixels.to(device, dtype),
            noise=None if noise is None else torch.as_tensor(noise).to(device, dtype),
            attention_mask=mask.to(device),
            pixel_attention_mask=has_camera.to(device),
            num_steps=num_steps,
        )
        return actions


class ChunkRegressor(Policy):
    """A vision-language model with its processor, and a head that decodes a chunk in one forward.

    Behind the prompt stand a state token and one query token per step. The prompt is causal; queries attend to the
    prompt, the state and each other.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        heads: Mapping[str, Tensor],
        normalization: Normalization,
    ) -> None:
        self.model = model.eval()
        self.processor = processor
        config = model.config
        parts = chunk_head(
            config.get_text_config().hidden_size,
            config.chunk_size,
            config.max_state_dim,
            config.max_action_dim,
        )
        self.heads = nn.ModuleDict(parts).to(model.device, model.dtype)
        self.heads.load_state_dict(heads)
        self.normalization = normalization
        self._suffix: Tensor | None = None  # (1, 1 + steps, hidden), of the forward that runs
        decoder = model.model.get_decoder()
        decoder.register_forward_pre_hook(self._replace_tokens, with_kwargs=True)

    @classmethod
    def load(
        cls, folder: Path, config: Any, normalization: Normalization, options: Mapping[str, Any]
    ) -> ChunkRegressor:
        import transformers
        from safetensors.torch import load_file
        from transformers import AutoProcessor

        model_class = getattr(transformers, config.architectures[0])
        model = model_class.from_pretrained(folder, **options)
        processor = AutoProcessor.from_pretrained(folder)
        return cls(model, processor, load_file(folder / HEADS), normalization)

    def chunks(
        self,
        frames: Sequence[Sequence[Any]],
        states: Any,
        tasks: Sequence[str],
        noise: Tensor | None,
        num_steps: int | None,
    ) -> Tensor:
        if noise is not None or num_steps is not None:
            raise ValueError("this policy has no noise and no steps: leave noise and num_steps out")
        size = self.model.config.max_state_dim
        normalized = self.normalization.normalize_state(states, size).to(self.model.device)
        return torch.stack(
            [self._chunk(*one) for one in zip(frames, normalized, tasks, strict=True)]
        )

    def _chunk(self, frames: Sequence[Any], state: Tensor, task: str) -> Tensor:
        inputs = self._prompt(frames, task).to(self.model.device)
        for name, value in inputs.items():
            inputs[name] = value.to(self.model.dtype) if value.is_floating_point() else value
        ids = inputs.pop("input_ids")
        inputs.pop("attention_mask", None)
        queries = self._queries
        length = ids.shape[1]
        behind = 1 + len(queries)
        position_ids = self._positions(ids, inputs)
        # Any token will do that is no placeholder of an image: its embedding is replaced.
        ids = F.pad(ids, (0, behind), value=int(ids[0, -1]))
        if "mm_token_type_ids" in inputs:
            inputs["mm_token_type_ids"] = F.pad(inputs["mm_token_type_ids"], (0, behind))
        is_seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        is_seen[length + 1 :] = True
        mask = torch.zeros(is_seen.shape, dtype=self.model.dtype, device=ids.device)
        mask = mask.masked_fill(~is_seen, torch.finfo(mask.dtype).min)
        state = self.heads["state_proj"](state[None].to(self.model.dtype))
        self._suffix = torch.cat([state, queries])[None]
        try:
            output = self.model.model(
                input_ids=ids,
                attention_mask=mask[None, None],
                position_ids=position_ids,
                use_cache=False,
                **inputs,
            )
        finally:
            self._suffix = None
        chunk: Tensor = self.heads["action_head"](output.last_hidden_state[0, length + 1 :])
        return chunk.float()

    def _prompt(self, frames: Sequence[Any], task: str) -> Any:
        from PIL import Image

        content = [{"type": "image", "image": Image.fromarray(np.asarray(one))} for one in frames]
        message = {"role": "user", "content": [*content, {"type": "text", "text": task}]}
        return self.processor.apply_chat_template(
            [message],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            **self.normalization.spec.get("template", {}),
        )

    @property
    def _queries(self) -> Tensor:
        queries: Any = self.heads["action_queries"]
        weight: Tensor = queries.weight
        return weight

    def _positions(self, ids: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Those of the prompt and of the tokens behind it."""
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        rope = getattr(self.model.model, "get_rope_index", None)
        if rope is not None:
            known = inspect.signature(rope).parameters
            options = {name: value for name, value in inputs.items() if name in known}
            positions = rope(ids, **options)[0]
        behind = suffix_positions(positions[..., -1], len(self._queries))
        return torch.cat([positions, behind.view(*positions.shape[:-1], -1)], dim=-1)

    def _replace_tokens(
        self, decoder: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Forward pre-hook of the decoder."""
        return None if self._suffix is None else (args, with_suffix(kwargs, self._suffix))


# The head of a chunk regressor, in a training and here.
#
# Legend: S sequences, U suffix tokens (all states, then all chunks), A axes of positions, D hidden size.


def chunk_head(
    hidden_size: int, steps: int, state_size: int, action_size: int
) -> dict[str, nn.Module]:
    """The modules of the head, by the names of their weights."""
    return {
        "action_queries": nn.Embedding(steps, hidden_size),
        "state_proj": nn.Linear(state_size, hidden_size),
        "action_head": nn.Sequential(
            nn.LayerNorm(hidden_size),
            nn.Linear(hidden_size, hidden_size),
            nn.GELU(),
            nn.Linear(hidden_size, action_size),
        ),
    }


def suffix_positions(ends: Tensor, steps: int) -> Tensor:
    """Positions of suffix tokens, (U,) or (A, U), behind those of the last prompt tokens, `ends`: (S,) or (A, S).

    Images may take fewer positions than tokens, so the length of a prompt does not say where it ends.
    """
    ends_S = ends.amax(0) if ends.ndim == 2 else ends
    steps_C = torch.arange(2, steps + 2, device=ends.device)
    positions_U = torch.cat([ends_S + 1, (ends_S[:, None] + steps_C).flatten()])
    return positions_U.expand(*ends.shape[:-1], -1)


def with_suffix(kwargs: dict[str, Any], suffix_1UD: Tensor) -> dict[str, Any]:
    """The decoder's arguments with states and queries in place of the embeddings of the last tokens."""
    embeds = kwargs["inputs_embeds"]
    kept = embeds[:, : embeds.shape[1] - suffix_1UD.shape[1]]
    joined = torch.cat([kept, suffix_1UD.to(embeds.dtype)], dim=1)
    return {**kwargs, "inputs_embeds": joined}
