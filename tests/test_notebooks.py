"""The notebooks of docs/tutorials run: their code in this process with few steps; as notebooks in the campaign."""

import json
import shutil

import pytest
from conftest import ROOT
from tiny_vlm import saved_model

NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
FEW = {"STEPS": "2", "RL_STEPS": "2", "ROWS": "60", "DIGITS": "60"}


@pytest.fixture
def few_steps(workspace, monkeypatch):
    """The current folder, and the environment that makes the notebooks short."""
    for name, value in {**FEW, "MODEL": str(saved_model(workspace))}.items():
        monkeypatch.setenv(name, value)
    return workspace


def code_of(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_notebooks_have_no_outputs():
    assert len(NOTEBOOKS) == 3
    for notebook in NOTEBOOKS:
        for cell in json.loads(notebook.read_text())["cells"]:
            assert not cell.get("outputs"), notebook.name
            assert cell.get("execution_count") is None, notebook.name


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda one: one.stem)
def test_code_of_a_notebook_runs(notebook, few_steps):
    names = {"__name__": "notebook"}
    for code in code_of(notebook):
        exec(compile(code, notebook.name, "exec"), names)


@pytest.mark.campaign(only=True)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda one: one.stem)
def test_notebook_runs_in_a_kernel(notebook, few_steps):
    nbclient = pytest.importorskip("nbclient")  # make test-notebooks has it
    nbformat = pytest.importorskip("nbformat")
    shutil.copy(notebook, few_steps)
    node = nbformat.read(few_steps / notebook.name, as_version=4)
    nbclient.NotebookClient(
        node, timeout=240, resources={"metadata": {"path": str(few_steps)}}
    ).execute()
    assert all(cell.get("execution_count") for cell in node.cells if cell.cell_type == "code")
