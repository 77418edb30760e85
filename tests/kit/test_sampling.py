"""Sampling: hashed noise, the same tokens on every layout, and log-probs that are those of the trainer."""

from dataclasses import replace

import pytest
import torch
from conftest import CAMPAIGN, user_error
from families import FAMILIES, VISION, parallel
from test_generate import built

from mvp_engine.data.batch import IGNORE, PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.kit import decoding as noise
from mvp_engine.kit.decoding import (
    Decoding,
    complete,
    gumbel_noise,
    sample_tokens,
    sequence_keys,
    with_completion,
)

DRAWS = 20_000
SAMPLED = Decoding(max_new_tokens=4, temperature=0.8, samples=2, seed=3)


def keys_of(seed, prompts, samples=1):
    return torch.tensor(sequence_keys(seed, prompts, samples))


def p_value(drawn, probs):
    """Of the chi-square test that the draws follow the probabilities."""
    expected = probs.double() * len(drawn)
    counts = torch.bincount(drawn, minlength=len(probs))
    possible = expected > 0
    assert not counts[~possible].any()
    chi_square = ((counts - expected).square() / expected)[possible].sum()
    return float(torch.special.gammaincc((possible.sum() - 1) / 2, chi_square / 2))


def test_gumbel_noise_depends_on_its_key_alone(monkeypatch):
    keys = keys_of(7, [5, -1, 2**70], samples=2)
    together = gumbel_noise(keys, 3, 1001)
    for row in range(6):
        assert torch.equal(gumbel_noise(keys[row : row + 1], 3, 1001)[0], together[row])
    logits = torch.randn(6, 1001, generator=torch.Generator().manual_seed(0))
    for block in (1, 2002, 10_000):
        monkeypatch.setattr(noise, "BLOCK", block)
        assert torch.equal(sample_tokens(logits, keys, 3), (logits + together).argmax(-1))
    assert torch.equal(gumbel_noise(keys, 3, 77), together[:, :77])
    others = [keys_of(8, [5, -1, 2**70], 2), keys_of(7, [6, -2, 2**70 + 1], 2)]
    more = [gumbel_noise(keys, 4, 1001), *(gumbel_noise(one, 3, 1001) for one in others)]
    all_noise = torch.cat([together, *more])
    assert len(all_noise.unique()) > 0.999 * all_noise.numel()


def test_gumbel_noise_bits_never_change():
    """A resumed run draws what the undisturbed one would have drawn, on a newer version, too."""
    assert sequence_keys(1, [2], 2) == KEYS
    found = gumbel_noise(torch.tensor(KEYS), 5, 3)
    assert found.flatten().tolist() == pytest.approx(NOISE, rel=1e-6)


KEYS = [-1833405127366507680, 937349279089814987]
NOISE = [-0.08480055, -1.39320719, 0.46011606, 1.21668899, -0.44588286, -0.7698285]


