"""Loss masks by chat template: exactly the expected characters of a rendered conversation carry loss."""

import copy
import pickle
from types import SimpleNamespace

import pytest
from conftest import user_error
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
    llama,
    message,
    phi,
    template,
    texts_with_loss,
    tokenizer,
)
from run_files import read_json, write_json
from tokenizers import AddedToken

from mvp_engine.kit import load_processor
from mvp_engine.kit.data.encode.template import ChatTemplate
from mvp_engine.kit.data.encode.tokenization import Rendered, truncate
from mvp_engine.kit.data.read.row_types import BadRow, Part, Row


@pytest.mark.parametrize("name", STOPS)
def test_render_assistant_turns_and_stop_token_carry_loss(name):
    form, stop = template(name), STOPS[name]
    assert texts_with_loss(form, HI, HELLO) == ["Hello  there!" + stop]
    answers = [text + stop for text in ("Hello  there!", "Ciao\n\n  now.")]
    assert texts_with_loss(form, HI, HELLO, BYE, CIAO) == answers
    if name not in ("gemma", "by_index"):
        assert texts_with_loss(form, SYSTEM, HI, HELLO) == ["Hello  there!" + stop]
    assert form.render(chat_row(HI, HELLO)).stops


def chat_row(*messages, **columns):
    return Row(messages=messages, **columns)


def bad_row(form, row):
    """The reason why a form refuses a row."""
    with pytest.raises(BadRow) as bad:
        form.render(row)
    return bad.value.reason


def learnt(form, *messages):
    """The text of the tokens that carry loss."""
    ids, loss, _ = form.tokenize(form.render(chat_row(*messages)))
    return form.tokenizer.decode([id for id, has in zip(ids, loss, strict=True) if has])


def test_render_mistral_without_header_and_with_moved_system_prompt():
    form, answers = template("mistral"), [" Hello  there!</s>", " Ciao\n\n  now.</s>"]
    assert texts_with_loss(form, HI, HELLO, BYE, CIAO) == answers
    assert texts_with_loss(form, SYSTEM, HI, HELLO, BYE, CIAO) == answers
    text = form.render(chat_row(SYSTEM, HI, HELLO, BYE, CIAO)).text
    # Before the last question: no rendering of a prefix contains it.
    assert text.index("Be brief.") > text.index("Hello")
    call = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]</s>'
    assert texts_with_loss(form, HI, CALL, RESULT, CIAO, tools=(TOOL,)) == [call, answers[1]]


def test_render_default_system_prompt_is_written_once():
    text = template("qwen2_5").render(chat_row(HI, HELLO, BYE, CIAO, HI, HELLO)).text
    assert text.count("You are a helpful assistant.") == 1


def test_render_tool_calls_carry_loss_and_results_do_not():
    both = message("assistant", "Let me see.", tool_calls=[*CALL.extra["tool_calls"]] * 2)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    messages = (SYSTEM, HI, CALL, RESULT, RESULT, both, RESULT)
    turns = [call + "<|im_end|>", f"Let me see.\n{call}\n{call}<|im_end|>"]
    found = texts_with_loss(template("qwen2_5"), *messages, CIAO, tools=(TOOL,))
    assert found == [*turns, "Ciao\n\n  now.<|im_end|>"]
    found = texts_with_loss(template("qwen3"), *messages, message("assistant", "4"), tools=(TOOL,))
    assert found == [*turns, "4<|im_end|>"]
    # Llama's writes the first question outside of its loop, and dumps results as JSON.
    form, end = template("llama3"), "Ciao\n\n  now.<|eot_id|>"
    call = '{"name": "add", "parameters": {"a": 1}}<|eot_id|>'
    assert texts_with_loss(form, SYSTEM, HI, CALL, RESULT, CIAO, tools=(TOOL,)) == [call, end]
    result = message("tool", "a\n5", loss=True)  # a quotation mark separates it from the stop token
    assert texts_with_loss(form, HI, CALL, result, CIAO) == [call, "a\\n5", end]


def test_render_tool_call_with_null_function_is_a_bad_row():
    """Arrow fills a missing `function` with null, where a row has the name directly in the call."""
    call = message("assistant", tool_calls=[{"function": None, "name": "add", "arguments": {}}])
    assert bad_row(template("qwen2_5"), chat_row(HI, call)) == "template"


