"""Processors with outputs of their own kind: prompts that they format, sounds without a mask of frames."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from jinja2 import TemplateError
from processors import SQUARE, tokenizer

from mvp_engine.kit.data.encode.media import MediaHandler
from mvp_engine.kit.data.encode.processor_runner import ProcessorRunner
from mvp_engine.kit.data.read.media_info import MediaInfo


def test_media_handler_processor_that_formats_prompts_has_expansions_of_items_alone() -> None:
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
    types = media.token_types(torch.arange(4), torch.tensor([False, True, True, False]))["token_type_ids"]
    assert types.tolist() == [0, 1, 1, 1]  # the prompt, then the answer


class UnmaskedRunner(ProcessorRunner):
    """A processor of sounds with two features a frame, and a mask of what the encoder makes of them."""

    def call(self, items: Any) -> tuple[list[str], dict[str, Any]]:
        frames = [info.num_samples // 1000 for info, _ in items]
        mask = torch.arange(max(frames) // 4) < torch.tensor(frames)[:, None] // 4
        outputs = {"input_features": torch.ones(len(items), max(frames), 2), "input_features_mask": mask}
        return ["<a>" * (count // 4) for count in frames], outputs

    call_blank = None


def test_audio_without_a_mask_of_frames_has_a_row_for_each_frame() -> None:
    runner = UnmaskedRunner(None, ["audio"], 16000)
    (media,) = runner.find_empty_media().values()
    assert runner.by_frame == {"audio"}
    assert media.values.shape == (0, 2)
