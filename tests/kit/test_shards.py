"""Shards: each byte is read once by all ranks together, each row comes once, and damage costs only what it hits."""

import gzip
import io
import json
import random
import shlex
import tarfile
from collections import Counter
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest
from conftest import mvp, read_metrics, user_error
from run_files import json_lines
from templates.tiny import tokenizer
from test_kit import made, write
from test_prepare import prepared
from test_streams import stream_of

from mvp_engine.kit import MLLMData, MLLMDataKit
from mvp_engine.kit.data import kit as data_kit
from mvp_engine.kit.data.read import shards
from mvp_engine.kit.data.read.row_types import BadRow
from mvp_engine.kit.data.read.shards import Stream

SHARDS, ROWS = 200, 12  # of each
MDS = Path(__file__).parent / "mds"


@pytest.fixture(autouse=True)
def small_window(monkeypatch):
    monkeypatch.setattr(data_kit, "STREAM_WINDOW", 4)


def add(tar, name, data):
    about = tarfile.TarInfo(name)
    about.size = len(data)
    tar.addfile(about, io.BytesIO(data))


def write_shard(file, first, rows=ROWS, mode="w"):
    """Rows whose number is in the text; a second member makes them larger than their header."""
    with tarfile.open(file, mode) as tar:
        for i in range(first, first + rows):
            text = f"{i} " + "word " * (i * 7 % 25)
            add(tar, f"{i}.json", json.dumps({"text": text, "number": i}).encode())
            add(tar, f"{i}.other", random.Random(i).randbytes(3000))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(SHARDS):
        write_shard(folder / f"{shard:03d}.tar", shard * ROWS)
    return folder


@pytest.fixture
def read_bytes(monkeypatch):
    """The bytes that are read from files, as a list of their numbers."""
    found = []

    class Counted(io.FileIO):
        def readinto(self, buffer):
            size = super().readinto(buffer)
            found.append(size)
            return size

        def read(self, size=-1):
            data = super().read(size)
            found.append(len(data))
            return data

        def readall(self):
            data = super().readall()
            found.append(len(data))
            return data

    monkeypatch.setattr(
        shards, "raw_file", lambda path, buffer=1 << 20: io.BufferedReader(Counted(path), buffer)
    )
    return found


def kit(path, **settings):
    given = {"sources": [stream_of(path)], "stream_lanes": 2, "fields": {"number": "int"}}
    return made(Path(path), tokenizer("zephyr"), **{**given, **settings})


def loaders(data, ranks, states=None, epoch=0, **options):
    found = [
        data.stream_loader(rank=rank, world_size=ranks, seed=3, **options) for rank in range(ranks)
    ]
    for loader in found:
        if states is not None:
            loader.load_rank_states(json.loads(json.dumps(states)))
        else:
            loader.set_epoch(epoch)
    return found


def numbers(batches):
    return [row for batch in batches for row in batch.sequence_fields["number"].tolist()]


def flat(lists):
    return list(chain.from_iterable(lists))


