import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from consilience.core import guards
from consilience.core.errors import ConfigError
from consilience.core.gaussian import Gaussian
from consilience.core.records import rows
from consilience.data import Dataset, Federation
from consilience.data.cohort import Cohort
from consilience.optim import SGD, SGHMC, SGLD, AMSGrad, RMSprop
from consilience.tasks.likelihoods import Classification, Regression

EXACT = {"rtol": 1e-12, "atol": 1e-12}
SIZES = [33, 12, 7, 1]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def world(static=False):
    made = torch.Generator().manual_seed(1)
    total = sum(SIZES)
    data = Dataset(torch.randn(total, 4, generator=made), torch.randint(3, (total,), generator=made))
    fed = Federation.from_owner(data, torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES)))
    task = Classification(network()).prepare(dtype=torch.float64)
    ids = torch.arange(len(SIZES))
    group = Cohort(fed, ids, round=1, round_size=4, seed=0, dtype=torch.float64, static=static)
    return task, group


def torchs(chain, parameters):
    """The same optimiser in torch."""
    settings = {"lr": chain.lr, "weight_decay": chain.weight_decay}
    if isinstance(chain, AMSGrad):
        betas = (chain.beta1, chain.beta2)
        return torch.optim.Adam(parameters, betas=betas, eps=chain.eps, amsgrad=True, **settings)
    if isinstance(chain, RMSprop):
        return torch.optim.RMSprop(parameters, alpha=chain.alpha, eps=chain.eps, **settings)
    return torch.optim.SGD(parameters, momentum=chain.momentum, **settings)


def by_torch(chain, group, k, energy=None):
    """One client trained by torch's own optimiser on its own module, on the same batches without padding."""
    module = copy.deepcopy(network())
    optimiser = torchs(chain, module.parameters())
    last = 0.0
    for epoch in range(chain.epochs):
        last = 0.0
        for live, batch in group.epoch(epoch, chain.batch_size):
            if k >= live:
                continue
            real = int(batch.w[k].sum())
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(module(batch.x[k, :real]), batch.y[k, :real])
            last += float(loss.detach()) * real
            if energy is not None:
                loss = loss + energy(torch.cat([p.flatten() for p in module.parameters()]))
            loss.backward()
            optimiser.step()
    return nn.utils.parameters_to_vector(module.parameters()).detach(), last / SIZES[k]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    "chain",
    [
        SGD(lr=0.1, batch_size=5),
        SGD(lr=0.1, batch_size=5, epochs=3, momentum=0.9),
        SGD(lr=0.05, batch_size=8, epochs=2, weight_decay=0.1),
        SGD(lr=0.05, batch_size=100, epochs=4, momentum=0.5, weight_decay=0.01),
        AMSGrad(batch_size=5, epochs=4),
        AMSGrad(lr=0.1, batch_size=5, epochs=4, beta1=0.8, beta2=0.5, eps=1e-3),
        AMSGrad(lr=0.02, batch_size=8, epochs=3, beta1=0.0, beta2=0.0, weight_decay=0.1),
        AMSGrad(lr=0.0, batch_size=8, epochs=2),
        RMSprop(batch_size=5, epochs=4),
        RMSprop(lr=0.1, batch_size=5, epochs=4, alpha=0.5, eps=1e-3),
        RMSprop(lr=0.02, batch_size=8, epochs=3, alpha=0.0, weight_decay=0.1),
    ],
    ids=[
        *("plain", "momentum", "decay", "both", "AMSGrad", "short memory", "no memory, decay", "no step"),
        *("RMSprop", "RMSprop, short memory", "RMSprop, no memory, decay"),
    ],
)
def test_every_client_trains_as_torch_would_train_it(chain, static):
    task, group = world(static)
    trained = chain(task, task.initial(), group)
    for k in range(len(SIZES)):
        expected, loss = by_torch(chain, group, k)
        torch.testing.assert_close(trained[k], expected, **EXACT)
        torch.testing.assert_close(float(group.notes["loss"][k]), loss, **EXACT)


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

        torch.testing.assert_close(trained[k], by_torch(sgd, group, k, energy)[0], **EXACT)


