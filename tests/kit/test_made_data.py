"""`made`: data that a function of the recipe writes once, before they are read."""

import json

import pytest
from conftest import ROOT, user_error

from mvp_engine.config.compose import compose
from mvp_engine.kit import make_data

DATA = """
from pathlib import Path

VERSION = 3

def build(folder: Path, rows: int, word: str = "a") -> None:
    (folder / "rows.jsonl").write_text(word * rows)
"""


@pytest.fixture
def made(workspace):
    (workspace / "data.py").write_text(DATA)
    return {
        "by": str(workspace / "data.py") + ":build",
        "folder": str(workspace / "out"),
        "rows": 2,
    }


def test_made_data_are_built_once_with_the_values_of_the_section(made, workspace):
    make_data(made)
    file = workspace / "out/rows.jsonl"
    assert file.read_text() == "aa"
    assert json.loads((workspace / "out/made.json").read_text()) == {"rows": 2, "version": 3}
    file.write_text("kept")
    make_data(made)
    assert file.read_text() == "kept"


def test_made_data_of_other_values_or_another_version_are_refused(made, workspace):
    make_data(made)
    with user_error("was made with"):
        make_data({**made, "rows": 3})
    (workspace / "data2.py").write_text(DATA.replace("VERSION = 3", "VERSION = 4"))
    with user_error("was made with"):
        make_data({**made, "by": str(workspace / "data2.py") + ":build"})


@pytest.mark.parametrize(
    "change, text",
    [
        ({"row": 2}, "unexpected keyword argument 'row'"),
        ({"by": "data.py:builds"}, "no function 'builds'"),
        ({"by": "other.py:build"}, "there is no file"),
        ({"by": "no_such_module:build"}, "no module"),
    ],
)
def test_made_data_with_a_wrong_key_or_function_name_it(made, change, text):
    with user_error(text):
        make_data({**made, **change})


def test_made_data_without_folder_say_what_is_needed(made):
    del made["folder"]
    with user_error("give `by`"):
        make_data(made)


def test_made_data_of_a_config_name_the_function_by_an_absolute_file(workspace):
    """A run is resumed from any folder: its config.yaml has the file."""
    config = compose(ROOT / "recipes/grid_rl/configs/sft.yaml").config
    assert config.made["by"] == f"{ROOT}/recipes/grid_rl/data.py:build"
