import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from consilience.core.errors import ConfigError
from consilience.matching import BetaBernoulli, Known, Units
from consilience.matching.beta_bernoulli import State
from support.nets import federation, summed, worth

quick = settings(max_examples=15, deadline=None)
seeds = st.integers(0, 10_000)
some_widths = st.lists(st.integers(1, 6), min_size=1, max_size=5)


class Free(BetaBernoulli):
    """Without a penalty on new atoms."""

    def opening_penalty(self, t):
        return torch.zeros_like(t)


@st.composite
def models(draw, kinds=(BetaBernoulli, Free)):
    return draw(st.sampled_from(kinds))(
        variance=draw(st.sampled_from([0.1, 0.5, 1.0])),
        prior_variance=draw(st.sampled_from([1.0, 10.0])),
        mass=draw(st.sampled_from([1e-3, 1.0, 50.0])),
        limit=draw(st.sampled_from([4, 700])),
    )


def earlier(clients, size, atoms, seed, step=3):
    """Atoms of earlier steps, as a stream would leave them."""
    made = torch.Generator().manual_seed(seed)
    lam = 0.1 + 2 * torch.rand(atoms, size, generator=made, dtype=torch.float64)
    lam[:, : size // 2] = lam[:, :1]
    eta = torch.randn(atoms, size, generator=made, dtype=torch.float64)
    return Known(eta, lam, torch.randint(step, (clients, atoms), generator=made), torch.tensor(step))


def seated(model, clients, mean, known=None):
    state = State(model, clients, mean, known)
    for j in range(len(clients)):
        state.update(j)
    return state


def naive_gains(model, clients, mean, assignments, j, count, known=None):
    """The brief's formula, atom by atom and unit by unit, with client j out."""
    s, p, m = summed(clients, assignments, model, mean, count, known)
    total = len(clients)
    b_all, q = clients[j].values * clients[j].precision / model.variance, clients[j].precision / model.variance
    rows = []
    for i in range(count):
        if known is None:
            odds = m[i] / (total - m[i])
        else:
            used = int(known.counts[j, i]) if i < len(known.eta) else 0
            odds = (1 + used) / (int(known.step) - used)
        rows.append([worth(s[i] + b, p[i] + q) - worth(s[i], p[i]) + 2 * math.log(odds) for b in b_all])
    width, step = len(b_all), 1 if known is None else int(known.step)
    s0, p0 = mean / model.prior_variance, torch.full_like(mean, 1 / model.prior_variance)
    for t in range(1, max(min(width, model.limit - count), 1, width - count) + 1):
        price = 2 * math.log(model.mass / (step * total)) - 2 * math.log(t) * (not isinstance(model, Free))
        rows.append([worth(s0 + b, p0 + q) - worth(s0, p0) + price for b in b_all])
    return torch.tensor(rows, dtype=torch.float64)


def naive_objective(model, clients, mean, assignments, count, known=None):
    """F of erratum 5; in a stream, everybody who uses an atom has a gain of their own."""
    s, p, m = summed(clients, assignments, model, mean, count, known)
    old, step = (0, 1) if known is None else (len(known.eta), int(known.step))
    before, after = summed([], [], model, mean, count, known)[:2], (s, p)
    total = worth(*after) - worth(*before) + (count - old) * 2 * math.log(model.mass / (step * len(clients)))
    for i in range(count):
        users = [j for j, a in enumerate(assignments) if i in a.tolist()]
        if known is None:
            odds = [k / (len(clients) - k) for k in range(1, m[i])]
        elif i < old:
            odds = [(1 + int(known.counts[j, i])) / (step - int(known.counts[j, i])) for j in users]
        else:
            odds = [1 / step for _ in users[1:]]
        total += 2 * sum(math.log(o) for o in odds)
    return total


@quick
@given(models(), some_widths, st.integers(1, 7), seeds)
def test_gains_are_what_a_double_loop_finds(model, widths, size, seed):
    clients, mean = federation(widths, size, seed)
    state, j = seated(model, clients, mean), seed % len(widths)
    state.remove(j)
    expected = naive_gains(model, clients, mean, state.assignments, j, len(state.s))
    torch.testing.assert_close(state.gains(j), expected, rtol=1e-9, atol=1e-9)


@quick
@given(models(), some_widths, st.integers(1, 7), st.integers(1, 5), seeds)
def test_gains_in_a_stream_are_what_a_double_loop_finds(model, widths, size, atoms, seed):
    clients, mean = federation(widths, size, seed)
    known = earlier(len(widths), size, atoms, seed)
    state, j = seated(model, clients, mean, known), seed % len(widths)
    state.remove(j)
    expected = naive_gains(model, clients, mean, state.assignments, j, len(state.s), known)
    torch.testing.assert_close(state.gains(j), expected, rtol=1e-9, atol=1e-9)


@quick
@given(models(), some_widths, st.integers(1, 7), st.booleans(), seeds)
def test_the_objective_is_the_sum_over_atoms(model, widths, size, stream, seed):
    clients, mean = federation(widths, size, seed)
    known = earlier(len(widths), size, 3, seed) if stream else None
    state = seated(model, clients, mean, known)
    expected = naive_objective(model, clients, mean, state.assignments, len(state.s), known)
    assert state.objective() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@quick
@given(models(), some_widths, st.integers(1, 7), st.booleans(), seeds)
def test_no_update_is_worse_than_staying(model, widths, size, stream, seed):
    clients, mean = federation(widths, size, seed)
    state = seated(model, clients, mean, earlier(len(widths), size, 2, seed) if stream else None)
    for j in [*range(len(widths)), *reversed(range(len(widths)))]:
        before, counts, width = state.assignments[j], state.m.clone(), len(state.s)
        dying = (counts == 1) & (torch.arange(width) >= state.old)
        alive = torch.ones(width, dtype=torch.bool)
        alive[before[dying[before]]] = False
        own = int((~alive).sum())
        state.remove(j)
        assert len(state.s) == width - own
        stay = (alive.cumsum(0) - 1)[before]
        stay[~alive[before]] = len(state.s) + torch.arange(own)
        gains = state.gains(j, own)
        units = torch.arange(len(before))
        _, best = linear_sum_assignment(gains.T.numpy(), maximize=True)
        assert gains[best, units].sum() >= gains[stay, units].sum() - 1e-9
        left = state.objective()
        state.insert(j, torch.from_numpy(best))
        if isinstance(model, Free):  # an update's gain is the objective's
            assert state.objective() - left == pytest.approx(float(gains[best, units].sum()), abs=1e-8)


@quick
@given(models((Free,)), some_widths, st.integers(1, 7), st.booleans(), st.booleans(), seeds)
def test_without_the_new_penalty_the_objective_never_falls(model, widths, size, plain, stream, seed):
    clients, mean = federation(widths, size, seed, plain)
    known = earlier(len(widths), size, 3, seed) if stream else None
    trace = torch.tensor(model.cluster(clients, mean, known, seed).trace)
    assert bool((trace.diff() >= -1e-9).all())


def test_with_the_new_penalty_the_objective_can_fall():
    def falls(seed):
        clients, mean = federation([2, 9, 4, 7, 3], 4, seed, plain=True)
        trace = BetaBernoulli(mass=5).cluster(clients, mean, None, seed).trace
        return min(torch.tensor(trace).diff().tolist()) < -1e-6

    assert any(falls(seed) for seed in range(40))


@quick
@given(models(), some_widths, st.integers(1, 7), st.booleans(), seeds)
def test_the_best_state_is_returned_with_the_evidence_assigned_to_it(model, widths, size, stream, seed):
    clients, mean = federation(widths, size, seed)
    known = earlier(len(widths), size, 3, seed) if stream else None
    found = model.cluster(clients, mean, known, seed)
    value = naive_objective(model, clients, mean, found.assignments, len(found), known)
    assert value == pytest.approx(max(found.trace), rel=1e-9, abs=1e-9)
    eta, lam, m = summed(clients, found.assignments, model, mean, len(found), known)
    torch.testing.assert_close(found.eta, eta)
    torch.testing.assert_close(found.lam, lam)
    torch.testing.assert_close(found.mean, eta / lam)
    assert min(m[3 if stream else 0 :], default=1) >= 1  # no atom without a client, but for those of earlier steps
    for assignment, width in zip(found.assignments, widths, strict=True):
        assert len(set(assignment.tolist())) == width


@quick
@given(models(), some_widths, st.integers(2, 7), seeds)  # of one coordinate nothing may be known, and all is a tie
def test_the_order_of_units_does_not_matter(model, widths, size, seed):
    clients, mean = federation(widths, size, seed)
    orders = [torch.randperm(w, generator=torch.Generator().manual_seed(seed + w)) for w in widths]
    others = [Units(u.values[order], u.precision) for u, order in zip(clients, orders, strict=True)]
    one, two = (model.cluster(given_units, mean, None, seed) for given_units in (clients, others))
    assert two.trace == pytest.approx(one.trace, rel=1e-9, abs=1e-9)
    renamed = {}
    for a, b, order in zip(one.assignments, two.assignments, orders, strict=True):
        for here, there in zip(a[order].tolist(), b.tolist(), strict=True):
            assert renamed.setdefault(here, there) == there
    assert sorted(renamed.values()) == list(range(len(one))) == list(range(len(two)))
    torch.testing.assert_close(two.mean[list(renamed.values())], one.mean[list(renamed)])


@quick
@given(models(), some_widths, st.integers(1, 7), seeds)
def test_width_lies_between_the_widest_client_and_all_units(model, widths, size, seed):
    clients, mean = federation(widths, size, seed)
    assert max(widths) <= len(model.cluster(clients, mean, None, seed)) <= sum(widths)


@quick
@given(some_widths, seeds)
def test_no_mass_keeps_the_widest_client(widths, seed):
    clients, mean = federation(widths, 5, seed)
    assert len(BetaBernoulli(mass=1e-300).cluster(clients, mean, None, seed)) == max(widths)


def test_the_smallest_mass_there_is_will_do():
    clients, mean = federation([2, 3], 4)
    assert len(BetaBernoulli(mass=5e-324).cluster(clients, mean, None, 0)) == 3


@quick
@given(some_widths, seeds)
def test_much_mass_keeps_all_units(widths, seed):
    clients, mean = federation(widths, 5, seed)
    assert len(BetaBernoulli(mass=1e300).cluster(clients, mean, None, seed)) == sum(widths)


@quick
@given(some_widths, st.integers(1, 8), st.sampled_from([1.0, 1e300]), seeds)
def test_beyond_the_limit_an_update_adds_no_more_than_one(widths, limit, mass, seed):
    clients, mean = federation(widths, 5, seed)
    state = State(BetaBernoulli(mass=mass, limit=limit), clients, mean, None)
    for j in [*range(len(widths)), *range(len(widths))]:
        before = len(state.s)
        state.update(j)
        assert len(state.s) <= max(limit, before + 1, len(clients[j]))


def test_the_limit_changes_nothing_below_it():
    clients, mean = federation([4, 3, 5], 5, seed=1)
    free, bound = (BetaBernoulli(mass=1e300, limit=limit).cluster(clients, mean, None, 0) for limit in (700, 12))
    assert len(free) == len(bound) == 12
    assert torch.equal(free.mean, bound.mean)


@quick
@given(models(), some_widths, seeds)
def test_atoms_of_earlier_steps_never_die(model, widths, seed):
    clients, mean = federation(widths, 5, seed)
    known = earlier(len(widths), 5, 9, seed)
    copied = known.eta.clone(), known.lam.clone()
    found = model.cluster(clients, mean, known, seed)
    assert len(found) >= 9
    assert bool((found.lam[:9] >= known.lam).all())
    unused = [i for i in range(9) if all(i not in a.tolist() for a in found.assignments)]
    assert torch.equal(found.eta[unused], known.eta[unused])
    assert torch.equal(known.eta, copied[0])  # what was known is not written to
    assert torch.equal(known.lam, copied[1])


def test_one_client_keeps_its_own_units():
    clients, mean = federation([4], 5, plain=True)
    found = BetaBernoulli(variance=0.5, prior_variance=2.0).cluster(clients, mean, None, 0)
    assert torch.equal(found.assignments[0], torch.arange(4))
    torch.testing.assert_close(found.mean, (clients[0].values * 2 + mean * 0.5) / 2.5)


def test_the_same_seed_gives_the_same_matching():
    clients, mean = federation([4, 6, 5, 3], 5)
    one, two = (BetaBernoulli(mass=3).cluster(clients, mean, None, 7) for _ in range(2))
    assert one.trace == two.trace
    assert torch.equal(one.eta, two.eta)


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("variance", 0.0, "above 0"),
        ("prior_variance", math.inf, "finite"),
        ("mass", -1.0, "above 0"),
        ("sweeps", -1, "at least 0"),
        ("limit", 0, "at least 1"),
    ],
)
def test_settings_out_of_bounds_are_refused(name, value, bound):
    with pytest.raises(ConfigError, match=f"{name} must be {bound}, got {value}"):
        BetaBernoulli(**{name: value})
