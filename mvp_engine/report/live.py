"""The live page of `mvp runs serve`: curves, answers, slow steps and the log of runs, while they train.

It reads run folders only, from where it stopped reading before. The server answers this machine alone, gives away no
file but those in FILES, and refuses requests that another web site makes a browser send.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from mvp_engine.errors import UserError
from mvp_engine.log.format import duration, is_learning_rate, number, rate
from mvp_engine.report.facts import NO_METRICS, Record, RunFacts, metric_panels, metric_text
from mvp_engine.report.page import (
    COLOURS,
    Curve,
    example_cards,
    html_page,
    panel_curves,
    read_answers,
    table_html,
)
from mvp_engine.report.svg import Scale, plot_svg
from mvp_engine.runs import SWEEP_FILE, Run, flat_keys, list_runs

FILES = {  # of a run folder, with their content types
    "report.html": "text/html",
    "loss.png": "image/png",
    "config.yaml": "text/plain",
    "log.txt": "text/plain",
    "metrics.jsonl": "text/plain",
}
MAX_RUNS = len(COLOURS)  # that are shown together
LAST_BYTES = (
    65536  # of metrics.jsonl for the list, and of the log: enough for a record of each split
)
LOG_LINES = 60
POLICY = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"
POLICY += "; script-src 'self'; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
SECONDS = 20  # of a slow connection
# Panels of `perf` and of other metrics by title; all further metrics have a panel of their own.
PERF = {"tokens/s": "tokens_per_s", "samples/s": "samples_per_s", "MFU": "mfu"}
PERF |= {"wait for data": "data_wait", "peak memory in GiB": "memory_gib", "goodput": "goodput"}
HIDDEN = {"eta_s", "flops_per_s", "step_s", "skipped"}


class LiveRun:
    """A run with its metrics as columns, of which `read` adds the new records."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.offset = 0
        self.tail = (
            b""  # the last bytes read: others in their place mean that a resume rewrote the file
        )
        self.clear()

    def clear(self) -> None:
        self.offset, self.tail = 0, b""
        self.last: dict[str, Record] = {}
        self.steps: dict[tuple[str, str], array[int]] = defaultdict(lambda: array("q"))
        self.values: dict[tuple[str, str], array[float]] = defaultdict(lambda: array("d"))

    def read(self) -> None:
        file = self.run.dir / "metrics.jsonl"
        if not file.is_file():
            return
        with file.open("rb") as lines:
            lines.seek(self.offset - len(self.tail))
            if lines.read(len(self.tail)) != self.tail:
                self.clear()
                lines.seek(0)
            for line in lines:
                if not line.endswith(b"\n"):  # it is being written
                    break
                self.offset += len(line)
                self.tail = line[-200:]
                self._add(line)

    def _add(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            split, step = record["split"], record["step"]
        except (ValueError, KeyError, TypeError):
            return
        self.last[split] = record
        for name, value in {**record, **record.get("perf", {})}.items():
            is_number = isinstance(value, int | float) and math.isfinite(value)
            if is_number and name not in NO_METRICS and name not in HIDDEN:
                self.steps[split, name].append(step)
                self.values[split, name].append(value)

    def names(self, split: str) -> list[str]:
        return [name for one, name in self.values if one == split]

    def curve(self, split: str, metric: str, label: str, colour: str) -> Curve:
        key = split, metric
        if key not in self.values:
            return Curve(label, colour, [], [], split != "train")
        return Curve(label, colour, self.steps[key], self.values[key], split != "train")


def status_line(run: Run, cache: dict[Path, tuple[Any, Any]]) -> dict[str, Any]:
    """What the list says of a run: its state and its last records."""
    file = run.dir / "metrics.jsonl"
    size = file.stat().st_size if file.is_file() else 0
    if file not in cache or cache[file][0] != size:
        last: dict[str, Record] = {}
        if size:
            with file.open("rb") as lines:
                lines.seek(max(0, size - LAST_BYTES))
                for line in lines.read().splitlines():
                    try:
                        record = json.loads(line)
                        last[record["split"]] = record
                    except (ValueError, KeyError, TypeError):
                        continue  # cut off at either end
        cache[file] = size, last
    info = run.info
    last = cache[file][1]
    train = last.get("train", {})
    status = run.status()
    state = {
        "status": status,
        "last": last,
        "step": max((r["step"] for r in last.values()), default=0),
    }
    state["total"] = info.get("setup", {}).get("total_steps")
    eta = train.get("perf", {}).get("eta_s")
    if status == "running" and eta is not None:
        state["eta"] = max(0.0, eta - (time.time() - file.stat().st_mtime))
    return state


class LivePage:
    """The parts of the page as HTML, for what a browser asks to see."""

    def __init__(self, root: Path, runs: Sequence[Run]) -> None:
        self.root = root
        self.named = {run.id: run for run in runs}  # they may be in other folders
        self.runs: dict[str, Run] = {}
        self.live: dict[str, LiveRun] = {}
        self.cache: dict[Path, tuple[Any, Any]] = {}
        self.listed = 0.0
        self.lock = threading.Lock()

    def known(self) -> dict[str, Run]:
        """All runs, the newest first."""
        if time.monotonic() - self.listed > 1:
            runs = {run.id: run for run in reversed(list_runs(self.root))}
            self.runs = {**{k: run for k, run in self.named.items() if k not in runs}, **runs}
            self.listed = time.monotonic()
        return self.runs

    def parts(self, query: dict[str, list[str]]) -> dict[str, str]:
        """The HTML of each part. `query`: run, window (two steps), side (side by side), step (of the answers)."""
        with self.lock:
            known = self.known()
            names = [name for name in query.get("run", []) if name in known][:MAX_RUNS]
            names = names or [*self.named][:MAX_RUNS] or [*known][:1]
            shown = [self.live.setdefault(name, LiveRun(known[name])) for name in names]
            for one in shown:
                one.read()
            states = {name: status_line(run, self.cache) for name, run in known.items()}
            window = _window(query.get("window", [""])[0])
            is_side = query.get("side", [""])[0] == "1" and len(shown) > 1
            step = query.get("step", [""])[0]
            return {
                "list": _list(states, names),
                "head": _heads(shown, states)
                if len(shown) > 1
                else "".join(_head(one, states[one.run.id]) for one in shown),
                "plots": self._plots(shown, window, is_side),
                "compare": self._sweeps(names) + _compare(shown),
                "tables": "".join(_tables(one.run, len(shown) > 1) for one in shown),
                "answers": "".join(
                    self._answers(one.run, step, len(shown) > 1) for one in shown[:3]
                ),
                "log": "".join(_log(one.run, len(shown) > 1) for one in shown[:3]),
            }

    def _plots(
        self, shown: Sequence[LiveRun], window: tuple[float, float] | None, is_side: bool
    ) -> str:
        key = [(one.run.dir, one.offset) for one in shown], window, is_side
        place = Path("plots")
        if self.cache.get(place, (None, None))[0] != key:
            self.cache[place] = key, _plots(shown, window, is_side)
        return str(self.cache[place][1])

    def _answers(self, run: Run, step: str, is_named: bool) -> str:
        file = run.dir / "answers.jsonl"
        if not file.is_file():
            return ""
        stat = file.stat()
        key = stat.st_mtime_ns, stat.st_size, step
        if self.cache.get(file, (None, None))[0] != key:
            steps, examples = read_answers(run, int(step) if step.isdecimal() else None)
            shown = int(step) if step.isdecimal() and int(step) in steps else max(steps, default=0)
            options = "".join(
                f"<option{' selected' if one == shown else ''}>{one}</option>" for one in steps
            )
            choice = f'<select data-key="step">{options}</select>'
            choice = f"<p class=dim><label>evaluation at step {choice}</label></p>"
            title, *cards = example_cards(examples) or [""]
            self.cache[file] = key, "".join([title, choice, *cards])
        name = f"<p><b>{escape(run.id)}</b></p>" if is_named else ""
        return name + str(self.cache[file][1])

    def _sweeps(self, names: Sequence[str]) -> str:
        """The runs of the sweeps that the shown runs are of, the best first."""
        html = []
        for file in self.root.glob(f"*/{SWEEP_FILE}"):
            sweep = file.parent.name
            if not any(name.startswith(f"{sweep}-") for name in names):
                continue
            facts = json.loads(file.read_text())
            keys = dict.fromkeys(key for one in facts["trials"] for key in one["values"])
            rows = []
            for one in facts["trials"]:
                value = one["value"]
                rank = math.inf if value is None else value * (1 if facts["is_min"] else -1)
                values = [str(one["values"].get(key, "-")) for key in keys]
                rows.append(
                    (rank, [one["run"], *values, number(value), one["state"], one["error"]])
                )
            rows.sort()
            head = ["run", *keys, facts["metric"], "state", ""]
            html += table_html(f"Sweep {sweep}", [head, *(row for _, row in rows)])
        return "".join(html)

    def file(self, run: str, name: str) -> tuple[bytes, str] | None:
        """A file of a run folder and its content type."""
        folder = self.known().get(run)
        if folder is None or name not in FILES:
            return None
        file = folder.dir / name
        if file.is_symlink() or not file.is_file():
            return None
        return file.read_bytes(), FILES[name]


def _window(text: str) -> tuple[float, float] | None:
    try:
        first, last = map(float, text.split(","))
    except ValueError:
        return None
    return (first, last) if math.isfinite(last - first) and last > first else None


def _list(states: dict[str, dict[str, Any]], names: Sequence[str]) -> str:
    lines = []
    for name, state in states.items():
        colour = (
            f"var(--c{names.index(name)})" if name in names and len(names) > 1 else "transparent"
        )
        mark = f'<i style="background:{colour}"></i>'
        checked = " checked" if name in names else ""
        loss = state["last"].get("train", {}).get("loss")
        words = [state["status"], _step(state), "" if loss is None else f"loss {loss:.4g}"]
        line = f'<input type=checkbox value="{escape(name)}"{checked}>{mark}<b>{escape(name)}</b>'
        kind = escape(str(state["status"]))
        lines.append(
            f'<label class="run {kind}">{line}<small>{escape(", ".join(filter(None, words)))}</small></label>'
        )
    return "".join(lines) or "<p class=dim>no runs yet</p>"


def _step(state: dict[str, Any]) -> str:
    return f"step {state['step']:,}" + (f" of {state['total']:,}" if state["total"] else "")


def _figures(one: LiveRun, state: dict[str, Any]) -> dict[str, str]:
    """Status, progress, time left and the last metrics of a run."""
    info, train, held_out = one.run.info, one.last.get("train", {}), one.last.get("eval", {})
    perf = train.get("perf", {})
    figures = {"status": str(state["status"]), "step": _step(state).removeprefix("step ")}
    if "eta" in state:
        figures["time left"] = duration(state["eta"])
    for name in ("loss", "reward"):
        if train.get(name) is not None:
            figures[f"train {name}"] = metric_text(name, train[name])
    metrics = [name for name in held_out if name not in NO_METRICS and not name.startswith("loss_")]
    for name in metrics[:4]:
        figures[f"eval {name}"] = metric_text(name, held_out[name])
    for title, name in PERF.items():
        value = perf.get(name, train.get(name, info.get(name)))
        if isinstance(value, int | float):
            is_rate = name.endswith("_per_s")
            figures[title] = rate(value) if is_rate else metric_text(name, value)
    if train.get("skipped"):
        figures["skipped steps"] = f"{train['skipped']:,}"
    return figures


def _head(one: LiveRun, state: dict[str, Any]) -> str:
    boxes = ""
    for name, text in _figures(one, state).items():
        boxes += f"<div class=figure><b>{escape(text)}</b>{escape(name)}</div>"
    links = [name for name in FILES if (one.run.dir / name).is_file()]
    links = [f'<a href="/file/{escape(one.run.id)}/{name}">{name}</a>' for name in links]
    share = 100 * state["step"] / state["total"] if state["total"] else 0
    bar = f"<progress max=100 value={share:.1f}></progress>" if share else ""
    title = f"<h1>{escape(one.run.id)}</h1><p class=dim>{' '.join(links)}</p>"
    return f"{title}{bar}<div class=figures>{boxes}</div>{_error(one.run, state)}"


def _heads(shown: Sequence[LiveRun], states: dict[str, dict[str, Any]]) -> str:
    """The figures of one run, or of several as a table."""
    if len(shown) < 2:
        return "".join(_head(one, states[one.run.id]) for one in shown)
    figures = {one.run.id: _figures(one, states[one.run.id]) for one in shown}
    names = dict.fromkeys(name for of_run in figures.values() for name in of_run)
    rows = [["run", *names]]
    rows += [[run, *(one.get(name, "-") for name in names)] for run, one in figures.items()]
    errors = "".join(_error(one.run, states[one.run.id]) for one in shown)
    return f"<h1>{len(shown)} runs</h1>{''.join(table_html('', rows))}{errors}"


def _error(run: Run, state: dict[str, Any]) -> str:
    error = str(run.info.get("error") or "").strip()
    is_shown = error and state["status"] == "failed"
    return f"<pre>{escape(run.id)}: {escape(error[-2000:])}</pre>" if is_shown else ""


def _plots(shown: Sequence[LiveRun], window: tuple[float, float] | None, is_side: bool) -> str:
    """A plot for each panel of a run; for each metric with the curves of all runs, or of each run on equal axes."""
    train = dict.fromkeys(name for one in shown for name in one.names("train"))
    held_out = dict.fromkeys(name for one in shown for name in one.names("eval"))
    panels = _panels([*train], [*held_out], is_single=len(shown) == 1)
    plots = []
    for title, metrics in panels.items():
        metric = next(iter(metrics.values()))
        options: dict[str, Any] = {"window": window, "hover": True}
        if len(shown) == 1:
            plots.append(plot_svg(title, panel_curves(metrics, shown[0].curve), metric, **options))
            continue
        by_run = []
        for one, colour in zip(shown, COLOURS, strict=False):
            both = [one.curve(split, metric, "", colour) for split in ("train", "eval")]
            label = one.run.id
            named = [Curve(label, c.colour, c.steps, c.values, c.is_eval) for c in both if c.values]
            by_run.append(named)
        if not is_side:
            plots.append(
                plot_svg(title, [c for curves in by_run for c in curves], metric, **options)
            )
        elif drawn := [curve for curves in by_run for curve in curves]:
            options["scale"] = Scale.of(drawn, metric, window)
            for one, curves in zip(shown, by_run, strict=True):
                plot = plot_svg(f"{title}, {one.run.id}", curves, metric, **options)
                plots.append(
                    plot
                    or f"<figure class=plot><figcaption>{escape(title)}: -</figcaption></figure>"
                )
    columns = (
        f' style="grid-template-columns:repeat({len(shown)},minmax(240px,1fr))"' if is_side else ""
    )
    empty = "<p class=dim>no metrics yet: they come with the first log record</p>"
    return (
        f"<div class=scroll><div class=curves{columns}>{''.join(plots)}</div></div>"
        if any(plots)
        else empty
    )


def _panels(train: list[str], held_out: list[str], *, is_single: bool) -> dict[str, dict[str, str]]:
    names = [*train, *held_out]
    rates = {name: name for name in names if is_learning_rate(name)}
    panels = metric_panels(names, held_out)
    panels |= {"learning rate": rates, "gradient norm": {"": "grad_norm"}}
    panels |= {title: {"": metric} for title, metric in PERF.items()}
    used = {metric for metrics in panels.values() for metric in metrics.values()}
    panels |= {name: {"": name} for name in names if name not in used}
    present = {
        title: {label: metric for label, metric in metrics.items() if metric in names}
        for title, metrics in panels.items()
    }
    if is_single:
        return {title: metrics for title, metrics in present.items() if metrics}
    of_each = dict.fromkeys(metric for metrics in present.values() for metric in metrics.values())
    titles = {metric: title for title, metric in PERF.items()}
    return {titles.get(metric, metric): {"": metric} for metric in of_each}


def _compare(shown: Sequence[LiveRun]) -> str:
    """Config keys that differ between the runs, and their last metrics."""
    if len(shown) < 2:
        return ""
    configs = [flat_keys(one.run.config) for one in shown]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [["", *(one.run.id for one in shown)]]
    for key in keys:
        values = [str(config.get(key, "-")) for config in configs]
        if len(set(values)) > 1 and key not in ("run_id", "resume", "workflow"):
            rows.append([key, *values])
    for split in ("train", "eval"):
        last = [one.last.get(split, {}) for one in shown]
        for name in dict.fromkeys(name for record in last for name in record):
            if name not in NO_METRICS:
                rows.append([f"{split} {name}", *(metric_text(name, r.get(name)) for r in last)])
    return "".join(table_html("What differs, and the last metrics", rows))


def _tables(run: Run, is_named: bool) -> str:
    facts = RunFacts(run)
    of = f", {run.id}" if is_named else ""
    tables = {"Slow steps": facts.slow_step_rows(), "Rows left out": facts.left_out_rows()}
    tables["What trains"] = facts.part_rows()
    return "".join("".join(table_html(f"{title}{of}", rows)) for title, rows in tables.items())


def _log(run: Run, is_named: bool) -> str:
    file = run.dir / "log.txt"
    if not file.is_file():
        return ""
    with file.open("rb") as log:
        log.seek(max(0, file.stat().st_size - LAST_BYTES))
        lines = log.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    text = escape("\n".join(lines))
    return f"<h2>Log{f', {escape(run.id)}' if is_named else ''}</h2><pre class=log>{text}</pre>"


# ---- The server -------------------------------------------------------------------------------------

STYLE = """
.figure b { font-size: 17px; }
body { max-width: none; display: grid; grid-template-columns: 270px minmax(0, 1fr); gap: 0 28px; padding: 20px; }
th, td { padding-right: 14px; } h2:empty { display: none; }
nav { position: sticky; top: 20px; max-height: calc(100vh - 40px); overflow-y: auto; font-size: 13px; }
nav input[type=search] { width: 100%; font: inherit; padding: 5px 8px; margin-bottom: 8px; }
.run { display: block; padding: 4px 2px; cursor: pointer; } .run b { font-weight: 500; }
.run i { display: inline-block; width: 10px; height: 10px; border-radius: 5px; margin: 0 5px 0 1px; }
.run small { display: block; color: var(--dim); padding-left: 36px; }
.run.running small { color: var(--good); } .run.failed small, .run.killed small { color: var(--bad); }
main { max-width: 1500px; } progress { width: 100%; height: 6px; } .log { max-height: 30em; overflow: auto; }
#bar { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; color: var(--dim); margin: 16px 0; }
#bar b { color: var(--bad); } #bar button { font: inherit; }
.plot svg { touch-action: pan-y; cursor: crosshair; user-select: none; }
.plot .at { stroke: var(--dim); } .plot .zoomed { fill: var(--c0); opacity: .2; }
#tip { position: fixed; z-index: 2; pointer-events: none; background: var(--page); border: 1px solid var(--line);
  border-radius: 6px; padding: 5px 9px; font-size: 13px; box-shadow: 0 2px 8px #0003; white-space: nowrap; }
#tip i { display: inline-block; width: 9px; height: 9px; border-radius: 5px; margin-right: 6px; }
th, td { padding-right: 14px; } h2:empty { display: none; }
@media (max-width: 760px) { body { display: block; padding: 14px; }
nav { position: static; max-height: 30vh;
  margin-bottom: 18px; border-bottom: 1px solid var(--line); } }
"""
BODY = """<nav><input type=search id=filter placeholder="filter runs" aria-label="filter runs"><div id=list></div></nav>
<main><div id=head></div><div id=bar><label><input type=checkbox id=side> side by side</label>
<span>drag over a plot to zoom in, double-click to zoom out</span><button id=reset hidden>all steps</button>
<b id=lost hidden>the server does not answer: is mvp runs serve still running?</b></div>
<div id=plots></div><div id=compare></div><div id=answers></div><div id=tables></div>
<div id=log></div></main><div id=tip hidden></div>
<script src="/live.js"></script>"""


class Handler(BaseHTTPRequestHandler):
    timeout = SECONDS
    server: LiveServer

    def do_GET(self) -> None:
        host = self.headers.get("Host", "")
        if host not in self.server.hosts:  # a web site whose name was pointed to this machine
            self._answer(b"this page is for http://127.0.0.1 only\n", "text/plain", 403)
            return
        url = urlsplit(self.path)
        route = url.path
        if route == "/":
            self._answer(html_page("mvp runs", BODY, STYLE).encode(), "text/html")
        elif route == "/live.js":
            self._answer((Path(__file__).parent / "live.js").read_bytes(), "text/javascript")
        elif route == "/parts":
            parts = self.server.page.parts(parse_qs(url.query))
            self._answer(json.dumps(parts).encode(), "application/json")
        else:
            words = [unquote(word) for word in route.split("/")]
            is_file = len(words) == 4 and words[1] == "file"
            file = self.server.page.file(words[2], words[3]) if is_file else None
            body, kind = file or (b"not found\n", "text/plain")
            self._answer(body, kind, 200 if file else 404)

    def _answer(self, body: bytes, kind: str, status: int = 200) -> None:
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        if status == 200 and self.headers.get("If-None-Match") == tag:
            status, body = 304, b""
        self.send_response(status)
        charset = "" if kind.startswith("image") else "; charset=utf-8"
        for name, value in {
            "Content-Type": kind + charset,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
            "ETag": tag,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed."""


class LiveServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, root: Path, runs: Sequence[Run], port: int) -> None:
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as error:
            raise UserError(
                f"--port {port}: {error.strerror}. Give another one, or --port 0 for any that is free"
            ) from None
        self.page = LivePage(root, runs)
        self.port = self.server_address[1]
        self.hosts = {f"{name}:{self.port}" for name in ("127.0.0.1", "localhost")}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no error; everything else is a bug, and printed."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)
