"""Partitioners: who gets which example of a data set that was collected in one place.

Every function gives each example to exactly one client, depends on its arguments and seed alone, and says in
`Federation.how` what it did.
"""

from __future__ import annotations

import heapq
import math
import zlib

import numpy as np
import numpy.typing as npt
import torch
from numpy.random import Generator
from torch import Tensor

from consilience.core.errors import DataError, nearest
from consilience.data.dataset import Dataset
from consilience.data.federation import Federation

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_TRIES = 10
_HANDFUL = 5


def iid(data: Dataset, clients: int, seed: int = 0) -> Federation:
    """Shuffled and dealt out: sizes equal up to one."""
    _check(data, clients)
    owner = _rng(seed, "iid").permutation(np.arange(len(data)) % clients)
    return _federation(data, owner, clients, "IID")


def quantity(data: Dataset, clients: int, alpha: float, seed: int = 0, minimum: int = 1) -> Federation:
    """Sizes minimum + Multinomial(N − clients · minimum, p), p ~ Dirichlet(α), of examples drawn alike."""
    _check(data, clients, minimum, alpha=alpha)
    rng = _rng(seed, "quantity")
    shares = np.exp(_log_dirichlet(rng, alpha, (1, clients)))[0]
    sizes = minimum + rng.multinomial(len(data) - clients * minimum, shares / shares.sum())
    owner = rng.permutation(np.arange(clients).repeat(sizes))
    return _federation(data, owner, clients, f"Dirichlet over sizes, α = {alpha:g}")


def dirichlet(
    data: Dataset, clients: int, alpha: float, seed: int = 0, minimum: int = 1, balanced: bool = False
) -> Federation:
    """Each class is shared out in proportions p ~ Dirichlet(α) over the clients, independently.

    Small α: a class lies with few clients, and sizes differ widely; α → ∞: every client has the same mix.
    Draws in which some clients have fewer than `minimum` examples are repeated, up to ten times while they
    are a handful; then the largest clients give random examples to those that lack some.

    With `balanced`, as in the codes of PFNM, FedMA and NIID-Bench, classes are shared out one after another, and who
    has N / clients examples already gets none of the further ones: the others' proportions are renormalised.
    """
    _check(data, clients, minimum, alpha=alpha)
    labels = _labels(data, "dirichlet")
    owner = _dirichlet_owner(_rng(seed, "dirichlet"), labels, clients, alpha, minimum, balanced)
    return _federation(data, owner, clients, f"Dirichlet over labels,{' balanced,' * balanced} α = {alpha:g}")


def mixtures(data: Dataset, clients: int, alpha: float, seed: int = 0) -> Federation:
    """Every client draws a mix of labels p ~ Dirichlet(α), then N / clients examples from it without replacement:
    clients of one size (Hsu et al., 2019). An exhausted label is dropped: later clients choose among what is left."""
    _check(data, clients, alpha=alpha)
    labels = _labels(data, "mixtures")
    rng, left = _rng(seed, "mixtures"), np.bincount(labels)
    counts = np.zeros((len(left), clients), np.int64)
    for client, size in enumerate(np.bincount(np.arange(len(data)) % clients)):
        counts[:, client] = _draw(rng, size, _log_dirichlet(rng, alpha, (1, len(left)))[0], left)
        left -= counts[:, client]
    return _federation(data, _owner(rng, labels, counts), clients, f"label mixtures by Dirichlet, α = {alpha:g}")


def shards(data: Dataset, clients: int, shards_per_client: int = 2, seed: int = 0) -> Federation:
    """Sorted by label, cut into clients · shards_per_client equal shards (up to one), dealt out at random."""
    _check(data, clients)
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
    owner[_sorted(rng, labels)] = rng.permutation(count)[shard] // shards_per_client
    return _federation(data, owner, clients, f"{shards_per_client} label shards a client")


