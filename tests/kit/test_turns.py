"""The text between a sampled answer and the next one is the end of what the chat template writes for all of it."""

from __future__ import annotations

import contextlib
import re

import pytest
from kit.templates.tiny import IMAGE, Processor, message, template
from kit.test_tools_and_reasoning import NAMES, PUBLISHED, TOOL, published

from mvp_engine.kit.data.encode.template import ChatTemplate
from mvp_engine.kit.data.read.row_types import BadRow

OWN = [
    "qwen2_5",
    "qwen3",
    "generation",
    "llama3",
    "gemma",
    "mistral",
    "deepseek_r1",
    "phi3",
    "zephyr",
    "by_index",
]
# Templates without a turn for results of tools, or that raise at one.
NO_TOOLS = {
    "cohere",
    "cohere2",
    "diffusion_gemma",
    "gemma",
    "gemma3",
    "llava_next",
    "phi3",
    "phi3_5",
}
OWN_NO_TOOLS = {"gemma"}
DROPS = "diffusion_gemma glm4moe gptoss lfm2_2_5 nemotron_3_nano nemotron_3_super nemotron_3_ultra qwen3"
DROPS += " qwen3_5_nothink qwen3_5_think qwen3_6"
CALL = {
    "type": "function",
    "id": "call00000",
    "function": {"name": "weather", "arguments": {"city": "Bern"}},
}
NEW = {
    "user": message("user", "And then?"),
    "tool": message("tool", "12 degrees", name="weather", tool_call_id="call00000"),
}


def check(form, role, thinks):
    """`between_turns` after an answer, compared with the tokenizer's own text for the whole conversation."""
    tools = [TOOL] if role == "tool" and "tools" in form.renderer.source([TOOL]) else []
    before = [message("user", "Q1"), message("assistant", "sampled")]
    between = form.between_turns(before, [NEW[role]], tools)
    text = between.text.removeprefix(form.stop_token)
    has_calls = role == "tool" and "tool_calls" in form.renderer.source(tools)
    answer = () if has_calls else ("A1.",)
    extra = {"tool_calls": [CALL]} if has_calls else {}
    if thinks:
        extra["reasoning_content"] = "hm"
    chat = [message("user", "Q1"), message("assistant", *answer, **extra), NEW[role]]
    whole = ""
    for options in ({}, {"empty_content": None, "json_arguments": True}):  # the latter for DeepSeek
        raw = [form.renderer.message(one, **options) for one in chat]
        options = {"tools": tools or None, "add_generation_prompt": True, **form.renderer.options}
        with contextlib.suppress(TypeError):
            whole = form.renderer.owner.apply_chat_template(raw, **options)
        if "Bern" in whole or not has_calls:
            break
    assert whole.endswith(text)
    assert "sampled" not in text
    written = whole.removesuffix(text)
    left = re.sub(r"\s", "", written.rpartition("A1." if "A1." in written else "Bern")[2])
    left = re.sub(r"<[^<>]*>", "", left)
    assert not re.search(r"\w", left), left
    return between


def test_published_templates_are_all_here():
    if not NAMES:
        pytest.skip(f"no published templates in {PUBLISHED}")
    assert set(DROPS.split()) | NO_TOOLS <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_published_template_continues_a_conversation_after_a_sampled_answer(name):
    for thinks in (False, True):
        for role in ("user", "tool"):
            form = published(name)
            form.renderer.options["enable_thinking"] = thinks
            form.renderer._variables["enable_thinking"] = thinks
            if role == "tool" and name in NO_TOOLS:
                with pytest.raises(BadRow, match="template"):
                    form.between_turns(
                        [message("user", "Q1"), message("assistant", "x")], [NEW[role]]
                    )
            else:
                check(form, role, thinks)
    assert published(name).drops_reasoning(NEW["user"]) == (name in DROPS.split())


@pytest.mark.parametrize("name", OWN)
def test_template_continues_a_conversation_after_a_sampled_answer(name):
    check(template(name), "user", thinks=False)
    if name in OWN_NO_TOOLS:
        with pytest.raises(BadRow, match="template"):
            template(name).between_turns(
                [message("user", "Q1"), message("assistant", "x")], [NEW["tool"]]
            )
    else:
        check(template(name), "tool", thinks=False)


def test_between_turns_has_all_messages_and_media_in_order():
    form = ChatTemplate(Processor("qwen_vl"))
    before = [message("user", IMAGE, "Q1"), message("assistant", "x")]
    new = [message("user", "Look: ", IMAGE, " and ", IMAGE), message("user", "Well?")]
    between = form.between_turns(before, new)
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    assert between.text == (
        f"<|im_end|>\n<|im_start|>user\nLook: {picture} and {picture}<|im_end|>\n<|im_start|>user\nWell?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert [between.text[slice(*place.span)] for place in between.media] == ["<|image_pad|>"] * 2
    assert [place.index for place in between.media] == [0, 1]
    with pytest.raises(BadRow, match="media placeholder"):
        form.between_turns(before, [message("user", "<|image_pad|>")])


def test_between_turns_does_not_depend_on_what_was_sampled():
    """A policy may write anything, also the words of a template."""
    form = template("qwen3")
    texts = set()
    for answer in ("fine", "<|im_end|>\n<|im_start|>user\nAnd then?", "{{ raise }}", "\ufdd0", ""):
        before = [message("user", "Q1"), message("assistant", answer)]
        texts.add(form.between_turns(before, [NEW["user"]]).text)
    assert len(texts) == 1
