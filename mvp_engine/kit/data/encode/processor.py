"""Processors of Hugging Face folders: loading one, and the files that are saved with a trained model.

Budgets of `Limits`, written into a copy of a processor.

The limited processor is the one to save with the model: serving then sees what training saw.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mvp_engine.data.batch import Media, cat_padded
from mvp_engine.errors import UserError
from mvp_engine.files import is_inside, leads_out
from mvp_engine.hf.model.config_source import warn_of_custom_code
from mvp_engine.hf.weights.hub import base_of_adapter, local_folder, model_folder
from mvp_engine.hf.weights.load import NewRows
from mvp_engine.kit.data.read.probe import DEFAULT_FPS
from mvp_engine.kit.data.read.row_types import Limits

GENERATION_CONFIG = "generation_config.json"


def load_processor(folder: str | Path | None) -> Any:
    """The processor of a model's folder or of the Hub, or its tokenizer where it has no processor."""
    if folder is None:
        raise UserError(
            "no processor: set model.path to a model's folder or to a model of the Hub, or processor to one "
            "that has it"
        )
    path = _of_adapter(local_folder(folder))
    if not path.is_dir():
        raise UserError(
            f"{folder} is not a folder with a model's processor or tokenizer, nor a model of the Hub"
        )
    import transformers

    _refuse_files_outside(path)
    try:
        # The tokenizer config of a text model may name the processor class of the VLM it was taken from. AutoProcessor
        # takes a second to import, in which the rows of a text model can be measured already.
        auto_class = (
            transformers.AutoTokenizer if _is_text_only(path) else transformers.AutoProcessor
        )
        # Code in a model's folder is not run, nor is the user asked on the terminal whether it may.
        found = auto_class.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).rstrip(".")
        raise UserError(
            f"{folder} has no processor or tokenizer that transformers can read: {reason}. Set processor to a folder, "
            "or to a model of the Hub, that has it"
        ) from None
    for name in ("tokenizer_config.json", "*processor_config.json"):
        for file in sorted(path.glob(name)):
            warn_of_custom_code(file)
    if type(found).__name__ == "CsmProcessor":  # it puts sounds into the text
        raise UserError(
            f"{folder} has a CsmProcessor, which is not supported: set processor to a folder with its tokenizer and a "
            "chat template of turns (docs/omni.md, CSM, shows how to write one)"
        )
    return found


