"""What all chains share: priors, epochs, cohorts, the guard against stiff priors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import consilience as cs
from consilience.core import Point, guards
from consilience.core.errors import ConfigError
from consilience.core.gaussian import Gaussian
from consilience.core.records import rows
from consilience.optim import SGD, SGHMC, SGLD, Adam, AMSGrad, Cosine, PerClient, RMSprop, Tapered, epoch_means
from support.training import EXACT, SIZES, by_torch, one_by_one, walk, world

KINDS = (SGD, SGLD, SGHMC, Adam, AMSGrad, RMSprop)


@pytest.mark.parametrize("form", ["scalar", "diagonal", "full"])
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_a_prior_adds_the_gradient_of_its_energy(form, own):
    task, group = world()
    size, clients = task.size, (len(SIZES),) if own else ()
    made = torch.Generator().manual_seed(2)
    eta = 0.1 * torch.randn(*clients, size, generator=made).double()
    lam = 0.1 * torch.rand(*clients, 1 if form == "scalar" else size, generator=made).double()
    prior = Gaussian(eta, torch.diag_embed(lam) + 0.001 if form == "full" else lam)
    sgd = SGD(lr=0.1, batch_size=5, epochs=2, momentum=0.9)
    trained = sgd(task, task.initial(), group, prior=prior)
    for k in range(len(SIZES)):
        one = Gaussian(prior.eta[k], prior.lam[k]) if own else prior

        def energy(theta, one=one):
            scaled = one.lam @ theta if one.full else one.lam * theta
            return 0.5 * theta @ scaled - one.eta @ theta

        torch.testing.assert_close(trained[k], by_torch(sgd, group, k, energy)[0][-1], **EXACT)


def test_weight_decay_is_a_prior_around_zero():
    task, group = world()
    prior = Gaussian(torch.zeros(task.size).double(), torch.full((1,), 0.2, dtype=torch.float64))
    decayed = SGD(batch_size=5, weight_decay=0.2)(task, task.initial(), group)
    torch.testing.assert_close(decayed, SGD(batch_size=5)(task, task.initial(), group, prior=prior), **EXACT)


def pulled(task, theta, batch, anchor, strength):
    """A loss with an own and a shared argument."""
    return task.loss_one(theta, batch) + 0.5 * strength * (theta - anchor.mean).square().sum()


def test_own_arguments_follow_the_clients_that_still_have_a_batch():
    task, group = world()
    made = torch.Generator().manual_seed(3)
    anchor = Gaussian(torch.randn(4, task.size, generator=made).double(), torch.ones(4, 1).double())
    strength = torch.tensor(0.3, dtype=torch.float64)
    got = SGD(batch_size=5, epochs=2)(task, task.initial(), group, anchor, shared=(strength,), loss=pulled)
    prior = Gaussian(0.3 * anchor.eta, 0.3 * anchor.lam)
    expected = SGD(batch_size=5, epochs=2)(task, task.initial(), group, prior=prior)
    torch.testing.assert_close(got, expected, **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_moves_the_same_in_every_cohort_from_a_start_of_its_own(kind):
    chain = kind(batch_size=5, epochs=2, longest=3)
    task, group = world()
    start = task.initial() + 0.1 * torch.arange(4).double().unsqueeze(1)
    kept = start.clone()
    torch.testing.assert_close(chain(task, start, group), one_by_one(chain, task, group, start), **EXACT)
    assert torch.equal(start, kept)


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_one_iterate_an_epoch_and_the_last_is_the_result(kind):
    task, group = world()
    chain = kind(batch_size=5, epochs=3)
    samples = [sample.clone() for sample in chain.iterates(task.gradient(), task.initial(), group)]
    assert len(samples) == 3
    assert torch.equal(samples[-1], chain(task, task.initial(), group))
    assert torch.equal(samples[0], replace(chain, epochs=1)(task, task.initial(), group))


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_epochs_are_one_pass_over_copies(kind):
    task, group = world()
    mixed = kind(batch_size=5, epochs=3, mixed=True)
    samples = [sample.clone() for sample in mixed.iterates(task.gradient(), task.initial(), group)]
    assert len(samples) == 1
    torch.testing.assert_close(samples[0], one_by_one(mixed, task, group), **EXACT)
    taken = torch.tensor([-(-3 * n // 5) for n in SIZES]).double().unsqueeze(1)
    assert torch.equal(mixed.steps(group), taken)
    torch.testing.assert_close(mixed.time(group), mixed.lr * taken, **EXACT)
    counts = torch.zeros_like(taken)
    for _ in mixed.iterates(task.gradient(), task.initial(), group, look=lambda now, _: counts[: len(now)].copy_(now)):
        assert torch.equal(counts, taken)


def test_one_mixed_epoch_is_an_epoch():
    task, group = world()
    assert torch.equal(
        SGD(batch_size=5, mixed=True)(task, task.initial(), group), SGD(batch_size=5)(task, task.initial(), group)
    )


def test_the_mean_of_an_epoch_is_over_every_clients_own_steps():
    task, group = world()
    sgd = SGD(lr=0.3, batch_size=5, epochs=3)
    means = [mean.clone() for mean in epoch_means(sgd, task, task.initial(), group, burn_in=1)]
    for k in range(len(SIZES)):
        theta = task.initial().unsqueeze(0)
        for epoch in range(3):
            seen = []
            for live, batch in group.epoch(epoch, sgd.batch_size):
                if k < live:
                    theta = theta - sgd.lr * task.gradient()(theta, rows(batch, slice(k, k + 1)))[0]
                    seen.append(theta)
            expected = torch.cat(seen).mean(0) if epoch else theta[0]  # the burn-in gives the last parameters
            torch.testing.assert_close(means[epoch][k], expected, **EXACT)


def test_one_step_is_its_own_mean():
    task, group = world()
    for chain in (SGD(batch_size=100, epochs=3, momentum=0.9), SGLD(batch_size=100, epochs=3)):
        plain = [sample.clone() for sample in chain.iterates(task.gradient(), task.initial(), group)]
        means = [mean.clone() for mean in epoch_means(chain, task, task.initial(), group)]
        assert all(torch.equal(a, b) for a, b in zip(plain, means, strict=True))


def watched(chain, task, group):
    """(steps that each client has taken, θ) after every step."""
    seen = []
    look = lambda taken, now: seen.append((taken.clone(), now.clone()))  # noqa: E731
    for _ in chain.iterates(task.gradient(), task.initial(), group, look=look):
        pass
    return seen


def test_an_epoch_ends_after_the_longest():
    task, group = world()
    chain = SGD(lr=0.1, batch_size=5, epochs=3, longest=2)
    seen = watched(chain, task, group)
    assert [len(now) for _, now in seen] == [4, 3] * 3
    assert [taken[-1].item() for taken, _ in seen] == [1, 2, 2, 4, 3, 6]  # the fourth client's, the third's, …
    assert chain.steps(group)[:, 0].tolist() == [6, 6, 6, 3]
    torch.testing.assert_close(chain.time(group), chain.lr * chain.steps(group), **EXACT)
    for k in range(len(SIZES)):
        torch.testing.assert_close(seen[-1 if k < 3 else -2][1][k], by_torch(chain, group, k)[0][-1], **EXACT)
    far, free = (replace(chain, longest=longest)(task, task.initial(), group) for longest in (100, None))
    assert torch.equal(far, free)


@pytest.mark.parametrize("kind", KINDS)
def test_a_last_smaller_batch_is_left_out_if_it_is_not_the_only_one(kind):
    task, group = world()
    chain = kind(lr=0.01, batch_size=5, epochs=2, drop_last=True)
    kept = [max(1, n // 5) for n in SIZES]
    assert any(n % 5 and n > 5 for n in SIZES)
    assert min(SIZES) < 5
    assert chain.steps(group)[:, 0].tolist() == [2 * n for n in kept]
    seen = watched(chain, task, group)
    assert [len(now) for _, now in seen] == 2 * [sum(n > step for n in kept) for step in range(max(kept))]
    torch.testing.assert_close(chain(task, task.initial(), group), one_by_one(chain, task, group), **EXACT)
    if kind not in (SGLD, SGHMC):
        for k in range(len(SIZES)):
            last = chain(task, task.initial(), group)[k]
            torch.testing.assert_close(last, by_torch(chain, group, k)[0][-1], **EXACT)


def test_with_mixed_epochs_one_batch_is_left_out_in_all():
    task, group = world()
    mixed = SGD(batch_size=5, epochs=3, mixed=True, drop_last=True)
    assert mixed.steps(group)[:, 0].tolist() == [max(1, 3 * n // 5) for n in SIZES]
    torch.testing.assert_close(mixed(task, task.initial(), group), one_by_one(mixed, task, group), **EXACT)


def test_look_sees_every_step_and_may_change_it():
    task, group = world()
    chain = SGD(lr=0.1, batch_size=5, epochs=2)
    seen = watched(chain, task, group)
    assert [len(now) for _, now in seen] == 2 * [4, 3, 2, 1, 1, 1, 1]
    assert [taken[0].item() for taken, _ in seen] == list(range(1, 15))
    assert [taken[1].item() for taken, _ in seen if len(taken) > 1] == [1, 2, 3, 4, 5, 6]  # its own, in two epochs

    def back(taken, now):
        now.copy_(task.initial().expand_as(now))

    for last in chain.iterates(task.gradient(), task.initial(), group, look=back):
        assert torch.equal(last, task.initial().expand(4, -1))


FACTORS = PerClient(factors=(1.0, 3.0, 0.5, 0.0))
SCHEDULES = [None, Tapered(), Tapered(unit="rounds"), Tapered(unit="steps"), FACTORS]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_time_of_a_round_is_the_sum_of_the_step_sizes(schedule):
    """Along a gradient of 1 the distance is the time."""
    _, group = world()
    chain = SGD(lr=0.1, batch_size=5, epochs=3, longest=2, schedule=schedule)
    time = chain.time(group)
    torch.testing.assert_close(-walk(chain, group, 1, slope=1.0), time, **EXACT)
    pace = torch.tensor([1.0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(chain.time(group, pace), time * pace, **EXACT)


# Stiff priors


def stiff_entries(chain, lam, pace=None):
    """(parameters after a round on flat ground in a prior of precision Λ and mean 0.3, stiff entries counted)."""
    _, group = world()
    prior = Gaussian.of(torch.full((2,), 0.3, dtype=torch.float64), torch.tensor(lam, dtype=torch.float64))

    def flat(theta, batch, shared=()):
        return torch.zeros_like(theta), theta.new_zeros(len(theta))

    pace = None if pace is None else torch.tensor(pace, dtype=torch.float64)
    with guards.watch() as acted:
        for last in chain.iterates(flat, torch.zeros(2).double(), group, pace=pace, prior=prior):
            theta = last
    return theta, int(acted["stiff prior"])


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_prior_far_too_stiff_for_the_step_is_followed_and_counted(momentum):
    got, counted = stiff_entries(SGD(lr=0.05, momentum=momentum, epochs=30), [1e4, 1e6])
    torch.testing.assert_close(got, torch.full_like(got, 0.3), rtol=0, atol=1e-3)
    assert counted == 2


ONE_STEP = SGD(lr=0.1, batch_size=100)


@pytest.mark.parametrize(
    ("schedule", "pace", "factors"),
    [
        (None, None, [1.0, 1.0]),
        (Cosine(floor=0.5, total=1, unit="rounds"), None, [1.0, 1.0]),
        (PerClient(factors=(0.5,) * 4), None, [0.5, 0.5]),
        (PerClient(factors=(4.0,) * 4), None, [4.0, 4.0]),
        (None, [0.5, 4.0], [0.5, 4.0]),
        (PerClient(factors=(0.5,) * 4), [0.5, 4.0], [0.25, 2.0]),
    ],
    ids=str,
)
@pytest.mark.parametrize("lam", [[8.0, 8.0], [15.0, 3.0]], ids=str)
def test_the_guard_divides_by_the_step_that_is_taken_times_the_precision(schedule, pace, factors, lam):
    """One step from 0 goes lr·factor·Λ of the way to the mean, and exactly there where that exceeds 1."""
    got, counted = stiff_entries(replace(ONE_STEP, schedule=schedule), lam, pace)
    reach = torch.tensor([0.1 * factor * entry for factor, entry in zip(factors, lam, strict=True)])
    torch.testing.assert_close(got, (0.3 * reach.clamp_max(1)).double().expand(4, -1), rtol=1e-6, atol=0)
    assert (counted > 0) == bool((reach > 1).any())


def test_a_falling_schedule_leaves_the_guard_as_soon_as_its_steps_are_short_enough():
    chain = SGD(lr=0.1, batch_size=100, epochs=2, schedule=Tapered())  # steps of 0.1, then of 0.05
    got, _ = stiff_entries(chain, [15.0, 15.0])
    assert torch.allclose(got, torch.full_like(got, 0.3))
    mean = 0.3 * (1 - (1 - 0.5) * (1 - 0.25))  # below 1 in both epochs: plain steps
    torch.testing.assert_close(stiff_entries(chain, [5.0, 5.0])[0], torch.full_like(got, mean))


@pytest.mark.parametrize("kind", [AMSGrad, RMSprop])
def test_a_stiff_prior_changes_an_adaptive_step_only_by_eps(kind):
    """Such a step does not depend on the gradient's scale. The entries are counted all the same."""
    task, group = world()
    prior = Gaussian.of(task.initial().new_full((task.size,), 0.3), task.initial().new_full((task.size,), 1e4))
    chain = kind(lr=0.01, batch_size=5, epochs=2, eps=1e-14)
    with guards.watch() as acted:
        got = chain(task, task.initial(), group, prior=prior)
    assert int(acted["stiff prior"]) == task.size
    for k in range(len(SIZES)):
        path, _ = by_torch(chain, group, k, lambda theta: 0.5 * 1e4 * (theta - 0.3).square().sum())
        torch.testing.assert_close(got[k], path[-1], rtol=1e-9, atol=1e-9)


