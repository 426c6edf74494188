"""Sums of BatchNorm layers that sites compute with the server's weights: checked one by one, then added."""

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from consilience.core import Point, RecordError, pack, to, tree_map, unpack
from consilience.data import Cohort, Federation
from consilience.data.ragged import Ragged
from consilience.data.trees import entries
from consilience.flower.coordinator import Coordinator
from consilience.flower.messages import STATISTICS, StatisticsReply, StatisticsRequest, decode, encode, longest_record
from consilience.flower.updates import LARGEST, magnitude
from consilience.tasks.statistics import Sums, client_sums
from consilience.tasks.task import Task

log = logging.getLogger("consilience")


def sums_of_sites(
    coordinator: Coordinator,
    names: tuple[str, ...],
    federation: Federation,
    task: Task,
    theta: Tensor,
    request: StatisticsRequest,
    total: Sums | None,
) -> Iterator[Sums]:
    """The valid sums of every online site of `names`, in the order of their names. A site that counts for fewer
    examples than it has, because of `max_examples`, counts for as many here."""
    template, clients = template_sums(task, theta, federation), federation.names or ()
    longest, timeout = longest_record(template), coordinator.participation.timeout
    fixed = not any(isinstance(part, Ragged) for _, part in entries(federation.data.x))
    further = {} if total is None else {"total": pack(to(total, "cpu"))}
    content = encode(request, weights=pack(Point(theta.cpu())), **further)
    claimed = {name: coordinator.online[name][1].examples for name in coordinator.available(names)}
    valid: dict[str, Sums] = {}
    for name, reply in coordinator.ask(f"query.{STATISTICS}", claimed, lambda _: content, timeout, longest):
        try:
            data = decode(reply, StatisticsReply, longest)[1].get("sums", b"")
            sums = check_sums(data, template, claimed[name], fixed)
        except RecordError as error:
            log.warning("the statistics of %r are rejected: %s", name, error)
            continue
        share = min(1.0, int(federation.sizes[clients.index(name)]) / claimed[name])
        valid[name] = tree_map(lambda leaf, share=share: leaf * share, sums)
    if not valid:
        log.warning("no site sent the statistics of BatchNorm layers, so the model cannot be scored")
    for name in sorted(valid):
        yield to(valid[name], task.device)


def template_sums(task: Task, theta: Tensor, federation: Federation) -> Sums:
    """The sums of one example of zeros, for their shapes and the entries of an example."""
    one = Federation.from_owner(federation.data[:1], torch.zeros(1, dtype=torch.int64)).to(task.device)
    cohort = Cohort(one, torch.tensor([0]), round=1, round_size=1, seed=0, dtype=task.dtype, augment=task.augment)
    found: Sums = to(client_sums(task, theta, cohort), "cpu")
    return found


def check_sums(data: bytes, template: Sums, examples: int, fixed: bool = True) -> Sums:
    """The sums, if they have the shapes of `template`, are finite, count at most `examples` examples and have no
    negative variance; else a RecordError. Unless examples have a `fixed` size, their entries are not known."""
    sums: Sums = unpack(data, like=template)
    if not all(bool(part.isfinite().all()) for part in (sums.count, sums.first, sums.second)):
        raise RecordError("its sums are not finite")
    if magnitude(sums) > LARGEST:
        raise RecordError("its sums are so large that they would overflow")
    most = template.count * examples * (1 + 1e-6) if fixed else float("inf")
    if not bool(((sums.count > 0) & (sums.count <= most)).all()):
        raise RecordError(f"its sums do not count the entries of its {examples} examples")
    if not bool((sums.second * sums.count >= sums.first.square() * (1 - 1e-6) - 1e-6).all()):
        raise RecordError("its sums have a negative variance")
    return sums
