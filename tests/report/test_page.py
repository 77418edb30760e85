"""The report page of a run: one file that loads nothing from elsewhere and escapes everything from data."""

from __future__ import annotations

import base64
import html.parser
import json

from mvp_engine.report import Example, write_report
from mvp_engine.runs import Run

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)
EVIL = "<script>alert(1)</script>\"'&<img src=http://evil>"


class Reader(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


def written(folder, examples, shown=24):
    records = [
        {"step": s, "split": split, "loss": 3.0 / s, "accuracy": s / 9}
        for s in (1, 2, 8)
        for split in ("train", "eval")
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_report(
        folder / "report.html",
        Run(folder),
        title=EVIL,
        subtitle=EVIL,
        figures={EVIL: EVIL},
        panels={EVIL: {EVIL: "loss"}, "right": {"a": "accuracy", "b": "nothing"}},
        examples=examples,
        config=EVIL,
        next_steps={EVIL: EVIL},
        tables={EVIL: [["", EVIL], [EVIL, "7"]]},
        shown=shown,
    )
    reader = Reader()
    reader.feed((folder / "report.html").read_text())
    return reader


def test_report_escapes_everything_from_data(tmp_path):
    page = written(
        tmp_path, [Example(lambda: [PNG, b"<svg onload=alert(1)>"], EVIL, EVIL, EVIL, True)]
    )
    assert "script" not in {tag for tag, _ in page.tags}
    sources = [given["src"] or "" for tag, given in page.tags if tag == "img"]
    assert [source.split(";")[0] for source in sources] == ["data:image/png"]
    assert [tag for tag, _ in page.tags].count("svg") == 2
    assert not [given for _, given in page.tags if any(name.startswith("on") for name in given)]
    assert page.text.count(EVIL) == 16
    (policy,) = [
        given["content"] for tag, given in page.tags if tag == "meta" and "http-equiv" in given
    ]
    assert "default-src 'none'" in (policy or "")
    assert [tag for tag, _ in page.tags if tag in ("th", "td")][:4] == ["th", "th", "td", "td"]


def test_report_shows_and_marks_wrong_answers(tmp_path):
    right = [Example(lambda: [PNG], "?", "4", "4", True)] * 50
    wrong = [Example(lambda: [PNG], "?", "4", f"no {i}", False) for i in range(9)]
    page = written(tmp_path, [*right[:10], *wrong, *right], shown=10)
    assert [given.get("class") for _, given in page.tags].count("card wrong") == 5
    assert (
        "69 prompts were answered, 9 answers are wrong (13.0 %). Shown are 5 wrong ones, marked, and 5 right ones."
        in page.text
    )
    assert "no 0" in page.text
    assert "prompts were answered" not in written(tmp_path, []).text
    audio = b"RIFF\0\0\0\0WAVEfmt "
    open_ended = written(tmp_path, [Example(lambda: [audio], "It was", "night", "dark", None)])
    assert "1 prompts were completed." in open_ended.text
    assert "the model's completion" in open_ended.text
    assert "wrong" not in open_ended.text.partition("Completions")[2]
    assert any(tag == "audio" for tag, _ in open_ended.tags)
    mixed = written(
        tmp_path, [*right[:3], *wrong[:1], *[Example(lambda: [PNG], "?", "4", "four", None)] * 20]
    )
    assert (
        "24 prompts were answered, 1 answers of 4 that were judged are wrong (25.0 %)" in mixed.text
    )
    few = written(tmp_path, [*wrong, *right[:1]], shown=10)
    assert "Shown are 9 wrong ones, marked, and 1 right ones." in few.text