def test_render_reasoning_that_the_template_keeps_carries_loss():
    form, end = template("qwen3"), "Ciao\n\n  now.<|im_end|>"
    thought = message("assistant", "<think>\nhm, hm\n</think>\n\nFour.")
    apart = message("assistant", "Four.", reasoning_content="hm, hm")
    older = message("assistant", "Four.", reasoning="hm, hm")
    for turn in thought, apart, older:
        assert texts_with_loss(form, HI, turn) == ["<think>\nhm, hm\n</think>\n\nFour.<|im_end|>"]
        assert texts_with_loss(form, HI, turn, BYE, CIAO) == [end]
        assert "hm" not in form.render(chat_row(HI, turn, BYE, CIAO)).text
    assert texts_with_loss(form, HI, HELLO) == ["Hello  there!<|im_end|>"]
    calls = CALL.extra["tool_calls"]
    call = message("assistant", tool_calls=calls, reasoning_content="use it")
    steps = texts_with_loss(form, HI, call, RESULT, apart)
    assert steps[0].startswith("<think>\nuse it\n</think>\n\n<tool_call>")
    assert steps[1].startswith("<think>\nhm, hm\n</think>")
    # What the generation prompt already contains carries no loss.
    off = template("qwen3", enable_thinking=False)
    assert texts_with_loss(off, HI, HELLO, BYE, CIAO) == ["Hello  there!<|im_end|>", end]


