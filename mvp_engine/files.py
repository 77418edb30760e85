"""Atomic writes: a file, folder or symlink gets its final name only when it is complete.

Everything is written under a temporary name in the same folder, flushed to disk and then renamed, so a crash leaves
the old version or none. Whether a path is a URL is here, too. This module imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

SCHEMES = ("s3", "gs", "gcs", "az", "abfs", "abfss", "http", "https", "hf", "memory", "file")
URL_FILE = ".store-url"  # in the cache of `stores.py`, above the versions of a file
_URL = re.compile(rf"[a-z][a-z0-9+.-]+://|({'|'.join(SCHEMES)}):/(?!/)")


def is_url(path: str | Path) -> bool:
    """Whether a path is a URL (`stores.py`), also one that `Path` has turned into `s3:/bucket/key`."""
    return _URL.match(os.fspath(path)) is not None


def as_url(path: str | Path) -> str:
    """The URL as text, with both of its slashes, which `Path` drops."""
    return re.sub(r"^([a-z0-9]+):/(?!/)", r"\1://", os.fspath(path))


def url_of(path: Path) -> str | None:
    """The URL of a file or folder in the cache of stores, which is CACHE/../KEY/VERSION/NAME; None for other paths."""
    for home in path.parents:
        if (home / URL_FILE).is_file():
            return "/".join([(home / URL_FILE).read_text(), *path.relative_to(home).parts[2:]])
    return None


@contextlib.contextmanager
def atomic_path(
    final: Path, temporary: Path | None = None, *, replace_folder: bool = False
) -> Iterator[Path]:
    """A path to write a file or a folder to; the block's end renames it to `final`, an exception removes it.

    An existing file is replaced and keeps its permissions; an existing folder that is not empty is replaced only
    with `replace_folder`. The default temporary name contains the process id, so concurrent writers never share one.
    """
    if temporary is None:
        temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    remove(temporary)
    try:
        yield temporary
        publish(temporary, final, replace_folder=replace_folder)
    except BaseException:
        remove(temporary)
        raise


def atomic_write_text(file: Path, text: str) -> None:
    """Write a UTF-8 text file; readers see the old text or the new one."""
    with atomic_path(file) as temporary:
        temporary.write_text(text, encoding="utf-8")


def atomic_symlink(link: Path, target: str | Path) -> None:
    """Create a symlink, or point an existing one to another target."""
    with atomic_path(link) as temporary:
        temporary.symlink_to(target)


def temporary_path(final: Path) -> Path:
    """The temporary name that all ranks and all later processes know; `atomic_path` makes up a private one."""
    return final.with_name(f".tmp-{final.name}")


def publish(temporary: Path, final: Path, *, replace_folder: bool = False) -> None:
    """Flush `temporary` to disk and rename it to `final`.

    Of a folder only the list of its files is flushed: whoever needs their contents to survive a power failure calls
    `fsync_path` on each of them.
    """
    if not temporary.is_symlink():
        fsync_path(temporary)
        if temporary.is_file() and final.is_file():
            shutil.copymode(final, temporary)
    replaced = None
    if replace_folder and final.exists():
        replaced = _hide(final)  # a crash here leaves the new folder complete, but unnamed
    os.replace(temporary, final)
    fsync_path(final.parent)
    if replaced is not None:
        remove(replaced)


def remove(path: Path) -> None:
    """Delete a file, a symlink or a folder with all its contents; a missing one is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


def remove_atomically(folder: Path) -> None:
    """Rename a folder, then delete it: a reader never finds half of its files."""
    remove(_hide(folder))


def fsync_path(path: Path) -> None:
    """Flush a file, or the list of a folder's files, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_inside(name: str) -> bool:
    """Whether a relative path, as files of others name them, stays in the folder that it is relative to."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name


def leads_out(path: Path, folder: Path) -> bool:
    """Whether a file of `folder` is a link to a file elsewhere with another name, such as a private key.

    The Hugging Face cache consists of links, and folders of links to the files of another model are common practice:
    those have the same names.
    """
    home = folder.resolve()
    if home.parent.name == "snapshots":  # of the Hugging Face cache, next to `blobs`
        home = home.parent.parent
    target = path.resolve()
    return target.name != path.name and not target.is_relative_to(home)


def _hide(folder: Path) -> Path:
    hidden = folder.with_name(f".tmp-{folder.name}-old")
    remove(hidden)
    os.replace(folder, hidden)
    return hidden
