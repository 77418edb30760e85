"""The preference recipe: stages chain, references and layouts agree, GPU configs compose; learning in the campaign."""

import math
import os

import pytest
from conftest import CAMPAIGN, ROOT, mvp, read_metrics, readme_commands

from mvp_engine.cli import main
from mvp_engine.config import compose
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.launch import launch

pytestmark = pytest.mark.slow
CONFIGS = ROOT / "recipes" / "preference" / "configs"
SMALL = "made.rows=60 data.num_workers=0 log.interval=1 log.backends=[jsonl] optim.warmup=0".split()
SHORT = [
    *SMALL,
    "train.max_steps=3",
    "eval.steps=3",
    "data.pack_tokens=256",
    "eval.generation=null",
]
NUMBERS = ("loss", "rewards/chosen", "rewards/rejected", "margin", "nll", "grad_norm")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with the synthetic text data and the export of a short SFT."""
    folder = tmp_path_factory.mktemp("preference")
    words = [*SMALL, f"output_dir={folder}", "train.max_steps=2", "data.pack_tokens=512"]
    assert launch(str(CONFIGS / "sft_text.yaml"), words) == 0
    return folder


def trained(base, name, *words, ranks=None, config="dpo_text"):
    """The records of a short training in a folder of its own: 3 steps of 2 packs, then an evaluation."""
    out = base / name
    given = [
        *SHORT,
        f"output_dir={out}",
        f"made.folder={base}/preference_data/text",
        "data.global_batch_size=2",
    ]
    given += [
        f"model.path={base}/preference_text_base",
        "export_link=null",
        "optim.lr=1e-3",
        *words,
    ]
    if ranks is None:
        assert launch(str(CONFIGS / f"{config}.yaml"), given) == 0
    else:
        assert set(ranks.launch(CONFIGS / f"{config}.yaml", *given)) == {0}
    return read_metrics(out) + read_metrics(out, "eval")


def assert_same(found, wanted):
    for one, two in zip(found, wanted, strict=True):
        assert {n: one.get(n) for n in NUMBERS} == {
            n: two.get(n) and pytest.approx(two[n], rel=1e-4, abs=1e-5) for n in NUMBERS
        }


def test_preference_copy_cached_and_sharded_ranks_train_alike(base, ranks2):
    copy = trained(base, "copy", "preference.nll=0.3")
    assert copy[0]["preference_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert copy[2]["margin"] > 0
    assert copy[-1]["loss"] == pytest.approx(
        copy[-1]["preference_loss"] + 0.3 * copy[-1]["nll"], abs=1e-5
    )
    assert_same(trained(base, "cached", "preference.nll=0.3", "preference.reference=cached"), copy)
    assert_same(
        trained(base, "sharded", "preference.nll=0.3", "parallel.shard=2", ranks=ranks2), copy
    )


def launch_with_own_cache(config, words, folder):
    """Launch a rank with a cache folder of its own, as ranks of several nodes may have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / os.environ["RANK"]))
        return launch(config, words)


def test_preference_cached_reference_needs_no_cache_folder_that_all_nodes_share(base, ranks2):
    words = [
        *SHORT,
        f"output_dir={base}/nodes",
        f"made.folder={base}/preference_data/text",
        "export_link=null",
    ]
    words += [
        f"model.path={base}/preference_text_base",
        "data.global_batch_size=2",
        "eval.steps=null",
    ]
    words += ["preference.reference=cached", "train.max_steps=1", "data.cache=null"]
    config = str(CONFIGS / "dpo_text.yaml")
    assert ranks2.run(launch_with_own_cache, config, words, base / "caches") == [0, 0]
    assert len(list((base / "caches").glob("*/mvp_engine/data/reference_log_probs-*.npy"))) == 1


def test_preference_resumed_run_is_bit_equal_and_keeps_its_reference(base):
    lora = "lora.rank=4 preference.reference=adapters_off lora.dropout=0.1 eval.steps=null".split()
    lora += ["preference.nll=0", "optim.schedule=constant"]
    trained(base, "parts", *lora, "train.max_steps=2", "checkpoint.interval=1")
    resumed = trained(base, "parts", *lora, "resume=auto")
    other = trained(base, "other", *lora)
    assert resumed == other
    # The policy has dropout, its reference none.
    assert other[0]["loss"] == pytest.approx(math.log(2), abs=0.02)


def test_preference_adapters_off_equals_copy_also_on_sharded_ranks(base, ranks2):
    lora = ["lora.rank=4", "eval.steps=null", "preference.reference=copy"]
    copy = trained(base, "lora_copy", *lora)
    lora[-1] = "preference.reference=adapters_off"
    assert_same(trained(base, "lora_off", *lora), copy)
    assert_same(trained(base, "lora_shard", *lora, "parallel.shard=2", ranks=ranks2), copy)


def test_preference_missing_cache_of_a_resumed_run_is_a_user_error(base, capsys):
    words = ["preference.reference=cached", "eval.steps=null", f"data.cache={base}/lost"]
    trained(base, "lost", *words, "train.max_steps=1", "checkpoint.interval=1")
    for file in (base / "lost").glob("reference_log_probs-*.npy"):
        file.unlink()
    given = [
        *SHORT,
        f"output_dir={base}/lost",
        f"made.folder={base}/preference_data/text",
        *words,
        "export_link=null",
    ]
    given += [f"model.path={base}/preference_text_base", "data.global_batch_size=2", "resume=auto"]
    assert mvp(f"train {CONFIGS}/dpo_text.yaml", *given) == EXIT_USER_ERROR
    assert "reference_log_probs" in capsys.readouterr().err


def test_preference_kto_ranks_agree_on_the_kl_term(base, ranks2):
    alone = trained(base, "kto", config="kto_text")
    assert alone[0]["preference_loss"] == pytest.approx(0.5, abs=1e-6)
    assert alone[2]["kl"] > 0
    assert_same(trained(base, "kto2", ranks=ranks2, config="kto_text"), alone)


@pytest.mark.parametrize("name, reference", [("gpu1", "adapters_off"), ("gpu8", "copy")])
def test_preference_gpu_configs_compose_and_name_missing_keys(name, reference, capsys):
    config = compose(
        CONFIGS / f"{name}.yaml", ["model.path=x", "data.sources.pairs.path=y.jsonl"]
    ).config
    assert config.reference == reference
    assert mvp(f"config {CONFIGS}/{name}.yaml") in (0, EXIT_USER_ERROR)
    assert "model.path" in "".join(capsys.readouterr())


@CAMPAIGN
@pytest.mark.parametrize("kind, bound", [("text", 0.95), ("images", 0.9)])
def test_preference_readme_commands_learn_preferences(tmp_path, kind, bound):
    """On two idle cores: text in under 3 minutes, images in under 5."""
    for _, *words in readme_commands("preference"):
        if (
            words[0] == "train"
            and any(f"_{kind}" in word for word in words)
            and "--nproc" not in words
        ):
            assert main([*words, f"output_dir={tmp_path}", "log.backends=[jsonl]"]) == 0, words
            last = read_metrics(tmp_path, "eval")[-1] if "dpo" in words[1] else {}
            if last:
                assert last["accuracy"] >= bound
                assert last.get("preferred", 1.0) >= 0.9
