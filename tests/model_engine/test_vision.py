"""Models that see and hear, tiny and random: packed equals one by one and equals transformers' own forward, to 1e-5."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

import pytest
import torch
from conftest import ROOT
from families import REFUSED_VISION, TYPES, VISION, config_of, media_of, vision_table
from torch import Tensor

from mvp_engine.data.batch import Media, PackedBatch
from mvp_engine.errors import UserError
from mvp_engine.hf import LanguageModel, PackedModel, ValueModel, attention
from mvp_engine.hf.preflight import check_packing

M = TypeVar("M", bound=PackedModel)
SEEN = {"video": 91, "frame": 91, "sound": 92}  # the token that stands for a piece of it; 90: of an image


def lively(kind: type[M], name: str) -> M:
    """No weight is zero, and what a token sees makes a difference of far more than 1e-5."""
    torch.manual_seed(0)
    model = kind.from_config(config_of(name))
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model.eval()


def samples(model: PackedModel, name: str) -> list[PackedBatch]:
    """Three: without an image, with one, with two of different sizes (or an image and a video, or a sound)."""
    g = torch.Generator().manual_seed(5)
    looks = VISION[name][2].split()
    return [sample(model, looks, seen, g) for seen in ([], [looks[0]], [looks[0], looks[-1]])]


def sample(model: PackedModel, looks: list[str], seen: list[str], g: torch.Generator) -> PackedBatch:
    row = [torch.randint(3, 90, (4,), generator=g)]
    media = {kind: one.select([]) for kind, one in (media_item(look, False, g) for look in looks)}
    for i, look in enumerate(seen):
        kind, one = media_item(look, i > 0, g)
        media[kind] = joined(media[kind], one)
        row += [torch.full((pieces(model, look, one),), SEEN.get(look, 90)), torch.randint(3, 90, (3,), generator=g)]
    ids = torch.cat(row)
    types = (ids - 89).clamp(min=0)
    tokens = {"token_type_ids": [types.clamp(max=1)], "mm_token_type_ids": [types]}
    return PackedBatch.from_sequences(
        [ids], position_ids=[positions(model, ids, media)], token_fields=tokens, media=media
    )


def media_item(look: str, large: bool, g: torch.Generator) -> tuple[str, Media]:
    kind, values, fields = media_of(look, large, g)
    return kind, Media(values, torch.tensor([len(values)]), torch.tensor([0]), fields)


def joined(first: Media, second: Media) -> Media:
    pairs = zip(first.fields.items(), second.fields.values(), strict=True)
    return Media(
        torch.cat([first.values, second.values]),
        torch.cat([first.row_counts, second.row_counts]),
        torch.cat([first.sequence_ids, second.sequence_ids]),
        {name: torch.cat([mine, theirs]) for (name, mine), theirs in pairs},
    )


def pieces(model: PackedModel, look: str, one: Media) -> int:
    """How many tokens stand for it."""
    base: Any = model.base()
    if look == "sound":
        frames = (int(one.fields["feature_attention_mask"].sum()) - 1) // 2 + 1
        return (frames - 2) // 2 + 1
    features = base.get_video_features if SEEN.get(look) == 91 else base.get_image_features
    with torch.no_grad():
        found = features(one.values, *one.fields.values(), return_dict=True).pooler_output
    return sum(part.numel() for part in found) // 32


def positions(model: PackedModel, ids: Tensor, media: dict[str, Media]) -> Tensor:
    """Those that the model would make for itself."""
    base: Any = model.base()
    if not hasattr(base, "get_rope_index"):
        return torch.arange(len(ids))
    known = inspect.signature(base.get_rope_index).parameters
    fields = {name: value for one in media.values() for name, value in one.fields.items() if len(value)}
    given = {name: value for name, value in fields.items() if name in known}
    given["attention_mask"] = torch.ones_like(ids)[None]
    if "feature_attention_mask" in fields:
        given["audio_seqlens"] = fields["feature_attention_mask"].sum(-1)
    if "mm_token_type_ids" in known:
        given["mm_token_type_ids"] = (ids - 89).clamp(min=0)[None]
    return base.get_rope_index(ids[None], **given)[0][:, 0]


def own_log_probs(model: LanguageModel, one: PackedBatch) -> Tensor:
    """What transformers makes of a sample, from what its processor would give."""
    takes = inspect.signature(model.hf.forward).parameters
    given: dict[str, Any] = {name: value[None] for name, value in one.token_fields.items() if name in takes}
    for kind, media in one.media.items():
        given |= {kind: media.values, **media.fields} if len(media.row_counts) else {}
    with attention.own_attention(model.hf.config), torch.no_grad():
        logits = model.hf(input_ids=one.input_ids[None], use_cache=False, **given).logits[0]
    picked = logits.log_softmax(-1)[:-1].gather(-1, one.input_ids[1:, None])[:, 0]
    return torch.cat([picked, picked.new_zeros(1)])


def close(mine: Tensor, theirs: Tensor) -> bool:
    return bool((mine - theirs).abs().max() <= 1e-5 * theirs.abs().max().clamp(min=1.0))


def run(model: PackedModel, batch: PackedBatch, names: list[str]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The outputs, and what they add to the gradients of about their mean over tokens."""
    model.zero_grad()
    out = model(batch, names)
    torch.stack([out[name].sum() / 100 for name in names]).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [out[name].detach() for name in names], grads


