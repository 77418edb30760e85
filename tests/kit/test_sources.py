"""Sources: every file kind gives rows by index in any process; broken files are user errors; mixtures are exact."""

import io
import json
import multiprocessing
import os
import pickle
import shutil
import sys
import tarfile
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import user_error
from run_files import write_json

from mvp_engine.errors import UserError
from mvp_engine.kit.data.pack.packs import Mixture
from mvp_engine.kit.data.read.row_types import BadRow, RowFormat
from mvp_engine.kit.data.read.rows import read_row
from mvp_engine.kit.data.read.sources import open_source
from mvp_engine.kit.data.settings import DataSource, resolve_source

ROWS = [{"prompt": f"Is {i} even?", "completion": "yes" if i % 2 == 0 else "nö"} for i in range(10)]


def jsonl(file, rows=ROWS):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return file


def parquet(file):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(
        pa.Table.from_pylist(ROWS), file, row_group_size=3, compression="none", use_dictionary=False
    )
    return file


def arrow(file, stream=False):
    pa = pytest.importorskip("pyarrow")
    table = pa.Table.from_pylist(ROWS)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(file), table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    return file


def on_disk(folder):
    """As `Dataset.save_to_disk` writes it: Arrow streams, and a state.json with their names."""
    folder.mkdir()
    arrow(folder / "data-00000-of-00002.arrow", stream=True)
    arrow(folder / "data-00001-of-00002.arrow", stream=True)
    files = [{"filename": file.name} for file in sorted(folder.glob("*.arrow"))]
    write_json(folder / "state.json", {"_data_files": files})
    (folder / "dataset_info.json").write_text("{}")
    return folder


def tar(file, members):
    with tarfile.open(file, "w") as out:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    return file


def shard(file):
    return tar(file, {f"{i:03}.json": json.dumps(row).encode() for i, row in enumerate(ROWS)})


KINDS = {
    "a.jsonl": (jsonl, "a.jsonl:4"),
    "lines.json": (jsonl, "lines.json:4"),
    "a.json": (lambda file: file.write_text(json.dumps(ROWS, indent=1)) and file, "a.json[3]"),
    "a.parquet": (parquet, "a.parquet[3]"),
    "a.arrow": (arrow, "a.arrow[3]"),
    "stream.arrow": (lambda file: arrow(file, stream=True), "stream.arrow[3]"),
    "saved": (on_disk, "saved/data-00000-of-00002.arrow[3]"),
    "a.tar": (shard, "a.tar:003"),
    "no_suffix": (parquet, "no_suffix[3]"),
}


@pytest.fixture(params=KINDS)
def made(request, tmp_path):
    make, where = KINDS[request.param]
    return make(tmp_path / request.param), where


def test_source_every_file_kind_gives_rows_in_any_order_with_their_places(
    made,
):
    path, where = made
    source = open_source(path)
    rows = ROWS * 2 if path.name == "saved" else ROWS
    assert len(source) == len(rows)
    assert [source[index] for index in reversed(range(len(source)))] == rows[::-1]
    assert list(source) == rows  # iteration ends with an IndexError, as of sequences
    assert source.where(3) == where
    assert source.root == (path if path.is_dir() else path.parent)


def test_source_pickles_small_and_reads_in_other_processes(made):
    source = open_source(made[0])
    source[1]  # opens its files
    sent = pickle.dumps(source)
    assert len(sent) < 3000
    assert list(pickle.loads(sent)) == list(source)
    with multiprocessing.get_context("fork").Pool(
        2
    ) as pool:  # pyarrow and file positions are shared with the parent
        assert pool.map(source.__getitem__, range(len(source)), chunksize=1) == list(source)


def test_source_fingerprint_follows_the_content_not_the_path(made, tmp_path):
    path, _ = made
    before = open_source(path).fingerprint
    moved = tmp_path / "elsewhere" / path.name
    (shutil.copytree if path.is_dir() else shutil.copy)(
        path, moved if path.is_dir() else jsonl(moved)
    )
    os.utime(moved, (0, 0))
    assert open_source(moved).fingerprint == before
    file = sorted(moved.glob("*.arrow"))[-1] if moved.is_dir() else moved
    data = file.read_bytes()
    at = data.rindex(b"Is 7 even?")
    file.write_bytes(data[:at] + b"Is 7 odd??" + data[at + 10 :])
    assert open_source(moved).fingerprint != before