def test_weight_decay_is_a_prior_around_zero():
    task, group = world()
    prior = Gaussian(torch.zeros(task.size).double(), torch.full((1,), 0.2, dtype=torch.float64))
    decayed = SGD(batch_size=5, weight_decay=0.2)(task, task.initial(), group)
    torch.testing.assert_close(decayed, SGD(batch_size=5)(task, task.initial(), group, prior=prior), **EXACT)


def test_clients_may_start_from_their_own_weights():
    task, group = world()
    start = task.initial() + 0.1 * torch.randn(4, task.size).double()
    kept = start.clone()
    together = SGD(batch_size=5)(task, start, group)
    for k in range(4):
        alone = Cohort(group.federation, group.ids[k : k + 1], round=1, round_size=4, seed=0, dtype=torch.float64)
        torch.testing.assert_close(together[k], SGD(batch_size=5)(task, start[k], alone)[0], **EXACT)
    assert torch.equal(start, kept)


def pulled(task, theta, batch, anchor, strength):
    """A loss with an own and a shared argument."""
    return task.loss_one(theta, batch) + 0.5 * strength * (theta - anchor.mean).square().sum()


def test_own_arguments_follow_the_clients_that_still_have_a_batch():
    task, group = world()
    anchor = Gaussian(torch.randn(4, task.size).double(), torch.ones(4, 1).double())
    strength = torch.tensor(0.3, dtype=torch.float64)
    got = SGD(batch_size=5, epochs=2)(task, task.initial(), group, anchor, shared=(strength,), loss=pulled)
    prior = Gaussian(0.3 * anchor.eta, 0.3 * anchor.lam)
    expected = SGD(batch_size=5, epochs=2)(task, task.initial(), group, prior=prior)
    torch.testing.assert_close(got, expected, **EXACT)


def one_by_one(chain, task, group, k):
    alone = Cohort(group.federation, group.ids[k : k + 1], round=1, round_size=4, seed=0, dtype=torch.float64)
    return chain(task, task.initial(), alone)[0]


@pytest.mark.parametrize("kind", [SGLD, SGHMC, AMSGrad, RMSprop])
def test_a_client_moves_the_same_in_every_cohort(kind):
    chain = kind(batch_size=5, epochs=3)
    task, group = world()
    together = chain(task, task.initial(), group)
    for k in range(len(SIZES)):
        torch.testing.assert_close(together[k], one_by_one(chain, task, group, k), **EXACT)


def test_cold_langevin_dynamics_is_sgd():
    task, group = world()
    settings = {"lr": 0.1, "batch_size": 5, "epochs": 3, "weight_decay": 0.01}
    cold, sgd = (chain(task, task.initial(), group) for chain in (SGLD(**settings, temperature=0.0), SGD(**settings)))
    assert torch.equal(cold, sgd)
    assert not torch.equal(cold, SGLD(**settings, temperature=1e-6)(task, task.initial(), group))


@pytest.mark.parametrize("friction", [0.1, 0.6])
def test_cold_inertia_is_sgd_with_momentum(friction):
    task, group = world()
    settings = {"lr": 0.1, "batch_size": 5, "epochs": 3}
    cold = SGHMC(**settings, friction=friction, temperature=0.0)(task, task.initial(), group)
    sgd = SGD(**settings, momentum=1 - friction)(task, task.initial(), group)
    torch.testing.assert_close(cold, sgd, **EXACT)


def test_inertia_without_memory_is_langevin_dynamics():
    task, group = world()
    settings = {"lr": 0.1, "batch_size": 5, "epochs": 3, "temperature": 0.7}
    heavy, light = (c(task, task.initial(), group) for c in (SGHMC(**settings, friction=1.0), SGLD(**settings)))
    torch.testing.assert_close(heavy, light, **EXACT)


