from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience.core import records
from consilience.core.errors import DataError
from consilience.matching import BetaBernoulli, DPMeans, match, slice_of
from consilience.recipes.pfnm_variants import WithoutPenalty
from support.nets import BIAS, conv_net, draws, forward, net, permuted

quick = settings(max_examples=8, deadline=None)
seeds = st.integers(0, 10_000)
FLAT = BetaBernoulli(prior_variance=1e8)
ORIGINALS = {
    "one hidden layer": net(3, 5, 2),
    "three hidden layers": net(3, 5, 6, 4, 2),
    "no biases": net(3, 5, 4, 2, bias=False),
    "convolutions": conv_net(),
}
orders_of_layers = pytest.mark.parametrize("top_down", [False, True], ids=["bottom up", "top down"])
originals = pytest.mark.parametrize("original", list(ORIGINALS.values()), ids=list(ORIGINALS))


def images(layers, seed=9):
    return draws(8, 2, 6, 6, seed=seed) if layers[0][0].dim() == 4 else draws(8, layers[0][0].shape[1], seed=seed)


def unlike(count, seed=0, hidden=1, spread=3):
    """Networks that have nothing in common, of unequal widths."""
    widths = [[2 + (seed + j + h) % spread for h in range(hidden)] for j in range(count)]
    return [net(3, *widths[j], 2, seed=10 * seed + j + 1) for j in range(count)]


def evidence(nets, assignments, h, how, shares=None, observe_missing=True, top_down=False, widths=None):
    """(η, λ) that the clients bring to the global units of hidden layer h, weight by weight; prior left out. A row is
    [incoming | bias | outgoing], without the weights that another layer has."""
    hidden, inputs, outputs = len(nets[0]) - 1, nets[0][0][0].shape[1], len(nets[0][-1][0])
    widths = widths or [1 + max(int(a.max()) for a in layer) for layer in assignments]
    below = inputs if h == 0 else 0 if top_down else widths[h - 1]
    above = outputs if h == hidden - 1 else widths[h + 1] if top_down else 0
    eta = torch.zeros(widths[h], below + 1 + above, dtype=torch.float64)
    lam = torch.zeros_like(eta)
    for j, layers in enumerate(nets):
        under = range(inputs) if h == 0 else assignments[h - 1][j].tolist()
        over = range(outputs) if h == hidden - 1 else assignments[h + 1][j].tolist()
        (weight, bias), onward = layers[h], layers[h + 1][0]
        for unit, atom in enumerate(assignments[h][j].tolist()):
            said = {below: (bias[unit], 1.0)}
            for columns, units, weights in (
                (range(below), list(under), weight[unit]),
                (range(below + 1, below + 1 + above), list(over), onward[:, unit]),
            ):
                for k, column in enumerate(columns):
                    there = k in units
                    said[column] = weights[units.index(k)] if there else 0.0, float(there or observe_missing)
                    if shares is not None and h == hidden - 1 and column > below:
                        said[column] = said[column][0], float(shares[j, k])
            for column, (value, sure) in said.items():
                eta[atom, column] += sure * value / how.variance
                lam[atom, column] += sure / how.variance
    return eta, lam, below


def posterior(eta, lam, how, bias):
    """The same with the prior; the bias is in this column."""
    lam0 = 1 / how.prior_variance
    eta = eta.clone()
    eta[:, bias] += BIAS * lam0
    return eta, lam + lam0


def columns_of(found, h, top_down):
    """The weights of the global network that row h holds."""
    hidden = len(found.widths)
    incoming = [found.layers[h][0]] if h == 0 or not top_down else []
    outgoing = [found.layers[h + 1][0].T] if h == hidden - 1 or top_down else []
    return torch.cat([*incoming, found.layers[h][1].unsqueeze(1), *outgoing], dim=1)


