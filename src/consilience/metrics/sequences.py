"""Errors of sequences of labels and of texts, and the order of survival times."""

from collections.abc import Sequence

import torch
from torch import Tensor

from consilience.core.errors import ConfigError

AT_ONCE = 1024  # examples that are compared with all others together


def label_errors(truth: Sequence[int], found: Sequence[int]) -> int:
    """The edit distance: the fewest insertions, deletions and substitutions that turn one into the other."""
    row = list(range(len(found) + 1))
    for i, label in enumerate(truth, 1):
        last, row[0] = row[0], i
        for j, other in enumerate(found, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (label != other))
    return row[-1]


def text_errors(truth: Sequence[str], found: Sequence[str]) -> tuple[int, int, int, int]:
    """(wrong characters, characters, wrong words, words) of texts by jiwer: insertions, deletions and substitutions.
    Those of clients add up."""
    try:
        import jiwer
    except ImportError as error:
        raise ConfigError("word error rates need jiwer, which is missing: pip install 'consilience[speech]'") from error
    parts = (jiwer.process_characters(list(truth), list(found)), jiwer.process_words(list(truth), list(found)))
    counts: list[int] = []
    for part in parts:
        counts += [part.insertions + part.deletions + part.substitutions]
        counts += [part.hits + part.deletions + part.substitutions]
    return counts[0], counts[1], counts[2], counts[3]


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
