"""Point models of the clients' own, on quadratics with known minima: FedPer, FedRep, Ditto, pFedMe, fine-tuning."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.core.errors import ConfigError, TaskError
from support.scenarios import blobs, linear

ENGINE = cs.Simulator(device="cpu", precision="float64", chunk=4, workers=1)
SIZES = (30, 12, 8, 20)
K, P = len(SIZES), 4
FULL = cs.SGD(lr=0.2, batch_size=100)
NOISY = cs.SGD(lr=0.05, epochs=2, batch_size=5, weight_decay=0.01, momentum=0.5)
BODY, HEAD = slice(0, 3), slice(3, 4)  # slopes are shared, offsets are the clients' own
FedPer, FedRep, Ditto, PFedMe = (getattr(cs.algorithms, name) for name in ("FedPer", "FedRep", "Ditto", "PFedMe"))


@pytest.fixture
def world():
    return linear(SIZES, names=None, spread=0.5)


def fit(algorithm, world, rounds=1, **options):
    return cs.fit(algorithm, *world, rounds=rounds, engine=ENGINE, progress=False, **options)


def own(run):
    """The clients' own weights [K, P]."""
    return torch.stack([run.personal(k).mean for k in range(len(run.federation))])


def quadratics(federation):
    """(H_k, b_k) of every client's loss ½ wᵀH_k w − b_kᵀw + const, w = (slopes, offset)."""
    H, b = [], []
    for k in range(len(federation)):
        data = federation.client(k)
        x = torch.cat([data.x, torch.ones(len(data), 1)], 1).double()
        H.append(x.T @ x / len(x))
        b.append(x.T @ data.y[:, 0].double() / len(x))
    return torch.stack(H), torch.stack(b)


