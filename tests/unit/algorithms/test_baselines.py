"""MOON, FedLA and FedBE: known answers, and the cases where they are FedAvg."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.core.errors import ConfigError, TaskError
from consilience.tasks.likelihoods import Normal
from consilience.tasks.supervised import Supervised
from support.one_shot import STILL, learn
from support.scenarios import blobs, linear

LOCAL = cs.SGD(lr=0.1, momentum=0.9, epochs=2, batch_size=8, weight_decay=0.01)

# MOON


def contrast(z, z_global, z_previous, temperature):
    """As the paper has it, for one example's features as plain lists."""

    def cosine(a, b):
        length = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
        return sum(x * y for x, y in zip(a, b, strict=True)) / length

    near, far = (math.exp(cosine(z, other) / temperature) for other in (z_global, z_previous))
    return -math.log(near / (near + far))


def points(count=7, pad=2, dtype=torch.float64):
    """One client's batch for the network of `blobs`, with rows of padding that must not count."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 2, generator=generator, dtype=dtype)
    w = torch.ones(count, dtype=dtype)
    w[count - pad :] = 0
    return cs.data.Batch(x, torch.arange(count) % 3, w, torch.tensor(3))


def three_models(task):
    generator = torch.Generator().manual_seed(7)
    return [task.initial() + 0.5 * torch.randn(task.size, generator=generator).double() for _ in range(3)]


@pytest.mark.parametrize(("mu", "temperature"), [(5.0, 0.1), (0.3, 2.0)])
def test_moon_adds_the_mean_contrast_of_the_batch(mu, temperature):
    task = blobs()[0].prepare(dtype=torch.float64)
    (theta, previous, w), batch = three_models(task), points()
    z, z_global, z_previous = (task.features_one(one, batch.x)[0].tolist() for one in (theta, w, previous))
    real = int(batch.w.sum())
    wanted = sum(contrast(z[i], z_global[i], z_previous[i], temperature) for i in range(real)) / real
    got = cs.algorithms.MOON(mu=mu, temperature=temperature).loss(task, theta, batch, previous, w)
    torch.testing.assert_close(float(got - task.loss_one(theta, batch)), mu * wanted, rtol=1e-10, atol=1e-12)


def test_moon_knows_features_by_their_direction():
    """Two units with features (1, 0), (0, 1) and (3, 4): cosines 0.6 and 0.8 with the last, whatever the lengths."""
    task = cs.Classification(nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 2, bias=False)))
    task = task.prepare(dtype=torch.float64)
    batch = cs.data.Batch(torch.ones(1, 1).double(), torch.zeros(1, dtype=torch.int64), torch.ones(1), torch.tensor(0))
    head = torch.zeros(4).double()
    for length in (1.0, 7.0, 0.01):
        z, z_global, z_previous = (
            torch.cat([length * torch.tensor(direction).double(), head])
            for direction in ((3.0, 4.0), (1.0, 0.0), (0.0, 1.0))
        )
        got = cs.algorithms.MOON(mu=2.0, temperature=0.5).loss(task, z, batch, z_previous, z_global)
        exact = math.log(2) + 2 * math.log(1 + math.exp((0.8 - 0.6) / 0.5))
        torch.testing.assert_close(float(got), exact, rtol=1e-12, atol=0)


def test_moons_gradient_is_that_of_finite_differences_for_every_client():
    task, method = blobs()[0].prepare(dtype=torch.float64), cs.algorithms.MOON(mu=3.0)
    (theta, previous, w), batch = three_models(task), points()
    rows = cs.data.Batch(*(torch.stack([leaf, leaf]) for leaf in (batch.x, batch.y, batch.w, batch.key)))
    own = torch.stack([theta, previous]), rows, torch.stack([previous, theta])
    gradient, value = task.gradient(method.loss)(*own, shared=(w,))
    for k, (at, last) in enumerate(((theta, previous), (previous, theta))):
        torch.testing.assert_close(value[k], method.loss(task, at, batch, last, w))
        step = 1e-6 * torch.eye(task.size).double()[::7]
        wanted = [method.loss(task, at + e, batch, last, w) - method.loss(task, at - e, batch, last, w) for e in step]
        torch.testing.assert_close(gradient[k][::7], torch.stack(wanted) / 2e-6, rtol=1e-6, atol=1e-8)


def test_constants_of_the_contrast_are_computed_without_dropout():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))
    task = cs.Classification(module).prepare(dtype=torch.float64)
    theta, batch = task.initial(), points(pad=0)
    z, z_global = (task.features_one(theta, batch.x, key)[0] for key in (batch.key, None))
    assert not torch.equal(z, z_global)
    other = three_models(task)[0]
    z_previous = task.features_one(other, batch.x)[0]
    wanted = [contrast(*row, 0.5) for row in zip(z.tolist(), z_global.tolist(), z_previous.tolist(), strict=True)]
    got = cs.algorithms.MOON().loss(task, theta, batch, other, theta) - task.loss_one(theta, batch)
    torch.testing.assert_close(float(got), sum(wanted) / len(wanted), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_moon_without_contrast_is_fedavg_bit_for_bit(precision):
    task, train, _ = blobs()
    engine = cs.Simulator(device="cpu", precision=precision, chunk=3, workers=1)
    fedavg, moon, contrasted = (
        learn(method, task, train, rounds=2, cohort=4, engine=engine).posterior.theta
        for method in (cs.FedAvg(LOCAL), cs.algorithms.MOON(LOCAL, mu=0.0), cs.algorithms.MOON(LOCAL))
    )
    assert torch.equal(moon, fedavg)
    assert not torch.allclose(contrasted, fedavg, atol=1e-4)


def test_a_first_round_of_moon_is_fedavgs_whenever_it_comes():
    task, train, _ = blobs()
    fedavg, moon = (learn(method, task, train) for method in (cs.FedAvg(LOCAL), cs.algorithms.MOON(LOCAL, mu=5.0)))
    torch.testing.assert_close(moon.posterior.theta, fedavg.posterior.theta, rtol=1e-10, atol=1e-12)
    gap = moon.history[0]["loss"] - fedavg.history[0]["loss"]
    assert gap == pytest.approx(5 * math.log(2))
    method, task = cs.algorithms.MOON(LOCAL, mu=5.0), task.prepare(dtype=torch.float64)
    w, numbers = moon.posterior, (torch.tensor(v) for v in (0, 6, train.examples))
    info = cs.data.Info(
        task.initial(), *numbers
    )  # not w: in a later round a newcomer's last model is still the global one
    ids = train.sizes.argsort(descending=True, stable=True)
    cohort = cs.data.Cohort(train, ids, round=2, round_size=6, seed=0, dtype=torch.float64)
    update, state = method.local(task, w, method.client(task, info, cohort.n), cohort)
    plain, _ = cs.FedAvg(LOCAL).local(task, w, None, cohort)
    torch.testing.assert_close(update.total.theta, plain.total.theta, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state.theta, w.theta + update.total.theta / cohort.n)
    second, _ = method.local(task, w, state, cohort)
    assert not torch.allclose(second.total.theta, plain.total.theta, atol=1e-3)


def test_moon_keeps_a_clients_last_model_until_it_takes_part_again():
    task, train, _ = blobs()
    run = learn(cs.algorithms.MOON(LOCAL), task, train, rounds=2, cohort=2)
    state = run.states.gather(torch.arange(6))
    took_part = state.known[:, 0] > 0
    assert 2 <= int(took_part.sum()) <= 4
    assert bool((state.theta[took_part] != 0).any(1).all())
    assert not state.theta[~took_part].any()


def test_without_features_of_its_own_moon_is_fedavg():
    task, federation = linear()  # features are the inputs, so all cosines are 1
    fedavg, moon = (learn(method, task, federation, rounds=3) for method in (cs.FedAvg(), cs.algorithms.MOON()))
    torch.testing.assert_close(moon.posterior.theta, fedavg.posterior.theta, rtol=1e-12, atol=1e-12)


def test_moon_needs_a_linear_layer(tmp_path):
    _, train, _ = blobs()
    module = nn.Sequential(nn.Unflatten(1, (2, 1)), nn.Conv1d(2, 3, 1), nn.Flatten())
    with pytest.raises(TaskError, match="MOON compares the features before the last linear layer, but the module has"):
        learn(cs.algorithms.MOON(), cs.Classification(module), train, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


# FedLA


class Unit(Normal):
    """Drawn targets are one deviation off, so the Fisher information is x²/noise² without randomness."""

    def draw(self, output, key):
        return output + self.noise


class Silent(Normal):
    """Drawn targets are the predictions, so the Fisher information is 0."""

    def draw(self, output, key):
        return output


SIZES = (8, 4, 16)


def diagonal_design(kind=Unit, noise=0.5):
    """Three clients whose features are orthogonal and differ in length from client to client."""
    generator = torch.Generator().manual_seed(11)
    parts = [torch.linalg.qr(torch.randn(n, 3, generator=generator).double()).Q * n**0.5 for n in SIZES]
    lengths = torch.tensor([[1.0, 0.5, 0.6], [0.5, 1.0, 0.7], [0.6, 0.5, 1.1]]).double()
    x = torch.cat([part * length for part, length in zip(parts, lengths, strict=True)])
    y = x @ torch.tensor([[1.0], [-2.0], [3.0]]).double() + torch.randn(28, 1, generator=generator).double()
    owner = torch.arange(3).repeat_interleave(torch.tensor(SIZES))
    module = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(module.weight)
    return Supervised(module, kind(noise)), cs.Federation.from_owner(cs.Dataset(x, y, name="orthogonal"), owner)


FULL = cs.SGD(lr=0.2, epochs=100, batch_size=100)


@pytest.mark.slow
@pytest.mark.parametrize(("strength", "decay"), [(0.0, 0.0), (1.0, 0.3)])
def test_fedla_finds_the_pooled_solution_at_once_and_stays_there(strength, decay):
    task, federation = diagonal_design()
    data, n = federation.data, sum(SIZES)
    ridge = decay * n * 0.25 * torch.eye(3).double()  # the loss is in units of noise² = ¼
    exact = torch.linalg.solve(data.x.T @ data.x + ridge, data.x.T @ data.y)[:, 0]
    method = cs.algorithms.FedLA(replace(FULL, weight_decay=decay), strength=strength, prior=1e-12, kappa=1.0)
    precision = (data.x.square().sum(0) / 0.25 + decay * n).double()
    for rounds in (1, 3):
        q = learn(method, task, federation, rounds=rounds).posterior
        torch.testing.assert_close(q.mean, exact, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(q.lam, precision, rtol=1e-8, atol=1e-8)  # that of all examples, counted once
    average = learn(cs.FedAvg(replace(FULL, weight_decay=decay)), task, federation, rounds=3).posterior.theta
    assert (average - exact).abs().max() > 0.01


def test_fedla_pulls_clients_to_w_by_the_precision_there():
    task, federation = diagonal_design()
    task, strength = task.prepare(dtype=torch.float64), 0.7
    method = cs.algorithms.FedLA(FULL, strength=strength, prior=1e-3)
    w, precision = torch.tensor([1.0, 2.0, -1.0]).double(), torch.tensor([0.0, 3.0, 0.5]).double()
    numbers = (torch.tensor(v) for v in (0, 3, 28))
    server = replace(method.start(task, cs.data.Info(w, *numbers)), precision=precision)
    for client, n in enumerate(SIZES):
        ids = torch.tensor([client])
        cohort = cs.data.Cohort(federation, ids, round=1, round_size=3, seed=0, dtype=torch.float64)
        update, _ = method.local(task, method.message(server, ids), None, cohort)
        mine = federation.client(client)
        curvature = mine.x.square().sum(0) / n / 0.25
        total = curvature + strength * precision
        found = (mine.x.T @ mine.y)[:, 0] / n / 0.25 + strength * precision * w
        torch.testing.assert_close(update.mean.fisher[0], curvature)
        torch.testing.assert_close(update.mean.pull[0], (total + 1e-3) * (found / total - w), rtol=1e-7, atol=1e-7)
        assert torch.equal(update.weight, torch.tensor([[float(n)]]).double())


def test_old_fisher_information_fades_by_the_strength():
    task, federation = diagonal_design()
    once = federation.data.x.square().mean(0) / 0.25
    for rounds, passes in ((1, 1.0), (2, 1.5), (3, 1.75)):
        server = learn(cs.algorithms.FedLA(STILL, strength=0.5), task, federation, rounds=rounds).server
        torch.testing.assert_close(server.precision, passes * once)
        assert float(server.rounds) == passes


@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_fedla_without_any_fisher_information_is_fedavg_and_says_so(strength):
    task, federation = diagonal_design(Silent)
    local = replace(LOCAL, weight_decay=0.0)
    run, plain = (
        learn(m, task, federation, rounds=3) for m in (cs.algorithms.FedLA(local, strength), cs.FedAvg(local))
    )
    torch.testing.assert_close(run.posterior.mean, plain.posterior.theta, rtol=1e-10, atol=1e-12)
    assert run.history[-1]["guards"]["mean without precision"] == 3


def test_fedla_is_fedavg_where_all_clients_have_the_same_fisher_information():
    task, federation = diagonal_design()
    data = federation.data
    same = torch.cat([federation.client(c).x / federation.client(c).x.square().mean(0).sqrt() for c in range(3)])
    federation = replace(federation, data=replace(data, x=same))
    run, plain = (
        learn(m, task, federation, rounds=3) for m in (cs.algorithms.FedLA(FULL, strength=0.0), cs.FedAvg(FULL))
    )
    torch.testing.assert_close(run.posterior.mean, plain.posterior.theta, rtol=1e-8, atol=1e-8)


def test_fedlas_proximal_term_acts_from_the_second_round_on():
    task, federation = diagonal_design()
    one, local = federation.pooled(), cs.SGD(lr=0.02, epochs=10, batch_size=100)
    first, plain = (
        learn(m, task, one).posterior.mean for m in (cs.algorithms.FedLA(local, strength=1.0), cs.FedAvg(local))
    )
    torch.testing.assert_close(first, plain, rtol=1e-10, atol=1e-12)
    moved = [
        (learn(cs.algorithms.FedLA(local, strength=s), task, one, rounds=2).posterior.mean - first).norm()
        for s in (0.0, 0.5, 1.0)
    ]
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] < 0.8 * moved[0]


def test_before_the_first_round_fedla_is_at_the_initial_weights():
    task, _, _ = blobs()
    method, numbers = cs.algorithms.FedLA(kappa=5.0), (torch.tensor(v) for v in (0, 6, 100))
    q = method.posterior(method.start(task, cs.data.Info(task.initial(), *numbers)))
    torch.testing.assert_close(q.mean, task.initial())
    torch.testing.assert_close(q.lam, torch.full((task.size,), 5 * 100 * 1e-4))


# FedBE


def test_fedbe_draws_from_the_gaussian_of_the_clients():
    task, train, test = blobs()
    run = learn(cs.algorithms.FedBE(LOCAL, samples=2000), task, train, rounds=2)
    models, n = run.server.theta, train.sizes.double().unsqueeze(1)
    assert torch.equal(run.server.n, n)
    members, share = run.posterior.theta, n / n.sum()
    mean = (share * models).sum(0)
    deviation = (share * (models - mean).square()).sum(0).sqrt()
    torch.testing.assert_close(members[0], mean)
    assert torch.equal(members[1:7], models)
    drawn = (members[7:] - mean) / deviation
    assert len(drawn) == 2000
    assert drawn.mean(0).abs().max() < 0.1
    assert (drawn.std(0) - 1).abs().max() < 0.08
    assert (drawn.T @ drawn / 2000 - torch.eye(task.size).double()).abs().max() < 0.12
    assert torch.equal(members, run.posterior.theta)  # the same draws whenever one asks
    x = test.data.x.double()
    few = learn(cs.algorithms.FedBE(LOCAL, samples=3), task, train, rounds=2)
    assert torch.equal(few.posterior.theta, members[:10])
    total = sum(few.task.predict(theta, x) for theta in members[:10])
    torch.testing.assert_close(few.predict(x), total / 10)


def test_rounds_of_fedbe_go_on_from_the_mean_as_fedavgs():
    task, train, _ = blobs()
    fedavg, fedbe = (learn(m, task, train, rounds=4, cohort=4) for m in (cs.FedAvg(LOCAL), cs.algorithms.FedBE(LOCAL)))
    assert len(fedbe.server.theta) == 4
    torch.testing.assert_close(fedbe.posterior.theta[0], fedavg.posterior.theta, rtol=1e-10, atol=1e-12)


def test_fedbe_of_clients_that_agree_is_fedavg():
    task, train, test = blobs()
    x = test.data.x.double()
    for federation in (train.pooled(), train):  # one client; or many that do not move
        local = LOCAL if len(federation) == 1 else STILL
        fedavg, fedbe = (learn(m, task, federation, rounds=2) for m in (cs.FedAvg(local), cs.algorithms.FedBE(local)))
        assert len(fedbe.posterior.theta) == 11 + len(federation)
        assert bool((fedbe.server.deviation < 1e-12).all())
        torch.testing.assert_close(fedbe.predict(x), fedavg.predict(x), rtol=1e-10, atol=1e-12)
        assert fedbe.uncertainty(test.data).mutual_information.max() < 1e-12


def test_fedbe_without_draws_is_an_ensemble_of_the_clients_and_their_mean():
    task, train, test = blobs()
    run, x = learn(cs.algorithms.FedBE(LOCAL, samples=0), task, train), test.data.x.double()
    assert len(run.posterior.theta) == 7
    total = sum(run.task.predict(theta, x) for theta in [run.server.mean, *run.server.theta])
    torch.testing.assert_close(run.predict(x), total / 7)


def test_fedbes_ensemble_is_distilled_on_unlabelled_data():
    task, train, test = blobs()
    run = learn(cs.algorithms.FedBE(LOCAL), task, train, rounds=3)
    x = 3 * torch.randn(200, 2, generator=torch.Generator().manual_seed(1))
    data = cs.Dataset(x, torch.zeros(200, dtype=torch.int64), classes=train.data.classes, name="unlabelled")
    teacher = replace(run, federation=cs.Federation.from_owner(data, torch.zeros(200, dtype=torch.int64)))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(2, 30), nn.ReLU(), nn.Linear(30, 3))
    train = cs.optim.AMSGrad(lr=0.01, epochs=30, batch_size=10)
    student = cs.studies.distil(teacher, module, train, engine=cs.Simulator(device="cpu"))
    x = test.data.x
    assert (student.predict(x).argmax(1) == run.predict(x.double()).argmax(1)).double().mean() > 0.9
    assert isinstance(student.model, nn.Sequential)
    with pytest.raises(TaskError, match="an ensemble is several networks"):
        _ = run.model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: cs.algorithms.MOON(mu=-1.0), "mu must be at least 0, got -1.0"),
        (lambda: cs.algorithms.MOON(temperature=0.0), "temperature must be above 0, got 0.0"),
        (lambda: cs.algorithms.FedLA(strength=1.5), "strength must be at most 1, got 1.5"),
        (lambda: cs.algorithms.FedLA(prior=0.0), "prior must be above 0, got 0.0"),
        (lambda: cs.algorithms.FedLA(batch_size=0), "batch_size must be at least 1, got 0"),
        (lambda: cs.algorithms.FedBE(samples=-1), "samples must be at least 0, got -1"),
    ],
)
def test_settings_out_of_range_are_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
