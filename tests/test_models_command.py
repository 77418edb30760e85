"""`mvp doctor --models`: what each model type supports, from the shipped files, without torch."""

import subprocess
import sys

from conftest import ROOT
from run_files import printed_json

from mvp_engine import cli
from mvp_engine.imports import import_file
from mvp_engine.tools.models import COLUMNS, KINDS, read_models

NO_REASONS = (
    "Error",
    "Exception",
    "object has no attribute",
    "Traceback",
    "not tried",
    "its code fails on them",
    "[(",
)


def test_models_entries_have_all_columns_and_readable_reasons():
    models = read_models()
    assert models["llama"]["packed"] is True
    for name, entry in models.items():
        assert entry["kind"] in KINDS, name
        assert set(entry) - {"note"} == {"name", "kind", *COLUMNS}, name
        for column in COLUMNS:
            reason = entry[column]
            if reason is True:
                continue
            assert isinstance(reason, str), (name, column)
            assert reason, (name, column)
            assert "\n" not in reason, (name, column)
            assert not any(word in reason for word in NO_REASONS), (name, reason)


def test_models_command_prints_table_entry_and_json(capsys):
    assert cli.main(["doctor", "--models"]) == 0
    assert "llama" in capsys.readouterr().out
    assert cli.main(["doctor", "--models", "llama"]) == 0
    printed = capsys.readouterr().out
    assert "llama (text)" in printed
    assert "tensor parallel  yes" in printed
    assert cli.main(["doctor", "--models", "bert", "--json"]) == 0
    (entry,) = printed_json(capsys)
    assert entry == read_models()["bert"]


def test_models_command_unknown_name_suggests_a_similar_one(
    capsys,
):
    assert cli.main(["doctor", "--models", "lama"]) == 2
    assert "no model type 'lama'" in (printed := capsys.readouterr().err)
    assert "Did you mean llama?" in printed


def test_models_command_imports_no_torch():
    code = "import sys; from mvp_engine import cli; cli.main(['doctor', '--models', 'llama']); "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)


def test_docs_matrix_equals_the_shipped_files():
    page = (ROOT / "docs" / "models.md").read_text()
    markdown_table = import_file(ROOT / "scripts" / "model_matrix.py").markdown_table
    expected = f"<!-- matrix -->\n{markdown_table(read_models())}\n<!-- /matrix -->"
    assert expected in page, "run python scripts/model_matrix.py --page"
