"""`mvp recipe --skills`: copy the skills to where coding agents look for them.

`.agents/skills` holds the copies, `.claude/skills` has links to them. Paths in the texts are those of a checkout; in a
copy they point into the installed package.
"""

from __future__ import annotations

import filecmp
import re
import shutil
import tempfile
from pathlib import Path

from mvp_engine.config.compose import PACKAGE, shipped_folder
from mvp_engine.errors import UserError, count
from mvp_engine.files import atomic_path, atomic_symlink, remove

FOLDER = Path(".agents/skills")
LINKS = Path(".claude/skills")


def install_skills(project: str, force: bool) -> None:
    root = Path(project).expanduser().absolute()
    if not root.is_dir():
        raise UserError(f"--dir {project}: no such folder")
    source = shipped_folder("skills")
    if (root / FOLDER).resolve() == source.resolve():
        print(f"{root / FOLDER} is a link to {source}: nothing to install")
        return
    try:
        changed = _install(source, root, force)
    except OSError as error:
        raise UserError(
            f"cannot write {error.filename or root}: {error.strerror}. Choose another folder with --dir"
        ) from None
    print(f"{root / FOLDER}: {count(len(changed), 'skill')} written; links in {root / LINKS}")
    for name in changed:
        print(f"  {name}")


def _install(source: Path, root: Path, force: bool) -> list[str]:
    """Write copies that are missing or, with `force`, that differ; returns their names."""
    names = sorted(file.parent.name for file in source.glob("*/SKILL.md"))
    with tempfile.TemporaryDirectory() as folder:
        copies = Path(folder)
        for name in names:
            _copy_skill(source / name, copies / name, root)
        changed = [name for name in names if _differs(copies / name, root / FOLDER / name)]
        taken = [name for name in changed if (root / FOLDER / name).exists()]
        taken += [name for name in names if not _may_link(root, name)]
        if taken and not force:
            raise UserError(
                f"{root} has other skills of these names, or older versions: {', '.join(taken)}. "
                "--force replaces them"
            )
        for name in changed:
            (root / FOLDER).mkdir(parents=True, exist_ok=True)
            with atomic_path(root / FOLDER / name, replace_folder=True) as copy:
                shutil.copytree(copies / name, copy)
    for name in names:
        _link(root, name)
    return changed


def _copy_skill(source: Path, copy: Path, root: Path) -> None:
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    file = copy / "SKILL.md"
    text = file.read_text(encoding="utf-8")
    text = text.replace(".venv/bin/python", "python").replace(".venv/bin/mvp", "mvp")
    text = re.sub(r"(?<![\w/.])skills/", f"{FOLDER}/", text)
    text = re.sub(r"(?<![\w/.])docs/(?=\w)", f"{shipped_folder('docs')}/", text)
    text = re.sub(r"(?<![\w/.])mvp_engine/(?=\w)", f"{PACKAGE}/", text)
    file.write_text(text, encoding="utf-8")


def _differs(one: Path, two: Path) -> bool:
    """Whether two skill folders, which have no folders inside, differ."""
    if not two.is_dir():
        return True
    compared = filecmp.dircmp(one, two, ignore=["__pycache__"])
    _, unequal, unreadable = filecmp.cmpfiles(one, two, compared.common_files, shallow=False)
    return bool(compared.left_only or compared.right_only or unequal or unreadable)


def _may_link(root: Path, name: str) -> bool:
    """Whether the link is missing or ours already."""
    link = root / LINKS / name
    exists = link.exists() or link.is_symlink()
    return not exists or link.resolve() == (root / FOLDER / name).resolve()


def _link(root: Path, name: str) -> None:
    link = root / LINKS / name
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.resolve() == (root / FOLDER / name).resolve():
        return
    remove(link)
    atomic_symlink(link, Path("../..") / FOLDER / name)