def bad_reasons(rows):
    """Why each of some rows is bad; each is a function."""
    reasons = []
    for row in rows:
        with pytest.raises(BadRow) as caught:
            row()
        reasons.append(caught.value.reason)
    return reasons


def test_open_source_reads_what_datasets_saves(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    images = [{"bytes": b"x", "path": None}, {"bytes": b"y", "path": "b.png"}]
    data = datasets.Dataset.from_dict({"image": images, "text": ["a", "b"]}, features=features)
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "both")
    with user_error(r"both/test, .*both/train"):
        open_source(tmp_path / "both")
    source = open_source(tmp_path / "both" / "train")
    assert [read_row(row).media()[0].value["path"] for row in source] == [None, "b.png"]


def test_json_lines_blank_lines_keep_line_numbers_and_broken_lines_are_bad_rows(tmp_path):
    file = tmp_path / "a.jsonl"
    lines = [b'\xef\xbb\xbf{"text": "a"}\r', b"\r", b"", b'{"text": "b"']
    lines += [b"[1]", b"\xff", b"[" * 99_999, b'{"text": "c"}']
    file.write_bytes(b"\n".join(lines))
    source = open_source(file)
    assert len(source) == 6
    assert (source[0], source[5]) == ({"text": "a"}, {"text": "c"})
    places = [source.where(index) for index in range(6)]
    assert places == [f"a.jsonl:{line}" for line in (1, 4, 5, 6, 7, 8)]
    reasons = bad_reasons(partial(source.__getitem__, index) for index in range(1, 5))
    assert reasons == ["bad_json", "wrong_type", "bad_json", "bad_json"]


def test_json_lines_across_scan_chunks_are_found(tmp_path):
    rows = [{"text": "x" * (1 << 20), "n": n} for n in range(40)]  # past two chunks of 16 MiB
    source = open_source(jsonl(tmp_path / "a.jsonl", rows))
    assert [row["n"] for row in source] == list(range(40))


def test_tar_shard_groups_members_by_name_in_any_order(tmp_path):
    long = "a/" + "long" * 50  # needs an extended header
    texts = {"b/1.txt": b"A cat\n", f"{long}.TXT": b"Far"}
    texts["b/2.json"] = b'{"prompt": "<image><image>?", "completion": "2"}'
    media = {"b/1.jpg": b"cat", "b/2.0.png": b"x", "b/2.1.png": b"y", f"{long}.wav": b"w"}
    others = {"b/._1.jpg": b"", "b/1.cls": b"3"}
    source = open_source(tar(tmp_path / "a.tar", {**texts, **media, **others}))
    by_place = {source.where(index): source[index] for index in range(3)}
    two = {"prompt": "<image><image>?", "completion": "2", "images": [b"x", b"y"]}
    assert by_place == {
        "a.tar:b/1": {"text": "A cat", "images": [b"cat"], "cls": b"3"},
        "a.tar:b/2": two,
        f"a.tar:{long}": {"text": "Far", "audios": [b"w"]},
    }
    assert [part.value for part in read_row(two).media()] == [b"x", b"y"]
    messages = read_row(by_place["a.tar:b/1"]).messages
    assert [(m.role, m.text) for m in messages] == [("user", ""), ("assistant", "A cat")]


def test_tar_shard_bad_members_are_bad_rows(tmp_path):
    members = {"1.json": b"[]", "2.json": b"{", "3.txt": b"\xff", "4.jpg": b"x"}
    source = open_source(tar(tmp_path / "a.tar", members))
    reasons = bad_reasons(lambda index=index: read_row(source[index]) for index in range(4))
    assert reasons == ["wrong_type", "bad_json", "bad_text", "unknown_format"]


def test_tar_shard_media_members_replace_the_rows_media_names(tmp_path):
    turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "A"}]
    row = json.dumps({"image": "1.jpg", "conversations": turns}).encode()
    source = open_source(tar(tmp_path / "a.tar", {"1.json": row, "1.jpg": b"x"}))
    assert [part.value for part in read_row(source[0]).media()] == [b"x"]