def check_packed_is_alone(model: PackedModel, ones: list[PackedBatch], names: list[str]) -> None:
    alone = [run(model, one, names) for one in ones]
    packed, grads = run(model, PackedBatch.concat(ones), names)
    for i, name in enumerate(names):
        assert close(packed[i], torch.cat([outs[i] for outs, _ in alone])), name
    assert len([name for name in grads if any(part in name for part in ("vision", "visual", "audio"))]) > 10
    for name, grad in grads.items():
        expected = [g[name] for _, g in alone if name in g]
        assert close(grad, torch.stack(expected).sum(0)), name


@pytest.mark.parametrize("name", VISION)
def test_log_probs_are_those_of_each_alone_and_of_transformers(name: str) -> None:
    model = lively(LanguageModel, name)
    check_packing(model)
    ones = samples(model, name)
    check_packed_is_alone(model, ones, ["log_probs", "entropy"])
    for one in ones:
        assert close(model(one, ["log_probs"])["log_probs"], own_log_probs(model, one))


@pytest.mark.parametrize("name", VISION)
def test_values_are_those_of_each_alone(name: str) -> None:
    model = lively(ValueModel, name)
    check_packing(model)
    check_packed_is_alone(model, samples(model, name), ["values"])


@pytest.mark.parametrize("name", REFUSED_VISION)
def test_models_that_cannot_be_packed_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=REFUSED_VISION[name][0]):
        check_packing(lively(LanguageModel, name))


@pytest.mark.parametrize("name", TYPES)
def test_images_without_the_token_types_that_a_model_reads_are_refused(name: str) -> None:
    model = lively(LanguageModel, name)
    text, *_, both = samples(model, name)
    del both.token_fields[TYPES[name]], text.token_fields[TYPES[name]]
    with pytest.raises(UserError, match=f"reads {TYPES[name]} to see images: give them in the batch's token_fields"):
        model(both, ["log_probs"])
    model(text, ["log_probs"])


def test_images_without_positions_on_three_axes_are_refused() -> None:
    model = lively(LanguageModel, "qwen3_vl")
    text, *_, both = samples(model, "qwen3_vl")
    flat = PackedBatch.from_sequences([both.input_ids], media=both.media)
    with pytest.raises(UserError, match="Qwen3VLModel has positions on three axes"):
        model(flat, ["log_probs"])
    plain = model(PackedBatch.from_sequences([text.input_ids]), ["log_probs"])["log_probs"]  # text needs but one axis
    assert close(plain, own_log_probs(model, text))


def test_each_part_has_its_own_attention() -> None:
    model = LanguageModel.from_config(config_of("qwen2_5_omni_thinker"))
    config: Any = model.hf.config

    def names() -> list[str]:
        parts = (config, config.text_config, config.vision_config, config.audio_config)
        return [part._attn_implementation for part in parts]

    expected = [attention.NAME, attention.NAME, attention.ENCODER, attention.ENCODER]
    assert names() == expected
    with attention.own_attention(config):
        assert set(names()) == {"eager"}
    assert names() == expected


def test_table_in_the_documents_is_the_list_of_this_test() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    assert f"<!-- vision -->\n{vision_table()}\n<!-- /vision -->" in page, "run python tests/model_engine/families.py"
