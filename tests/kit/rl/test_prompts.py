"""Prompts of rollouts: rows of any format without their answers, raw columns kept, in an order that resumes exactly."""

from __future__ import annotations

import io
from typing import Any

import pytest
from conftest import mvp, user_error
from rich.console import Console
from templates.tiny import tokenizer
from tiny_vlm import chat, made, model_config, qwen3_vl, saved_model, with_images, write

from mvp_engine.data.batch import IGNORE
from mvp_engine.kit import MLLMDataKit
from mvp_engine.kit.data.read.row_types import BadRow, RowFormat
from mvp_engine.kit.data.read.rows import read_row
from mvp_engine.kit.rl.prompts import Prompt, prompt_loader, prompt_settings
from mvp_engine.tools.inspect import inspect_kit
from mvp_engine.tools.inspect_page import show

USER = [("user", "2+2?")]
ROWS: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": "2+2?", "solution": [4], "text": "for the reward"},
    "question_answer": {"question": "2+2?", "answer": {"value": 4}},
    "messages": {**chat("2+2?", "4"), "label": 0},
    "prompt_completion": {"prompt": [{"role": "user", "content": "2+2?"}], "completion": "4"},
    "preference": {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
    "alpaca": {"instruction": "2+2?", "output": 4},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
    },
}


def kit_of(folder, rows, processor=None, config=None, **settings):
    kit = made(
        write(folder / "rows.jsonl", rows), processor or tokenizer("qwen2_5"), config, **settings
    )
    return MLLMDataKit(prompt_settings(kit.settings, 32), kit.processor, model_config=config)


@pytest.mark.parametrize("name", ROWS)
def test_read_row_prompt_only_always_leaves_the_answer_out(name):
    row = read_row(ROWS[name], RowFormat(prompt_only="always"))
    assert [(message.role, message.text) for message in row.messages] == USER
    assert row.prompt_only
    assert not row.rejected
    assert row.format == name


def test_read_row_prompt_only_always_keeps_earlier_answers():
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    raw = {"messages": [{"role": role, "content": text, "loss": True} for role, text in turns]}
    row = read_row(raw, RowFormat(prompt_only="always"))
    assert [(message.role, message.text, message.loss) for message in row.messages] == [
        ("user", "a", False),
        ("assistant", "b", False),
        ("user", "c", False),
    ]
    with pytest.raises(BadRow, match="no_prompt"):
        read_row({"messages": raw["messages"][3:]}, RowFormat(prompt_only="always"))


def test_prompt_loader_prompt_has_the_raw_row_and_ends_with_the_generation_prompt(
    tmp_path,
):
    rows = [{"question": f"{i}+1?", "answer": i + 1, "level": {"hard": i % 2}} for i in range(5)]
    kit = kit_of(tmp_path, rows)
    prompts: list[Prompt] = [
        one for step in prompt_loader(kit, prompts=2, shuffle=False) for one in step
    ]
    assert [prompt.row for prompt in prompts] == rows
    assert [prompt.where for prompt in prompts] == [f"rows.jsonl:{i}" for i in range(1, 6)]
    for i, prompt in enumerate(prompts):
        text = kit.processor.decode(prompt.batch.input_ids)
        assert text.endswith(f"<|im_start|>user\n{i}+1?<|im_end|>\n<|im_start|>assistant\n")
        assert (prompt.batch.labels == IGNORE).all()
        assert prompt.text_ids == prompt.batch.input_ids.tolist()


def test_prompt_loader_plain_text_without_chat_template_has_no_eos(tmp_path):
    words = tokenizer("qwen2_5")
    kit = kit_of(tmp_path, [{"text": "12 + 3 ="}], words)
    ((prompt,),) = prompt_loader(kit, prompts=4)
    assert prompt.batch.input_ids.tolist() == words("12 + 3 =").input_ids


@pytest.mark.parametrize("num_workers", [0, 1])
def test_prompt_loader_resumed_in_any_step_gives_the_same_prompts(tmp_path, num_workers):
    sources = [
        {"path": str(write(tmp_path / f"{n}.jsonl", [{"prompt": f"{n}{i}"} for i in range(n)]))}
        for n in (3, 4)
    ]
    sources[0] |= {"repeats": 2}  # type: ignore[dict-item]
    kit = kit_of(tmp_path, [], sources=sources)
    whole = prompt_loader(kit, prompts=4, seed=1)
    steps = []
    states = []
    for epoch in range(2):
        whole.set_epoch(epoch)
        for step in whole:
            steps.append([(prompt.key, prompt.where) for prompt in step])
            states.append(whole.state_dict())
    assert [len(step) for step in steps] == [4, 4, 2] * 2
    keys = [key for step in steps for key, _ in step]
    assert sorted(keys) == list(range(20))  # a repeated row is another prompt
    assert steps[0] != steps[3]
    for i, state in enumerate(states[:5]):
        resumed = prompt_loader(kit, prompts=4, seed=1, num_workers=num_workers if i == 3 else 0)
        resumed.load_state_dict(state)
        left = [[(prompt.key, prompt.where) for prompt in step] for step in resumed]
        assert left == steps[i + 1 : 3 if state["epoch"] == 0 else 6]
    other = prompt_loader(kit, prompts=4, seed=2)
    with user_error("the prompts are not those"):
        other.load_state_dict(states[0])