def test_a_large_slope_is_never_forgotten():
    """One huge slope, then small ones: the steps stay as small as it made them, where plain Adam's would grow again."""
    chain = AMSGrad(lr=1.0, beta1=0.0, beta2=0.5)
    theta = torch.zeros(1, 1, dtype=torch.float64)
    memory = chain.memory(theta)
    for t in range(1, 100):
        before = theta.clone()
        slope = torch.full_like(theta, 100.0 if t == 1 else 1.0)
        chain.move(theta, memory, slope, torch.ones_like(theta), None, 1.0)
    largest = 0.5 * 100.0**2
    torch.testing.assert_close(before - theta, torch.full_like(theta, largest**-0.5))


def test_steps_are_corrected_for_their_number_in_single_precision_too():
    """Of slopes that never change every step is lr, from the first on."""
    chain, theta = AMSGrad(lr=1.0), torch.zeros(2, 3)
    memory = chain.memory(theta)
    for t in range(1, 50):
        chain.move(theta, memory, torch.full_like(theta, 0.3), torch.ones(2, 1), None, 1.0)
        torch.testing.assert_close(theta, torch.full_like(theta, -float(t)), rtol=2e-6, atol=0)


def test_the_first_steps_of_rmsprop_are_long():
    """Of slopes that never change v is 1 − αᵗ of their square: step t is lr/√(1 − αᵗ)."""
    chain, theta = RMSprop(lr=1.0, alpha=0.99), torch.zeros(2, 3, dtype=torch.float64)
    memory = chain.memory(theta)
    for t in range(1, 50):
        before = theta.clone()
        chain.move(theta, memory, torch.full_like(theta, 0.3), torch.ones(2, 1), None, 1.0)
        torch.testing.assert_close(before - theta, torch.full_like(theta, (1 - 0.99**t) ** -0.5), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", [AMSGrad, RMSprop])
def test_on_flat_ground_an_adaptive_step_stays_where_it_is(kind):
    _, group = world()

    def flat(theta, batch, shared=()):
        return torch.zeros_like(theta), theta.new_zeros(len(theta))

    assert not kind(batch_size=5, epochs=2)(flat, torch.zeros(7).double(), group).any()


@pytest.mark.parametrize("form", ["scalar", "diagonal"])
@pytest.mark.parametrize("kind", [AMSGrad, RMSprop])
def test_a_prior_too_stiff_for_the_step_does_no_harm_to_an_adaptive_one(kind, form):
    """Dividing all slopes by a constant changes no step but by eps; it is counted as always."""
    task, group = world()
    stiff = torch.full((1 if form == "scalar" else task.size,), 1e4, dtype=torch.float64)
    prior = Gaussian.of(torch.full((task.size,), 0.3, dtype=torch.float64), stiff)
    chain = kind(lr=0.01, batch_size=5, epochs=3, eps=1e-14)
    with guards.watch() as acted:
        got = chain(task, task.initial(), group, prior=prior)
    assert int(acted["stiff prior"]) == len(stiff)

    def energy(theta):
        return 0.5 * 1e4 * (theta - 0.3).square().sum()

    for k in range(len(SIZES)):
        torch.testing.assert_close(got[k], by_torch(chain, group, k, energy)[0], rtol=1e-9, atol=1e-9)


def test_on_flat_ground_every_step_is_shaken_afresh():
    _, group = world()

    def flat(theta, batch, shared=()):
        return torch.zeros_like(theta), theta.new_zeros(len(theta))

    chain, size = SGLD(lr=0.3, batch_size=5, epochs=3, temperature=0.5), 20_000
    walked = chain(flat, torch.zeros(size).double(), group)
    steps = [3 * -(-n // 5) for n in SIZES]
    expected = torch.tensor([2 * 0.3 * 0.5 / n * m for n, m in zip(SIZES, steps, strict=True)], dtype=torch.float64)
    torch.testing.assert_close(walked.var(1), expected, rtol=0.05, atol=0)
    assert float(torch.corrcoef(walked).fill_diagonal_(0).abs().max()) < 0.05  # clients walk apart


def line(clients):
    """Clients that all hold the same noisy line, so that their chains are independent draws of one posterior; its
    mean and precision under a prior, which is wide in one direction and far off in another."""
    made = torch.Generator().manual_seed(4)
    x = torch.randn(12, 2, generator=made)
    y = x @ torch.tensor([[1.0], [-2.0]]) + 0.3 * torch.randn(12, 1, generator=made)
    data = Dataset(x.repeat(clients, 1), y.repeat(clients, 1))
    fed = Federation.from_owner(data, torch.arange(clients).repeat_interleave(12))
    task = Regression(nn.Linear(2, 1), noise=0.8).prepare(dtype=torch.float64)
    group = Cohort(fed, torch.arange(clients), round=1, round_size=clients, seed=0, dtype=torch.float64)
    root = torch.tensor([[2.0, 0.0, 0.0], [1.0, 3.0, 0.0], [0.5, 1.0, 1.0]], dtype=torch.float64)
    prior = Gaussian.of(torch.tensor([3.0, 0.0, 1.0], dtype=torch.float64), root @ root.mT)
    design = torch.cat([x, torch.ones(12, 1)], 1).double()
    posterior = prior * Gaussian((design.mT @ y.double())[:, 0] / 0.64, design.mT @ design / 0.64)
    return task, group, prior, posterior


@pytest.mark.parametrize("temperature", [1.0, 0.2])
@pytest.mark.parametrize("chain", [SGLD(lr=0.08), SGHMC(lr=0.02, friction=0.3)], ids=["SGLD", "SGHMC"])
def test_samples_are_those_of_the_exact_posterior(chain, temperature):
    clients, warm, epochs = 60, 100, 700
    task, group, prior, posterior = line(clients)
    chain = replace(chain, temperature=temperature, batch_size=12, epochs=epochs)
    start, n = posterior.mean, 12
    iterates = chain.iterates(task.gradient(), start, group, prior=prior ** (1 / n))
    samples = torch.stack([sample.clone() for epoch, sample in enumerate(iterates) if epoch >= warm])
    values, vectors = torch.linalg.eigh(posterior.lam)
    white = (samples - posterior.mean) @ vectors * (values / temperature).sqrt()
    # Steps of a finite size sample exactly this much too widely.
    inertia = 2 - chain.friction if isinstance(chain, SGHMC) else 1.0
    expected = 1 / (1 - chain.lr * values / n / (2 * inertia))
    assert float(expected.max()) < 1.6
    flat = white.reshape(-1, 3)
    scatter = flat.mT @ flat / len(flat)
    torch.testing.assert_close(scatter, expected.diag(), rtol=0.07, atol=0.07)
    assert float(flat.mean(0).abs().max()) < 0.07


def test_there_is_one_sample_an_epoch_and_the_last_is_the_result():
    task, group = world()
    chains = (
        SGD(batch_size=5, epochs=3),
        SGLD(batch_size=5, epochs=4),
        SGHMC(batch_size=5, epochs=2),
        AMSGrad(epochs=3),
        RMSprop(epochs=3),
    )
    for chain in chains:
        samples = [sample.clone() for sample in chain.iterates(task.gradient(), task.initial(), group)]
        assert len(samples) == chain.epochs
        assert torch.equal(samples[-1], chain(task, task.initial(), group))
        shorter = replace(chain, epochs=1)(task, task.initial(), group)
        assert torch.equal(samples[0], shorter)


def test_the_average_of_an_epoch_is_over_every_client_s_own_steps():
    task, group = world()
    sgd = SGD(lr=0.3, batch_size=5, epochs=2)
    averages = [a.clone() for a in sgd.iterates(task.gradient(), task.initial(), group, average=True)]
    for k in range(len(SIZES)):
        theta = task.initial().unsqueeze(0)
        for epoch in range(2):
            seen = []
            for live, batch in group.epoch(epoch, sgd.batch_size):
                if k < live:
                    theta = theta - sgd.lr * task.gradient()(theta, rows(batch, slice(k, k + 1)))[0]
                    seen.append(theta)
            assert len(seen) == -(-SIZES[k] // 5)
            torch.testing.assert_close(averages[epoch][k], torch.cat(seen).mean(0), **EXACT)


def test_averaging_does_not_change_where_the_chain_goes():
    task, group = world()
    for chain in (
        SGD(batch_size=100, epochs=3, momentum=0.9),
        SGLD(batch_size=100, epochs=3),
        SGHMC(batch_size=100, epochs=3),
    ):
        plain, averaged = (
            [sample.clone() for sample in chain.iterates(task.gradient(), task.initial(), group, average=average)]
            for average in (False, True)
        )
        assert all(torch.equal(a, b) for a, b in zip(plain, averaged, strict=True))  # one step is its own average


@pytest.mark.parametrize("kind", [SGD, SGLD, SGHMC, AMSGrad, RMSprop])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -0.1}, "lr must be at least 0, got -0.1"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0, got -1.0"),
        ({"lr": float("nan")}, "lr must be at least 0, got nan"),
        ({"lr": float("inf")}, "lr must be finite, got inf"),
        ({"batch_size": None}, "batch_size must be a whole number, got None"),
        ({"epochs": 1.5}, "epochs must be a whole number, got 1.5"),
    ],
)
def test_settings_that_make_no_sense_for_any_chain_are_refused(kind, settings, message):
    with pytest.raises(ConfigError, match=message):
        kind(**settings)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (SGD, {"momentum": 1.0}, r"momentum must lie in \[0, 1\), got 1.0"),
        (SGD, {"momentum": -0.1}, r"momentum must lie in \[0, 1\), got -0.1"),
        (SGLD, {"temperature": -1.0}, "temperature must not be negative, got -1.0"),
        (SGLD, {"temperature": float("nan")}, "temperature must not be negative, got nan"),
        (SGHMC, {"temperature": -0.5}, "temperature must not be negative, got -0.5"),
        (SGHMC, {"friction": 0.0}, r"friction must lie in \(0, 1\], got 0.0"),
        (SGHMC, {"friction": 1.1}, r"friction must lie in \(0, 1\], got 1.1"),
        (AMSGrad, {"beta1": 1.0}, r"beta1 must lie in \[0, 1\), got 1.0"),
        (AMSGrad, {"beta1": -0.1}, r"beta1 must lie in \[0, 1\), got -0.1"),
        (AMSGrad, {"beta2": 1.0}, r"beta2 must lie in \[0, 1\), got 1.0"),
        (AMSGrad, {"beta2": float("nan")}, r"beta2 must lie in \[0, 1\), got nan"),
        (AMSGrad, {"eps": 0.0}, "eps must be positive, got 0.0"),
        (AMSGrad, {"eps": float("nan")}, "eps must be positive, got nan"),
        (RMSprop, {"alpha": 1.0}, r"alpha must lie in \[0, 1\) and eps above 0, got 1.0 and 1e-08"),
        (RMSprop, {"alpha": -0.1}, r"alpha must lie in \[0, 1\) and eps above 0, got -0.1 and 1e-08"),
        (RMSprop, {"eps": 0.0}, r"alpha must lie in \[0, 1\) and eps above 0, got 0.99 and 0.0"),
        (RMSprop, {"eps": float("nan")}, r"alpha must lie in \[0, 1\) and eps above 0, got 0.99 and nan"),
    ],
)
def test_settings_that_make_no_sense_are_refused(kind, settings, message):
    with pytest.raises(ConfigError, match=message):
        kind(**settings)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_prior_far_too_stiff_for_the_step_is_followed_and_counted(momentum):
    task, group = world()
    stiff = torch.tensor([[1e4], [1e6], [1e6], [1e4]], dtype=torch.float64)
    prior = Gaussian.of(torch.full((len(SIZES), task.size), 0.3, dtype=torch.float64), stiff)
    with guards.watch() as acted:
        got = SGD(lr=0.05, momentum=momentum, epochs=200)(task, task.initial(), group, prior=prior)
    torch.testing.assert_close(got, torch.full_like(got, 0.3), rtol=0, atol=2e-3)
    assert int(acted["stiff prior"]) == len(SIZES)


