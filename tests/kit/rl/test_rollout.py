"""Rollouts by our own decode: what a prompt gets, weights and versions, and the gap between sampler and trainer."""

from dataclasses import replace

import pytest
import torch
from conftest import user_error
from families import SMALL
from tiny_models import samples as media_samples
from tiny_models import shared_model

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf import LanguageModel
from mvp_engine.kit.decoding import with_completion
from mvp_engine.kit.rl.prompts import Prompt
from mvp_engine.kit.rl.rollout import (
    GapTooLarge,
    ModalityGap,
    PackedRollout,
    Sample,
    Sampling,
    check_mean_gap,
    generate,
    measure_gap,
    rollout_batch,
)
from mvp_engine.model_engine import Settings
from mvp_engine.worker import WorkerGroup, WorkerSpec

TEXT = {**SMALL, "model_type": "qwen3", "initializer_range": 0.3}
SAMPLING = Sampling(max_new_tokens=5, samples=3, seed=4, stop=tuple(range(20)))


def start(seed=0, **spec):
    spec = {
        "settings": Settings(seed=seed),
        "cpu_threads": 1,
        "device": "cpu",
        **(spec or {"model": {"config": TEXT}}),
    }
    return WorkerGroup.start(WorkerSpec.of(**spec))


@pytest.fixture(scope="module")
def text_group():
    with start() as group:
        yield group


def prompt_of(key, batch, kind=None):
    media = [{"type": kind, "path": "a.png"}] if kind else []
    ids = batch.input_ids.tolist()
    return Prompt(key, {}, batch, ids, media, source="rows", where=f"rows.jsonl:{key}", sample=key)


def text_prompts():
    lengths = {11: 6, 12: 3, 13: 9}
    return [
        prompt_of(key, PackedBatch.from_sequences([torch.arange(3, 3 + length)]))
        for key, length in lengths.items()
    ]


def batch_of(prompts, samples):
    """Prompts and samples as the trainer sees them."""
    sequences = []
    for sample in samples:
        prompt = prompts[sample.prompt].batch
        one = with_completion(prompt, None, sample.tokens)
        new = slice(prompt.num_tokens - 1, -1)
        one.labels[new] = torch.tensor(sample.tokens)
        one.token_fields["sampler_log_probs"] = torch.zeros(one.num_tokens)
        one.token_fields["sampler_log_probs"][new] = torch.tensor(sample.log_probs)
        one.sequence_fields["group"] = torch.tensor([sample.prompt])
        sequences.append(one)
    return PackedBatch.concat(sequences)


def test_packed_rollout_samples_depend_on_key_and_seed_alone(text_group):
    rollout = PackedRollout(text_group, budget=16)
    rollout.sync(None, 7)
    prompts = text_prompts()
    found = generate(rollout, prompts, SAMPLING)
    assert [sample.prompt for sample in found] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert {sample.version for sample in found} == {7}
    assert {sample.reason for sample in found} == {"stop", "length"}
    for sample in found:
        is_stop = sample.tokens[-1] in SAMPLING.stop
        assert sample.reason == ("stop" if is_stop else "length")
        assert len(sample.tokens) == len(sample.log_probs)
        assert is_stop or len(sample.tokens) == 5
    alone = generate(rollout, prompts[2:], SAMPLING)
    assert [sample.tokens for sample in alone] == [sample.tokens for sample in found[6:]]
    other_key = generate(rollout, [replace(prompts[2], key=14)], SAMPLING)
    other_seed = generate(rollout, prompts[2:], replace(SAMPLING, seed=5))
    for other in (other_key, other_seed):
        assert [sample.tokens for sample in other] != [sample.tokens for sample in alone]
    assert generate(rollout, [], SAMPLING) == []


def test_packed_rollout_sync_samples_with_the_trainers_weights(text_group):
    prompts = text_prompts()
    expected = generate(PackedRollout(text_group, budget=64), prompts, SAMPLING)
    with start(seed=9) as other:
        rollout = PackedRollout(other, budget=64)
        assert generate(rollout, prompts, SAMPLING) != expected
        rollout.sync(text_group.weights(dtype=torch.float32), 3)
        found = generate(rollout, prompts, SAMPLING)
    assert [replace(sample, versions=[0] * len(sample.tokens)) for sample in found] == expected
    assert {sample.version for sample in found} == {3}


def test_sampling_refuses_what_a_trainer_cannot_repeat():
    with user_error("temperature=0 must be more than 0"):
        Sampling(max_new_tokens=1, temperature=0)
    with user_error("max_new_tokens=0"):
        Sampling(max_new_tokens=0)


# ---- The gap ------------------------------------------------------------------------------------------------------


