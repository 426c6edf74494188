"""Scores of calibration examples that sites count: checked one by one, then added."""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from flwr.app import RecordDict

from consilience.core import ConsilienceError, DataError, RecordError, unpack
from consilience.evaluation.calibration import EDGES, LEVEL, Calibration
from consilience.evaluation.predictions import SAMPLES
from consilience.evaluation.sets import check_score
from consilience.flower.coordinator import Coordinator
from consilience.flower.messages import CALIBRATION, CalibrateReply, decode, longest_record
from consilience.flower.updates import most_examples
from consilience.tasks.task import Task

log = logging.getLogger("consilience")


def calibrate_at_sites(
    coordinator: Coordinator, names: tuple[str, ...], content: Callable[[str], RecordDict], task: Task
) -> Calibration | None:
    """The sum of the counts of all online sites that hold calibration examples. None if there are none, or too few for
    the coverage that reports show. The sum alone is kept: a site knows its own counts."""
    held = {name: coordinator.online[name][1].calibration for name in coordinator.available(names)}
    held = {name: examples for name, examples in held.items() if examples}
    if not held:
        return None
    try:
        total = empty(check_score(task, "lac"))
    except ConsilienceError as error:
        log.warning("sites cannot calibrate prediction sets: %s", error)
        return None
    most, longest = coordinator.participation.max_examples or most_examples(held.values()), longest_record(total)
    timeout = coordinator.participation.timeout
    for name, reply in coordinator.ask(f"query.{CALIBRATION}", held, content, timeout, longest):
        try:
            data = decode(reply, CalibrateReply, longest)[1].get("counts", b"")
            counts = check_counts(data, total, min(held[name], most)).counts
        except RecordError as error:
            log.warning("the calibration of %r is rejected: %s", name, error)
            continue
        total = replace(total, counts=total.counts + counts, clients=total.clients + 1)
    try:
        total.threshold(LEVEL)
    except DataError as error:
        log.warning("there are no prediction sets: %s", error)
        return None
    return total


def empty(score: str) -> Calibration:
    """The calibration of no examples."""
    bins = len(EDGES[score]) + 1
    counts, own = torch.zeros(bins, dtype=torch.int64), torch.zeros(0, bins, dtype=torch.int64)
    return Calibration(counts, torch.zeros(1, dtype=torch.int64), own, (), score, SAMPLES)


def check_counts(data: bytes, template: Calibration, most: int) -> Calibration:
    """The counts, if they have the form of `template` and are those of 1 to `most` examples; else a RecordError."""
    found: Calibration = unpack(data, like=template)
    if bool((found.counts < 0).any()) or bool((found.counts > most).any()) or not 0 < found.examples <= most:
        raise RecordError(f"its counts are not those of 1 to {most} examples")
    return found
