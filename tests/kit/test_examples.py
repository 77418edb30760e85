"""Examples for the report: answers with the prompts and media of their rows."""

import io

import numpy as np
from PIL import Image
from tiny_vlm import chat, made, model_config, qwen3_vl, write, write_image

from mvp_engine.kit import Answer, examples_of
from mvp_engine.kit.generation import with_verdicts


def test_examples_of_rows_have_prompt_and_media_and_no_verdict_on_continuations(
    tmp_path,
):
    write_image(tmp_path / "wide.png", 1200, 20)
    frames = [f"{i}.png" for i in range(6)]
    for name in frames:
        write_image(tmp_path / name, 16, 16)
    turns = [
        {"role": "system", "content": "Be short."},
        *chat("One?", "1")["messages"],
        *chat("Two?", "2")["messages"],
    ]
    rows = [
        {"image": "wide.png", "text": "a line"},
        {"messages": turns},
        {"text": "once upon a time"},
    ]
    rows += [{"video": frames, "text": "a video"}, {"image": "gone.png", "text": "a line"}]
    kit = made(write(tmp_path / "rows.jsonl", rows), qwen3_vl(), model_config(), max_bad_rows=1.0)
    said = ["right", "in other words", "on", "right", "wrong"]
    answers = [Answer(0, i, "right", words, "asked") for i, words in enumerate(said)]
    answers = with_verdicts(answers, [True, True, None, None, False])
    answers[2] = Answer(0, 2, "time", "day", "once upon a", is_continuation=True)
    caption, talk, text, video, gone = examples_of(kit, "train", answers)
    assert (caption.question, caption.right) == ("", True)
    small = Image.open(io.BytesIO(caption.media()[0]))
    assert (small.format, small.width, np.array(small).ndim) == ("JPEG", 960, 3)
    assert talk.question == "system: Be short.\nuser: One?\nassistant: 1\nuser: Two?"
    assert (talk.right, list(talk.media())) == (True, [])
    assert (text.question, text.right) == ("once upon a", None)
    assert [Image.open(io.BytesIO(frame)).format for frame in video.media()] == ["PNG"] * 3
    assert (video.right, gone.right) == (None, False)
    assert list(gone.media()) == [b""]
