"""Tables and lines: csv, tsv and txt files give rows by index, with the line of the file."""

import json
import pickle

import pytest

from mvp_engine.kit.data.read.row_types import BadRow
from mvp_engine.kit.data.read.rows import read_row
from mvp_engine.kit.data.read.sources import open_source


def test_csv_file_rows_keep_line_numbers_and_empty_cells_are_absent(tmp_path):
    (tmp_path / "a.csv").write_bytes(
        '\ufeffprompt,completion,n\r\n"a\r\n,b",c,\r\n\r\nd,e\r\nf,g,1\r\n'.encode()
    )
    source = open_source(tmp_path / "a.csv")
    assert source[0] == {"prompt": "a\r\n,b", "completion": "c", "n": None}
    assert [source.where(i) for i in range(3)] == ["a.csv:2", "a.csv:5", "a.csv:6"]
    with pytest.raises(BadRow, match="2 cells, but the header has 3"):
        source[1]
    (tmp_path / "a.tsv").write_text("text\tn\nx,y\t1\n")
    assert pickle.loads(pickle.dumps(open_source(tmp_path / "a.tsv")))[0] == {
        "text": "x,y",
        "n": "1",
    }


def test_text_file_gives_one_row_per_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one \r\n\n{two}\n\xff")
    source = open_source(tmp_path / "a.txt")
    assert [source[i] for i in range(2)] == [{"text": "one "}, {"text": "{two}"}]
    assert source.where(1) == "a.txt:3"
    with pytest.raises(BadRow, match="not UTF-8"):
        source[2]


def test_open_source_json_list_in_a_jsonl_file_is_read_as_a_list(tmp_path):
    rows = [{"text": "a"}, {"text": "b"}]
    (tmp_path / "a.jsonl").write_text(json.dumps(rows, indent=1))
    assert list(open_source(tmp_path / "a.jsonl")) == rows


def test_csv_file_messages_may_be_a_json_string(tmp_path):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    cell = json.dumps(messages).replace('"', '""')
    (tmp_path / "a.csv").write_text(f'id,messages\n1,"{cell}"\n2,"[{{\'role\'"\n')
    source = open_source(tmp_path / "a.csv")
    assert [message.text for message in read_row(source[0]).messages] == ["q", "a"]
    with pytest.raises(BadRow, match="messages is a string that is not JSON"):
        read_row(source[1])
