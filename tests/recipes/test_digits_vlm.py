"""The digits_vlm recipe at a small size: train, resume, evaluate, report, export; on one rank and on two."""

import json
import sys

import pytest
import torch
from conftest import ROOT, read_metrics, user_error
from run_files import json_lines

from mvp_engine.config import compose
from mvp_engine.kit import MLLMDataKit
from mvp_engine.launch import launch
from mvp_engine.runs import list_runs

CONFIG = ROOT / "recipes" / "digits_vlm" / "configs" / "train.yaml"
SMALL = [
    "text_config.num_hidden_layers=2",
    "vision_config.depth=2",
    "vision_config.deepstack_visual_indexes=[0]",
]
SMALL = [f"model.config.{key}" for key in SMALL]
QUICK = (
    "data.num_workers=0 log.interval=1 eval.steps=null digits.drawings=1 digits.count=60".split()
)
QUICK += "data.pack_tokens=256 train.max_steps=6 train.epochs=null log.backends=[terminal,file,jsonl]".split()


def run(folder, *more):
    return launch(str(CONFIG), [f"output_dir={folder}", *SMALL, *QUICK, *more])


def losses(folder):
    return [record["loss"] for record in read_metrics(folder)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    assert run(folder, "checkpoint.interval=3") == 0
    return folder


@pytest.mark.slow
def test_digits_vlm_resumed_run_is_bit_equal(trained):
    straight = losses(trained)
    assert len(straight) == 6
    checkpoint = list_runs(trained)[0].checkpoint_list()[0]
    assert run(trained, f"resume={checkpoint}") == 0
    assert losses(trained) == straight


@pytest.mark.slow
def test_digits_vlm_report_and_export_have_the_trained_model(trained, capsys):
    from transformers import AutoProcessor, GenerationConfig

    for _ in range(2):  # the second time everything exists already
        assert run(trained, "workflow=report", "resume=auto") == 0
    output = capsys.readouterr().out
    newest = list_runs(trained)[-1].dir
    assert "The same words as from the checkpoint: 6 of 6" in output
    assert str(newest / "report.html") in output
    page = (newest / "report.html").read_text()
    assert page.count("data:image/png") >= 24
    assert "http" not in page.replace("http-equiv", "")
    processor = AutoProcessor.from_pretrained(newest / "hf_step_6")
    # The limits of the config, not the processor's original ones.
    size = processor.image_processor.size
    assert (size.shortest_edge, size.longest_edge) == (256, 2304)
    stop = GenerationConfig.from_pretrained(newest / "hf_step_6").eos_token_id
    assert processor.tokenizer.convert_ids_to_tokens(stop) == "<|im_end|>"


@pytest.mark.slow
@pytest.mark.campaign
def test_digits_vlm_evaluation_on_two_ranks_equals_one(ranks2, trained, campaign_size):
    run_dir = list_runs(trained)[0].dir
    words = [f"output_dir={trained}", *SMALL, *QUICK, "workflow=evaluate", f"resume={run_dir}"]
    words += ["data.global_batch_size=2"]  # three packs for two ranks
    assert launch(str(CONFIG), words) == 0
    answers = (run_dir / "answers.jsonl").read_text()
    first = json.loads(answers.splitlines()[0])
    assert first.keys() >= {"step", "source", "sample", "prompt", "expected", "written", "right"}
    assert (len(answers.splitlines()), first["step"], first["source"]) == (24, 6, "one")
    layouts = ("parallel.shard=2", "parallel.shard=1")[: campaign_size(1, 2)]
    for more in layouts:
        assert ranks2.launch(CONFIG, *words, more) == [0, 0]
        assert (run_dir / "answers.jsonl").read_text() == answers
    lines = json_lines(run_dir / "evaluate.jsonl")
    one, *others = ({key: value for key, value in line.items() if key != "split"} for line in lines)
    assert len(others) == len(layouts)
    for other in others:
        assert other == pytest.approx(one, rel=1e-5)


def test_digits_vlm_data_holds_out_digits_and_matches_config_token_ids(trained):
    from digits_vlm import data

    from mvp_engine.kit.tiny_processors import CHAT_TOKENS, VISION_TOKENS

    composed = compose(str(CONFIG), [f"output_dir={trained}", *QUICK])
    engine = composed.engine_class
    kit = engine.data_kit(composed.config)
    assert isinstance(kit, MLLMDataKit)
    about = composed.config.model.config
    tokenizer = kit.processor.tokenizer
    for key, token in (
        ("image_token_id", "<|image_pad|>"),
        ("vision_start_token_id", "<|vision_start|>"),
    ):
        assert (
            tokenizer.convert_tokens_to_ids(token)
            == about[key]
            == [*CHAT_TOKENS, *VISION_TOKENS].index(token)
        )
    assert len(tokenizer) <= about["text_config"]["vocab_size"]
    train, held_out = (data.chosen(split, 60, 3) for split in ("train", "eval"))
    assert not set(train) & set(held_out)
    assert sorted(train + 3 * held_out) == sorted(3 * list(range(60)))
    tokens = [
        rows
        for batch in kit.loader("train", global_batch_size=1)
        for rows in batch.media["pixel_values"].row_counts.tolist()
    ]
    assert len(set(tokens)) > 1  # images of several sizes


def test_digits_vlm_prepare_user_errors_name_the_fix(trained, tmp_path, monkeypatch):
    from digits_vlm.data import prepare

    with user_error(r"was made with .*remove it, or set digits.folder"):
        prepare(trained / "digits_data", 60, 2)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with user_error("was not made by this recipe"):
        prepare(tmp_path / "mine", 60, 1)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with user_error(r"sklearn: pip install 'mvp-engine\[demo\]'"):
        prepare(tmp_path / "new", 60, 1)
    assert not list(tmp_path.glob("*.tmp"))
    assert torch.get_num_threads() == 1
