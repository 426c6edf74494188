"""PFNM beyond one exchange: sensitivity to its settings, several rounds, and streams."""

import math
import time
from collections.abc import Callable
from functools import partial
from itertools import product

from consilience.algorithms import PFNM, Algorithm, Downpour, Ensemble, FedAvg
from consilience.figures.panels import Heat, Panel, Panels
from consilience.matching import BetaBernoulli
from consilience.recipes.base import Options, Recipe, compared, finished
from consilience.recipes.pfnm import MNIST, NARROW, SPLITS
from consilience.recipes.pfnm_local import Case, Scores, in_rows, kept, loaded, matched, network, shared_out, trained
from consilience.recipes.pfnm_variants import Authors, Capped, EvenPriors, EvenShares, Printed, WithoutPenalty
from consilience.studies import Comparison, Setting
from consilience.tasks.supervised import Classification

VARIANCES, PRIOR_VARIANCES, MASSES = (0.1, 0.3, 1.0, 3.0), (1.0, 10.0, 100.0), (1e-3, 1.0, 50.0)


def variants() -> dict[str, BetaBernoulli]:
    """The defaults, and the variants of the paper and of its code."""
    return {
        "PFNM": BetaBernoulli(),
        "popularity weight 1 (printed)": Printed(),
        "popularity capped at 10 (code)": Capped(),
        "both (the authors')": Authors(),
        "no −2 log t": WithoutPenalty(),
        "one sweep": BetaBernoulli(sweeps=1),
        "shares × J": EvenShares(),
        "shares and prior × J": EvenPriors(),
    }


def sensitivity(options: Options) -> Comparison:
    """Accuracy by hyperparameters on training data, as in the paper, and of variants on test data."""
    start = time.perf_counter()
    clients = 5 if options.quick else 25
    grid = list(product(MASSES, PRIOR_VARIANCES, VARIANCES))

    def work(case: Case) -> Scores:
        local = trained(case, "mnist", MNIST, options.quick)
        some = local.data.train[:: 1 if options.quick else 6]
        found = {name: matched(local, PFNM(how=how)) for name, how in variants().items()}
        for mass, prior, variance in grid[:: 9 if options.quick else 1]:
            how = BetaBernoulli(variance=variance, prior_variance=prior, mass=mass)
            found[_setting(mass, prior, variance)] = matched(local, PFNM(how=how), some)
        return found

    tables = []
    for seed in range(options.seeds):
        options.tell(f"{len(grid)} settings", seed)
        case = Case(SPLITS[0], clients, (100,), seed)
        tables.append(kept(options, case.slug, partial(work, case)))
    names = variants()
    rows = in_rows([{name: table[name] for name in names} for table in tables])
    cells = {(row.method, row.metric): row.mean for row in in_rows(tables)}
    panels = [
        Panel(
            f"γ₀ = {mass:g}",
            heat=Heat(
                [[cells.get((_setting(mass, p, v), "accuracy"), math.nan) for v in VARIANCES] for p in PRIOR_VARIANCES],
                [f"{v:g}" for v in VARIANCES],
                [f"{p:g}" for p in PRIOR_VARIANCES],
            ),
            x_label="σ²",
            y_label="σ₀²",
        )
        for mass in MASSES
    ]
    figure = Panels("Accuracy on training data", f"{clients} clients, heterogeneous, 100 units.", panels)
    text = "One set of local networks, matched with many priors. The table is for test data."
    return finished("pfnm-sensitivity", "How much PFNM's settings matter", text, options, rows, [figure], start)


def _setting(mass: float, prior: float, variance: float) -> str:
    return f"γ₀ = {mass:g}, σ₀² = {prior:g}, σ² = {variance:g}"


def over_rounds(
    name: str, title: str, text: str, methods: dict[str, Algorithm], clients: int, rounds: int, streamed: bool
) -> Callable[[Options], Comparison]:
    """A comparison over rounds, each of which may see new data."""

    def run(options: Options) -> Comparison:
        count, hidden = (min(rounds, 2), (NARROW,)) if options.quick else (rounds, (100,))

        def setting(seed: int) -> Setting:
            data = loaded("mnist", options.quick)
            federation = shared_out(data.train, Case(SPLITS[0], clients, hidden, seed))
            task = Classification(network(data.train.x.shape[1:], hidden, seed))
            return Setting(task, federation.stream(count, seed=seed) if streamed else federation, data.test)

        return compared(name, title, text, options, methods, setting, rounds=count, evaluate_every=1)

    return run


STREAMING = over_rounds(
    "pfnm-streaming",
    "MNIST in 15 steps at 3 clients",
    "Every step reveals another fifteenth of each client's data, heterogeneous; ten epochs a step. PFNM's posterior "
    "of a step is the prior of the next. Members of the ensembles continue from their own networks.",
    {
        "PFNM, streaming": PFNM(MNIST, streaming=True),
        "Ensemble": Ensemble(MNIST),
        "Ensemble by class": Ensemble(MNIST, by_class=True),
        "Downpour SGD": Downpour(MNIST),
        "FedAvg": FedAvg(MNIST),
    },
    clients=3,
    rounds=15,
    streamed=True,
)
ROUNDS = over_rounds(
    "pfnm-rounds",
    "MNIST at 10 clients over five rounds",
    "Ten epochs a round at every client, heterogeneous. In further rounds PFNM's clients continue from their own "
    "slices of the global network. Clients of FedAvg and downpour SGD all start at the global weights.",
    {"PFNM": PFNM(MNIST), "FedAvg": FedAvg(MNIST), "Downpour SGD": Downpour(MNIST), "Ensemble": Ensemble(MNIST)},
    clients=10,
    rounds=5,
    streamed=False,
)
RECIPES = (
    Recipe("pfnm-streaming", "PFNM on a stream of MNIST", STREAMING, seeds=5),
    Recipe("pfnm-rounds", "PFNM over several rounds", ROUNDS, seeds=3),
    Recipe("pfnm-sensitivity", "How much PFNM's settings matter", sensitivity, seeds=3),
)
