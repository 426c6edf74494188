"""How close honest clients come to the bounds beyond which a server refuses their factors.

    python benchmarks/honest.py [RECIPE …]

Runs recipes at their small size, and FedEP on MNIST where clients differ much. Prints a row for each method that sends
Gaussian factors: the rounds, and the extremes over all rounds of the measures of
consilience.algorithms.shared.judging.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import consilience as cs
from consilience.algorithms.shared import judging
from consilience.algorithms.shared.factors import Factors
from consilience.recipes import RECIPES

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import quick
from support.published import write_tff_emnist, write_tff_questions

WRITTEN = {"fedep-emnist62": write_tff_emnist, "fedep-stackoverflow": write_tff_questions}


@contextmanager
def watched(found: dict[str, list[dict[str, float]]]) -> Iterator[None]:
    """Collect the extremes of every round's measures by method."""
    refusals = Factors.refusals

    def watching(self: Any, server: Any, update: Any, measures: dict[str, Tensor]) -> dict[int, str]:
        refused = refusals(self, server, update, measures)
        worst = {name: float(values.max()) for name, values in judging.ratios(measures).items()}
        line = {"least": float(measures["least"].min()), "refused": float(len(refused))}
        found.setdefault(self.name, []).append(line | worst)
        return refused

    with patch.object(Factors, "refusals", watching):
        yield


def recipe(name: str, folder: Path) -> None:
    """Run a recipe at its small size."""
    if name in WRITTEN:
        WRITTEN[name](folder / "data")
        os.environ |= {"CONSILIENCE_DATA": f"{folder}/data", "XDG_CACHE_HOME": f"{folder}/cache"}
    code, _, error = quick.reproduce(name, folder / "out")
    if code:
        print(f"{name}: {error.strip()}", file=sys.stderr)


def skewed(kind: str) -> None:
    """Ten rounds of FedEP on 4,000 images of MNIST with each kind of inference."""
    train = cs.load("mnist").train
    train = train[torch.arange(0, len(train), len(train) // 4000)]
    split = {
        "MNIST, one label a client": lambda: cs.partition.one_label(train, 10),
        "MNIST, Dirichlet 0.05": lambda: cs.partition.dirichlet(train, 10, alpha=0.05),
        "MNIST, sizes by Dirichlet 0.3": lambda: cs.partition.quantity(train, 10, alpha=0.3),
    }[kind]()
    sgd = cs.SGD(lr=0.05, batch_size=20, epochs=2, momentum=0.9)
    for infer in (
        cs.inference.Identity(sgd),
        cs.inference.MCMC(sgd),
        cs.inference.Laplace(sgd),
        cs.inference.NGVI(sgd),
    ):
        torch.manual_seed(0)
        task = cs.Classification(cs.models.mlp((1, 28, 28), 10, (32,)))
        cs.fit(cs.FedEP(infer), task, split, rounds=10, progress=False)


SKEWED = ("MNIST, one label a client", "MNIST, Dirichlet 0.05", "MNIST, sizes by Dirichlet 0.3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[*SKEWED, *RECIPES])
    print("| case | method | rounds | least | precision / typical | move / typical | surprise / typical | refused |")
    print("|---|---|---|---|---|---|---|---|")
    for name in parser.parse_args().cases:
        found: dict[str, list[dict[str, float]]] = {}
        with tempfile.TemporaryDirectory() as folder, watched(found), patch.dict("os.environ"):
            skewed(name) if name in SKEWED else recipe(name, Path(folder))
        for method, rounds in found.items():
            least, most = (
                {key: of(line[key] for line in rounds) for key in ("least", "precision", "move", "surprise")}
                for of in (min, max)
            )
            figures = [least["least"], most["precision"], most["move"], most["surprise"]]
            figures.append(sum(line["refused"] for line in rounds))
            print(f"| {name} | {method} | {len(rounds)} |", " | ".join(f"{x:.3g}" for x in figures), "|", flush=True)


if __name__ == "__main__":
    main()