class Letters:
    def decode(self, ids):
        return " ".join(f"<{id}>" for id in ids)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gap_of_packed_rollouts_on_images_is_zero(temperature, tmp_path):
    """At temperature 1, too: the trainer's log-probs have no placeholders, which a rollout never samples."""
    model = shared_model(LanguageModel, "qwen3_vl")
    model.hf.save_pretrained(tmp_path)
    ones = media_samples(model, "qwen3_vl")
    prompts = [prompt_of(key, one, "image" if key else None) for key, one in enumerate(ones)]
    with start(path=str(tmp_path)) as group:
        samples = generate(
            PackedRollout(group, budget=200), prompts, replace(SAMPLING, temperature=temperature)
        )
        batch = batch_of(prompts, samples)
        log_probs = group.infer(batch, ["log_probs"], budget=200, temperature=temperature)[
            "log_probs"
        ]
    gap = measure_gap(batch, log_probs, prompts)
    tokens = [
        sum(len(one.tokens) for one in samples if bool(one.prompt) is image)
        for image in (False, True)
    ]
    assert {name: one.tokens for name, one in gap.by_modality.items()} == {
        "text": tokens[0],
        "image": tokens[1],
    }
    assert max(one.largest for one in gap.by_modality.values()) < 2e-5
    gap.check(1e-5, Letters())


def measured():
    """Two samples of a text and one of an image, and log-probs of a trainer that agrees with the sampler."""
    ids = [torch.arange(20, 24), torch.arange(30, 33)]
    prompts = [
        prompt_of(0, PackedBatch.from_sequences(ids[:1])),
        prompt_of(1, PackedBatch.from_sequences(ids[1:])),
    ]
    prompts[1] = replace(
        prompts[1], media=[{"type": "image"}, {"type": "audio"}, {"type": "image"}]
    )
    samples = [Sample(0, [1, 2], [-1.0, -2.0], [0, 0], "stop"), Sample(0, [3], [-0.5], [0], "stop")]
    samples.append(Sample(1, [4, 5, 6], [-1.0, -1.5, -0.5], [0] * 3, "length"))
    batch = batch_of(prompts, samples)
    return batch, prompts, batch.token_fields["sampler_log_probs"].clone()


def test_gap_over_the_limit_names_the_modality_and_shows_the_worst_tokens():
    batch, prompts, trainer = measured()
    at = int((batch.labels == 5).nonzero()[0, 0])
    trainer[at] -= 0.6
    trainer[0] = 9.0  # not a sampled token
    gap = measure_gap(batch, trainer, prompts)
    assert gap.metrics() == {"gap/text": (0.0, 3), "gap/audio+image": (pytest.approx(0.6), 3)}
    gap.check(0.25, Letters())
    gap.check(None, Letters())
    with pytest.raises(GapTooLarge) as raised:
        gap.check(0.1, Letters())
    lines = str(raised.value).splitlines()
    assert "generation.max_gap=0.1" in lines[0]
    assert (
        "0.2 on average and 0.6 at most over 3 tokens of answers to prompts with audio+image"
        in lines[0]
    )
    assert "but by 0 with text" in lines[0]
    worst = "  sampler -1.5000, trainer -2.1000: token 5 '<5>' after '<30> <31> <32> <4>' (audio+image, rows.jsonl:1)"
    assert lines[1] == worst
    assert "rl.correction={}" in lines[-1]


@pytest.mark.parametrize("wrong", [float("nan"), float("-inf")])
def test_gap_that_is_not_finite_is_over_every_limit(wrong):
    batch, prompts, trainer = measured()
    trainer[int((batch.labels == 3).nonzero()[0, 0])] = wrong
    with pytest.raises(GapTooLarge, match="prompts with text"):
        measure_gap(batch, trainer, prompts).check(1e6, Letters())


def test_gap_of_a_sampler_with_other_weights_stops(text_group):
    prompts = text_prompts()
    with start(seed=9) as other:
        samples = generate(PackedRollout(other, budget=64), prompts, SAMPLING)
    batch = batch_of(prompts, samples)
    log_probs = text_group.infer(batch, ["log_probs"], budget=64)["log_probs"]
    with pytest.raises(GapTooLarge):
        measure_gap(batch, log_probs, prompts).check(0.05, Letters())


def test_check_mean_gap_above_the_limit_raises_and_names_the_key_that_shows_tokens():
    check_mean_gap((0.5, 10.0), 0.05)
    check_mean_gap((5.0, 10.0), None)
    with pytest.raises(GapTooLarge, match=r"differ by 0\.5000 on average.*rl\.updates=2"):
        check_mean_gap((5.0, 10.0), 0.05)
    with pytest.raises(GapTooLarge):
        check_mean_gap((float("nan"), 10.0), 0.05)


def test_gap_of_a_version_leaves_out_tokens_that_older_weights_wrote():
    (prompt,) = text_prompts()[:1]
    one = Sample(0, [3, 4, 5], [-1.0, -1.0, -1.0], [6, 7, 7], "stop")
    batch = rollout_batch([prompt], [one])
    trainer_T = batch.token_fields["sampler_log_probs"].clone()
    first = prompt.batch.num_tokens - 1
    trainer_T[first] += 9.0
    trainer_T[first + 2] += 0.5
    found = measure_gap(batch, trainer_T, [prompt], [one], version=7)
    assert found.by_modality["text"] == ModalityGap(0.5, 0.5, 2)
    assert {token.token for token in found.worst} == {4, 5}
    assert measure_gap(batch, trainer_T, [prompt], [one]).by_modality["text"].tokens == 3
    old = replace(one, versions=[6, 6, 6])
    assert not measure_gap(
        rollout_batch([prompt], [old]), trainer_T, [prompt], [old], version=7
    ).by_modality