REFUSED = [
    (SGLD, {"lr": -0.1}, "lr must be at least 0, got -0.1"),
    (SGD, {"lr": float("nan")}, "lr must be .*, got nan"),
    (Adam, {"lr": float("inf")}, "lr must be finite, got inf"),
    (SGD, {"epochs": 0}, "epochs must be at least 1, got 0"),
    (SGD, {"epochs": 1.5}, "epochs must be a whole number, got 1.5"),
    (SGD, {"batch_size": 0}, "batch_size must be at least 1, got 0"),
    (SGD, {"batch_size": None}, "batch_size must be a whole number, got None"),
    (SGD, {"longest": 0}, "longest must be at least 1, got 0"),
    (SGD, {"weight_decay": -1.0}, "weight_decay must be at least 0, got -1.0"),
    (SGD, {"momentum": 1.0}, "momentum must be below 1, got 1.0"),
    (SGD, {"momentum": -0.1}, "momentum must be at least 0, got -0.1"),
    (SGLD, {"temperature": -1.0}, "temperature must be at least 0, got -1.0"),
    (SGHMC, {"temperature": float("nan")}, "temperature must be .*, got nan"),
    (SGHMC, {"friction": 0.0}, "friction must be above 0, got 0.0"),
    (SGHMC, {"friction": 1.1}, "friction must be at most 1, got 1.1"),
    (AMSGrad, {"beta1": 1.0}, "beta1 must be below 1, got 1.0"),
    (Adam, {"beta2": float("nan")}, "beta2 must be .*, got nan"),
    (AMSGrad, {"eps": 0.0}, "eps must be above 0, got 0.0"),
    (RMSprop, {"alpha": 1.0}, "alpha must be below 1, got 1.0"),
    (Adam, {"noise": -0.1}, "noise must be at least 0, got -0.1"),
]


@pytest.mark.parametrize(("kind", "settings", "message"), REFUSED, ids=str)
def test_settings_out_of_range_are_refused(kind, settings, message):
    with pytest.raises(ConfigError, match=message):
        kind(**settings)


@pytest.mark.parametrize("factor", [1.0, 5.0, 50.0])
def test_fedprox_does_not_diverge_where_clients_are_paced_beyond_its_proximal_term(factor):
    """lr · μ = 0.9 is short enough for the step; 5 and 50 times as much is not, and w stays between w and the data."""
    task, group = world()
    train = SGD(lr=0.3, epochs=20, schedule=PerClient(factors=(factor,) * 4))
    update, _ = cs.FedProx(train, mu=3.0).local(task, Point(task.initial()), None, group)
    moved = update.total.theta / update.weight
    assert bool(moved.isfinite().all())
    assert float(moved.abs().max()) < 10
