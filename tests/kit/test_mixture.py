"""Mixtures by tokens: shares at each point of a training, exact resumes, changes in mid-run, and their settings."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import mvp, user_error
from pydantic import ValidationError
from test_plan import kit, write_texts

from mvp_engine.kit import MLLMData
from mvp_engine.kit.data.pack.costs import Costs
from mvp_engine.kit.data.pack.packs import PackDataset, PackLoader
from mvp_engine.kit.data.pack.plan import PacedMixture
from mvp_engine.kit.data.settings import Mixing

PACKS, BUDGET = 8, 4096
STEP_TOKENS = PACKS * BUDGET


class Rows:
    """A source of so many rows."""

    def __init__(self, name, size):
        self.fingerprint = name
        self.size = size

    def __len__(self):
        return self.size


def drawn(rows, mean, most, seed):
    values = np.exp(np.random.default_rng(seed).normal(np.log(mean), 0.6, rows))
    return np.clip(values, 5, most).astype(np.int64)


TOKENS = {"long": drawn(3000, 1100, 4096, 0), "short": drawn(30_000, 33, 400, 1)}
TOKENS["short"][::50] = 0  # bad rows
TOKENS["more"] = drawn(2000, 100, 400, 2)


def loader(weights, mixing=None, steps=None, rank=0, world_size=1, repeats=1.0):
    """The loader of the sources that `weights` names; rows have lengths and nothing else."""
    sources = [(name, Rows(name, len(TOKENS[name])), weights[name], repeats) for name in weights]
    tokens = [TOKENS[name] for name in weights]
    mixture = PacedMixture(sources, tokens, mixing or Mixing())
    mixture.set_total(steps and float(steps * STEP_TOKENS))
    costs = [Costs(one, 0 * one, np.zeros(len(one), np.uint8)) for one in tokens]
    formats = [None] * len(costs)
    dataset = PackDataset(mixture, formats, costs, None, budget=BUDGET, packs_per_step=PACKS)
    return PackLoader(dataset, None, "data", rank=rank, world_size=world_size)


def seen_tokens(one):
    """Tokens of each source after each step of the loader's epoch."""
    steps = range(0, len(one.dataset) + 1, PACKS)
    return np.stack([one.dataset.seen(packs)[:, 1] for packs in steps])


def worst_error(tokens, share, steps=100):
    """How far the share of the first source is off, in all tokens so far and in those of any `steps` steps."""
    window = tokens[steps:] - tokens[:-steps]
    found = np.concatenate([window, tokens[steps:]])
    return np.abs(found[:, 0] / found.sum(1) - share).max()


def test_shares_of_tokens_are_within_half_a_percent_in_each_100_steps_and_after_a_resume():
    one = loader({"long": 0.7, "short": 0.3})
    assert worst_error(seen_tokens(one), 0.7) < 0.005
    one.start = 60 * PACKS
    other = loader({"long": 0.7, "short": 0.3}, rank=1, world_size=4)
    other.load_state_dict(one.state_dict())
    assert other.seen() == one.seen()
    assert (other.dataset.plan.samples == one.dataset.plan.samples).all()
    for epoch in (1, 2):
        one.set_epoch(epoch)
        other.set_epoch(epoch)
        assert worst_error(seen_tokens(one), 0.7) < 0.005
        assert other.seen() == one.seen()
    total = {name: seen["tokens"] for name, seen in one.seen().items()}
    assert total["long"] / sum(total.values()) == pytest.approx(0.7, abs=0.001)
    assert one.seen_metrics()["share_long"] == pytest.approx(0.7, abs=0.001)


def places_of(one, name, packs):
    """The places that a source gave in the first packs of this epoch."""
    index = one.dataset.mixture.names.index(name)
    part = one.dataset.plan.rows_of(0, packs)
    of_source = one.dataset.plan.pairs(one.dataset.plan.samples[part])[:, 0] == index
    return one.dataset.plan.places[part][of_source].tolist()


