"""The digits_flow recipe: the same losses on 1 and 2 ranks and after a resume; right digits that are no copies."""

import pytest
from conftest import CAMPAIGN, ROOT, read_metrics

from mvp_engine.launch import launch

CONFIG = ROOT / "recipes" / "digits_flow" / "configs" / "train.yaml"
SHORT = "train.max_steps=4 eval.steps=4 log.interval=1 log.backends=[jsonl] dit.width=16".split()
SHORT += "dit.depth=1 data.global_batch_size=24 data.micro_batch_size=12 generated=20 flow.steps=4".split()


def trained(folder, *words, ranks=None):
    given = [*SHORT, f"output_dir={folder}", *words]
    codes = [launch(str(CONFIG), given)] if ranks is None else ranks.launch(CONFIG, *given)
    assert set(codes) == {0}
    return read_metrics(folder) + read_metrics(folder, "eval")


@CAMPAIGN
def test_digits_flow_ranks_give_the_losses_and_digits_of_one_rank(tmp_path, ranks2):
    alone = trained(tmp_path / "alone")
    for size in (2, 1):  # shards; replicas
        together = trained(tmp_path / f"shard_{size}", f"parallel.shard={size}", ranks=ranks2)
        for one, other in zip(alone, together, strict=True):
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
            if one["split"] == "eval":
                assert other["right"] == one["right"]
                assert other["distance_ratio"] == pytest.approx(one["distance_ratio"], rel=1e-4)


@pytest.mark.slow
def test_digits_flow_resume_continues_bit_equal(tmp_path):
    """Noise and times of the steps after the resume are those of a training without a stop."""
    words = ["optim.schedule=constant", "checkpoint.interval=2", "run_id=one"]
    whole = trained(tmp_path / "whole", *words)
    trained(tmp_path / "parts", *words, "train.max_steps=2", "eval.steps=null")
    resumed = trained(tmp_path / "parts", *words, "resume=auto")
    by_step = {record["step"]: record["loss"] for record in resumed if record["split"] == "train"}
    for record in whole:
        if record["split"] == "train":
            assert by_step[record["step"]] == record["loss"]


@CAMPAIGN
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_digits_flow_draws_right_digits_that_are_no_copies(tmp_path, seed):
    assert (
        launch(str(CONFIG), [f"output_dir={tmp_path}", f"seed={seed}", "log.backends=[jsonl,plot]"])
        == 0
    )
    last = read_metrics(tmp_path, "eval")[-1]
    assert last["right"] >= 0.95
    assert last["copies"] <= 0.05
    assert last["distance_ratio"] >= 0.8
    assert next(tmp_path.glob("*/report.html")).read_text().count("<img") > 20
