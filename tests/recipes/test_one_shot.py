"""The recipe one-shot chooses settings without training again: what it fuses is what `fit` fuses."""

from __future__ import annotations

import pytest
import torch

import consilience as cs
from consilience.recipes import one_shot_fusion
from consilience.recipes.one_shot_fusion import Bench
from support.scenarios import blobs

ENGINE = cs.Simulator(device="cpu", chunk=6, workers=1)


@pytest.mark.parametrize(
    ("best", "kind"),
    [
        (one_shot_fusion.best_fedfisher, cs.algorithms.FedFisher),
        (one_shot_fusion.best_kronecker, cs.algorithms.FedFisherKFAC),
    ],
)
def test_the_chosen_fedfisher_is_the_one_that_fit_learns(best, kind, monkeypatch):
    task, train, test = blobs()
    optimiser = cs.SGD(lr=0.1, epochs=3, batch_size=8)
    at = Bench(task, train, test.data, test.data, optimiser, seed=4)
    once = {"rounds": 1, "seed": 4, "engine": ENGINE, "progress": False}
    alike = cs.fit(cs.LocalOnly(optimiser), task, train, **once)
    networks = torch.stack([alike.personal(k).mean for k in range(6)])
    scores = []
    for prior in one_shot_fusion.PRIORS:
        run = cs.fit(kind(optimiser, prior=prior), task, train, **once)
        scores.append(run.evaluate(test.data).point)
    wanted = min(scores, key=lambda found: found["nll"])
    assert best(at, alike.task, networks)["nll"] == pytest.approx(wanted["nll"], rel=1e-4)
    monkeypatch.setattr(one_shot_fusion, "PRIORS", (1e6,))
    mean = cs.fit(cs.FedAvg(optimiser), task, train, **once).evaluate(test.data).point["nll"]
    assert best(at, alike.task, networks)["nll"] == pytest.approx(mean, rel=1e-3)