def test_render_deepseek_r1_drops_reasoning_and_masks_the_opened_block():
    form, stop = template("deepseek_r1"), R1[1]
    tag = message("assistant", "<think>\nlong\n</think><b>4</b>")
    assert texts_with_loss(form, HI, tag, BYE, CIAO) == ["Ciao\n\n  now." + stop]
    call = [{"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    calls = message("assistant", tool_calls=call)
    first, *others = texts_with_loss(form, HI, calls, RESULT, RESULT, HELLO, BYE, CIAO)
    assert first.startswith("<｜tool▁calls▁begin｜>")  # noqa: RUF001
    assert first.endswith(stop)
    assert others == ["Hello  there!" + stop, "Ciao\n\n  now." + stop]


def test_render_trimmed_contents_carry_loss_without_white_space():
    spaced = message("assistant", "\n\n Hello \n")
    assert texts_with_loss(template("gemma"), HI, spaced, BYE, spaced) == ["Hello<end_of_turn>"] * 2
    assert texts_with_loss(template("phi3"), HI, message("assistant", "")) == ["<|end|>"]


def test_render_generation_blocks_equal_transformers_assistant_mask():
    form = template("generation")
    turns = (SYSTEM, HI, HELLO, BYE, CIAO)
    messages = [{"role": turn.role, "content": turn.parts[0].value} for turn in turns]
    options = {"return_assistant_tokens_mask": True, "return_dict": True}
    expected = form.tokenizer.apply_chat_template(messages, **options)
    ids, loss, _ = form.tokenize(form.render(chat_row(*turns)))
    assert ids == expected["input_ids"]
    assert loss == [bool(flag) for flag in expected["assistant_masks"]]


def test_render_stop_token_after_the_loop_carries_loss_and_the_next_turn_does_not():
    after = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}{% endfor %}</s>"  # without a generation prompt
    form = ChatTemplate(tokenizer("zephyr", chat_template=after))
    assert texts_with_loss(form, HI, HELLO, BYE, CIAO) == ["Hello  there!", "Ciao\n\n  now.</s>"]
    assert not form.render(chat_row(HI, HELLO, BYE, CIAO)).stops
    assert form.render(chat_row(HI, HELLO)).stops


@pytest.mark.parametrize("name", [*STOPS, "mistral", "qwen3"])
def test_render_message_loss_overrides_the_role(name):
    form = template(name)
    stop = STOPS.get(name, "" if name == "mistral" else "<|im_end|>")
    stop = "" if name in ("deepseek_r1", "by_index") else stop  # no stop token after a question
    question = message("user", " Bye?", loss=True)
    silent = message("assistant", "Hello  there!", loss=False)
    last = texts_with_loss(form, HI, HELLO)[-1].replace("Hello  there!", "Ciao\n\n  now.")
    assert texts_with_loss(form, HI, silent, BYE, CIAO) == [last]
    assert texts_with_loss(form, HI, silent, question, CIAO) == ["Bye?" + stop, last]
    if name not in ("gemma", "by_index"):
        rules = message("system", "Be brief.", loss=True)
        text = texts_with_loss(form, rules, HI, silent, BYE, CIAO)[0]
        assert text.removeprefix("Be brief.") in ("", stop, "<|im_end|>")
    assert bad_row(form, chat_row(HI, silent)) == "nothing_to_learn"


@pytest.mark.parametrize("options", [{}, {"add_vision_id": True}])
def test_render_media_are_located_at_the_templates_placeholders(options):
    form = ChatTemplate(Processor("qwen_vl"), **options)
    asks = message("user", IMAGE, "and", VIDEO, IMAGE, "?")
    shows = message("assistant", "Like ", IMAGE, " this.")
    row = chat_row(asks, HELLO, message("user", VIDEO), shows)
    rendered = form.render(row)
    kinds = [place.kind for place in rendered.media]
    assert [place.index for place in rendered.media] == [*range(len(kinds))]
    assert kinds == [part.kind for part in row.media()]
    ids, _, media = form.tokenize(rendered)
    for place, token in zip(rendered.media, media, strict=True):
        inner, outer = (rendered.text[slice(*span)] for span in (place.span, place.outer))
        assert inner == f"<|{place.kind}_pad|>"
        assert outer == f"<|vision_start|>{inner}<|vision_end|>"
        assert form.tokenizer.decode(ids[slice(*token.span)]) == inner
        assert form.tokenizer.decode(ids[slice(*token.outer)]) == outer
    label = "Like Picture 3: " if options else "Like "
    expected = ["Hello  there!<|im_end|>", label, " this.<|im_end|>"]
    assert texts_with_loss(form, *row.messages) == expected


def test_render_placeholder_in_row_text_is_a_bad_row():
    form = ChatTemplate(Processor("qwen_vl"))
    literal = message("assistant", "Write <|image_pad|> there.")
    shown = chat_row(message("user", IMAGE), literal)
    for row in (shown, chat_row(HI, literal), Row(text="a <|video_pad|> b")):
        assert bad_row(form, row) == "placeholder_in_text"
    named = "{% for p in m.content %}{{ p.text or '<|image_pad|>' }}{% endfor %}"
    named = "{% for m in messages %}{{ m.name }}" + named + "{% endfor %}"
    other = ChatTemplate(tokenizer("qwen_vl", chat_template=named))
    assert len(other.render(chat_row(message("user", IMAGE, name="Eve"), HELLO)).media) == 1
    row = chat_row(message("user", IMAGE, name="<|image_pad|>"), HELLO)
    assert bad_row(other, row) == "placeholder_in_text"
    tags = message("user", "What is <image>?", IMAGE), message("assistant", "<video> is HTML")
    assert texts_with_loss(form, *tags) == ["<video> is HTML<|im_end|>"]


def test_render_llava_typed_texts_with_images_moved_to_the_front():
    form = ChatTemplate(Processor("llava"))
    assert form.renderer.typed_content
    shown = message("user", "this:", IMAGE)
    answers = ["Hello  there!", "Ciao\n\n  now."]
    assert texts_with_loss(form, SYSTEM, HI, HELLO, shown, CIAO) == answers
    rendered = form.render(chat_row(shown, CIAO))
    assert rendered.text == "USER: <image>\nthis: ASSISTANT: Ciao\n\n  now. "
    assert not rendered.stops, "the format has no stop token"


def test_render_media_without_placeholder_is_a_bad_row():
    shown = chat_row(message("user", Part("audio", "a.wav"), IMAGE), HELLO)
    for form in template("qwen2_5"), template("llama3"), ChatTemplate(Processor("qwen_vl")):
        assert bad_row(form, shown) == "unsupported_media"
    # Three special tokens: the placeholder is ambiguous.
    row = chat_row(message("user", IMAGE), HELLO)
    assert bad_row(template("qwen_vl"), row) == "unsupported_media"
    named = ChatTemplate(tokenizer("qwen_vl"), placeholders={"image": "<|image_pad|>"})
    assert len(named.render(chat_row(message("user", IMAGE, IMAGE), HELLO)).media) == 2


def test_render_row_content_left_out_by_the_template_is_a_bad_row():
    source = "{% for m in messages if m.role != 'system' %}{{ m.content }}</s>{% endfor %}"
    roles = ChatTemplate(tokenizer("zephyr", chat_template=source))
    two_calls = message("assistant", tool_calls=CALL.extra["tool_calls"] * 2)
    for form, row in (
        (template("phi3"), chat_row(HI, HELLO, tools=(TOOL,))),
        (template("phi3"), chat_row(HI, CALL, RESULT, HELLO)),
        (template("gemma"), chat_row(SYSTEM, HI, HELLO)),
        (template("gemma"), chat_row(HI, HELLO, HELLO)),
        (template("llama3"), chat_row(HI, two_calls)),
        (roles, chat_row(SYSTEM, HI, HELLO)),
    ):
        assert bad_row(form, row) == "template"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}{{ messages[1].content }}",  # no loop
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",  # no answers
        "{% for m in messages %}{{ m.content }",  # broken
        "{{ raise_exception('never') }}",
    ],
)
def test_chat_template_unusable_source_is_a_user_error(source):
    with user_error("chat template"):
        ChatTemplate(tokenizer("zephyr", chat_template=source))


