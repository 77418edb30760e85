"""ActionRowEncoder: from a frame of a LeRobot folder to a batch of one sequence, the prefix of an action model.

Legend: C steps of a chunk, A and Q the action and state sizes of the model. Rows of other sources (chats with images)
are encoded as by the data kit, with zeros in the action fields, so that both kinds fit into one pack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.kit.actions.act import Normalization, prompt_ids
from mvp_engine.kit.actions.rows import FrameRow
from mvp_engine.kit.data.encode.row_encoder import RowEncoder
from mvp_engine.kit.data.encode.sequences import EncodedSequence
from mvp_engine.kit.data.read.media_info import MediaInfo
from mvp_engine.kit.data.read.row_format import RowFormat
from mvp_engine.kit.data.read.row_types import BadRow

IMAGES = "pixel_values"


@dataclass(frozen=True)
class ActionShape:
    """Sizes of a pi0 model, from its config."""

    chunk: int
    action_dim: int
    state_dim: int
    image_size: int
    image_tokens: int  # of one camera
    image_token_id: int

    @classmethod
    def of_config(cls, config: Any) -> ActionShape:
        if getattr(config, "model_type", None) != "pi0":
            raise UserError(
                f"model.path: {getattr(config, 'model_type', None)!r} is no pi0 model, and the action kit writes "
                "prefixes for pi0. Wire batches of another action head yourself (docs/actions.md)"
            )
        vision = config.vlm_config.vision_config
        return cls(
            chunk=config.chunk_size,
            action_dim=config.max_action_dim,
            state_dim=config.max_state_dim,
            image_size=vision.image_size,
            image_tokens=(vision.image_size // vision.patch_size) ** 2,
            image_token_id=config.vlm_config.image_token_id,
        )

    def image_spec(self) -> dict[str, Any]:
        """The `image` entry of normalization.json: pi0's images are scaled to -1..1."""
        half = [0.5, 0.5, 0.5]
        return {"height": self.image_size, "width": self.image_size, "mean": half, "std": half}


@dataclass(frozen=True)
class EncodedFrame(EncodedSequence):
    """The token ids of a frame's prefix; its images are decoded when the batch is built."""

    frame: FrameRow | None = None

    def actions_shown(self) -> dict[str, Any]:
        """The state and the chunk of actions in their own units, for `mvp data inspect`."""
        assert self.frame is not None
        actions, inside = self.frame.action_chunk()
        steps = actions[inside].astype(float).round(6).tolist()
        return {"state": self.frame.state.astype(float).round(6).tolist(), "actions": steps}


