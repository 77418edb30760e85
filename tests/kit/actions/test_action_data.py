"""ActionDataKit: frames of LeRobot folders as packed batches, normalization, and the rows that are left out."""

import json

import numpy as np
import pytest
import torch
from conftest import user_error
from run_files import read_json, write_json
from test_lerobot import CAMERA, LENGTHS, color, write_folder
from transformers import PI0Config

from mvp_engine.kit.actions.act import Normalization
from mvp_engine.kit.actions.kit import ActionDataKit
from mvp_engine.kit.actions.rows import FrameRow
from mvp_engine.kit.actions.settings import ActionData
from mvp_engine.kit.actions.write import LeRobotWriter
from mvp_engine.kit.data.settings import MLLMData
from mvp_engine.kit.tiny_processors import train_tokenizer

CHUNK = 4


def model_config(**changes):
    text = {
        "model_type": "gemma",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "vocab_size": 300,
        "head_dim": 8,
    }
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
    vision = {
        "model_type": "siglip_vision_model",
        "image_size": 32,
        "patch_size": 16,
        "hidden_size": 16,
    }
    vision |= {
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
        "vision_use_head": False,
    }
    sizes = {"chunk_size": CHUNK, "max_action_dim": 5, "max_state_dim": 6, **changes}
    vlm = {
        "model_type": "paligemma",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": 3,
    }
    return PI0Config(vlm_config=vlm | {"projection_dim": 16}, dit_config=text, **sizes)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["task 0\n", "task 1\n"], 300, ("<image>",))


def make_kit(root, tokenizer, hold_out=None, **actions):
    data = MLLMData(
        sources=[{"path": str(root), "name": "robot", "hold_out": hold_out}],  # type: ignore[list-item]
        pack_tokens=64,
        global_batch_tokens=64,
        max_bad_rows=1.0,
        cache=str(root.parent / "cache"),
    )
    return ActionDataKit(data, ActionData(**actions), tokenizer, model_config=model_config())


@pytest.mark.parametrize(
    "version, codec", [("v2.1", "libx264"), ("v3.0", "libx264"), ("v3.0", None)]
)
def test_action_kit_batches_hold_image_state_and_chunk_of_each_frame(
    tmp_path, tokenizer, version, codec
):
    kit = make_kit(write_folder(tmp_path / "robot", version, codec), tokenizer, draws=3)
    [rows] = [rows for rows, _ in kit.train_folders()]
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    seen = set()
    for batch in kit.loader(folder=tmp_path):
        fields = batch.sequence_fields
        images = batch.media["pixel_values"]
        assert images.values.shape[1:] == (3, 32, 32)
        assert fields["action_noise"].shape == (batch.num_sequences, 3, CHUNK, 5)
        for at, sample in enumerate(fields["sample"].tolist()):
            seen.add(sample)
            episode = int(np.searchsorted(starts, sample, side="right")) - 1
            expected = color(episode, sample - int(starts[episode]))
            middle = (
                images.values[at, :, 12:20].mean((1, 2)) * 0.5 + 0.5
            ) * 255  # above and below is padding
            assert np.abs(middle.numpy() - expected).max() < 5, sample
            inside = min(CHUNK, int(starts[episode + 1]) - sample)
            mask = fields["action_mask"][at]
            assert mask[:inside, :3].all()
            assert not mask[inside:].any()
            assert not mask[:, 3:].any()
            raw = rows.actions[sample : sample + inside]
            back = kit.normalization.unnormalize_actions(
                fields["action_chunk"][at], rows.states[sample]
            )
            np.testing.assert_allclose(back[:inside], raw, rtol=1e-5, atol=1e-5)
            assert not fields["action_chunk"][at][inside:].any()
            state = (rows.states[sample] - rows.states.mean(0)) / rows.states.std(0)
            np.testing.assert_allclose(fields["action_state"][at, :4], state, rtol=1e-4, atol=1e-5)
            ids = batch.input_ids[batch.cu_seqlens[at] : batch.cu_seqlens[at + 1]].tolist()
            assert ids == [3] * 4 + tokenizer(f"task {episode % 2}\n")["input_ids"]
    assert seen == set(range(sum(LENGTHS)))


