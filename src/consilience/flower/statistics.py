"""Sums of BatchNorm layers that sites compute with the server's weights: checked one by one, then added."""

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from consilience.core import ConsilienceError, Point, RecordError, pack, to, unpack
from consilience.data import Cohort, Federation
from consilience.flower.coordinator import Coordinator
from consilience.flower.messages import STATISTICS, StatisticsReply, StatisticsRequest, decode, encode
from consilience.tasks.statistics import Sums, client_sums
from consilience.tasks.task import Task

log = logging.getLogger("consilience")


def sums_of_sites(
    coordinator: Coordinator,
    federation: Federation,
    task: Task,
    theta: Tensor,
    request: StatisticsRequest,
    total: Sums | None,
) -> Iterator[Sums]:
    """The sums of every online site, in the order of their names; an error if no site sends valid ones."""
    template = _template(task, theta, federation)
    further = {} if total is None else {"total": pack(to(total, "cpu"))}
    content = encode(request, weights=pack(Point(theta.cpu())), **further)
    names, valid = coordinator.available(federation.names or ()), {}
    for name, reply in coordinator.ask(
        f"query.{STATISTICS}", dict.fromkeys(names, content), coordinator.participation.timeout
    ):
        examples = coordinator.online[name][1].examples if name in coordinator.online else 0
        try:
            valid[name] = check_sums(decode(reply, StatisticsReply)[1].get("sums", b""), template, examples)
        except RecordError as error:
            log.warning("the statistics of %r are rejected: %s", name, error)
    if not valid:
        raise ConsilienceError("no site sent the statistics of BatchNorm layers, and the model cannot be scored")
    for name in sorted(valid):
        yield to(valid[name], task.device)


def _template(task: Task, theta: Tensor, federation: Federation) -> Sums:
    """The sums of one example of zeros, for their shapes and the entries of an example."""
    one = Federation.from_owner(federation.data[:1], torch.zeros(1, dtype=torch.int64)).to(task.device)
    cohort = Cohort(one, torch.tensor([0]), round=1, round_size=1, seed=0, dtype=task.dtype, augment=task.augment)
    found: Sums = to(client_sums(task, theta, cohort, None), "cpu")
    return found


def check_sums(data: bytes, template: Sums, examples: int) -> Sums:
    """The sums, if they have the shapes of `template`, are finite, count at most `examples` examples and have no
    negative variance; else a RecordError."""
    sums: Sums = unpack(data, like=template)
    if not all(bool(part.isfinite().all()) for part in (sums.count, sums.first, sums.second)):
        raise RecordError("its sums are not finite")
    if not bool(((sums.count > 0) & (sums.count <= template.count * examples * (1 + 1e-6))).all()):
        raise RecordError(f"its sums do not count the entries of its {examples} examples")
    if not bool((sums.second * sums.count >= sums.first.square() * (1 - 1e-6) - 1e-6).all()):
        raise RecordError("its sums have a negative variance")
    return sums