def test_epochs_of_a_source_give_each_row_once_in_each_pass():
    one = loader({"long": 0.9, "short": 0.1})
    places = {"long": [], "short": []}
    for epoch in range(3):
        one.set_epoch(epoch)
        for name, found in places.items():
            found += places_of(one, name, len(one.dataset))
    for name, found in places.items():
        good = TOKENS[name] > 0
        assert len(set(found)) == len(found)
        expected = max(found) + 1 - min(found)
        assert len(found) == pytest.approx(expected * good.mean(), rel=0.01)
    size = len(TOKENS["long"])
    assert sorted(places["long"])[:size] == list(range(size))


@pytest.mark.parametrize("epoch", [0, 1])
def test_mixture_changed_in_mid_run_loses_no_row_and_gives_none_twice(epoch):
    before = loader({"long": 0.7, "short": 0.3})
    used = []
    for earlier in range(epoch):
        before.set_epoch(earlier)
        used += places_of(before, "long", len(before.dataset))
    before.set_epoch(epoch)
    packs = 37 * PACKS
    used += places_of(before, "long", packs)
    before.start = packs
    state = before.state_dict()
    after = loader({"long": 0.2, "short": 0.6, "more": 0.2})
    after.load_state_dict(state)
    assert after.seen()["long"] == before.seen()["long"]
    assert worst_error(seen_tokens(after), 0.2) < 0.005
    used += places_of(after, "long", len(after.dataset))
    after.start = 20 * PACKS
    again = loader({"long": 0.2, "short": 0.6, "more": 0.2})
    again.load_state_dict(after.state_dict())
    assert again.plan_id() == after.plan_id()
    assert again.seen() == after.seen()
    assert len(again._changes) == 1
    after.set_epoch(epoch + 1)
    used += places_of(after, "long", len(after.dataset))
    assert len(set(used)) == len(used)
    assert sorted(used) == list(range(max(used) + 1))  # none is left out


def test_changed_rows_of_a_source_are_no_change_of_the_mixture():
    one = loader({"long": 0.7, "short": 0.3})
    state = one.state_dict()
    state["mixture"]["settings"]["sources"]["long"][0] = "others"
    with user_error("the rows of the source long are not those"):
        loader({"long": 0.5, "short": 0.5}).load_state_dict(state)


def test_weights_by_progress_are_those_of_their_time():
    steps = 120
    one = loader({"long": [[0, 1], [0.5, 1], [0.5, 0], [1, 0]], "short": 1.0}, steps=steps)
    tokens = seen_tokens(one)
    shares = np.diff(tokens, axis=0)[:, 0] / np.diff(tokens, axis=0).sum(1)
    assert shares[5:55].mean() == pytest.approx(0.5, abs=0.01)
    assert shares[70:].max() < 0.01
    ramp = loader({"long": [[0, 0], [1, 1]], "short": [[0, 1], [1, 0]]}, steps=steps)
    tokens = np.diff(seen_tokens(ramp), axis=0)
    for middle in (20, 50, 80):
        part = tokens[middle - 5 : middle + 5].sum(0)
        assert part[0] / part.sum() == pytest.approx(middle / steps, abs=0.03)
    with user_error("need the length of the training"):
        loader({"long": [[0, 0], [1, 1]], "short": 1.0})


def test_max_epochs_limits_a_source_and_others_take_its_part():
    weights = {"long": 1.0, "short": 1.0, "more": 8.0}
    steps = 100
    one = loader(weights, Mixing(max_epochs={"more": 2}), steps=steps)
    given = seen_tokens(one)
    tokens = given[min(steps, len(given) - 1)]
    share = tokens[2] / TOKENS["more"].sum() * steps / min(steps, len(given) - 1)
    assert share == pytest.approx(2, rel=0.03)
    assert tokens[0] == pytest.approx(tokens[1], rel=0.02)
    with user_error("raise it, or lower train.max_steps"):
        loader(weights, Mixing(max_epochs=1), steps=1000)
    with user_error("names none; the sources are"):
        loader(weights, Mixing(max_epochs={"none": 1}), steps=10)


