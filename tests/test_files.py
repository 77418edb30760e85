"""`mvp_engine.files`: a path has its old contents or the complete new ones, never anything between."""

import os
import subprocess
import sys

import pytest

from mvp_engine.files import (
    atomic_path,
    atomic_symlink,
    atomic_write_text,
    remove,
    remove_atomically,
    temporary_path,
)


def everything_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_atomic_path_new_file_appears_only_after_the_block(tmp_path):
    file = tmp_path / "a.txt"
    with atomic_path(file) as temporary:
        temporary.write_text("new")
        assert not file.exists()
        assert temporary.parent == tmp_path  # a rename is atomic only within one file system
    assert file.read_text() == "new"
    assert everything_in(tmp_path) == ["a.txt"]


def write_half(file, error):
    with atomic_path(file) as temporary:
        temporary.write_text("half")
        raise error


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_atomic_path_exception_keeps_the_old_file(tmp_path, error):
    file = tmp_path / "a.txt"
    file.write_text("old")
    with pytest.raises(type(error)):
        write_half(file, error)
    assert file.read_text() == "old"
    assert everything_in(tmp_path) == ["a.txt"]


def test_atomic_path_killed_process_keeps_the_old_file(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("old")
    code = f"""
import os, signal
from pathlib import Path
from mvp_engine.files import (
    atomic_path,
    atomic_symlink,
    atomic_write_text,
    remove,
    remove_atomically,
    temporary_path,
)
with atomic_path(Path({str(file)!r})) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert file.read_text() == "old"


def test_atomic_path_replaced_file_keeps_its_permissions(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("old")
    file.chmod(0o640)
    atomic_write_text(file, "new")
    assert file.read_text() == "new"
    assert file.stat().st_mode & 0o777 == 0o640


def test_atomic_path_new_file_has_the_default_permissions(tmp_path):
    (tmp_path / "ordinary").touch()
    atomic_write_text(tmp_path / "a.txt", "ü")
    assert (tmp_path / "a.txt").stat().st_mode == (tmp_path / "ordinary").stat().st_mode
    assert (tmp_path / "a.txt").read_bytes() == "ü".encode()


def test_atomic_path_existing_folder_is_replaced_only_on_request(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    with atomic_path(folder) as temporary:  # an empty one is free to take
        temporary.mkdir()
        (temporary / "old").touch()
    with pytest.raises(OSError, match="not empty"), atomic_path(folder) as temporary:
        temporary.mkdir()
    assert everything_in(folder) == ["old"]
    with atomic_path(folder, replace_folder=True) as temporary:
        temporary.mkdir()
        (temporary / "new").touch()
    assert everything_in(folder) == ["new"]
    assert everything_in(tmp_path) == ["folder"]


def test_atomic_path_leftover_of_a_crash_is_not_reused(tmp_path):
    folder = tmp_path / "folder"
    temporary_path(folder).mkdir()
    (temporary_path(folder) / "stale").touch()
    with atomic_path(folder, temporary_path(folder)) as temporary:
        temporary.mkdir()
        (temporary / "new").touch()
    assert everything_in(folder) == ["new"]


def test_atomic_path_rename_comes_after_fsync(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append("fsync"), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("rename"), replace(a, b)))
    atomic_write_text(tmp_path / "a.txt", "new")
    assert calls == ["fsync", "rename", "fsync"]  # the file, the rename, the folder that lists it


def test_atomic_symlink_existing_link_is_repointed(tmp_path):
    link = tmp_path / "latest"
    for target in ("step_1", "step_2"):
        (tmp_path / target).mkdir()
        atomic_symlink(link, target)
        assert os.readlink(link) == target
    assert everything_in(tmp_path) == ["latest", "step_1", "step_2"]


def test_remove_symlink_keeps_its_target(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "file").touch()
    (tmp_path / "link").symlink_to("target")
    remove(tmp_path / "link")
    remove(tmp_path / "missing")
    assert everything_in(tmp_path) == ["target"]
    remove_atomically(tmp_path / "target")
    assert everything_in(tmp_path) == []
