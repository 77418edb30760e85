"""The flow kit: draws are functions of (seed, epoch, sample), the path, guidance, and the distributions of times."""

import pytest
import torch
from conftest import user_error

from mvp_engine.data import SampleLoader
from mvp_engine.kit import flow


def items(count):
    return [{"clean": torch.full((3,), float(i)), "label": torch.tensor(i)} for i in range(count)]


def batches(rank, ranks, workers=0, size=2):
    """What each sample of the second epoch gets, by its label."""
    dataset = flow.FlowDataset(items(8), flow.Flow(draws=2), seed=5)
    loader = SampleLoader(
        dataset,
        micro_batch_size=size,
        global_batch_size=8,
        rank=rank,
        world_size=ranks,
        seed=5,
        num_workers=workers,
    )
    loader.set_epoch(1)
    found = {}
    for batch in loader:
        for i, label in enumerate(batch["label"].tolist()):
            found[label] = {name: value[i] for name, value in batch.items()}
    return found


def test_flow_draws_are_equal_on_any_ranks_micro_batches_and_workers():
    alone = batches(0, 1)
    others = [{**batches(0, 2), **batches(1, 2)}, batches(0, 1, size=3), batches(0, 1, workers=1)]
    for other in others:
        assert other.keys() == alone.keys()
        for label, values in alone.items():
            assert all(torch.equal(other[label][name], value) for name, value in values.items())


def test_flow_draws_of_epochs_samples_and_seeds_differ():
    first = flow.draw(0, 0, 0, (4,), draws=3)
    for other in (
        flow.draw(1, 0, 0, (4,), 3),
        flow.draw(0, 1, 0, (4,), 3),
        flow.draw(0, 0, 1, (4,), 3),
    ):
        assert not torch.equal(first.noise, other.noise)
        assert not torch.equal(first.times, other.times)
    assert not torch.equal(first.noise[0], first.noise[1])


@pytest.mark.parametrize(
    "kind, mean",
    [("beta", 0.001 + 0.999 * 0.6), ("uniform", 0.001 + 0.999 / 2), ("logit_normal", 0.5005)],
)
def test_flow_times_have_the_mean_of_their_distribution(kind, mean):
    times = flow.draw(0, 0, 0, (1,), draws=20000, times=flow.FlowTimes(kind=kind)).times
    assert float(times.mean()) == pytest.approx(mean, abs=0.01)
    assert 0 < float(times.min()) <= float(times.max()) <= 1


def test_flow_beta_times_are_those_of_torch():
    times = flow.draw(0, 0, 0, (1,), draws=20000).times.sort().values
    torch.manual_seed(0)
    wanted = (torch.distributions.Beta(1.5, 1.0).sample((20000,)) * 0.999 + 0.001).sort().values
    assert float((times - wanted).abs().max()) < 0.03  # quantiles


def test_flow_times_past_the_noise_are_a_user_error():
    with user_error("set scale to at most 1 - offset"):
        flow.draw(0, 0, 0, (1,), times=flow.FlowTimes(scale=1.0, offset=0.1))


def test_flow_guidance_extrapolates_from_the_unconditional_velocity():
    velocity, without = torch.tensor([3.0]), torch.tensor([1.0])
    for scale, wanted in ((0.0, 1.0), (1.0, 3.0), (2.0, 5.0)):
        assert flow.guided_velocity(velocity, without, scale).item() == wanted


def test_flow_masked_entries_have_no_loss_and_no_gradient():
    predicted = torch.tensor([1.0, float("inf")], requires_grad=True)
    losses = flow.velocity_losses(
        predicted, torch.zeros(2), torch.zeros(2), torch.tensor([True, False])
    )
    losses.sum().backward()
    assert losses.tolist() == [1.0, 0.0]
    assert predicted.grad is not None
    assert predicted.grad[0] == 2.0


def test_flow_euler_on_a_gaussian_field_gives_its_moments():
    """For data of mean 2 and scale 0.5, the exact velocity is known: samples must have that mean and scale."""
    mean, scale = 2.0, 0.5

    def velocity(x, times):
        t = times[:, None]
        variance = t**2 + (1 - t) ** 2 * scale**2
        offset = x - (1 - t) * mean
        return (t - (1 - t) * scale**2) / variance * offset - mean

    noise = flow.start_noise(0, range(4000), (1,))
    samples = flow.euler_sample(velocity, noise, steps=100)
    assert float(samples.mean()) == pytest.approx(mean, abs=0.05)
    assert float(samples.std()) == pytest.approx(scale, abs=0.05)


def test_flow_start_noise_of_a_sample_does_not_depend_on_its_batch():
    assert torch.equal(flow.start_noise(3, [4, 7], (2,))[1:], flow.start_noise(3, [7], (2,)))