@orders_of_layers
@originals
@pytest.mark.parametrize("clients", [2, 5])
def test_permuted_copies_are_matched_back(original, clients, top_down):
    copies, orders = zip(*(permuted(original, seed) for seed in range(clients)), strict=True)
    found = match(copies, FLAT, top_down=top_down)
    assert found.widths == [len(weight) for weight, _ in original[:-1]]
    x = images(original)
    torch.testing.assert_close(forward(found.layers, x), forward(original, x), rtol=1e-5, atol=1e-5)
    for h, width in enumerate(found.widths):
        for atom in range(width):  # the units that became one were one
            assert len({int(orders[j][h][found.assignments[h][j] == atom]) for j in range(clients)}) == 1


@orders_of_layers
@originals
@pytest.mark.parametrize(("variance", "prior_variance"), [(1.0, 10.0), (0.5, 1.0)])
def test_copies_shrink_towards_the_prior_mean(original, variance, prior_variance, top_down):
    copies = [permuted(original, seed)[0] for seed in range(4)]
    found = match(copies, BetaBernoulli(variance, prior_variance), top_down=top_down)
    keep = 4 / (4 + variance / prior_variance)
    mine = slice_of(found.layers, [a[2] for a in found.assignments])
    for (weight, bias), (own, own_bias) in zip(mine, copies[2], strict=True):
        torch.testing.assert_close(weight, keep * own)
        if own_bias is not None:
            torch.testing.assert_close(bias, keep * own_bias + (1 - keep) * BIAS)


@quick
@given(seeds, st.integers(1, 3), st.booleans(), st.booleans())
def test_permuting_clients_units_changes_nothing_but_order(seed, hidden, observe_missing, top_down):
    nets = unlike(3, seed, hidden)
    others, orders = zip(*(permuted(n, seed + j) for j, n in enumerate(nets)), strict=True)
    one, two = (
        match(clients, seed=seed, observe_missing=observe_missing, top_down=top_down) for clients in (nets, others)
    )
    assert one.widths == two.widths
    for a, b in zip(one.traces, two.traces, strict=True):
        assert b == pytest.approx(a, rel=1e-9)
    x = images(nets[0])
    torch.testing.assert_close(forward(two.layers, x), forward(one.layers, x), rtol=1e-9, atol=1e-9)
    for h in range(hidden):
        renamed = {}
        for j in range(3):
            here, there = one.assignments[h][j][orders[j][h]], two.assignments[h][j]
            for a, b in zip(here.tolist(), there.tolist(), strict=True):
                assert renamed.setdefault(a, b) == b


@quick
@given(seeds, st.integers(1, 3), st.booleans())
def test_width_lies_between_the_widest_client_and_all_units(seed, hidden, top_down):
    nets = unlike(4, seed, hidden)
    for how in (BetaBernoulli(), BetaBernoulli(mass=1e-300), BetaBernoulli(mass=1e300)):
        for h, width in enumerate(match(nets, how, top_down=top_down).widths):
            widths = [len(n[h][0]) for n in nets]
            assert max(widths) <= width <= sum(widths)
            if how.mass != 1:
                assert width == (max(widths) if how.mass < 1 else sum(widths))


@quick
@given(seeds, st.integers(1, 3), st.booleans(), st.booleans(), st.booleans())
def test_a_global_weight_is_the_posterior_mean_of_what_clients_say(seed, hidden, observe_missing, shared, top_down):
    nets, how = unlike(3, seed, hidden), BetaBernoulli(variance=0.5, prior_variance=2.0)
    shares = torch.tensor([[0.7, 0.0], [0.0, 0.0], [0.3, 0.0]]) if shared else None
    found = match(nets, how, shares=shares, observe_missing=observe_missing, top_down=top_down)
    for h in range(hidden):
        eta, lam, bias = evidence(nets, found.assignments, h, how, shares, observe_missing, top_down)
        eta, lam = posterior(eta, lam, how, bias)
        torch.testing.assert_close(found.memory.layers[h].eta, eta)
        torch.testing.assert_close(found.memory.layers[h].lam, lam)
        torch.testing.assert_close(columns_of(found, h, top_down), eta / lam)


