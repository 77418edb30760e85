"""Tiny configs and processors of any image-text or audio-text type of transformers, made from its own classes.

Sizes follow from the names of config keys and from the signatures of processors; `EXCEPTIONS` holds what does not.
"""

import copy
import importlib
import inspect
import re

import transformers as hf
from processors import chat_template
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from vlm_exceptions import EXCEPTIONS
from vlm_special import DROP, Special

VOCAB = 640
HIDDEN = 32
# Sizes by the name of a config key. All parts have one hidden size, so that no projection needs an entry.
SIZES = {
    **dict.fromkeys(
        [
            "hidden_size",
            "d_model",
            "embed_dim",
            "out_hidden_size",
            "output_dim",
            "text_hidden_size",
            "vision_hidden_size",
            "projection_dim",
            "projector_hidden_size",
            "hidden_dim",
            "encoder_hidden_size",
            "word_embed_proj_dim",
            "vision_output_dim",
            "projector_input_dim",
            "projector_output_dim",
            "projection_hidden_size",
            "downsample_hidden_size",
            "cross_attention_hidden_size",
            "output_proj_dims",
            "output_hidden_size",
        ],
        HIDDEN,
    ),
    **dict.fromkeys(
        [
            "intermediate_size",
            "ffn_dim",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "intermediate_size_mlp",
            "dense_intermediate_size",
            "alignment_intermediate_size",
            "shared_intermediate_size",
            "projection_intermediate_size",
            "d_ff",
        ],
        48,
    ),
    **dict.fromkeys(
        ["moe_intermediate_size", "shared_expert_intermediate_size", "share_expert_dim"], 16
    ),
    **dict.fromkeys(
        [
            "num_hidden_layers",
            "depth",
            "encoder_layers",
            "num_layers",
            "layers",
            "num_blocks",
            "num_global_layers",
            "n_layers",
            "conf_num_hidden_layers",
            "resampler_depth",
            "decoder_layers",
        ],
        2,
    ),
    **dict.fromkeys(
        [
            "num_attention_heads",
            "num_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
            "attention_heads",
            "conf_num_attention_heads",
            "swa_num_attention_heads",
            "num_sliding_attention_heads",
            "n_heads",
        ],
        4,
    ),
    **dict.fromkeys(["num_key_value_heads", "swa_num_key_value_heads", "resampler_n_heads"], 2),
    **dict.fromkeys(
        [
            "head_dim",
            "swa_head_dim",
            "global_head_dim",
            "resampler_head_dim",
            "query_pre_attn_scalar",
            "d_kv",
        ],
        8,
    ),
    **dict.fromkeys(
        ["kv_lora_rank", "q_lora_rank", "hidden_size_per_layer_input", "laurel_rank", "hc_lowrank"],
        16,
    ),
    **dict.fromkeys(["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"], 8),
    "qk_head_dim": 16,
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"], 2),
    **dict.fromkeys(["n_group", "topk_group", "moe_num_shared_experts", "n_shared_experts"], 1),
    "sliding_window": 48,
    "sliding_window_size": 48,
    "output_channels": 16,
    "num_pos_feats": 8,
    "max_position_embeddings": 4096,
    "image_size": 16,
    "patch_size": 4,
    "window_size": 16,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
    "num_mel_bins": 8,
    "max_source_positions": 100,
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "resampler_n_latents": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "index_topk": 4,
    "index_n_heads": 2,
    "index_head_dim": 16,
}
# Lists by name: indices of layers must exist.
LISTS = {
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0],
    "global_attn_indexes": [1],
    "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
    "vision_feature_layers": [-2, -1],
}
ROPE_SECTION = [1, 1, 2]
# Attributes of any tokenizer; the last two are flags.
KNOWN_TOKENS = {
    f"{name}_token"
    for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask", "add_bos", "add_eos")
}


# ---- Configs ---------------------------------------------------------------------------------------------------


def special_of(name):
    return EXCEPTIONS.get(name, Special())


