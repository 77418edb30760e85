"""The output of a training in a Jupyter notebook. `make test-harness` has the packages."""

import pytest
from conftest import TINY

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

CELL = """
import mvp_engine
words = ["log.backends=[terminal,jsonl]", "log.interval=5", "train.max_steps=40", "device=cpu"]
run = mvp_engine.train({config!r}, *words, output_dir={folder!r})
"""


@pytest.mark.slow
def test_cell_of_a_training_has_one_line_that_is_written_again(tmp_path):
    updates = []

    class Client(nbclient.NotebookClient):
        def process_message(self, msg, cell, cell_index):
            if msg["msg_type"] == "update_display_data":
                updates.append(msg["content"]["data"]["text/plain"])
            return super().process_message(msg, cell, cell_index)

    source = CELL.format(config=str(TINY), folder=str(tmp_path))
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    Client(book, timeout=120, kernel_name="python3").execute()
    texts = [str(one.get("text") or one["data"]["text/plain"]) for one in book.cells[0].outputs]
    assert updates
    assert updates[-1].startswith("step 40/40")
    assert "loss" in updates[-1]
    assert updates[-1] in texts  # in its place, once
    assert sum("step 40/40" in text for text in texts) == 1
    assert "finished at step 40" in "".join(texts)
