"""What server and sites share: the hospitals, their model, and the methods of the drill."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

import consilience as cs

TRAIN = cs.SGD(lr=0.05, epochs=2, batch_size=16)
METHODS = {"FedAvg": cs.FedAvg(TRAIN), "FedEP": cs.FedEP(cs.inference.Laplace(TRAIN, kappa=1.0, s0=0.05))}


@cache
def hospitals() -> tuple[cs.Federation, cs.Federation]:
    """The patients to learn from and those held out, by hospital."""
    return cs.partition.by_group(cs.data.heart_disease(), "hospital").split(0.25)


@cache
def five_sites() -> tuple[cs.Federation, cs.Federation]:
    """The same patients at five sites: every second one of Cleveland's is at Akron."""
    return tuple(_with_akron(part) for part in hospitals())


def _with_akron(part: cs.Federation) -> cs.Federation:
    silos = {name: part.client(k) for k, name in enumerate(part.names)}
    whole = silos.pop("Cleveland")
    rows = torch.arange(len(whole))
    silos |= {"Akron": whole[rows[1::2]], "Cleveland": whole[rows[::2]]}
    return cs.Federation.from_silos(dict(sorted(silos.items())))  # the order of clients over Flower


@cache
def task() -> cs.Task:
    """A network of one hidden layer on the hospitals' 29 features."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return cs.Classification(cs.models.mlp([29], 2, hidden=[8]))


def options(config: Mapping[str, Any]) -> dict[str, Any]:
    """How the server runs."""
    from consilience.flower import Participation

    names = ("clients", "min_clients", "timeout", "patience", "max_examples")
    participation = Participation(**{key: config[key] for key in names})
    shared = {key: config[key] for key in ("rounds", "out", "secure")}
    return {"participation": participation, **shared, "name": "heart-disease", "evaluate_every": config["rounds"]}
