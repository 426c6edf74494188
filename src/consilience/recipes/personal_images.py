"""A model for every client on images: writers of digits, clothes that are turned, and clothes whose names differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from consilience.algorithms import Algorithm, Ditto, FedAvg, FedEP, FedPer, FedRep, LocalOnly, PartialPooling, PFedMe
from consilience.algorithms.switch import Method, Switch
from consilience.core import keys
from consilience.data import Dataset, Federation, load, partition
from consilience.engines import Simulator
from consilience.inference import Identity
from consilience.models import mlp
from consilience.optim import SGD
from consilience.recipes.base import Options, Recipe, compared, seeded
from consilience.runs import Run
from consilience.studies import Comparison, Setting
from consilience.tasks.supervised import Classification

KINDS = 4  # of clients: rotations by quarter turns, or permutations of the labels
SIZES = {"writers": (60, 100), "rotated": (20, 400), "permuted": (20, 400)}  # clients, images of a client
QUICK = (4, 60)
TEXT = (
    "Every client holds out a quarter of its images for testing, and is tested on them with the model that it would "
    "use. “all clients” pools all test images; “worst client” is the lowest accuracy of a client. The network has one "
    "hidden layer of 64 units. All methods start from the same weights, in {rounds} rounds of all clients. Every "
    "method has the same number of trials, scored by the NLL on a fifth of the first seed's training images. "
    "“FedAvg, tuned” is FedAvg and then local training for five epochs. FedEP and PartialPooling start from FedAvg "
    "after half of the rounds. In “PartialPooling” every layer has a width τ of its own; in “PartialPooling, head” the "
    "body is shared by FedEP and the last layer is pooled partially."
)
FEDERATIONS: dict[str, str] = {
    "writers": "MNIST, one writer a client: 60 writers with at least 100 digits. ",
    "rotated": "Fashion-MNIST, 20 clients of 400 images; quarters of the clients turn images by 0, 90, 180, 270°. ",
    "permuted": "Fashion-MNIST, 20 clients of 400 images; each quarter of the clients numbers classes in its own way. ",
}


def methods(rounds: int) -> dict[str, Method]:
    """The same local optimiser for each method."""
    train = SGD(lr=0.1, epochs=2, batch_size=20)
    infer = Identity(train, scale=0.5)

    def warm(then: Algorithm) -> Switch:
        return Switch(FedAvg(train), then, at=rounds // 2)

    return {
        "LocalOnly": LocalOnly(train),
        "FedAvg": FedAvg(train),
        "FedAvg, tuned": Switch(FedAvg(train), LocalOnly(replace(train, epochs=5)), at=rounds - 1),
        "FedPer": FedPer(train),
        "FedRep": FedRep(train, head=train),
        "Ditto": Ditto(train),
        "pFedMe": PFedMe(train),
        "FedEP": warm(FedEP(infer)),
        "PartialPooling": warm(PartialPooling(infer, damping=0.3, parts="layers")),
        "PartialPooling, head": warm(PartialPooling(infer, damping=0.3, parts=("3",))),
    }


def writers(seed: int, clients: int, each: int) -> Federation:
    """Writers drawn at random, with all their digits."""
    everyone = partition.by_group(load("mnist-writers").train, "writer", minimum=each)
    chosen = _drawn(seed, len(everyone))[:clients].tolist()
    return Federation.from_silos({everyone.name(k): everyone.client(k) for k in chosen}, how="by writer")


def changed(kind: str, seed: int, clients: int, each: int) -> Federation:
    """Clothes drawn at random and shared out; clients of four kinds, with the images turned or the labels permuted."""
    data = load("fashion-mnist").train
    data = data[_drawn(seed, len(data))[: clients * each]]
    owner = torch.arange(len(data)) % clients
    kinds = owner % KINDS
    x, y = torch.as_tensor(data.x).clone(), torch.as_tensor(data.y).clone()
    for k in range(1, KINDS):
        rows = kinds == k
        if kind == "rotated":
            x[rows] = x[rows].rot90(k, dims=(-2, -1))
        else:
            y[rows] = _drawn(seed, len(data.classes), k)[y[rows]]
    classes = data.classes if kind == "rotated" else ()
    made: Dataset = replace(data, x=x, y=y, classes=classes)
    return Federation.from_owner(
        made, owner, names=[f"{kind} {c % KINDS}, client {c // KINDS}" for c in range(clients)]
    )


def _drawn(seed: int, n: int, part: int = 0) -> Tensor:
    """A random order of n things."""
    key = keys.key(seed, purpose=f"personal images {part}")
    return keys.permutations(key.view(1), torch.tensor([n]), n)[0]


def setting(kind: str, quick: bool, seed: int) -> Setting:
    """Clients and a network of a seed."""
    make: Callable[[int, int, int], Federation] = writers if kind == "writers" else partial(changed, kind)
    federation = make(seed, *(QUICK if quick else SIZES[kind]))
    train, test = federation.split(0.25, seed=seed)
    model = seeded(seed, lambda: mlp((1, 28, 28), 10, hidden=[8 if quick else 64]))
    return Setting(Classification(model), train, test)


def worst(run: Run, at: Setting) -> dict[str, float]:
    """The lowest accuracy of a client."""
    found = run.evaluation
    assert found is not None
    return {"accuracy, worst client": min(client["metrics"]["accuracy"] for client in found.clients)}


def run(kind: str, options: Options) -> Comparison:
    """Compare all methods on one federation."""
    rounds = 3 if options.quick else 30
    text = FEDERATIONS[kind] + TEXT.format(rounds=rounds)
    return compared(
        f"personal-{kind}", f"A model for every client: {kind}", text, options, methods(rounds),
        partial(setting, kind, options.quick), measure=worst, rounds=rounds, evaluate_every=rounds,
        tune=None if options.quick else 4, engine=Simulator(device="cpu", threads=1),
    )  # fmt: skip


RECIPES = tuple(
    Recipe(f"personal-{kind}", f"A model for every client on images: {kind}", partial(run, kind))
    for kind in FEDERATIONS
)
