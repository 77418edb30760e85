"""Media through processors: planned costs equal the processor's outputs for every family; limits are saved with it."""

import copy
import pickle
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from conftest import user_error
from PIL import Image
from processors import FAMILIES, processor_of, tokenizer

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.kit.data.encode.media import MediaHandler
from mvp_engine.kit.data.encode.processor import audio_extractor, limited_processor
from mvp_engine.kit.data.encode.row_encoder import RowEncoder
from mvp_engine.kit.data.encode.tokenization import expand_placeholders
from mvp_engine.kit.data.read.decoders import MediaInfo
from mvp_engine.kit.data.read.row_types import BadRow, Limits, Part

HERE = Path(".")
SIZES = [(37, 53), (8, 8), (100, 30), (16, 16), (5, 60), (333, 200), (64, 64)]  # height, width
LENGTHS = [5000, 16000, 400, 31999, 32000, 12345, 640]


@cache
def handler(name):
    return MediaHandler(processor_of(name))


def photo():
    from sklearn.datasets import load_sample_image

    return np.array(load_sample_image("china.jpg"))


def item(kind, i):
    """A crop of a photo, or a waveform of noise, in several sizes."""
    height, width = SIZES[i]
    if kind == "image":
        return Part(kind, photo()[:height, :width].copy())
    if kind == "video":
        return Part(
            kind,
            np.stack([photo()[j : j + height, :width] for j in range([5, 1, 12, 7, 3, 2, 30][i])]),
        )
    rng = np.random.default_rng(i)
    return Part(kind, rng.standard_normal(LENGTHS[i]).astype(np.float32), {"sampling_rate": 16000})


def processor_outputs(processor, text, infos, items):
    """The processor's own outputs for a whole conversation."""
    given = {"text_kwargs": {"add_special_tokens": False}}
    for kind, name in (("image", "images"), ("video", "videos"), ("audio", "audio")):
        if some := [one for info, one in zip(infos, items, strict=True) if info.kind == kind]:
            given[name] = [some] if kind == "video" else some
    video_infos = [info for info in infos if info.kind == "video"]
    metadata = [
        {
            "total_num_frames": i.total_frames,
            "fps": i.fps,
            "duration": i.seconds,
            "frames_indices": i.frame_indices(),
        }
        for i in video_infos
    ]
    if metadata:
        rate = (
            {"fps": video_infos[0].num_frames / video_infos[0].seconds}
            if isinstance(processor, hf.Qwen2_5OmniProcessor | hf.Qwen3OmniMoeProcessor)
            else {}
        )
        given["videos_kwargs"] = {
            "video_metadata": [metadata],
            "do_sample_frames": False,
            "return_metadata": True,
            **rate,
        }
    if "audio" in given:
        given["audio_kwargs"] = {"sampling_rate": audio_extractor(processor).sampling_rate}
    outputs = dict(processor(text=[text], **given, return_tensors="pt"))
    outputs.pop("video_metadata", None)
    return outputs


TEMPLATE = """{% for m in messages %}{{ '<|im_end|>' if m.role == 'user' else '' }}{% for p in m.content %}
{%- if p.type == 'text' %}{{ p.text }}{% else %}{{ PLACES[p.type] }}{% endif %}{% endfor %}
{{- '' if m.role == 'user' else '<|im_end|>\n' }}{% endfor %}"""


def row_encoder(name, **options):
    """With a chat template that writes the placeholders of the family's processor."""
    processor = copy.copy(processor_of(name))
    places = {kind: getattr(processor, f"{kind}_token") for kind in handler(name).kinds}
    processor.chat_template = TEMPLATE.replace("PLACES", repr(places))
    return RowEncoder(processor, max_tokens=100_000, **options)


