"""The distil recipe: a student trains from a teacher's export on any layout, and resumes."""

import pytest
from conftest import ROOT, mvp, read_metrics, user_error
from run_files import printed_json

from mvp_engine.cli import main
from mvp_engine.config import compose
from mvp_engine.errors import EXIT_USER_ERROR
from mvp_engine.launch import launch

pytestmark = pytest.mark.slow
CONFIGS = ROOT / "recipes" / "distil" / "configs"
SMALL = "made.rows=60 data.num_workers=0 log.interval=1 log.backends=[jsonl] eval.generation=null".split()
SMALL += ["data.pack_tokens=256", "data.global_batch_size=2", "optim.warmup=0"]
NUMBERS = ("loss", "teacher_kl", "nll", "grad_norm")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with the data and the export of a short training of the teacher."""
    folder = tmp_path_factory.mktemp("distil")
    words = [*SMALL, f"output_dir={folder}", "train.max_steps=3", "eval.steps=null"]
    assert launch(str(CONFIGS / "teacher_cpu.yaml"), words) == 0
    return folder


def trained(base, name, *words, ranks=None):
    given = [
        *SMALL,
        f"output_dir={base / name}",
        f"made.folder={base}/distil_data",
        "export_link=null",
    ]
    given += [
        f"distil.teacher={base}/distil_teacher_model",
        "train.max_steps=3",
        "eval.steps=3",
    ]
    given += ["distil.nll=0.2", "optim.schedule=constant", *words]
    if ranks is None:
        assert launch(str(CONFIGS / "cpu.yaml"), given) == 0
    else:
        assert set(ranks.launch(CONFIGS / "cpu.yaml", *given)) == {0}
    return read_metrics(base / name) + read_metrics(base / name, "eval")


def test_distil_one_process_and_sharded_ranks_train_alike(base, ranks2):
    alone = trained(base, "alone")
    assert alone[2]["teacher_kl"] < alone[0]["teacher_kl"]
    assert alone[-1]["loss"] == pytest.approx(
        alone[-1]["teacher_kl"] + 0.2 * alone[-1]["nll"], abs=1e-5
    )
    sharded = trained(base, "sharded", "parallel.shard=2", ranks=ranks2)
    for one, two in zip(sharded, alone, strict=True):
        assert {n: one.get(n) for n in NUMBERS} == {
            n: two.get(n) and pytest.approx(two[n], rel=1e-4, abs=1e-5) for n in NUMBERS
        }


def test_distil_resumed_run_is_bit_equal(base):
    whole = trained(base, "whole", "eval.steps=null")
    trained(base, "cut", "eval.steps=null", "train.max_steps=2")
    resumed = trained(base, "cut", "eval.steps=null", "resume=auto")
    assert [record["loss"] for record in resumed] == [record["loss"] for record in whole]


def test_distil_teacher_of_another_vocabulary_is_a_user_error(base, capsys):
    words = [
        *SMALL,
        f"output_dir={base}/other",
        f"made.folder={base}/distil_data",
        "model.config.vocab_size=340",
    ]
    words += [f"distil.teacher={base}/distil_teacher_model"]
    assert mvp(f"train {CONFIGS}/cpu.yaml", *words) == EXIT_USER_ERROR
    assert "has 320 rows in its output embedding, the student has 340" in capsys.readouterr().err


def test_distil_estimate_counts_the_teacher(base, capsys):
    words = f"plan {CONFIGS}/cpu.yaml --json --gpu H100 output_dir={base} made.rows=60".split()
    words += [f"distil.teacher={base}/distil_teacher_model"]
    assert main(words) == 0
    found = printed_json(capsys)
    assert found["memory_gib"]["teacher"] == pytest.approx(4 * 335_000 / 2**30, rel=0.05)


@pytest.mark.parametrize("name", ["gpu1", "gpu8"])
def test_distil_gpu_configs_compose(name):
    given = ["model.path=x", "distil.teacher=y", "data.sources.rows.path=z.jsonl"]
    config = compose(CONFIGS / f"{name}.yaml", given).config
    assert (config.distil.teacher, config.parallel.shard) == ("y", 8 if name == "gpu8" else 1)
    with user_error("distillation reads rows with one answer"):
        compose(CONFIGS / f"{name}.yaml", [*given, "data.pairs=true"])
