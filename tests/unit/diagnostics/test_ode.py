"""The ODE behind the mean of the clients' weights: its field, its clock, and how far a run is from it."""

import math

import pytest
import torch
from scipy.linalg import expm
from torch import nn

import consilience as cs
from consilience.algorithms import FedAvg
from consilience.algorithms.safl import SAFL
from consilience.core.errors import ConfigError, DataError, TaskError
from consilience.data.cohort import Cohort
from consilience.diagnostics import ode
from consilience.optim import SGD, SGLD
from consilience.optim.schedules import PerClient, Tapered
from support.scenarios import SIZES, gradient, linear

ENGINE = cs.Simulator(device="cpu", chunk=5, workers=1, threads=1, precision="float64")
WHERE = torch.tensor([0.3, -1.0, 2.0, 0.5], dtype=torch.float64)


def gradients(federation):
    """∇f_i at WHERE, a row a client."""
    found = [gradient(federation.client(k), WHERE.float()) for k in range(len(federation))]
    return torch.stack(found).double()


def matrix(federation, share):
    """h(w) = b − A w of `linear`: A and the equilibrium."""
    a, b = torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for k, p in enumerate(share.tolist()):
        data = federation.client(k)
        x = torch.cat([data.x, torch.ones(len(data), 1)], 1).double()
        a += p * x.T @ x / len(x)
        b += p * (x.T @ data.y.double()).squeeze(1) / len(x)
    return a, torch.linalg.solve(a, b)


# The field


def test_the_field_of_clients_with_one_step_each_is_the_mean_gradient():
    task, federation = linear()
    field = ode.mean_field(task, federation, SGD(batch_size=100))
    torch.testing.assert_close(field(WHERE), -gradients(federation).mean(0), rtol=1e-5, atol=1e-5)


def test_a_client_that_takes_more_steps_pulls_more():
    task, federation = linear()
    steps = torch.tensor([math.ceil(n / 4) for n in SIZES]).double()
    field = ode.mean_field(task, federation, SGD(batch_size=4))
    torch.testing.assert_close(field(WHERE), -(steps / steps.sum()) @ gradients(federation), rtol=1e-5, atol=1e-5)


def test_weights_own_steps_and_weight_decay_are_in_the_field():
    task, federation = linear()
    p, own = torch.tensor(SIZES).double(), (1.0, 2.0, 0.5, 1.0, 3.0)
    train = SGD(batch_size=100, weight_decay=0.3, schedule=PerClient(factors=own))
    field = ode.mean_field(task, federation, train, weights=p)
    share = p * torch.tensor(own)
    expected = -(share / share.sum()) @ gradients(federation) - 0.3 * WHERE
    torch.testing.assert_close(field(WHERE), expected, rtol=1e-5, atol=1e-5)


def test_dropout_augmentation_streams_and_large_models_are_refused():
    task, federation = linear(sizes=(7, 3, 2, 12, 5))
    data = federation.data
    dropping = cs.Regression(nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1)))
    changing = cs.Regression(nn.Linear(3, 1), augment=lambda x, key: x)
    large = cs.Regression(nn.Sequential(nn.Linear(3, 1_100_000), nn.Linear(1_100_000, 1)))
    for wrong, said in ((dropping, "dropout"), (changing, "augment"), (large, "too many")):
        with pytest.raises(TaskError, match=said):
            ode.mean_field(wrong, federation, SGD())
    with pytest.raises(DataError, match="stream"):
        ode.mean_field(task, federation.stream(2), SGD())
    with pytest.raises(DataError, match="without examples"):
        ode.mean_field(task, cs.Federation.from_owner(data, torch.zeros(len(data)).long(), clients=2), SGD())


def test_what_has_no_such_ode_is_refused():
    task, federation = linear()
    for train in (SGD(momentum=0.9), SGLD()):
        with pytest.raises(ConfigError, match="plain SGD"):
            ode.mean_field(task, federation, train)
    with pytest.raises(ConfigError, match="epochs or rounds"):
        ode.mean_field(task, federation, SGD(batch_size=4, schedule=Tapered(unit="steps")))
    with pytest.raises(ConfigError, match="5 numbers"):
        ode.mean_field(task, federation, SGD(), weights=torch.ones(4))


# The clock


@pytest.mark.parametrize("unit", ["steps", "epochs", "rounds"])
def test_time_is_the_sum_of_all_steps_averaged_over_ragged_clients(unit):
    _, federation = linear()
    rounds, epochs, batch, p = 3, 2, 4, torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2])
    train = SGD(lr=0.5, epochs=epochs, batch_size=batch, schedule=Tapered(delta=0.8, unit=unit))
    expected = [0.0]
    for r in range(1, rounds + 1):
        expected.append(expected[-1])
        for size, weight in zip(SIZES, p.tolist(), strict=True):
            steps = math.ceil(size / batch)
            for e in range(epochs):
                for s in range(steps):
                    passed = (r - 1) * epochs + e
                    n = {"steps": passed * steps + s + 1, "epochs": passed + 1, "rounds": r}[unit]
                    expected[-1] += weight * 0.5 * n**-0.8
    found = ode.times(train, federation, rounds, p)
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=1e-6, atol=1e-7)


