"""Detection of out-of-distribution examples by a score."""

import torch
from torch import Tensor

from consilience.core.errors import DataError


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Area under the ROC curve, P(s_out > s_in) + ½ P(s_out = s_in): 1 when all outside scores are higher, ½ by chance.

    From the pooled ranks r, the mean one for ties: (Σ_out r − n_out (n_out + 1)/2) / (n_in n_out).
    """
    from scipy.stats import rankdata  # slow to import

    for name, scores in {"inside": inside, "outside": outside}.items():
        if not scores.numel():
            raise DataError(f"there are no scores of {name} examples")
        if not bool(torch.isfinite(scores).all()):
            raise DataError(f"the scores of {name} examples are not all finite")
    n, m = inside.numel(), outside.numel()
    pooled = torch.cat([scores.detach().cpu().double().reshape(-1) for scores in (outside, inside)])
    total = float(rankdata(pooled.numpy())[:m].sum())
    return (total - m * (m + 1) / 2) / (n * m)