def test_action_kit_draws_depend_on_seed_epoch_and_sample_alone(tmp_path, tokenizer):
    root = write_folder(tmp_path / "robot", "v3.0", None)

    def drawn(seed, epoch, workers):
        loader = make_kit(root, tokenizer, draws=2).loader(seed=seed, num_workers=workers)
        loader.dataset.set_epoch(epoch)
        found = {}
        for index in range(len(loader.dataset)):
            fields = loader.dataset[index][0].sequence_fields
            both = torch.cat([fields["action_noise"].flatten(1), fields["action_times"]], 1)
            found |= dict(zip(fields["sample"].tolist(), both, strict=True))
        return found

    first = drawn(0, 0, 0)
    again = drawn(0, 0, 0)
    assert all(torch.equal(first[sample], again[sample]) for sample in first)
    for other in (drawn(0, 1, 0), drawn(1, 0, 0)):
        assert not any(torch.equal(first[sample], other[sample]) for sample in first)


def test_action_kit_holds_out_whole_episodes(tmp_path, tokenizer):
    kit = make_kit(write_folder(tmp_path / "robot", "v3.0", None), tokenizer, hold_out=0.4)
    [(rows, used)] = kit.train_folders()
    trained = set(rows.frames.episode[used].tolist())
    held_out = {
        int(rows.frames.episode[row]) for row in kit.measured("eval")[0].sources[0].chosen_rows()
    }
    assert held_out == {0, 1, 2} - trained
    assert len(held_out) == 1
    np.testing.assert_allclose(
        kit.normalization.spec["action"]["mean"], rows.actions[used].mean(0), rtol=1e-5
    )


def test_action_kit_broken_video_and_missing_episode_are_bad_rows_by_frame(tmp_path, tokenizer):
    root = write_folder(tmp_path / "robot", "v2.1", "libx264")
    kit = make_kit(root, tokenizer)
    rows = kit.train_folders()[0][0]
    rows.folder.episodes[0].data_file.unlink()
    broken = rows.folder.episodes[1].clips[CAMERA].file
    broken.write_bytes(broken.read_bytes()[:300])
    kit = make_kit(root, tokenizer)
    loader = kit.loader(folder=tmp_path)
    seen = [
        sample
        for batch in loader
        for sample in batch.sequence_fields["sample"].tolist()
        if sample >= 0
    ]
    assert sorted(seen) == list(range(19, 24))
    listed = [json.loads(line) for line in (tmp_path / "bad_rows.jsonl").read_text().splitlines()]
    found = {(entry["where"], entry["reason"]) for entry in listed}
    assert found == {(f"robot: episode 0, frame {i}", "missing_file") for i in range(7)} | {
        (f"robot: episode 1, frame {i}", "corrupt") for i in range(12)
    }


def test_action_kit_missing_video_is_found_before_training(tmp_path, tokenizer):
    root = write_folder(tmp_path / "robot", "v2.1", "libx264")
    kit = make_kit(root, tokenizer)
    kit.train_folders()[0][0].folder.episodes[2].clips[CAMERA].file.unlink()
    bad = make_kit(root, tokenizer).bad_rows()
    assert [one.where for one in bad] == [f"robot: episode 2, frame {i}" for i in range(5)]
    for episode in kit.train_folders()[0][0].folder.episodes[:2]:
        episode.clips[CAMERA].file.unlink()
    with user_error(r"no frame .* can be used: robot: episode 0, frame 0: there is no videos/"):
        make_kit(root, tokenizer).normalization  # noqa: B018 - it reads the frames


