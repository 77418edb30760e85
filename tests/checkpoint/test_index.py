"""The index of a checkpoint: a rank opens the files that hold what it needs, and no others."""

from contextlib import nullcontext

import pytest
import torch

from mvp_engine.checkpoint import CorruptCheckpoint
from mvp_engine.checkpoint import format as checkpoint_format
from mvp_engine.checkpoint.format import INDEX, Reader, SafetensorsReader, Shard, rank_file
from mvp_engine.checkpoint.state import RankStates

WRITERS = 16


class Writer:
    def __init__(self, rank):
        self.rank = lambda: rank
        self.size = lambda: WRITERS


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A checkpoint of 16 ranks: each has two rows of x and a state of its own; y is on rank 5 alone."""
    monkeypatch.setattr(checkpoint_format, "raise_on_all_ranks", lambda _: nullcontext())
    temporary = tmp_path / ".tmp-step"
    for rank in range(WRITERS):
        state = checkpoint_format.to_bytes({"rank": rank})
        rows = torch.arange(6.0).view(2, 3) + 10 * rank
        shards = [Shard("x", torch.Size([2 * WRITERS, 3]), (2 * rank, 0), rows)]
        shards += [Shard(f"rank.{rank:05d}", state.shape, (0,), state)]
        shards += [Shard("y", torch.Size([]), (), torch.tensor(7.0))] if rank == 5 else []
        checkpoint_format.write(temporary, shards, Writer(rank))
    checkpoint_format.publish(temporary, tmp_path / "step", {"world_size": WRITERS})
    return tmp_path / "step"


@pytest.fixture
def opened(monkeypatch):
    """The names of the files of tensors that are read, or whose header is."""
    found = set()
    read = SafetensorsReader.read
    scan = Reader._read_header

    def watched(self, path, *args):
        found.add(path.name)
        return read(self, path, *args)

    def watched_scan(self, rank):
        found.add(rank_file(self.folder, rank).name)
        return scan(self, rank)

    monkeypatch.setattr(SafetensorsReader, "read", watched)
    monkeypatch.setattr(Reader, "_read_header", watched_scan)
    return found


def test_reader_with_an_index_opens_only_the_files_that_it_needs(folder, opened):
    reader = Reader(folder)
    assert opened == set()
    part = reader.read("x", (5, 0), (3, 3))  # of ranks 2 and 3
    assert part[:, 0].tolist() == [23.0, 30.0, 33.0]
    assert reader.read("y") == 7.0
    states = RankStates(reader, [0, 9, 99])
    assert (len(states), states[9]) == (WRITERS, {"rank": 9})
    assert opened == {f"rank_{rank:05d}.safetensors" for rank in (0, 2, 3, 5, 9)}
    assert [state["rank"] for state in states] == list(range(WRITERS))


def test_reader_without_an_index_reads_the_same_from_all_headers(folder, opened):
    indexed = Reader(folder)
    (folder / INDEX).rename(folder / "other")
    scanned = Reader(folder)
    assert len(opened) == WRITERS
    assert scanned.entries == indexed.entries
    for name in indexed.entries:
        assert torch.equal(scanned.read(name), indexed.read(name)), name
        assert sorted(scanned.shards(name)) == sorted(indexed.shards(name))


def read_all(folder):
    reader = Reader(folder)
    for name in reader.entries:
        reader.read(name)


@pytest.mark.parametrize("damage", ["cut", "not an index", "names a file that is missing"])
def test_reader_of_a_damaged_index_names_it(folder, damage):
    text = (folder / INDEX).read_text()
    if damage == "cut":
        (folder / INDEX).write_text(text[: len(text) // 2])
    elif damage == "not an index":
        (folder / INDEX).write_text('{"version": 2}\n')
    else:
        (folder / INDEX).write_text(text.replace("[5,[],[]]", "[77,[],[]]"))
    with pytest.raises(CorruptCheckpoint, match=r"cannot be read .*Resume from an older one"):
        read_all(folder)
    with pytest.raises(CorruptCheckpoint, match=f"{INDEX} is corrupt"):
        checkpoint_format.verify(folder)


def test_verify_missing_file_of_a_rank_is_named_by_the_rank_that_reads_it(folder):
    rank_file(folder, 15).unlink()
    checkpoint_format.verify(folder, 0, 2)
    with pytest.raises(CorruptCheckpoint, match=r"rank_00015.safetensors cannot be read"):
        checkpoint_format.verify(folder, 1, 2)
