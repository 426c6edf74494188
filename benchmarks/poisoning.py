"""What hostile clients do to a model, with and without defence.

    python benchmarks/poisoning.py [--seeds 3] [--rounds 15]

Ten clients learn MNIST (4,000 images, Dirichlet 0.5, one hidden layer). Client 0 is hostile in every round; in the last
attack three clients push together. Rows are attacks, columns methods, and entries the accuracy after the last round and
how many updates were rejected: of hostile clients + of honest clients.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import consilience as cs
from consilience.algorithms.base import algorithm
from consilience.core.records import Tree, Weighted, tree_map

Change = Callable[[Tree], Tree]
"""From the hostile clients' honest updates, with a client axis, to those that they send."""


@dataclass(frozen=True)
class Attack:
    """`mean` changes a mean update, `factor` a Gaussian one. `clients` are hostile."""

    mean: Callable[[Tensor], Tensor] = lambda mean: mean
    weight: float = 1.0
    factor: Callable[[cs.Gaussian], cs.Gaussian] = lambda factor: factor
    clients: tuple[int, ...] = (0,)
    flips: bool = False

    def __call__(self, update: Tree) -> Tree:
        if isinstance(update, Weighted):
            return Weighted.of(tree_map(self.mean, update.mean), update.weight * self.weight)
        return self.factor(update)


def _everywhere(size: float) -> Callable[[Tensor], Tensor]:
    return lambda values: torch.full_like(values, size)


def _scaled(by: float) -> Attack:
    return Attack(lambda mean: mean * by, factor=lambda d: cs.Gaussian(d.eta * by, d.lam * by))


def _push(mean: Tensor) -> Tensor:
    """The same small step for all hostile clients: one honest length along +1."""
    return mean.norm(dim=-1, keepdim=True) / mean.shape[-1] ** 0.5 * torch.ones_like(mean)


ATTACKS = {
    "none": Attack(clients=()),
    "NaN": Attack(_everywhere(float("nan")), factor=lambda d: cs.Gaussian(d.eta * float("nan"), d.lam)),
    "1e30": Attack(_everywhere(1e30), factor=lambda d: cs.Gaussian(torch.full_like(d.eta, 1e30), d.lam)),
    "weight or precision × 1000": Attack(
        lambda mean: -mean, 1000.0, lambda d: cs.Gaussian(-1e3 * d.eta, d.lam + 1e3 * d.eta.abs().mean())
    ),
    "precision − 1000": Attack(lambda mean: mean, factor=lambda d: cs.Gaussian(d.eta, d.lam - 1000)),
    "precision + 1e6": Attack(lambda mean: mean, factor=lambda d: cs.Gaussian(d.eta, d.lam + 1e6)),
    "sign flip": _scaled(-1.0),
    "sign flip × 10": _scaled(-10.0),
    "scaling × 100": _scaled(100.0),
    "flipped labels": Attack(flips=True),
    "three push together": Attack(_push, factor=lambda d: cs.Gaussian(_push(d.eta), d.lam), clients=(0, 1, 2)),
}


def hostile(base: type, attack: Attack, defended: bool = True) -> type:
    """The method whose hostile clients change their updates, and follow them. If it is not `defended`, the server
    refuses nothing."""

    @algorithm
    class Hostile(base):  # type: ignore[misc]
        def local(self, task: Any, message: Any, state: Any, cohort: Any) -> tuple[Tree, Tree]:
            update, new = super().local(task, message, state, cohort)
            chosen = torch.isin(cohort.ids, torch.tensor(attack.clients))

            def mixed(bad: Tensor, good: Tensor) -> Tensor:
                return torch.where(chosen.view(-1, *[1] * (good.dim() - 1)), bad, good)

            update = tree_map(mixed, attack(update), update)
            return update, new if state is None else self.follow(state, update)

        def refusals(self, server: Any, update: Any, measures: dict[str, Tensor]) -> dict[int, str]:
            return super().refusals(server, update, measures) if defended else {}

    return Hostile


def methods(attack: Attack) -> dict[str, Any]:
    sgd = cs.SGD(lr=0.05, batch_size=20, epochs=2, momentum=0.9)
    fedavg, fedep = hostile(cs.FedAvg, attack)(sgd), hostile(cs.FedEP, attack)
    identity, laplace = cs.inference.Identity(sgd), cs.inference.Laplace(sgd, kappa=1.0, s0=0.05, epochs=1)
    return {
        "FedAvg": fedavg,
        "Robust(FedAvg)": cs.Robust(fedavg),
        "FedEP(I), undefended": hostile(cs.FedEP, attack, defended=False)(identity),
        "FedEP(I)": fedep(identity),
        "FedEP(I), max_surprise=5": fedep(identity, max_surprise=5.0),
        "FedEP(L)": fedep(laplace),
        "FedEP(L), max_surprise=5": fedep(laplace, max_surprise=5.0),
    }


def setting(attack: Attack, seed: int) -> tuple[cs.Task, cs.Federation, cs.Dataset]:
    data = cs.load("mnist")
    train = data.train[torch.arange(0, len(data.train), len(data.train) // 4000)]
    federation = cs.partition.dirichlet(train, 10, alpha=0.5, seed=seed)
    if attack.flips:
        own = federation.order[federation.offsets[0] : federation.offsets[1]]
        y = federation.data.y.clone()
        y[own] = 9 - y[own]
        federation = replace(federation, data=replace(federation.data, y=y))
    torch.manual_seed(seed)
    return cs.Classification(cs.models.mlp((1, 28, 28), 10, (32,))), federation, data.test


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--attacks", nargs="*", default=list(ATTACKS))
    given = parser.parse_args()
    logging.getLogger("consilience").setLevel(logging.ERROR)
    names = list(methods(ATTACKS["none"]))
    print("| attack |", " | ".join(names), "|")
    print("|---" * (len(names) + 1) + "|")
    for title in given.attacks:
        attack, cells = ATTACKS[title], []
        for name in names:
            scores, caught, honest = [], 0, 0
            for seed in range(given.seeds):
                task, federation, test = setting(attack, seed)
                run = cs.fit(methods(attack)[name], task, federation, rounds=given.rounds, seed=seed, progress=False)
                scores.append(run.evaluate(test).point["accuracy"])
                bad = {federation.name(k) for k in attack.clients}
                who = [rejected["client"] for line in run.history for rejected in line["rejected"]]
                caught += sum(client in bad for client in who)
                honest += sum(client not in bad for client in who)
            found = torch.tensor(scores)
            cells.append(f"{found.mean():.3f} ± {found.std():.3f} ({caught}+{honest})")
        print(f"| {title} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