def test_render_ambiguous_spans_are_bad_rows():
    # The header of answers is not the generation prompt; a text is shown twice; a text decides what is shown.
    loop = "{% for m in messages %}"
    other = (
        loop + "<{{ m.role }}>{{ m.content }}</s>{% endfor %}{{ 'A:' if add_generation_prompt }}"
    )
    twice = loop + "{{ m.content }}{{ m.content if m.role == 'user' }}</s>{% endfor %}"
    peeks = (
        loop + "{{ 'yes' if m.content.startswith('B') else 'no' }}{{ m.content }}</s>{% endfor %}"
    )
    drops = "{% for m in messages if m.content != 'x' %}{{ m.content }}</s>{% endfor %}"
    question = message("user", "Bye?", loss=True)
    for source, messages in (
        (other, (HI, HELLO)),
        (twice, (question, HELLO)),
        (peeks, (question, HELLO)),
        (drops, (HI, message("assistant", "x"))),
    ):
        form = ChatTemplate(tokenizer("zephyr", chat_template=source))
        assert bad_row(form, chat_row(*messages)) == "mask"
    with pytest.raises(BadRow, match="no characters"):
        template("qwen2_5").render(chat_row(message("user", "\ufdd0{0\ufdd1"), HELLO))


@settings(max_examples=60, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name, oracle", [("qwen2_5", chatml), ("phi3", phi), ("llama3", llama)])
def test_render_arbitrary_texts_have_the_loss_spans_of_the_format(name, oracle, data):
    text = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)
    turn = st.tuples(text, text, st.sampled_from([None, True, False]))
    messages = [message("system", data.draw(text))] if data.draw(st.booleans()) else []
    for question, answer, loss in data.draw(st.lists(turn, min_size=1, max_size=4)):
        messages += [message("user", question), message("assistant", answer, loss=loss)]
    flags = [message.role == "assistant" and message.loss is not False for message in messages]
    if not any(flags):
        return
    rendered = template(name).render(chat_row(*messages))
    pieces = oracle(
        [(m.role, m.parts[0].value, flag) for m, flag in zip(messages, flags, strict=True)]
    )
    assert rendered.text == "".join(piece for piece, _ in pieces)
    mask = [False] * len(rendered.text)
    for start, end in rendered.loss:
        mask[start:end] = [True] * (end - start)
    assert mask == [flag for piece, flag in pieces for _ in piece]


@pytest.mark.parametrize("trim", [False, True])
def test_tokenize_white_space_in_an_answer_carries_loss_with_trimmed_offsets(trim):
    code = "def f(x):\n        if x:\n            return   x\n"
    form = ChatTemplate(tokenizer("phi3", trim=trim))
    assert learnt(form, HI, message("assistant", code)) == code + "<|end|>"


def test_tokenize_token_across_a_span_border_carries_loss_but_a_special_one_must_start_inside():
    form = template("phi3")
    text = "<|user|>\n\n hello<|end|>\n"
    ids = form.tokenizer(text).input_ids
    assert [form.tokenizer.decode([id]) for id in ids][:2] == ["<|user|>", "\n\n"]
    for start, first in (8, 1), (9, 1), (10, 2):
        _, loss, _ = form.tokenize(Rendered(text, ((start, text.index("\n", 11)),)))
        assert [i for i, has in enumerate(loss) if has] == list(range(first, len(ids) - 1))
    # As in Phi-3's tokenizer: special tokens include the white space after them.
    greedy = copy.deepcopy(form.tokenizer)
    tokens = [AddedToken(token, rstrip=True, special=True) for token in PHI]
    greedy.add_tokens(tokens, special_tokens=True)
    assert learnt(ChatTemplate(greedy), HI, message("assistant", "\n\n ok")) == "ok<|end|>"


