"""FedNP: known answers, limits, and what must hold of q(z) and its sites."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

import consilience as cs
from consilience.algorithms.fednp import NETWORK, SIGNAL, Client, Message
from consilience.core import keys
from consilience.core.errors import ConfigError, TaskError
from consilience.core.gaussian import Gaussian
from consilience.core.records import tree_map
from consilience.inference import sigmoid_moments
from support.one_shot import learn
from support.scenarios import blobs, linear

LOCAL = cs.SGD(lr=0.1, momentum=0.9, epochs=2, batch_size=8, weight_decay=0.01)
STILL = cs.SGD(lr=0.0, batch_size=8)
EXACT = {"rtol": 1e-11, "atol": 1e-11}
D, H = 3, 4


def fednp(train=LOCAL, **options):
    return cs.FedNP(train, **{"latent": D, "hidden": H} | options)


def adapted(method, task=None):
    return method.adapt(blobs()[0] if task is None else task, 0).prepare(dtype=torch.float64)


def everyone(run):
    return run.states.gather(torch.arange(len(run.federation)))


def fresh(method, task, federation):
    """(server, all clients' states) before the first round."""
    info = cs.data.Info(task.initial(), *(torch.tensor(v) for v in (0, len(federation), federation.examples)))
    return method.start(task, info), method.client(task, info, federation.sizes.double().unsqueeze(1))


def one_round(method, task, federation, theta=None, states=None):
    """What all clients answer, and their new states, from weights θ."""
    server, begun = fresh(method, task, federation)
    message = Message(cs.Point(task.initial() if theta is None else theta), server.q)
    sizes = federation.sizes.argsort(descending=True, stable=True)
    assert torch.equal(sizes, torch.arange(len(federation)))  # of `blobs`: all alike
    cohort = cs.data.Cohort(federation, sizes, round=1, round_size=len(sizes), seed=0, dtype=torch.float64)
    return method.local(task, message, begun if states is None else states, cohort)


# FedNP on the network of `blobs`, in plain torch

SHAPES = [(8, 2), (8,), (3, 8), (3,), (D, 8), (D,), (H, D), (H,), (24, H), (24,)]


def apart(theta):
    """The weights as matrices: of the user's two layers, of f's network, of the natural-parameter network's two."""
    sizes = [math.prod(shape) for shape in SHAPES]
    return [part.view(shape) for part, shape in zip(theta.split(sizes), SHAPES, strict=True)]


def f_by_hand(theta, x, bound=3.0):
    w1, b1, _, _, w, b, *_ = apart(theta)
    return bound * ((x @ w1.T + b1).tanh() @ w.T + b).mean(0).tanh()


def tilted_by_hand(f, m, s):
    kappa = 1 / (1 + math.pi / 8 * f**2 * s).sqrt()
    p = (kappa * f * m).sigmoid()
    return m + s * f * kappa * (1 - p), s * (1 - f**2 * s * kappa**2 * p * (1 - p))


def predicted_by_hand(theta, m, s):
    *_, w1, b1, w2, b2 = apart(theta)
    alpha, beta, zeta2 = 4 - 2 * 2**0.5, math.log(2**0.5 - 1), math.pi / 8
    o_m, o_s = w1 @ m + b1, w1**2 @ s
    a_m = (o_m / (1 + zeta2 * o_s).sqrt()).sigmoid()
    a_s = (alpha * (o_m + beta) / (1 + zeta2 * alpha**2 * o_s).sqrt()).sigmoid() - a_m**2
    return w2 @ a_m + b2, w2**2 @ a_s.clamp_min(1e-6)


def loss_by_hand(method, theta, x, y, mean, var):
    w1, b1, w2, b2, *_ = apart(theta)
    output = (x @ w1.T + b1).tanh() @ w2.T + b2
    m, s = tilted_by_hand(f_by_hand(theta, x, method.bound), mean, var)
    mu, v = predicted_by_hand(theta, m, s)
    spring = kl_divergence(Normal(mu, v.sqrt()), Normal(w2.flatten(), method.epsilon**0.5)).mean()
    latent = kl_divergence(Normal(m, s.sqrt()), Normal(torch.zeros_like(m), torch.ones_like(s))).sum()
    return nn.functional.cross_entropy(output, y) + method.strength * (spring + latent)


def case(task, count=7, pad=2):
    """θ, a batch with rows of padding that must not count, and a cavity's mean and variance."""
    made = torch.Generator().manual_seed(5)
    theta = task.initial() + 0.5 * torch.randn(task.size, generator=made).double()
    x, w = torch.randn(count, 2, generator=made).double(), (torch.arange(count) < count - pad).double()
    batch = cs.data.Batch(x, torch.arange(count) % 3, w, torch.tensor(3))
    return theta, batch, torch.randn(D, generator=made).double(), torch.rand(D, generator=made).double() + 0.5


@pytest.mark.parametrize("options", [{}, {"epsilon": 0.3, "bound": 1.5}], ids=str)
def test_the_loss_is_the_formulas_and_so_is_its_gradient(options):
    method = fednp(strength=0.7, **options)
    task = adapted(method)
    theta, batch, mean, var = case(task)
    real = int(batch.w.sum())
    at = theta.clone().requires_grad_()
    wanted = loss_by_hand(method, at, batch.x[:real], batch.y[:real], mean, var)
    gradient, value = task.gradient(method.loss)(
        *(tree_map(lambda t: t[None], part) for part in (theta, batch, mean, var))
    )
    torch.testing.assert_close(value[0], wanted.detach(), **EXACT)
    torch.testing.assert_close(gradient[0], torch.autograd.grad(wanted, at)[0], **EXACT)


def test_the_added_terms_reach_every_network():
    task = adapted(fednp())
    rows = [tree_map(lambda t: t[None], part) for part in case(task)]
    plain, added = (task.gradient(fednp(strength=strength).loss)(*rows)[0][0] for strength in (0.0, 1.0))
    change = added - plain
    for where in (
        *(task.slice(parameter=name) for name in ("2.weight", "0.weight")),
        *map(task.slice, (NETWORK, SIGNAL)),
    ):
        assert change[where].abs().max() > 1e-6
    assert not change[task.slice(parameter="2.bias")].any()  # the bias is not predicted
    assert not plain[task.slice(SIGNAL)].any()  # the user's loss does not depend on f


def test_without_strength_the_users_network_is_fedavgs():
    task, even, _ = blobs()
    owner = torch.arange(6).repeat_interleave(torch.tensor([50, 30, 20, 10, 8, 2]))
    train, server = cs.Federation.from_owner(even.data, owner), cs.server.Momentum(0.9, 0.5)
    fedavg = learn(cs.FedAvg(LOCAL, server), task, train, rounds=3, cohort=4).posterior.mean
    without, with_ = (
        learn(fednp(server=server, strength=strength), task, train, rounds=3, cohort=4) for strength in (0.0, 0.1)
    )
    torch.testing.assert_close(without.posterior.mean[: task.size], fedavg, rtol=1e-10, atol=1e-12)
    assert (with_.posterior.mean[: task.size] - fedavg).abs().max() > 1e-4
    assert without.history[-1]["z_mean"] != 0


# q(z) and its sites


def flat_prior():
    return torch.zeros(D).double(), torch.ones(D).double()


def test_with_one_client_every_round_tilts_the_prior_afresh():
    task, train, _ = blobs()
    one, seen = train.pooled(), []
    learn(fednp(), task, one, rounds=4, callbacks=[lambda run, line: seen.append(run.server)])
    for server in seen:
        f = f_by_hand(server.model.theta, one.data.x.double()[one.order])
        mean, var = tilted_by_hand(f, *flat_prior())
        torch.testing.assert_close(server.q.mean, mean, **EXACT)
        torch.testing.assert_close(server.q.variance, var, **EXACT)
    assert (seen[3].q.mean - seen[0].q.mean).abs().max() > 0.01


@pytest.mark.parametrize(("epochs", "damping", "cohort"), [(1, 1.0, 6), (3, 1.0, 2), (1, None, 2), (1, 0.4, 6)])
def test_sites_of_constant_weights_follow_the_formulas(epochs, damping, cohort):
    """A site is the tilted of the final f over the cavity, however long clients train; tilts are not chained."""
    task, train, _ = blobs()
    method, rounds, clients = fednp(replace(STILL, epochs=epochs), damping=damping), 4, len(train)
    share = damping or 1 / cohort
    run = learn(method, task, train, rounds=rounds, cohort=cohort, debug=True)
    theta = run.task.initial()
    x = [train.client(k).x.double() for k in range(clients)]
    eta, lam = torch.zeros(2, clients, D).double()
    for number in range(1, rounds + 1):
        q_eta, q_lam = eta.sum(0), lam.sum(0) + 1
        for k in keys.sample(keys.key(0, purpose="cohort", round=number), clients, cohort).tolist():
            c_eta, c_lam = q_eta - eta[k], q_lam - lam[k]
            m, s = tilted_by_hand(f_by_hand(theta, x[k]), c_eta / c_lam, 1 / c_lam)
            eta[k] = (1 - share) * eta[k] + share * (m / s - c_eta)
            lam[k] = (1 - share) * lam[k] + share * (1 / s - c_lam)
    sites = everyone(run).site
    torch.testing.assert_close((sites.eta, sites.lam), (eta, lam), **EXACT)
    torch.testing.assert_close(run.server.q.lam, lam.sum(0) + 1, **EXACT)
    assert max(line["audit"]["q_apart_from_sites"] for line in run.history) < 1e-12


@pytest.mark.parametrize(("damping", "rounds"), [(1.0, 5), (None, 15)])
def test_q_comes_near_the_true_posterior_of_z(damping, rounds):
    task, train, _ = blobs()
    run = learn(fednp(STILL, damping=damping), task, train, rounds=rounds)
    z = torch.linspace(-8, 8, 4001).double()
    fs = torch.stack([f_by_hand(run.task.initial(), train.client(k).x.double()) for k in range(len(train))])
    assert fs.abs().max() > 0.5
    weight = (nn.functional.logsigmoid(fs.unsqueeze(-1) * z).sum(0) - z**2 / 2).softmax(-1)
    mean = weight @ z
    torch.testing.assert_close(run.server.q.mean, mean, rtol=0, atol=0.05)
    torch.testing.assert_close(run.server.q.variance, weight @ z**2 - mean**2, rtol=0.05, atol=0)


def test_a_site_that_does_not_belong_to_q_is_found_out():
    task, train, _ = blobs()

    def tamper(run, line):
        if line["round"] == 2:
            one = run.states.gather(torch.tensor([0]))
            run.states.commit(torch.tensor([0]), Client(one.site**2.0), 2)

    with pytest.raises(cs.ConsilienceError, match=r"q\(z\) is not the product of the sites: they differ by .* of its"):
        learn(fednp(), task, train, rounds=4, debug=True, callbacks=[tamper])
    learn(fednp(), task, train, rounds=4, callbacks=[tamper])  # without debug, no audit


def test_damped_clients_that_turn_round_at_once_do_not_overshoot():
    """σ(fz) is a slope without curvature where it is small: all sites together can push q far beyond what they want."""
    _, train, _ = blobs(clients=12, each=4)
    found = {}
    for damping in (1.0, None):
        method = fednp(STILL, damping=damping)
        task = adapted(method)
        server, states = fresh(method, task, train)
        q, found[damping] = server.q, []
        cohort = cs.data.Cohort(train, torch.arange(12), round=1, round_size=12, seed=0, dtype=torch.float64)
        for bias in [1.0] * 15 + [-1.0] * 15:
            theta = task.initial()
            theta[task.slice(SIGNAL)] = torch.cat([torch.zeros(8 * D), torch.full((D,), bias)]).double()
            answer, states = method.local(task, Message(cs.Point(theta), q), states, cohort)
            q = q * answer.site.product()
            found[damping].append(float(q.mean[0]))
    assert min(found[1.0]) < -4 < -2 < min(found[None]) < -0.5
    assert max(found[1.0]) < 2 > max(found[None]) > 0.5


def test_f_of_a_site_has_no_dropout():
    _, train, _ = blobs()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with_dropout = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))
    without = nn.Sequential(with_dropout[0], with_dropout[1], with_dropout[3])
    method = fednp(STILL)
    sites = []
    for module in (with_dropout, without):
        task = adapted(method, cs.Classification(module))
        sites.append(one_round(method, task, train)[1].site)
    torch.testing.assert_close(sites[0].eta, sites[1].eta, **EXACT)
    keyed, plain = (task.gradient(method.loss) for task in (adapted(method, cs.Classification(with_dropout)), task))
    rows = [tree_map(lambda t: t[None], part) for part in case(task)]
    assert not torch.equal(keyed(*rows)[0][:, task.slice(SIGNAL)], plain(*rows)[0][:, task.slice(SIGNAL)])


