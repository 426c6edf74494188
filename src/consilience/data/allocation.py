"""Allocation of examples to clients by random shares: the arithmetic behind the partitioners."""

import heapq

import numpy as np
import numpy.typing as npt
from numpy.random import Generator

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_TRIES = 10
_HANDFUL = 5


def rows_by_label(rng: Generator, labels: Ints) -> Ints:
    """Rows sorted by label, shuffled within each label."""
    return np.lexsort((rng.random(len(labels)), labels))


def draw_owners(rng: Generator, labels: Ints, counts: Ints) -> Ints:
    """An owner for every row: client k gets counts[c, k] random examples of label c."""
    owner = np.empty_like(labels)
    owner[rows_by_label(rng, labels)] = np.tile(np.arange(counts.shape[1]), len(counts)).repeat(counts.ravel())
    return owner


def log_dirichlet(rng: Generator, alpha: float, shape: tuple[int, int]) -> Floats:
    """Logarithms of Dirichlet(α) draws, one in each row, up to a constant that makes the largest 0. It uses
    G(α) = G(α + 1) · U^(1/α) in logarithms, because for small α all Gamma variables of a row may underflow."""
    tail = np.log1p(-rng.random(shape)) / alpha
    draws = np.log(rng.standard_gamma(alpha + 1, shape)) + tail
    result: Floats = draws - draws.max(axis=1, keepdims=True)
    return result


def dirichlet_owners(
    rng: Generator, labels: Ints, clients: int, alpha: float, minimum: int, balanced: bool = False
) -> Ints:
    """An owner for every row: each label is divided in proportions that are Dirichlet(α) over the clients."""
    frequency = np.bincount(labels)
    divide = share_out_balanced if balanced else share_out
    for _ in range(_TRIES):
        counts = divide(log_dirichlet(rng, alpha, (len(frequency), clients)), frequency)
        lacking = int((counts.sum(axis=0) < minimum).sum())
        if not 0 < lacking <= _HANDFUL:  # no client is too small, or so many that a further draw would not help
            break
    owner = draw_owners(rng, labels, counts)
    return fill_up(rng, owner, clients, minimum) if lacking else owner


def share_out(log_shares: Floats, frequency: Ints) -> Ints:
    """[C, clients] examples of each class: the cumulated shares are rounded, so that rows sum exactly and a share of 0
    stays 0."""
    shares = np.exp(log_shares).cumsum(axis=1)
    ends = np.rint(shares / shares[:, -1:] * frequency[:, None])
    counts: Ints = np.diff(ends, axis=1, prepend=0).astype(np.int64)
    return counts


def share_out_balanced(log_shares: Floats, frequency: Ints) -> Ints:
    """[C, clients] examples, class by class: a client that has N / clients examples gets no more."""
    counts = np.zeros(log_shares.shape, np.int64)
    sizes = counts.sum(axis=0)
    for label, row in enumerate(log_shares):
        # At least one client is below N / clients as long as examples are left.
        open_ = np.where(sizes * len(sizes) < frequency.sum(), row, -np.inf)
        counts[label] = share_out(open_[None] - open_.max(), frequency[label : label + 1])[0]
        sizes += counts[label]
    return counts


def fill_up(rng: Generator, owner: Ints, clients: int, minimum: int) -> Ints:
    """Raise every client to `minimum` examples, taken at random from the largest clients."""
    sizes = np.bincount(owner, minlength=clients)
    lacking = np.maximum(minimum - sizes, 0)
    need = int(lacking.sum())
    low, high = minimum, int(sizes.max())  # the highest level whose surplus covers the need
    while low < high:
        level = (low + high + 1) // 2
        low, high = (level, high) if np.maximum(sizes - level, 0).sum() >= need else (low, level - 1)
    give = np.maximum(sizes - low, 0)
    give[np.flatnonzero(give)[: int(give.sum()) - need]] -= 1
    order = rows_by_label(rng, owner)
    position = np.arange(len(owner)) - (sizes.cumsum() - sizes)[owner[order]]
    moved = order[position < give[owner[order]]]
    owner[rng.permutation(moved)] = np.arange(clients).repeat(lacking)
    return owner


def apportion(votes: Ints, seats: int) -> Ints:
    """Seats by largest average (D'Hondt), at least one for each party. No party gets more seats than votes if there are
    as many votes as seats."""
    given = np.ones_like(votes)
    queue = [(-count, party) for party, count in enumerate(votes.tolist())]
    heapq.heapify(queue)
    for _ in range(seats - len(votes)):
        party = queue[0][1]
        given[party] += 1
        heapq.heapreplace(queue, (-votes[party] / given[party], party))
    return given


def draw_counts(rng: Generator, count: int, log_weights: Floats, stock: Ints) -> Ints:
    """The number of examples of each label in `count` draws without replacement; exhausted labels are dropped and the
    others renormalised. The excess of a multinomial draw over the stock is drawn again, which has the same law as
    drawing one by one."""
    taken = np.zeros_like(stock)
    while count:
        open_ = np.flatnonzero(taken < stock)
        weights = np.exp(log_weights[open_] - log_weights[open_].max())
        wanted = rng.multinomial(count, weights / weights.sum())
        got = np.minimum(wanted, (stock - taken)[open_])
        taken[open_] += got
        count -= int(got.sum())
    return taken
