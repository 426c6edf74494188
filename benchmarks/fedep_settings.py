"""FedEP's CIFAR-100 recipe with the settings of its authors' code and with the library's earlier ones, small enough for
a CPU: 5,000 images of CIFAR-10 at 50 clients, networks of width 8.

    python benchmarks/fedep_settings.py runs/settings authors
    python benchmarks/fedep_settings.py runs/settings earlier

Earlier: ResNet-18 with a 3×3 stem and stages at 24, 12, 6 and 3 pixels, torch's initial weights, images normalised by
the data set's channels, and FedAvg's local epochs one after another.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

import consilience as cs
from consilience.data import Compose, Crop, Flip, Standardize
from consilience.models import resnet18, resnet18_v2
from consilience.recipes.base import Options, seeded
from consilience.recipes.fedep import CIFAR100
from consilience.studies import Setting

WIDTH, CLIENTS = 8, 50


def setting(seed, authors):
    """CIFAR-10 with labels by Dirichlet 0.3."""
    data = cs.load("cifar10")
    train, test = data.train[::10], data.test[::10]
    steps = (Crop(24), Flip())
    if authors:
        train, test = (replace(part, scale=torch.tensor(1 / 255), shift=None) for part in (train, test))
        steps = (*steps, Standardize())
    network = resnet18_v2 if authors else resnet18
    module = seeded(seed, lambda: network((3, 24, 24), 10, width=WIDTH))
    federation = cs.partition.dirichlet(train, CLIENTS, alpha=0.3, seed=seed, minimum=20)
    return Setting(cs.Classification(module, augment=Compose(steps)), federation, test)


def main():
    out, which = Path(sys.argv[1]), sys.argv[2]
    if which not in ("authors", "earlier"):
        sys.exit(f"the settings are authors or earlier, got {which}")
    authors = which == "authors"
    small = replace(
        CIFAR100,
        name="settings",
        title=f"{which} settings",
        text="5,000 images of CIFAR-10 at 50 clients.",
        setting=lambda seed, quick: setting(seed, authors),
        train=replace(CIFAR100.train, epochs=3),
        mixed=authors,
        rounds=60,
        switch=30,
        cohort=10,
        names="FedAvg FedEP(I)",
        target=None,
        tempered=False,
        window=20,
        every=20,
        engine=cs.Simulator(device="cpu", chunk=1, workers=1, threads=1),
        paper={},
    )
    found = small.compare(Options(False, 1, out / which, resume=(out / which).exists()))
    for row in found.rows:
        print(f"{row.method} | {row.metric} | {row.mean:.4f}")


if __name__ == "__main__":
    main()