# Networks


def test_predicted_weights_are_those_of_the_network_at_q():
    task, train, _ = blobs()
    run = learn(fednp(), task, train, rounds=3)
    belief = run.algorithm.weights(run.task, run.server)
    mu, v = predicted_by_hand(run.posterior.mean, run.server.q.mean, run.server.q.variance)
    assert len(mu) == 24  # three classes of eight features
    torch.testing.assert_close(belief.mean, mu, **EXACT)
    torch.testing.assert_close(belief.variance, v, **EXACT)


def test_strength_draws_predictions_and_weights_together():
    task, train, _ = blobs()
    gaps = []
    for strength in (0.0, 1.0):
        train_long = replace(LOCAL, weight_decay=0.0)
        run = learn(fednp(train_long, strength=strength, hidden=H), task, train, rounds=6)
        w = run.posterior.mean[run.task.slice(parameter="2.weight")]
        gaps.append(float((run.algorithm.weights(run.task, run.server).mean - w).norm()))
    assert gaps[1] < 0.75 * gaps[0]


def test_the_user_gets_a_plain_module_back():
    task, train, test = blobs()
    run = learn(fednp(), task, train, rounds=10)
    assert isinstance(run.posterior, cs.Point)
    assert [name for name, _ in run.model.named_parameters()] == task.main.names
    x = test.data.x
    torch.testing.assert_close(run.model.double()(x.double()).softmax(-1), run.predict(x.double()), rtol=0, atol=1e-6)
    assert run.evaluate(test.data).point["accuracy"] > 0.9


