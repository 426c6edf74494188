import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience.core.errors import ConfigError
from consilience.matching import BetaBernoulli, DPMeans, Known, Units, match
from support.nets import draws, federation

quick = settings(max_examples=12, deadline=None)
widths = st.lists(st.integers(1, 6), min_size=1, max_size=5)
seeds = st.integers(0, 10_000)


def naive_objective(clients, assignments, penalty):
    """Σ ‖v − centre‖² + penalty · clusters, each centre the mean of its units."""
    values, labels = torch.cat([u.values for u in clients]), torch.cat(assignments)
    spread = sum(
        float((values[labels == k] - values[labels == k].mean(0)).square().sum()) for k in set(labels.tolist())
    )
    return spread + penalty * len(set(labels.tolist()))


@quick
@given(widths, st.floats(0.01, 50), st.sampled_from([3, 700]), seeds)
def test_the_objective_never_rises(some, penalty, limit, seed):
    clients, mean = federation(some, 4, seed)
    found = DPMeans(penalty, limit=limit).cluster(clients, mean, None, 0)
    assert bool((torch.tensor(found.trace).diff() <= 1e-9).all())
    assert naive_objective(clients, found.assignments, penalty) <= found.trace[-1] + 1e-9
    assert len(found) <= limit


@quick
@given(widths, st.floats(0.01, 10), st.sampled_from([3, 700]), seeds)
def test_a_sweep_takes_one_unit_after_the_other(some, penalty, limit, seed):
    clients, mean = federation(some, 4, seed)
    values = torch.cat([units.values for units in clients])
    centres, labels = [values.mean(0)], []
    for value in values:
        distances = [float((value - centre).square().sum()) for centre in centres]
        if min(distances) > penalty and len(centres) < limit:
            centres.append(value)
            distances.append(0.0)
        labels.append(distances.index(min(distances)))
    found = torch.cat(DPMeans(penalty, sweeps=1, limit=limit).cluster(clients, mean, None, 0).assignments).tolist()
    assert len(set(zip(labels, found, strict=True))) == len(set(labels)) == len(set(found))


@quick
@given(widths, seeds)
def test_no_penalty_keeps_every_distinct_unit(some, seed):
    clients, mean = federation(some, 4, seed, plain=True)
    clients.append(Units(clients[0].values.clone(), clients[0].precision))  # once more: not distinct
    found = DPMeans(penalty=1e-9).cluster(clients, mean, None, 0)
    assert len(found) == sum(some)
    assert torch.equal(found.assignments[-1], found.assignments[0])
    for units, assignment in zip(clients, found.assignments, strict=True):
        torch.testing.assert_close(found.mean[assignment], units.values, rtol=1e-5, atol=1e-5)


@quick
@given(widths, seeds)
def test_an_endless_penalty_leaves_one_cluster(some, seed):
    clients, mean = federation(some, 4, seed, plain=True)
    found = DPMeans(penalty=1e9).cluster(clients, mean, None, 0)
    centre = torch.cat([units.values for units in clients]).mean(0, keepdim=True)
    torch.testing.assert_close(found.mean, centre, rtol=1e-5, atol=1e-5)


def test_separate_clouds_are_found():
    cloud = torch.arange(30) % 3
    values = 20 * torch.eye(3, 4).double()[cloud] + 0.1 * draws(30, 4)
    clients = [Units(part, torch.ones(4).double()) for part in values.split([11, 12, 7])]
    found = DPMeans(penalty=10).cluster(clients, torch.zeros(4).double(), None, 0)
    labels = torch.cat(found.assignments)
    assert len(found) == 3
    assert {int(labels[k]) for k in range(3)} == {0, 1, 2}
    assert torch.equal(labels, labels[:3][cloud])


def test_a_centre_weighs_units_by_how_much_is_known_of_them():
    one, two = torch.tensor([[1.0, 1.0]]).double(), torch.tensor([[2.0, 5.0]]).double()
    clients = [Units(one, torch.tensor([3.0, 0.0]).double()), Units(two, torch.tensor([1.0, 0.0]).double())]
    found = DPMeans(penalty=1e9).cluster(clients, torch.tensor([0.0, 0.1]).double(), None, 0)
    torch.testing.assert_close(found.mean, torch.tensor([[1.25, 0.1]]).double(), rtol=1e-5, atol=1e-5)


def test_streams_are_refused():
    clients, mean = federation([2, 3], 4)
    one = torch.ones(1, 4).double()
    known = Known(one, one, torch.ones(2, 1).long(), torch.tensor(2))
    with pytest.raises(ConfigError, match="DP-means has no posterior"):
        DPMeans().cluster(clients, mean, known, 0)
    layers = [[(draws(3, 2), None), (draws(2, 3), None)]] * 2
    with pytest.raises(ConfigError, match="DP-means has no posterior"):
        match(layers, DPMeans(), memory=match(layers, BetaBernoulli()).memory)


@pytest.mark.parametrize(
    ("name", "value", "bound"), [("penalty", 0.0, "above 0"), ("sweeps", 0, "at least 1"), ("limit", 0, "at least 1")]
)
def test_settings_out_of_bounds_are_refused(name, value, bound):
    with pytest.raises(ConfigError, match=f"{name} must be {bound}, got {value}"):
        DPMeans(**{name: value})
