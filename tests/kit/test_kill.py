"""A training on the data kit, killed in the middle of an epoch, resumes at the same rows on any number of ranks."""

import json
import shutil
from collections import Counter

import pytest
from conftest import CAMPAIGN, ROOT, losses, read_metrics
from ranks import RankPool
from run_files import json_lines
from tiny_vlm import with_images, write

from mvp_engine.errors import EXIT_INTERRUPTED
from mvp_engine.runs import list_runs

CONFIG = ROOT / "tests" / "recipes" / "kit_vlm" / "train.yaml"
ROWS, BROKEN = 48, 10


def packs(folder):
    """The packs of each step in the global order, collected from all ranks; steps lost by a kill are left out."""
    [run] = list_runs(folder)
    notes = [
        json.loads(line)
        for file in run.dir.glob("seen-*")
        for line in file.read_text().splitlines()
    ]
    found = []
    for step in range(1, max(note["step"] for note in notes) + 1):
        tries = [note for note in notes if note["step"] == step]
        last = [note for note in tries if note["began"] == max(note["began"] for note in tries)]
        assert sorted(note["rank"] for note in last) == list(range(last[0]["ranks"])), step
        by_place = {
            i * note["ranks"] + note["rank"]: rows
            for note in last
            for i, rows in enumerate(note["rows"])
        }
        found.append([by_place[place] for place in range(len(by_place))])
    return found


@CAMPAIGN
def test_training_killed_and_resumed_on_other_ranks_sees_the_rows_of_an_uninterrupted_run(
    train, ranks2, ranks4, tmp_path
):
    file = write(tmp_path / "rows.jsonl", with_images(tmp_path, ROWS))
    # Its header is valid, so only decoding in a worker fails.
    cut_off = tmp_path / f"{BROKEN}_0.png"
    cut_off.write_bytes(cut_off.read_bytes()[:100])
    words = [f"data.sources=[{{path: {file}}}]", f"data.cache={tmp_path / 'cache'}", "resume=auto"]

    assert ranks2.launch(CONFIG, *words, f"output_dir={tmp_path / 'straight'}") == [0, 0]
    straight = packs(tmp_path / "straight")
    assert len(straight) % 2 == 0
    epoch = len(straight) // 2
    assert epoch > 5  # so that all of it happens inside an epoch
    for steps in (straight[:epoch], straight[epoch:]):
        seen = Counter(row for step in steps for pack in step for row in pack)
        assert seen == Counter(set(range(ROWS)) - {BROKEN})

    same = f"output_dir={tmp_path / 'same'}"
    with RankPool(2) as pool, pytest.raises(EOFError):
        pool.launch(CONFIG, *words, same, "fate.kill_step=4")
    shutil.copytree(tmp_path / "same", tmp_path / "other", symlinks=True)
    assert ranks2.launch(CONFIG, *words, same, "fate.stop_step=5") == [EXIT_INTERRUPTED] * 2
    assert ranks2.launch(CONFIG, *words, same) == [0, 0]
    assert read_metrics(tmp_path / "same") == read_metrics(tmp_path / "straight")  # to the bit
    assert packs(tmp_path / "same") == straight

    other = f"output_dir={tmp_path / 'other'}"
    assert train(*words, other, "fate.stop_step=5", config=CONFIG) == EXIT_INTERRUPTED
    assert ranks4.launch(CONFIG, *words, other) == [0] * 4
    assert packs(tmp_path / "other") == straight
    assert losses(tmp_path / "other") == pytest.approx(losses(tmp_path / "straight"), rel=1e-4)
    [run] = list_runs(tmp_path / "other")
    listed = json_lines(run.dir / "bad_rows.jsonl")
    assert [(line["where"], line["reason"]) for line in listed] == [
        (f"rows.jsonl:{BROKEN + 1}", "corrupt")
    ]
