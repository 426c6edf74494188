"""The methods of the leaderboard: one line each, for every federation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from consilience import algorithms as a
from consilience import inference, server
from consilience.algorithms.switch import Method, Switch
from consilience.optim import IVON, SAM, SGHMC, SGLD, AdamW, Chain, Tapered
from consilience.recipes.leaderboard_setting import Arena

C = TypeVar("C", bound=Chain)
FEW = ("FedAvg", "FedEP(I)", "FedCGS", "LocalOnly", "FedFisher")  # of a quick run
ONCE = ("PFNM", "Ensemble", "FedFisher", "FedFisher, Kronecker", "β-PredBayes")  # methods with one exchange


def methods(arena: Arena) -> dict[str, Method]:
    """All methods with the same local optimiser. Those with a posterior of the weights of a network start from FedAvg
    after half of the rounds, and FedCGS takes its features from FedAvg's network in the last. Pooled drops an epoch's
    last, smaller batch: no mean over clients dampens a step along three images just before the test."""
    train, half = arena.train, arena.rounds // 2
    infer = inference.Identity(train)
    once = replace(train, epochs=arena.epochs)
    sampler = SGHMC(
        lr=train.lr, epochs=arena.epochs, batch_size=train.batch_size, weight_decay=train.weight_decay, temperature=0.1
    )

    def alike(kind: type[C], **changes: Any) -> C:
        """Another local optimiser, with the same passes over the data."""
        return kind(epochs=train.epochs, batch_size=train.batch_size, **changes)

    variational, sharp = inference.Variational(alike(IVON, lr=0.02, kappa=10.0)), alike(SAM, lr=train.lr)

    def warm(then: a.Algorithm) -> Switch:
        return Switch(a.FedAvg(train), then, at=half)

    found: dict[str, Method] = {
        "Pooled": a.Pooled(replace(train, drop_last=True)),
        "LocalOnly": a.LocalOnly(train),
        "FedAvg": a.FedAvg(train),
        "FedAdam": a.FedAvg(train, server.Adam(lr=0.01)),
        "FedProx": a.FedProx(train),
        "FedNova": a.FedNova(train),
        "SCAFFOLD": a.SCAFFOLD(train),
        "FedDyn": a.FedDyn(train),
        "FedDC": a.FedDC(train),
        "MOON": a.MOON(train),
        "FedSAM": a.FedAvg(sharp),
        "FedGAMMA": a.SCAFFOLD(sharp),
        "FedAdamW": a.FedAdamW(alike(AdamW, lr=0.003)),
        "SA-FL": a.SAFL(replace(train, schedule=Tapered())),
        "FedPer": a.FedPer(train),
        "FedRep": a.FedRep(train, head=train),
        "Ditto": a.Ditto(train),
        "pFedMe": a.PFedMe(train),
        "FedLA": a.FedLA(train),
        "FedBE": a.FedBE(train),
        "FedNP": a.FedNP(train),
        "FedPA": warm(a.FedPA(replace(train, epochs=5))),
        "FedLap": a.FedLap(train, prior=10.0),
        "FedLangevin": a.FedLangevin(alike(SGLD, lr=0.02, temperature=0.1), burn_in=half),
        "FedEP(I)": warm(a.FedEP(infer)),
        "FedEP(L)": warm(a.FedEP(inference.Laplace(train))),
        "FedEP(V)": warm(a.FedEP(inference.NGVI(train))),
        "FedSEP(I)": warm(a.FedSEP(infer)),
        "PVI": a.PVI(variational),
        "BayesADMM": a.BayesADMM(variational, damping=0.5),
        "PartialPooling(I)": warm(a.PartialPooling(infer, damping=0.3, parts="layers")),
        "FedCGS": Switch(a.FedAvg(train), a.FedCGS(), at=arena.rounds - 1),
        "PFNM": a.PFNM(once),
        "Ensemble": a.Ensemble(once),
        "FedFisher": a.FedFisher(once),
        "FedFisher, Kronecker": a.FedFisherKFAC(once),
        "β-PredBayes": a.PredBayes(sampler),
    }
    if arena.small:
        found["FedEP(N)"] = a.FedEP(inference.Newton(), damping=1.0, prior=1.0)
        found["PartialPooling(N)"] = a.PartialPooling(
            inference.Newton(), damping=1.0, prior=1.0, tau=0.1**0.5, parts="all"
        )
    return found
