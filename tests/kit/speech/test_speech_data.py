"""Speech targets from files to packs: codes and their cache, talker positions, bad rows by file and line."""

import json
import os
import re

import numpy as np
import torch
from conftest import user_error
from tiny_speech import (
    BOOKS,
    SIZE,
    omni_config,
    sine,
    speech_kit,
    spoken_row,
    text_row,
    tokenizer,
    write_codec,
    write_sound,
)

from mvp_engine.data.batch import IGNORE
from mvp_engine.kit import MLLMDataKit
from mvp_engine.kit.speech.codec import ResidualKMeans, open_codec
from mvp_engine.kit.speech.row_part import CodeStore, make_codes
from mvp_engine.kit.speech.rows import (
    CODES,
    FIRST_CODE,
    FRAME_COUNTS,
    LABEL,
    SPEECH,
    TEXT,
    num_speech_labels,
)
from mvp_engine.kit.speech.settings import SpeechMLLMData
from mvp_engine.tools.inspect import inspect_kit


def only_batch(kit):
    (batch,) = list(kit.loader("train", shuffle=False))
    return batch


def test_speech_pack_holds_codes_of_each_sound_and_text_of_each_row(tmp_path):
    sounds = [write_sound(tmp_path / f"{i}.wav", 0.3 + 0.1 * i, 200 + 90 * i) for i in range(2)]
    rows = [
        spoken_row("one two", audio=sounds[0], speaker="bert"),
        text_row("three"),
        spoken_row("four", audio=sounds[1]),
    ]
    kit = speech_kit(tmp_path, rows)
    batch = only_batch(kit)
    speech = batch.media[SPEECH]
    # Rows may be packed in any order.
    codec = open_codec(str(tmp_path / "codec"))
    for item, sequence in enumerate(speech.sequence_ids.tolist()):
        sample = int(batch.sequence_fields["sample"][sequence])
        part = batch.select([sequence]).media[SPEECH]
        values = part.values
        frames = int(part.fields[FRAME_COUNTS][0])
        expected = codec.encode(sine(0.3 + 0.1 * (sample // 2), 200 + 90 * (sample // 2)))
        assert frames == int(speech.fields[FRAME_COUNTS][item]) == len(expected)
        # A wav file has 16 bits, which may move a frame on the border of two entries.
        assert (values[-frames:, CODES].numpy() == expected).mean() > 0.9
        codes = values[-frames:, FIRST_CODE]
        assert values[-frames - 1 : -1, LABEL].tolist() == codes.tolist()
        assert values[-1, LABEL] == 17
        assert (values[: -frames - 1, LABEL] == IGNORE).all()
        speaker = 24 if sample == 0 else 23
        assert values[-frames - 6 : -frames, FIRST_CODE].tolist() == [20, 21, 22, speaker, 19, 18]
        text = tokenizer().decode(values[-frames - 1 :, TEXT][:2].tolist())
        assert text == ("one two" if sample == 0 else "four <tts_eos>")
    assert num_speech_labels(batch) == int(speech.fields[FRAME_COUNTS].sum()) + 2
    # The sound is no token of the text.
    assert batch.num_tokens == sum(
        len(row) for row in batch.input_ids.split(batch.lengths.tolist())
    )
    assert tokenizer().decode(batch.input_ids).count("assistant") == 3


def test_speech_pack_budget_counts_text_and_talker_positions(tmp_path):
    rows = [
        spoken_row("one", audio=write_sound(tmp_path / f"{i}.wav", 0.8, 200 + i)) for i in range(6)
    ]
    kit = speech_kit(tmp_path, rows)
    sizes = []
    for batch in kit.loader("train", shuffle=False):
        assert batch.num_sequences < 6
        sizes.append(batch.num_tokens + len(batch.media[SPEECH].values))
    assert max(sizes) <= 200
    _, costs = kit.measured("train")
    assert int(costs[0].tokens.sum()) == sum(sizes)


def test_speech_pack_without_a_sound_has_empty_targets_and_plan_names_kinds(tmp_path):
    kit = speech_kit(tmp_path, [text_row("one")])
    speech = only_batch(kit).media[SPEECH]
    assert len(speech.values) == len(speech.row_counts) == 0
    assert kit.dataset("train").media_kinds(0) == frozenset()
    rows = [spoken_row("one", audio=write_sound(tmp_path / "a.wav"))]
    assert speech_kit(tmp_path, rows).dataset("train").media_kinds(0) == {SPEECH}


BAD = [
    ({"audio": "missing.wav"}, "missing_file", "missing.wav"),
    ({"audio": "slow.wav"}, "speech_rate", "2000 Hz for a codec of 8000 Hz"),
    ({"audio": "none.wav"}, "corrupt", "audio"),
    ({"codes": [[1], [2]]}, "speech_books", "1 books; the model speaks 2"),
    ({"codes": [[1, SIZE]]}, "speech_codes", f"codes are 1 to {SIZE}.*0 to {SIZE - 1}"),
    ({"codes": [[1, 2], [3]]}, "speech_codes", "different numbers of books"),
    (
        {"codes": [[1, 2, 3], [4, 5, 6]]},
        "speech_codes",
        r"shape \(2, 3\) seem to be books by frames; wanted \(frames, 2",
    ),
    (
        {"codes": [[1] * 40, [2] * 40, [3] * 40]},
        "speech_codes",
        r"shape \(3, 40\) seem to be books by frames",
    ),
    ({"codes": []}, "speech_empty", "shorter than one frame"),
    ({"codes": "missing.npy"}, "missing_file", "missing.npy"),
    ({"codes": [[1, 2]], "speaker": "carl"}, "speech_speaker", "no speaker 'carl'.*anna, bert"),
    ({"codes": [[1, 2]], "speaker": 3}, "wrong_type", "speaker"),
]


def test_speech_bad_rows_are_listed_by_file_and_line(tmp_path):
    write_sound(tmp_path / "slow.wav", rate=2000)
    write_sound(tmp_path / "none.wav", seconds=0)
    good = spoken_row("two", codes=[[1, 2], [3, 4]])
    kit = speech_kit(tmp_path, [good, *(spoken_row("one", **audio) for audio, _, _ in BAD)])
    batches = list(kit.loader("train", folder=tmp_path))
    assert sum(batch.num_sequences for batch in batches) == 1
    listed = [json.loads(line) for line in (tmp_path / "bad_rows.jsonl").read_text().splitlines()]
    found = {int(bad["where"].rpartition(":")[2]): bad for bad in listed}
    for line, (audio, reason, detail) in enumerate(BAD, 2):
        assert found[line]["reason"] == reason, audio
        assert re.search(detail, found[line]["detail"]), audio
        assert found[line]["where"].endswith(f"rows.jsonl:{line}")


def test_speech_require_refuses_text_without_sound(tmp_path):
    rows = [text_row("one"), spoken_row("two", codes=[[1, 2]])]
    kit = speech_kit(tmp_path, rows, require=True)
    ((where, reason),) = [(bad.where, bad.reason) for bad in kit.bad_rows("train")]
    assert where.endswith("rows.jsonl:1")
    assert reason == "speech_missing"
    assert not speech_kit(tmp_path, rows).bad_rows("train")


def test_speech_codes_file_and_list_give_equal_packs(tmp_path):
    codes = [[1, 2], [3, 4], [5, 6]]
    np.save(tmp_path / "codes.npy", np.array(codes))
    rows = [spoken_row("one", codes=codes)]
    first = only_batch(speech_kit(tmp_path, rows, codec=None))
    second = only_batch(speech_kit(tmp_path, [spoken_row("one", codes="codes.npy")], codec=None))
    assert first.equals(second)


class Counting(ResidualKMeans):
    """Counts its calls."""

    calls = 0

    def encode(self, waveform):
        type(self).calls += 1
        return super().encode(waveform)


def test_code_store_encodes_each_content_once_and_again_when_it_changes(tmp_path, monkeypatch):
    monkeypatch.setattr("mvp_engine.kit.speech.codec.ResidualKMeans", Counting)
    Counting.calls = 0
    sound = write_sound(tmp_path / "a.wav")
    (tmp_path / "b.wav").write_bytes((tmp_path / sound).read_bytes())
    rows = [spoken_row("one", audio="a.wav"), spoken_row("two", audio="b.wav")]
    kit = speech_kit(tmp_path, rows)
    list(kit.loader("train"))
    assert Counting.calls == 1  # equal content
    list(speech_kit(tmp_path, rows).loader("train"))
    assert Counting.calls == 1
    before = kit.row_encoder.encode(rows[0], kit.row_formats()[0], tmp_path)[0].targets[0].codes
    write_sound(tmp_path / "a.wav", 0.6, 500)
    os.utime(tmp_path / "a.wav", ns=(1, 1))
    kit = speech_kit(tmp_path, rows)
    after = kit.row_encoder.encode(rows[0], kit.row_formats()[0], tmp_path)[0].targets[0].codes
    assert Counting.calls == 2
    assert before.shape != after.shape


def test_code_store_of_another_codec_is_another_folder(tmp_path):
    write_codec(tmp_path / "codec")
    other = ResidualKMeans.fit(
        [sine(1.0, 200)], 8000, mels=20, books=BOOKS, size=SIZE, iterations=1
    )
    other.save(tmp_path / "other")
    stores = [
        CodeStore(str(tmp_path / name), BOOKS, tmp_path / "cache") for name in ("codec", "other")
    ]
    assert stores[0].folder != stores[1].folder


def test_make_codes_leaves_out_unreadable_sounds_and_counts(tmp_path):
    rows = [
        spoken_row("one", audio=write_sound(tmp_path / f"{i}.wav", 0.4, 200 + 50 * i))
        for i in range(3)
    ]
    rows += [spoken_row("two", audio="missing.wav"), rows[0], spoken_row("one", codes=[[1, 2]])]
    kit = speech_kit(tmp_path, rows)
    settings = kit.sources("train")[0]
    source = kit.open_rows(settings)
    made = make_codes("train", source, kit.row_formats()[0], kit.row_encoder.row_part)
    assert made is not None
    assert (made.sounds, made.made, made.bad) == (4, 3, 1)
    again = make_codes("train", source, kit.row_formats()[0], kit.row_encoder.row_part)
    assert again is not None
    assert again.made == 0


USER_CODEC = """
import numpy as np
from mvp_engine.kit.speech.codec import Codec

class Loud(Codec):
    sampling_rate, frame_rate, books, codebook_size = 8000, 25.0, 2, 16

    def encode(self, waveform):
        frames = waveform[: len(waveform) // 320 * 320].reshape(-1, 320)
        loud = (np.abs(frames).mean(1) * 15).astype(int).clip(0, 15)
        return np.stack([loud, loud], 1)
"""


def test_open_codec_class_in_a_file_is_used_and_its_text_is_its_fingerprint(tmp_path):
    file = tmp_path / "my_codec.py"
    file.write_text(USER_CODEC)
    rows = [spoken_row("one", audio=write_sound(tmp_path / "a.wav"))]
    speech = only_batch(speech_kit(tmp_path, rows, codec=f"{file}:Loud")).media[SPEECH]
    assert int(speech.fields[FRAME_COUNTS][0]) == 10
    assert len(open_codec(f"{file}:Loud").fingerprint) == 32
    # A frame has 0.04 s.
    rows = [spoken_row("one", audio=write_sound(tmp_path / "short.wav", seconds=0.03))]
    assert [
        bad.reason for bad in speech_kit(tmp_path, rows, codec=f"{file}:Loud").bad_rows("train")
    ] == ["speech_empty"]
    with user_error(r"has 2 codebooks; data\.speech\.books=4"):
        open_codec(f"{file}:Loud", 4)
    with user_error("not a subclass"):
        open_codec(f"{file}:np")
    with user_error(r"neither a folder nor file\.py:Class"):
        open_codec(str(tmp_path / "nothing"))


def test_speech_settings_that_do_not_fit_the_model_are_user_errors(tmp_path):
    codec = write_codec(tmp_path / "codec")
    (tmp_path / "rows.jsonl").write_text(json.dumps(text_row("one")) + "\n")

    def kit(config, **speech):
        source = {"path": str(tmp_path / "rows.jsonl")}
        values = {
            "sources": [source],
            "pack_tokens": 64,
            "speech": {"codec": codec, "books": BOOKS, **speech},
        }
        return MLLMDataKit(SpeechMLLMData.model_validate(values), tokenizer(), model_config=config)

    with user_error(r"data\.speech\.books=16, but the model's talker speaks 2"):
        kit(omni_config(), books=16)
    with user_error("has no talker"):
        kit(None)
    for size in (8, 32):
        predictor = {"vocab_size": size, "num_code_groups": BOOKS}
        with user_error(f"has 16 entries in a codebook; the model's talker speaks {size}"):
            kit(omni_config(code_predictor_config=predictor))


def test_inspect_shows_spoken_turns(tmp_path):
    rows = [spoken_row("one two", audio=write_sound(tmp_path / "a.wav", 0.4), speaker="Anna")]
    facts = inspect_kit(speech_kit(tmp_path, rows), "train", 1)
    (sequence,) = facts["rows"][0]["sequences"]
    assert sequence["spoken"] == [{"answer": 0, "frames": 10, "seconds": 0.4, "speaker": "Anna"}]
    assert facts["sample"]["media"] == {"spoken answers": 1}
    assert sequence["talker"] == 10 + 9 + 8


def test_residual_kmeans_codes_sound_like_the_waveform(tmp_path):
    waveforms = [sine(0.5, 200 + 20 * i) for i in range(20)]
    codec = ResidualKMeans.fit(waveforms, 8000, mels=20, books=3, size=32)
    codec.save(tmp_path / "codec")
    loaded = open_codec(str(tmp_path / "codec"))
    assert loaded.fingerprint == codec.fingerprint
    codes = loaded.encode(waveforms[3])
    assert codes.shape == (13, 3)
    played = codec.decode(codes)
    wanted = codec.mels.log_mels(torch.from_numpy(waveforms[3]))
    heard = codec.mels.log_mels(torch.from_numpy(played))[: len(wanted)]
    other = codec.mels.log_mels(torch.from_numpy(waveforms[15]))
    loud = wanted > -5  # silence between harmonics is not heard
    assert (heard - wanted)[loud].abs().mean() < 0.5 * (other - wanted)[loud].abs().mean()
