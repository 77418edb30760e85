"""Streams on another number of ranks than they were saved by: every row once, also after several moves in an epoch."""

import json
import random
from collections import Counter
from itertools import islice

import pytest
from conftest import ROOT, losses
from run_files import json_lines
from test_streams import file, kit, samples  # noqa: F401 - the fixture `file`
from tiny_vlm import write

from mvp_engine.errors import EXIT_INTERRUPTED
from mvp_engine.kit.data.pack.stream_loader import move_lanes, owns_row, owns_unit, start_lanes
from mvp_engine.kit.data.read.shards import Unit
from mvp_engine.runs import list_runs

CONFIG = ROOT / "tests" / "recipes" / "kit_vlm" / "train.yaml"


def loaders(data, ranks, states=None):
    made = [
        data.stream_loader("train", rank=rank, world_size=ranks, seed=3) for rank in range(ranks)
    ]
    for loader in made:
        if states is not None:
            loader.load_rank_states(json.loads(json.dumps(states)))
    return made


def test_stream_loader_moved_to_any_ranks_gives_each_row_once(file, campaign_size):  # noqa: F811
    dice = random.Random(campaign_size(1, 2))
    data = kit(file)
    for _ in range(campaign_size(4, 100)):
        ranks = [dice.choice([1, 2, 3, 4, 5, 7]) for _ in range(dice.randint(2, 4))]
        states = None
        seen = Counter()
        for number, size in enumerate(ranks):
            made = loaders(data, size, states)
            is_last = number == len(ranks) - 1
            for loader in made:
                stop = None if is_last else dice.randint(0, 120 // size // len(ranks))
                seen.update(samples(list(islice(loader, stop))))
            states = [loader.state_dict() for loader in made]
        assert seen == Counter(range(400)), ranks
        loader.set_epoch(1)  # the next epoch is as on any other ranks
        assert loader.cursors == start_lanes(2, size - 1, size)


def test_stream_loader_state_of_ranks_that_share_their_data_counts_once(file):  # noqa: F811
    """Tensor parallel ranks of one data-parallel rank save the same position."""
    data = kit(file)
    [straight] = loaders(data, 1)
    expected = list(straight)
    [first] = loaders(data, 1)
    got = list(islice(first, 11))
    [second] = loaders(data, 1, [first.state_dict(), first.state_dict()])
    got += list(second)
    assert all(a.equals(b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize(
    "before, after, lanes",
    [(2, 3, [8] * 3), (1, 8, [1] * 8), (3, 2, [6] * 2), (1, 3, [4] * 3)],
)
def test_move_lanes_deals_out_even_shares(before, after, lanes):
    states = [{"lanes": start_lanes(4, rank, before), "turn": 0} for rank in range(before)]
    units = [[Unit(shard, 1, 0) for shard in range(100)]]
    moved = move_lanes(states, 4, after, units)
    assert [len(cursors) for cursors in moved] == lanes
    every = [cursor for cursors in moved for cursor in cursors]
    for unit in range(100):
        for row in (0, 1, 100):
            own = [owns_unit(one, 0, unit) and owns_row(one, 0, unit, row) for one in every]
            assert sum(own) == 1


def test_move_lanes_of_many_ranks_stay_bounded():
    states = [{"lanes": start_lanes(4, rank, 1024), "turn": 2} for rank in range(1024)]
    assert {len(cursors) for cursors in move_lanes(states, 4, 1023, [[]])} == {4, 5}


@pytest.mark.slow
def test_training_on_streams_resumes_on_other_ranks_without_losing_rows(train, ranks2, tmp_path):
    rows = tmp_path / "rows.jsonl"
    write(rows, [{"text": f"{i} " + "word " * (i % 30)} for i in range(240)])
    words = [
        f"data.sources=[{{path: {rows}, stream: true}}]",
        "data.stream_lanes=2",
    ]
    words += [
        "train.epochs=1",
        "data.num_workers=0",
        "resume=auto",
        f"output_dir={tmp_path / 'run'}",
    ]
    words += ["optim.schedule=constant"]
    assert ranks2.launch(CONFIG, *words, "fate.stop_step=2") == [EXIT_INTERRUPTED] * 2
    assert train(*words, "fate.stop_step=3", config=CONFIG) == EXIT_INTERRUPTED
    # Two ranks that share their data are one data-parallel rank.
    assert (
        ranks2.launch(CONFIG, *words, "parallel.ulysses=2", "fate.stop_step=4")
        == [EXIT_INTERRUPTED] * 2
    )
    assert ranks2.launch(CONFIG, *words) == [0, 0]
    [run] = list_runs(tmp_path / "run")
    seen = Counter()
    for note in (note for seen_by in run.dir.glob("seen-*") for note in json_lines(seen_by)):
        if note["step"] != 4 or note["rank"] == 0:  # with Ulysses both ranks have the rows
            seen.update(row for pack in note["rows"] for row in pack)
    assert seen == Counter(range(240))
    assert len(losses(tmp_path / "run")) > 5
