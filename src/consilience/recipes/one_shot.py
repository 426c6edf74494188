"""One exchange: methods that learn from clients who talk to the server once."""

import time
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import torch
from torch import nn

from consilience.algorithms import PFNM, Ensemble, FedAvg, FedCGS, LocalOnly, Pooled, PredBayes, Switch
from consilience.data import load, partition
from consilience.engines import Simulator
from consilience.matching import BetaBernoulli
from consilience.metrics import spread
from consilience.models import lenet5, mlp
from consilience.optim import SGD, SGHMC
from consilience.recipes.base import Options, Recipe, about, finished, seeded
from consilience.recipes.one_shot_fusion import Bench, Found, best_fedfisher, best_kronecker, best_pfnm
from consilience.recipes.pfnm_local import kept
from consilience.runs import fit
from consilience.studies import distil, fit_beta
from consilience.studies.comparison import Comparison, Row
from consilience.tasks import Classification

EXAMPLES, PUBLIC, LABELLED, CLIENTS = 5_000, 10_000, 500, 5
DATA = {"mnist": "fashion-mnist", "fashion-mnist": "mnist", "cifar10": "cifar100"}  # and the server's public data
ALPHAS = (0.1, 0.5)
TRAIN = SGD(lr=0.02, momentum=0.9, epochs=10, batch_size=32, weight_decay=1e-4)
SAMPLER = SGHMC(lr=0.02, temperature=0.1, epochs=15, batch_size=32, weight_decay=1e-4)
ENGINE = Simulator(chunk=CLIENTS, workers=1)
GRID = tuple(product((0.1, 1.0), (1.0, 50.0)))  # σ² and γ₀ of PFNM
SHOWN = ("accuracy", "nll", "ece", "MB up", "β")
METHODS = (
    "FedAvg", "FedFisher", "FedFisher, Kronecker", "PFNM", "Ensemble", "Ensemble by class", "β-PredBayes",
    "FedAvg, public trunk", "FedCGS, public trunk", "FedAvg, then FedCGS", "β-PredBayes, distilled", "Pooled",
)  # fmt: skip
TEXT = (
    f"{CLIENTS} clients talk to the server once; every class is partitioned by Dirichlet α. About {EXAMPLES:,} training"
    " examples, an MLP of 100 units for MNIST and Fashion-MNIST, LeNet-5 for CIFAR-10, SGD 0.02 with momentum 0.9, "
    f"{TRAIN.epochs} epochs. The server has {LABELLED} labelled examples, which choose ε of FedFisher (five values), "
    "σ² and γ₀ of PFNM (four; layers are matched top-down) and β of β-PredBayes. All methods have the same training at "
    f"the clients, but β-PredBayes, which samples at temperature {SAMPLER.temperature:g} for {SAMPLER.epochs} epochs "
    "and sends six networks, and those with a public trunk: LeNet-5 without its last layer, trained at the server on "
    f"{PUBLIC:,} examples of other data with labels (MNIST and Fashion-MNIST for each other, CIFAR-100 for CIFAR-10). "
    "“FedAvg, then FedCGS” has a second exchange. “distilled” (a student of β-PredBayes) and Pooled use all inputs in "
    "one place: no federation can run them. “MB up” is what a client sends."
)


@dataclass(frozen=True)
class Case:
    """A federation of the table."""

    data: str
    alpha: float
    seed: int
    quick: bool

    @property
    def slug(self) -> str:
        return f"{self.data}-{self.alpha}-{self.seed}"

    def bench(self) -> Bench:
        """The data of the clients and of the server, and a network."""
        data = load(self.data)
        count = 600 if self.quick else EXAMPLES + LABELLED
        examples, test = about(data.train, count), about(data.test, 300 if self.quick else 10_000)
        shuffled = torch.randperm(len(examples), generator=torch.Generator().manual_seed(self.seed))
        labelled = count - EXAMPLES if not self.quick else 100
        federation = partition.dirichlet(
            examples[shuffled[labelled:]], CLIENTS, alpha=self.alpha, seed=self.seed, minimum=10
        )
        module = seeded(self.seed, lambda: network(self.data, data.train.x.shape[1:]))
        train = replace(TRAIN, epochs=2) if self.quick else TRAIN
        return Bench(Classification(module), federation, examples[shuffled[:labelled]], test, train, self.seed)


def network(name: str, inputs: torch.Size) -> nn.Module:
    """The clients' network: chains, which PFNM can match."""
    return lenet5(inputs, 10) if name == "cifar10" else mlp(inputs, 10, (100,))


