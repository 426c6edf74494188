"""Steps that change while a run goes on, and the algorithm that is made for them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import consilience as cs
from consilience.config import read_config
from consilience.core.errors import ConfigError
from support.scenarios import blobs, gradient, linear

ENGINE = cs.Simulator(device="cpu", precision="float64", chunk=5, workers=1)


def learn(algorithm, task, federation, rounds=3, **options):
    return cs.fit(algorithm, task, federation, rounds=rounds, engine=ENGINE, progress=False, **options)


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_tapered_steps_are_powers_of_n():
    assert torch.allclose(cs.optim.Tapered(delta=0.8).factor(numbers(1, 2, 10)), numbers(1, 2**-0.8, 10**-0.8))


def test_a_cosine_falls_from_one_to_its_floor_and_stays_there():
    factor = cs.optim.Cosine(total=10, floor=0.1).factor(numbers(1, 6, 11, 50))
    assert torch.allclose(factor, numbers(1, 0.55, 0.1, 0.1))


@pytest.mark.parametrize("delta", [0.5, 0.75, 1.01, 2.0])
def test_steps_that_break_a_condition_are_refused_and_both_conditions_named(delta):
    with pytest.raises(ConfigError, match=r"\(3/4, 1\].*sum to infinity.*stay finite.*check=False"):
        cs.optim.Tapered(delta=delta)
    assert cs.optim.Tapered(delta=delta, check=False).delta == delta


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: cs.optim.Tapered(unit="hours"), "unit must be one of steps, epochs, rounds"),
        (lambda: cs.optim.Tapered(delta=-1.0, check=False), "must not be negative"),
        (lambda: cs.optim.Cosine(total=0), "total must be at least 1"),
        (lambda: cs.optim.PerClient(), "one for each client"),
        (lambda: cs.optim.PerClient(factors=(1.0,), of=cs.optim.Tapered(unit="rounds")), "they must be the same"),
    ],
)
def test_wrong_schedules_get_one_sentence(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize(
    ("unit", "n"),
    [("rounds", [3, 3]), ("epochs", [6, 6]), ("steps", [5 * 4 + 2, 5 * 1 + 2])],
)
def test_n_counts_rounds_epochs_or_a_clients_own_steps_from_the_beginning(unit, n):
    """Round 3, second of two epochs, second step; clients with 4 batches and 1 batch an epoch."""
    assert cs.optim.Tapered(unit=unit).count(3, 1, 1, 2, torch.tensor([4.0, 1.0])).tolist() == n


@pytest.mark.parametrize("unit", ["steps", "epochs", "rounds"])
def test_full_batch_descent_with_tapering_steps_is_what_one_does_by_hand(unit):
    task, federation = linear()
    train = cs.SGD(lr=0.3, epochs=2, batch_size=100, schedule=cs.optim.Tapered(delta=0.9, unit=unit))
    run = learn(cs.SAFL(train), task, federation, rounds=3)
    w, n = task.initial().double(), 0
    data = [cs.Dataset(c.x.double(), c.y.double()) for c in map(federation.client, range(len(federation)))]
    for number in range(1, 4):
        ends = []
        for client in data:
            here = w.clone()
            for epoch in range(2):
                n = number if unit == "rounds" else 2 * (number - 1) + epoch + 1
                here -= 0.3 / n**0.9 * gradient(client, here)
            ends.append(here)
        w = torch.stack(ends).mean(0)
    assert torch.allclose(run.posterior.mean, w, rtol=1e-10)


def test_clients_may_have_steps_of_their_own():
    task, federation = linear()
    factors = (1.0, 0.0, 1.0, 2.0, 0.5)
    own = cs.SGD(lr=0.1, batch_size=100, schedule=cs.optim.PerClient(factors=factors))
    run = learn(cs.SAFL(own), task, federation, rounds=1)
    w = task.initial().double()
    data = [cs.Dataset(c.x.double(), c.y.double()) for c in map(federation.client, range(len(federation)))]
    moved = torch.stack([-0.1 * c * gradient(client, w) for c, client in zip(factors, data, strict=True)]).mean(0)
    assert torch.allclose(run.posterior.mean, w + moved, rtol=1e-10)
    with pytest.raises(cs.ConsilienceError, match="has 2 values, but there is a client 4"):
        learn(cs.SAFL(replace(own, schedule=cs.optim.PerClient(factors=(1.0, 1.0)))), task, federation, rounds=1)


@pytest.mark.parametrize(
    "train", [cs.optim.AMSGrad(lr=0.01), cs.optim.SGLD(lr=0.01), cs.optim.SGHMC(lr=0.01), cs.SGD(momentum=0.9)]
)
def test_a_schedule_of_ones_changes_nothing_for_any_chain(train):
    task, federation, _ = blobs()
    ones = (cs.optim.Tapered(delta=0.0, check=False, unit="steps"), cs.optim.PerClient(factors=(1.0,) * 6))
    plain = learn(cs.FedAvg(replace(train, batch_size=8)), task, federation).posterior.mean
    for schedule in ones:
        other = learn(cs.FedAvg(replace(train, batch_size=8, schedule=schedule)), task, federation).posterior.mean
        torch.testing.assert_close(other, plain, rtol=1e-10, atol=1e-12)


def test_with_constant_steps_and_clients_of_one_size_it_is_fedavg():
    task, federation, _ = blobs()
    assert len(set(federation.sizes.tolist())) == 1
    train = cs.SGD(lr=0.1, batch_size=5, epochs=2)
    a, b = (learn(method, task, federation).posterior.mean for method in (cs.SAFL(train), cs.FedAvg(train)))
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_clients_count_alike_unless_examples_are_to_count():
    task, federation = linear()
    train = cs.SGD(lr=0.1, batch_size=5)
    uniform, weighted, fedavg = (
        learn(method, task, federation).posterior.mean
        for method in (cs.SAFL(train), cs.SAFL(train, by_examples=True), cs.FedAvg(train))
    )
    torch.testing.assert_close(weighted, fedavg, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(uniform, fedavg)


def test_the_average_is_the_mean_over_all_rounds():
    task, federation = linear()
    path = []
    plain = cs.SAFL(cs.SGD(lr=0.1, batch_size=5, schedule=cs.optim.Tapered()))
    learn(plain, task, federation, rounds=4, callbacks=[lambda run, _: path.append(run.posterior.mean.clone())])
    averaged = learn(replace(plain, average=True), task, federation, rounds=4).posterior.mean
    torch.testing.assert_close(averaged, torch.stack(path).mean(0), rtol=1e-10, atol=1e-12)


def test_a_config_names_a_schedule(tmp_path):
    (tmp_path / "c.toml").write_text(
        '[data]\nname = "digits"\n[partition]\nname = "iid"\nclients = 4\n[model]\nname = "logistic"\n'
        '[algorithm]\nname = "SAFL"\nlr = 0.2\n[algorithm.train]\nname = "SGD"\n'
        'schedule = { name = "Tapered", delta = 0.8, unit = "rounds" }\n[run]\nrounds = 2\n'
    )
    method = read_config(tmp_path / "c.toml").algorithm()
    assert method == cs.SAFL(cs.SGD(lr=0.2, schedule=cs.optim.Tapered(delta=0.8, unit="rounds")))
    with pytest.raises(ConfigError, match="delta must lie in"):
        read_config(tmp_path / "c.toml", ["algorithm.train.schedule.delta=0.5"]).algorithm()


def test_tapering_steps_come_closer_to_the_minimum_than_constant_ones():
    task, federation = linear(sizes=(40, 40, 40), names=None)
    noise = 3 * torch.randn(120, 1, generator=torch.Generator().manual_seed(0))
    federation = replace(federation, data=replace(federation.data, y=federation.data.y + noise))
    every = torch.cat([federation.data.x, torch.ones(len(federation.data), 1)], dim=1).double()
    best = torch.linalg.lstsq(every, federation.data.y.double()).solution.squeeze(1)
    error = {}
    for schedule in (None, cs.optim.Tapered(delta=0.8, unit="steps")):
        train = cs.SGD(lr=0.4, batch_size=4, schedule=schedule)
        error[schedule] = float((learn(cs.SAFL(train), task, federation, rounds=60).posterior.mean - best).norm())
    assert error[cs.optim.Tapered(delta=0.8, unit="steps")] < 0.3 * error[None]
    assert math.isfinite(error[None])


@pytest.mark.parametrize(
    "schedule",
    [
        None,
        cs.optim.Tapered(),
        cs.optim.Tapered(unit="rounds"),
        cs.optim.Tapered(unit="steps"),
        cs.optim.PerClient(factors=(1.0, 3.0, 0.5, 2.0, 1.0)),
    ],
    ids=str,
)
def test_a_clients_time_is_the_sum_of_its_step_sizes(schedule):
    _, federation = linear()
    ids = federation.sizes.argsort(descending=True)
    cohort = cs.data.Cohort(federation, ids, round=3, round_size=len(ids), seed=0)
    train = cs.SGD(lr=0.2, epochs=2, batch_size=4, schedule=schedule)
    walked, taken = torch.zeros(len(ids), 1), torch.zeros(len(ids), 1)
    for epoch in range(train.epochs):
        for step, (k, _) in enumerate(cohort.epoch(epoch, train.batch_size)):
            walked[:k] += train.pace(cohort, epoch, step, k)
            taken[:k] += 1
    torch.testing.assert_close(train.time(cohort), walked)
    assert torch.equal(train.steps(cohort), taken)