def conversation(processor, parts):
    """A row with media, and its rendered text with placeholders."""
    blocks, text = [{"type": "text", "text": "What is\n"}], "<|im_end|>What is\n"
    for part in parts:
        value = {"array": part.value, **part.options} if part.kind == "audio" else part.value
        blocks += [{"type": part.kind, part.kind: value}, {"type": "text", "text": "\n"}]
        text += getattr(processor, f"{part.kind}_token") + "\n"
    answer = [{"type": "text", "text": "\nA house, äöü."}]
    messages = [{"role": "user", "content": blocks}, {"role": "assistant", "content": answer}]
    return {"messages": messages}, text + "\nA house, äöü.<|im_end|>\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_media_cost_of_every_size_is_what_the_processor_makes(name):
    media = handler(name)
    for kind in media.kinds:
        for i in range(len(SIZES)):
            part = item(kind, i)
            info = media.probe(part, HERE)
            texts, _ = media.collate([info], [media.decode(part, info, HERE)])
            assert texts == [media.expansion(info)], (kind, i)
            assert media.cost(info).tokens == len(
                media.tokenizer(texts[0], add_special_tokens=False).input_ids
            )
            assert media.cost(info).encoder > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_row_encoder_batches_equal_the_processors_own_outputs(name):
    processor, media, rows = processor_of(name), handler(name), row_encoder(name)
    mixes = [
        [],
        *([kind] for kind in media.kinds),
        *([kind] * 3 for kind in media.kinds if kind != "video"),
    ]
    # The others do not expand images next to videos.
    if name not in ("smolvlm", "qwen2_audio", "llava", "llava_next", "gemma3", "idefics3"):
        mixes.append(["video", *(["audio"] if "audio" in media.kinds else []), "image", "image"])
    batches = []
    for mix in mixes:
        parts = [item(kind, i) for i, kind in enumerate(mix)]
        row, text = conversation(processor, parts)
        (one,) = sides = rows.encode(row, None, HERE)
        (got,) = rows.load(sides, HERE, {})
        items = [
            media.decode(part, info, HERE) for part, info in zip(parts, one.infos, strict=True)
        ]
        expected = processor_outputs(processor, text, one.infos, items)
        assert got.input_ids.tolist() == expected.pop("input_ids")[0].tolist()
        names = {"token_type_ids", "mm_token_type_ids"} & expected.keys()
        types = {name: expected.pop(name)[0] for name in names}
        assert got.token_fields.keys() == types.keys()
        assert all(torch.equal(got.token_fields[key], types[key]) for key in types)
        for kind, found in got.media.items():
            for key, value in {kind: found.values, **found.fields}.items():
                # The processor may have padded to a common number of tiles.
                if len(found.row_counts):
                    expected_value = expected.pop(key)
                    expected_value = (
                        expected_value.reshape(-1, *value.shape[1:])
                        if expected_value.ndim > value.ndim - 1
                        else expected_value
                    )
                    if expected_value.shape != value.shape and value.ndim > 3:
                        expected_value = expected_value[expected_value.flatten(1).abs().sum(1) > 0]
                    assert torch.equal(expected_value.to(value.dtype), value), key
        assert expected.keys() <= {"attention_mask"}
        text_with_loss = media.tokenizer.decode(got.labels[got.labels != IGNORE])
        assert text_with_loss.strip("\n") == "A house, äöü.<|im_end|>"
        assert len(one.spans) == len(mix)
        for (start, end), expansion in zip(one.spans, one.expansions, strict=True):
            assert expansion in media.tokenizer.decode(one.ids[start:end])
            assert not any(one.loss[start:end])
        batches.append(got)
    packed = PackedBatch.concat(batches)  # text alone and all mixes fit into one batch
    assert packed.num_sequences == len(mixes)


def test_expand_placeholders_positions_move_with_expansions_before_them():
    text, moved = expand_placeholders("a<i>b<i>c", [(1, 4), (5, 8)], ["12345", "6"])
    assert text == "a12345b6c"
    assert [moved(i) for i in (0, 1, 4, 5, 8, 9)] == [0, 1, 6, 7, 8, 9]


def test_row_encoder_line_breaks_merged_into_an_image_belong_to_its_span():
    """Gemma3 puts two line breaks around an image: tokens that they merge with belong to the image's span."""
    rows = row_encoder("gemma3")
    blocks = [
        {"type": "text", "text": "\n"},
        {"type": "image", "image": item("image", 0).value},
    ]
    row = {"role": "assistant", "content": [*blocks, {"type": "text", "text": "\nNo."}]}
    (one,) = rows.encode({"messages": [{"role": "user", "content": "So?"}, row]}, None, HERE)
    words = [rows.media.tokenizer.decode([id]) for id in one.ids]
    image = ["<start_of_image>", *["<image_soft_token>"] * 4, "<end_of_image>"]
    assert words == [
        "<|im_end|>",
        "S",
        "o",
        "?",
        "\n\n",
        "\n",
        *image,
        "\n\n",
        "\n",
        "N",
        "o",
        ".",
        "<|im_end|>",
        "\n",
    ]
    assert one.spans == [(4, 13)]
    with_loss = [word for word, has in zip(words, one.loss, strict=True) if has]
    assert with_loss == ["\n", "N", "o", ".", "<|im_end|>"]


