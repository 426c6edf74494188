"""Hospitals that join, have no labels, or are forgotten: parts of the recipe `personal-hospitals`."""

from __future__ import annotations

import torch
from torch import Tensor

from consilience.core import Gaussian
from consilience.data import Dataset, Federation
from consilience.evaluation.shift import LabelShift
from consilience.recipes.base import Options
from consilience.recipes.personal_setting import (
    DRAWS,
    LOCAL,
    ONE_PRIOR,
    POOLED,
    Table,
    hospitals,
    labelled,
    learn,
    methods,
    names,
    scored,
    without,
)
from consilience.runs import Run

AFTER = (0, 1, 2, 5)  # rounds after a hospital was forgotten
FORGETTING = (POOLED, ONE_PRIOR)


def joining(options: Options, table: Table) -> None:
    """Every hospital joins a run of the three others, which have all their patients, with few labelled patients."""
    everyone = hospitals()
    for label, method in methods(options.quick).items():
        runs = {name: learn(method, without(everyone, name)) for name in names(everyone)}
        for draw in range(options.seeds):
            options.tell(f"{label}, joining", draw)
            for count in labelled(options.quick):
                found = []
                for name, run in runs.items():
                    test, pool = halves(everyone.client(name), draw)
                    joined = run.join(name, pool[:count])
                    probs = joined.predict(test.x, client=name, samples=DRAWS)
                    found.append(scored(probs, test.y, "nll", "ece"))
                table.add_mean(label, found, f", m = {count}")


def halves(data: Dataset, draw: int) -> tuple[Dataset, Dataset]:
    """A random half of a hospital's patients for test, and the others in random order."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(draw))
    return data[order[: len(data) // 2]], data[order[len(data) // 2 :]]


def leaving(options: Options, table: Table) -> None:
    """Every hospital is left out of the training data of a split: the others predict for it, and are what should be
    left of a run that forgets it."""
    for seed in range(options.seeds):
        train, test = hospitals().split(0.25, seed=seed)
        for label, method in methods(options.quick).items():
            if label == LOCAL:
                continue
            options.tell(f"{label}, one hospital left out", seed)
            never = {name: learn(method, without(train, name)) for name in names(train)}
            found = {name: unlabelled(run, hospitals().client(name)) for name, run in never.items()}
            for name, scores in found.items():
                table.add(label, scores, hospital=name)
            table.add_mean(label, list(found.values()))
            if label in FORGETTING:
                run = learn(method, train)
                table.add_mean(label, [forgotten(run, name, never[name], test) for name in never])


def unlabelled(run: Run, new: Dataset) -> dict[str, float]:
    """Scores at a hospital whose labels nobody has seen, without and with a correction of its class frequencies."""
    probs, shift = run.predict(new.x, samples=DRAWS), run.label_shift(new.x, samples=DRAWS)
    true = torch.bincount(new.y, minlength=2) / len(new)
    versions = {
        "new": probs,
        "new, EM": shift(probs),
        "new, true frequencies": LabelShift(shift.old, true.double())(probs),
        "new, oracle": best_shift(probs, new.y),
    }
    found = {f"{metric}, {name}": value for name, p in versions.items()
             for metric, value in scored(p, new.y, "nll", "ece").items()}  # fmt: skip
    return found | {"error of the EM share": abs(float(shift.new[1] - true[1]))}


def best_shift(probs: Tensor, y: Tensor) -> Tensor:
    """Predictions [N, 2] with the logit shift of the lowest NLL: the mean prediction equals the share of ones. The
    shift is found by bisection."""
    logit, share = probs[:, 1].logit(), y.double().mean()
    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (logit + middle).sigmoid().mean() < share else (low, middle)
    return torch.stack([(-logit - low).sigmoid(), (logit + low).sigmoid()], 1)


def forgotten(run: Run, name: str, never: Run, test: Federation) -> dict[str, float]:
    """How far a run without one hospital is from a run that never had it, at once and after some rounds."""
    found, expected = dict[str, float](), nll(never, test)
    for rounds in AFTER:
        left = run.forget(name, rounds=rounds)
        apart = [distance(left, never, other) for other in names(left.federation)]
        after = f"{rounds} round{'' if rounds == 1 else 's'}"
        found |= {f"apart, {after}": sum(apart) / len(apart), f"nll apart, {after}": abs(nll(left, test) - expected)}
    return found


def distance(run: Run, other: Run, hospital: str) -> float:
    """The mean distance of two posterior means of a hospital, in standard deviations of the second."""
    a, b = run.personal(hospital), other.personal(hospital)
    assert isinstance(b, Gaussian)
    return float(((a.mean - b.mean).abs() / b.variance.sqrt()).mean())


def nll(run: Run, test: Federation) -> float:
    """Of the test patients of a run's own hospitals."""
    own = [(name, test.client(name)) for name in names(run.federation)]
    probs = torch.cat([run.predict(data.x, client=name, samples=DRAWS) for name, data in own])
    return scored(probs, torch.cat([data.y for _, data in own]), "nll")["nll"]
