"""Scores of survival curves beside those of scikit-survival, on made-up patients: the largest differences.

pip install scikit-survival
python benchmarks/survival_scores.py            # seconds
"""

from __future__ import annotations

import numpy as np
import torch
from sksurv.metrics import brier_score, concordance_index_censored, integrated_brier_score
from sksurv.util import Surv

from consilience.metrics import brier_scores, concordance, integrated_brier

TIMES = np.linspace(0.1, 1.2, 9) + 0.001


def patients(n: int, seed: int, months: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(times, events, risk, survival curves [n, T]); times are whole months if asked for, so that some are equal."""
    draw = np.random.default_rng(seed)
    eta = draw.normal(size=(n, 3)) @ [0.7, -0.4, 0.1]
    death, lost = draw.exponential(1 / np.exp(eta)), draw.exponential(1.3, n)
    if months:
        death, lost = (np.ceil(12 * time) / 12 for time in (death, lost))
    return np.minimum(death, lost), death <= lost, eta.round(1), np.exp(-TIMES * np.exp(eta)[:, None])


def main() -> None:
    """Print the largest differences over 20 sets of 300 patients."""
    for months in (False, True):
        worst = np.zeros(3)
        for seed in range(20):
            time, event, risk, curves = patients(300, seed, months)
            truth, y = Surv.from_arrays(event, time), torch.tensor(np.stack([time, event], 1))
            survival, times = torch.tensor(curves), torch.tensor(TIMES)
            found = (
                concordance(torch.tensor(risk), y) - concordance_index_censored(event, time, risk)[0],
                np.abs(brier_scores(survival, y, times).numpy() - brier_score(truth, truth, curves, TIMES)[1]).max(),
                integrated_brier(survival, y, times) - integrated_brier_score(truth, truth, curves, TIMES),
            )
            worst = np.maximum(worst, np.abs(found))
        kind = "whole months" if months else "no equal times"
        print(f"{kind}: concordance {worst[0]:.1e}, Brier scores {worst[1]:.1e}, integrated {worst[2]:.1e}")


if __name__ == "__main__":
    main()
