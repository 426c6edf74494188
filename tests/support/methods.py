"""The methods that conformance and engines are tested with. A new one joins by export from consilience.algorithms."""

import dataclasses
import inspect
from functools import cache

import pytest
import torch
from torch import nn

import consilience as cs
from consilience import algorithms
from consilience.algorithms.gan.players import Players
from consilience.core.errors import ConfigError
from consilience.core.records import leaves, tree_map

SIZES = (35, 18, 16, 9, 4, 1)  # a last batch of one, and steps that only the largest client takes
SICK = 2  # the client of `poisoned`
COHORT = 4  # the clients of a round of `learn`
LOCAL = cs.SGD(lr=0.1, momentum=0.9, epochs=2, batch_size=16, weight_decay=0.01)
PLAIN = dataclasses.replace(LOCAL, momentum=0.0)
PLAY = cs.optim.Adam(lr=0.01, epochs=1, batch_size=32, weight_decay=0.01, noise=1e-3)  # a GAN's step is expensive
REPEATABLE = {"noise": 0.01, "noise_from": "seed"}  # otherwise noise for privacy differs in every run
LAPLACE = cs.inference.Laplace(LOCAL, kappa=1.0, s0=0.05, epochs=1, batch_size=16)
NGVI = cs.inference.NGVI(LOCAL, kappa=1.0, s0=0.05, epochs=1, batch_size=16, samples=2)
IDENTITY = cs.inference.Identity(LOCAL)
IVON = cs.optim.IVON(lr=0.1, epochs=2, batch_size=16, weight_decay=0.01)
VARIATIONAL = cs.inference.Variational(IVON)


def is_gan(method):
    return isinstance(getattr(method, "method", method), Players | cs.algorithms.FedAvgGAN | cs.algorithms.F2A)


def with_training(part, train):
    """A method or an inference with another local optimiser."""
    if hasattr(part, "train"):
        return dataclasses.replace(part, train=train)
    return dataclasses.replace(part, infer=with_training(part.infer, train))


def variant(kind):
    """Defaults, but with momentum, two epochs and weight decay in the local optimiser, unless the method refuses."""
    default = kind(**REPEATABLE) if kind in (cs.Private, cs.algorithms.DPPVI) else kind()
    if hasattr(default, "method"):
        return dataclasses.replace(default, method=variant(type(default.method)))
    if not hasattr(getattr(default, "infer", default), "train"):
        return default
    if is_gan(default):
        return with_training(default, PLAY)
    for train in (LOCAL, PLAIN):
        try:
            return with_training(default, train)
        except ConfigError:
            continue
    return default


KINDS = [
    kind
    for kind in vars(algorithms).values()
    if inspect.isclass(kind) and issubclass(kind, cs.Algorithm) and not inspect.isabstract(kind)
]
SWITCH = cs.Switch(cs.FedAvg(LOCAL, cs.server.Adam()), cs.FedEP(IDENTITY, cs.server.Adam(1.0)), at=2)
CORE = [*map(variant, (cs.FedAvg, cs.FedProx, cs.SCAFFOLD, cs.FedEP, cs.FedNP, cs.PFNM, cs.EPGAN)), SWITCH]
VARIANTS = [
    cs.FedAvg(LOCAL, cs.server.Adam()),
    *(cs.FedEP(infer) for infer in (cs.inference.MCMC(LOCAL), LAPLACE, NGVI)),
    cs.FedEP(cs.inference.Newton(), prior=1.0),
    cs.FedEP(IDENTITY, cs.server.Momentum(0.5, 0.9)),
    cs.FedEP(VARIATIONAL),
    cs.FedAvg(IVON),
    cs.FedAvg(cs.optim.SAM(lr=0.1, epochs=2, batch_size=16, momentum=0.9)),
    cs.SCAFFOLD(cs.optim.SAM(lr=0.1, epochs=2, batch_size=16)),
    cs.FedAvg(cs.optim.AdamW(lr=0.02, epochs=2, batch_size=16)),
    cs.FedAvg(cs.optim.DPSGD(lr=0.3, epochs=2, batch_size=16, noise=0.1, noise_from="seed")),
    cs.algorithms.PVI(LAPLACE, in_turn=True),
    cs.algorithms.BayesADMM(cs.inference.Newton(), rho=0.5, damping=1.0),
    cs.algorithms.FedSEP(NGVI),
    cs.algorithms.ADF(LAPLACE),
    cs.algorithms.FedPADiagonal(LAPLACE),
    cs.algorithms.Ensemble(LOCAL, by_class=True),
    cs.PFNM(LOCAL, how=cs.matching.DPMeans(penalty=1.0)),
    cs.PFNM(LOCAL, streaming=True),
    cs.FedNP(cs.optim.RMSprop(lr=0.01, epochs=2, batch_size=16), strength=1.0, damping=0.5),
    cs.SCAFFOLD(LOCAL, variate="gradient"),
    cs.Robust(cs.FedAvg(LOCAL, cs.server.Adam()), cs.algorithms.Krum(bad=0, keep=2)),
    cs.Robust(cs.algorithms.FedSEP(IDENTITY), cs.algorithms.TrimmedMean()),
    cs.Robust(cs.algorithms.MOON(LOCAL)),
    cs.Private(cs.algorithms.FedSEP(IDENTITY), examples=sum(SIZES), **REPEATABLE),
    cs.algorithms.SignalEPGAN(PLAY, history=False, components=3, interpolate=0.1, critic_steps=None),
    cs.FedGAN(PLAY, critic_steps=2, generated=2, average=0.9),
]
ALGORITHMS = [*map(variant, KINDS), *VARIANTS]
# Every kind of record that engines handle beside those of the core: a state that only its client knows, stacked
# updates, sums in another precision, a wrapped update with a secret, a federation that is rearranged.
OTHERS = (
    cs.algorithms.MOON,
    cs.algorithms.FedCGS,
    cs.algorithms.FedNPClasses,
    cs.LastLayer,
    cs.Robust,
    cs.Private,
    cs.Pooled,
)
ENGINES = [*CORE, *map(variant, OTHERS)]


