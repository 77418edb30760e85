"""Encoder features of items that several sequences share: computed once, and given to each sequence.

The sides of a preference pair and the samples of one prompt have the same images (`Media.shared_with`). The encoder
gets each image once. transformers expects the features of all placeholder tokens in their order, so
`get_image_features` and `get_video_features` become attributes of the model *instance* that repeat the features of
shared items. Autograd adds up the gradients of all uses. Items of other kinds, such as audio, are repeated before the
encoder.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.weak import WeakTensorKeyDictionary

from mvp_engine.data.batch import Media
from mvp_engine.distributed.sequence_parallel import UlyssesShard, all_to_all_rows
from mvp_engine.errors import UserError
from mvp_engine.hf.media.encoders import FRAME_MASK, frame_mask
from mvp_engine.hf.media.media_features import copy_to_device
from mvp_engine.hf.model.attention import PACK_ARGUMENTS

# Kinds of media with a method that returns their features by item, or by row of the values.
_METHODS = {"pixel_values": "get_image_features", "pixel_values_videos": "get_video_features"}
_HAS_NEWLINES = "mvp_has_newline_features"
_AUDIO = ("input_features", "audio_input_features")


@dataclass(frozen=True)
class _Uses:
    """The items in the order of the sequences that use them, and the rows of these items."""

    items: list[int]
    rows: list[int]
    num_items: int
    num_rows: int

    @classmethod
    def of(cls, media: Media) -> _Uses:
        assert media.shared_with is not None
        items: list[int] = []
        for sequence in range(len(media.shared_with)):
            items += media.items_of(sequence)
        of_items = torch.arange(len(media.values)).split(media.row_counts.tolist())
        rows = torch.cat([of_items[item] for item in items]).tolist()
        return cls(items, rows, len(media.row_counts), len(media.values))

    def repeat(self, features: Any) -> Any:
        """The features of all uses, from those of each item or of each row."""
        indices = {self.num_items: self.items, self.num_rows: self.rows}
        if len(features) not in indices:
            raise UserError(
                f"the encoder returned features of {len(features)} items for {self.num_items} items with "
                f"{self.num_rows} rows, so sequences cannot share them: give each sequence its own media"
            )
        index = indices[len(features)]
        if isinstance(features, Tensor):
            return features[copy_to_device(torch.tensor(index), features.device)]
        return [features[i] for i in index]


# Values of shared media -> _Uses, until their features are computed.
_USES = WeakTensorKeyDictionary()


def apply_shared_features(base: nn.Module) -> None:
    """Change one model instance; its class stays as transformers wrote it."""
    names = [name.rpartition(".")[2] for name, _ in base.named_parameters()]
    # HunYuan-VL: items have learned features besides those of their patches.
    base.__dict__[_HAS_NEWLINES] = "image_newline" in names
    for method in (*_METHODS.values(), "get_audio_features"):
        if hasattr(base, method):
            base.__dict__[method] = partial(_features_of_uses, base, method)


@dataclass(frozen=True)
class _Frames:
    """The frames of each video or sound."""

    counts: list[int]
    num_features: int = 0  # that a mask of the features of sounds has room for


# Frames of videos or sounds, as rows -> _Frames, until their features are computed.
_FRAMES = WeakTensorKeyDictionary()


# Values of media that ranks share -> EncoderShare, until their features are computed.
_SHARES = WeakTensorKeyDictionary()


def encoder_inputs(
    base: nn.Module, kind: str, media: Media, shard: UlyssesShard | None = None
) -> dict[str, Tensor]:
    """Values and fields that a model's forward gets: shared items once, where the model supports it.

    `shard`: of the batch, with sequence parallel; its ranks share the items.
    """
    if "target_sizes" in media.fields:
        # Patches side by side in one row, (1, channels, p, p * patches), as MiniCPM-V takes them.
        own = _unshared(media)
        return {kind: own.values.permute(1, 2, 0, 3).flatten(2)[None], **own.fields}
    if media.shared_with is not None:
        if _METHODS.get(kind, "") in base.__dict__:
            _USES[media.values] = _Uses.of(media)
        else:
            media = _unshared(media)
    # A grid comes with patches of any shape.
    is_frames = kind in _METHODS and media.values.ndim == 4 and not media.fields
    if is_frames and _takes_frames(base, kind):
        _FRAMES[media.values] = _Frames(media.row_counts.tolist())
    if kind in _AUDIO and media.values.ndim == 2:
        if "get_audio_features" not in base.__dict__:
            raise UserError(
                f"its processor gives no mask of the frames of sounds, and {type(base).__name__} has no "
                "get_audio_features that could be called for one sound at a time: train without audio"
            )
        # Some forwards cast their inputs, and a copy would not be found.
        media = replace(media, values=media.values.to(base.dtype))  # type: ignore[arg-type]
        masks = [mask for field, mask in media.fields.items() if field.endswith("_mask")]
        width = max((mask.shape[1] for mask in masks), default=0)
        _FRAMES[media.values] = _Frames(media.row_counts.tolist(), width)
    may_share = _METHODS.get(kind, "") in base.__dict__ and not base.__dict__[_HAS_NEWLINES]
    if may_share and shard is not None and can_share(media):
        _SHARES[media.values] = EncoderShare.of(media, shard)
    fields = dict(media.fields)
    if FRAME_MASK in fields:
        fields[FRAME_MASK] = frame_mask(base, fields[FRAME_MASK], media.values.device)
    return {kind: media.values, **fields}


def _takes_frames(base: nn.Module, kind: str) -> bool:
    """Whether the method for this kind takes (items, frames, ...).

    Where one method takes images and videos (PerceptionLM), the tiles of an image are its frames.
    """
    if _METHODS["pixel_values_videos"] in base.__dict__:
        return kind == "pixel_values_videos"
    takes_videos = "pixel_values_videos" in inspect.signature(base.forward).parameters
    return takes_videos and _METHODS["pixel_values"] in base.__dict__


def _unshared(media: Media) -> Media:
    if media.shared_with is None:
        return media
    return media.select(list(range(len(media.shared_with))), share=False)


def _features_of_uses(model: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """transformers' method; the features of shared items are repeated for each use."""
    kwargs = {name: value for name, value in kwargs.items() if name not in PACK_ARGUMENTS}
    uses: _Uses | None = None
    share: EncoderShare | None = None
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    for value in given:
        # Some models get videos through the method for images.
        uses = uses or _USES.pop(value, None)
        found = _SHARES.pop(value, None)
        if found is not None and any(found.grid is other for other in given):
            share = found
            args, kwargs = share.cut(value, args, kwargs)
    outputs = _features_of_videos(model, method, args, kwargs)
    if share is not None:
        share.gather(outputs)
    if uses is not None:
        outputs.pooler_output = uses.repeat(outputs.pooler_output)
        if getattr(outputs, "deepstack_features", None) is not None:
            outputs.deepstack_features = [uses.repeat(one) for one in outputs.deepstack_features]
    return outputs