def test_a_prior_that_the_step_can_follow_is_left_alone():
    task, group = world()
    prior = Gaussian.of(torch.zeros(task.size).double(), torch.tensor([19.9], dtype=torch.float64))
    with guards.watch() as acted:
        got = SGD(lr=0.05)(task, task.initial(), group, prior=prior)
    assert int(acted["stiff prior"]) == 0
    expected, _ = by_torch(SGD(lr=0.05), group, 2, energy=lambda theta: 0.5 * 19.9 * theta.square().sum())
    torch.testing.assert_close(got[2], expected, **EXACT)


# Adam at clients, epochs that end early, and who looks on


def client_adam(**settings):
    from consilience.optim import Adam

    return Adam(**{"lr": 0.02, "batch_size": 5} | settings)


def watched(chain, task, group):
    """(steps that each client has taken, θ) after every step."""
    seen = []
    for _ in chain.iterates(
        task.gradient(), task.initial(), group, look=lambda taken, now: seen.append((taken.clone(), now.clone()))
    ):
        pass
    return seen


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 3},
        {"epochs": 2, "lr": 0.1, "beta1": 0.5, "beta2": 0.9, "eps": 1e-3},
        {"epochs": 3, "beta1": 0.0, "weight_decay": 0.1},
        {"epochs": 3, "longest": 2},
    ],
    ids=str,
)
def test_every_step_of_adam_is_torch_s(settings):
    task, group = world()
    chain = client_adam(**settings)
    seen = watched(chain, task, group)
    for k in range(len(SIZES)):
        module = copy.deepcopy(network())
        optimiser = torch.optim.Adam(
            module.parameters(), chain.lr, (chain.beta1, chain.beta2), chain.eps, chain.weight_decay
        )
        steps = [now[k] for _, now in seen if k < len(now)]
        found = iter(steps)
        for epoch in range(chain.epochs):
            for step, (live, batch) in enumerate(group.epoch(epoch, chain.batch_size)):
                if k < live and step < (chain.longest or 100):
                    optimiser.zero_grad()
                    real = int(batch.w[k].sum())
                    nn.functional.cross_entropy(module(batch.x[k, :real]), batch.y[k, :real]).backward()
                    optimiser.step()
                    wanted = nn.utils.parameters_to_vector(module.parameters()).detach()
                    torch.testing.assert_close(next(found), wanted, **EXACT)
        assert len(steps) == int(chain.steps(group)[k])