def joint_minimum(federation):
    """(slopes, offsets) that minimise Σ p_k f_k(slopes, offset_k), by least squares with a column for each client."""
    data = federation.data
    owner = torch.arange(K).repeat_interleave(federation.sizes)
    x = torch.cat([data.x, torch.nn.functional.one_hot(owner, K)], 1).double()
    found = torch.linalg.lstsq(x, data.y.double()).solution[:, 0]
    return found[:3], found[3:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        FedPer(FULL, parts=("bias",)),
        FedRep(FULL, parts=("bias",), head=replace(FULL, epochs=3)),
        cs.PartialPooling(cs.inference.Newton(), damping=1.0, tau=float("inf"), parts=("bias",), learn=False),
    ],
    ids=["FedPer", "FedRep", "PartialPooling"],
)
def test_a_shared_body_and_own_heads_minimise_the_joint_loss(world, algorithm):
    """PartialPooling with τ = 0 on the body and τ = ∞ on the head is their exact posterior."""
    slopes, offsets = joint_minimum(world[1])
    found = own(fit(algorithm, world, 200))
    torch.testing.assert_close(found[:, BODY], slopes.expand(K, -1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[:, HEAD], offsets.unsqueeze(1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [FedPer, FedRep])
def test_heads_never_leave_the_clients(world, kind):
    run = fit(kind(NOISY, parts=("bias",)), world, 3)
    assert float(run.posterior.mean[HEAD].abs().max()) == 0  # its initial value
    assert len(own(run)[:, HEAD].unique()) == K


def test_a_head_without_a_name_is_the_last_linear_layer():
    task, federation, _ = blobs()
    train = cs.SGD(epochs=2)
    one, other = (own(fit(FedPer(train, parts=parts), (task, federation), 2)) for parts in (None, ("2",)))
    assert torch.equal(one, other)


def test_without_own_parts_fedper_is_fedavg(world):
    ours, theirs = (fit(a, world, 4) for a in (FedPer(NOISY, parts=()), cs.FedAvg(NOISY)))
    assert torch.equal(own(ours), theirs.posterior.mean.expand(K, -1))


def test_with_all_parts_fedper_is_every_client_alone(world):
    ours, theirs = (fit(a, world, 4) for a in (FedPer(NOISY, parts=("",)), cs.LocalOnly(NOISY)))
    torch.testing.assert_close(own(ours), own(theirs), rtol=1e-12, atol=1e-12)


def test_fedrep_trains_the_head_first_and_then_the_body(world):
    """By one step each, with the gradient where the head has moved already."""
    run = fit(FedRep(FULL, parts=("bias",), head=FULL), world)
    H, b = quadratics(world[1])
    w = torch.zeros(K, P).double()
    w[:, HEAD] = 0.2 * b[:, HEAD]
    step = 0.2 * (b - torch.einsum("kij,kj->ki", H, w))
    share = world[1].sizes.double() / sum(SIZES)
    torch.testing.assert_close(run.posterior.mean[BODY], (share.unsqueeze(1) * step)[:, BODY].sum(0))
    torch.testing.assert_close(own(run)[:, HEAD], w[:, HEAD])


@pytest.mark.slow
def test_ditto_finds_the_minimum_near_the_global_model(world):
    run = fit(Ditto(FULL, lam=0.7), world, 600)
    H, b = quadratics(world[1])
    share = (world[1].sizes.double() / sum(SIZES)).view(-1, 1, 1)
    w = torch.linalg.solve((share * H).sum(0), (share[..., 0] * b).sum(0))
    exact = torch.linalg.solve(H + 0.7 * torch.eye(P), b + 0.7 * w)
    torch.testing.assert_close(run.posterior.mean, w, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(own(run), exact, rtol=1e-6, atol=1e-6)


def test_ditto_shares_fedavg_and_without_a_bond_every_client_is_alone(world):
    run = fit(Ditto(NOISY, lam=0.0), world, 4)
    assert torch.equal(run.posterior.mean, fit(cs.FedAvg(NOISY), world, 4).posterior.mean)
    torch.testing.assert_close(own(run), own(fit(cs.LocalOnly(NOISY), world, 4)), rtol=1e-12, atol=1e-12)


def test_a_strong_bond_keeps_ditto_at_the_global_model(world):
    run = fit(Ditto(FULL, lam=1e6), world, 300)
    torch.testing.assert_close(own(run), run.posterior.mean.expand(K, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_pfedme_minimises_the_mean_of_the_moreau_envelopes(world):
    lam = 2.0
    train = cs.SGD(lr=0.2, epochs=40, batch_size=100)
    run = fit(PFedMe(train, lam=lam, lr=0.3, steps=1), world, 150)
    H, b = quadratics(world[1])
    inner = torch.linalg.inv(H + lam * torch.eye(P))
    # θ_k(w) = (H + λ)⁻¹ (b + λ w), and Σ (w − θ_k(w)) = 0
    w = torch.linalg.solve((torch.eye(P) - lam * inner).sum(0), torch.einsum("kij,kj->i", inner, b))
    theta = torch.einsum("kij,kj->ki", inner, b + lam * w)
    torch.testing.assert_close(run.posterior.mean, w, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(own(run), theta, rtol=1e-4, atol=1e-4)


def test_pfedme_sees_other_batches_in_every_step(world):
    one = cs.SGD(lr=0.05, batch_size=5)
    twice, alike = (fit(PFedMe(train, lr=1e-9, steps=2), world) for train in (one, replace(one, batch_size=100)))
    longer, full = (
        fit(PFedMe(replace(train, epochs=2), lr=1e-9, steps=1), world) for train in (one, replace(one, batch_size=100))
    )
    torch.testing.assert_close(own(twice), own(longer), rtol=1e-6, atol=1e-6)  # w_k stands still: one chain of 2 epochs
    torch.testing.assert_close(own(alike), own(full), rtol=1e-6, atol=1e-6)


def test_fine_tuning_is_local_training_from_the_last_global_model(world):
    run = fit(cs.Switch(cs.FedAvg(NOISY), cs.LocalOnly(FULL), at=5), world, 6)
    w = fit(cs.FedAvg(NOISY), world, 5).posterior.mean
    H, b = quadratics(world[1])
    torch.testing.assert_close(own(run), w + 0.2 * (b - H @ w), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("algorithm", [FedPer(parts=("bias",)), cs.LocalOnly()], ids=["FedPer", "LocalOnly"])
def test_methods_of_clients_alone_refuse_to_predict_for_a_new_client(world, algorithm, tmp_path):
    run = fit(algorithm, world, out=tmp_path / "run")
    stored = cs.load_run(tmp_path / "run")
    x = world[1].data.x
    assert run.predict(x, client=0).shape == (sum(SIZES), 1)
    for predict in (lambda: run.predict(x), lambda: stored.predict(world[0], x)):
        with pytest.raises(TaskError, match="there is none for a new client: name a client"):
            predict()


def test_a_part_that_does_not_exist_or_cannot_be_guessed_is_refused(world):
    with pytest.raises(TaskError, match="there is no part 'hed' in the model"):
        fit(FedPer(parts=("hed",)), world)
    images = cs.Dataset(torch.randn(8, 1, 4, 4), torch.arange(8) % 2, name="images")
    federation = cs.Federation.from_owner(images, torch.arange(8) % 2)
    convolution = cs.Classification(nn.Sequential(nn.Conv2d(1, 2, 4), nn.Flatten()))
    with pytest.raises(TaskError, match="the module has no linear layer: name its parts"):
        fit(FedRep(), (convolution, federation))


def test_a_bond_cannot_be_negative():
    with pytest.raises(ConfigError, match="lam must be at least 0"):
        Ditto(lam=-1.0)