def test_row_encoder_placeholder_in_user_text_is_a_bad_row():
    rows = row_encoder("qwen3_vl")
    with pytest.raises(BadRow, match="placeholder_in_text"):
        rows.encode({"prompt": "say <|image_pad|>", "completion": "No."}, None, HERE)


def big(kind):
    return MediaInfo(
        kind, 400, 300, total_frames=40, fps=2.0, num_frames=12 if kind == "video" else 0
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_media_shrink_fits_the_token_budget_or_returns_none(name):
    media = handler(name)
    for kind in media.kinds:
        if kind == "audio":
            assert (
                media.shrink(MediaInfo("audio", num_samples=16000, sampling_rate=16000), 5) is None
            )
            continue
        info = big(kind)
        whole = media.cost(info).tokens
        small = media.shrink(info, whole * 2 // 3)
        if name in ("llava", "gemma3"):
            assert small is None
            continue
        assert small is not None
        assert 0 < media.cost(small).tokens <= whole * 2 // 3
        frames = [small.num_frames] if kind == "video" else []
        blank = np.zeros((*frames, 300, 400, 3), np.uint8)
        assert media.collate([small], [blank])[0] == [media.expansion(small)]
        assert media.shrink(info, 0) is None


@pytest.mark.parametrize("name", FAMILIES)
def test_limits_survive_saving_and_loading_the_processor(name, tmp_path):
    sizes = {"max_pixels": 1000}
    # The others have one fixed size for all images, or for all frames.
    if name not in ("gemma3", "llava", "internvl", "smolvlm", "qwen2_5_omni"):
        sizes |= {"min_pixels": 64, "video_max_pixels": 2048}
    limits = Limits(fps=1.0, max_frames=4, chunk_seconds=1, **sizes)
    before = processor_of(name).to_dict()
    media = MediaHandler(processor_of(name), limits)
    assert processor_of(name).to_dict() == before
    media.processor.save_pretrained(tmp_path)
    again = MediaHandler(type(media.processor).from_pretrained(tmp_path))
    for kind in media.kinds:
        if kind == "audio":
            assert again.processor.feature_extractor.n_samples == 16000
            assert media.empty()["input_features"].values.shape[-1] == 100
            continue
        if kind == "video":
            assert (again.limits.fps, again.limits.max_frames) == (1.0, 4)
            assert again.processor.video_processor.do_sample_frames
        info = big(kind)
        assert media.expansion(info) == again.expansion(info)
        if name not in ("gemma3", "llava") and kind == "image":
            assert media.cost(info).tokens < handler(name).cost(info).tokens
        frames = np.zeros((20, 30, 40, 3), np.uint8)
        assert (
            kind == "image" or media.probe(Part("video", frames, {"fps": 2}), HERE).num_frames == 4
        )


def test_limited_processor_unsupported_limit_is_a_user_error():
    with user_error("CLIPImageProcessor resizes all images to 16x16, more than the 255 pixels"):
        limited_processor(processor_of("llava"), Limits(max_pixels=255))
    with user_error("Qwen2_5OmniProcessor fixes the size of videos in its code"):
        limited_processor(processor_of("qwen2_5_omni"), Limits(video_max_pixels=255))


def test_media_row_option_max_pixels_lowers_the_cost():
    media, image = handler("qwen3_vl"), photo()
    plain = media.probe(Part("image", image), HERE)
    less = media.probe(Part("image", image, {"max_pixels": 1024, "detail": "low"}), HERE)
    assert media.cost(plain).tokens > 16 >= media.cost(less).tokens
    assert media.collate([less], [image])[0] == [media.expansion(less)]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_5_omni"])
def test_media_collate_video_gives_seconds_per_grid(name):
    media, part = handler(name), Part("video", np.zeros((6, 16, 16, 3), np.uint8), {"fps": 0.5})
    info = media.probe(part, HERE)
    fields = media.collate([info], [part.value])[1]["pixel_values_videos"].fields
    (field,) = fields.keys() - {"video_grid_thw"}
    assert fields[field].tolist() == [4.0]  # two frames, of two seconds each


def test_media_probe_unsupported_item_is_a_bad_row():
    def reason(name, part):
        media = handler(name)
        with pytest.raises(BadRow) as bad:
            media.cost(media.probe(part, HERE))
        return bad.value.reason

    options = {"sampling_rate": 16000}
    assert reason("llava", item("video", 0)) == "unsupported"
    assert reason("qwen2_audio", item("image", 0)) == "unsupported"
    assert reason("qwen2_audio", Part("audio", np.zeros(32001, np.float32), options)) == "too_long"
    assert reason("qwen2_audio", Part("audio", np.zeros(10, np.float32), options)) == "too_short"
    assert reason("qwen3_vl", Part("image", np.zeros((2, 900, 3), np.uint8))) == "refused"


def test_media_audio_longer_than_the_chunk_is_a_bad_row_until_chunk_seconds_is_raised():
    audio = Part(
        "audio",
        np.random.default_rng(0).standard_normal(40000).astype(np.float32),
        {"sampling_rate": 16000},
    )
    with pytest.raises(BadRow, match=r"2.5 seconds; the processor hears 2 \(limits.chunk_seconds"):
        handler("qwen2_5_omni").probe(audio, HERE)
    longer = MediaHandler(processor_of("qwen2_5_omni"), Limits(chunk_seconds=3))
    info = longer.probe(audio, HERE)
    texts, found = longer.collate([info], [longer.decode(audio, info, HERE)])
    assert texts == [longer.expansion(info)]
    assert found["input_features"].values.shape[-1] == 300
    assert int(found["input_features"].fields["feature_attention_mask"].sum()) == 250


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_media_junk_values_are_bad_rows(kind):
    media = handler("qwen2_5_omni")
    junk = [
        None,
        True,
        -1,
        1e400,
        "",
        " ",
        "\ud800",
        "a" * 300,
        "data:",
        "://",
        b"",
        [],
        [[]],
        [None],
        {},
        {1},
    ]
    junk += [
        {"bytes": []},
        {"path": {}},
        {"array": [[1], [1, 2]], "sampling_rate": 9},
        {"array": "x"},
        object(),
        print,
    ]
    junk += [{"array": [1.0], "sampling_rate": rate} for rate in (None, 0, -5, "fast", 10**40)]
    junk += [
        np.array(["a"]),
        np.zeros(0),
        np.zeros((2, 2, 2, 2, 2)),
        np.array(None),
        [b"x", 3],
        ["a.png", None],
    ]
    parts = [Part(kind, value) for value in junk]
    if kind != "audio":
        parts += [
            Part(kind, item(kind, 0).value, {"max_pixels": word})
            for word in ("x", [], -1, 0, 10**400, np.nan)
        ]
    for part in parts:
        with pytest.raises(BadRow):
            media.decode(part, media.probe(part, HERE), HERE)


def test_media_handler_unsupported_family_is_a_user_error():
    odd = copy.copy(processor_of("llava"))
    odd.replace_image_token = lambda images, image_idx, **options: (
        "<image>" * len(images["pixel_values"])
    )
    with user_error("LlavaProcessor cannot be called for one image at a time: it expands two"):
        MediaHandler(odd)


def test_media_handler_images_of_several_sizes_are_padded_as_by_processor():
    sizes = {"patch_size": {"height": 4, "width": 4}, "size": {"longest_edge": 32}}
    pixtral = hf.PixtralProcessor(
        hf.PixtralImageProcessor(**sizes),
        tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        patch_size=4,
    )
    media = MediaHandler(pixtral)
    infos = [MediaInfo("image", width=32, height=16), MediaInfo("image", width=16, height=32)]
    items = [Image.effect_noise((info.width, info.height), 90).convert("RGB") for info in infos]
    texts, found = media.collate(infos, items)
    own = pixtral(text="[IMG][IMG]", images=items, return_tensors="pt")
    assert found["pixel_values"].values.equal(own["pixel_values"])
    assert found["pixel_values"].fields["image_sizes"].tolist() == own["image_sizes"].tolist()
    assert "".join(texts) == pixtral.tokenizer.decode(own["input_ids"][0])


def test_media_handler_tokenizer_only_supports_no_media():
    media = MediaHandler(tokenizer())
    assert (media.kinds, media.empty()) == ([], {})
    with pytest.raises(BadRow, match="unsupported"):
        media.probe(item("image", 0), HERE)


def test_media_handler_pickles():
    media = handler("qwen3_vl")
    info = media.probe(item("image", 2), HERE)
    assert pickle.loads(pickle.dumps(media)).expansion(info) == media.expansion(info)
