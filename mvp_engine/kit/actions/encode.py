"""ActionRowEncoder: from a frame of a LeRobot folder to a batch of one sequence, the prefix of an action model.

Legend: C steps of a chunk, A and Q the action and state sizes of the model. A frame is a prompt for the model's own
processor and chat template: the images of its cameras, then the instruction. Rows of other sources have zeros in the
action fields, so that both kinds fit into one pack.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.kit.actions.act import Normalization, prompt_ids
from mvp_engine.kit.actions.action_model import ActionSpec
from mvp_engine.kit.actions.rows import FrameRow
from mvp_engine.kit.data.encode.row_encoder import EncodedSequence, RowEncoder
from mvp_engine.kit.data.read.decoders import MediaInfo, decode_image
from mvp_engine.kit.data.read.row_types import BadRow, Message, Part, Row, RowFormat
from mvp_engine.kit.data.read.rows import read_row

Size = tuple[int, int]  # (height, width) of an image


@dataclass(frozen=True)
class EncodedFrame(EncodedSequence):
    """The token ids of a frame's prefix; its images are decoded when the batch is built."""

    frame: FrameRow | None = None

    def facts(self) -> dict[str, Any]:
        """The state and the chunk of actions in their own units, for `mvp data inspect`."""
        assert self.frame is not None
        actions, inside = self.frame.action_chunk()
        steps = actions[inside].astype(float).round(6).tolist()
        return {"state": self.frame.state.astype(float).round(6).tolist(), "actions": steps}


class ActionRowEncoder(RowEncoder):
    """Encodes frames and other rows for one action model. `normalization` is set once the statistics are known."""

    normalization: Normalization
    spec: ActionSpec

    def set_model(self, config: Any) -> None:
        """Take the sizes of the actions from the model's config."""
        self.spec = ActionSpec.of(config, "regression")
        self._cache_prefixes()

    def image_spec(self) -> dict[str, Any] | None:
        """The `image` entry of normalization.json; None where the processor of the folder prepares images."""
        return None

    def _cache_prefixes(self) -> None:
        # Instructions are few, and the tokens of a frame are those of its instruction.
        self._cached = lru_cache(maxsize=4096)(self._encode_prefix)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_cached"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._cache_prefixes()

    # ---- Prefixes -------------------------------------------------------------------------------------

    def prefix(self, task: str, sizes: Sequence[Size]) -> EncodedSequence:
        """The prefix of an instruction and images of these sizes, without the images."""
        return self._cached(task, tuple(sizes))

    def prefix_cost(self, task: str, sizes: Sequence[Size]) -> tuple[int, int]:
        """Tokens and encoder work of a prefix, as packing plans count them."""
        found = self.prefix(task, sizes)
        return len(found.ids), self.encoder_cost([found])

    def _encode_prefix(self, task: str, sizes: tuple[Size, ...]) -> EncodedSequence:
        blank = [np.zeros((*size, 3), np.uint8) for size in sizes]
        return self._encode_row(_prompt(task, blank), Path(), False, False)[0]

    def prefix_batch(
        self, task: str, images: Sequence[np.ndarray], fields: Mapping[str, float]
    ) -> PackedBatch:
        """The prefix with its images as a batch of one sequence, without action fields."""
        sides = self._encode_row(_prompt(task, images), Path(), False, True)
        return super().load(sides, Path(), fields)[0]

    def observation(
        self, task: str, images: Sequence[np.ndarray], state: Any, fields: Mapping[str, float]
    ) -> PackedBatch:
        """A batch of one prefix with its state, without actions: what a policy acts on."""
        batch = self.prefix_batch(task, images, fields)
        return self.with_actions(
            batch, self.normalization.normalize_state(state, self.spec.state_dim)
        )

    # ---- Rows -----------------------------------------------------------------------------------------

    def encode(
        self,
        raw: Mapping[str, Any],
        format: RowFormat | str | None,
        root: Path,
        fit: bool = True,
        decode: bool = False,
    ) -> list[EncodedSequence]:
        if not isinstance(raw, FrameRow):
            return self.encode_chat(raw, format, root, fit, decode)
        found = self.prefix(raw.task, raw.rows.image_sizes)
        fields = {name: getattr(found, name) for name in ("ids", "loss", "infos", "spans")}
        return [EncodedFrame(**fields, parts=[], expansions=[], frame=raw)]

    def encode_chat(
        self,
        raw: Mapping[str, Any],
        format: RowFormat | str | None,
        root: Path,
        fit: bool,
        decode: bool,
    ) -> list[EncodedSequence]:
        """A row that is no frame."""
        return super().encode(raw, format, root, fit, decode)

    def load(
        self, sides: Sequence[EncodedSequence], root: Path, fields: Mapping[str, float]
    ) -> list[PackedBatch]:
        if not isinstance(sides[0], EncodedFrame):
            return [self.with_actions(one) for one in self.load_chat(sides, root, fields)]
        frame = sides[0].frame
        assert frame is not None
        actions, inside = frame.action_chunk()
        if not inside.any():
            raise BadRow("no_actions", "the frame has no action that can be read")
        batch = self.observation(frame.task, frame.images(), frame.state, fields)
        chunk = self.normalization.normalize_actions(actions, frame.state, self.spec.action_dim)
        mask = torch.zeros(self.spec.chunk, self.spec.action_dim, dtype=torch.bool)
        mask[:, : actions.shape[1]] = torch.from_numpy(inside)[:, None]
        batch.sequence_fields["action_chunk"] = torch.where(mask, chunk, 0.0)[None]
        batch.sequence_fields["action_mask"] = mask[None]
        return [batch]

    def load_chat(
        self, sides: Sequence[EncodedSequence], root: Path, fields: Mapping[str, float]
    ) -> list[PackedBatch]:
        return super().load(sides, root, fields)

    def empty_batch(self, fields: Mapping[str, float]) -> PackedBatch:
        return self.with_actions(super().empty_batch(fields))

    def with_actions(self, batch: PackedBatch, state_Q: Tensor | None = None) -> PackedBatch:
        """The batch with action fields that carry no loss; `media_end`, a field of generation, is left out."""
        count = batch.num_sequences
        spec = self.spec
        kept = {name: v for name, v in batch.sequence_fields.items() if name != "media_end"}
        state = torch.zeros(spec.state_dim) if state_Q is None else state_Q
        added = {
            "action_state": state[None].expand(count, -1).contiguous(),
            "action_chunk": torch.zeros(count, spec.chunk, spec.action_dim),
            "action_mask": torch.zeros(count, spec.chunk, spec.action_dim, dtype=torch.bool),
        }
        return replace(batch, sequence_fields={**kept, **added})