def test_adam_without_a_large_slope_to_remember_is_amsgrad():
    """Slopes that only grow are never forgotten."""
    plain, never = client_adam(lr=1.0), AMSGrad(lr=1.0)
    thetas = []
    for chain in (plain, never):
        theta = torch.zeros(1, 2, dtype=torch.float64)
        memory = chain.memory(theta)
        for t in range(1, 20):
            chain.move(theta, memory, torch.full_like(theta, float(t)), torch.ones(1, 1), None, 1.0)
        thetas.append(theta)
    torch.testing.assert_close(*thetas, **EXACT)


def test_the_noise_of_adam_is_added_to_slopes_with_the_stated_deviation():
    """With eps far above all slopes a step is lr/eps times the slope, here −1 times what was added to none."""
    _, group = world()

    def flat(theta, batch, shared=()):
        return torch.zeros_like(theta), theta.new_zeros(len(theta))

    chain, size = client_adam(lr=1e6, beta1=0.0, beta2=0.0, eps=1e6, epochs=2, noise=0.03), 20_000
    walked = chain(flat, torch.zeros(size).double(), group)
    expected = 0.03**2 * chain.steps(group)[:, 0]
    torch.testing.assert_close(walked.var(1), expected, rtol=0.05, atol=0)
    assert float(walked.mean(1).abs().max()) < 0.005
    assert float(torch.corrcoef(walked).fill_diagonal_(0).abs().max()) < 0.05  # clients are shaken apart
    assert not replace(chain, noise=0.0)(flat, torch.zeros(size).double(), group).any()