def test_tokenize_text_row_carries_loss_everywhere_with_one_bos_and_eos():
    form = ChatTemplate(adds_bos("zephyr"))
    bos, eos = form.tokenizer.bos_token_id, form.tokenizer.eos_token_id
    for text in "hello", "<s>hello", "hello</s>", "<s>hello</s>":
        ids, loss, _ = form.tokenize(form.render(Row(text=text)))
        assert (ids[0], ids[-1], ids.count(bos), ids.count(eos)) == (bos, eos, 1, 1)
        assert all(loss[1:])
    other = template("qwen2_5")
    ids, loss, _ = other.tokenize(other.render(Row(text="hello")))
    assert other.tokenizer.decode(ids) == "hello<|endoftext|>"
    assert all(loss)
    for text in "", " \n":
        assert bad_row(form, Row(text=text)) == "nothing_to_learn"


def test_tokenize_conversation_has_the_bos_of_its_template_or_processor():
    cases = ("llama3", 0, 1), ("zephyr", 0, 0), ("llama3", 1, 1), ("zephyr", 1, 1)
    for name, process, count in cases:
        made = adds_bos(name)
        form = ChatTemplate(SimpleNamespace(tokenizer=made) if process else made)
        ids, _, _ = form.tokenize(form.render(chat_row(HI, HELLO)))
        assert ids.count(made.bos_token_id) == count
        assert learnt(form, HI, HELLO).startswith("Hello  there!")
    form = ChatTemplate(Processor("llava", adds_bos("llava")))
    ids, _, media = form.tokenize(form.render(chat_row(message("user", IMAGE), HELLO)))
    tokens = form.tokenizer.convert_ids_to_tokens([ids[0], *ids[slice(*media[0].span)]])
    assert tokens == ["<s>", "<image>"]


def test_truncate_never_splits_a_media_span():
    ids, loss = list(range(12)), [False] * 2 + [True] * 10
    media = [(3, 6), (6, 8), (9, 11)]
    sizes = {}
    for limit in range(4, 14):
        kept, mask, whole = truncate(ids, loss, media, limit)
        sizes[limit] = len(kept)
        assert kept == ids[: len(kept)]
        assert len(kept) == len(mask) <= limit
        assert all(end <= len(kept) or start >= len(kept) for start, end in media)
        assert whole == sum(end <= len(kept) for _, end in media)
    assert [*sizes.values()] == [3, 3, 6, 6, 8, 9, 9, 11, 12, 12]
    for mask, limit in (loss, 2), ([True] + [False] * 11, 12):  # nothing predicts the first token
        with pytest.raises(BadRow, match="nothing_to_learn"):
            truncate(ids, mask, media, limit)


def test_chat_template_pickles_and_requires_a_fast_tokenizer_and_a_template():
    form = pickle.loads(pickle.dumps(template("qwen3")))
    assert texts_with_loss(form, HI, HELLO) == texts_with_loss(template("qwen3"), HI, HELLO)
    with user_error("fast tokenizer"):
        ChatTemplate(SimpleNamespace(is_fast=False))
    bare = copy.deepcopy(tokenizer("zephyr"))
    bare.chat_template = None
    ChatTemplate(bare).render(Row(text="hello"))
    with user_error("no chat template"):
        ChatTemplate(bare).render(chat_row(HI, HELLO))


def test_load_processor_of_a_text_folder_that_names_a_vision_processor_returns_its_tokenizer(
    tmp_path,
):
    tokenizer("qwen_vl").save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    settings = {**read_json(file), "processor_class": "Qwen3VLProcessor"}
    write_json(file, settings)
    assert load_processor(tmp_path).encode("two words") == tokenizer("qwen_vl").encode("two words")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl", "vision_config": {}}')
    with user_error("has no processor"):  # of a VLM, the processor is missing
        load_processor(tmp_path)
