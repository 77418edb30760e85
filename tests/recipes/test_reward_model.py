"""The reward_model recipe: it trains, exports a classifier, refuses rows that end with the pad token; learning."""

import pytest
from conftest import CAMPAIGN, ROOT, mvp, read_metrics

from mvp_engine.cli import main
from mvp_engine.config import compose
from mvp_engine.errors import EXIT_USER_ERROR

pytestmark = pytest.mark.slow
CONFIGS = ROOT / "recipes" / "reward_model" / "configs"
SHORT = (
    "made.rows=60 train.max_steps=2 eval.steps=2 data.num_workers=0 log.backends=[jsonl]".split()
)


def test_reward_model_trains_and_exports_a_classifier_that_continues(tmp_path):
    words = [str(CONFIGS / "cpu.yaml"), *SHORT, f"output_dir={tmp_path}", "log.interval=1"]
    assert main(["train", *words]) == 0
    first = read_metrics(tmp_path)
    assert {"accuracy", "margin", "rewards/chosen"} <= read_metrics(tmp_path, "eval")[-1].keys()
    export = tmp_path / "reward_model"
    assert "Qwen3ForSequenceClassification" in (export / "config.json").read_text()
    words = [*words, f"model.path={export.resolve()}", "optim.lr=1e-9", "export_link=null"]
    assert main(["train", *words]) == 0
    assert read_metrics(tmp_path)[0]["loss"] < first[0]["loss"]


def test_reward_model_on_images_trains_and_loads_its_export(tmp_path):
    words = [str(CONFIGS / "cpu_images.yaml"), *SHORT, f"output_dir={tmp_path}", "log.interval=1"]
    assert main(["train", *words]) == 0
    first = read_metrics(tmp_path)
    assert "accuracy" in read_metrics(tmp_path, "eval")[-1]
    export = (tmp_path / "reward_images_model").resolve()
    assert main(["train", *words, f"model.path={export}", "optim.lr=1e-9", "export_link=null"]) == 0
    assert read_metrics(tmp_path)[0]["loss"] < first[0]["loss"]


def test_reward_model_rows_that_end_with_the_pad_token_are_a_user_error(tmp_path, capsys):
    folder = tmp_path / "reward_data"
    config = compose(CONFIGS / "cpu.yaml", [*SHORT, f"output_dir={tmp_path}"])
    kit = config.engine_class.data_kit(config.config)
    last = int(next(iter(kit.loader("train", global_batch_size=1))).input_ids[-1])
    words = [
        *SHORT,
        f"output_dir={tmp_path}",
        f"made.folder={folder}",
        f"model.config.pad_token_id={last}",
    ]
    assert mvp(f"train {CONFIGS}/cpu.yaml", *words) == EXIT_USER_ERROR
    assert "Set model.config.pad_token_id" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gpu1", "gpu8"])
def test_reward_model_gpu_configs_compose(name):
    config = compose(
        CONFIGS / f"{name}.yaml", ["model.path=x", "data.sources.pairs.path=y.jsonl"]
    ).config
    assert (config.model.type, config.lora is None) == ("value_model", name == "gpu8")


@CAMPAIGN
@pytest.mark.parametrize("name, bound", [("cpu", 0.95), ("cpu_images", 0.9)])
def test_reward_model_readme_command_learns_held_out_pairs(tmp_path, name, bound):
    assert mvp(f"train {CONFIGS}/{name}.yaml output_dir={tmp_path} log.backends=[jsonl]") == 0
    assert read_metrics(tmp_path, "eval")[-1]["accuracy"] >= bound