def test_a_client_with_adam_moves_the_same_in_every_cohort():
    chain = client_adam(epochs=3, noise=0.1, longest=3)
    task, group = world()
    together = chain(task, task.initial(), group)
    for k in range(len(SIZES)):
        torch.testing.assert_close(together[k], one_by_one(chain, task, group, k), **EXACT)


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_an_epoch_ends_after_the_longest(kind):
    task, group = world()
    chain = SGD(lr=0.1, batch_size=5, epochs=3, longest=2) if kind == "SGD" else client_adam(epochs=3, longest=2)
    seen = watched(chain, task, group)
    assert [len(now) for _, now in seen] == [4, 3] * 3
    assert [taken[-1].item() for taken, _ in seen] == [1, 2, 2, 4, 3, 6]  # the fourth client's, the third's, …
    assert chain.steps(group)[:, 0].tolist() == [6, 6, 6, 3]
    torch.testing.assert_close(chain.time(group), chain.lr * chain.steps(group), **EXACT)
    if kind == "SGD":
        theta = task.initial().repeat(4, 1)
        for epoch in range(3):
            for _, (k, batch) in zip(range(2), group.epoch(epoch, 5), strict=False):
                theta[:k] -= chain.lr * task.gradient()(theta[:k], batch)[0]
        torch.testing.assert_close(chain(task, task.initial(), group), theta, **EXACT)
    far = replace(chain, longest=100)
    assert far.steps(group)[:, 0].tolist() == [21, 9, 6, 3]
    assert torch.equal(
        far(task, task.initial(), group),
        replace(chain, longest=None)(task, task.initial(), group),
    )