@orders_of_layers
def test_one_client_alone_keeps_its_network_shrunk(top_down):
    own, how = net(3, 4, 5, 2), BetaBernoulli(variance=0.5, prior_variance=2.0)
    found = match([own], how, top_down=top_down)
    keep = 1 / (1 + 0.25)
    assert found.widths == [4, 5]
    mine = slice_of(found.layers, [a[0] for a in found.assignments])
    for (weight, bias), (own_weight, own_bias) in zip(mine, own, strict=True):
        torch.testing.assert_close(weight, keep * own_weight)
        torch.testing.assert_close(bias, keep * own_bias + (1 - keep) * BIAS)


def test_networks_come_back_in_their_own_dtype():
    nets = [[(w.float(), b.float()) for w, b in net(3, 4, 2, seed=j)] for j in range(2)]
    found = match(nets)
    assert {t.dtype for layer in found.layers for t in layer} == {torch.float32}
    assert [tuple(w.shape) for w, _ in found.layers] == [(found.widths[0], 3), (2, found.widths[0])]


def test_networks_are_not_written_to():
    nets = [net(3, 4, 4, 2, seed=j) for j in range(3)]
    before = [[(w.clone(), b.clone()) for w, b in n] for n in nets]
    match(nets)
    for n, kept in zip(nets, before, strict=True):
        for (w, b), (w0, b0) in zip(n, kept, strict=True):
            assert torch.equal(w, w0)
            assert torch.equal(b, b0)


def test_a_slice_of_the_global_network_is_the_client_with_the_others_taken_out():
    copies = [permuted(conv_net(), seed)[0] for seed in range(2)] + [conv_net(seed=3)]
    found = match(copies, BetaBernoulli(prior_variance=1e8, mass=1e300))
    assert found.widths == [12, 15, 18]  # much mass: nothing is matched
    mine = slice_of(found.layers, [a[2] for a in found.assignments])
    x = images(copies[2])
    for (weight, _), (own, _) in zip(mine, copies[2], strict=True):
        torch.testing.assert_close(weight, own, rtol=1e-6, atol=1e-6)
    # The output bias is everybody's.
    gap = mine[-1][1] - copies[2][-1][1]
    torch.testing.assert_close(forward(mine, x), forward(copies[2], x) + gap, rtol=1e-5, atol=1e-5)


@quick
@given(seeds, st.integers(1, 3), st.booleans())
def test_without_the_new_penalty_no_layers_objective_falls(seed, hidden, top_down):
    found = match(unlike(4, seed, hidden), WithoutPenalty(variance=0.3), top_down=top_down, seed=seed)
    for trace in found.traces:
        assert all(later >= before - 1e-9 for before, later in pairwise(trace))


# Missing connections


def test_missing_connections_do_not_matter_where_nothing_is_missing():
    copies = [permuted(net(3, 5, 4, 2), seed)[0] for seed in range(3)]
    one, two = (match(copies, observe_missing=observed) for observed in (True, False))
    for (w, b), (w2, b2) in zip(one.layers, two.layers, strict=True):
        assert torch.equal(w, w2)
        assert torch.equal(b, b2)


@orders_of_layers
def test_an_unobserved_connection_keeps_its_prior(top_down):
    nets, how = unlike(2, hidden=2), BetaBernoulli(mass=1e300)
    seen, unseen = (match(nets, how, observe_missing=observed, top_down=top_down) for observed in (True, False))
    below, above = seen.assignments[0][0], seen.assignments[1][1]  # from client 0's units to client 1's
    for found, lam in ((seen, 1.1), (unseen, 0.1)):
        state = found.memory.layers[0 if top_down else 1]
        absent = (below, 3 + 1 + above) if top_down else (above, below)
        absent = state.lam[absent[0]][:, absent[1]], state.eta[absent[0]][:, absent[1]]
        torch.testing.assert_close(absent[0], torch.full_like(absent[0], lam))
        assert not bool(absent[1].any())