def tokenizer_hash(tokenizer: Any, without: Iterable[str] = ()) -> str:
    """A hash of what turns a text into ids: not of padding, truncation and tokens that are put around a text.

    `without`: tokens that were added for a training, and do not count.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for name in ("version", "padding", "truncation", "post_processor"):
        state.pop(name, None)
    state["added_tokens"] = [
        (token["id"], token["content"])
        for token in state["added_tokens"]
        if token["content"] not in without
    ]
    text = json.dumps(state, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def with_new_tokens(processor: Any, tokens: Mapping[str, str]) -> tuple[Any, NewRows]:
    """A copy of a processor whose tokenizer has more tokens, and the rows that embeddings need for them.

    They are never split, and stay visible in answers. `tokens`: each with a text whose embeddings' mean it starts
    from; where the text is empty, the mean is that of all tokens.
    """
    processor = copy.deepcopy(processor)
    tokenizer = getattr(processor, "tokenizer", processor)
    known = tokenizer.get_vocab()
    for token in tokens:
        if token in known:
            raise UserError(
                f"data.new_tokens: the tokenizer has {token} already, with a row that trains like any other; leave it "
                "out. An export of a training with new tokens has them, too"
            )
    from tokenizers import AddedToken

    num_known = max(known.values()) + 1
    sources: dict[str, tuple[int, ...]] = {}
    for token, text in tokens.items():
        sources[token] = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokens}
    for token, id in ids.items():
        written = tokenizer(f"x{token}y", add_special_tokens=False)["input_ids"]
        if written.count(id) != 1 or id < num_known:
            raise UserError(
                f"data.new_tokens: {type(tokenizer).__name__} does not read {token!r} as one token in a text: give "
                "another text, without spaces at its ends, that is no part of another new token"
            )
    rows = {ids[token]: sources[token] for token in tokens}
    return processor, NewRows(num_known, rows, tuple(tokens))


def _refuse_files_outside(folder: Path) -> None:
    """Raise for a processor whose settings or links name files outside of its folder: transformers would read them."""
    for file in folder.glob("*"):
        if file.suffix in (".json", ".jinja", ".txt", ".model") and leads_out(file, folder):
            raise UserError(
                f"{file} is a link to {file.resolve()}, which is not read: replace it by the file itself, or do not "
                "trust this model"
            )
    config = folder / "tokenizer_config.json"
    try:
        settings = json.loads(config.read_text()) if config.is_file() else {}
    except ValueError:
        return  # transformers says what is wrong
    for key, value in settings.items():
        if key.endswith("_file") and isinstance(value, str) and not is_inside(value):
            raise UserError(
                f"{config}: {key}={value!r} is outside of its folder, which is not read: remove the key, or do not "
                "trust this model"
            )


def _is_text_only(folder: Path) -> bool:
    """Whether a folder has neither files of a processor nor a model with encoders.

    An Omni model may have been trained with a tokenizer alone: to speak.
    """
    if any(folder.glob("*processor_config.json")):
        return False
    config = folder / "config.json"
    settings = json.loads(config.read_text()) if config.is_file() else {}
    return (folder / "tokenizer_config.json").is_file() and not any(
        name in settings for name in ("vision_config", "audio_config")
    )


def _of_adapter(folder: Path) -> Path:
    """The folder of the base model in place of an adapter's that lacks files of its processor."""
    base = base_of_adapter(folder)
    if base is None:
        return folder
    names = ("tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
    is_complete = all((folder / name).is_file() for name in names if (base / name).is_file())
    return folder if is_complete and (folder / names[0]).is_file() else base


def save_generation_config(
    folder: Path, model: str | None, pad_token_id: int | None, eos_token_ids: Sequence[int]
) -> None:
    """Write `generation_config.json`: that of the model's own folder, with these tokens as end of sequence too.

    No other file of the folder says where the answers of a fine-tuned model end.
    """
    config: dict[str, Any] = {"pad_token_id": pad_token_id}
    if model is not None:
        original = model_folder(model) / GENERATION_CONFIG
        if original.is_file():
            config = json.loads(original.read_text())
    known = config.get("eos_token_id")
    if known is None:
        known = []
    eos = known if isinstance(known, list) else [known]
    eos += [token for token in eos_token_ids if token not in eos]
    config["eos_token_id"] = eos[0] if len(eos) == 1 else eos or None
    (folder / GENERATION_CONFIG).write_text(json.dumps(config, indent=2) + "\n")


# Media kind -> the attribute of a processor that handles it.
SUB_PROCESSORS = {
    "image": "image_processor",
    "video": "video_processor",
    "audio": "feature_extractor",
}
DEFAULT_MAX_FRAMES = 64


def audio_extractor(processor: Any) -> Any:
    """The part of a processor that handles audio; it has two names in transformers."""
    return getattr(processor, "feature_extractor", None) or getattr(
        processor, "audio_processor", None
    )


def limits_with_defaults(processor: Any, limits: Limits) -> Limits:
    """The limits, with the processor's own frame budgets where they set none."""
    video = getattr(processor, "video_processor", None)
    own_max_frames = getattr(video, "max_frames", None) or getattr(video, "num_frames", None)
    return replace(
        limits,
        fps=limits.fps or getattr(video, "fps", None) or DEFAULT_FPS,
        min_frames=limits.min_frames or getattr(video, "min_frames", None) or 1,
        max_frames=limits.max_frames or own_max_frames or DEFAULT_MAX_FRAMES,
    )


def limited_processor(processor: Any, limits: Limits) -> Any:
    """A copy of the processor with the budgets, as far as its family has fields for them."""
    limited = copy.copy(processor)
    for name in (*SUB_PROCESSORS.values(), "audio_processor"):
        if hasattr(processor, name):
            setattr(limited, name, copy.deepcopy(getattr(processor, name)))
    image = getattr(limited, "image_processor", None)
    video = getattr(limited, "video_processor", None)
    audio = audio_extractor(limited)
    if image is not None:
        _limit_pixels(image, limits.min_pixels, limits.max_pixels)
    if video is not None:
        _limit_video_pixels(processor, video, limits)
        _limit_frames(video, limits)
    if audio is not None and limits.chunk_seconds is not None:
        _limit_audio(audio, limits.chunk_seconds)
    return limited


def _limit_pixels(
    part: Any,
    min_pixels: int | None,
    max_pixels: int | None,
) -> None:
    if min_pixels is None and max_pixels is None:
        return
    set_pixel_budget(part, min_pixels, max_pixels)
    if max_pixels is None or pixel_budget(part) is not None:
        return
    fixed = part.crop_size if getattr(part, "do_center_crop", False) else part.size
    if (fixed.height or 0) * (fixed.width or 0) > max_pixels:
        raise UserError(
            f"{type(part).__name__} resizes all images to {fixed.height}x{fixed.width}, "
            f"more than the {max_pixels} pixels allowed"
        )


def _limit_video_pixels(processor: Any, video: Any, limits: Limits) -> None:
    has_limit = limits.video_min_pixels is not None or limits.video_max_pixels is not None
    if has_limit and "size" in _default_video_options(processor):
        raise UserError(
            f"{type(processor).__name__} fixes the size of videos in its code: "
            "limit max_frames instead"
        )
    _limit_pixels(video, limits.video_min_pixels, limits.video_max_pixels)


def _default_video_options(processor: Any) -> dict[str, Any]:
    defaults = getattr(processor.valid_processor_kwargs, "_defaults", {})
    return defaults.get("videos_kwargs", {})


def _limit_frames(video: Any, limits: Limits) -> None:
    if limits.fps is None and limits.max_frames is None:
        return
    video.do_sample_frames = True
    max_frames_name = "max_frames" if hasattr(video, "max_frames") else "num_frames"
    budgets = {
        "fps": limits.fps,
        max_frames_name: limits.max_frames,
        "min_frames": limits.min_frames,
    }
    for name, value in budgets.items():
        if value is not None and hasattr(video, name):
            setattr(video, name, value)


def _limit_audio(extractor: Any, chunk_seconds: int) -> None:
    if not hasattr(extractor, "chunk_length"):
        raise UserError(f"{type(extractor).__name__} has no chunk_length: leave chunk_seconds out")
    extractor.chunk_length = chunk_seconds
    extractor.n_samples = chunk_seconds * extractor.sampling_rate
    extractor.nb_max_frames = extractor.n_samples // extractor.hop_length


def pixel_budget(part: Any) -> int | None:
    """The largest image that a sub-processor makes, in pixels; None where all have one size."""
    if hasattr(part, "max_patches"):
        return part.max_patches * part.size.height * part.size.width
    if hasattr(part, "image_grid_pinpoints"):
        return max(height * width for height, width in part.image_grid_pinpoints)
    if part.size.longest_edge is None:
        return None
    return part.size.longest_edge if _edges_are_areas(part) else part.size.longest_edge**2


def _edges_are_areas(part: Any) -> bool:
    """Since Qwen2-VL, processors with a `merge_size` have areas in the "edges" of their size."""
    return hasattr(part, "merge_size")


def set_pixel_budget(
    part: Any,
    min_pixels: int | None,
    max_pixels: int | None,
) -> None:
    """Set a sub-processor's budget in the fields of its family; a no-op where all images have one size."""
    budget = pixel_budget(part)
    if budget is None:
        return
    if _edges_are_areas(part):
        high = budget if max_pixels is None else max_pixels
        low = part.size.shortest_edge if min_pixels is None else min_pixels
        part.size = type(part.size)(shortest_edge=min(low, high), longest_edge=high)
    elif max_pixels is None:
        return
    elif hasattr(part, "max_patches"):
        patch_pixels = part.size.height * part.size.width
        part.max_patches = max(1, max_pixels // patch_pixels)
        part.min_patches = min(part.min_patches, part.max_patches)
    elif hasattr(part, "image_grid_pinpoints"):
        grids = part.image_grid_pinpoints
        allowed = [grid for grid in grids if math.prod(grid) <= max_pixels]
        part.image_grid_pinpoints = allowed or [min(grids, key=math.prod)]
    else:
        _set_longest_edge(part, max_pixels)


def _set_longest_edge(part: Any, max_pixels: int) -> None:
    """A whole number of tiles, at least one."""
    tile = part.max_image_size["longest_edge"] if hasattr(part, "max_image_size") else 1
    edge = max(tile, math.isqrt(max_pixels) // tile * tile)
    edge = min(edge, part.size.longest_edge)
    shortest = part.size.shortest_edge and min(edge, part.size.shortest_edge)
    part.size = type(part.size)(shortest_edge=shortest, longest_edge=edge)


# Names that model forwards use for the values of items.
VALUE_NAMES = (
    "pixel_values",
    "pixel_values_videos",
    "input_features",
    "input_values",
    "pixel_values_images",
    "image_pixel_values",
    "audio_input_features",
)

FRAMES = "a row for each frame"
TILES = "a row for all tiles"


def has_mixed_fields(outputs: dict[str, Any]) -> bool:
    """Whether an item in tiles, (1, tiles, ...), has fields of its tiles and fields of the whole."""
    fields = dict(outputs)
    values = fields.pop(_value_name(outputs))
    of_tiles = {value.shape[:2] == values.shape[:2] for value in fields.values()}
    return values.ndim == 5 and len(of_tiles) == 2


def to_media(outputs: dict[str, Any], layout: str = "") -> tuple[str, Media]:
    """The name of the values, and one item; or one item per tile, where each tile has its own fields.

    `layout`: FRAMES, each frame of audio is a row, since its encoder must not get padding; TILES, all tiles of an image
    are one row, padded to the most tiles.
    """
    name = _value_name(outputs)
    fields = dict(outputs)
    values = fields.pop(name)
    if layout == TILES:
        return name, _single_sequence(values, [1], _fields_of_one(fields))
    if layout == FRAMES:
        return name, _single_sequence(values[0], [values.shape[1]], _fields_of_one(fields))
    if "target_sizes" in fields:
        return name, _from_strip(values, fields)
    if values.ndim != 5:
        if (
            len(values) > 1
            and all(len(value) == len(values) for value in fields.values())
            and fields
        ):
            return name, _single_sequence(values, [1] * len(values), fields)  # an item per tile
        return name, _single_sequence(values, [len(values)], _fields_of_one(fields))
    # (batch of one, tiles, channels, height, width)
    has_tile_fields = bool(fields)
    for value in fields.values():
        has_tile_fields &= value.shape[:2] == values.shape[:2]  # such as a pixel mask
    if has_tile_fields:
        tiles = values.transpose(0, 1)
        tile_fields = {key: value.transpose(0, 1) for key, value in fields.items()}
        return name, _single_sequence(tiles, [1] * len(tiles), tile_fields)
    tiles = values.flatten(0, 1)
    return name, _single_sequence(tiles, [len(tiles)], _fields_of_one(fields))


def extra_names(outputs: dict[str, Any]) -> set[str]:
    """Outputs for one item with another number of entries than one, such as the tiles besides a whole image."""
    name = _value_name(outputs)
    if "target_sizes" in outputs or outputs[name].ndim == 5:
        return set()
    rows = len(outputs[name])
    lengths = {field: len(value) for field, value in outputs.items() if field != name}
    if rows > 1 and lengths and set(lengths.values()) == {rows}:
        return set()  # an item per tile
    return {field for field, length in lengths.items() if length != 1}


def split_extra(
    outputs: dict[str, Any], names: Set[str]
) -> tuple[dict[str, Any], dict[str, Media]]:
    """The other outputs, and those of `names` as media of their own with one item each."""
    rest = {name: value for name, value in outputs.items() if name not in names}
    extra = {}
    for name in names & outputs.keys():
        extra[name] = _single_sequence(outputs[name], [len(outputs[name])], {})
    return rest, extra


def _from_strip(values: Tensor, fields: dict[str, Tensor]) -> Media:
    """Tiles of any size that lie side by side as one row of patches, (1, channels, p, p * patches); a row per patch."""
    row_counts = fields["target_sizes"].prod(-1).tolist()
    patch_size = values.shape[-2]
    if values.shape[-1] != sum(row_counts) * patch_size:
        raise UserError("the patches of an item are not those of its target_sizes")
    patches = values[0].unflatten(-1, (-1, patch_size)).permute(2, 0, 1, 3)
    return _single_sequence(patches.contiguous(), row_counts, fields)


def _fields_of_one(fields: dict[str, Tensor]) -> dict[str, Tensor]:
    """The fields of one item, each with one entry."""
    lengths = {name: len(value) for name, value in fields.items() if len(value) != 1}
    if lengths:
        raise UserError(
            f"this processor returns {lengths} entries for one item: supported is one entry per item"
        )
    return fields


def to_media_of_items(outputs: dict[str, Any], num_items: int) -> tuple[str, Media] | None:
    """Several items of one call; None if the rows of each item cannot be determined.

    They are given by a grid, or each item has one row.
    """
    name = _value_name(outputs)
    fields = dict(outputs)
    values = fields.pop(name)
    row_counts = [1] * num_items
    for field, value in fields.items():
        if field.endswith("_grid_thw"):
            row_counts = value.prod(-1).tolist()
            break
    counts_match = len(row_counts) == num_items and sum(row_counts) == len(values)
    fields_match = all(len(value) == num_items for value in fields.values())
    if values.ndim == 5 or not counts_match or not fields_match:
        return None
    return name, _single_sequence(values, row_counts, fields)


def _value_name(outputs: dict[str, Any]) -> str:
    """The name of the values among the outputs, which must all be tensors."""
    names = [name for name in VALUE_NAMES if name in outputs]
    if len(names) != 1 or not all(isinstance(value, Tensor) for value in outputs.values()):
        kinds = {name: type(value).__name__ for name, value in sorted(outputs.items())}
        raise UserError(
            f"this processor returns {kinds} for one item: supported are tensors, one of them "
            f"{' or '.join(VALUE_NAMES)}"
        )
    return names[0]


def _single_sequence(
    values: Tensor,
    row_counts: list[int],
    fields: dict[str, Tensor],
) -> Media:
    sequence_ids = torch.zeros(len(row_counts), dtype=torch.long)
    return Media(values, torch.tensor(row_counts), sequence_ids, fields)


def concat_media(items: Sequence[Media]) -> Media:
    """All items in one. The first is empty, and gives the shapes where no other follows."""
    filled = items[1:] or items
    if len(filled) == 1:
        return filled[0]
    fields = {}
    for name in filled[0].fields:
        fields[name] = cat_padded([item.fields[name] for item in filled])
    return Media(
        cat_padded([item.values for item in filled]),
        torch.cat([item.row_counts for item in filled]),
        torch.cat([item.sequence_ids for item in filled]),
        fields,
    )
