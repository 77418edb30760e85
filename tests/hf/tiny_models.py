"""Tiny random models of the families, built once per test run, and packed samples with media for them.

`shared_model` returns one instance per test run and family: many tests ask it for one property each. They may run it
and read its gradients, but must not change it. `build_model` returns a new instance for tests that do.
"""

import dataclasses
import functools
import inspect
from typing import TypeVar

import torch
from families import VISION, config_of, media_of

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.hf import PackedModel
from mvp_engine.hf.model import attention

ENCODERS = ("vision", "visual", "audio")  # parts of the names of their parameters
M = TypeVar("M", bound=PackedModel)
VIDEO_TOKEN = 91
# By media format; 90 for images.
PLACEHOLDERS = {**dict.fromkeys(["video", "frame", "merged_video"], VIDEO_TOKEN), "audio": 92}


def build_model(kind, name):
    """No weight is zero, and the media that a token attends to change its outputs by far more than 1e-5."""
    torch.manual_seed(0)
    model = kind.from_config(config_of(name))
    with torch.no_grad():
        for param in model.parameters():
            param += 0.1 * torch.randn_like(param)
    return model.eval()


def shared_model(kind, name):
    """The instance of `build_model(kind, name)` that this test run shares, without gradients. Do not change it."""
    model = _shared_model(kind, name)
    model.zero_grad()
    return model


@functools.cache
def _shared_model(kind, name):
    return build_model(kind, name)


# ---- Samples with media -----------------------------------------------------------------------------------------


def samples(model, name):
    """Three: without media, with one item, with two of different sizes (or of two kinds)."""
    g = torch.Generator().manual_seed(5)
    forms = VISION[name][2].split()
    return [sample(model, forms, items, g) for items in ([], [forms[0]], [forms[0], forms[-1]])]


def packs_of(model, name, members, lengths):
    """Packs of these members of `samples`; of a model without encoders, of random sequences of these lengths."""
    if name in VISION:
        ones = samples(model, name)
        return [PackedBatch.concat([ones[i] for i in pack]) for pack in members]
    g = torch.Generator().manual_seed(3)
    return [
        PackedBatch.from_sequences([torch.randint(99, (n,), generator=g) for n in pack])
        for pack in lengths
    ]


def media_packs(model, name, members):
    """Packs of these members of `samples`. One of text alone does not even have an empty list of images."""
    ones = samples(model, name)
    text = dataclasses.replace(ones[0], media={})
    packs = [PackedBatch.concat([ones[i] for i in pack]) for pack in members]
    return [text if pack == [0] else batch for pack, batch in zip(members, packs, strict=True)]


def sample(model, forms, items, g):
    """One sequence of text with the media `items` in between; `forms` are all media formats of the model."""
    row = [torch.randint(3, 90, (4,), generator=g)]
    media = {kind: one.select([]) for kind, one in (media_item(form, False, g) for form in forms)}
    for i, form in enumerate(items):
        kind, one = media_item(form, i > 0, g)
        media[kind] = concat_media(media[kind], one)
        placeholders = torch.full((num_placeholders(model, form, one),), PLACEHOLDERS.get(form, 90))
        row += [placeholders, torch.randint(3, 90, (3,), generator=g)]
    ids = torch.cat(row)
    types = (ids - 89).clamp(min=0)
    token_fields = {"token_type_ids": [types.clamp(max=1)], "mm_token_type_ids": [types]}
    fields = {"token_fields": token_fields, "media": media}
    return PackedBatch.from_sequences(
        [ids], position_ids=[positions_of(model, ids, media)], **fields
    )


def media_item(form, large, g):
    kind, values, fields = media_of(form, large, g)
    return kind, Media(values, torch.tensor([len(values)]), torch.tensor([0]), fields)


def concat_media(first, second):
    return Media(
        torch.cat([first.values, second.values]),
        torch.cat([first.row_counts, second.row_counts]),
        torch.cat([first.sequence_ids, second.sequence_ids]),
        {name: torch.cat([first.fields[name], second.fields[name]]) for name in first.fields},
    )


def num_placeholders(model, form, one):
    """The number of feature vectors that the encoder returns for an item."""
    base = model.base()
    if form == "audio":
        frames = (int(one.fields["feature_attention_mask"].sum()) - 1) // 2 + 1
        return (frames - 2) // 2 + 1
    is_video = PLACEHOLDERS.get(form) == VIDEO_TOKEN
    encode = base.get_video_features if is_video else base.get_image_features
    with torch.no_grad():
        features = encode(one.values, *one.fields.values(), return_dict=True).pooler_output
    return sum(part.numel() for part in features) // 32


def positions_of(model, ids, media):
    """The position ids that the model itself would compute."""
    base = model.base()
    if not hasattr(base, "get_rope_index"):
        return torch.arange(len(ids))
    known = inspect.signature(base.get_rope_index).parameters
    fields = dict(item for one in media.values() for item in one.fields.items() if len(item[1]))
    given = {name: value for name, value in fields.items() if name in known}
    given["attention_mask"] = torch.ones_like(ids)[None]
    if "feature_attention_mask" in fields:
        given["audio_seqlens"] = fields["feature_attention_mask"].sum(-1)
    if "mm_token_type_ids" in known:
        given["mm_token_type_ids"] = (ids - 89).clamp(min=0)[None]
    return base.get_rope_index(ids[None], **given)[0][:, 0]


# ---- Comparisons ------------------------------------------------------------------------------------------------


def close(computed, expected):
    """Equal to 1e-5 of the largest value, or to 1e-5."""
    return bool((computed - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1.0))


def run(model, batch, names):
    """Outputs by the order of `names`, and the gradients of about their mean over tokens."""
    model.zero_grad()
    out = model(batch, names)
    torch.stack([out[name].sum() / 100 for name in names]).sum().backward()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return [out[name].detach() for name in names], grads


def check_packed_is_alone(model, ones, names):
    """Outputs and gradients of packed sequences equal those of the sequences one by one."""
    alone = [run(model, one, names) for one in ones]
    packed, grads = run(model, PackedBatch.concat(ones), names)
    for i, name in enumerate(names):
        assert close(packed[i], torch.cat([outs[i] for outs, _ in alone])), name
    assert sum(any(part in name for part in ENCODERS) for name in grads) > 10
    for name, grad in grads.items():
        expected = [found[name] for _, found in alone if name in found]
        assert close(grad, torch.stack(expected).sum(0)), name


def transformers_log_probs(model, inputs):
    """Log-probs of the next tokens from transformers' own forward with eager attention; 0 at the end."""
    input_ids = inputs["input_ids"]
    with attention.eager_attention(model.hf.config), torch.no_grad():
        logits = model.hf(**inputs, use_cache=False).logits[0]
    log_probs = logits.log_softmax(-1)[:-1].gather(-1, input_ids[0, 1:, None])[:, 0]
    return torch.cat([log_probs, log_probs.new_zeros(1)])


def processor_inputs(model, one):
    """One sequence as the inputs that the model's processor would return."""
    accepted = inspect.signature(model.hf.forward).parameters
    inputs = {"input_ids": one.input_ids[None]}
    inputs |= {name: value[None] for name, value in one.token_fields.items() if name in accepted}
    for kind, media in one.media.items():
        if len(media.row_counts):
            inputs |= {kind: media.values, **media.fields}
    return inputs