class ActionRowEncoder(RowEncoder):
    """Encodes frames for one pi0 model. `normalization` is set once the statistics are known."""

    normalization: Normalization
    shape: ActionShape

    def set_shape(self, shape: ActionShape) -> None:
        self.shape = shape
        # Instructions are few; a frame's tokens are those of its instruction.
        self._ids = lru_cache(maxsize=4096)(self._make_ids)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_ids"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.set_shape(self.shape)

    def _make_ids(self, task: str, cameras: int) -> tuple[int, ...]:
        tokens = cameras * self.shape.image_tokens
        token = self.shape.image_token_id
        return tuple(prompt_ids(self.media.tokenizer, task, tokens, token))

    def prefix_ids(self, task: str, cameras: int) -> tuple[int, ...]:
        """The token ids of a prefix with this instruction and number of cameras."""
        return self._ids(task, cameras)

    def media_names(self, kinds: Iterable[str]) -> frozenset[str]:
        return frozenset(IMAGES for kind in kinds if kind == "image")

    def encode(
        self,
        raw: Mapping[str, Any],
        format: RowFormat | str | None,
        root: Path,
        fit: bool = True,
        decode: bool = False,
    ) -> list[EncodedSequence]:
        if not isinstance(raw, FrameRow):
            return super().encode(raw, format, root, fit, decode)
        cameras = len(raw.rows.cameras)
        ids = list(self._ids(raw.task, cameras))
        size = self.shape.image_size
        infos = [MediaInfo("image", size, size)] * cameras
        starts = [number * self.shape.image_tokens for number in range(cameras)]
        spans = [(start, start + self.shape.image_tokens) for start in starts]
        return [EncodedFrame(ids, [False] * len(ids), [], infos, [], spans, frame=raw)]

    def item_cost(self, info: MediaInfo) -> int:
        return 3 * info.width * info.height

    def load(
        self, sides: Sequence[EncodedSequence], root: Path, fields: Mapping[str, float]
    ) -> list[PackedBatch]:
        if not isinstance(sides[0], EncodedFrame):
            return [self._with_empty_actions(one) for one in super().load(sides, root, fields)]
        frame = sides[0].frame
        assert frame is not None
        images = [self.normalization.image(pixels) for pixels in frame.images()]
        batch = self.observation(sides[0].ids, images, frame.state, fields)
        actions, inside = frame.action_chunk()
        if not inside.any():
            raise BadRow("no_actions", "the frame has no action that can be read")
        chunk = self.normalization.normalize_actions(actions, frame.state, self.shape.action_dim)
        mask = torch.zeros(self.shape.chunk, self.shape.action_dim, dtype=torch.bool)
        mask[:, : actions.shape[1]] = torch.from_numpy(inside)[:, None]
        batch.sequence_fields["action_chunk"] = torch.where(mask, chunk, 0.0)[None]
        batch.sequence_fields["action_mask"] = mask[None]
        return [batch]

    def observation(
        self,
        ids: Sequence[int],
        images: Sequence[Tensor],
        state: Any,
        fields: Mapping[str, float],
    ) -> PackedBatch:
        """A batch of one prefix, without actions: what a policy acts on."""
        values = torch.stack(list(images)) if images else self._no_images().values
        count = len(images)
        media = Media(values, torch.ones(count).long(), torch.zeros(count).long())
        numbers = {name: torch.tensor([value]) for name, value in fields.items()}
        token_ids = torch.tensor(list(ids))
        batch = PackedBatch.from_sequences(
            [token_ids],
            [torch.zeros(len(token_ids), dtype=torch.bool)],
            sequence_fields=numbers,
            media={IMAGES: self._cast(media)},
        )
        state_Q = self.normalization.normalize_state(state, self.shape.state_dim)
        return self._with_empty_actions(batch, state_Q)

    def empty_batch(self, fields: Mapping[str, float]) -> PackedBatch:
        ids = torch.tensor([self.media.tokenizer.eos_token_id or 0])
        numbers = {name: torch.tensor([value]) for name, value in fields.items()}
        batch = PackedBatch.from_sequences(
            [ids],
            [torch.tensor([False])],
            sequence_fields=numbers,
            media={IMAGES: self._cast(self._no_images())},
        )
        return self._with_empty_actions(batch)

    def _no_images(self) -> Media:
        size = self.shape.image_size
        none = torch.zeros(0).long()
        return Media(torch.zeros(0, 3, size, size), none, none)

    def _with_empty_actions(self, batch: PackedBatch, state_Q: Tensor | None = None) -> PackedBatch:
        """The batch with action fields that carry no loss; `media_end` is only of generation."""
        count = batch.num_sequences
        shape = self.shape
        kept = {name: v for name, v in batch.sequence_fields.items() if name != "media_end"}
        state = torch.zeros(shape.state_dim) if state_Q is None else state_Q
        added = {
            "action_state": state[None].expand(count, -1).contiguous(),
            "action_chunk": torch.zeros(count, shape.chunk, shape.action_dim),
            "action_mask": torch.zeros(count, shape.chunk, shape.action_dim, dtype=torch.bool),
        }
        media = batch.media or {IMAGES: self._cast(self._no_images())}
        return replace(batch, sequence_fields={**kept, **added}, media=media)