def _prompt(task: str, images: Sequence[np.ndarray]) -> Row:
    parts = [Part("image", image) for image in images]
    return Row((Message("user", (*parts, Part("text", task))),), prompt_only=True)


# Pi0RowEncoder: the prefixes of pi0, and rows of images and text in PaliGemma's format for co-training.
#
# A prefix is the image tokens of each camera, the start token, the instruction and a line break. A row of a question
# and an answer continues with the answer and the end token: the question is bidirectional, the answer causal, and only
# the answer carries loss. No processor of transformers takes part: `PI0Processor` would normalize by the statistics of
# another data set.

IMAGES = "pixel_values"
TOKEN_TYPES = "token_type_ids"


class Pi0RowEncoder(ActionRowEncoder):
    """Encodes frames, and questions with answers, for one pi0 model."""

    cotrains = (
        False  # whether packs may hold rows of text: then all batches say which tokens are answers
    )
    image_size: int
    image_tokens: int  # of one image
    image_token_id: int
    vocab_size: int

    def set_model(self, config: Any) -> None:
        self.spec = ActionSpec.of(config, "flow")
        vision = config.vlm_config.vision_config
        self.image_size = vision.image_size
        self.image_tokens = (vision.image_size // vision.patch_size) ** 2
        self.image_token_id = config.vlm_config.image_token_id
        self.vocab_size = config.vlm_config.text_config.vocab_size
        self._cache_prefixes()

    def image_spec(self) -> dict[str, Any] | None:
        """pi0's images are scaled to -1..1."""
        half = [0.5, 0.5, 0.5]
        return {"height": self.image_size, "width": self.image_size, "mean": half, "std": half}

    @cached_property
    def fingerprint(self) -> str:
        key = f"{super().fingerprint} {self.image_size} {self.image_tokens} {self.image_token_id}"
        return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()

    def media_names(self, kinds: Iterable[str]) -> frozenset[str]:
        return frozenset(IMAGES for kind in kinds if kind == "image")

    def item_cost(self, info: MediaInfo) -> int:
        return 3 * self.image_size**2

    def _encode_prefix(self, task: str, sizes: tuple[Size, ...]) -> EncodedSequence:
        return self._sequence(task, len(sizes))

    def _sequence(self, prompt: str, images: int, answer: Sequence[int] = ()) -> EncodedSequence:
        """Image tokens, prompt and answer; only the answer carries loss."""
        tokens = images * self.image_tokens
        start = prompt_ids(self.media.tokenizer, prompt, tokens, self.image_token_id)
        infos = [MediaInfo("image", self.image_size, self.image_size)] * images
        first = range(0, tokens, self.image_tokens)
        spans = [(place, place + self.image_tokens) for place in first]
        ids = [*start, *answer]
        highest = max(ids[tokens:], default=0)
        if highest >= self.vocab_size:
            raise UserError(
                f"the tokenizer gives {prompt!r} the token {highest}, and the model's vocabulary has "
                f"{self.vocab_size}: set processor to the tokenizer of the model (google/paligemma-3b-pt-224 for pi0)"
            )
        loss = [False] * len(start) + [True] * len(answer)
        return EncodedSequence(ids, loss, [], infos, [], spans)

    def prefix_batch(
        self, task: str, images: Sequence[np.ndarray], fields: Mapping[str, float]
    ) -> PackedBatch:
        prepared = [self.normalization.image(pixels) for pixels in images]
        sizes = [pixels.shape[:2] for pixels in images]
        return self._batch_of(self.prefix(task, sizes), prepared, fields)

    # ---- Questions and answers ------------------------------------------------------------------------

    def encode_chat(
        self,
        raw: Mapping[str, Any],
        format: RowFormat | str | None,
        root: Path,
        fit: bool,
        decode: bool,
    ) -> list[EncodedSequence]:
        row = read_row(raw, format)
        prompt, answer = _question_and_answer(row)
        tokenizer = self.media.tokenizer
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        images = row.media()
        found = self._sequence(prompt, len(images), [*ids, *end])
        if fit and len(found.ids) > self.max_tokens:
            raise BadRow("overlong", f"{len(found.ids)} tokens; {self.max_tokens} are allowed")
        return [replace(found, parts=images, fields=row.fields)]

    def load_chat(
        self, sides: Sequence[EncodedSequence], root: Path, fields: Mapping[str, float]
    ) -> list[PackedBatch]:
        [side] = sides
        images = []
        for part in side.parts:
            pixels = decode_image(part.value, self.media.limits, root)
            images.append(self.normalization.image(np.array(pixels)))
        return [self._batch_of(side, images, {**side.fields, **fields})]

    def empty_batch(self, fields: Mapping[str, float]) -> PackedBatch:
        ids = [self.media.tokenizer.eos_token_id or 0]
        nothing = EncodedSequence(ids, [False], [], [], [], [])
        numbers = {name: 0 if kind == "int" else 0.0 for name, kind in self.fields.items()}
        return self.with_actions(self._batch_of(nothing, [], {**numbers, **fields}))

    def _batch_of(
        self, sequence: EncodedSequence, images: Sequence[Tensor], fields: Mapping[str, float]
    ) -> PackedBatch:
        size = self.image_size
        values = torch.stack(list(images)) if images else torch.zeros(0, 3, size, size)
        count = len(images)
        media = Media(values, torch.ones(count).long(), torch.zeros(count).long())
        loss = torch.tensor(sequence.loss)
        types = {TOKEN_TYPES: [loss.long()]} if self.cotrains else {}
        return PackedBatch.from_sequences(
            [torch.tensor(sequence.ids)],
            [loss],
            token_fields=types,
            sequence_fields={name: torch.tensor([value]) for name, value in fields.items()},
            media={IMAGES: self._cast(media)},
        )


def _question_and_answer(row: Row) -> tuple[str, str]:
    """The texts of a row with one question and one answer; its media are images before the text."""
    roles = [message.role for message in row.messages if message.role != "system"]
    if roles != ["user", "assistant"] or row.rejected:
        found = " and ".join(roles) or "a text"
        raise BadRow("unsupported", f"pi0 co-trains on a question and an answer, not on {found}")
    kinds = {part.kind for part in row.media()} - {"image"}
    if kinds or row.messages[-1].has_media:
        raise BadRow("unsupported", "pi0 reads images in questions, no other media")
    prompt = "\n".join(message.text for message in row.messages[:-1])
    return prompt, row.messages[-1].text
