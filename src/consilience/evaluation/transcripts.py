"""Transcripts of some test examples beside their texts, for reports."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from consilience.core import Belief
from consilience.data import Dataset, Federation
from consilience.evaluation.predictions import SAMPLES, predict_batches
from consilience.metrics import text_errors
from consilience.tasks import CTC, Task

SHOWN = 40  # examples


@dataclass(frozen=True)
class Read:
    """An example: its row and, where the data name them, its speaker; its text, what the model read, the probability of
    that, and the number of wrong words."""

    row: int
    speaker: str
    reference: str
    hypothesis: str
    confidence: float
    errors: int


def transcripts(task: Task, belief: Belief, test: Dataset | Federation, count: int = SHOWN) -> list[dict[str, Any]]:
    """Up to `count` test examples, evenly spaced, as plain data; by the posterior average if there is a posterior.
    Empty unless the task is CTC with an alphabet."""
    if not isinstance(task, CTC) or not task.alphabet:
        return []
    data = test.data if isinstance(test, Federation) else test
    held = torch.sort(test.order.to("cpu")).values if isinstance(test, Federation) else torch.arange(len(data))
    rows = held[torch.linspace(0, len(held) - 1, min(count, len(held))).long()]
    names, speaker = data.group_names.get("speaker"), data.groups.get("speaker")
    found = []
    for index, prediction, _ in predict_batches(task, belief, data, rows, samples=SAMPLES):
        texts = task.text(data.targets(index.to(data.device)))
        for row, reference, read in zip(index.tolist(), texts, task.decode(prediction), strict=True):
            who = "" if names is None or speaker is None else names[int(speaker[row])]
            errors = text_errors([reference], [read.text])[2]
            found.append(asdict(Read(row, who, reference, read.text, read.confidence, errors)))
    return found
