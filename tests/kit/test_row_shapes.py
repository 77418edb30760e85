"""Row shapes of other libraries: each is read right, or refused with a reason; none is silently misread.

`row_shapes.jsonl` has one row (or file) of each shape. The table below has what the model sees of it.
"""

import base64
import json
from pathlib import Path

import pytest
from templates.tiny import tokenizer
from tiny_vlm import qwen3_vl, write, write_image

from mvp_engine.kit.data.encode.row_encoder import RowEncoder
from mvp_engine.kit.data.read.row_types import BadRow, RowFormat
from mvp_engine.kit.data.read.sources import open_source
from mvp_engine.tools.inspect_rows import encoded_row

SHAPES = {}
for line in (Path(__file__).parent / "row_shapes.jsonl").read_text().splitlines():
    shape = json.loads(line)
    SHAPES[shape["shape"]] = shape

CHAT = "user: q | assistant: «a»"
IMAGE = "user: [image]q | assistant: «a»"
PAIR = [CHAT, "user: q | assistant: «b»"]
HISTORY = "system: s | user: h | assistant: «r» | user: {} | assistant: «a»"
CALL = '«<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>»'
TOOLS = (
    '# Tools\n<tools>\n{"type": "function", "function": {"name": "f", "parameters": {}}}\n</tools>'
)
CALLED = f"user: q | assistant: {CALL} | tool: 1 | assistant: «a»"
RIGHT = {
    "trl_vision_blocks": IMAGE,
    "trl_vision_pc_notag": IMAGE,
    "trl_vision_msg_notag": IMAGE,
    "trl_pref_conv": PAIR,
    "trl_pref_implicit": PAIR,
    "trl_kto": CHAT,  # only with label: true
    "trl_prompt_only": "user: q | assistant: ",  # only with prompt_only: the generation prompt, no loss
    "lf_sharegpt_tools": f"system: s | {CALLED}",
    "lf_alpaca_history": HISTORY.format("q\ni"),
    "lf_mllm": IMAGE,
    "lf_ranking": PAIR,
    "lf_kto": CHAT,
    "lf_v1": IMAGE,
    "swift_query_response": HISTORY.format("q"),
    "swift_images_notag": IMAGE,
    "swift_rejected_response": PAIR,
    "swift_loss_flag": "user: q | assistant: a | user: q | assistant: «b»",
    "axolotl_segments": "q«a»",
    "openai_tool_calls": f"system: {TOOLS} | {CALLED}",
    "openai_b64": IMAGE,
    "anthropic_image": IMAGE,
    "question_answer": CHAT,
    "vqa_question_answer_image": IMAGE,
    "llava": IMAGE.replace("]q", "]\nq"),
    "caption": "user: [image] | assistant: «c»",
    "image_text": "user: [image] | assistant: «c»",
    "reasoning_content": "user: q | assistant: «<think>\nthink\n</think>\n\na»",
    "developer_role": f"system: s | {CHAT}",
    "fine_vision": IMAGE,
    "csv": CHAT,
    "txt": "s«ome text<|endoftext|>»",  # nothing predicts the first token
}
REFUSED = {
    "swift_objects": "<ref-object>, to be filled from the column 'objects'",
    "pretokenised": "token ids, which may be of another tokenizer",
}
# Rows that would be learnt wrongly if the template, the label or the columns were not looked at.
NEVER = {
    "trl_kto": ({"label": False}, "the column 'label' says that the answer is bad"),
    "lf_kto": ({"label": 0}, "the column 'label' says that the answer is bad"),
    "csv_kto": ({"prompt": "q", "completion": "a", "label": "False"}, "the column 'label'"),
    "csv_kto_number": ({"prompt": "q", "completion": "a", "label": "0"}, "the column 'label'"),
    "lf_mllm": ({"images": None, "image_path": "img/a.png"}, "nothing reads: image_path"),
    "llava": (
        {"image": None, "picture": "img/a.png"},
        r"id, picture. Rename the column with `columns: \{COLUMN: images\}`",
    ),
    # The image twice.
    "openai_b64": (
        {"images": ["img/a.png"]},
        "1 in the image column, but 0 place",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("shapes")
    (made / "img").mkdir()
    write_image(made / "img" / "a.png", 16, 16)
    return made


@pytest.fixture(scope="module")
def encoders():
    """A vision-language model, and a text model whose template writes tools and reasoning."""
    models = {"vlm": qwen3_vl(), "text": tokenizer("qwen3")}
    return {name: RowEncoder(model, max_tokens=4000, pairs=True) for name, model in models.items()}


def seen(encoders, name, folder, row, **options):
    """What the model sees: roles and texts, those with loss between « and ». Raises BadRow."""
    is_text = name in ("lf_sharegpt_tools", "openai_tool_calls", "reasoning_content")
    encoder = encoders["text" if is_text else "vlm"]
    if isinstance(row, str):
        file = folder / f"rows.{name}"
        file.write_text(row)
    else:
        picture = base64.b64encode((folder / "img" / "a.png").read_bytes()).decode()
        file = write(folder / f"{name}.jsonl", [json.dumps(row).replace("BASE64", picture)])
    source = open_source(file)
    facts = encoded_row(
        encoder, lambda: source[0], source.where(0), source.root, RowFormat(**options)
    )
    if facts["bad"]:
        raise BadRow(**facts["bad"])
    return [_shown(sequence) for sequence in facts["sequences"]]


def _shown(sequence):
    text = ""
    for segment in sequence["text"]:
        if "media" in segment:
            text += f"[{sequence['media'][segment['media']]['kind']}]"
        else:
            text += f"«{segment['text']}»" if segment["learnt"] else segment["text"]
    default_system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    text = (
        text.replace(default_system, "")
        .replace("<|im_end|>»\n", "» | ")
        .replace("<|im_end|>\n", " | ")
    )
    text = text.replace("<think>\n\n</think>\n\n", "").removesuffix(" | ")
    text = text.replace("user\n<tool_response>\n1\n</tool_response>", "tool\n1")
    for role in ("system", "user", "assistant", "tool"):
        text = text.replace(f"<|im_start|>{role}\n", f"{role}: ")
    return text


@pytest.mark.parametrize("name", SHAPES)
def test_row_shape_is_read_right_or_refused_with_the_reason(name, encoders, folder):
    row = SHAPES[name].get("row") or SHAPES[name]["file"]
    if name in REFUSED:
        with pytest.raises(BadRow, match=REFUSED[name]):
            seen(encoders, name, folder, row)
        return
    expected = RIGHT[name]
    sequences = seen(encoders, name, folder, row, prompt_only=name == "trl_prompt_only")
    assert sequences == ([expected] if isinstance(expected, str) else expected)


def test_row_shapes_table_has_at_least_28_of_32_right():
    assert SHAPES.keys() == RIGHT.keys() | REFUSED.keys()
    assert len(SHAPES) == 33
    assert len(RIGHT) >= 28


@pytest.mark.parametrize("name", NEVER)
def test_row_shape_that_would_be_learnt_wrongly_is_refused(name, encoders, folder):
    change, words = NEVER[name]
    row = {**SHAPES.get(name, {}).get("row", {}), **change}
    with pytest.raises(BadRow, match=words):
        seen(encoders, name, folder, row)


def test_row_shape_reasoning_without_a_template_for_it_is_refused(encoders, folder):
    row = SHAPES["reasoning_content"]["row"]
    with pytest.raises(BadRow, match="leaves out reasoning_content of message 1"):
        seen(encoders, "reasoning", folder, row)
    earlier = {
        "messages": [
            *row["messages"],
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "b"},
        ]
    }
    with pytest.raises(BadRow, match="leaves out reasoning_content of message 1"):
        seen(encoders, "reasoning", folder, earlier)
    # The earlier answer, as Qwen3's template writes it.
    without_loss = CHAT.replace("«", "").replace("»", "")
    assert seen(encoders, "reasoning_content", folder, earlier) == [f"{without_loss} | {PAIR[1]}"]


def test_row_shape_prompt_only_without_the_setting_names_the_setting(encoders, folder):
    with pytest.raises(BadRow, match=r"data.prompt_only=true"):
        seen(encoders, "trl_prompt_only", folder, SHAPES["trl_prompt_only"]["row"])
