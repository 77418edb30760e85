"""Tool calls and reasoning of rows, under chat templates that write them in different ways.

The published templates of model families are tried where `../shared/templates` is next to the checkout.
"""

import json
import re

import pytest
from conftest import ROOT
from kit.templates.tiny import template, tokenizer
from run_files import printed_json
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mvp_engine.kit.data.encode.template import ChatTemplate
from mvp_engine.kit.data.read.row_types import BadRow
from mvp_engine.kit.data.read.rows import read_row

PUBLISHED = ROOT.parent / "shared" / "templates"
SPECIAL = re.compile(
    "<[|\uff5c][^<>|\uff5c ]+[|\uff5c]>|<(?:s|/s|bos|eos|image|(?:end|start)_of_[a-z]+)>|<[|][a-z_]+>|<[a-z_]+[|]>"
)

# Arguments written one by one, an empty reasoning block in every turn without reasoning, as Nemotron and GLM do.
BY_ARGUMENT = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' %}
        {%- set keeps = m.reasoning_content and (keep_all or loop.index0 > ns.last) %}
        {{- '<think>' + ('\n' + m.reasoning_content + '\n' if keeps else '') + '</think>' }}
    {%- endif %}
    {{- m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- '<call>' + call.function.name }}
        {%- for name, value in call.function.arguments | items %}{{ '\n' + name + ': ' + (value | tojson) }}{% endfor %}
        {{- '</call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}
"""
# The arguments as a text that the template extends, without a reader of JSON.
BY_TEXT = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{ '<call>' + call.function.name + CALL + '</call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "", "parameters": {"type": "object"}},
}


def form_of(source, **options):
    return ChatTemplate(tokenizer("qwen3", chat_template=source), **options)


def user(text="Hi"):
    return {"role": "user", "content": text}


def answer(text, reasoning=None, **more):
    return {"role": "assistant", "content": text, "reasoning_content": reasoning, **more}


def calls(arguments, reasoning=None, count=1):
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return answer("", reasoning, tool_calls=[call] * count)


RESULT = {"role": "tool", "content": "12 degrees", "tool_call_id": "c", "name": "weather"}


def learnt(form, *messages, **columns):
    rendered = form.render(read_row({"messages": list(messages), **columns}))
    return [rendered.text[start:end] for start, end in rendered.loss]


def tool_row(arguments):
    return [user(), calls(arguments), RESULT, answer("Cold.")]


# ---- Tool calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "llama3", "mistral", "deepseek_r1", "by argument", "+", "~"]
)
def test_tool_arguments_as_json_text_are_learnt_like_objects(name):
    sources = {
        "by argument": BY_ARGUMENT,
        "+": BY_TEXT.replace("CALL", "call.function.arguments"),
        "~": BY_TEXT.replace("+ CALL", "~ call.function.arguments ~").replace("~ +", "~"),
    }
    form = form_of(sources[name]) if name in sources else template(name)
    arguments = {"city": "Zürich", "days": [1, None], "it's": "o'clock"}
    from_text = learnt(form, *tool_row(json.dumps(arguments)))
    assert from_text == learnt(
        form, *tool_row(json.dumps(arguments, separators=(",", ":"), ensure_ascii=False))
    )
    assert from_text == learnt(form, *tool_row(arguments))
    in_json = json.dumps(arguments, ensure_ascii=False)
    expected = 'city: "Zürich"\ndays: [1, null]' if name == "by argument" else in_json
    assert expected in from_text[0]
    assert "Cold." in from_text[1]
    assert "{}" in learnt(form, *tool_row(""))[0] or name == "by argument"


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ("{'city': 'Bern'}", "bad_json"),
        ('{"city": ', "bad_json"),
        ('["Bern"]', "wrong_type"),
        ([1], "wrong_type"),
    ],
)
def test_tool_arguments_that_are_no_object_are_a_bad_row(arguments, reason):
    with pytest.raises(BadRow, match=r"messages\[1\].tool_calls\[0\].arguments") as bad:
        read_row({"messages": tool_row(arguments)})
    assert bad.value.reason == reason


def test_tool_calls_empty_list_is_a_turn_without_calls():
    """Arrow fills the turns without calls with an empty list; some templates ask for the key alone."""
    assert (
        "tool_calls"
        not in read_row({"messages": [user(), answer("Cold.", tool_calls=[])]}).messages[1].extra
    )


def test_template_that_writes_the_first_of_two_calls_is_a_bad_row():
    first = form_of(
        BY_TEXT.replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]").replace(
            "CALL", "'()'"
        )
    )
    with pytest.raises(BadRow, match="leaves out the tool call 'weather'"):
        learnt(first, user(), calls("", count=2), RESULT, answer("Cold."))


def test_tool_result_inside_of_the_turn_that_calls_carries_no_loss():
    """As Gemma 4's template writes it."""
    source = """\
{%- for m in messages %}{% if m.role != 'tool' %}
    {{- '' if loop.index0 and messages[loop.index0 - 1].role == 'tool' else '<|im_start|>' + m.role + '\n' }}
    {%- if m.tool_calls %}
        {{- '<call>' + m.tool_calls[0].function.name + '</call><|endoftext|>' }}
        {%- if not loop.last %}{{ 'result: ' + loop.nextitem.content + '\n' }}{% endif %}
    {%- else %}{{ m.content + '<|im_end|>\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
    form = form_of(source)
    (first, *_) = learnt(form, user(), calls(""), RESULT)
    assert first == "<call>weather</call><|endoftext|>"


# ---- Reasoning ------------------------------------------------------------------------------------------------------

FORMS = {
    "qwen3": lambda: template("qwen3"),
    "by argument": lambda: form_of(BY_ARGUMENT),
}


@pytest.mark.parametrize("name", FORMS)
def test_turn_without_its_reasoning_carries_no_loss_and_is_counted(name):
    form = FORMS[name]()
    inside = answer("<think>\nhm\n</think>\n\nOne.")
    for first in (answer("One.", "hm"), inside if name == "qwen3" else answer("hm One.", "hm")):
        row = read_row({"messages": [user(), first, user(), answer("Two.", "ah")]})
        rendered = form.render(row)
        (span,) = rendered.loss
        assert re.fullmatch(
            r"(<think>)?\n?ah\n</think>\s*Two.<\|im_end\|>", rendered.text[slice(*span)]
        )
        assert rendered.reasoning_left_out == form.reasoning_left_out(row) == 1
    plain = [user(), answer("One."), user(), answer("Two.")]
    assert form.reasoning_left_out(read_row({"messages": plain})) == 0
    assert learnt(form, *plain) == ["One.<|im_end|>", "Two.<|im_end|>"]
    with pytest.raises(BadRow, match="cut the row") as bad:
        learnt(form, user(), answer("One.", "hm"), user(), answer("Two.", loss=False))
    assert bad.value.reason == "nothing_to_learn"


def test_template_option_that_keeps_all_reasoning_learns_all_turns():
    form = form_of(BY_ARGUMENT, keep_all=True)
    turns = learnt(form, user(), answer("One.", "hm"), user(), answer("Two.", "ah"))
    assert turns == ["hm\n</think>One.<|im_end|>", "ah\n</think>Two.<|im_end|>"]


@pytest.mark.parametrize("name", FORMS)
def test_empty_reasoning_block_of_the_template_carries_no_loss(name):
    form = FORMS[name]()
    for nothing in (None, "", " "):
        assert learnt(form, user(), answer("One.", nothing)) == ["One.<|im_end|>"]
    assert "</think>" in form.render(read_row({"messages": [user(), answer("One.")]})).text
    # The row says that it is to be learnt.
    own = learnt(form, user(), answer("<think>\n\n</think>\n\nOne."))
    assert "</think>" in own[0]


def test_inspect_counts_turns_without_their_reasoning(tmp_path, capsys):
    from mvp_engine.cli import main

    tokenizer("qwen3").save_pretrained(tmp_path / "model")
    row = {"messages": [user(), answer("One.", "hm"), user(), answer("Two.", "ah")]}
    (tmp_path / "rows.jsonl").write_text(2 * f"{json.dumps(row)}\n")
    arguments = ["data", "inspect", f"{tmp_path}/rows.jsonl", "--model", f"{tmp_path}/model"]
    assert not main([*arguments, "--json"])
    assert printed_json(capsys)["sample"]["reasoning_left_out"] == 2
    assert not main(arguments)
    assert "2 turns without loss" in " ".join(capsys.readouterr().out.split())


# ---- Published templates --------------------------------------------------------------------------------------------


def published(name):
    source = (PUBLISHED / f"{name}.jinja").read_text()
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")
    made.add_tokens(sorted(pre_tokenizers.ByteLevel.alphabet()))
    made.add_special_tokens({"additional_special_tokens": sorted(set(SPECIAL.findall(source)))})
    made.chat_template = source
    return ChatTemplate(made)


NAMES = sorted(file.stem for file in PUBLISHED.glob("*.jinja"))
WRITES_CALLS = [name for name in NAMES if "tool_calls" in (PUBLISHED / f"{name}.jinja").read_text()]
# Its tool calls are text, and it has no place for the declarations of tools.
WITHOUT_TOOLS = ["deepseekv3"]
REASONS = "diffusion_gemma glm4moe gptoss lfm2_2_5 qwen3 qwen3_5_nothink"
REASONS += " nemotron_3_nano nemotron_3_super nemotron_3_ultra"
REASONS += " qwen3_5_think qwen3_6"


def test_published_templates_are_complete():
    if not NAMES:
        pytest.skip(f"no published templates in {PUBLISHED}")
    assert len(NAMES) == 28
    assert set(REASONS.split()) <= set(NAMES)
    assert len(WRITES_CALLS) == 17


@pytest.mark.parametrize("name", NAMES)
def test_published_template_learns_answers_without_an_empty_reasoning_block(name):
    turns = learnt(published(name), user("Q1"), answer("One."), user("Q2"), answer("Two."))
    assert [re.sub(r"<[^>]*>|final", "", turn).strip() for turn in turns] == ["One.", "Two."]
    assert not any("think" in turn for turn in turns)


@pytest.mark.parametrize("name", WRITES_CALLS)
def test_published_template_learns_tool_arguments_as_objects(name):
    columns = {} if name in WITHOUT_TOOLS else {"tools": [TOOL]}
    arguments = {"city": "Bern", "days": 2}
    form = published(name)
    from_text, *_, last = learnt(form, *tool_row(json.dumps(arguments)), **columns)
    assert from_text == learnt(form, *tool_row(arguments), **columns)[0]
    assert re.search(r"""weather.*?city\W[^"']*?["']?.*?Bern.*?days.*?2""", from_text, re.DOTALL)
    assert '\\"' not in from_text
    assert "degrees" not in from_text
    assert "Cold." in last


@pytest.mark.parametrize("name", [name for name in REASONS.split() if name in NAMES])
def test_published_template_learns_reasoning_of_the_last_answer_and_no_turn_that_lost_it(
    name,
):
    form = published(name)
    messages = [user("Q1"), answer("One.", "hm"), user("Q2"), answer("Two.", "ah")]
    assert form.reasoning_left_out(read_row({"messages": messages})) == 1
    (turn,) = learnt(form, *messages)
    assert "ah" in turn
    assert "Two." in turn
    steps = [user("Q1"), calls({"city": "Bern"}, "hm"), RESULT, answer("One.", "ah")]
    *first, last = learnt(form, *steps, tools=[TOOL])
    assert "ah" in last
    if name == "gptoss":  # writes the reasoning of a call only until the final answer
        assert not first
    else:
        assert "hm" in first[0]
