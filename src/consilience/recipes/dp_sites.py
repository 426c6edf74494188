"""What it costs to protect single patients: MNIST at ten clients, FedEP with noise in gradients or in sites."""

from typing import Any

from consilience.algorithms import DPPVI, Algorithm, FedEP
from consilience.data import load, partition
from consilience.engines import Simulator
from consilience.inference import Identity
from consilience.models import logistic
from consilience.optim import DPSGD, SGD
from consilience.recipes.base import Options, Recipe, compared, seeded
from consilience.studies import Comparison, Setting
from consilience.tasks.supervised import Classification

NAME, TITLE = "dp-sites", "MNIST at ten clients, every image protected"
ROUNDS, TRIALS = 10, 8
NOISE = {1: 23.59, 4: 6.84, 8: 3.8}  # of one release a round, by ε at δ = 1e-5
TEXT = (
    f"MNIST at ten clients by Dirichlet(1), logistic regression, all clients in each of {ROUNDS} rounds "
    "with one local epoch. ε protects one image of a client, towards the server too, at δ = 1e-5. “gradients” is "
    "DP-SGD in the clients' inference; “sites” adds noise to a client's update, averaged over 100 parts of its images. "
    f"Every method has {TRIALS} trials of its settings, of which ε takes no account."
)


def methods(quick: bool) -> dict[str, Algorithm]:
    """FedEP without privacy, and DPPVI with the noise in either place."""
    passes: dict[str, Any] = {"epochs": 1, "batch_size": 50 if quick else 1500}
    plain = SGD(lr=0.1, **passes)
    found: dict[str, Algorithm] = {"FedEP(I)": FedEP(Identity(plain, scale=0.05))}
    for epsilon, noise in NOISE.items():
        train = DPSGD(lr=0.5, clip=3.0, noise=noise, noise_from="seed", **passes)
        found[f"gradients, ε = {epsilon}"] = DPPVI(Identity(train, scale=0.05), clip=None, noise=0.0)
    sites: dict[str, Any] = {"parts": 2 if quick else 100, "noise_from": "seed"}
    found["sites, ε = 8"] = DPPVI(Identity(plain, scale=0.05), clip=3.0, noise=NOISE[8], **sites)
    return found


def setting(seed: int, quick: bool) -> Setting:
    """Another split for each seed."""
    data = load("mnist")
    train, test = (part[:: 150 if quick else 1] for part in (data.train, data.test))
    module = seeded(seed, lambda: logistic(train.x.shape[1:], 10))
    return Setting(Classification(module), partition.dirichlet(train, 10, alpha=1.0, seed=seed), test)


def run(options: Options) -> Comparison:
    """Tune all methods, then compare them."""
    return compared(
        NAME, TITLE, TEXT, options, methods(options.quick), lambda seed: setting(seed, options.quick),
        tune=2 if options.quick else TRIALS, rounds=2 if options.quick else ROUNDS,
        evaluate_every=2 if options.quick else ROUNDS,
        engine=Simulator(device="cpu", chunk=5, workers=1, threads=1),
    )  # fmt: skip


RECIPE = Recipe(NAME, TITLE, run)
