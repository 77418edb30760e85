"""The symlink that the config key `export` names."""

from __future__ import annotations

import os
from pathlib import Path

from mvp_engine.errors import UserError


def export_link(export: str | None) -> Path | None:
    """The path of the link, after a check that it can be written."""
    if export is None:
        return None
    link = Path(export).expanduser()
    if link.exists() and not link.is_symlink():
        raise UserError(
            f"export={link} exists and is no link of an earlier run: set export to another path"
        )
    parent = next(folder for folder in link.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(
            f"export={link}: nothing can be written into {parent}. Set export to another path"
        )
    return link