@orders_of_layers
def test_unobserved_kernels_keep_their_prior(top_down):
    nets, how = [conv_net(seed=1), conv_net(seed=2)], BetaBernoulli(mass=1e300)
    found = match(nets, how, observe_missing=False, top_down=top_down)
    keep = 1 / 1.1
    for h, width in enumerate(found.widths[1:], start=1):  # nothing is matched: each client keeps its own, shrunk
        weight = found.layers[h][0].reshape(width, found.widths[h - 1], -1)
        for j in range(2):
            mine, below = found.assignments[h][j], found.assignments[h - 1][j]
            own = nets[j][h][0].reshape(len(mine), len(below), -1)
            torch.testing.assert_close(weight[mine][:, below], keep * own)
            assert not bool(weight[mine][:, found.assignments[h - 1][1 - j]].any())
        size = weight[0].numel()
        if top_down:
            lam = found.memory.layers[h - 1].lam[:, -size // weight.shape[1] * width :]
            lam = lam.reshape(-1, width, weight.shape[2]).transpose(0, 1)
        else:
            lam = found.memory.layers[h].lam[:, :size].reshape(weight.shape)
        own_lam = torch.full_like(weight, 0.1)
        for j in range(2):
            own_lam[found.assignments[h][j][:, None], found.assignments[h - 1][j]] = 1.1
        torch.testing.assert_close(lam, own_lam)


def test_missing_connections_above_pull_to_zero_when_observed():
    wide = net(3, 3, 4, 2)
    narrow = [(wide[0][0], wide[0][1]), (wide[1][0][:2], wide[1][1][:2]), (wide[2][0][:, :2], wide[2][1])]
    seen, unseen = (match([wide, narrow], FLAT, observe_missing=observed, top_down=True) for observed in (True, False))
    assert seen.widths == unseen.widths == [3, 4]
    at = seen.assignments[1][0][2:], seen.assignments[0][0]  # units above that the narrow client does not have
    torch.testing.assert_close(seen.layers[1][0][at[0]][:, at[1]], wide[1][0][2:] / 2, rtol=1e-6, atol=1e-6)
    at = unseen.assignments[1][0][2:], unseen.assignments[0][0]
    torch.testing.assert_close(unseen.layers[1][0][at[0]][:, at[1]], wide[1][0][2:], rtol=1e-6, atol=1e-6)


def test_missing_connections_below_pull_to_zero_when_observed():
    wide = net(3, 4, 3, 2)
    narrow = [(wide[0][0][:2], wide[0][1][:2]), (wide[1][0][:, :2], wide[1][1]), wide[2]]
    seen, unseen = (match([wide, narrow], FLAT, observe_missing=observed) for observed in (True, False))
    assert seen.widths == unseen.widths == [4, 3]
    for found, keep in ((seen, 0.5), (unseen, 1.0)):
        above, below = found.assignments[1][0], found.assignments[0][0][2:]  # the narrow client lacks these below
        torch.testing.assert_close(found.layers[1][0][above][:, below], keep * wide[1][0][:, 2:], rtol=1e-6, atol=1e-6)


# Orders of layers


@quick
@given(seeds, st.booleans())
def test_one_hidden_layer_has_one_order(seed, shared):
    nets = unlike(3, seed)
    shares = torch.tensor([[0.7, 0.1], [0.0, 0.4], [0.3, 0.5]]) if shared else None
    one, two = (match(nets, shares=shares, top_down=top_down) for top_down in (False, True))
    for layer, other in zip(one.layers, two.layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(layer, other, strict=True))


@orders_of_layers
def test_layers_are_told_apart_by_the_weights_that_come_first(top_down):
    """Units of two clients with the same incoming weights and other outgoing ones, and the reverse."""
    one, two = net(3, 4, 3, 2, seed=1), net(3, 4, 3, 2, seed=2)
    mixed = [one[0], two[1], two[2]]  # below as in the first network, above as in the second
    how = BetaBernoulli(variance=1e-3)
    alike = match([one, mixed], how, top_down=top_down).widths, match([two, mixed], how, top_down=top_down).widths
    assert alike == (([8, 6], [8, 3]) if top_down else ([4, 6], [8, 6]))


# Class shares


@pytest.mark.parametrize("flattened", [False, True])
def test_a_client_says_nothing_about_a_class_it_has_no_examples_of(flattened):
    nets = [net(3, 4, 3, seed=j) for j in range(3)]
    if flattened:  # two channels, of eight positions each in front of the output
        nets = [
            [(draws(2, 1, 2, 2, seed=j), draws(2, seed=j)), (draws(3, 16, seed=j), n[-1][1])]
            for j, n in enumerate(nets)
        ]
    shares = torch.tensor([[0.5, 0.0, 1.0], [0.5, 0.4, 0.0], [0.0, 0.6, 0.0]])
    other = [[(w.clone(), b.clone()) for w, b in layers] for layers in nets]
    for j in range(3):
        other[j][-1][0][shares[j] == 0] += 100.0
        other[j][-1][1][shares[j] == 0] -= 100.0
    one, two = match(nets, shares=shares), match(other, shares=shares)
    for (w, b), (w2, b2) in zip(one.layers, two.layers, strict=True):
        assert torch.equal(w, w2)
        assert torch.equal(b, b2)


def test_a_class_without_examples_keeps_the_prior():
    nets = [net(3, 4, 2, seed=j) for j in range(3)]
    found = match(nets, shares=torch.tensor([[0.2, 0.0], [0.3, 0.0], [0.5, 0.0]]))
    weight, bias = found.layers[-1]
    assert not bool(weight[1].any())
    assert float(bias[1]) == pytest.approx(BIAS)
    own = sum(share * n[-1][1][0] for share, n in zip((0.2, 0.3, 0.5), nets, strict=True))
    assert float(bias[0]) == pytest.approx(float((own + BIAS / 10) / 1.1), rel=1e-6)


def test_equal_shares_of_one_are_no_shares():
    nets = unlike(3, hidden=2)
    one, two = match(nets), match(nets, shares=torch.ones(3, 2))
    for (w, _), (w2, _) in zip(one.layers, two.layers, strict=True):
        assert torch.equal(w, w2)


# Streams


@quick
@given(seeds, st.integers(1, 3), st.booleans(), st.booleans())
def test_the_posterior_of_a_step_is_the_prior_of_the_next(seed, hidden, observe_missing, top_down):
    how = BetaBernoulli(variance=0.5, prior_variance=2.0, mass=3.0)
    memory = None
    for step in range(4):
        nets = unlike(3, seed + step, hidden)
        found = match(nets, how, memory=memory, observe_missing=observe_missing, top_down=top_down, seed=seed)
        for h in range(hidden):
            now = found.memory.layers[h]
            new = evidence(nets, found.assignments, h, how, None, observe_missing, top_down, found.widths)
            bias = new[2]
            eta, lam = posterior(torch.zeros_like(now.eta), torch.zeros_like(now.eta), how, bias)
            if memory is not None:
                before = memory.layers[h]
                atoms, size = before.eta.shape
                assert found.widths[h] >= atoms  # no unit dies
                end = now.eta.shape[1] if top_down else bias  # of the weights to a layer that may have become wider
                old = torch.ones(now.eta.shape[1], dtype=torch.bool)
                old[end - (now.eta.shape[1] - size) : end] = False
                eta[:atoms, old], lam[:atoms, old] = before.eta, before.lam
            eta, lam = eta + new[0], lam + new[1]
            torch.testing.assert_close(now.eta, eta)
            torch.testing.assert_close(now.lam, lam)
            torch.testing.assert_close(columns_of(found, h, top_down), eta / lam)
            assert int(now.step) == step + 2
            used = torch.zeros_like(now.counts)
            for j, assignment in enumerate(found.assignments[h]):
                used[j, assignment] += 1
            if memory is not None:
                used[:, : memory.layers[h].counts.shape[1]] += memory.layers[h].counts
            assert torch.equal(now.counts, used)
        memory = found.memory


@orders_of_layers
def test_the_same_networks_again_are_the_same_units(top_down):
    nets = [permuted(net(3, 4, 5, 2), seed)[0] for seed in range(3)]
    first = match(nets, top_down=top_down)
    again = match(nets, memory=first.memory, top_down=top_down)
    assert again.widths == first.widths == [4, 5]
    for h in range(2):
        for a, b in zip(first.assignments[h], again.assignments[h], strict=True):
            assert torch.equal(a, b)
        prior = torch.zeros_like(first.memory.layers[h].eta)
        bias = evidence(nets, first.assignments, h, FLAT, top_down=top_down)[2]
        eta, lam = posterior(prior, prior, BetaBernoulli(), bias)
        torch.testing.assert_close(again.memory.layers[h].eta, 2 * first.memory.layers[h].eta - eta)
        torch.testing.assert_close(again.memory.layers[h].lam, 2 * first.memory.layers[h].lam - lam)
        assert bool((again.memory.layers[h].counts == 2).all())
    for h, after in enumerate(match(nets, memory=again.memory, top_down=top_down).memory.layers):
        assert int(after.step) == 4
        assert len(after.eta) == first.widths[h]


def test_output_biases_add_up_over_steps():
    how, nets = BetaBernoulli(), unlike(3)
    shares = torch.tensor([[0.2, 0.0], [0.3, 0.6], [0.5, 0.4]])
    second = match(nets, how, shares=shares, memory=match(nets, how, shares=shares).memory)
    said = sum(2 * p * n[-1][1] for p, n in zip(shares.double(), nets, strict=True))
    expected = (said + BIAS / 10) / (2 * shares.double().sum(0) + 0.1)
    torch.testing.assert_close(second.layers[-1][1], expected)


def test_what_a_stream_knows_travels_as_a_record():
    memory = match(unlike(2, hidden=2)).memory
    back = records.unpack(records.pack(memory), memory)
    assert torch.equal(back.layers[0].eta, memory.layers[0].eta)
    assert torch.equal(back.bias[1], memory.bias[1])
    assert match(unlike(2, hidden=2), memory=back).widths[0] >= len(memory.layers[0].eta)


# DP-means on networks


def test_dp_means_finds_copies_too():
    copies = [permuted(net(3, 5, 4, 2), seed)[0] for seed in range(3)]
    found = match(copies, DPMeans(penalty=1e-6))
    assert found.widths == [5, 4]
    x = images(copies[0])
    torch.testing.assert_close(forward(found.layers, x), forward(copies[0], x), rtol=1e-4, atol=1e-4)


@orders_of_layers
def test_dp_means_may_merge_a_clients_own_units(top_down):
    nets = unlike(3, hidden=2)
    found = match(nets, DPMeans(penalty=1e9), top_down=top_down)
    assert found.widths == [1, 1]
    assert all(bool(t.isfinite().all()) for layer in found.layers for t in layer)
    top = torch.cat([n[1][1] for n in nets]).mean()
    assert float(found.layers[1][1]) == pytest.approx(float(top), rel=1e-5)
    # Over a client's own units of the layer that is matched first, then over all of the other.
    between = torch.cat([n[1][0].mean(0 if top_down else 1) for n in nets]).mean()
    assert float(found.layers[1][0]) == pytest.approx(float(between), rel=1e-5)


# What cannot be matched


def spoilt(layer, what):
    layers = net(3, 4, 5, 2, seed=1)
    weight, bias = layers[layer]
    if what == "nan":
        weight[0, 0] = float("nan")
    elif what == "infinite bias":
        bias[1] = float("inf")
    elif what == "no bias":
        layers[layer] = (weight, None)
    elif what == "short bias":
        layers[layer] = (weight, bias[:1])
    return layers


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (net(3, 4, 2), r"same depth.*\[2, 3\] layers"),
        (net(7, 4, 5, 2), "layer 1 of client 1 takes 7 inputs, client 0's takes 3"),
        (net(3, 4, 5, 6), "client 1 has 6 outputs, client 0 has 2"),
        (spoilt(1, "nan"), "layer 2 of client 1 has weights that are not finite"),
        (spoilt(2, "infinite bias"), "layer 3 of client 1 has weights that are not finite"),
        (spoilt(0, "no bias"), "layer 1 of client 1: every client's layer must have a bias"),
        (spoilt(2, "no bias"), "layer 3 of client 1: every client's layer must have a bias"),
        (spoilt(1, "short bias"), "layer 2 of client 1: every client's layer must have a bias for each unit"),
        ([*net(3, 4, 5, 2)[:1], *net(3, 9, 5, 2)[1:]], "layer 2 of client 1 takes 9 inputs from 4 units"),
        ([*net(3, 4, 5, 2)[:1], *net(3, 8, 5, 2)[1:]], "layer 2 of client 1 takes 8 inputs from 4 units"),
    ],
)
def test_networks_that_do_not_fit_are_refused_by_name(other, words):
    with pytest.raises(DataError, match=words):
        match([net(3, 4, 5, 2), other])


