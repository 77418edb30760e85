"""metrics.jsonl on a full disk: records wait for space, and no partial line stays in the file."""

import json

import pytest

from mvp_engine.log.backends import JsonlBackend


class FullDisk:
    """A file that takes only the first bytes of what is written."""

    def __init__(self, file, space):
        self.file = file
        self.space = space

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
        written = self.file.write(data[: self.space])
        self.space -= written
        return int(written)


def test_jsonl_backend_writes_that_fail_several_times_leave_no_partial_line(tmp_path):
    backend = JsonlBackend()
    backend.pending = b""
    path = tmp_path / "metrics.jsonl"
    with open(path, "ab", buffering=0) as file:
        backend.file = file
        backend.metrics({"step": 1})
        for step, space in ((2, 7), (3, 30), (4, 5)):
            backend.file = FullDisk(file, space)  # type: ignore[assignment]
            with pytest.raises(OSError, match="No space left"):
                backend.metrics({"step": step, "loss": 0.123456789})
            assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1]
        backend.file = file
        backend.metrics({"step": 5})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5]