def test_what_travels_is_three_networks_and_a_small_gaussian():
    task, train, _ = blobs()
    run = learn(fednp(), task, train, cohort=4)
    size = task.size + D * 9 + H * (D + 1) + 24 * (H + 1)
    assert run.task.size == size
    assert run.history[0]["bytes_down"] == 4 * 8 * (size + 2 * D)
    assert run.history[0]["bytes_up"] == 4 * 8 * (size + 1 + 2 * D)


@pytest.mark.parametrize(("layer", "weights"), [(None, 24), ("2", 24), ("0", 16)])
def test_the_layer_can_be_chosen(layer, weights):
    task, train, _ = blobs()
    method = fednp(replace(LOCAL, weight_decay=0.0), strength=1.0, layer=layer)
    extended = adapted(method)
    assert len(method.weights(extended, fresh(method, extended, train)[0]).eta) == weights
    theta, batch, mean, var = case(extended)
    leash = [fednp(strength=strength, layer=layer) for strength in (0.0, 1.0)]
    rows = [tree_map(lambda t: t[None], part) for part in (theta, batch, mean, var)]
    change = torch.sub(*(extended.gradient(one.loss)(*rows)[0][0] for one in leash))
    assert change[extended.slice(parameter=f"{layer or 2}.weight")].abs().max() > 1e-6
    learn(method, task, train, rounds=2)


