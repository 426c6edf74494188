"""A Laplace approximation of the last layer, around networks of FedAvg and FedEP: calibration and unknown inputs."""

import time
from collections import defaultdict
from typing import Any

from consilience.algorithms import FedAvg, FedEP, LastLayer, Switch
from consilience.algorithms.switch import Method
from consilience.data import load, partition
from consilience.engines.simulator import Simulator
from consilience.inference import Identity
from consilience.models import mlp
from consilience.optim import SGD
from consilience.recipes.base import Options, Recipe, about, finished, rows_of, seeded
from consilience.runs.directory import Storage
from consilience.runs.fit import fit
from consilience.runs.run import Run
from consilience.studies import Comparison
from consilience.tasks.supervised import Classification

NAME, TITLE = "last-layer", "A posterior of the last layer: calibration and unknown inputs"
TEXT = (
    "10,000 images of Fashion-MNIST at 50 clients, classes by Dirichlet 0.3. FedEP(I) continues half of FedAvg's "
    "rounds, and “last layer” adds one exchange with all clients to either network. “auroc” tells MNIST's digits, in "
    "the normalisation of the training data, from the test images by the entropy of the prediction. “Marginal” "
    "averages over ten draws of FedEP's posterior, and “tempered” over ten of the posterior at the temperature that "
    "is best on held-out images of the clients."
)
SCORES = ("accuracy", "nll", "ece")


def recipe(options: Options) -> Comparison:
    """Both networks, with and without a posterior of the last layer."""
    start, quick = time.perf_counter(), options.quick
    scores: dict[tuple[str, str], list[float]] = defaultdict(list)
    fashion, digits = load("fashion-mnist"), load("mnist").test
    train = about(fashion.train, 600 if quick else 10_000)
    test, outside = (about(data, 200) if quick else data for data in (fashion.test, digits))
    rounds, cohort = (4, 3) if quick else (40, 10)
    engine = Simulator(chunk=cohort, workers=1, threads=1)

    def note(method: str, run: Run) -> None:
        """The scores of a run's predictions, those of the mean weights first."""
        found, seen = run.evaluate(test), run.detect(test, outside)
        for metrics, auroc, label in (
            (found.point, seen.point, method),
            (found.marginal, seen.marginal, f"{method}, marginal"),
            (found.tempered, None, f"{method}, tempered"),
        ):
            for metric in SCORES if metrics else ():
                scores[label, metric].append(metrics[metric])  # type: ignore[index]
            if metrics and auroc is not None:
                scores[label, "auroc"].append(auroc)

    for seed in range(options.seeds):
        clients = partition.dirichlet(train, clients=6 if quick else 50, alpha=0.3, seed=seed, minimum=20)
        federation, held = clients.split(0.1, seed=seed)
        task = Classification(seeded(seed, lambda: mlp(train.x.shape[1:], 10, (16,) if quick else (100,))))
        local = SGD(lr=0.02, momentum=0.9, epochs=1 if quick else 3, batch_size=20, weight_decay=1e-4)
        posterior = FedEP(Identity(local, scale=0.02))
        methods: dict[str, Method] = {
            "FedAvg": FedAvg(local),
            "FedEP(I)": Switch(FedAvg(local), posterior, at=rounds // 2),
        }
        for name, method in methods.items():
            options.tell(name, seed)
            out = Storage(options.out / name / f"seed-{seed}", checkpoint_every=10)
            how: dict[str, Any] = {"seed": seed, "engine": engine, "progress": False}
            run = fit(method, task, federation, rounds=rounds, cohort=cohort, out=out, resume=options.resume, **how)
            if name != "FedAvg":
                scores[f"{name}, tempered", "temperature"].append(run.temper(held).temperature)
            note(name, run)
            note(f"{name}, last layer", fit(LastLayer(), Classification(run.model), federation, rounds=1, **how))
    return finished(NAME, TITLE, TEXT, options, rows_of(scores), [], start)


RECIPE = Recipe(NAME, TITLE, recipe, seeds=3)