def test_four_ranks_over_200_tar_shards_read_each_byte_and_each_row_once(folder, read_bytes):
    size = sum(file.stat().st_size for file in folder.glob("*.tar"))
    data = kit(f"{folder}/*.tar")
    orders = []
    for epoch in range(2):
        read_bytes.clear()
        of_ranks = [numbers(loader) for loader in loaders(data, 4, epoch=epoch)]
        assert sorted(flat(of_ranks)) == list(range(SHARDS * ROWS))
        assert size <= sum(read_bytes) <= 1.05 * size
        assert max(map(len, of_ranks)) <= 1.05 * min(map(len, of_ranks))
        orders.append(of_ranks[0])
    assert set(orders[0]) != set(orders[1])  # shards come to other ranks
    # Rows of many shards are near each other, and those of a shard in another order.
    assert len({row // ROWS for row in orders[0][:60]}) > 3
    assert orders[0] != sorted(orders[0])


def test_resume_on_other_ranks_reads_little_again_and_each_row_comes_once(
    folder, read_bytes, tmp_path
):
    size = sum(file.stat().st_size for file in folder.glob("*.tar"))
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in folder.glob("*.tar"):
        (damaged / file.name).symlink_to(file)
    broken = damaged / "077.tar"
    broken.unlink()
    content = bytearray((folder / "077.tar").read_bytes())
    with tarfile.open(folder / "077.tar") as tar:
        offset = tar.getmember(f"{77 * ROWS + 5}.json").offset
    content[offset : offset + 400] = b"x" * 400  # a header
    broken.write_bytes(content)
    data = kit(f"{damaged}/*.tar")
    seen = Counter()
    states = None
    for number, ranks in enumerate((4, 2, 3)):
        found = loaders(data, ranks, states, folder=tmp_path / "run")
        for loader in found:
            stop = (random.Random(number).randint(3, 40), 55, None)[number]
            seen.update(numbers(islice(loader, stop)))
        states = [loader.state_dict() for loader in found]
        assert all(len(json.dumps(state)) < 8000 for state in states)
    lost = set(range(77 * ROWS + 4, 78 * ROWS))  # the sample before the damage may be incomplete
    assert seen == Counter(set(range(SHARDS * ROWS)) - lost)
    rows = [next(iter(loader.seen().values())) for loader in found]
    assert sum(one["rows"] for one in rows) == sum(seen.values())
    assert rows[0]["tokens"] > rows[0]["rows"]
    # Read again: the windows that lanes were in, and the shards that were split between lanes, three times each.
    assert sum(read_bytes) < 1.5 * size
    [line] = json_lines(tmp_path / "run" / "bad_rows.jsonl")
    assert (line["where"], line["reason"]) == ("077.tar (its rest)", "corrupt_shard")
    assert "from row 4 on" in line["detail"]
    with user_error("1 of .* rows are bad, and 0 are allowed"):
        for loader in loaders(kit(f"{damaged}/*.tar", max_bad_rows=0), 1):
            list(loader)


def test_resume_in_the_middle_of_an_epoch_does_not_read_what_was_used(folder, read_bytes):
    size = sum(file.stat().st_size for file in folder.glob("*.tar"))
    data = kit(f"{folder}/*.tar", stream_lanes=1)
    [straight], [first], [second] = (loaders(data, 1) for _ in range(3))
    expected = list(straight)
    used = len(expected) * 4 // 5
    got = list(islice(first, used))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    read_bytes.clear()
    got += list(second)
    assert sum(read_bytes) < 0.3 * size
    assert all(one.equals(two) for one, two in zip(expected, got, strict=True))


def test_few_shards_are_divided_by_rows_so_that_ranks_have_as_many(tmp_path):
    for shard in range(5):
        write_shard(tmp_path / f"{shard}.tar", shard * 40, 40)
    of_ranks = [numbers(loader) for loader in loaders(kit(f"{tmp_path}/*.tar", stream_lanes=1), 4)]
    assert sorted(flat(of_ranks)) == list(range(200))
    assert list(map(len, of_ranks)) == [50] * 4


# ---- Formats ---------------------------------------------------------------------------------------


TEXTS = [{"text": f"row {i} " + "word " * (i % 9), "number": i} for i in range(100)]


def write_format(folder, name):
    """The rows of TEXTS in three shards; the pattern of their names."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for shard in range(3):
        rows = TEXTS[shard * 34 : shard * 34 + 34]
        file = folder / f"{shard}.{name}"
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        table = pa.Table.from_pylist(rows)
        if name == "jsonl":
            file.write_bytes(lines)
        elif name == "jsonl.gz":
            file.write_bytes(gzip.compress(lines))
        elif name == "jsonl.zst":
            half = len(lines) // 2  # two frames
            parts = [
                pa.compress(part, "zstd", asbytes=True) for part in (lines[:half], lines[half:])
            ]
            file.write_bytes(b"".join(parts))
        elif name == "parquet":
            pq.write_table(table, file, row_group_size=10)
        elif name == "arrow":
            with pa.OSFile(str(file), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
                writer.write_table(table, max_chunksize=10)
        elif name.startswith("tar"):
            with tarfile.open(file, "w:gz" if name.endswith("gz") else "w") as tar:
                for row in rows:
                    add(tar, f"{row['number']}.json", json.dumps(row).encode())
        elif name == "lance":
            lance = pytest.importorskip("lance")
            lance.write_dataset(
                table, str(folder / "set.lance"), mode="append", max_rows_per_file=20
            )
            continue
    return f"{folder}/set.lance" if name == "lance" else f"{folder}/*.{name}"


FORMATS = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow", "tar", "tar.gz", "lance"]


@pytest.mark.parametrize("name", FORMATS)
def test_format_gives_each_row_once_on_ranks_and_after_a_move(tmp_path, monkeypatch, name):
    monkeypatch.setattr(shards, "CHUNK_BYTES", 700)  # lines are read in chunks
    data = kit(write_format(tmp_path, name))
    stream = data.streams("train")[0]
    assert [read()["number"] for _, read in stream] == list(range(100))
    for shard in stream.shards:  # from any row on
        every = list(shard.rows())
        for index, row in enumerate(every):
            again = list(shard.rows(row.number, row.place, lambda number: number % 2 == 0))
            expected = [one.number for one in every[index:] if one.number % 2 == 0]
            assert [one.number for one in again] == expected
            assert [one.where for one in again] == [
                one.where for one in every[index:] if one.number % 2 == 0
            ]
    assert sorted(flat(numbers(one) for one in loaders(data, 3))) == list(range(100))
    found = loaders(data, 2)
    seen = [row for loader in found for row in numbers(islice(loader, 2))]
    moved = loaders(data, 3, [loader.state_dict() for loader in found])
    assert sorted(seen + flat(numbers(one) for one in moved)) == list(range(100))


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "lance"])
@pytest.mark.parametrize("damage", ["cut", "noise"])
def test_damaged_shard_loses_at_most_its_own_rows_and_is_listed(tmp_path, name, damage):
    pattern = write_format(tmp_path, name)
    file = tmp_path / f"1.{name}"
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    if damage == "cut":
        del content[middle:]
    else:
        content[middle : middle + 600] = random.Random(0).randbytes(600)
    file.write_bytes(content)
    good, bad = [], []
    for where, read in kit(pattern).streams("train")[0]:
        try:
            good.append(read().get("number"))
        except BadRow as error:
            bad.append((where, error.reason))
    assert set(good) >= {*range(34), *range(68, 100)}  # the other shards
    assert len(set(good)) == len(good)
    assert bad
    assert all(where.startswith(f"1.{name}") for where, _ in bad)


@pytest.mark.parametrize("name", ["plain", "zstd"])
def test_mds_of_the_library_gives_its_rows_also_where_a_shard_is_short(tmp_path, name):
    """The folders were written by mosaicml-streaming 0.13."""
    rows = [read() for _, read in Stream("mds", str(MDS / name))]
    assert [row["text"] for row in rows] == [f"row {i} é" for i in range(7)]
    assert [row["n"] for row in rows] == list(range(7))
    assert [row["score"] for row in rows] == [i / 2 for i in range(7)]
    assert rows[3]["extra"] == {"a": [3]}
    assert rows[2]["data"] == b"\0\1" * 2
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    assert (np.array(rows[0]["picture"]) == pixels).all()
    assert rows[0]["image"].startswith(b"\x89PNG")
    for file in (MDS / name).iterdir():
        content = file.read_bytes()
        short = ".00001." in file.name
        (tmp_path / file.name).write_bytes(content[: len(content) // 2 if short else None])
    reasons = []
    for where, read in Stream("mds", str(tmp_path)):
        try:
            reasons.append((where, read()["n"]))
        except BadRow as error:
            reasons.append((where, error.reason))
    assert len(reasons) == 7  # all that the index promises
    assert "corrupt_shard" in dict(reasons).values()
    bad = [where for where, found in reasons if found == "corrupt_shard"]
    assert all(".00001." in where for where in bad)
    assert [found for _, found in reasons if found != "corrupt_shard"] == [
        n for n, (where, _) in enumerate(reasons) if where not in bad
    ]


def test_prepared_rows_are_read_as_shards(tmp_path, monkeypatch):
    monkeypatch.setattr("mvp_engine.tools.prepare.MIN_SHARD_ROWS", 9)
    file = write(tmp_path / "rows.jsonl", TEXTS)
    plain = made(file, tokenizer("zephyr"), fields={"number": "int"})
    out = prepared(plain, tmp_path / "out")
    stream = kit(out / "train" / "rows")
    assert len(stream.streams("train")[0].shards) == 12
    of_ranks = [numbers(loader) for loader in loaders(stream, 3)]
    assert sorted(flat(of_ranks)) == list(range(100))
    by_number = {}
    for batch in plain.loader(shuffle=False):
        for number, ids in zip(
            batch.sequence_fields["number"].tolist(),
            batch.input_ids.split(batch.lengths.tolist()),
            strict=True,
        ):
            by_number[number] = ids.tolist()
    for loader in loaders(stream, 1):
        for batch in loader:
            parts = batch.input_ids.split(batch.lengths.tolist())
            for number, ids in zip(batch.sequence_fields["number"].tolist(), parts, strict=True):
                assert by_number[number] == ids.tolist()
    # Rows that are too long for this training, and those that were when they were prepared, are left out.
    short = made(file, tokenizer("zephyr"), fields={"number": "int"}, max_length=12)
    kept = sorted(numbers(short.loader()))
    assert 10 < len(kept) < 90
    for source in (out, prepared(short, tmp_path / "short")):
        loader = kit(source / "train" / "rows", max_length=12).stream_loader()
        assert sorted(numbers(loader)) == kept
        assert loader.dropped == 100 - len(kept)
    settings = MLLMData.model_validate({**stream.settings.model_dump(), "pairs": True})
    with user_error("another template than that of this training"):
        MLLMDataKit(settings, tokenizer("zephyr")).stream_loader()


def test_sources_that_are_no_shards_are_named_with_a_fix(tmp_path):
    (tmp_path / "a.docx").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "mds").mkdir()
    entry = {"format": "csv", "version": 2}
    (tmp_path / "mds" / "index.json").write_text(json.dumps({"shards": [entry]}))
    for name, error in (
        ("a.docx", "cannot be read as a stream; supported are jsonl"),
        ("folder", "name its files by a glob, such as"),
        ("mds", "shards of the format csv"),
        ("none.jsonl", "nothing at"),
    ):
        with user_error(error):
            Stream("s", str(tmp_path / name))


# ---- Commands --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prepared", "prepared shards", "shards"])
def test_commands_know_shards_and_prepared_rows(vlm_folder, capsys, kind):
    words = "model.path=model data.pack_tokens=64 data.global_batch_tokens=256 train.max_steps=2 data.num_workers=0"
    words += (
        " eval.steps=null eval.generation=null export_link=null model.activation_checkpointing=none"
    )
    (vlm_folder / "rows").mkdir()
    for shard in range(6):
        rows = [{"text": f"row {i} " + "word " * (i % 9)} for i in range(20)]
        write(vlm_folder / "rows" / f"{shard}.jsonl", rows)
    sources = "{rows: {path: rows/*.jsonl, hold_out: null}}"
    if kind == "shards":
        words += " data.sources={rows: {path: rows/*.jsonl, hold_out: null, stream: true}}"
    else:
        assert mvp(f"data prepare sft/full out {words}", f"data.sources={sources}") == 0
        words += " data.sources=out"
        if kind != "prepared":
            words = words.replace(
                "=out", "={rows: {path: out/train/rows, hold_out: null, stream: true}}"
            )
    words = shlex.split(words.replace("={", "='{").replace("true}}", "true}}'"))
    capsys.readouterr()
    assert mvp("data inspect sft/full --json", *words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["sources"][0]["good"] == facts["sources"][0]["rows"] == 120
    loading = facts["loading"]
    assert loading["shards"] == {"prepared": 1, "prepared shards": 1, "shards": 6}[kind]
    assert loading["bytes"] > 1000
    assert loading["tokens_per_s"] > 100
    assert loading["bytes_per_step"] or kind == "prepared shards"
    assert mvp("data inspect sft/full", *words) == 0
    assert "tokens/s" in capsys.readouterr().out
    assert mvp("check sft/full --json", *words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert found["data"]["loading"]["shards"]
    assert mvp("plan sft/full --gpu H100 --json", *words) == 0
    assert json.loads(capsys.readouterr().out)["fits"]
    assert mvp("train sft/full log.interval=1 run_id=one", *words) == 0
    losses = [record["loss"] for record in read_metrics(vlm_folder / "outputs")]
    assert len(losses) == 2
    seen = json.loads((vlm_folder / "outputs" / "one" / "run.json").read_text())["seen"]["rows"]
    assert seen["tokens"] > 100