def test_a_module_that_is_a_linear_layer_itself_has_a_layer_to_predict():
    task, federation = linear(names=None)
    run = learn(fednp(cs.SGD(lr=0.1, epochs=2)), task, federation, rounds=6)
    assert len(run.algorithm.weights(run.task, run.server).eta) == 3
    assert run.evaluate(federation.data).point["rmse"] < 1.3


def frozen():
    module = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    module[2].requires_grad_(False)
    return cs.Classification(module)


@pytest.mark.parametrize(
    ("layer", "task", "sentence"),
    [
        ("3", blobs()[0], "layer '3' has no weights to predict; allowed: 0, 2"),
        ("1", blobs()[0], "layer '1' has no weights to predict; allowed: 0, 2"),
        (None, frozen(), "layer '2' has no weights to predict; allowed: 0"),
    ],
)
def test_a_layer_without_weights_is_named(layer, task, sentence, tmp_path):
    with pytest.raises(ConfigError) as error:
        learn(fednp(layer=layer), task, blobs()[1], out=tmp_path / "run")
    assert str(error.value) == sentence
    assert not list(tmp_path.iterdir())


def test_a_module_without_a_linear_layer_is_refused():
    _, train, _ = blobs()
    module = nn.Sequential(nn.Unflatten(1, (2, 1)), nn.Conv1d(2, 3, 1), nn.Flatten())
    with pytest.raises(TaskError) as error:
        learn(fednp(), cs.Classification(module), train)
    assert str(error.value) == "FedNP needs a linear layer, whose weights it can predict, but the module has none"