def tiny_config(name, processor):
    """The config of a type with a few thousand parameters, and the token ids of `processor`."""
    config_class = hf.CONFIG_MAPPING[name]
    special = special_of(name)
    values = _shrunk(config_class(**special.parts).to_dict())
    _merge(values, copy.deepcopy(special.config))
    _name_tokens(values, processor)
    values.pop("model_type", None)
    return config_class.from_dict(values)


def _shrunk(values):
    layers = {values.get(key) for key in ("num_hidden_layers", "depth", "encoder_layers")} - {None}
    found = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found[key] = _shrunk_rope(value) if key.startswith("rope_") else _shrunk(value)
        elif isinstance(value, list | tuple) and key in LISTS:
            found[key] = LISTS[key]
        elif isinstance(value, list | tuple) and key in ("image_size", "patch_size"):
            found[key] = [SIZES[key]] * len(value)
        elif isinstance(value, list | tuple) and len(value) in layers and len(value) > 2:
            continue  # a list by layer: the config makes a new one
        elif isinstance(value, int) and not isinstance(value, bool) and key in SIZES:
            found[key] = SIZES[key]
        else:
            found[key] = value
    return found


def _shrunk_rope(values):
    found = {
        key: _shrunk_rope(value) if isinstance(value, dict) else value
        for key, value in values.items()
    }
    if found.get("mrope_section"):
        found["mrope_section"] = ROPE_SECTION
    return found


def _merge(values, changes):
    for key, change in changes.items():
        if isinstance(change, dict) and isinstance(values.get(key), dict):
            _merge(values[key], change)
        elif change is DROP:
            values.pop(key, None)
        else:
            values[key] = change


def _name_tokens(values, processor):
    """Ids of tokens by the processor's names for them; special tokens that it does not name get any unused id."""
    tokenizer = processor.tokenizer
    vocab = tokenizer.get_vocab()
    unused = iter(range(VOCAB - 1, len(vocab), -1))
    named = special_of_processor(processor)
    for key in sorted(values, key=str):
        value = values[key]
        if isinstance(value, dict):
            _name_tokens(value, processor)
            continue
        if key in vocab:  # a vocabulary map
            values[key] = vocab[key]
            continue
        match = re.fullmatch(r"(\w+?)_(?:token_)?(?:id|index)", str(key))
        if match is None or not isinstance(value, int) or isinstance(value, bool):
            continue
        token = named.get(match[1])
        if match[1] in ("bos", "eos", "pad"):
            values[key] = {"bos": 1, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}[
                match[1]
            ]
        elif token in vocab:
            values[key] = vocab[token]
        elif value >= 3:
            values[key] = next(unused)


def special_of_processor(processor):
    """The tokens that a processor or its tokenizer names: `image` for `image_token` and so on."""
    found = {}
    for owner in (processor.tokenizer, processor):
        for name in dir(owner):
            if name.endswith("_token") and isinstance(getattr(owner, name, None), str):
                found[name.removesuffix("_token")] = getattr(owner, name)
    for kind in ("image", "video", "audio"):
        id = getattr(processor, f"{kind}_token_id", None)
        if isinstance(id, int):
            found[kind] = processor.tokenizer.convert_ids_to_tokens(id)
    return found | processor_aliases(processor)


def processor_aliases(processor):
    return dict(getattr(processor, "tiny_aliases", {}))


# ---- Processors ------------------------------------------------------------------------------------------------


def tokenizer_for(source, special):
    """A byte tokenizer with the special tokens that a processor's code names."""
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bare = Tokenizer(models.BPE(vocab=alphabet | {"ĊĊ": 256}, merges=[("Ċ", "Ċ")]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    # Attributes of a tokenizer that the code reads without a default are named tokens of the real one.
    wanted = set(re.findall(r"tokenizer\.(\w+_token)(?:_id)?\b", source)) - KNOWN_TOKENS
    optional = set(
        re.findall(r"(?:hasattr|getattr)\(\s*(?:self\.)?tokenizer, \"(\w+_token)(?:_id)?\"", source)
    )
    named = {name: f"<|{name}|>" for name in sorted(wanted - optional)}
    named |= special.named
    named = dict(sorted(named.items()))
    texts = sorted(set(re.findall(r"\"(<[^\"<>{}\s]+>|\[[A-Z_]+\])\"", source)))
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=bare,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
        extra_special_tokens=named,
    )
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", *texts, *special.tokens]}
    )
    return tokenizer