@pytest.mark.parametrize("by", ["tokens", "rows"])
def test_temperature_flattens_the_sizes_of_sources(by):
    names = {"long": None, "short": None}
    sizes = np.array(
        [TOKENS[name].sum() if by == "tokens" else (TOKENS[name] > 0).sum() for name in names]
    )
    for temperature in (1.0, 2.0):
        mixture = loader(names, Mixing(by=by, temperature=temperature)).dataset.mixture
        expected = sizes ** (1 / temperature)
        assert list(mixture.shares().values()) == pytest.approx(expected / expected.sum(), abs=1e-3)


def test_repeats_count_in_a_mixture_without_weights():
    one = loader({"long": None, "short": None}, repeats=1.0).dataset.mixture
    one.repeats = [3.0, 1.0]
    one.set_total(None)
    expected = 3 * TOKENS["long"].sum()
    assert one.shares()["long"] == pytest.approx(
        expected / (expected + TOKENS["short"].sum()), abs=1e-3
    )


def settings(weights=(1.0, 1.0), **more):
    sources = [{"path": f"{i}.jsonl", "weight": weight} for i, weight in enumerate(weights)]
    return MLLMData.model_validate({"sources": sources, "pack_tokens": 64, **more})


@pytest.mark.parametrize(
    "given, error",
    [
        ({"weights": ([[0, 1]], 1.0)}, "needs data.mixture"),
        ({"weights": ([[0.5, 1], [0, 1]], 1.0), "mixture": {}}, "in the order of the progress"),
        ({"weights": ([[0, 1], [2, 1]], 1.0), "mixture": {}}, "from 0 to 1"),
        ({"weights": ([[0, 0]], 1.0), "mixture": {}}, "above 0"),
        ({"mixture": {"temperatur": 2}}, "mixture has no temperatur; choose from by, temperature"),
        ({"mixture": {"temperature": 2}}, "for sources without a weight"),
        ({"mixture": {"by": "rows", "max_epochs": 2}}, "count tokens"),
        ({"mixture": {"by": "bytes"}}, "'tokens' or 'rows'"),
    ],
)
def test_settings_without_a_meaning_are_refused(given, error):
    with pytest.raises(ValidationError, match=error):
        settings(**given)


def test_kit_with_a_mixture_loads_its_shares_and_knows_the_length_of_the_training(tmp_path):
    write_texts(tmp_path / "a.jsonl", 200)
    write_texts(tmp_path / "b.jsonl", 50, seed=1)
    sources = [
        {"path": str(tmp_path / "a.jsonl"), "weight": [[0, 1], [1, 0]]},
        {"path": str(tmp_path / "b.jsonl"), "weight": 1.0},
    ]
    made = kit(tmp_path, sources=sources, mixture={"by": "tokens"})
    with user_error("need the length of the training"):
        made.loader()
    made.train = SimpleNamespace(max_steps=20, epochs=None)
    one = made.loader()
    batches = list(one)
    held = np.zeros(2)
    for batch in batches:
        held += np.bincount(batch.sequence_fields["source"], batch.lengths, 2)
    assert held.tolist() == [float(seen["tokens"]) for seen in one.seen().values()]
    assert "a:" in made.summary()


def test_auto_batch_and_inspection_know_a_mixture_whose_shares_change(vlm_folder, capsys):
    write_texts(vlm_folder / "a.jsonl", 60)
    write_texts(vlm_folder / "b.jsonl", 40, seed=1)
    words = [
        "model.path=model",
        "data.sources.rows={path: a.jsonl, weight: [[0, 1], [1, 0]]}",
        "+data.sources.more={path: b.jsonl, weight: 1, hold_out: 0.1}",
        "data.mixture={by: tokens}",
        "train.max_steps=20",
    ]
    assert mvp("data inspect sft/lora --json", *words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["steps"] > 1
    first, second = (source["share"] for source in found["sources"])
    assert first + second == pytest.approx(1, abs=1e-3)
    assert {source["share_of"] for source in found["sources"]} == {"tokens"}
    assert mvp("data inspect sft/lora", *words) == 0
    assert f"{first:.1%} of the tokens of an epoch" in " ".join(capsys.readouterr().out.split())
