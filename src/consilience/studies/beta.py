"""fit_beta: the exponent of β-PredBayes, by labelled data."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from consilience.algorithms.predbayes import PredBayes
from consilience.core.errors import ConfigError
from consilience.data.dataset import Dataset
from consilience.evaluation.predictions import input_batches, predict_each
from consilience.runs import Run

GRID = tuple(k / 20 for k in range(21))


def fit_beta(run: Run, data: Dataset, grid: Sequence[float] = GRID) -> Run:
    """A run of `PredBayes` with the β of `grid` that predicts `data` with the lowest NLL. The server needs these
    labelled examples; the clients' networks are not trained again."""
    method = run.algorithm
    if not isinstance(method, PredBayes):
        raise ConfigError(f"β belongs to PredBayes, and this is a run of {method.name}")
    belief, task = method.posterior(run.server), run.network
    made = torch.cat([predict_each(task, belief, x) for x in input_batches(task, data, torch.arange(len(data)))], 1)
    y = data.y.to(made.device).unsqueeze(1)

    def nll(beta: float) -> float:
        p = replace(belief, beta=beta).combine(made.double()).gather(1, y)
        return float(-p.clamp_min(1e-300).log().mean())

    return replace(run, algorithm=replace(method, beta=min(grid, key=nll)))
