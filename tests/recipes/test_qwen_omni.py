"""The qwen_omni recipe: the README's commands, spoken answers on the page, the export in transformers, the judge."""

import ctypes.util
import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, mvp, read_metrics, readme_commands, user_error

from mvp_engine.cli import main
from mvp_engine.config import compose
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.launch import launch
from mvp_engine.runs import list_runs

pytestmark = pytest.mark.slow
CONFIGS = ROOT / "recipes" / "qwen_omni" / "configs"
FEW = "spoken.sentences=120 spoken.held_out=4 data.num_workers=0 log.interval=1".split()
HAS_SPEECH = (
    importlib.util.find_spec("espeakng_loader") is not None
    or ctypes.util.find_library("espeak-ng") is not None
)
speaks = pytest.mark.skipif(not HAS_SPEECH, reason="eSpeak NG is not installed")


def words(folder, *more):
    sizes = ["train.max_steps=3", "eval.steps=3", "eval.generation.speech.max_frames=6"]
    return [f"output_dir={folder}", *FEW, *sizes, "log.backends=[terminal,file,jsonl]", *more]


@speaks
def test_qwen_omni_readme_commands_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    seen = []
    for command in readme_commands("qwen_omni"):
        if "--nproc" in command or any("gpu" in word for word in command):
            continue
        fewer = {"train": words(tmp_path), "chat": f"--dir {tmp_path} --max-frames 6".split()}
        command = [
            word.replace("outputs/", f"{tmp_path}/").replace("two.wav", f"{tmp_path}/two.wav")
            for word in command
        ]
        assert (
            main([*command[1:], *fewer.get(command[1], [f"output_dir={tmp_path}", *FEW])]) == 0
        ), command
        seen.append(command[1])
    assert seen == ["train", "train", "data", "data", "chat"]
    printed = capsys.readouterr()
    assert re.search(r"train/train: \d+ sounds: 0 encoded now", printed.out)
    assert re.search(r"two\.wav: 0\.\d s", printed.err)
    assert (tmp_path / "two.wav").read_bytes()[:4] == b"RIFF"
    for wrong, said in (
        (["--speaker", "ann"], "--speaker is for spoken answers: add --speak"),
        (["--speak", "a.mp3"], "a name that ends with .wav"),
        (
            "--speak a.wav --speaker carl".split(),
            "--speaker carl: the model's speakers are ann, bob",
        ),
        ("--speak a.wav --codec nothing".split(), "--codec=nothing is neither a folder nor"),
    ):
        assert mvp(f"chat latest -p 'say up' --dir {tmp_path}", *wrong) == EXIT_USER_ERROR
        assert said in capsys.readouterr().err
    last = read_metrics(tmp_path, "eval")[-1]
    assert {"word_accuracy_eval", "exact_eval", "speech_ended", "speech_first", "text_loss"} <= set(
        last
    )
    run = list_runs(tmp_path)[-1].dir
    answers = [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]
    assert {answer["speaker"] for answer in answers} <= {"ann", "bob"}
    assert all(Path(answer["speech"]).is_file() for answer in answers)
    page = (run / "report.html").read_text()
    assert page.count("<audio controls") == len({answer["sample"] for answer in answers})


@speaks
def test_qwen_omni_data_matches_config_ids_and_holds_out_sentences(tmp_path):
    composed = compose(str(CONFIGS / "cpu.yaml"), [])
    from qwen_omni import data

    ids = data.make_tokenizer().get_vocab()
    config = composed.config.model.config
    names = {
        "im_start_token_id": "<|im_start|>",
        "im_end_token_id": "<|im_end|>",
        "user_token_id": "user",
    }
    names |= {
        "assistant_token_id": "assistant",
        "system_token_id": "system",
        "tts_pad_token_id": "<tts_pad>",
    }
    names |= {"tts_bos_token_id": "<tts_bos>", "tts_eos_token_id": "<tts_eos>"}
    assert {key: config[key] for key in names} == {key: ids[token] for key, token in names.items()}
    assert max(ids.values()) < config["thinker_config"]["audio_token_id"]
    talker = config["talker_config"]
    assert talker["num_code_groups"] == composed.config.data.speech.books == data.BOOKS
    assert (
        talker["code_predictor_config"]["vocab_size"] == data.CODES == talker["codec_eos_token_id"]
    )
    assert set(talker["speaker_id"]) == set(data.VOICES)
    random = np.random.default_rng(0)
    held_out = {data.sentence(random, held_out=True) for _ in range(300)}
    assert not held_out & {data.sentence(random, held_out=False) for _ in range(3000)}


@speaks
def test_judge_hears_espeak_and_codec_and_not_other_sentences():
    compose(str(CONFIGS / "cpu.yaml"), [])
    from qwen_omni import data
    from qwen_omni.judge import Judge

    from mvp_engine.kit.speech.demo import word_errors

    judge = Judge()
    speaker = data.Speaker()
    random = np.random.default_rng(5)
    texts = [data.sentence(random, held_out=True) for _ in range(24)]
    voices = ["ann", "bob"] * 12
    sounds = [data.say(speaker, text, voice) for text, voice in zip(texts, voices, strict=True)]

    def accuracy(waveforms):
        errors = 0
        for text, voice, waveform in zip(texts, voices, waveforms, strict=True):
            errors += word_errors(judge.words(waveform, voice), text.split())
        return 1 - errors / sum(len(text.split()) for text in texts)

    assert accuracy(sounds) > 0.9
    assert accuracy(sounds[2:] + sounds[:2]) < 0.3
    assert judge.words(np.zeros(100, np.float32), "ann") == []
    codec = data.ResidualKMeans.fit(sounds * 3, speaker.rate, books=4, size=128)
    assert accuracy([codec.decode(codec.encode(sound)) for sound in sounds]) > 0.85


def test_qwen_omni_gpu_configs_compose_and_name_missing_keys(tmp_path, capsys):
    for name in ("gpu1", "gpu8"):
        file = str(CONFIGS / f"{name}.yaml")
        assert launch(file, []) == EXIT_USER_ERROR
        assert "data.sources.eval.path=... data.sources.train.path=..." in capsys.readouterr().err
        given = [
            f"output_dir={tmp_path}",
            "data.sources.train.path=a.jsonl",
            "data.sources.eval.path=b.jsonl",
        ]
        config = compose(file, given).config
        assert config.data.speech.books == 16
        assert config.model.type == "omni_model"


@pytest.mark.parametrize(
    "word, said",
    [
        ("data.speech=null", "eval.generation.speech needs a model that speaks"),
        (
            "parallel.shard=2",
            "ranks that share a model (parallel.shard > 1) do not speak in evaluations",
        ),
    ],
)
def test_eval_generation_speech_that_cannot_be_spoken_is_a_config_error(word, said, capsys):
    assert launch(str(CONFIGS / "cpu.yaml"), [word]) == EXIT_USER_ERROR
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, said",
    [
        (
            ["data.speech=null"],
            "model.type=omni_model: its talker learns from spoken answers. Set data.speech",
        ),
        (["model.type=language_model"], "data.speech: model.type=language_model has no talker"),
        (["model.type=language_model", "data.speech=null"], "=language_model has no talker"),
    ],
)
def test_talker_without_speech_and_speech_without_talker_are_user_errors(words, said):
    composed = compose(str(CONFIGS / "cpu.yaml"), ["eval.generation=null", *words])
    with user_error(said):
        composed.engine_class.data_kit(composed.config)
