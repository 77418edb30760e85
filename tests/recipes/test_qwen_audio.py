"""The qwen_audio recipe: the README's commands, resume, the export in transformers, two ranks."""

import ctypes.util
import importlib.util
import json

import pytest
from conftest import ROOT, read_metrics, readme_commands, user_error

from mvp_engine.cli import main
from mvp_engine.config import compose
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.launch import launch
from mvp_engine.runs import list_runs

pytestmark = pytest.mark.slow
CONFIGS = ROOT / "recipes" / "qwen_audio" / "configs"
FEW = "speech.sentences=60 speech.held_out=12 data.num_workers=0 log.interval=1".split()
SMALL = [
    "model.config.text_config.num_hidden_layers=1",
    "model.config.audio_config.encoder_layers=1",
]
HAS_SPEECH = (
    importlib.util.find_spec("espeakng_loader") is not None
    or ctypes.util.find_library("espeak-ng") is not None
)
speaks = pytest.mark.skipif(not HAS_SPEECH, reason="eSpeak NG is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("audio")


def words(folder, *more):
    few = [*FEW, *SMALL, "log.backends=[terminal,file,jsonl]"]
    return [f"output_dir={folder}", *few, "train.max_steps=6", "eval.steps=null", *more]


@pytest.fixture(scope="module")
def trained(folder):
    """The run of the README's commands, with few steps."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for command in readme_commands("qwen_audio"):
            if "--nproc" in command or any("gpu" in word for word in command):
                continue
            fewer = [f"output_dir={folder}", *FEW]
            if command[1] == "train":
                fewer = words(folder, "eval.steps=6", "checkpoint.interval=3")
            assert main([*command[1:], *fewer]) == 0, command
            seen.append(command[1])
    assert seen == ["train", "train", "data"]
    [run] = list_runs(folder)
    return run.dir


@speaks
def test_qwen_audio_readme_commands_evaluate_both_splits_and_show_all_sounds(folder, trained):
    last = read_metrics(folder, "eval")[-1]
    kinds = ("wer", "loss")
    assert {f"{kind}_{split}" for kind in kinds for split in ("sentences", "voices")} <= set(last)
    assert (trained / "report.html").read_text().count("<audio controls") == 24


@speaks
def test_qwen_audio_resumed_run_is_bit_equal(folder, trained):
    straight = [record["loss"] for record in read_metrics(folder)]
    assert len(straight) == 6
    checkpoint = list_runs(folder)[0].checkpoint_list()[0]
    assert launch(str(CONFIGS / "cpu.yaml"), words(folder, f"resume={checkpoint}")) == 0
    assert [record["loss"] for record in read_metrics(folder)] == straight


@speaks
def test_qwen_audio_export_transcribes_like_the_checkpoint(folder, trained, monkeypatch):
    given = words(folder, "workflow=report", f"resume={trained}")
    engine = compose(str(CONFIGS / "cpu.yaml"), given).engine_class
    from qwen_audio.hear import hear

    found = []
    monkeypatch.setattr(
        engine, "write_page", lambda self, figures, answers, export: found.append((answers, export))
    )
    assert launch(str(CONFIGS / "cpu.yaml"), given) == 0
    [(answers, export)] = found
    home = folder / "speech_data"
    rows = [
        json.loads(line)
        for kind in ("sentences", "voices")
        for line in (home / f"eval_{kind}.jsonl").open()
    ]
    assert [one.sample for one in answers] == list(range(24))
    files = [str(home / row["messages"][0]["content"][0]["audio"]) for row in rows]
    assert hear(str(export), files[::4], max_new_tokens=8) == [one.written for one in answers[::4]]
    assert [one.expected for one in answers] == [row["messages"][1]["content"] for row in rows]


@speaks
def test_qwen_audio_evaluation_on_two_ranks_equals_one(ranks2, folder, trained):
    given = words(folder, "workflow=evaluate", f"resume={trained}", "data.global_batch_size=2")
    assert launch(str(CONFIGS / "cpu.yaml"), given) == 0
    assert ranks2.launch(CONFIGS / "cpu.yaml", *given, "parallel.shard=2") == [0, 0]
    lines = [
        json.loads(line) for line in (trained / "evaluate.jsonl").read_text().splitlines()[-2:]
    ]
    one, two = ({key: value for key, value in line.items() if key != "split"} for line in lines)
    assert two == pytest.approx(one, rel=1e-5)


@speaks
def test_qwen_audio_data_holds_out_sentences_and_matches_config_sizes(folder, trained):
    from qwen_audio import data

    def texts(name):
        lines = (folder / "speech_data" / f"{name}.jsonl").read_text().splitlines()
        return {json.loads(line)["messages"][1]["content"] for line in lines}

    assert not texts("train") & (texts("eval_sentences") | texts("eval_voices"))
    assert not set(data.VOICES) & set(data.NEW_VOICES)
    composed = compose(str(CONFIGS / "cpu.yaml"), words(folder))
    kit, about = composed.engine_class.data_kit(composed.config), composed.config.model.config
    ears = kit.processor.feature_extractor
    assert ears.feature_size == about["audio_config"]["num_mel_bins"]
    assert ears.nb_max_frames == 2 * about["audio_config"]["max_source_positions"]
    assert kit.processor.audio_token_id == about["audio_token_index"]
    assert len(kit.processor.tokenizer) <= about["text_config"]["vocab_size"]
    summary = kit.summary("train", dataset=kit.dataset("train", global_batch_size=1))
    assert "Bad rows: none" in summary  # no sentence is longer than the audio window


def test_word_errors_of_transcripts_count_insertions_deletions_and_substitutions():
    compose(str(CONFIGS / "cpu.yaml"), [])  # which imports the recipe
    from qwen_audio.data import words_of

    from mvp_engine.kit.speech.demo import word_errors

    def cost(written, expected):
        return word_errors(words_of(written), words_of(expected))

    assert cost("Go left, four!", "go left four") == 0
    assert cost("go four", "go left four") == 1
    assert cost("go go left four", "go left four") == 1
    assert cost("go left four up", "go left four") == 1
    assert cost("left go four", "go left four") == 2
    assert cost("", "go left four") == cost("a b c", "go left four") == 3


def test_qwen_audio_gpu_configs_compose_and_name_missing_keys(tmp_path, capsys):
    from mvp_engine.kit import MLLMModelKit
    from mvp_engine.model_engine.fsdp.parallelize import freeze

    tiny = compose(str(CONFIGS / "cpu.yaml"), []).config.model.config
    for name, trains in (("gpu1", "0 %"), ("gpu8", "95.7 %")):  # Whisper's positions never train
        file = str(CONFIGS / f"{name}.yaml")
        assert launch(file, []) == EXIT_USER_ERROR
        assert "data.sources.eval.path=... data.sources.train.path=..." in capsys.readouterr().err
        given = [
            f"output_dir={tmp_path}",
            "data.sources.train.path=a.jsonl",
            "data.sources.eval.path=b.jsonl",
        ]
        assert launch(file, [*given, "parallel.shard=1"]) == EXIT_USER_ERROR
        assert "without model.path" in capsys.readouterr().err
        config = compose(file, given).config
        source = config.model.model_copy(update={"path": None, "config": tiny})
        model = MLLMModelKit(config.lora).build(source, config.model.type)
        assert all(p.is_meta for p in model.parameters())
        freeze(model, config.model.freeze)
        table = {line.split()[0]: line for line in MLLMModelKit.table(model).splitlines()}
        assert trains in table["audio"]
        assert "100 %" in table["projector"]


def test_qwen_audio_without_synthesizer_names_the_package_to_install(tmp_path, monkeypatch):
    compose(str(CONFIGS / "cpu.yaml"), [])
    from qwen_audio.data import prepare

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    with user_error(r"pip install 'mvp-engine\[demo\]'"):
        prepare(str(tmp_path / "speech"), 3, 1)
    assert not list(tmp_path.glob("*.tmp"))
