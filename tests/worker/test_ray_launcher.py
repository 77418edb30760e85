"""Worker groups in Ray actors: the bits of the other launchers, errors and deaths by name, nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import run_process
from ten_updates import train_by_groups
from worker_cases import TokenLoss, batch_of, spec_of

from mvp_engine.worker import WorkerError, WorkerGroup

ray = pytest.importorskip("ray")

HERE = Path(__file__).parent


@pytest.mark.slow
def test_ray_group_updates_and_names_the_rank_of_an_error() -> None:
    batch = batch_of(7, 3, 12, 5)
    with WorkerGroup.start(spec_of()) as local:
        expected = local.update(batch, TokenLoss(), budget=16)
        log_probs_T = local.infer(batch, ["log_probs"], budget=64)["log_probs"]
    with WorkerGroup.start(spec_of(parallel={"shard": 2}), ranks=2, where="ray") as group:
        numbers = group.update(batch, TokenLoss(), budget=16)
        assert numbers[0].loss == pytest.approx(expected[0].loss, abs=1e-5)
        found_T = group.infer(batch, ["log_probs"], budget=64)["log_probs"]
        torch.testing.assert_close(found_T, log_probs_T, atol=1e-5, rtol=0)
        with pytest.raises(WorkerError, match="rank 0 of group actor, in nothing: AttributeError") as caught:
            group._call("nothing")
        assert "host.py" in caught.value.remote
    assert not ray.is_initialized()


@pytest.mark.campaign(only=True)
@pytest.mark.parametrize("ranks", [1, 2])
def test_ten_updates_of_actor_and_critic_are_bit_equal_on_every_launcher(tmp_path: Path, ranks: int) -> None:
    out = tmp_path / "torchrun.json"
    words = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    code, output = run_process(*words, str(HERE / "ten_updates.py"), str(out), fresh=True)
    assert code == 0, output
    expected = json.loads(out.read_text())
    assert expected["actor"] != expected["critic"]
    assert len({loss for loss, _ in expected["steps"]}) == 20
    launchers = ["local", "spawn", "ray"] if ranks == 1 else ["spawn", "ray"]
    for where in launchers:
        assert train_by_groups(where, ranks) == expected, where