def test_the_runs_seed_alone_decides_the_added_networks():
    task, before = blobs()[0], torch.get_rng_state()
    first, again, other = (fednp().adapt(task, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    for part in (SIGNAL, NETWORK):
        weights, same, different = (made.initial()[made.slice(part)] for made in (first, again, other))
        assert torch.equal(weights, same)
        assert not torch.equal(weights, different)
    assert torch.equal(first.initial()[: task.size], other.initial()[: task.size])


# Tasks and precisions


def labels():
    """The points of `blobs` with a label for each cloud, and one that all of them have."""
    _, train, _ = blobs()
    y = torch.cat([nn.functional.one_hot(train.data.y, 3).float(), torch.ones(len(train.data), 1)], 1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
    return cs.MultiLabel(module), replace(train, data=cs.Dataset(train.data.x, y, name="labels"))


def plane():
    _, federation = linear(names=None)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return cs.Regression(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))), federation


@pytest.mark.parametrize("world", [labels, plane], ids=["multi-label", "regression"])
def test_other_tasks_learn_too(world):
    task, federation = world()
    before = cs.evaluate(task, cs.Point(task.initial()), federation.data).point["nll"]
    run = learn(fednp(cs.SGD(lr=0.05, epochs=2, batch_size=8)), task, federation, rounds=6, debug=True)
    assert run.evaluate(federation.data).point["nll"] < 0.9 * before
    assert run.history[-1]["z_mean"] != 0


@pytest.mark.usefixtures("_plain_kernels")
@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
def test_beside_a_network_in_bfloat16_the_small_ones_stay_in_float32():
    method = fednp(strength=1.0)
    whole = method.adapt(blobs()[0], 0)
    short = whole.prepare(bf16=True)
    theta, batch, mean, var = (tree_map(lambda t: t.float() if t.is_floating_point() else t, p) for p in case(whole))
    parts = short.split(theta)
    features = short.features_one(theta, batch.x)[0]
    assert not torch.equal(features, whole.features_one(theta, batch.x)[0])
    output = method.forward(short, parts, batch, None)[0]
    assert torch.equal(output, batch.mean(whole.call_one(SIGNAL, theta, features)))
    assert not torch.equal(output, batch.mean(short.call_one(SIGNAL, theta, features)))
    m, s = sigmoid_moments(method.f(output), mean, var)
    mu, v = whole.call_one(NETWORK, theta, m, s)
    spring = (
        Gaussian.of(mu, 1 / v).kl(Gaussian.of(parts["main"][short.slice(parameter="2.weight")], torch.ones(1))) / 24
    )
    latent = Gaussian.of(m, 1 / s).kl(Gaussian(torch.zeros(D), torch.ones(1)))
    added = method.loss(short, theta, batch, mean, var) - replace(method, strength=0.0).loss(
        short, theta, batch, mean, var
    )
    torch.testing.assert_close(added, spring + latent, rtol=1e-5, atol=1e-5)
    rows = [tree_map(lambda t: t[None], part) for part in (theta, batch, mean, var)]
    (slope, loss), (rough, rough_loss) = (task.gradient(method.loss)(*rows) for task in (whole, short))
    assert rough.dtype == rough_loss.dtype == torch.float32
    assert not torch.equal(slope, rough)
    assert torch.cosine_similarity(slope[0], rough[0], dim=0) > 0.99
    torch.testing.assert_close(loss, rough_loss, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strength": -0.1}, "strength must be at least 0, got -0.1"),
        ({"strength": math.nan}, "strength must be finite, got nan"),
        ({"latent": 0}, "latent must be at least 1, got 0"),
        ({"hidden": 0}, "hidden must be at least 1, got 0"),
        ({"epsilon": 0.0}, "epsilon must be above 0, got 0.0"),
        ({"bound": -3.0}, "bound must be above 0, got -3.0"),
        ({"damping": 0.0}, "damping must be above 0, got 0.0"),
        ({"damping": 1.5}, "damping must be at most 1, got 1.5"),
    ],
    ids=str,
)
def test_settings_out_of_bounds_are_refused(options, message):
    with pytest.raises(ConfigError) as error:
        cs.FedNP(**options)
    assert str(error.value) == f"FedNP: {message}"