def test_prompt_loader_images_are_expanded_in_the_batch_and_files_for_servers(
    tmp_path,
):
    rows = with_images(tmp_path, 3)
    processor = qwen3_vl()
    kit = kit_of(tmp_path, rows, processor, model_config())
    (prompts,) = prompt_loader(kit, prompts=8, shuffle=False)
    pad = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    for i, prompt in enumerate(prompts):
        names = [str(tmp_path / f"{i}_{j}.png") for j in range(i % 3)]
        assert prompt.media == [{"type": "image", "path": name} for name in names]
        assert prompt.text_ids.count(pad) == len(names)
        assert len(prompt.batch.media["pixel_values"].row_counts) == len(names)
        expanded = prompt.batch.input_ids.tolist()
        assert (expanded.count(pad) > len(names)) == bool(names)
        assert [t for t in expanded if t != pad] == [t for t in prompt.text_ids if t != pad]


def test_prompt_loader_media_that_break_are_left_out_of_their_step(tmp_path):
    rows = with_images(tmp_path, 3)
    kit = kit_of(tmp_path, rows, qwen3_vl(), model_config(), max_bad_rows=0.5)
    loader = prompt_loader(kit, prompts=2, shuffle=False, folder=tmp_path)
    (tmp_path / "1_0.png").write_bytes(b"broken")
    assert [[prompt.sample for prompt in step] for step in loader] == [[0], [2]]
    assert "rows.jsonl:2" in (tmp_path / "bad_rows.jsonl").read_text()
    assert loader.state_dict()["samples"] == 3


def test_prompt_loader_over_long_prompts_leave_room_for_the_completion(tmp_path):
    rows = [{"prompt": "a " * size} for size in (20, 300)]
    kit = kit_of(tmp_path, rows)
    (prompts,) = prompt_loader(kit, prompts=4, folder=tmp_path)
    assert [prompt.sample for prompt in prompts] == [0]
    assert kit.row_encoder.max_tokens == 256 - 32
    assert "overlong" in (tmp_path / "overlong_rows.jsonl").read_text()
    with user_error(r"raise data.pack_tokens"):
        prompt_settings(kit.settings, 256)


def test_prompt_loader_stream_is_refused(tmp_path):
    file = write(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    kit = kit_of(tmp_path, [], sources=[{"path": str(file), "stream": True}])
    with user_error("remove stream: true"):
        prompt_loader(kit, prompts=1)


def test_inspect_prompts_shows_them_with_the_columns_of_the_reward(tmp_path):
    kit = kit_of(tmp_path, [{"question": f"{i}?", "answer": i, "label": 0} for i in range(3)])
    facts = inspect_kit(kit, "train", 1, limit=1)
    assert facts["sample"]["reward_columns"] == {"answer": 3, "label": 3}
    assert facts["sample"]["unused_columns"] == {}
    assert facts["plan"] is None
    (sequence,) = facts["rows"][0]["sequences"]
    assert (sequence["learnt"], len(sequence["text"])) == (0, 1)
    assert sequence["text"][0]["text"].endswith("0?<|im_end|>\n<|im_start|>assistant\n")
    out = Console(record=True, width=120, file=io.StringIO())
    show(facts, out)
    text = out.export_text()
    assert "answer 3, label 3: columns that only the reward reads" in text
    assert "rollouts are packed when they are generated" in text


def test_rows_without_a_column_that_the_reward_reads_are_refused_at_the_start(tmp_path, capsys):
    write(tmp_path / "rows.jsonl", [{"prompt": "1 + 1?", "solution": "2"}] * 8)
    words = f"grpo --model {saved_model(tmp_path)} --data {tmp_path}/rows.jsonl output_dir={tmp_path}/out"
    assert mvp(words) == 2
    error = capsys.readouterr().err
    assert "data.sources.rows: the reward reads the column answer" in error
    assert "prompt, solution" in error
