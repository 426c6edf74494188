"""Errors of sequences of labels, and the order of survival times."""

from collections.abc import Sequence

import torch
from torch import Tensor

AT_ONCE = 1024  # examples that are compared with all others together


def label_errors(truth: Sequence[int], found: Sequence[int]) -> int:
    """The edit distance: the fewest insertions, deletions and substitutions that turn one into the other."""
    row = list(range(len(found) + 1))
    for i, label in enumerate(truth, 1):
        last, row[0] = row[0], i
        for j, other in enumerate(found, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (label != other))
    return row[-1]


def concordance(risk: Tensor, y: Tensor) -> float:
    """Harrell's C: the share of comparable pairs in which the example with the earlier event has the higher risk [N],
    ties counting ½; nan without such pairs. y [N, 2] has times and events. An example with an event is comparable with
    those of a later time, and with those that were censored at the same time."""
    right, pairs = concordant_pairs(risk, y)
    return right / pairs if pairs else float("nan")


def concordant_pairs(risk: Tensor, y: Tensor) -> tuple[float, int]:
    """(pairs in the right order, comparable pairs), of which `concordance` is the ratio. Those of clients add up."""
    risk, (time, event) = risk.detach().cpu().double(), y.detach().cpu().double().unbind(-1)
    right, pairs = 0.0, 0
    for rows in torch.split(torch.arange(len(risk))[event > 0], AT_ONCE):
        t, r = time[rows, None], risk[rows, None]
        comparable = (time > t) | ((time == t) & (event == 0))
        right += float((comparable & (r > risk)).sum() + 0.5 * (comparable & (r == risk)).sum())
        pairs += int(comparable.sum())
    return right, pairs