def test_action_kit_cameras_of_all_folders_have_the_order_of_the_first(tmp_path, tokenizer):
    shades = {
        "observation.images.top": 40,
        "observation.images.wrist": 200,
        "observation.images.side": 90,
    }

    def write(name, cameras):
        keys = [f"observation.images.{camera}" for camera in cameras]
        sizes = {"observation.state": 4, "action": 3}
        with LeRobotWriter(
            tmp_path / name, fps=10, sizes=sizes, cameras=dict.fromkeys(keys, (32, 32)), codec=None
        ) as writer:
            columns = {
                key: np.random.default_rng(0).normal(size=(3, size)) for key, size in sizes.items()
            }
            writer.add(
                columns,
                {key: np.full((3, 32, 32, 3), shades[key], np.uint8) for key in keys},
                "task 0",
            )
        return {"path": str(tmp_path / name)}

    def kit(*sources):
        data = MLLMData(
            sources=list(sources),  # type: ignore[arg-type]
            pack_tokens=64,
            global_batch_tokens=64,
            cache=str(tmp_path / "cache"),
        )
        return ActionDataKit(data, ActionData(), tokenizer, model_config=model_config())

    both = write("both", ["top", "wrist"])
    for name, cameras in (("turned", ["wrist", "top"]), ("one", ["wrist"])):
        other = kit(both, write(name, cameras))
        assert other.normalization.cameras == ["observation.images.top", "observation.images.wrist"]
        for batch in other.loader(folder=tmp_path):
            images = batch.media["pixel_values"]
            seen = ((images.values.mean((1, 2, 3)) * 0.5 + 0.5) * 255).round().tolist()
            for sequence in range(batch.num_sequences):
                of_one = [seen[item] for item in images.items_of(sequence)]
                assert of_one in ([40, 200], [200] if name == "one" else [40, 200])
    with user_error(
        r"has the camera 'observation\.images\.side', which the first folder .* has not",
    ):
        _ = kit(both, write("more", ["top", "side"])).normalization


@pytest.mark.parametrize("mode", ["mean_std", "min_max", "quantiles", "none"])
@pytest.mark.parametrize("relative", [[], [0, 2]])
def test_normalization_survives_its_file_and_inverts(tmp_path, tokenizer, mode, relative):
    root = write_folder(tmp_path / "robot", "v3.0", None)
    kit = make_kit(root, tokenizer, normalize=mode, relative=relative)
    kit.save_processor(tmp_path)
    loaded = Normalization.load(tmp_path)
    rows = kit.train_folders()[0][0]
    chunk = loaded.normalize_actions(rows.actions[:4], rows.states[0], 5)
    assert torch.equal(
        chunk, kit.normalization.normalize_actions(rows.actions[:4], rows.states[0], 5)
    )
    np.testing.assert_allclose(
        loaded.unnormalize_actions(chunk, rows.states[0]), rows.actions[:4], rtol=2e-5, atol=1e-5
    )
    if mode == "min_max" and not relative:
        assert chunk[:, :3].abs().max() <= 1 + 1e-6
    assert (tmp_path / "act.py").is_file()


def test_observation_with_a_renamed_camera_or_a_broken_state_is_refused():
    stats = {"mean": [0.0], "std": [1.0]}
    spec = {
        "format": 1,
        "mode": "mean_std",
        "relative": [],
        "cameras": ["top", "wrist"],
        "state": stats,
    }
    normalization = Normalization({**spec, "action": stats})
    frame = np.zeros((2, 2, 3), np.uint8)
    # As frames of training, it may lack one.
    assert len(normalization.frames({"wrist": frame})) == 1
    assert len(normalization.frames({"side": frame, "wrist": frame, "top": frame})) == 2
    with pytest.raises(
        ValueError, match=r"the observation has \['side', 'top'\]; the policy needs"
    ):
        normalization.frames({"side": frame, "top": frame})
    with pytest.raises(ValueError, match="not finite"):
        normalization.normalize_state([np.nan], 2)


def test_relative_actions_with_absolute_statistics_are_a_user_error(tmp_path, tokenizer):
    root = write_folder(tmp_path / "robot", "v3.0", None)
    stats = str(root / "meta/stats.json")
    assert make_kit(root, tokenizer, statistics=stats).normalization.relative == []
    with user_error(
        r"statistics of absolute actions, but actions\.relative trains them relative",
    ):
        _ = make_kit(root, tokenizer, statistics=stats, relative=[0, 1]).normalization
    make_kit(root, tokenizer, relative=[0, 1]).normalization.save(tmp_path)
    with user_error(r"relative in \[0, 1\], but actions\.relative trains them absolute"):
        _ = make_kit(root, tokenizer, statistics=str(tmp_path)).normalization
    assert make_kit(
        root, tokenizer, statistics=str(tmp_path), relative=[0, 1]
    ).normalization.relative == [0, 1]


