"""The digits_rl recipe: RL on images, which are held and encoded once per prompt; learning in the campaign."""

import pytest
import torch
from conftest import CAMPAIGN, ROOT, read_metrics, readme_commands, user_error

from mvp_engine.cli import main
from mvp_engine.config import compose
from mvp_engine.hf.media import shared_media
from mvp_engine.kit.rl import RLEngine
from mvp_engine.launch import launch

pytestmark = pytest.mark.slow
CONFIGS = ROOT / "recipes" / "digits_rl" / "configs"
SMALL = (
    "made.digits=60 data.num_workers=0 log.interval=1 log.backends=[jsonl] eval.steps=null".split()
)
NUMBERS = ("loss", "grad_norm", "reward", "entropy", "clip_fraction")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with the data and the export of a short SFT."""
    folder = tmp_path_factory.mktemp("digits")
    words = [*SMALL, f"output_dir={folder}", "train.max_steps=2", "data.pack_tokens=512"]
    assert launch(str(CONFIGS / "sft.yaml"), words) == 0
    return folder


def trained(base, name, *more):
    words = [
        *SMALL,
        f"output_dir={base / name}",
        f"made.folder={base}/digits_rl_data",
        "export_link=null",
    ]
    words += f"model.path={base}/digits_rl_base train.max_steps=2 rl.prompts_per_step=6 rl.num_generations=4".split()
    assert launch(str(CONFIGS / "grpo.yaml"), [*words, "reward.workers=0", *more]) == 0
    return read_metrics(base / name)


def test_digits_rl_images_of_a_prompt_are_encoded_once(base, monkeypatch):
    """With the same numbers as images that are repeated for each completion."""
    batches = []
    encoded = []
    inputs = shared_media.encoder_inputs

    def spy(model, kind, media, *rest):
        encoded.append(len(media.row_counts))
        return inputs(model, kind, media, *rest)

    monkeypatch.setattr("mvp_engine.hf.model.auto_model.encoder_inputs", spy)
    monkeypatch.setattr(
        RLEngine, "train_pre_step", lambda _, ctx: batches.append(ctx.micro_batches[0])
    )
    shared = trained(base, "shared", "rl.updates=1")
    assert len(batches) == 2
    for batch in batches:
        groups = batch.sequence_fields["group"]
        images = batch.media["pixel_values"]
        assert len(images.row_counts) == len(set(groups.tolist())) <= 6
        assert torch.equal(groups[images.shared_with], groups)
    assert max(encoded) == 6  # prefill, old log-probs and updates: never once per completion

    def repeat(_, ctx):
        batch = ctx.micro_batches[0]
        everything = list(range(batch.num_sequences))
        batch.media = {
            kind: media.select(everything, share=False) for kind, media in batch.media.items()
        }

    monkeypatch.setattr(RLEngine, "train_pre_step", repeat)
    encoded.clear()
    repeated = trained(base, "repeated", "rl.updates=1")
    assert max(encoded) > 6
    for one, two in zip(shared, repeated, strict=True):
        assert {n: one[n] for n in NUMBERS} == {
            n: pytest.approx(two[n], rel=1e-4, abs=1e-5) for n in NUMBERS
        }


@pytest.mark.parametrize("name", ["gpu1", "gpu8"])
def test_digits_rl_gpu_configs_compose(name):
    config = compose(
        CONFIGS / f"{name}.yaml", ["model.path=x", "data.sources.questions.path=y.jsonl"]
    ).config
    assert (config.groups.actor.ranks, config.lora is None) == (
        (8, True) if name == "gpu8" else (None, False)
    )


@pytest.mark.parametrize("word", ["rl.algorithm=ppo", "rl.algorithm=gspo", "rl.entropy=0.1"])
def test_digits_rl_option_that_its_loss_has_not_is_refused(word):
    with user_error("engine: reverse_rl"):
        compose(CONFIGS / "grpo.yaml", [word])


@CAMPAIGN
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_digits_rl_readme_commands_learn_to_name_held_out_digits(tmp_path, seed):
    """On two idle cores in under 10 minutes."""
    for _, *words in readme_commands("digits_rl"):
        if words[0] == "train" and "gpu" not in words[1]:
            assert (
                main([*words, f"output_dir={tmp_path}", f"seed={seed}", "log.backends=[jsonl]"])
                == 0
            ), words
            last = read_metrics(tmp_path, "eval")[-1]
            if "sft" in words[1]:
                assert last["exact_held_out"] <= 0.7
            else:
                assert last["reward"] >= 0.88