@pytest.mark.parametrize("unit", ["steps", "epochs", "rounds"])
def test_the_time_of_a_round_counts_the_steps_that_were_taken(unit):
    """On a slope of 1 the way is the time."""
    from consilience.optim import Tapered

    _, group = world()

    def even(theta, batch, shared=()):
        return torch.ones_like(theta), theta.new_zeros(len(theta))

    chain = SGD(lr=0.1, batch_size=5, epochs=3, longest=2, schedule=Tapered(unit))
    way = chain(even, torch.zeros(1).double(), group)
    torch.testing.assert_close(-way, chain.time(group), **EXACT)


def test_whoever_looks_sees_every_step_and_may_change_it():
    task, group = world()
    chain = SGD(lr=0.1, batch_size=5, epochs=2)
    seen = watched(chain, task, group)
    assert [len(now) for _, now in seen] == 2 * [4, 3, 2, 1, 1, 1, 1]
    assert [taken[0].item() for taken, _ in seen] == list(range(1, 15))
    assert [taken[1].item() for taken, _ in seen if len(taken) > 1] == [1, 2, 3, 4, 5, 6]  # its own, in two epochs
    assert torch.equal(seen[-1][1][0], chain(task, task.initial(), group)[0])

    def back(taken, now):
        now.copy_(task.initial().expand_as(now))

    for last in chain.iterates(task.gradient(), task.initial(), group, look=back):
        assert torch.equal(last, task.initial().expand(4, -1))


def test_settings_that_make_no_sense_for_adam_or_an_epoch_are_refused():
    for settings, message in (
        ({"noise": -0.1}, "noise is a standard deviation and must not be negative, got -0.1"),
        ({"noise": float("nan")}, "noise is a standard deviation and must not be negative, got nan"),
        ({"beta1": 1.0}, r"beta1 must lie in \[0, 1\), got 1.0"),
        ({"eps": 0.0}, "eps must be positive, got 0.0"),
        ({"longest": 0}, "longest must be at least 1, got 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            client_adam(**settings)
