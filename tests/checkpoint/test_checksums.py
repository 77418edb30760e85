"""Checksums: a changed byte of a checkpoint is found before it is loaded, and a training uses the checkpoint before."""

import json
import random
import shutil

import pytest
import torch
from conftest import TINY, losses, read_metrics
from safetensors import safe_open
from safetensors.torch import save_file

from mvp_engine.checkpoint import CorruptCheckpoint, format
from mvp_engine.checkpoint import format as checkpoint_format
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.runs import list_runs


def write(folder):
    tensors = {
        "a": torch.arange(24.0).view(4, 6),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "none": torch.empty(0, 2),
    }
    checkpoint_format.write(folder, checkpoint_format.shards_of(tensors), None)
    return checkpoint_format.rank_file(folder, 0)


def flip(file, place, bit=0):
    data = bytearray(file.read_bytes())
    data[place] ^= 1 << bit
    file.write_bytes(data)


def values(folder):
    reader = checkpoint_format.Reader(folder)
    tensors = {name: reader.read(name) for name in reader.entries}
    return {name: [*value.shape, *value.flatten().tolist()] for name, value in tensors.items()}


def test_verify_any_flipped_bit_is_found_or_changes_nothing(tmp_path, campaign_size):
    file = write(tmp_path)
    expected = values(tmp_path)
    checkpoint_format.verify(tmp_path)
    intact = file.read_bytes()
    rng = random.Random(0)
    found = 0
    trials = campaign_size(300, 6000)
    for _ in range(trials):
        flip(file, rng.randrange(len(intact)), rng.randrange(8))
        try:
            checkpoint_format.verify(tmp_path)
        except CorruptCheckpoint:
            found += 1
        else:  # such as a space in the header that is no longer one
            assert values(tmp_path) == expected
        file.write_bytes(intact)
    assert found > 0.9 * trials


@pytest.mark.parametrize("change", ["values", "dtype", "offset"])
def test_verify_valid_file_of_other_contents_is_corrupt(tmp_path, change):
    file = write(tmp_path)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - no dict
    header = json.loads(metadata["pieces"])
    if change == "values":
        tensors["a@0,0"] = tensors["a@0,0"].flip(0).contiguous()
    elif change == "dtype":
        tensors["a@0,0"] = tensors["a@0,0"].view(torch.int32)
    else:
        header["b@0"]["offset"] = [1]
    save_file(tensors, file, {**metadata, "pieces": json.dumps(header)})
    with pytest.raises(CorruptCheckpoint, match=r"the checksum of (a|its header) is wrong"):
        checkpoint_format.verify(tmp_path)


def test_verify_each_rank_reads_its_share_of_the_files(tmp_path, monkeypatch):
    for rank in range(5):
        checkpoint_format.rank_file(tmp_path, rank).touch()
    read = []
    note = lambda path, names: read.append(path.name[5:10])  # noqa: E731
    monkeypatch.setattr(checkpoint_format, "verify_rank_file", note)
    for rank in range(3):
        checkpoint_format.verify(tmp_path, rank, 3)
    assert read == ["00000", "00003", "00001", "00004", "00002"]


def test_verify_large_shard_is_read_in_chunks(tmp_path, monkeypatch):
    file = write(tmp_path)
    monkeypatch.setattr(format, "CHUNK_BYTES", 5)
    checkpoint_format.verify(tmp_path)
    flip(file, -1)
    with pytest.raises(CorruptCheckpoint):
        checkpoint_format.verify(tmp_path)


@pytest.mark.parametrize("kind", ["bit", "cut", "gone", "meta"])
def test_resume_corrupt_checkpoint_falls_back_to_the_one_before(train, tmp_path, kind, capsys):
    words = ["checkpoint.interval=3", "log.interval=1", "optim.schedule=constant"]
    assert train(*words, dir=tmp_path / "straight") == 0
    assert train(*words, "train.max_steps=9", dir=tmp_path / "run") == 0
    [run] = list_runs(tmp_path / "run")
    newest = run.checkpoint_list()[-1]
    file = newest / ("meta.json" if kind == "meta" else "rank_00000.safetensors")
    if kind == "bit":
        flip(file, -5)
    elif kind == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    capsys.readouterr()
    assert train(*words, "resume=auto", dir=tmp_path / "run") == 0
    log = (run.dir / "log.txt").read_text()
    named = newest.name if kind == "gone" else file.name
    assert named in log
    assert "Kept as corrupt-step_00000009; step_00000006 is used instead" in log
    assert (run.checkpoints / "corrupt-step_00000009").is_dir()
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    assert read_metrics(tmp_path / "run") == read_metrics(tmp_path / "straight")


def damage(checkpoint, rank=0):
    flip(checkpoint / f"rank_0000{rank}.safetensors", -5)


def test_resume_without_an_intact_checkpoint_is_a_user_error(train, tmp_path, capsys):
    """Another checkpoint than the one that the user named is not taken for it."""
    assert train("checkpoint.interval=6", dir=tmp_path) == 0
    [run] = list_runs(tmp_path)
    older, newest = run.checkpoint_list()
    damage(newest)
    assert train(f"resume={newest}", dir=tmp_path / "other") == EXIT_USER_ERROR
    assert "the checksum of" in capsys.readouterr().err
    assert newest.is_dir()
    damage(older)
    assert train("train.max_steps=15 resume=auto", dir=tmp_path) == EXIT_USER_ERROR
    assert "has no older one. Start again from step 0 with resume=null" in capsys.readouterr().err


def test_resume_corrupt_file_of_another_rank_falls_back_on_all_ranks(ranks2, tmp_path):
    words = [f"output_dir={tmp_path}", "data.micro_batch_size=2", "checkpoint.interval=3"]
    words += ["log.interval=1", "optim.schedule=constant"]
    assert ranks2.launch(TINY, *words, "train.max_steps=9") == [0, 0]
    before = losses(tmp_path)
    [run] = list_runs(tmp_path)
    damage(run.checkpoint_list()[-1], rank=1)
    assert ranks2.launch(TINY, *words, "resume=auto") == [0, 0]
    assert losses(tmp_path)[:9] == before
    assert (run.checkpoints / "corrupt-step_00000009").is_dir()


def test_verify_folder_changed_tokenizer_file_is_corrupt(tmp_path):
    folder = tmp_path / ".tmp-step"
    write(folder)
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text('{"hidden_size": 64}')
    checkpoint_format.publish(folder, tmp_path / "step", {"world_size": 1})
    checkpoint_format.verify(tmp_path / "step")
    (tmp_path / "step" / "hf" / "config.json").write_text('{"hidden_size": 65}')
    with pytest.raises(CorruptCheckpoint, match=r"config\.json is corrupt"):
        checkpoint_format.verify(tmp_path / "step")
    shutil.rmtree(tmp_path / "step" / "hf")
    with pytest.raises(CorruptCheckpoint, match=r"config\.json is missing"):
        checkpoint_format.verify(tmp_path / "step")
