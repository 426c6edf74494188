"""Clients whose states are lost: the server takes what it had of them out, and loses nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import consilience as cs
from consilience.algorithms.fedep import Client
from consilience.core.records import rows, stack
from support.scenarios import likelihood, linear

SIZES = (30, 12, 8, 20)
K, P = len(SIZES), 4
LOST = 1
PRIOR = 0.7
TRAIN = cs.SGD(lr=0.05, batch_size=5, momentum=0.9, weight_decay=0.01)
LAPLACE = cs.inference.Laplace(TRAIN, kappa=1.0, s0=0.05, epochs=1)


@dataclass
class Network:
    """A small federation: clients keep their states, and the server's copies follow the updates that arrive."""

    algorithm: cs.FedEP

    def __post_init__(self):
        task, self.federation = linear(SIZES, names=None)
        self.task = task.prepare(dtype=torch.float64)
        self.server = self.algorithm.start(self.task, self.info(self.task.initial()))
        self.clients = [self.fresh(k, self.task.initial()) for k in range(K)]
        self.copies, self.rounds = list(self.clients), 0

    def info(self, initial):
        return cs.data.Info(initial, *(torch.tensor(v) for v in (0, K, sum(SIZES))))

    def fresh(self, k, mean):
        return rows(self.algorithm.client(self.task, self.info(mean), torch.tensor([[SIZES[k]]]).double()), 0)

    @property
    def q(self):
        return self.server.q

    def round(self, invited, heard=None):
        """A round of the clients `invited`, of whom only those in `heard` answer; all of them when None."""
        self.rounds += 1
        ids = sorted(invited if heard is None else set(invited) & set(heard), key=lambda k: -SIZES[k])
        if not ids:
            return
        who = {"round": self.rounds, "round_size": len(invited), "seed": 0}
        cohort = cs.data.Cohort(self.federation, torch.tensor(ids), **who, dtype=torch.float64)
        update, states = self.algorithm.local(self.task, self.q, stack([self.clients[k] for k in ids]), cohort)
        followed = self.algorithm.follow(stack([self.copies[k] for k in ids]), update)
        for i, k in enumerate(ids):
            self.clients[k], self.copies[k] = rows(states, i), rows(followed, i)
        self.server = self.algorithm.fuse(self.server, update.product())

    def lose(self, k, new=None):
        """Client k begins anew, as if it had never been there."""
        new = self.fresh(k, self.q.mean) if new is None else new
        self.server = self.algorithm.swap(self.server, self.copies[k], new)
        self.clients[k] = self.copies[k] = new

    @property
    def beside(self):
        """q / (p₀ Π q_k)."""
        return self.q / self.algorithm.before(self.q.eta) / stack(self.clients).factor.product()


def posterior(federation, clients):
    """The posterior of these clients' data."""
    q = cs.Gaussian(torch.zeros(P).double(), PRIOR * torch.eye(P).double())
    for k in clients:
        q = q * likelihood(federation, k)
    return q


def assert_same(q, p, tolerance=1e-9):
    torch.testing.assert_close(q.eta, p.eta, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(q.lam, p.lam, rtol=tolerance, atol=tolerance)


some = st.sets(st.integers(0, K - 1), min_size=1)
ROUND = st.tuples(some, some)
LOSS = st.integers(0, K - 1)


@settings(max_examples=8, deadline=None)
@given(
    events=st.lists(ROUND | LOSS, min_size=1, max_size=6),
    infer=st.sampled_from([cs.inference.Identity(TRAIN), LAPLACE, cs.inference.Newton()]),
    server=st.sampled_from([cs.server.Momentum(), cs.server.Momentum(0.5)]),
    damping=st.sampled_from([None, 0.3, 1.0]),
)
def test_whoever_drops_out_or_is_lost_q_stays_the_product_of_the_sites(events, infer, server, damping):
    network = Network(cs.FedEP(infer, server, damping=damping, prior=PRIOR))
    for event in events:
        if isinstance(event, int):
            network.lose(event)
        else:
            network.round(*event)
        assert float(network.beside.norm / network.q.norm) < 1e-9


@pytest.mark.parametrize(("damping", "rounds"), [(1.0, 1), (0.7, 20)])
def test_a_client_that_was_lost_and_takes_part_again_is_heard_as_before(damping, rounds):
    network = Network(cs.FedEP(cs.inference.Newton(), damping=damping, prior=PRIOR))
    for _ in range(rounds):
        network.round(range(K))
    everything = posterior(network.federation, range(K))
    assert_same(network.q, everything)
    network.lose(LOST)
    assert float((network.q / everything).norm) > 1
    for _ in range(rounds):
        network.round(range(K))
    assert_same(network.q, everything)


def test_unlearning_a_client_whose_site_becomes_flat_leaves_the_exact_posterior_of_the_others_data():
    network = Network(cs.FedEP(cs.inference.Newton(), damping=1.0, prior=PRIOR))
    network.round(range(K))
    others = [k for k in range(K) if k != LOST]
    flat = cs.Gaussian.flat(network.q.eta)
    network.lose(LOST, Client(flat, network.copies[LOST].memory))
    assert_same(network.q, posterior(network.federation, others))
    network.round(others)
    assert_same(network.q, posterior(network.federation, others))


@pytest.mark.parametrize("server", [cs.server.Momentum(0.5, 0.9), cs.server.Adam(1.0)])
def test_with_memory_what_q_has_beside_its_sites_stays_as_it_was(server):
    network = Network(cs.FedEP(LAPLACE, server))
    for invited in ((0, 1), (1, 2), (0, 3), (1, 3)):
        network.round(invited)
    beside = network.beside
    assert float(beside.norm / network.q.norm) > 1e-3
    network.lose(LOST)
    assert_same(network.beside, beside)