def test_media_folder_reads_captions_or_metadata_jsonl(tmp_path):
    def write(**files):
        for name, data in files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data if isinstance(data, bytes) else data.encode())
        return open_source(folder)

    folder = tmp_path / "a"
    dog = {"text": "A dog", "images": ["2.PNG"]}
    media = {"cats/1.v2.jpg": b"c", "2.PNG": b"d", "3.mp4": b"v"}
    captions = {"cats/1.v2.txt": "A cat", "2.txt": "A dog"}
    others = {"readme.txt": "no row", "notes.md": "", ".a.jpg": "", ".git/1.jpg": ""}
    others["4.json"] = '{"text": "alone"}'
    source = write(**media, **captions, **others)
    # The video has no caption, and is a bad row in `read_row`.
    cat = {"text": "A cat", "images": ["cats/1.v2.jpg"]}
    assert list(source) == [dog, {"videos": ["3.mp4"]}, cat]
    assert source.where(2) == "cats/1.v2.jpg"
    assert write(**{"2.txt": "A cow"}).fingerprint != source.fingerprint

    rows = [{"file_name": "2.PNG", "text": "A dog"}, {"file_name": "2.exe"}, {"text": "t"}]
    jsonl(folder / "metadata.jsonl", rows)
    source = open_source(folder)
    assert (source[0], source[2]) == (dog, {"text": "t"})
    assert source.where(2) == "a/metadata.jsonl:3"
    assert bad_reasons([partial(source.__getitem__, 1)]) == ["bad_media"]
    assert open_source(folder / "metadata.jsonl")[0] == dog
    source = write(**{"metadata.csv": "file_name,text\n2.PNG,A cow\n"})
    assert list(source) == [{"text": "A cow", "images": ["2.PNG"]}]
    for name in ("b.txt", "a.txt"):
        jsonl(tmp_path / "texts" / name, []).write_text(f"This is {name}\n")
    texts = [{"text": "This is a.txt"}, {"text": "This is b.txt"}]
    assert list(open_source(tmp_path / "texts")) == texts


def test_open_source_globs_and_lists_are_one_source_with_one_root(tmp_path):
    first = jsonl(tmp_path / "x" / "b.jsonl", ROWS[:3])
    second = jsonl(tmp_path / "y" / "a.jsonl", ROWS[3:])
    lists = [first, second], [str(first), f"{tmp_path}/y/*"]
    for path in (str(tmp_path / "*" / "*.jsonl"), f"{tmp_path}/**/*.jsonl", *lists):
        source = open_source(path)
        assert list(source) == ROWS
        assert [source.where(2), source.where(3)] == ["x/b.jsonl:3", "y/a.jsonl:1"]
        assert source.root == tmp_path
    assert open_source([second, first])[0] == ROWS[3]
    assert open_source(first, root=tmp_path).root == tmp_path
    assert len(open_source(jsonl(tmp_path / "odd[1].jsonl"))) == len(ROWS)


