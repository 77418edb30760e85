"""A short fault campaign: `make fault-campaign` runs it at full length, with disks that are full, read-only or slow."""

import os

import campaign
import pytest
from conftest import CAMPAIGN

from mvp_engine.process.watchdog import RankWatchdog

pytestmark = pytest.mark.slow


@CAMPAIGN
def test_campaign_short_loses_hangs_and_changes_nothing(tmp_path):
    jobs = [(2, ["parallel.shard=2", "data.num_workers=2"])]
    short, out = campaign.tiny(40, jobs), tmp_path / "table.md"
    options = {"recipes": lambda _: [(short, 1.0)], "text": campaign.tiny(jobs=jobs)}
    table = campaign.run(tmp_path, 1, 1, 0, seed=1, out=out, **options)
    assert "kill -9, text" in out.read_text()
    for name, tally in table.items():
        assert (tally.lost, tally.hung, tally.unequal, tally.survivors) == (0, 0, 0, 0), (
            name,
            tally.notes,
        )
        assert sum(tally.faults.values()) > 0


def test_campaign_difference_names_a_changed_weight_or_record(tmp_path, train):
    """A comparison that cannot fail would prove nothing."""
    for name, words in (("a", []), ("same", []), ("b", ["optim.lr=0.0100001"])):
        assert train("log.interval=1 train.max_steps=6", *words, dir=tmp_path / name) == 0
    assert campaign.difference(tmp_path / "a", tmp_path / "same", all_records=True) is None
    found = campaign.difference(tmp_path / "a", tmp_path / "b", all_records=True)
    assert found is not None
    assert "instead of" in found
    [lines] = (tmp_path / "same").glob("*/metrics.jsonl")
    lines.write_text("".join(lines.read_text().splitlines(keepends=True)[1:]))
    found = campaign.difference(tmp_path / "a", tmp_path / "same", all_records=True)
    assert found is not None
    assert "steps without a record" in found


def test_watchdog_zombie_is_a_dead_rank():
    """A killed rank stays a zombie until its launcher reads its exit code."""
    watch = RankWatchdog.__new__(RankWatchdog)  # without its thread, which would end this process
    watch.siblings = [os.getpid()]
    assert not watch.has_dead_rank(0.0)
    child = os.fork()
    if child == 0:
        os._exit(0)
    watch.siblings = [child]
    assert watch.has_dead_rank(60.0)
    os.waitpid(child, 0)
