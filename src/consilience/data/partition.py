"""Partitioners: simulated federations from a data set that was collected in one place.

Every function gives each example to exactly one client, depends on its arguments and seed alone, and describes the
split in `Federation.how`. `data` may be a Dataset or anything that `Dataset.of` reads.
"""

import math
import zlib

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from consilience.core.errors import DataError, nearest
from consilience.data.allocation import (
    Ints,
    apportion,
    dirichlet_owners,
    draw_counts,
    draw_owners,
    log_dirichlet,
    rows_by_label,
)
from consilience.data.dataset import Dataset, Source
from consilience.data.federation import Federation
from consilience.data.trees import form


def iid(data: Source, clients: int, *, seed: int = 0) -> Federation:
    """Examples at random, in equal numbers up to one."""
    data = _check(data, clients)
    owner = _rng(seed, "iid").permutation(np.arange(len(data)) % clients)
    return _federation(data, owner, clients, "IID")


def quantity(data: Source, clients: int, *, alpha: float, seed: int = 0, minimum: int = 1) -> Federation:
    """Sizes minimum + Multinomial(N − clients · minimum, p), p ~ Dirichlet(α), of random examples."""
    data = _check(data, clients, minimum, alpha=alpha)
    rng = _rng(seed, "quantity")
    shares = np.exp(log_dirichlet(rng, alpha, (1, clients)))[0]
    sizes = minimum + rng.multinomial(len(data) - clients * minimum, shares / shares.sum())
    owner = rng.permutation(np.arange(clients).repeat(sizes))
    return _federation(data, owner, clients, f"Dirichlet over sizes, α = {alpha:g}")


def dirichlet(
    data: Source, clients: int, *, alpha: float, seed: int = 0, minimum: int = 1, balanced: bool = False
) -> Federation:
    """Each class is divided in proportions p ~ Dirichlet(α) over the clients, independently.

    With small α few clients hold a class, and sizes differ widely; with α → ∞ every client has the same mix. If at most
    five clients have fewer than `minimum` examples, the draw is repeated, up to ten times; then the largest clients
    give random examples to the clients below `minimum`.

    With `balanced`, as in the codes of PFNM, FedMA and NIID-Bench, classes are divided one after another. A client that
    has N / clients examples gets no more, and the proportions of the others are renormalised.
    """
    data = _check(data, clients, minimum, alpha=alpha)
    labels = _labels(data, "dirichlet")
    owner = dirichlet_owners(_rng(seed, "dirichlet"), labels, clients, alpha, minimum, balanced)
    return _federation(data, owner, clients, f"Dirichlet over labels,{' balanced,' * balanced} α = {alpha:g}")


def mixtures(data: Source, clients: int, *, alpha: float, seed: int = 0) -> Federation:
    """Every client draws a mix of labels p ~ Dirichlet(α), then N / clients examples from it without replacement:
    clients of one size (Hsu et al., 2019). An exhausted label is dropped, so later clients draw from the others."""
    data = _check(data, clients, alpha=alpha)
    labels = _labels(data, "mixtures")
    rng, left = _rng(seed, "mixtures"), np.bincount(labels)
    counts = np.zeros((len(left), clients), np.int64)
    for client, size in enumerate(np.bincount(np.arange(len(data)) % clients)):
        counts[:, client] = draw_counts(rng, size, log_dirichlet(rng, alpha, (1, len(left)))[0], left)
        left -= counts[:, client]
    return _federation(data, draw_owners(rng, labels, counts), clients, f"label mixtures by Dirichlet, α = {alpha:g}")


