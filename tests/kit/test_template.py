"""Masks come from the messages' spans in the whole rendered conversation: exactly these characters carry loss."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.templates.tiny import (
    BYE,
    CALL,
    CIAO,
    HELLO,
    HI,
    IMAGE,
    PHI,
    PIECES,
    R1,
    RESULT,
    STOPS,
    SYSTEM,
    TOOL,
    VIDEO,
    Processor,
    adds_bos,
    chatml,
    learnt,
    llama,
    phi,
    say,
    template,
    tokenizer,
)
from tokenizers import AddedToken

from mvp_engine.errors import UserError
from mvp_engine.kit.data.encode.template import ChatTemplate
from mvp_engine.kit.data.encode.tokenization import Rendered, truncate
from mvp_engine.kit.data.read.row_types import BadRow, Part, Row


@pytest.mark.parametrize("name", STOPS)
def test_assistant_turns_and_their_stop_token_carry_the_loss(name: str) -> None:
    form, stop = template(name), STOPS[name]
    assert learnt(form, HI, HELLO) == ["Hello  there!" + stop]
    assert learnt(form, HI, HELLO, BYE, CIAO) == ["Hello  there!" + stop, "Ciao\n\n  now." + stop]
    if name not in ("gemma", "by_index"):
        assert learnt(form, SYSTEM, HI, HELLO) == ["Hello  there!" + stop]
    assert form.render(Row(messages=(HI, HELLO))).stops


def test_mistral_has_no_header_and_its_system_prompt_moves() -> None:
    form = template("mistral")
    assert learnt(form, HI, HELLO, BYE, CIAO) == [" Hello  there!</s>", " Ciao\n\n  now.</s>"]
    assert learnt(form, SYSTEM, HI, HELLO, BYE, CIAO) == [" Hello  there!</s>", " Ciao\n\n  now.</s>"]
    text = form.render(Row(messages=(SYSTEM, HI, HELLO, BYE, CIAO))).text
    assert text.index("Be brief.") > text.index("Hello"), "before the last question: no rendering of a prefix has it"
    call = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]</s>'
    assert learnt(form, HI, CALL, RESULT, CIAO, tools=(TOOL,)) == [call, " Ciao\n\n  now.</s>"]


def test_a_default_system_prompt_is_written_once() -> None:
    text = template("qwen2_5").render(Row(messages=(HI, HELLO, BYE, CIAO, HI, HELLO))).text
    assert text.count("You are a helpful assistant.") == 1


def test_tool_calls_carry_loss_and_results_do_not() -> None:
    both = say("assistant", "Let me see.", tool_calls=[*CALL.extra["tool_calls"]] * 2)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    end = ["Ciao\n\n  now.<|im_end|>"]
    talk = (SYSTEM, HI, CALL, RESULT, RESULT, both, RESULT, CIAO)
    turns = [call + "<|im_end|>", f"Let me see.\n{call}\n{call}<|im_end|>", *end]
    assert learnt(template("qwen2_5"), *talk, tools=(TOOL,)) == turns
    assert learnt(template("qwen3"), *talk[:-1], say("assistant", "4"), tools=(TOOL,)) == [
        *turns[:2],
        "<think>\n\n</think>\n\n4<|im_end|>",
    ]
    llama = template("llama3")  # writes the first question, then, outside of its loop, and dumps results as JSON
    call = '{"name": "add", "parameters": {"a": 1}}<|eot_id|>'
    assert learnt(llama, SYSTEM, HI, CALL, RESULT, CIAO, tools=(TOOL,)) == [call, "Ciao\n\n  now.<|eot_id|>"]
    assert learnt(llama, HI, CALL, say("tool", "a\n5", loss=True), CIAO) == [
        call,
        "a\\n5",  # the quotation mark is between it and the stop token
        "Ciao\n\n  now.<|eot_id|>",
    ]


def test_what_a_thinking_template_keeps_carries_loss() -> None:
    form = template("qwen3")
    thought = say("assistant", "<think>\nhm, hm\n</think>\n\nFour.")
    apart = say("assistant", "Four.", reasoning_content="hm, hm")
    older = say("assistant", "Four.", reasoning="hm, hm")
    for turn in thought, apart, older:
        assert learnt(form, HI, turn) == ["<think>\nhm, hm\n</think>\n\nFour.<|im_end|>"]
        assert learnt(form, HI, turn, BYE, CIAO)[0] == "Four.<|im_end|>"
        assert "hm" not in form.render(Row(messages=(HI, turn, BYE, CIAO))).text
    assert learnt(form, HI, HELLO) == ["<think>\n\n</think>\n\nHello  there!<|im_end|>"]
    steps = learnt(
        form, HI, say("assistant", tool_calls=CALL.extra["tool_calls"], reasoning_content="use it"), RESULT, apart
    )
    assert steps[0].startswith("<think>\nuse it\n</think>\n\n<tool_call>")
    assert steps[1].startswith("<think>\nhm, hm\n</think>")
    # What the generation prompt already says is not the model's to say, where it is there.
    off = template("qwen3", enable_thinking=False)
    assert learnt(off, HI, HELLO, BYE, CIAO) == ["Hello  there!<|im_end|>", "Ciao\n\n  now.<|im_end|>"]


def test_reasoning_dropped_by_the_template_and_a_prompt_that_opens_a_thinking_block() -> None:
    form, stop = template("deepseek_r1"), R1[1]
    tag = say("assistant", "<think>\nlong\n</think><b>4</b>")
    assert learnt(form, HI, tag, BYE, CIAO) == ["<b>4</b>" + stop, "Ciao\n\n  now." + stop]
    call = [{"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    runs = learnt(form, HI, say("assistant", tool_calls=call), RESULT, RESULT, HELLO, BYE, CIAO)
    assert runs[0].startswith("<｜tool▁calls▁begin｜>")  # noqa: RUF001
    assert runs[0].endswith(stop)
    assert runs[1:] == ["Hello  there!" + stop, "Ciao\n\n  now." + stop]


def test_trimmed_contents() -> None:
    spaced = say("assistant", "\n\n Hello \n")
    assert learnt(template("gemma"), HI, spaced, BYE, spaced) == ["Hello<end_of_turn>"] * 2
    assert learnt(template("phi3"), HI, say("assistant", "")) == ["<|end|>"]


def test_generation_blocks_say_what_transformers_reads_from_them() -> None:
    form = template("generation")
    talk = [{"role": m.role, "content": m.parts[0].value} for m in (SYSTEM, HI, HELLO, BYE, CIAO)]
    theirs = form.tokenizer.apply_chat_template(talk, return_assistant_tokens_mask=True, return_dict=True)
    ids, loss, _ = form.tokenize(form.render(Row(messages=(SYSTEM, HI, HELLO, BYE, CIAO))))
    assert ids == theirs["input_ids"]
    assert loss == [bool(flag) for flag in theirs["assistant_masks"]]


def test_a_stop_token_outside_of_the_loop_is_found_and_the_next_turn_is_not_taken_for_one() -> None:
    after = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}{% endfor %}</s>"  # and it never asks for an answer
    form = ChatTemplate(tokenizer("zephyr", chat_template=after))
    assert learnt(form, HI, HELLO, BYE, CIAO) == ["Hello  there!", "Ciao\n\n  now.</s>"]
    assert not form.render(Row(messages=(HI, HELLO, BYE, CIAO))).stops
    assert form.render(Row(messages=(HI, HELLO))).stops


@pytest.mark.parametrize("name", [*STOPS, "mistral", "qwen3"])
def test_any_message_may_set_its_own_loss(name: str) -> None:
    form = template(name)
    stop = STOPS.get(name, "" if name == "mistral" else "<|im_end|>")
    stop = "" if name in ("deepseek_r1", "by_index") else stop  # no stop token behind a question
    asks, silent = say("user", " Bye?", loss=True), say("assistant", "Hello  there!", loss=False)
    last = learnt(form, HI, HELLO)[-1].replace("Hello  there!", "Ciao\n\n  now.")
    assert learnt(form, HI, silent, BYE, CIAO) == [last]
    assert learnt(form, HI, silent, asks, CIAO) == ["Bye?" + stop, last]
    if name not in ("gemma", "by_index"):
        rules = say("system", "Be brief.", loss=True)
        text = learnt(form, rules, HI, silent, BYE, CIAO)[0]
        assert text.removeprefix("Be brief.") in ("", stop, "<|im_end|>")
    with pytest.raises(BadRow) as bad:
        form.render(Row(messages=(HI, silent)))
    assert bad.value.reason == "nothing_to_learn"


@pytest.mark.parametrize("options", [{}, {"add_vision_id": True}])
def test_media_stand_where_the_template_puts_their_placeholders(options: dict[str, Any]) -> None:
    form = ChatTemplate(Processor("qwen_vl"), **options)
    shows = say("assistant", "Like ", IMAGE, " this.")
    row = Row(messages=(say("user", IMAGE, "and", VIDEO, IMAGE, "?"), HELLO, say("user", VIDEO), shows))
    rendered = form.render(row)
    assert [(place.index, place.kind) for place in rendered.media] == list(enumerate(p.kind for p in row.media()))
    for place in rendered.media:
        assert rendered.text[slice(*place.span)] == f"<|{place.kind}_pad|>"
        assert rendered.text[slice(*place.outer)] == f"<|vision_start|><|{place.kind}_pad|><|vision_end|>"
    ids, _, media = form.tokenize(rendered)
    for place, token in zip(rendered.media, media, strict=True):
        assert form.tokenizer.decode(ids[slice(*token.span)]) == rendered.text[slice(*place.span)]
        assert form.tokenizer.decode(ids[slice(*token.outer)]) == rendered.text[slice(*place.outer)]
    label = "Picture 3: " if options else ""
    assert learnt(form, *row.messages) == ["Hello  there!<|im_end|>", "Like " + label, " this.<|im_end|>"]


def test_a_written_placeholder_is_never_taken_for_media() -> None:
    form = ChatTemplate(Processor("qwen_vl"))
    literal = say("assistant", "Write <|image_pad|> there.")
    for row in (
        Row(messages=(say("user", IMAGE), literal)),
        Row(messages=(HI, literal)),
        Row(text="a <|video_pad|> b"),
    ):
        with pytest.raises(BadRow, match="placeholder_in_text"):
            form.render(row)
    named = "{% for m in messages %}{{ m.name }}{% for p in m.content %}{{ p.text or '<|image_pad|>' }}{% endfor %}"
    named += "{% endfor %}"
    other = ChatTemplate(tokenizer("qwen_vl", chat_template=named))
    assert len(other.render(Row(messages=(say("user", IMAGE, name="Eve"), HELLO))).media) == 1
    with pytest.raises(BadRow, match="placeholder_in_text"):
        other.render(Row(messages=(say("user", IMAGE, name="<|image_pad|>"), HELLO)))
    assert learnt(form, say("user", "What is <image>?", IMAGE), say("assistant", "<video> is HTML")) == [
        "<video> is HTML<|im_end|>"
    ]


def test_templates_that_want_typed_texts_and_move_images_forward() -> None:
    form = ChatTemplate(Processor("llava"))
    assert form.renderer.typed_content
    assert learnt(form, SYSTEM, HI, HELLO, say("user", "this:", IMAGE), CIAO) == ["Hello  there!", "Ciao\n\n  now."]
    rendered = form.render(Row(messages=(say("user", "this:", IMAGE), CIAO)))
    assert rendered.text == "USER: <image>\nthis: ASSISTANT: Ciao\n\n  now. "
    assert not rendered.stops, "the format has no stop token, and says so"


def test_media_that_a_template_or_tokenizer_cannot_take() -> None:
    shown = Row(messages=(say("user", Part("audio", "a.wav"), IMAGE), HELLO))
    for form in template("qwen2_5"), template("llama3"), ChatTemplate(Processor("qwen_vl")):
        with pytest.raises(BadRow, match="unsupported_media"):
            form.render(shown)
    with pytest.raises(BadRow, match="unsupported_media"):  # which of three special tokens is it?
        template("qwen_vl").render(Row(messages=(say("user", IMAGE), HELLO)))
    named = ChatTemplate(tokenizer("qwen_vl"), placeholders={"image": "<|image_pad|>"})
    assert len(named.render(Row(messages=(say("user", IMAGE, IMAGE), HELLO))).media) == 2


def test_rows_of_which_the_template_would_leave_something_out_are_bad() -> None:
    no_tools, roles = template("phi3"), "{% for m in messages if m.role != 'system' %}{{ m.content }}</s>{% endfor %}"
    for form, row in (
        (no_tools, Row(messages=(HI, HELLO), tools=(TOOL,))),
        (no_tools, Row(messages=(HI, CALL, RESULT, HELLO))),
        (template("gemma"), Row(messages=(SYSTEM, HI, HELLO))),
        (template("gemma"), Row(messages=(HI, HELLO, HELLO))),
        (template("llama3"), Row(messages=(HI, say("assistant", tool_calls=CALL.extra["tool_calls"] * 2)))),
        (ChatTemplate(tokenizer("zephyr", chat_template=roles)), Row(messages=(SYSTEM, HI, HELLO))),
    ):
        with pytest.raises(BadRow) as bad:
            form.render(row)
        assert bad.value.reason == "template"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}{{ messages[1].content }}",  # no loop
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",  # no answers
        "{% for m in messages %}{{ m.content }",  # broken
        "{{ raise_exception('never') }}",
    ],
)
def test_a_template_that_is_of_no_use_is_an_error_at_set_up(source: str) -> None:
    with pytest.raises(UserError, match="chat template"):
        ChatTemplate(tokenizer("zephyr", chat_template=source))


def test_spans_that_are_not_certain_are_never_guessed() -> None:
    # The header of answers is not the generation prompt; a text is shown twice; a text decides what is shown.
    other = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}{{ 'A:' if add_generation_prompt }}"
    twice = "{% for m in messages %}{{ m.content }}{{ m.content if m.role == 'user' }}</s>{% endfor %}"
    peeks = "{% for m in messages %}{{ 'yes' if m.content.startswith('B') else 'no' }}{{ m.content }}</s>{% endfor %}"
    drops = "{% for m in messages if m.content != 'x' %}{{ m.content }}</s>{% endfor %}"
    asks = say("user", "Bye?", loss=True)
    for source, talk in (
        (other, (HI, HELLO)),
        (twice, (asks, HELLO)),
        (peeks, (asks, HELLO)),
        (drops, (HI, say("assistant", "x"))),
    ):
        form = ChatTemplate(tokenizer("zephyr", chat_template=source))
        with pytest.raises(BadRow) as bad:
            form.render(Row(messages=talk))
        assert bad.value.reason == "mask"
    with pytest.raises(BadRow, match="no characters"):
        template("qwen2_5").render(Row(messages=(say("user", "\ufdd0{0\ufdd1"), HELLO)))


@settings(max_examples=60, deadline=None)
@given(st.data())
@pytest.mark.parametrize(("name", "oracle"), [("qwen2_5", chatml), ("phi3", phi), ("llama3", llama)])
def test_whatever_the_texts_hold_the_spans_are_those_of_the_format(name: str, oracle: Any, data: st.DataObject) -> None:
    text = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)
    turn = st.tuples(text, text, st.sampled_from([None, True, False]))
    talk = [say("system", data.draw(text))] if data.draw(st.booleans()) else []
    for question, answer, loss in data.draw(st.lists(turn, min_size=1, max_size=4)):
        talk += [say("user", question), say("assistant", answer, loss=loss)]
    flags = [message.role == "assistant" and message.loss is not False for message in talk]
    if not any(flags):
        return
    rendered = template(name).render(Row(messages=tuple(talk)))
    pieces = oracle([(m.role, m.parts[0].value, flag) for m, flag in zip(talk, flags, strict=True)])
    assert rendered.text == "".join(piece for piece, _ in pieces)
    mask = [False] * len(rendered.text)
    for start, end in rendered.loss:
        mask[start:end] = [True] * (end - start)
    assert mask == [flag for piece, flag in pieces for _ in piece]


@pytest.mark.parametrize("trim", [False, True])
def test_white_space_inside_an_answer_carries_loss_on_tokenizers_that_trim_offsets_too(trim: bool) -> None:
    code = "def f(x):\n        if x:\n            return   x\n"
    form = ChatTemplate(tokenizer("phi3", trim=trim))
    ids, loss, _ = form.tokenize(form.render(Row(messages=(HI, say("assistant", code)))))
    learns = [id for id, has in zip(ids, loss, strict=True) if has]
    assert form.tokenizer.decode(learns) == code + "<|end|>"


def test_a_token_across_the_border_of_a_span_belongs_to_it_but_a_special_one_must_start_there() -> None:
    form = template("phi3")
    text = "<|user|>\n\n hello<|end|>\n"
    ids = form.tokenizer(text).input_ids
    words = [form.tokenizer.decode([id]) for id in ids]
    assert words[:2] == ["<|user|>", "\n\n"]
    for start, first in (8, 1), (9, 1), (10, 2):
        _, loss, _ = form.tokenize(Rendered(text, ((start, text.index("\n", 11)),)))
        assert [i for i, has in enumerate(loss) if has] == list(range(first, len(ids) - 1))
    greedy = copy.deepcopy(form.tokenizer)  # as Phi-3's own: they take the white space behind them in
    greedy.add_tokens([AddedToken(token, rstrip=True, special=True) for token in PHI], special_tokens=True)
    form = ChatTemplate(greedy)
    ids, loss, _ = form.tokenize(form.render(Row(messages=(HI, say("assistant", "\n\n ok")))))
    assert greedy.decode([id for id, has in zip(ids, loss, strict=True) if has]) == "ok<|end|>"


def test_text_rows_learn_everything_with_one_bos_and_one_eos() -> None:
    form = ChatTemplate(adds_bos("zephyr"))
    bos, eos = form.tokenizer.bos_token_id, form.tokenizer.eos_token_id
    for text in "hello", "<s>hello", "hello</s>", "<s>hello</s>":
        ids, loss, _ = form.tokenize(form.render(Row(text=text)))
        assert (ids[0], ids[-1], ids.count(bos), ids.count(eos)) == (bos, eos, 1, 1)
        assert all(loss[1:])
    ids, loss, _ = template("qwen2_5").tokenize(template("qwen2_5").render(Row(text="hello")))
    assert template("qwen2_5").tokenizer.decode(ids) == "hello<|endoftext|>"
    assert all(loss)
    for text in "", " \n":
        with pytest.raises(BadRow, match="nothing_to_learn"):
            form.render(Row(text=text))


def test_a_conversation_has_the_bos_that_its_template_or_its_processor_gives() -> None:
    for name, process, count in ("llama3", 0, 1), ("zephyr", 0, 0), ("llama3", 1, 1), ("zephyr", 1, 1):
        made = adds_bos(name)
        form = ChatTemplate(SimpleNamespace(tokenizer=made) if process else made)
        ids, loss, _ = form.tokenize(form.render(Row(messages=(HI, HELLO))))
        assert ids.count(made.bos_token_id) == count
        assert made.decode([id for id, has in zip(ids, loss, strict=True) if has]).startswith("Hello  there!")
    shown = Processor("llava", adds_bos("llava"))
    ids, _, media = ChatTemplate(shown).tokenize(ChatTemplate(shown).render(Row(messages=(say("user", IMAGE), HELLO))))
    assert [ids[0], *ids[slice(*media[0].span)]] == shown.tokenizer.convert_tokens_to_ids(["<s>", "<image>"])


def test_cutting_never_leaves_part_of_a_medium() -> None:
    ids, loss = list(range(12)), [False] * 2 + [True] * 10
    media = [(3, 6), (6, 8), (9, 11)]
    for limit in range(4, 14):
        kept, mask, whole = truncate(ids, loss, media, limit)
        assert kept == ids[: len(kept)]
        assert len(kept) == len(mask) <= limit
        assert all(end <= len(kept) or start >= len(kept) for start, end in media)
        assert whole == sum(end <= len(kept) for _, end in media)
    assert [len(truncate(ids, loss, media, limit)[0]) for limit in (4, 6, 7, 8, 10, 99)] == [3, 6, 6, 8, 9, 12]
    for mask, limit in (loss, 2), ([True] + [False] * 11, 12):  # nothing predicts the first token
        with pytest.raises(BadRow, match="nothing_to_learn"):
            truncate(ids, mask, media, limit)


def test_templates_travel_to_worker_processes_and_need_a_fast_tokenizer_and_a_template() -> None:
    form = pickle.loads(pickle.dumps(template("qwen3")))
    assert learnt(form, HI, HELLO) == learnt(template("qwen3"), HI, HELLO)
    with pytest.raises(UserError, match="fast tokenizer"):
        ChatTemplate(SimpleNamespace(is_fast=False))
    bare = copy.deepcopy(tokenizer("zephyr"))
    bare.chat_template = None
    ChatTemplate(bare).render(Row(text="hello"))
    with pytest.raises(UserError, match="no chat template"):
        ChatTemplate(bare).render(Row(messages=(HI, HELLO)))