@pytest.mark.parametrize("varied", ["seed", "prompt", "sample", "position"])
def test_gumbel_noise_draws_follow_a_distribution_whatever_varies(varied):
    probs = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.05, 0.03, 0.015, 0.005])
    if varied == "position":
        few = keys_of(0, list(range(100)))
        noises = torch.cat([gumbel_noise(few, place, len(probs)) for place in range(DRAWS // 100)])
    else:
        keys = {
            "seed": lambda: [sequence_keys(seed, [0], 1)[0] for seed in range(DRAWS)],
            "prompt": lambda: sequence_keys(0, list(range(DRAWS)), 1),
            "sample": lambda: sequence_keys(0, [0], DRAWS),
        }
        noises = gumbel_noise(torch.tensor(keys[varied]()), 0, len(probs))
    drawn = (probs.log() + noises).argmax(-1)
    assert p_value(drawn, probs) > 0.001
    pairs = drawn[:-1] * len(probs) + drawn[1:]  # neighbours are independent
    assert p_value(pairs[::2], torch.outer(probs, probs).flatten()) > 0.001
    assert float(noises.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noises.var()) == pytest.approx(1.6449, abs=0.05)


def test_complete_draws_follow_the_probabilities_without_placeholders():
    engine, ones = built("qwen3_vl")
    few = Decoding(max_new_tokens=1, temperature=0.7, samples=DRAWS, use_cache=False)
    drawn = complete(engine, ones[0], few)
    with torch.no_grad():
        logits = engine.model(ones[0], ["next_logits"])["next_logits"][0] / 0.7
    logits[engine.model.placeholders] = float("-inf")
    log_probs = logits.log_softmax(-1)
    assert p_value(torch.tensor([one.tokens[0] for one in drawn]), log_probs.exp()) > 0.001
    for one in drawn[:50]:
        assert one.log_probs[0] == pytest.approx(float(log_probs[one.tokens[0]]), abs=2e-5)


def with_labels(prompt, tokens, token_type):
    """The prompt and its completion, with the completion's tokens as labels."""
    text = with_completion(prompt, None, tokens, token_type)
    start = prompt.num_tokens - 1
    text.labels[start:-1] = text.input_ids[start + 1 :]
    return text


def trainer_log_probs(
    engine,
    prompts,
    found,
    temperature,
):
    token_type = engine.model.completion_token_type
    rows = [with_labels(prompts[one.prompt], one.tokens, token_type) for one in found]
    batch = PackedBatch.concat(rows)
    outputs = engine.infer_batch(batch, ["log_probs"], budget=200, temperature=temperature)
    chosen = outputs["log_probs"][batch.labels != IGNORE]
    return [part.tolist() for part in chosen.split([len(one.tokens) for one in found])]


def check_log_probs(engine, prompts, found):
    trained = trainer_log_probs(engine, prompts, found, SAMPLED.temperature)
    for one, log_probs in zip(found, trained, strict=True):
        assert one.log_probs == pytest.approx(log_probs, abs=2e-5)


SOME = ["gemma2", "gpt_oss", "gemma3", "paligemma", "qwen2_audio", "qwen2_5_vl"]
ALL = [pytest.param(name, marks=[] if name in SOME else CAMPAIGN) for name in [*FAMILIES, *VISION]]


@pytest.mark.parametrize("name", ALL)
def test_sampled_log_probs_equal_the_trainers_on_packed_families(name):
    engine, ones = built(name)
    head = engine.model.hf.get_output_embeddings()
    with torch.no_grad():  # placeholders would be likely
        head.weight[engine.model.placeholders] = 2 * head.weight[7]
    found = complete(engine, PackedBatch.concat(ones), SAMPLED)
    check_log_probs(engine, ones, found)
    uncached = complete(engine, PackedBatch.concat(ones), replace(SAMPLED, use_cache=False))
    assert [one.tokens for one in uncached] == [one.tokens for one in found]


def on_ranks(name, sizes, budget):
    """Keys and tokens of the completions of this rank's prompts."""
    world = World.join("cpu")
    layout = Layout.of(world, parallel(**sizes))
    engine, ones = built(name, layout)
    keys = list(range(len(ones)))[layout.data_rank :: layout.data_size]
    mine = [ones[key] for key in keys]
    prompts = PackedBatch.concat(mine) if mine else None
    found = complete(engine, prompts, replace(SAMPLED, budget=budget), [key + 100 for key in keys])
    # `infer_batch` needs a batch on every rank of a sharded model.
    if not engine.sharded or layout.data_size == 1:
        check_log_probs(engine, mine, found) if mine else None
    world.close()
    return [(keys[one.prompt], one.tokens) for one in found]


def check_layout(ranks, count, sizes):
    name = "qwen3" if "tensor" in sizes else "qwen3_vl"  # only text has a plan in transformers
    engine, ones = built(name)
    keys = range(100, 100 + len(ones))
    alone = complete(engine, PackedBatch.concat(ones), SAMPLED, keys)
    expected = [(one.prompt, one.tokens) for one in alone]
    same_data = sizes.get("ulysses", 1) * sizes.get("tensor", 1)
    found = ranks.run(on_ranks, name, sizes, 40)
    assert len(found) == count
    assert sorted(pair for of_rank in found for pair in of_rank) == sorted(expected * same_data)


@pytest.mark.parametrize("sizes", [{}, {"shard": 2}, {"ulysses": 2}, {"tensor": 2}], ids=str)
def test_sampled_tokens_on_two_ranks_are_those_of_one(ranks2, sizes):
    check_layout(ranks2, 2, sizes)


FOUR_RANKS = [
    pytest.param({}, marks=CAMPAIGN),
    {"shard": 2, "ulysses": 2},
    pytest.param({"shard": 2, "tensor": 2}, marks=CAMPAIGN),
]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", FOUR_RANKS, ids=str)
def test_sampled_tokens_on_four_ranks_are_those_of_one(ranks4, sizes):
    check_layout(ranks4, 4, sizes)


def count_gathers(free):
    """The FSDP units; of a forward, a generation and a forward: how many were gathered, and agreements of the ranks."""
    world = World.join("cpu")
    layout = Layout.of(world, parallel(shard=2))
    engine, ones = built("qwen3_vl", layout)
    engine._free_bytes = lambda: free
    gathers, agreed = [], []
    units = torch.distributed.fsdp._fully_shard._fsdp_param_group
    gather, any_rank = units.foreach_all_gather, World.any
    units.foreach_all_gather = lambda *args: gathers.append(1) or gather(*args)
    World.any = lambda *args: agreed.append(1) or any_rank(*args)
    prompts = PackedBatch.concat(ones) if world.is_main else ones[1]
    calls = [
        lambda: engine.infer_batch(ones[0], ["log_probs"]),
        lambda: complete(engine, prompts, SAMPLED, range(prompts.num_sequences)),
    ]
    counts = []
    try:
        for call in (calls[0], calls[1], calls[0]):
            gathers.clear()
            agreed.clear()
            call()
            counts.append((len(gathers), len(agreed)))
    finally:
        units.foreach_all_gather, World.any = gather, any_rank
        world.close()
    return len(engine.sharded), *counts


def test_complete_on_shards_gathers_weights_once_if_they_fit_and_after_it_as_before(ranks2):
    for units, before, together, after in ranks2.run(count_gathers, float("inf")):
        assert together == (units, 1)
        assert after[0] == before[0]
    for units, _, each_token, after in ranks2.run(count_gathers, 0.0):
        assert each_token[0] >= SAMPLED.max_new_tokens * (units - 3)
        assert each_token[1] > SAMPLED.max_new_tokens
        assert after[0] == before[0]


def test_complete_keys_of_the_wrong_number_are_refused():
    engine, ones = built("qwen3")
    with pytest.raises(ValueError, match="1 keys for 2 prompts"):
        complete(engine, PackedBatch.concat(ones), SAMPLED, [1])


def test_model_temperature_per_call_equals_plain_pytorch_and_leaves_the_next_call_alone():
    engine, ones = built("qwen3_vl")
    model = engine.model
    batch = PackedBatch.concat(ones)
    before = model(batch, ["log_probs"])["log_probs"]
    found = model(batch, ["log_probs", "entropy"], temperature=0.6)
    hidden = model(batch, ["hidden_states"])["hidden_states"]
    logits = torch.nn.functional.linear(hidden, model.hf.lm_head.weight) / 0.6
    logits[:, model.placeholders] = float("-inf")
    log_p = logits.log_softmax(-1)
    of_labels = log_p.gather(-1, batch.labels.clamp(min=0)[:, None])[:, 0]
    placeholders = torch.tensor(model.placeholders)
    is_trained = (batch.labels != IGNORE) & ~torch.isin(batch.labels, placeholders)
    assert torch.allclose(found["log_probs"][is_trained], of_labels[is_trained], atol=1e-5)
    entropy = -log_p.exp().mul(log_p.clamp(min=-1e9)).sum(-1)
    assert torch.allclose(found["entropy"], entropy, atol=1e-5)
    assert torch.equal(model(batch, ["log_probs"])["log_probs"], before)
    with user_error("temperature=0"):
        model(batch, ["log_probs"], temperature=0)
    with user_error("mean_log_probs is over all tokens"):
        model(batch, ["mean_log_probs"], temperature=1.0)
    assert torch.equal(model(batch, ["log_probs"])["log_probs"], before)
