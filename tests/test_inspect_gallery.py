"""`mvp data inspect --html`: a page of rows with their media, and what is wrong with the others."""

import base64
import io
import json
import re
import shutil
from html import unescape

import pytest
from conftest import ROOT, mvp
from PIL import Image

MEDIA = ROOT / "mvp_engine" / "tools" / "doctor_media"
EVIL = "<script>alert(1)</script>"


def message(role, *parts):
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": part[0], part[0]: part[1]}
        for part in parts
    ]
    return {"role": role, "content": content}


@pytest.fixture
def rows(workspace):
    """Rows with an image, a video and audio, a pair, a text with markup, and a row whose image is missing."""
    for file in MEDIA.iterdir():
        shutil.copy(file, workspace)
    Image.new("RGB", (2000, 1000), "green").save("large.png")
    answer = message("assistant", EVIL)
    prompt = [message("user", ("image", "red.png"), "Which colour?")]
    data = [
        {"messages": [message("user", ("image", "large.png"), EVIL), answer]},
        {"messages": [message("user", ("video", "red_to_blue.mp4"), "?"), answer]},
        {"messages": [message("user", ("audio", "tone.flac"), "?"), answer]},
        {"messages": [message("user", ("image", "missing.png"), "?"), answer]},
        {
            "prompt": prompt,
            "chosen": [message("assistant", "Red.")],
            "rejected": [message("assistant", "Blue.")],
        },
    ]
    (workspace / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    return workspace


def cards(page):
    return re.findall(r'<div class="?card.*?</div></div>', page, re.S)


def images(html):
    found = re.findall(r"data:image/\w+;base64,([^\"]+)", html)
    return [Image.open(io.BytesIO(base64.b64decode(text))).size for text in found]


def test_gallery_without_a_model_shows_media_small_text_with_loss_and_bad_rows(rows, capsys):
    assert mvp("data inspect rows.jsonl --html out/page.html") == 0
    page = (rows / "out" / "page.html").read_text()
    assert "out/page.html (5 rows)" in capsys.readouterr().out
    large, video, audio, missing, chosen, rejected = cards(page)
    assert images(large) == [(960, 480)]
    assert len(images(video)) > 1
    assert audio.count("<audio controls") == 1
    assert "missing_file" in missing
    assert images(chosen) == images(rejected) == images(chosen)[:1]
    for card, answer in ((chosen, "Red."), (rejected, "Blue.")):
        assert f"<span class=loss>{answer}</span>" in card
        assert "<span class=loss>Which colour?" not in card
    assert page.count("rows.jsonl:4") == 2  # its card, and the table of bad rows
    assert "<script" not in page
    assert unescape(page).count(EVIL) == 4
    assert "http://" not in page.replace("http-equiv", "")
    assert len(page) < 200_000


def test_gallery_of_a_single_row_and_json_next_to_it(rows, capsys):
    assert mvp("data inspect rows.jsonl --html page.html --row rows.jsonl:2 --json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert [row["row"] for row in facts["rows"]] == [1]
    assert len(cards((rows / "page.html").read_text())) == 1


@pytest.mark.slow
def test_gallery_with_a_model_has_its_tokens_and_the_packing(vlm_folder, rows):
    """The text is what the model sees: with the marks of the chat template, and media as their tokens."""
    lines = (rows / "rows.jsonl").read_text().splitlines()
    (rows / "rows.jsonl").write_text("\n".join([lines[0], lines[4]]) + "\n")
    assert mvp("data inspect rows.jsonl --model model --html page.html --tokens 4096") == 0
    page = (rows / "page.html").read_text()
    large, chosen, _ = cards(page)
    assert "tokens of an epoch" in page
    assert "packs of 4,096 tokens" in page
    assert re.search(r"image 2000x1000 = \d+ tokens", large)
    assert re.search(r"\d+ tokens, \d+ with loss", chosen)
    assert re.search(r"<span class=loss>Red\.", chosen)
