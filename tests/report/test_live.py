"""The live page of `mvp runs serve`: what it shows, what it reads again, and whom it answers."""

import http.client
import json
import queue
import shutil
import subprocess
import threading
import time
from contextlib import contextmanager
from urllib.parse import quote, unquote

import pytest
from conftest import mvp, user_error
from run_folder import run_folder

from mvp_engine.report.live import Handler, LiveRun, LiveServer
from mvp_engine.report.page import Curve, Example, read_answers, write_media
from mvp_engine.report.svg import MAX_POINTS, plot_svg
from mvp_engine.runs import Run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync --hide-scrollbars"
FLAGS += " --disable-background-networking --disable-component-update"
EVIL = "<img src=x onerror=alert(1)>"


@contextmanager
def served(root, names=()):
    """The address of a server of these runs."""
    with LiveServer(root, [Run(root / name) for name in names], 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)


def get(server, path, **headers):
    """Status, headers and text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read().decode(errors="replace")


def parts(server, query=""):
    return json.loads(get(server, f"/parts?{query}")[2])


def add(run, *records):
    with (run.dir / "metrics.jsonl").open("a") as out:
        out.writelines(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def runs(tmp_path):
    """Two runs, one with answers and an image."""
    for number, name in enumerate(("old", "new")):
        (tmp_path / name).mkdir()
        run = run_folder(tmp_path / name, created=float(number))
    (tmp_path / "new" / "config.yaml").write_text("optim: {lr: 0.5}\n")
    rows = []
    for step in (20, 40):
        for sample in range(3):
            texts = {"prompt": EVIL, "expected": "4", "written": f"{EVIL} at {step}"}
            row = {"step": step, "source": "web", "sample": sample, "right": sample > 0}
            rows.append({**row, **texts, "is_continuation": False})
    (run.dir / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run.dir / "log.txt").write_text(f"the first line\n{EVIL}\n")
    return tmp_path


def test_page_shows_metrics_answers_log_and_slow_steps_of_the_newest_run(runs):
    usual = {"usual_seconds": 0.5, "usual_split": {"data": 0.1, "train_step": 0.4}}
    slow = {
        "step": 7,
        "rank": 0,
        "seconds": 9.0,
        "phase": "data",
        "split": {"data": 8.6, "train_step": 0.4},
    }
    (runs / "new" / "slow_steps.jsonl").write_text(json.dumps({**slow, **usual}) + "\n")
    with served(runs) as server:
        status, headers, page = get(server, "/")
        shown = parts(server)
    assert status == 200
    assert "script-src 'self'" in headers["Content-Security-Policy"]
    assert "/live.js" in page
    assert "http://" not in page
    assert '<input type=checkbox value="new" checked>' in shown["list"]
    assert shown["list"].index("new") < shown["list"].index("old")
    for text in ("finished", "40 of 40", "train loss", "48.2k", "53.5 %"):
        assert text in shown["head"], text
    for title in (
        "loss",
        "loss by source",
        "held-out rows",
        "learning rate",
        "gradient norm",
        "tokens/s",
    ):
        assert f"<figcaption>{title}</figcaption>" in shown["plots"], title
    assert "8.6 in the wait for data" in shown["tables"]
    assert shown["answers"].count('class="card wrong"') == 1
    assert "at 40" in shown["answers"]
    assert "the first line" in shown["log"]


def test_page_escapes_everything_from_data(runs):
    add(Run(runs / "new"), {"step": 41, "split": "train", f"x{EVIL}": 1.0, "loss": 1.0})
    with served(runs) as server:
        shown = parts(server)
    for name, html in shown.items():
        assert "<img src=x" not in html, name
    assert "&lt;img src=x" in shown["answers"] + shown["log"]
    assert "&lt;img src=x" in shown["plots"]


def test_answers_of_an_earlier_evaluation_are_shown_by_its_step(runs):
    with served(runs) as server:
        shown = parts(server, "step=20")["answers"]
    assert "at 20" in shown
    assert "at 40" not in shown
    assert "<option selected>20</option>" in shown


def test_new_records_are_read_from_the_offset_and_a_rewritten_file_from_its_start(tmp_path):
    run = run_folder(tmp_path)
    live = LiveRun(run)
    live.read()
    before = live.offset
    assert list(live.steps["train", "loss"]) == [1, 10, 20, 30, 40]
    with (tmp_path / "metrics.jsonl").open("a") as out:
        out.write('{"step": 50, "split": "train", "loss"')
        out.flush()
        live.read()
        assert live.offset == before  # a line that is being written
        out.write(': 0.5}\nno json\n{"step": 60, "split": "train", "loss": null}\n')
    live.read()
    assert list(live.steps["train", "loss"])[-2:] == [40, 50]
    run.rewind_metrics(20)
    add(
        run,
        {"step": 21, "split": "train", "loss": 3.0},
        {"step": 70, "split": "train", "loss": 2.0},
    )
    live.read()
    assert list(live.steps["train", "loss"]) == [1, 10, 20, 21, 70]
    assert live.last["train"]["step"] == 70


def test_several_runs_are_drawn_over_each_other_or_side_by_side_on_equal_axes(runs):
    with served(runs) as server:
        both = parts(server, "run=old&run=new")
        beside = parts(server, "run=old&run=new&side=1")["plots"]
        zoomed = parts(server, "run=old&run=new&window=5,25")["plots"]
        nonsense = parts(server, "run=..&run=nowhere&window=a,b&step=x")
    assert both["plots"].count("<figcaption>loss</figcaption>") == 1
    assert "2 runs" in both["head"]
    assert "optim.lr" in both["compare"]
    for name in ("old", "new"):
        assert f"<figcaption>loss, {name}</figcaption>" in beside
    ends = [text.split("]")[0] for text in beside.split("data-plot=")[1:3]]
    assert ends[0] == ends[1]
    assert "[5.0, 25.0]" in zoomed
    assert 'value="new" checked' in nonsense["list"]


def test_server_gives_files_of_run_folders_only_and_to_this_host_only(runs, tmp_path):
    (runs / "new" / "secret").write_text("secret")
    (runs / "new" / "loss.png").symlink_to(runs / "new" / "secret")
    (runs / "new" / "report.html").symlink_to("/etc/hostname")
    with served(runs) as server:
        assert get(server, "/file/new/config.yaml")[2] == "optim: {lr: 0.5}\n"
        names = ["secret", "report.html", "../old/config.yaml", "run.json", "..", ""]
        paths = [f"/file/new/{quote(name, safe='')}" for name in names]
        paths += [
            "/file/../new/config.yaml",
            "/file/new/../old/config.yaml",
            "/file/nowhere/log.txt",
        ]
        paths += [
            "//etc/passwd",
            "/../../etc/passwd",
            "/file/%2e%2e/config.yaml",
            "/file/new/loss.png",
        ]
        for path in paths:
            assert get(server, path)[0] == 404, path
        for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1", ""):
            assert get(server, "/parts", Host=host)[0] == 403, host
        assert get(server, "/", Host=f"localhost:{server.port}")[0] == 200
        tag = get(server, "/live.js")[1]["ETag"]
        assert get(server, "/live.js", **{"If-None-Match": tag})[0] == 304


def test_long_run_is_drawn_with_few_points_that_keep_its_extremes():
    values = [2.0] * 100_000
    values[54_321] = 9.0
    curve = Curve("", "#2563eb", list(range(1, 100_001)), values, is_eval=False)
    began = time.process_time()
    html = plot_svg("loss", [curve], "reward", hover=True)
    assert time.process_time() - began < 5
    assert html.count("L") < 4 * MAX_POINTS
    top = min(float(point.split()[1]) for point in html.split('d="M')[1].split('"')[0].split("L"))
    assert top < 30  # of 250: the value of one step
    zoomed = plot_svg("loss", [curve], "reward", window=(54_300, 54_340), hover=True)
    assert "&quot;9&quot;" in zoomed


def test_media_of_shown_answers_are_kept_in_the_run_folder_and_no_others(runs):
    run = Run(runs / "new")
    _, examples = read_answers(run)
    reads = []

    def media(sample):
        def read():
            reads.append(sample)
            return [b"RIFF    WAVE", b""]

        return read

    def of(samples):
        return [Example(media(sample), "", "", "", True) for sample in samples]

    write_media(run, [0, 1, 2], of([0, 1, 2]))
    write_media(run, [1, 2, 3], of([1, 2, 3]))
    names = sorted(file.name for file in (run.dir / "answers").iterdir())
    assert names == ["1-media000", "2-media000", "3-media000"]
    assert reads == [0, 1, 2, 3]
    assert read_answers(run)[1][1].media() == [b"RIFF    WAVE"]
    assert examples[0].media() == []


def test_serve_names_a_port_in_use_and_an_unknown_run(runs):
    with served(runs) as server, user_error(f"--port {server.port}: .*--port 0"):
        LiveServer(runs, [], server.port)
    assert mvp(f"runs serve nowhere --dir {runs}") == 2


# Moves the pointer over the first plot, drags over it, waits for a new record, and reports what the page then shows.
PLAY = """
addEventListener("load", async () => {
  const until = async (test) => { while (!test()) await new Promise((done) => setTimeout(done, 50)); };
  const text = (name) => document.getElementById(name).innerText;
  await until(() => document.querySelector(".plot svg"));
  const svg = document.querySelector(".plot svg");
  const box = svg.getBoundingClientRect();
  const send = (name, share) => svg.dispatchEvent(new PointerEvent(name, {
    bubbles: true, button: 0, clientX: box.left + share * box.width, clientY: box.top + box.height / 2 }));
  send("pointermove", 0.95);
  const tip = text("tip");
  send("pointerdown", 0.3); send("pointermove", 0.6); send("pointerup", 0.6);
  const range = () => JSON.parse(document.querySelector(".plot svg").dataset.plot).x;
  await until(() => range()[0] > 1);
  const zoomed = range();
  await fetch("/ready");
  await until(() => text("head").includes("99 of 40"));
  await fetch("/done?" + encodeURIComponent(JSON.stringify({ tip, zoomed, address: location.search })));
});
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_page_in_a_browser_refreshes_zooms_and_shows_values(runs, tmp_path, monkeypatch):
    done = queue.Queue()
    answer, get_page = Handler._answer, Handler.do_GET

    def with_play(self, body, kind, status=200):
        answer(self, body + PLAY.encode() * (kind == "text/javascript"), kind, status)

    def watched(self):
        if self.path == "/ready":
            add(Run(runs / "new"), {"step": 99, "split": "train", "loss": 9.0})
        if self.path.startswith("/done"):
            done.put(json.loads(unquote(self.path.partition("?")[2])))
        get_page(self)

    monkeypatch.setattr(Handler, "_answer", with_play)
    monkeypatch.setattr(Handler, "do_GET", watched)
    with served(runs) as server:
        words = [
            CHROMIUM,
            *FLAGS.split(),
            "--remote-debugging-port=0",
            f"--user-data-dir={tmp_path}/profile",
        ]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        browser = subprocess.Popen([*words, server.url], **quiet)
        try:
            shown = done.get(timeout=60)
        finally:
            browser.kill()
            browser.wait(10)
    assert shown["tip"].split("\n") == ["step 40", "train 1, step 40", "eval 0.75, step 40"]
    first, last = shown["zoomed"]
    assert 5 < first < 15
    assert 20 < last < 30
    assert shown["address"].startswith("?window=")