def label(method):
    if isinstance(method, cs.Switch):
        return f"{method.first.name} to {method.then.name}"
    server = getattr(method, "server", None)
    return method.name if server is None else f"{method.name}-{type(server).__name__}"


def cases(methods, *, core=True):
    """One test for each method; those of the core have the mark `core`, unless the test starts processes."""
    marked = [pytest.param(m, id=label(m), marks=[pytest.mark.core] if core and m in CORE else []) for m in methods]
    return pytest.mark.parametrize("method", marked)


def overrides(method, hook):
    return getattr(type(method), hook) is not getattr(cs.Algorithm, hook)


@cache
def federation():
    made = torch.Generator().manual_seed(0)
    x = torch.randn(sum(SIZES), 5, generator=made)
    y = (x @ torch.randn(5, 3, generator=made)).argmax(1)
    owner = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    shuffled = torch.randperm(len(owner), generator=made)
    names = [f"site {k}" for k in range(len(SIZES))]
    return cs.Federation.from_owner(cs.Dataset(x, y, name="blobs"), owner[shuffled], names=names)


def task_of(method):
    """A small task that the method can learn."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        if isinstance(getattr(method, "infer", None), cs.inference.Newton):  # starts at 0: a network's saddle point
            return cs.Classification(nn.Sequential(nn.Dropout(0.2), nn.Linear(5, 3)))
        if is_gan(method):
            generator = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5))
            discriminator = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 1))
            return cs.Adversarial(generator, discriminator, latent=3, generators=2, discriminators=2, pace=0.5)
        norm = nn.BatchNorm1d(8) if isinstance(method, cs.algorithms.FedBN) else nn.Identity()
        module = nn.Sequential(nn.Linear(5, 8), norm, nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
        if isinstance(method, cs.algorithms.FedEx):
            module = cs.models.add_lora(module, rank=2, targets=["0"], also=["4"])
        return cs.Classification(module, batch_norm="averaged")


def learn(method, plan=None, **options):
    engine = cs.Simulator(device="cpu", precision="float64", **{"chunk": len(SIZES), "workers": 1} | (plan or {}))
    options = {"rounds": 3, "cohort": COHORT, "engine": engine, "progress": False} | options
    return cs.fit(method, task_of(method), federation(), **options)


@cache
def learned(method):
    """The run that others are compared with: all clients of a round together. Tests must not change it."""
    return learn(method)


def parts(run):
    """(name, tree) of the server's and every client's state."""
    clients = range(len(run.federation))
    return [("server", run.server), *((f"client {c}", run.states.gather(torch.tensor([c]))) for c in clients)]


def assert_close(found, wanted, tolerance=1e-10, what=""):
    """Trees with the same leaves, up to a tolerance."""
    for (name, x), (_, y) in zip(leaves(found), leaves(wanted), strict=True):
        where = f"{what} {name}"
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=lambda m, w=where: f"{w}: {m}")


def assert_same_run(found, wanted, tolerance=1e-10):
    for (what, one), (_, other) in zip(parts(found), parts(wanted), strict=True):
        assert_close(one, other, tolerance, what)


def poisoned(method, round=None):
    """The method, with a client SICK whose update is NaN, in one round or in all."""

    class Poisoned(type(method)):
        def local(self, task, message, state, cohort):
            update, state = method.local(task, message, state, cohort)
            sick = (cohort.ids == SICK) & (round is None or cohort.round == round)

            def spoilt(leaf):
                bad = sick.view(-1, *[1] * (leaf.dim() - 1))
                return torch.where(bad, torch.nan, leaf) if leaf.is_floating_point() else leaf

            return tree_map(spoilt, update), state

    return Poisoned(**{field.name: getattr(method, field.name) for field in dataclasses.fields(method)})