def test_without_a_schedule_time_is_even():
    _, federation = linear()
    found = ode.times(SGD(lr=0.1, epochs=3, batch_size=100), federation, 4)
    torch.testing.assert_close(found, 0.3 * torch.arange(5).double())


def ones(theta, batch, shared=()):
    """A gradient of −1: θ moves by the sum of a client's steps."""
    return -torch.ones_like(theta), torch.zeros(len(theta))


@pytest.mark.parametrize("unit", ["steps", "epochs", "rounds"])
def test_the_clock_is_that_of_the_chains_themselves(unit):
    _, federation = linear()
    train = SGD(lr=0.5, epochs=2, batch_size=4, schedule=PerClient(unit, (1.0, 2.0, 0.5, 1.0, 3.0), Tapered(unit=unit)))
    ids = federation.sizes.argsort(descending=True)
    for r in (1, 2, 3):
        cohort = Cohort(federation, ids, round=r, round_size=5, seed=0, dtype=torch.float64)
        *_, last = train.iterates(ones, torch.zeros(1, dtype=torch.float64), cohort)
        gone = last[:, 0]
        torch.testing.assert_close(gone, ode.drifts(train, federation, 3)[r - 1, ids], rtol=1e-6, atol=1e-8)


# Tracking


def test_the_solution_of_a_quadratic_is_the_matrix_exponential():
    task, federation = linear()
    a, end = matrix(federation, torch.full((5,), 0.2))
    clock = torch.linspace(0, 2, 9).double()
    begin = torch.zeros(4, dtype=torch.float64)
    still = begin.expand(9, -1)
    (window,) = ode.track(ode.mean_field(task, federation, SGD(batch_size=100)), still, clock, [0], 2.0).windows
    for t, found in zip(clock, window.solution, strict=True):
        expected = end + torch.from_numpy(expm(-float(t) * a.numpy())) @ (begin - end)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert window.error == pytest.approx(float(window.solution.norm(dim=1).max()))


def test_a_path_of_tiny_steps_is_on_the_ode():
    _, federation = linear()
    a, end = matrix(federation, torch.full((5,), 0.2))
    step, points = 5e-4, [torch.zeros(4, dtype=torch.float64)]
    for _ in range(4_000):
        points.append(points[-1] - step * a @ (points[-1] - end))
    path = torch.stack(points)[::20]
    found = ode.track(lambda w: a @ (end - w), path, 20 * step * torch.arange(len(path)).double(), [0, 50, 100], 0.5)
    assert found.starts == [0, 50, 100]
    assert max(found.errors) < 5e-3
    assert "round" in found.plot().svg


def test_a_run_is_followed_in_three_lines():
    task, federation = linear()
    train = SGD(lr=0.2, epochs=1, batch_size=100, schedule=Tapered())
    path = ode.Path()
    run = cs.fit(SAFL(train, average=True), task, federation, rounds=60, callbacks=[path], engine=ENGINE)
    found = path.track(window=0.2)
    assert path.points.shape == (61, 4)
    torch.testing.assert_close(path.points[-1], run.server.model.theta)  # not its average
    torch.testing.assert_close(path.points[0], torch.zeros(4, dtype=torch.float64))
    assert found.errors[-1] < 0.3 * found.errors[0]
    assert repr(found).startswith("Tracking(window 0.2; ")


def test_the_weights_of_another_method_must_be_given():
    task, federation = linear()
    path = ode.Path()
    cs.fit(FedAvg(SGD(lr=0.01, batch_size=100)), task, federation, rounds=20, callbacks=[path], engine=ENGINE)
    with pytest.raises(ConfigError, match="weights"):
        path.track(window=0.1)
    found = path.track([1], window=0.1, weights=federation.sizes)
    assert found.errors[0] < 0.1
    by_size = ode.Path()
    method = SAFL(SGD(lr=0.01, batch_size=100), by_examples=True)
    cs.fit(method, task, federation, rounds=20, callbacks=[by_size], engine=ENGINE)
    assert by_size.track([1], window=0.1).errors == pytest.approx(found.errors, rel=1e-6)


def test_windows_with_too_few_rounds_are_refused():
    path, clock = torch.zeros(5, 2), torch.arange(5.0)
    cases = [
        ([0], 1.0, "1 rounds in it"),
        ([3], 2.0, "run more rounds"),
        (None, 9.0, "no window"),
        ([0], 0.0, "positive"),
    ]
    for starts, window, said in cases:
        with pytest.raises(ConfigError, match=said):
            ode.track(lambda w: -w, path, clock, starts, window)
    with pytest.raises(ConfigError, match="times"):
        ode.track(lambda w: -w, path, clock[1:], [0], 1.0)
    with pytest.raises(ConfigError, match="empty"):
        _ = ode.Path().points
