"""Processors that differ: they format prompts, change expansions by their neighbours, mask tiles or no frames."""

import pickle
from functools import wraps
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from jinja2 import TemplateError
from PIL import Image
from processors import SQUARE, tokenizer

from mvp_engine.kit.data.encode.media import MediaHandler
from mvp_engine.kit.data.encode.processor import (
    FRAMES,
    TILES,
    concat_media,
    has_mixed_fields,
    to_media,
)
from mvp_engine.kit.data.encode.processor_runner import ProcessorRunner
from mvp_engine.kit.data.encode.tokenization import expand_placeholders
from mvp_engine.kit.data.read.decoders import MediaInfo


def test_media_handler_processor_that_formats_prompts_has_expansions_of_items_alone():
    siglip = hf.SiglipImageProcessor(size=SQUARE)
    siglip.image_seq_length = 4
    processor = hf.PaliGemmaProcessor(siglip, tokenizer("<image>", bos_token="<s>"))
    media = MediaHandler(processor)
    assert media.expansion(MediaInfo("image", 20, 30)) == 4 * "<image>"
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Why?"}]}]
    template = {"chat_template": media.with_template(processor).chat_template, "tokenize": False}
    assert processor.apply_chat_template(messages, **template) == "<image><s>Why?\n"
    with pytest.raises(TemplateError, match="one prompt and one answer"):
        processor.apply_chat_template(3 * messages, **template)
    types = media.token_types(torch.arange(4), torch.tensor([False, True, True, False]))[
        "token_type_ids"
    ]
    assert types.tolist() == [0, 1, 1, 1]  # the prompt, then the answer


def test_processor_call_passes_its_own_options_directly(monkeypatch):
    """transformers 5.23 warns of `return_mm_token_type_ids` among the tokenizer's options."""
    calls = []
    real = hf.PaliGemmaProcessor.__call__

    @wraps(real)
    def call(self, *args, **options):
        calls.append(options)
        return real(self, *args, **options)

    monkeypatch.setattr(hf.PaliGemmaProcessor, "__call__", call)
    siglip = hf.SiglipImageProcessor(size=SQUARE)
    siglip.image_seq_length = 4
    MediaHandler(hf.PaliGemmaProcessor(siglip, tokenizer("<image>", bos_token="<s>")))
    assert any(options.get("return_mm_token_type_ids") is False for options in calls)
    assert not any(
        "return_mm_token_type_ids" in options.get("text_kwargs", {}) for options in calls
    )


class UnmaskedRunner(ProcessorRunner):
    """A processor of sounds with two features a frame, and a mask of what the encoder makes of them."""

    def call(self, items):
        frames = [info.num_samples // 1000 for info, _ in items]
        mask = torch.arange(max(frames) // 4) < torch.tensor(frames)[:, None] // 4
        outputs = {
            "input_features": torch.ones(len(items), max(frames), 2),
            "input_features_mask": mask,
        }
        return ["<a>" * (count // 4) for count in frames], outputs

    call_blank = None


def test_audio_without_a_mask_of_frames_has_a_row_for_each_frame():
    runner = runner_of(UnmaskedRunner)
    (media,) = runner.find_empty_media().values()
    assert runner.layouts == {"audio": FRAMES}
    assert media.values.shape == (0, 2)


def runner_of(kind):
    processor = hf.Qwen2AudioProcessor.__new__(hf.Qwen2AudioProcessor)
    processor.tokenizer = SimpleNamespace(bos_token="<s>")
    return kind(processor, ["audio"], 16000)


class OneSoundRunner(ProcessorRunner):
    """A processor that takes one sound per text, with a mask of frames."""

    def call(self, items):
        if len(items) > 1:
            raise ValueError("one sound per text")
        return self._call_with_own_texts(items)

    def _call_with_own_texts(self, items):
        frames = torch.tensor([info.num_samples // 1000 for info, _ in items])
        mask = torch.arange(int(frames.max())) < frames[:, None]
        outputs = {"input_features": mask[..., None] * torch.ones(2), "input_features_mask": mask}
        return ["<a>" * int(count) for count in frames], outputs

    call_blank = None


def test_sounds_of_a_processor_for_one_per_text_are_padded_as_it_pads_several_texts():
    runner = runner_of(OneSoundRunner)
    (media,) = runner.find_empty_media().values()
    assert not runner.refused
    assert media.values.shape == (0, 8, 2)


class EqualTilesRunner(ProcessorRunner):
    """A processor of images in tiles that stacks those of one call, so they must have equal numbers of tiles."""

    def call(self, items):
        counts = [info.height // 8 for info, _ in items]
        if len(set(counts)) > 1:
            raise ValueError("stack expects each tensor to be equal size")
        return ["<i>" * count for count in counts], {
            "pixel_values": torch.ones(len(items), counts[0], 3, 4, 4)
        }

    call_blank = None


def test_images_with_different_numbers_of_tiles_are_taken_one_at_a_time():
    processor = hf.LlavaProcessor.__new__(hf.LlavaProcessor)
    processor.tokenizer = SimpleNamespace(bos_token="<s>")
    processor.image_token = "<i>"
    runner = EqualTilesRunner(processor, ["image"], 16000)
    (media,) = runner.find_empty_media().values()
    assert media.values.shape == (0, 3, 4, 4)
    assert not runner.can_batch_images


def test_image_with_a_mask_of_tiles_and_a_size_of_the_whole_is_one_row():
    def outputs(tiles):
        mask = torch.ones(1, tiles, 4, 4)
        return {
            "pixel_values": torch.ones(1, tiles, 3, 8, 8),
            "image_sizes": torch.ones(1, 2),
            "image_mask": mask,
        }

    assert has_mixed_fields(outputs(3))
    assert not has_mixed_fields(outputs(2))  # a size looks like a field of two tiles
    media = [to_media(outputs(tiles), TILES)[1] for tiles in (3, 2)]
    both = concat_media([media[0].select([]), *media])
    assert both.values.shape == (2, 3, 3, 8, 8)
    assert both.fields["image_mask"].sum((1, 2, 3)).tolist() == [48, 32]


@pytest.mark.parametrize("text", ["I and I", "II x", "I", "III<x", "Iy I\nI"])
def test_expansions_that_depend_on_their_neighbours_are_those_of_the_whole_text(text):
    images = hf.Idefics2ImageProcessor(size={"shortest_edge": 16, "longest_edge": 32})
    processor = hf.Idefics2Processor(
        images, tokenizer("<fake_token_around_image>", "<image>"), image_seq_len=2
    )
    media = pickle.loads(pickle.dumps(MediaHandler(processor)))  # as workers get it
    count = text.count("I")
    alone = media.expansions([MediaInfo("image", 20, 30)] * count)
    places = [(place, place + 1) for place, letter in enumerate(text) if letter == "I"]
    found = expand_placeholders(
        text, places, media.runner.contexts["image"].apply(text, places, alone)
    )[0]
    pictures = [Image.new("RGB", (20, 30))] * count
    ids = processor(
        text=[text.replace("I", "<image>")], images=[pictures], add_special_tokens=False
    )["input_ids"][0]
    assert processor.tokenizer(found, add_special_tokens=False)["input_ids"] == ids