def test_open_source_several_folders_have_media_paths_from_the_common_root(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jpg").write_bytes(b"x")
        (tmp_path / name / "1.txt").write_text(name)
    jsonl(tmp_path / "b" / "metadata.jsonl", [{"file_name": "1.jpg", "text": "b"}])
    source = open_source([tmp_path / "a", tmp_path / "b"])
    assert source.root == tmp_path
    assert [row["images"] for row in source] == [["a/1.jpg"], ["b/1.jpg"]]


@pytest.mark.parametrize(
    "name, data, words",
    [
        ("gone.jsonl", None, "nothing at"),
        ("*.jsonl", None, "nothing at"),
        ("empty.jsonl", b"", "is empty"),
        ("blank.jsonl", b"\n\r\n", "no rows"),
        ("none.json", b"[]", "no rows"),
        ("lines.jsonl", b'{\n "text": "t"\n}\n', "several lines"),
        ("wide.jsonl", '{"text": "t"}'.encode("utf-16"), "is UTF-16"),
        ("half.json", b'[{"text": "a"}', "not a JSON list"),
        ("number.json", b"3", "not a JSON list"),
        ("a.jsonl.gz", b"\x1f\x8b00", "unpack it"),
        ("a.tar", b"x" * 2000, "not a complete tar"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1", "cannot be read"),
        ("a.arrow", b"nothing of the kind", "cannot be read"),
        ("a.csv", b"a,b\n", "no rows"),
        ("twice.csv", b"a,a\n1,2\n", "a name of its own"),
        ("a.pdf", b"%PDF", "none of jsonl"),
    ],
)
def test_open_source_unusable_file_is_a_user_error_with_its_name(tmp_path, name, data, words):
    if name.endswith((".parquet", ".arrow")):
        pytest.importorskip("pyarrow")
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with user_error(words) as caught:
        open_source(tmp_path / name)
    assert name in str(caught.value)


def test_open_source_empty_folder_empty_list_and_duplicates_are_user_errors(tmp_path, monkeypatch):
    def refused(words, source):
        with user_error(words):
            open_source(source)

    folder = tmp_path / "a"
    folder.mkdir()
    refused("no rows", folder)
    file = jsonl(folder / "train.jsonl")
    (folder / "1.jpg").write_bytes(b"x")
    refused(r"holds train\.jsonl", folder)
    refused("named twice", [file, str(folder / "*.jsonl")])
    refused("needs a file", [])
    (folder / "state.json").write_text("{}")
    refused("not what `datasets` writes", folder)
    whole = tar(tmp_path / "a.tar", {"1.jpg": b"x" * 5000, "2.jpg": b"y" * 5000}).read_bytes()
    (tmp_path / "b.tar").write_bytes(whole[:7000])
    refused(r"b\.tar is not a complete tar file", tmp_path / "b.tar")
    file = parquet(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(r"a\.parquet needs the package pyarrow: pip install 'mvp-engine\[data\]'", file)


@pytest.fixture
def three(tmp_path):
    sizes = {"a": 10, "b": 7, "c": 1}
    return [
        open_source(jsonl(tmp_path / f"{name}.jsonl", [{"n": n} for n in range(size)]))
        for name, size in sizes.items()
    ]


def counts(order):
    return Counter(map(tuple, order.tolist()))


def test_mixture_repeats_give_exact_counts(three):
    mixture = Mixture(list(zip("abc", three, [1, 2, 3.0], strict=True)))
    assert (mixture.names, mixture.counts, len(mixture)) == (["a", "b", "c"], [10, 14, 3], 27)
    sources = enumerate([(10, 1), (7, 2), (1, 3)])
    expected = {(s, row): n for s, (size, n) in sources for row in range(size)}
    for epoch in range(3):
        assert counts(mixture.order(5, epoch)) == expected


def test_mixture_fractions_rotate_through_the_source_over_epochs(three):
    mixture = Mixture([("a", three[0], 0.5), ("b", three[1], 1.5)])
    assert mixture.counts == [5, 10]
    epochs = [counts(mixture.order(0, epoch)) for epoch in range(14)]
    assert all(epochs[e].total() == 15 for e in range(14))
    halves = [{row for source, row in epoch if source == 0} for epoch in epochs]
    assert halves[0] | halves[1] == set(range(10))
    assert halves[0] != halves[2]  # another half in each epoch
    seen = sum(epochs, Counter())
    assert {seen[0, row] for row in range(10)} == {7}
    assert {seen[1, row] for row in range(7)} == {20}


def test_mixture_weights_divide_an_epoch_of_all_rows(three):
    mixture = Mixture([("a", three[0], 1), ("b", three[1], 2), ("c", three[2], 1)], by="weight")
    assert mixture.counts == [4, 9, 4]  # of 18 by 1 : 2 : 1; halves are rounded to even
    seen = counts(mixture.order(0, 0))
    assert seen[2, 0] == 4
    assert {seen[1, row] for row in range(7)} == {1, 2}  # each once, and two of them twice
    same = Mixture([("a", three[0], 0.1), ("b", three[1], 0.2), ("c", three[2], 0.1)], by="weight")
    assert (same.order(3, 4) == mixture.order(3, 4)).all()


def test_mixture_order_depends_on_seed_and_epoch_only(three):
    parts = list(zip("abc", three, [1, 2, 3], strict=True))
    order = Mixture(parts).order(1, 2)
    assert (pickle.loads(pickle.dumps(Mixture(parts))).order(1, 2) == order).all()
    assert order.shape == (27, 2)
    for other in (Mixture(parts).order(1, 3), Mixture(parts).order(2, 2)):
        assert (other[:, 0] != order[:, 0]).any()
        assert counts(other) == counts(order)
    assert (order[:, 0] != np.sort(order[:, 0])).any()
    plain = Mixture(parts).order(1, 2, shuffle=False).tolist()
    assert plain == [*([0, n] for n in range(10)), *([1, n % 7] for n in range(14)), *[[2, 0]] * 3]


@pytest.mark.parametrize("share", [0, -1, float("nan"), float("inf"), "2", None, 0.01])
def test_mixture_invalid_share_is_a_user_error(three, share):
    for by in ("repeats", "weight"):
        with pytest.raises(UserError):
            Mixture([("a", three[0], share), ("b", three[1], 1)], by=by)


def test_mixture_without_distinct_names_or_known_mode_is_a_user_error(three):
    one = ("a", three[0], 1)
    for parts, by in (([], "repeats"), ([one] * 2, "repeats"), ([one], "size")):
        with user_error("mixture needs"):
            Mixture(parts, by=by)


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_json_object_with_a_key_twice_is_a_bad_row_and_the_others_are_read(tmp_path, suffix):
    first = '{"prompt": "a", "completion": "b", "prompt": "c"}'
    lines = [first, json.dumps(ROWS[0]), '{"text": "a", "x": [{"y": {"z": 1, "z": 1}}]}']
    file = tmp_path / f"rows.{suffix}"
    file.write_text("\n".join(lines) if suffix == "jsonl" else f"[{', '.join(lines)}]")
    source = open_source(file)
    assert source[1] == ROWS[0]
    for index, key in ((0, "prompt"), (2, "z")) * 2:
        with pytest.raises(BadRow, match=f"duplicate_key: an object has the key '{key}' twice"):
            source[index]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.txt"])
def test_line_that_must_have_too_much_text_is_bad_before_it_is_parsed(tmp_path, name):
    media = json.dumps({"text": "short", "image": "data:image/png;base64," + "A" * 200})
    long = "x" * 200 + "{"  # not JSON
    (tmp_path / name).write_text(f"{long}\n{media}\n")
    source = open_source(tmp_path / name, max_text=10)
    with pytest.raises(BadRow, match="too_long: the line of 201 bytes; 10 characters are allowed"):
        source[0]
    if name == "rows.jsonl":
        assert read_row(source[1], RowFormat(max_text=10)).text is None


def test_row_with_more_text_than_the_limit_is_bad_before_it_is_tokenized():
    pair = {"prompt": "q", "chosen": "a" * 5, "rejected": "b" * 5}
    tools = {"prompt": "q", "completion": "a", "tools": [{"name": "f" * 9}]}
    for row, size in (({"text": "x" * 11}, 11), (pair, 12), (tools, 11)):
        words = f"too_long: text of {size} characters; 10 characters are allowed"
        with pytest.raises(BadRow, match=words):
            read_row(row, RowFormat(max_text=10))
        read_row(row, RowFormat(max_text=size))
    with pytest.raises(BadRow, match=r"too_long: text of 4,000,001 characters; 4,000,000"):
        read_row({"text": "x" * 4_000_001})


def test_local_folder_in_the_layout_of_the_hub_is_read_by_config_and_split(tmp_path):
    def sizes(path, **source):
        found = resolve_source(DataSource(path=str(path), **source))
        assert found.label == source.get("name", Path(path).name.rpartition(":")[2])
        return len(open_source(found.path, found.root))

    def card(folder, files):
        text = f"---\nconfigs:\n- config_name: default\n  data_files: {files}\n---\n"
        (folder / "README.md").write_text(text)

    folder, lines = tmp_path / "set", tmp_path / "lines"
    (folder / "data").mkdir(parents=True)
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        parquet(folder / "data" / f"{name}.parquet")
    assert sizes(folder) == 20
    assert sizes(f"{folder}:test") == 10
    assert sizes(f"{folder}:test", split="eval", name="held_out") == 10
    with user_error(r"no split eval: name one of its splits, .*set:test, .*set:train"):
        sizes(folder, split="eval")
    card(folder, "[{split: train, path: data/test-*}]")
    assert sizes(folder) == 10
    jsonl(lines / "all.jsonl")
    with user_error("name such files one by one"):
        sizes(lines)
    card(lines, "all.jsonl")
    assert sizes(lines) == 10