def shards(data: Source, clients: int, *, shards_per_client: int = 2, seed: int = 0) -> Federation:
    """Examples sorted by label, cut into clients · shards_per_client equal shards (up to one), and dealt at random."""
    data = _check(data, clients)
    labels = _labels(data, "shards")
    count = clients * shards_per_client
    if not 1 <= shards_per_client <= len(data) // clients:
        raise DataError(
            f"shards_per_client must lie between 1 and {len(data) // clients} for {len(data)} examples of "
            f"{data.name} at {clients} clients, got {shards_per_client}"
        )
    rng = _rng(seed, "shards")
    shard = np.arange(len(data)) * count // len(data)
    owner = np.empty_like(labels)
    owner[rows_by_label(rng, labels)] = rng.permutation(count)[shard] // shards_per_client
    return _federation(data, owner, clients, f"{shards_per_client} label shards a client")


def one_label(data: Source, clients: int, *, seed: int = 0) -> Federation:
    """Each client has examples of one label only; frequent labels have more clients, so that sizes are similar."""
    data = _check(data, clients)
    labels = _labels(data, "one_label")
    present = np.bincount(labels)
    if clients < len(present):
        raise DataError(
            f"one_label needs a client for each of the {len(present)} labels in {data.name}, got {clients} clients"
        )
    rng = _rng(seed, "one_label")
    seats = apportion(present, clients)
    # Example i of a label's n goes to the label's seat i · seats // n: equal up to one.
    position = np.arange(len(labels)) - (present.cumsum() - present).repeat(present)
    seat = (position * seats.repeat(present) // present.repeat(present)) + (seats.cumsum() - seats).repeat(present)
    owner = np.empty_like(labels)
    owner[rows_by_label(rng, labels)] = rng.permutation(clients)[seat]
    return _federation(data, owner, clients, "one label a client")


def sc_dir(data: Source, clients: int, *, clusters: int = 5, alpha: float = 0.5, seed: int = 0) -> Federation:
    """Super-clusters: the classes are split at random into disjoint clusters, each client belongs to one cluster, and
    the classes of a cluster are divided by Dirichlet(α), with at least one example a client.

    Clusters have equally many classes up to one, and clients in proportion to their examples. The literature specifies
    neither α nor the number of clusters; 0.5 and five are our choice.
    """
    data = _check(data, clients, alpha=alpha)
    labels = _labels(data, "sc_dir")
    classes = int(labels.max()) + 1
    if not 1 <= clusters <= min(classes, clients):
        raise DataError(
            f"clusters must lie between 1 and {min(classes, clients)} for the {classes} labels in {data.name} "
            f"and {clients} clients, got {clusters}"
        )
    rng = _rng(seed, "sc_dir")
    cluster = rng.permutation(np.arange(classes) % clusters)[labels]
    members = np.split(rng.permutation(clients), apportion(np.bincount(cluster), clients).cumsum()[:-1])
    owner = np.empty_like(labels)
    for number, ids in enumerate(members):
        inside = cluster == number
        own = np.unique(labels[inside], return_inverse=True)[1]
        owner[inside] = ids[dirichlet_owners(rng, own, len(ids), alpha, 1)]
    how = f"{clusters} super-clusters of labels, Dirichlet inside, α = {alpha:g}"
    return _federation(data, owner, clients, how)


def pachinko(
    data: Source, clients: int, *, coarse: str = "coarse", alpha: float = 0.1, beta: float = 10.0, seed: int = 0
) -> Federation:
    """Pachinko allocation (Reddi et al. 2021): a client draws p ~ Dirichlet(α) over coarse labels and, within
    each, Dirichlet(β) over fine labels, then N / clients examples from that tree without replacement.

    An exhausted label is dropped and its siblings are renormalised.
    """
    data = _check(data, clients, alpha=alpha, beta=beta)
    fine = _labels(data, "pachinko")
    parent_of = np.unique(_group(data, coarse), return_inverse=True)[1]
    classes = int(fine.max()) + 1
    leaves, leaf = np.unique(parent_of * classes + fine, return_inverse=True)
    children = np.split(np.arange(len(leaves)), np.flatnonzero(np.diff(leaves // classes)) + 1)
    left = np.bincount(leaf)
    counts = np.zeros((len(left), clients), np.int64)
    rng = _rng(seed, "pachinko")
    sizes = np.bincount(np.arange(len(data)) % clients)
    for client, size in enumerate(sizes):
        stock = np.array([left[own].sum() for own in children])
        chosen = draw_counts(rng, size, log_dirichlet(rng, alpha, (1, len(children)))[0], stock)
        for parent in np.flatnonzero(chosen):
            own = children[parent]
            taken = draw_counts(rng, chosen[parent], log_dirichlet(rng, beta, (1, len(own)))[0], left[own])
            counts[own, client] = taken
            left[own] -= taken
    owner = draw_owners(rng, leaf, counts)
    return _federation(data, owner, clients, f"Pachinko allocation over {coarse}, α = {alpha:g}, β = {beta:g}")


def by_group(data: Source, group: str, *, minimum: int = 0) -> Federation:
    """A client for each value of a natural id (writer, hospital), named by `group_names` if there are names.

    Groups of fewer than `minimum` examples are dropped with their examples. With `minimum = 0` a named group without
    examples remains, so that client numbers agree between the parts of a split set.
    """
    data = Dataset.of(data)
    column = _group(data, group)
    names = data.group_names.get(group)
    if names is None:
        values, column = np.unique(column, return_inverse=True)
        names = tuple(str(value) for value in values)
    elif len(column) and not 0 <= column.min() <= column.max() < len(names):
        raise DataError(
            f"the ids {column.min()}..{column.max()} of group {group!r} in {data.name} exceed its {len(names)} name(s)"
        )
    sizes = np.bincount(column, minlength=len(names))
    kept = sizes >= minimum
    if not kept.any():
        raise DataError(f"no {group} of {data.name} has {minimum} examples; the largest has {sizes.max(initial=0)}")
    if not kept.all():
        rows = np.flatnonzero(kept[column])
        data = data[torch.from_numpy(rows)]
        column = (kept.cumsum() - 1)[column[rows]]
        names = tuple(name for name, keep in zip(names, kept, strict=True) if keep)
    how = f"by {group}" + (f" with at least {minimum} examples" if minimum > 1 else "")
    return Federation.from_owner(data, torch.from_numpy(column), names=names, how=how)


def _rng(seed: int, purpose: str) -> Generator:
    return np.random.default_rng([seed % 2**64, zlib.crc32(purpose.encode())])


def _check(source: Source, clients: int, minimum: int = 1, **concentrations: float) -> Dataset:
    data = Dataset.of(source)
    if clients < 1:
        raise DataError(f"clients must be at least 1, got {clients}")
    if minimum < 0:
        raise DataError(f"minimum must be at least 0, got {minimum}")
    if clients * max(minimum, 1) > len(data):
        each = f" of at least {max(minimum, 1)} each" if minimum > 1 else ""
        raise DataError(f"{data.name} has {len(data)} examples, too few for {clients} clients{each}")
    for name, value in concentrations.items():
        if not 0 < value < math.inf:
            raise DataError(f"{name} must be a positive number, got {value}")
    return data


def _labels(data: Dataset, partitioner: str) -> Ints:
    """Labels as 0..C−1, C the number that occur."""
    if data.labels is None:
        raise DataError(
            f"{partitioner} divides by class label, but a target of {data.name} is {form(data.y)}: "
            "use iid, quantity or by_group"
        )
    return np.unique(_numpy(data.labels), return_inverse=True)[1]


def _group(data: Dataset, group: str) -> Ints:
    if group not in data.groups:
        hint = nearest(group, data.groups) if data.groups else "it has none"
        raise DataError(f"{data.name} has no group {group!r}; {hint}")
    return _numpy(data.groups[group])


def _numpy(column: Tensor) -> Ints:
    return column.cpu().numpy().astype(np.int64)


def _federation(data: Dataset, owner: Ints, clients: int, how: str) -> Federation:
    return Federation.from_owner(data, torch.from_numpy(owner), clients=clients, how=how)
