"""JSON that tests read and write, and what a run leaves on disk."""

import json


def read_json(file):
    return json.loads(file.read_text())


def write_json(file, value):
    file.write_text(json.dumps(value))


def printed_json(capsys):
    """What a command with `--json` has printed."""
    return json.loads(capsys.readouterr().out)


def json_lines(file):
    with file.open() as lines:  # `str.splitlines` would also split texts with U+2028
        return [json.loads(line) for line in lines]


def log_of(folder):
    """The log of the newest run below `folder`."""
    from mvp_engine.runs import list_runs

    return (list_runs(folder)[-1].dir / "log.txt").read_text()
