"""Four hospitals train a model of heart disease together (UCI heart disease: a natural federation)."""

import torch

from consilience.algorithms import Algorithm, FedAvg, FedEP, FedProx, LocalOnly, Pooled
from consilience.data import Federation, heart_disease, partition
from consilience.engines import Simulator
from consilience.evaluation.scores import evaluate
from consilience.inference import Newton
from consilience.models import logistic
from consilience.optim import SGD
from consilience.recipes.base import Options, Recipe, compared, seeded
from consilience.runs.run import Run
from consilience.studies import Comparison, Setting
from consilience.tasks.supervised import Classification

TEXT = (
    "Cleveland, Hungary, Switzerland and Long Beach each hold the records of their own patients, with different "
    "shares of disease and different missing columns. Each hospital keeps a quarter of its patients for testing; "
    "each seed is another random split, the same for all methods. The model is logistic regression on 29 features. "
    "LocalOnly tests each hospital's own model on its own patients, and such a model includes how common the disease "
    "is there; “accuracy elsewhere” is the accuracy of a hospital's model at the other three. Pooled trains on all "
    "records in one place. Every method ends with its best round by the NLL of a fifth of each hospital's training "
    "patients, whom no method learns from. FedEP has a posterior: “marginal” averages the predictions of ten draws "
    "from it."
)


def methods() -> dict[str, Algorithm]:
    """The same local optimiser and number of passes over the data for each method; FedEP has exact inference, which so
    small a model allows."""
    train = SGD(lr=0.05, epochs=2, batch_size=16, weight_decay=1e-3)
    return {
        "Pooled": Pooled(train),
        "LocalOnly": LocalOnly(train),
        "FedAvg": FedAvg(train),
        "FedProx": FedProx(train, mu=0.1),
        "FedEP": FedEP(Newton(steps=2), damping=1.0, prior=1.0),
    }


def setting(split: int) -> Setting:
    """A random split of every hospital's patients."""
    data = heart_disease()
    train, test = partition.by_group(data, "hospital").split(0.25, seed=split)
    model = seeded(split, lambda: logistic(data.x.shape[1:], 2))
    return Setting(Classification(model), train, test)


def elsewhere(run: Run, at: Setting) -> dict[str, float]:
    """The accuracy of each hospital's model on the other hospitals' patients, averaged over hospitals."""
    test = at.test
    assert isinstance(test, Federation)
    scores = []
    for here in range(len(test)):
        belief = run.personal(here) if len(run.federation) == len(test) else run.posterior
        others = torch.cat([test.indices(there) for there in range(len(test)) if there != here])
        scores.append(evaluate(run.network, belief, test.data[others]).point["accuracy"])
    return {"accuracy elsewhere": sum(scores) / len(scores)}


def run(options: Options) -> Comparison:
    """Compare all methods on each split."""
    return compared(
        "hospital-methods", "Heart disease at four hospitals", TEXT, options, methods(), setting, measure=elsewhere,
        rounds=5 if options.quick else 60, evaluate_every=2, validation=0.2, patience=5, intervals=0.95,
        engine=Simulator(device="cpu", chunk=4, workers=1, threads=1),
    )  # fmt: skip


RECIPE = Recipe("hospital-methods", "Five methods at four real hospitals", run, seeds=5)