def one_label(data: Dataset, clients: int, seed: int = 0) -> Federation:
    """Each client has examples of one label only; frequent labels get more clients, so sizes are near."""
    _check(data, clients)
    labels = _labels(data, "one_label")
    present = np.bincount(labels)
    if clients < len(present):
        raise DataError(
            f"one_label needs a client for each of the {len(present)} labels in {data.name}, got {clients} clients"
        )
    rng = _rng(seed, "one_label")
    seats = _apportion(present, clients)
    # Example i of a label's n goes to the label's seat i · seats // n: equal up to one.
    position = np.arange(len(labels)) - (present.cumsum() - present).repeat(present)
    seat = (position * seats.repeat(present) // present.repeat(present)) + (seats.cumsum() - seats).repeat(present)
    owner = np.empty_like(labels)
    owner[_sorted(rng, labels)] = rng.permutation(clients)[seat]
    return _federation(data, owner, clients, "one label a client")


def sc_dir(data: Dataset, clients: int, clusters: int = 5, alpha: float = 0.5, seed: int = 0) -> Federation:
    """Super-clusters: the classes are split at random into disjoint clusters, a client belongs to one,
    and inside it the classes are shared by Dirichlet(α), with at least one example a client.

    Clusters have equally many classes up to one, and clients in proportion to their examples. The
    literature gives neither α nor the number of clusters; five and 0.5 are our choice.
    """
    _check(data, clients, alpha=alpha)
    labels = _labels(data, "sc_dir")
    classes = int(labels.max()) + 1
    if not 1 <= clusters <= min(classes, clients):
        raise DataError(
            f"clusters must lie between 1 and {min(classes, clients)} for the {classes} labels in {data.name} "
            f"and {clients} clients, got {clusters}"
        )
    rng = _rng(seed, "sc_dir")
    cluster = rng.permutation(np.arange(classes) % clusters)[labels]
    members = np.split(rng.permutation(clients), _apportion(np.bincount(cluster), clients).cumsum()[:-1])
    owner = np.empty_like(labels)
    for number, ids in enumerate(members):
        inside = cluster == number
        own = np.unique(labels[inside], return_inverse=True)[1]
        owner[inside] = ids[_dirichlet_owner(rng, own, len(ids), alpha, 1)]
    how = f"{clusters} super-clusters of labels, Dirichlet inside, α = {alpha:g}"
    return _federation(data, owner, clients, how)


def pachinko(
    data: Dataset, clients: int, coarse: str = "coarse", alpha: float = 0.1, beta: float = 10.0, seed: int = 0
) -> Federation:
    """Pachinko allocation (Reddi et al. 2021): a client draws p ~ Dirichlet(α) over coarse labels and, within
    each, Dirichlet(β) over fine labels, then N / clients examples from that tree without replacement.

    An exhausted label is dropped and its siblings renormalised, so later clients choose among what is left.
    """
    _check(data, clients, alpha=alpha, beta=beta)
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
        chosen = _draw(rng, size, _log_dirichlet(rng, alpha, (1, len(children)))[0], stock)
        for parent in np.flatnonzero(chosen):
            own = children[parent]
            taken = _draw(rng, chosen[parent], _log_dirichlet(rng, beta, (1, len(own)))[0], left[own])
            counts[own, client] = taken
            left[own] -= taken
    owner = _owner(rng, leaf, counts)
    return _federation(data, owner, clients, f"Pachinko allocation over {coarse}, α = {alpha:g}, β = {beta:g}")


def by_group(data: Dataset, group: str, minimum: int = 0) -> Federation:
    """A client for each value of a natural id (writer, hospital), named by `group_names` if there are names.

    Groups of fewer than `minimum` examples are left out, with their examples: the federation's `data` is
    what remains. With `minimum = 0` a named group without examples stays, so that client numbers agree
    between the parts of a split set.
    """
    column = _group(data, group)
    names = data.group_names.get(group)
    if names is None:
        values, column = np.unique(column, return_inverse=True)
        names = tuple(str(value) for value in values)
    elif len(column) and not 0 <= column.min() <= column.max() < len(names):
        raise DataError(
            f"the ids {column.min()}..{column.max()} of group {group!r} in {data.name} "
            f"go beyond its {len(names)} name(s)"
        )
    sizes = np.bincount(column, minlength=len(names))
    kept = sizes >= minimum
    if not kept.any():
        raise DataError(f"no {group} of {data.name} has {minimum} examples; the largest has {sizes.max(initial=0)}")
    if not kept.all():
        rows = np.flatnonzero(kept[column])
        data = data.subset(torch.from_numpy(rows))
        column = (kept.cumsum() - 1)[column[rows]]
        names = tuple(name for name, keep in zip(names, kept, strict=True) if keep)
    how = f"by {group}" + (f" with at least {minimum} examples" if minimum > 1 else "")
    return Federation.from_owner(data, torch.from_numpy(column), names, how=how)


def _rng(seed: int, purpose: str) -> Generator:
    return np.random.default_rng([seed % 2**64, zlib.crc32(purpose.encode())])


def _check(data: Dataset, clients: int, minimum: int = 1, **concentrations: float) -> None:
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


def _labels(data: Dataset, partitioner: str) -> Ints:
    """Labels as 0..C−1, C the number that occur."""
    if data.y.dim() != 1 or data.y.is_floating_point():
        found = f"{data.y.dtype}".removeprefix("torch.") + f" {list(data.y.shape)}"
        raise DataError(
            f"{partitioner} divides by class label, but the targets of {data.name} are {found}: "
            "use iid, quantity or by_group"
        )
    return np.unique(_numpy(data.y), return_inverse=True)[1]


def _group(data: Dataset, group: str) -> Ints:
    if group not in data.groups:
        hint = nearest(group, data.groups) if data.groups else "it has none"
        raise DataError(f"{data.name} has no group {group!r}; {hint}")
    return _numpy(data.groups[group])


def _numpy(column: Tensor) -> Ints:
    return column.cpu().numpy().astype(np.int64)


def _federation(data: Dataset, owner: Ints, clients: int, how: str) -> Federation:
    return Federation.from_owner(data, torch.from_numpy(owner), clients=clients, how=how)


def _sorted(rng: Generator, labels: Ints) -> Ints:
    """Rows by label, shuffled within each."""
    return np.lexsort((rng.random(len(labels)), labels))


def _owner(rng: Generator, labels: Ints, counts: Ints) -> Ints:
    """An owner for every row, such that client k has counts[c, k] random examples of label c."""
    owner = np.empty_like(labels)
    owner[_sorted(rng, labels)] = np.tile(np.arange(counts.shape[1]), len(counts)).repeat(counts.ravel())
    return owner


def _log_dirichlet(rng: Generator, alpha: float, shape: tuple[int, int]) -> Floats:
    """Logarithms of Dirichlet(α) draws, a row each, the largest 0: G(α) = G(α + 1) · U^(1/α) in logarithms,
    because for small α all of a row's Gamma variables may underflow to nothing."""
    tail = np.log1p(-rng.random(shape)) / alpha
    draws = np.log(rng.standard_gamma(alpha + 1, shape)) + tail
    result: Floats = draws - draws.max(axis=1, keepdims=True)
    return result


def _dirichlet_owner(
    rng: Generator, labels: Ints, clients: int, alpha: float, minimum: int, balanced: bool = False
) -> Ints:
    frequency = np.bincount(labels)
    share_out = _share_out_balanced if balanced else _share_out
    for _ in range(_TRIES):
        counts = share_out(_log_dirichlet(rng, alpha, (len(frequency), clients)), frequency)
        lacking = int((counts.sum(axis=0) < minimum).sum())
        if not 0 < lacking <= _HANDFUL:  # none lacks any, or so many that the next draw would hardly be better
            break
    owner = _owner(rng, labels, counts)
    return _fill_up(rng, owner, clients, minimum) if lacking else owner


def _share_out(log_shares: Floats, frequency: Ints) -> Ints:
    """[C, clients] examples of each class: the cumulated shares are rounded, so that rows sum exactly
    and a share of nothing stays nothing."""
    shares = np.exp(log_shares).cumsum(axis=1)
    ends = np.rint(shares / shares[:, -1:] * frequency[:, None])
    counts: Ints = np.diff(ends, axis=1, prepend=0).astype(np.int64)
    return counts


def _share_out_balanced(log_shares: Floats, frequency: Ints) -> Ints:
    """The same, class by class, where a client that has its N / clients examples has no share any more."""
    counts = np.zeros(log_shares.shape, np.int64)
    sizes = counts.sum(axis=0)
    for label, row in enumerate(log_shares):
        # Somebody is always short: were all full, no example would be left to share out.
        open_ = np.where(sizes * len(sizes) < frequency.sum(), row, -np.inf)
        counts[label] = _share_out(open_[None] - open_.max(), frequency[label : label + 1])[0]
        sizes += counts[label]
    return counts


def _fill_up(rng: Generator, owner: Ints, clients: int, minimum: int) -> Ints:
    """Raise every client to `minimum` examples, taken at random from the largest, levelled from the top."""
    sizes = np.bincount(owner, minlength=clients)
    lacking = np.maximum(minimum - sizes, 0)
    need = int(lacking.sum())
    low, high = minimum, int(sizes.max())  # the highest level whose surplus covers the need
    while low < high:
        level = (low + high + 1) // 2
        low, high = (level, high) if np.maximum(sizes - level, 0).sum() >= need else (low, level - 1)
    give = np.maximum(sizes - low, 0)
    give[np.flatnonzero(give)[: int(give.sum()) - need]] -= 1
    order = _sorted(rng, owner)
    position = np.arange(len(owner)) - (sizes.cumsum() - sizes)[owner[order]]
    moved = order[position < give[owner[order]]]
    owner[rng.permutation(moved)] = np.arange(clients).repeat(lacking)
    return owner


def _apportion(votes: Ints, seats: int) -> Ints:
    """Seats by largest average (D'Hondt), one each to begin with: no party gets more seats than votes
    as long as there are as many votes as seats."""
    given = np.ones_like(votes)
    queue = [(-count, party) for party, count in enumerate(votes.tolist())]
    heapq.heapify(queue)
    for _ in range(seats - len(votes)):
        party = queue[0][1]
        given[party] += 1
        heapq.heapreplace(queue, (-votes[party] / given[party], party))
    return given


def _draw(rng: Generator, count: int, log_weights: Floats, stock: Ints) -> Ints:
    """`count` draws without replacement, by label, exhausted labels dropped and the rest renormalised.

    Same law as drawing one by one: what a multinomial draw takes beyond the stock is drawn again.
    """
    taken = np.zeros_like(stock)
    while count:
        open_ = np.flatnonzero(taken < stock)
        weights = np.exp(log_weights[open_] - log_weights[open_].max())
        wanted = rng.multinomial(count, weights / weights.sum())
        got = np.minimum(wanted, (stock - taken)[open_])
        taken[open_] += got
        count -= int(got.sum())
    return taken