def test_kernels_of_another_size_are_refused():
    other = conv_net()
    other[1] = (other[1][0][..., :2], other[1][1])
    with pytest.raises(DataError, match=r"layer 2 of client 1 is a kernel of \(3, 2\), client 0's of \(3, 3\)"):
        match([conv_net(), other])


def test_a_layer_without_units_is_refused():
    with pytest.raises(DataError, match="layer 1 of client 1 has no units"):
        match([net(3, 4, 2), net(3, 0, 2)])


def test_no_network_or_no_hidden_layer_is_refused():
    with pytest.raises(DataError, match="there is no network"):
        match([])
    with pytest.raises(DataError, match="at least one hidden layer"):
        match([net(3, 2)])


@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (2,)])
def test_shares_of_the_wrong_shape_are_refused(shape):
    with pytest.raises(DataError, match=r"clients × outputs, \(2, 2\), got"):
        match([net(3, 4, 2), net(3, 4, 2)], shares=torch.ones(shape))


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_shares_that_are_no_shares_are_refused(value):
    with pytest.raises(DataError, match="shares must be finite and not negative"):
        match([net(3, 4, 2), net(3, 4, 2)], shares=torch.tensor([[0.5, 1.0], [0.5, value]]))


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([net(3, 4, 2)] * 2, id="fewer clients"),
        pytest.param([net(3, 4, 5, 2)] * 3, id="deeper"),
        pytest.param([net(5, 4, 2)] * 3, id="more inputs"),
        pytest.param([net(3, 4, 6)] * 3, id="more outputs"),
        pytest.param([net(3, 4, 2, bias=False)] * 3, id="no biases"),
    ],
)
def test_another_federations_memory_is_refused(others):
    with pytest.raises(DataError, match="memory is of other networks"):
        match(others, memory=match([net(3, 4, 2)] * 3).memory)


def test_memory_of_the_other_order_is_refused():
    nets = [net(3, 4, 5, 2)] * 3
    with pytest.raises(DataError, match=r"memory is of other networks: .* order"):
        match(nets, memory=match(nets).memory, top_down=True)


def test_memory_of_one_client_is_refused_for_two():
    with pytest.raises(DataError, match="memory is of other networks"):
        match([net(3, 4, 2)] * 2, memory=match([net(3, 4, 2)]).memory)