def _features_of_videos(model: Any, method: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """transformers' method, once for each video or sound where it takes (items, frames, ...): frames differ in number.

    The encoder of such sounds has no mask: padding would change their features.
    """
    compute = partial(getattr(type(model), method), model)
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
    name = next((key for key, value in tensors.items() if value in _FRAMES), None)
    if name is None:
        return compute(*args, **kwargs)
    outputs = []
    known: _Frames = _FRAMES.pop(given[name])
    for frames in given[name].split(known.counts):
        one = {**given, name: frames[None]}
        positional = [one.pop(index) for index in range(len(args))]
        outputs.append(compute(*positional, **one))
    features = [output.pooler_output for output in outputs]
    if not all(isinstance(one, Tensor) and one.ndim == 3 for one in features):
        raise UserError(
            f"{type(model).__name__}.{method} returns features that cannot be joined over items: "
            "train without them"
        )
    if method == "get_audio_features":  # the model has a mask of features
        joined_NFD = pad_sequence([one[0] for one in features], batch_first=True)
        missing = max(0, known.num_features - joined_NFD.shape[1])
        outputs[0].pooler_output = F.pad(joined_NFD, (0, 0, 0, missing))
    else:
        outputs[0].pooler_output = torch.cat([one.flatten(0, 1) for one in features])[None]
    return outputs[0]


# Encoders on a sequence parallel group: each rank encodes a part of the images of a batch, and all get all features.
#
# The ranks of a group have the same batch and slice its tokens after the features are inserted. So they share the items
# of a micro-batch, the largest first, and exchange the features in one all-to-all. Its gradient is a reduce-scatter:
# the rank that encoded an item gets the gradients of all tokens of its features.
#
# Items are shared where their number of features is known before they are encoded: patches with a grid, whose encoder
# merges a fixed number of them into one feature. Other items are encoded on every rank.


def items_by_rank(row_counts: list[int], ranks: int) -> list[list[int]]:
    """The items that each rank encodes: the largest first, each to the rank with the fewest rows."""
    items: list[list[int]] = [[] for _ in range(ranks)]
    rows = [0] * ranks
    for item in sorted(range(len(row_counts)), key=lambda i: -row_counts[i]):
        rank = rows.index(min(rows))
        items[rank].append(item)
        rows[rank] += row_counts[item]
    return [sorted(of_rank) for of_rank in items]


def can_share(media: Media) -> bool:
    grids = [name for name in media.fields if name.endswith("grid_thw")]
    return len(media.row_counts) > 1 and len(grids) == len(media.fields) == 1


def largest_share(media: Media, ranks: int) -> float:
    """The part of the rows that the rank with most of them encodes."""
    if ranks == 1 or not can_share(media):
        return 1.0
    row_counts = media.row_counts.tolist()
    items = items_by_rank(row_counts, ranks)
    return max(sum(row_counts[item] for item in of_rank) for of_rank in items) / sum(row_counts)


@dataclass(frozen=True, eq=False)
class EncoderShare:
    """How the ranks of a group share the items of one kind of media."""

    shard: UlyssesShard
    grid: Tensor
    row_counts: list[int]
    items: list[list[int]]  # of each rank

    @classmethod
    def of(cls, media: Media, shard: UlyssesShard) -> EncoderShare:
        row_counts = media.row_counts.tolist()
        (grid,) = media.fields.values()
        return cls(shard, grid, row_counts, items_by_rank(row_counts, len(shard.sizes)))

    def cut(self, values: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments of a call that encodes the `values` of all items, with this rank's items in their place."""
        # A rank without an item encodes the smallest one: FSDP ranks run every encoder together.
        encoded = self._own or [self.row_counts.index(min(self.row_counts))]
        rows = values.split(self.row_counts)
        replaced = {
            id(values): torch.cat([rows[item] for item in encoded]),
            id(self.grid): self.grid[torch.tensor(encoded)],
        }
        part = [replaced.get(id(value), value) for value in args]
        return part, {key: replaced.get(id(value), value) for key, value in kwargs.items()}

    def gather(self, outputs: Any) -> None:
        """Replace the features of this rank's items by those of all items, in place."""
        features = [outputs.pooler_output, *(getattr(outputs, "deepstack_features", None) or [])]
        flat = [one if isinstance(one, Tensor) else torch.cat(tuple(one)) for one in features]
        counts = self._feature_counts(flat)
        sizes = tuple(sum(counts[item] for item in of_rank) for of_rank in self.items)
        own = [one[: sizes[self.shard.rank]] for one in flat]
        gathered = all_to_all_rows(own, sizes, self.shard.group)
        order = [item for of_rank in self.items for item in of_rank]
        joined = []
        for one, all_rows in zip(features, gathered, strict=True):
            parts = all_rows.split([counts[item] for item in order])
            by_item = dict(zip(order, parts, strict=True))
            in_order = [by_item[item] for item in range(len(counts))]
            joined.append(torch.cat(in_order) if isinstance(one, Tensor) else tuple(in_order))
        outputs.pooler_output = joined[0]
        if len(joined) > 1:
            outputs.deepstack_features = joined[1:]

    @property
    def _own(self) -> list[int]:
        return self.items[self.shard.rank]

    def _feature_counts(self, flat: list[Tensor]) -> list[int]:
        """The number of features of each item: the encoder merges as many rows in all of them."""
        encoded = sum(self.row_counts[item] for item in self._own) or min(self.row_counts)
        found = len(flat[0])
        merged = encoded // max(found, 1)
        is_fixed = merged * found == encoded and not any(rows % merged for rows in self.row_counts)
        if not is_fixed or any(one.ndim != 2 or len(one) != found for one in flat):
            shapes = [tuple(one.shape) for one in flat]
            raise UserError(
                f"sequence parallel: an encoder returned features of shapes {shapes} for {encoded} patches; it is not "
                "known how many each item has. Set parallel.context=1 and parallel.ulysses=1 for this model"
            )
        return [rows // merged for rows in self.row_counts]
