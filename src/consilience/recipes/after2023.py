"""Methods since 2023 beside FedAvg, FedDyn and FedEP: digits, two classes a client, the same tuning for all."""

from typing import Any

from consilience.algorithms import (
    PVI,
    SCAFFOLD,
    Algorithm,
    BayesADMM,
    FedAdamW,
    FedAvg,
    FedDyn,
    FedEP,
    FedLangevin,
    FedLap,
    FedLapCov,
)
from consilience.data import load, partition
from consilience.engines import Simulator
from consilience.inference import Identity, Laplace, Variational
from consilience.models import mlp
from consilience.optim import IVON, SAM, SGD, SGLD, AdamW
from consilience.recipes.base import Options, Recipe, compared, seeded
from consilience.studies import Comparison, Setting
from consilience.tasks.supervised import Classification

NAME, TITLE = "after2023", "Methods since 2023 on digits, two classes a client"
CLIENTS, TRIALS = 10, 8
TEXT = (
    f"The 8×8 digits of scikit-learn at {CLIENTS} clients with two label shards each; an MLP with 32 hidden units, 50 "
    "rounds of five local epochs in batches of 20, all clients in each round. Each seed is another split and other "
    f"initial weights, the same for all methods. Every method has {TRIALS} trials of its settings, the first as given "
    "and the others drawn, scored by NLL on a fifth of every client's training examples. BayesADMM, PVI and "
    "FedLangevin have a cold posterior, κ = 10 or T = 0.1. “marginal” averages the predictions of samples of the "
    "posterior; FedLangevin always does."
)


def methods() -> dict[str, Algorithm]:
    """Each with its first settings."""
    passes: dict[str, Any] = {"epochs": 5, "batch_size": 20}
    train, ivon = SGD(lr=0.1, **passes), IVON(lr=0.02, kappa=10.0, **passes)
    sharp = SAM(lr=0.1, **passes)
    return {
        "FedAvg": FedAvg(train),
        "FedDyn": FedDyn(train),
        "FedEP(I)": FedEP(Identity(train, scale=0.5)),
        "BayesADMM": BayesADMM(Variational(ivon), damping=0.5),
        "PVI": PVI(Variational(ivon)),
        "FedLap": FedLap(train, prior=10.0),
        "FedLap-Cov": FedLapCov(Laplace(train, kappa=1.0, s0=0.01, epochs=1, clip=False)),
        "FedLangevin": FedLangevin(SGLD(lr=0.02, temperature=0.1, **passes), burn_in=30, thin=2),
        "FedSAM": FedAvg(sharp),
        "FedGAMMA": SCAFFOLD(sharp),
        "FedAvg, AdamW": FedAvg(AdamW(lr=0.003, **passes)),
        "FedAdamW": FedAdamW(AdamW(lr=0.003, **passes)),
    }


def setting(seed: int) -> Setting:
    """Another split, and other initial weights."""
    data = load("digits")
    module = seeded(seed, lambda: mlp(data.train.x.shape[1:], 10, (32,)))
    return Setting(Classification(module), partition.shards(data.train, CLIENTS, seed=seed), data.test)


def run(options: Options) -> Comparison:
    """Tune all methods, then compare them."""
    return compared(
        NAME, TITLE, TEXT, options, methods(), setting, tune=2 if options.quick else TRIALS,
        rounds=2 if options.quick else 50, evaluate_every=2 if options.quick else 50,
        engine=Simulator(device="cpu", chunk=CLIENTS, workers=1, threads=1),
    )  # fmt: skip


RECIPE = Recipe(NAME, TITLE, run)