@cache
def trunk(name: str, quick: bool) -> nn.Module:
    """LeNet-5 whose layers but the last have learned from public data, and are frozen."""
    data = load(name).train
    some = about(data, 600 if quick else PUBLIC)
    module = seeded(0, lambda: lenet5(some.x.shape[1:], len(data.classes)))
    train = replace(TRAIN, epochs=2 if quick else 20)
    run = fit(Pooled(train), Classification(module), partition.iid(some, 1), rounds=1, progress=False, engine=ENGINE)
    found = run.model.requires_grad_(False)
    assert isinstance(found, nn.Sequential)
    last = found[-1]
    assert isinstance(last, nn.Linear)
    found[-1] = seeded(0, lambda: nn.Linear(last.in_features, 10))
    return found


def scores(case: Case) -> Found:
    """All methods on one federation."""
    at = case.bench()
    once = partial(fit, rounds=1, seed=case.seed, progress=False, engine=ENGINE)
    own, alike = (
        once(method, at.task, at.federation) for method in (Ensemble(at.train, by_class=True), LocalOnly(at.train))
    )
    networks = torch.stack([alike.personal(k).mean for k in range(CLIENTS)])
    mb = networks[0].nbytes / 1e6
    found: Found = {
        "FedFisher": best_fedfisher(at, alike.task, networks),
        "FedFisher, Kronecker": best_kronecker(at, alike.task, networks),
        "PFNM": best_pfnm(at, own, [PFNM(how=BetaBernoulli(variance=v, mass=m), top_down=True) for v, m in GRID], mb),
        "Ensemble": at.scored(own.task, Ensemble().posterior(own.server), mb),
        "Ensemble by class": at.scored(own.task, Ensemble(by_class=True).posterior(own.server), mb),
        **predictives(case, at, mb),
    }
    frozen = Classification(trunk(DATA[case.data], case.quick))
    again = Switch(FedAvg(at.train), FedCGS(), at=1)
    for name, method, task, rounds in (
        ("FedAvg", FedAvg(at.train), at.task, 1),
        ("FedAvg, then FedCGS", again, at.task, 2),
        ("FedAvg, public trunk", FedAvg(at.train), frozen, 1),
        ("FedCGS, public trunk", FedCGS(), frozen, 1),
        ("Pooled", Pooled(at.train), at.task, 1),
    ):
        run = once(method, task, at.federation, rounds=rounds)
        found[name] = at.scored(
            run.network, run.posterior, sum(line["bytes_up"] for line in run.history) / CLIENTS / 1e6
        )
    del found["Pooled"]["MB up"]
    return {name: found[name] for name in METHODS}


def predictives(case: Case, at: Bench, mb: float) -> Found:
    """β-PredBayes and its student, which learns from all clients' inputs in one place."""
    sampler = replace(SAMPLER, epochs=3) if case.quick else SAMPLER
    run = fit(PredBayes(sampler), at.task, at.federation, rounds=1, seed=case.seed, progress=False, engine=ENGINE)
    fitted = fit_beta(run, at.labelled)
    method = fitted.algorithm
    assert isinstance(method, PredBayes)
    student = seeded(case.seed + 1000, lambda: network(case.data, at.test.x.shape[1:]))
    taught = distil(fitted, student, at.train, seed=case.seed, progress=False, engine=ENGINE)
    sent = method.each * mb
    return {
        method.name: {**at.scored(fitted.network, fitted.posterior, sent), "β": method.beta},
        f"{method.name}, distilled": at.scored(taught.task, taught.posterior, sent),
    }


def run(options: Options) -> Comparison:
    """The table over all seeds; a resumed run reads the scores of an earlier one."""
    start = time.perf_counter()
    found: dict[tuple[str, float], list[Found]] = {}
    alphas, names = (ALPHAS[:1], list(DATA)[:1]) if options.quick else (ALPHAS, list(DATA))
    for seed, name, alpha in product(range(options.seeds), names, alphas):
        options.tell(f"{name}, α = {alpha:g}", seed)
        case = Case(name, alpha, seed, options.quick)
        found.setdefault((name, alpha), []).append(kept(options, case.slug, partial(scores, case)))
    rows = [
        Row(method, f"{metric}, {name} {alpha:g}", *spread(values), len(values))
        for method in METHODS
        for metric in SHOWN
        for (name, alpha), tables in found.items()
        if len(values := [table[method][metric] for table in tables if metric in table[method]])
    ]
    return finished("one-shot", TITLE, TEXT, options, rows, [], start)


TITLE = "One exchange: six methods, their ensembles and their bounds"
RECIPE = Recipe("one-shot", "One-shot learning: PFNM, FedFisher, FedCGS, β-PredBayes, ensembles and FedAvg", run)