def tiny_processor(name):
    """The processor of a type, with a chat template that writes its placeholders."""
    from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES

    special = special_of(name)
    like = special.processor_of or name
    processor_class = getattr(hf, special.processor or PROCESSOR_MAPPING_NAMES[like])
    source = inspect.getsource(importlib.import_module(processor_class.__module__))
    parts = {}
    for attribute in processor_class.get_attributes():
        if attribute in ("tokenizer", "alignment_tokenizer"):
            parts[attribute] = tokenizer_for(source, special)
        elif attribute == "image_processor":
            found = special.image_processor or IMAGE_PROCESSOR_MAPPING_NAMES[like]
            parts[attribute] = _sub_processor(_class_of(found), special.images)
        elif attribute == "video_processor":
            found = special.video_processor or VIDEO_PROCESSOR_MAPPING_NAMES[like]
            parts[attribute] = _sub_processor(_class_of(found), special.videos)
        elif attribute in ("feature_extractor", "audio_processor"):
            found = special.feature_extractor or FEATURE_EXTRACTOR_MAPPING_NAMES[like]
            parts[attribute] = _sub_processor(_class_of(found), special.audio)
        else:
            parts[attribute] = special.more[attribute]() if attribute in special.more else None
    known = inspect.signature(processor_class.__init__).parameters
    options = {key: value for key, value in PROCESSOR_OPTIONS.items() if key in known}
    processor = processor_class(**parts, **{**options, **special.options})
    processor.tiny_aliases = special.aliases
    places = {}
    for kind in ("image", "video", "audio"):
        token = getattr(processor, f"{kind}_token", None)
        if token is not None:
            places[kind] = special.places.get(kind, str(token))
    processor.chat_template = (
        None if special.template is None else special.template or chat_template(places)
    )
    return processor


PROCESSOR_OPTIONS = {
    "patch_size": 4,
    "image_seq_length": 16,
    "image_seq_len": 4,
    "num_image_tokens": 16,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}


def _class_of(found):
    """A class of transformers by its name, or by its names for several backends."""
    if isinstance(found, dict):
        found = found.get("torchvision") or found["pil"]
    return getattr(hf, found)


def _sub_processor(kind, changes):
    """An image, video or audio processor for small items, by the keys of its own size."""
    default = kind()
    options = {}
    if getattr(default, "patch_size", None) is not None:
        options["patch_size"] = (
            {"height": 4, "width": 4} if not isinstance(default.patch_size, int) else 4
        )
    if getattr(default, "merge_size", None) is not None:
        options["merge_size"] = 2
    size = getattr(default, "size", None)
    if size is not None:
        options["size"] = _size(dict(size), areas=hasattr(default, "merge_size"))
    if getattr(default, "crop_size", None):
        options["crop_size"] = {"height": 16, "width": 16}
    if hasattr(default, "image_grid_pinpoints"):
        options["image_grid_pinpoints"] = LISTS["image_grid_pinpoints"]
    if hasattr(default, "max_image_size") and not isinstance(default.max_image_size, int):
        options["max_image_size"] = {"longest_edge": 16}
    if hasattr(default, "feature_size") and hasattr(default, "chunk_length"):
        options |= {"feature_size": 8, "chunk_length": 2}
    return kind(**{**options, **changes})


def _size(size, areas):
    given = {key for key, value in size.items() if value is not None}
    if areas and given >= {"shortest_edge", "longest_edge"}:
        return {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    if given == {"height", "width"}:
        return {"height": 16, "width": 16}
    if given == {"shortest_edge", "longest_edge"}:
        return {"shortest_edge": 16, "longest_edge": 32}
    if given == {"longest_edge"}:
        return {"longest_edge": 64}
    if given == {"shortest_edge"}:
        return {"shortest_edge": 16}
    return dict.fromkeys(given, 16)
