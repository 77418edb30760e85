"""Skills are where coding agents look for them: links in the repository, `mvp recipe --skills` elsewhere."""

import re

import pytest
from conftest import ROOT, mvp

from mvp_engine.cli import main
from mvp_engine.errors import EXIT_USER_ERROR

NAMES = sorted(file.parent.name for file in (ROOT / "skills").glob("*/SKILL.md"))
FOLDERS = [".agents/skills", ".claude/skills"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_skills_of_the_repository_are_linked_where_agents_look(folder, capsys):
    assert (ROOT / folder).resolve() == ROOT / "skills"
    assert mvp(f"recipe --skills --dir {ROOT}") == 0
    assert "nothing to install" in capsys.readouterr().out


def test_skills_install_texts_name_paths_that_exist(tmp_path, capsys):
    assert mvp(f"recipe --skills --dir {tmp_path}") == 0
    assert f"{len(NAMES)} skills written" in capsys.readouterr().out
    for folder in FOLDERS:
        assert sorted(entry.name for entry in (tmp_path / folder).iterdir()) == NAMES
        for name in NAMES:
            text = (tmp_path / folder / name / "SKILL.md").read_text()
            assert f"name: {name}\n" in text
            assert ".venv" not in text
            paths = re.findall(rf"{ROOT}/[\w./-]*\w|\.agents/skills/[\w./-]*\w", text)
            assert len(paths) > 1
            assert all((tmp_path / path).exists() for path in paths), paths


def test_skills_install_keeps_changed_skills_without_force(tmp_path, capsys):
    install = f"recipe --skills --dir {tmp_path}".split()
    (tmp_path / ".claude/skills/change-the-loss").mkdir(parents=True)
    (tmp_path / ".claude/skills/change-the-loss/SKILL.md").write_text("mine")
    assert main(install) == EXIT_USER_ERROR
    assert (
        "other skills of these names, or older versions: change-the-loss. --force"
        in capsys.readouterr().err
    )
    assert [entry.name for entry in tmp_path.iterdir()] == [".claude"]
    assert main([*install, "--force"]) == 0
    mine = tmp_path / ".agents/skills/mfu/SKILL.md"
    written = mine.read_text()
    assert main(install) == 0
    mine.write_text("mine")
    assert main(install) == EXIT_USER_ERROR
    assert mine.read_text() == "mine"
    assert main([*install, "--force"]) == 0
    assert mine.read_text() == written
    assert "1 skill written" in capsys.readouterr().out


@pytest.mark.parametrize(
    "folder, expected", [("/proc", "cannot write /proc"), ("/nowhere", "no such folder")]
)
def test_skills_install_unusable_folder_is_a_user_error(folder, expected, capsys):
    assert mvp(f"recipe --skills --dir {folder}") == EXIT_USER_ERROR
    assert expected in capsys.readouterr().err