def test_relative_statistics_are_those_of_the_chunks_that_are_trained(tmp_path, tokenizer):
    """A frame that cannot be used, in the middle of an episode, ends the chunks before it."""
    kit = make_kit(write_folder(tmp_path / "robot", "v3.0", None), tokenizer, relative=[0, 2])
    rows = kit.train_folders()[0][0]
    rows.frames.bad[7 + 5] = ("not_finite", "in the second episode")
    learnt = []
    for index in np.flatnonzero(rows.frames.good).tolist():
        chunk, mask = FrameRow(rows, index).action_chunk()
        chunk[:, [0, 2]] -= rows.states[index][[0, 2]]
        learnt.append(chunk[mask])
    wanted = np.concatenate(learnt).astype(np.float64)
    stats = kit.statistics()["action"]
    assert stats.count == len(wanted)
    np.testing.assert_allclose(stats.mean, wanted.mean(0), rtol=1e-5)
    np.testing.assert_allclose(stats.std, wanted.std(0), rtol=1e-5)


def test_given_statistics_that_lack_something_are_user_errors(tmp_path, tokenizer):
    root = write_folder(tmp_path / "robot", "v3.0", None)
    file = tmp_path / "stats.json"
    stats = read_json(root / "meta/stats.json")
    for name in ("q01", "q99"):  # as version 2.1 of LeRobot writes it
        del stats["action"][name]
    write_json(file, stats)
    with user_error(r"no q01 of action, which actions\.normalize=quantiles needs: set"):
        _ = make_kit(root, tokenizer, statistics=str(file), normalize="quantiles").normalization
    assert make_kit(root, tokenizer, statistics=str(file)).normalization.mode == "mean_std"
    file.write_text(json.dumps(stats)[:20])
    with user_error(r"stats\.json is not JSON"):
        _ = make_kit(root, tokenizer, statistics=str(file)).normalization


def test_tokenizer_of_another_model_is_a_user_error(tmp_path, tokenizer):
    root = write_folder(tmp_path / "robot", "v3.0", None)
    data = MLLMData(sources=[{"path": str(root)}], pack_tokens=64, cache=str(tmp_path))  # type: ignore[list-item]
    config = model_config()
    config.vlm_config.text_config.vocab_size = 40
    kit = ActionDataKit(data, ActionData(), tokenizer, model_config=config)
    with user_error(
        "the model's vocabulary has 40: set processor to the tokenizer of the model",
    ):
        kit.measured("train")


@pytest.mark.parametrize(
    "actions, message",
    [
        (
            {"features": {"cameras": ["observation.images.side"]}},
            r"has no camera 'observation\.images\.side'",
        ),
        (
            {"features": {"action": "actions"}},
            r"has no feature 'actions'\. Did you mean action\?.* actions\.features names them",
        ),
        ({"relative": [3]}, r"actions\.relative=\[3\]: dimensions are 0 to 2"),
        ({"statistics": "nowhere.json"}, r"actions\.statistics=nowhere\.json: no such file"),
    ],
)
def test_action_kit_user_errors_name_the_key(tmp_path, tokenizer, actions, message):
    kit = make_kit(write_folder(tmp_path / "robot", "v3.0", None), tokenizer, **actions)
    with user_error(message):
        _ = kit.normalization


def test_action_kit_action_larger_than_the_model_is_a_user_error(tmp_path, tokenizer):
    root = write_folder(tmp_path / "robot", "v3.0", None)
    data = MLLMData(sources=[{"path": str(root)}], pack_tokens=64)  # type: ignore[list-item]
    kit = ActionDataKit(data, ActionData(), tokenizer, model_config=model_config(max_action_dim=2))
    with user_error(r"action has 3 values, and max_action_dim of the model is 2"):
        _ = kit.normalization
