"""Matching by a Beta-Bernoulli process: the model behind PFNM (Yurochkin et al., 2019)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from consilience.core import Count, Positive, Range, Ranges, Size
from consilience.matching.clusters import Clusterer, Clusters, Known, Units

SAME = 1e-12  # of the objective: a sweep that changes it less has converged


@dataclass(frozen=True)
class BetaBernoulli(Clusterer):
    """Global units θ_i ~ N(μ₀, σ₀²) are atoms of a Beta process of mass γ₀; each client picks a subset of them by a
    Bernoulli process and sees each with noise of variance σ². No two units of a client are the same global one.

    MAP inference removes one client, matches its units to the remaining atoms or to new ones by a linear assignment,
    and inserts it again: the widest client first, then all in random order, for at most `sweeps` sweeps; it returns the
    best state. `variance` is σ², `prior_variance` σ₀², `mass` γ₀ (small: no wider than the widest client; large: wide).
    Beyond `limit` global units a client may add no more than one."""

    ranges: ClassVar[Ranges] = {"variance": Range(0.1, 3.0), "mass": Range(1e-3, 50.0)}
    variance: Positive = 1.0
    prior_variance: Positive = 10.0
    mass: Positive = 1.0
    sweeps: Size = 5
    limit: Count = 700

    @property
    def name(self) -> str:
        return "PFNM"

    def prior(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        return mean / self.prior_variance, torch.full_like(mean, 1 / self.prior_variance)

    def evidence(self, precision: Tensor) -> Tensor:
        return precision / self.variance

    def popularity(self, m: Tensor, clients: int) -> Tensor:
        """2 log m/(J − m), the gain of an atom that m of J clients use."""
        return 2 * (m / (clients - m)).log()

    def own_popularity(self, used: Tensor, step: int) -> Tensor:
        """2 log (1 + m)/(s − m) at step s of a stream, the gain of an atom that the client itself has used m times."""
        return 2 * ((1 + used) / (step - used)).log()

    def opening_penalty(self, t: Tensor) -> Tensor:
        """2 log t, the price of the t-th new atom of an update. With it the objective may fall."""
        return 2 * t.log()

    def cluster(self, clients: Sequence[Units], mean: Tensor, known: Known | None, seed: int) -> Clusters:
        state = State(self, clients, mean, known)
        for j in sorted(range(len(clients)), key=lambda j: -len(clients[j])):
            state.update(j)
        best, trace = state.copy(), [state.objective()]
        orders = np.random.default_rng(seed)
        for _ in range(self.sweeps):
            before = len(trace) - 1
            for j in orders.permutation(len(clients)):
                state.update(int(j))
                trace.append(state.objective())
                if trace[-1] > best.value:
                    best = state.copy()
            if np.ptp(trace[before:]) <= SAME * abs(trace[-1]):
                break
        return state.at(best, trace)


@dataclass(frozen=True, eq=False)
class _Snapshot:
    value: float
    assignments: list[Tensor]
    units: int


class State:
    """The assignments of clients' units to atoms, and the atoms: natural parameters S_i, P_i, and m_i clients each.

    Coordinates in which all clients have the same precision need one precision an atom. The largest such group comes
    first (`common` coordinates), and there a sum over coordinates is a matrix product without scaling."""

    def __init__(self, model: BetaBernoulli, clients: Sequence[Units], mean: Tensor, known: Known | None) -> None:
        self.model, self.known, self.clients = model, known, len(clients)
        self.order, self.common = _by_precision([u.precision for u in clients], known)
        self.eta0, self.lam0 = (t[self.order] for t in model.prior(mean))
        self.precision = [model.evidence(units.precision)[self.order] for units in clients]
        self.evidence = [u.values[:, self.order] * p for u, p in zip(clients, self.precision, strict=True)]
        self.old = 0 if known is None else len(known.eta)  # atoms of earlier steps come first, and stay
        empty = mean.new_zeros(0, len(mean))
        s, p = (empty, empty) if known is None else (known.eta[:, self.order], known.lam[:, self.order])
        p = torch.cat([p[:, :1], p[:, self.common :]], dim=1)
        self._buffers = [s, p, torch.zeros(self.old, dtype=torch.int64), self._squares(s)]
        self._hold(self.old)
        self.assignments: list[Tensor | None] = [None] * self.clients
        self._step = 1 if known is None else int(known.step)
        self._open = 2 * (math.log(model.mass) - math.log(self._step * self.clients))
        self._nothing = float((self.eta0.square() / self.lam0).sum())
        self._start = (self._square / self.p).sum(1)  # the worth of atoms of earlier steps before this one
        self._narrowed = [self._narrow(p) for p in self.precision]
        self._own_squares = [self._squares(b) for b in self.evidence]
        self._opened = [
            ((self.eta0 + b).square() / (self.lam0 + p)).sum(1) - self._nothing + self._open
            for b, p in zip(self.evidence, self.precision, strict=True)
        ]  # the gain of units that open atoms

    def _hold(self, atoms: int) -> None:
        """Allocate rows for so many atoms, or drop the last ones. Buffers grow by half, so that few rows are copied."""
        lacking = atoms - len(self._buffers[0])
        if lacking > 0:
            more = lacking + len(self._buffers[0]) // 2
            self._buffers = [torch.cat([b, b.new_zeros(more, *b.shape[1:])]) for b in self._buffers]
        self.s, self.p, self.m, self._square = (b[:atoms] for b in self._buffers)

    def _narrow(self, precision: Tensor) -> Tensor:
        """A precision [D] in the stored form: one entry for all common coordinates."""
        return torch.cat([precision[:1], precision[self.common :]])

    def _squares(self, values: Tensor) -> Tensor:
        """v², summed over the common coordinates."""
        common, rest = values[:, : self.common], values[:, self.common :]
        return torch.cat([common.square().sum(1, keepdim=True), rest.square()], dim=1)

    def update(self, j: int) -> None:
        """One step of inference: remove client j, match it, and insert it again."""
        from scipy.optimize import linear_sum_assignment  # half a second to import

        before = self.assignments[j]
        own = 0 if before is None else int(((self.m[before] == 1) & (before >= self.old)).sum())
        self.remove(j)
        units, chosen = linear_sum_assignment(self.gains(j, own).T.numpy(), maximize=True)
        assert len(units) == len(self.evidence[j])  # there are never fewer columns than units
        self.insert(j, torch.from_numpy(chosen))

    def remove(self, j: int) -> None:
        """Remove client j, and the atoms that only it has used, except those of earlier steps."""
        mine = self.assignments[j]
        if mine is None:
            return
        self.assignments[j] = None
        self._add(mine, -1, j)
        gone = mine[(self.m[mine] == 0) & (mine >= self.old)]
        if not len(gone):
            return
        # The last atoms fill the gaps: all others keep their places.
        number = torch.arange(len(self.s))
        last = number[len(self.s) - len(gone) :]
        moved, free = last[~torch.isin(last, gone)], gone[gone < last[0]]
        for table in (self.s, self.p, self.m, self._square):
            table[free] = table[moved]
        number[moved] = free
        self._hold(len(self.s) - len(gone))
        self.assignments = [None if a is None else number[a] for a in self.assignments]

    def insert(self, j: int, chosen: Tensor) -> None:
        """Insert client j: unit l is atom chosen[l]; numbers beyond the present atoms open new ones."""
        before, fresh, chosen = len(self.s), chosen >= len(self.s), chosen.clone()
        # New atoms are numbered in the order of the units: numbers do not depend on the solver.
        chosen[fresh] = before + torch.arange(int(fresh.sum()))
        self._hold(before + int(fresh.sum()))
        self.s[before:], self.p[before:], self.m[before:] = self.eta0, self._narrow(self.lam0), 0
        self._add(chosen, 1, j)
        self.assignments[j] = chosen

    def _add(self, atoms: Tensor, sign: int, j: int) -> None:
        s = self.s[atoms].add_(self.evidence[j], alpha=sign)
        self.s[atoms], self._square[atoms] = s, self._squares(s)
        self.p[atoms] += sign * self._narrowed[j]
        self.m[atoms] += sign

    def gains(self, j: int, own: int = 0) -> Tensor:
        """The gain [G + new, L_j] of each atom from each unit of the removed client j; `own` atoms went with it.

        A match gains Σ_d (S + b)²/(P + p) − S²/P + 2 log m/(J − m), with b = v p and p the same for all units of a
        client: a few matrix products. The t-th new atom gains the same from the prior, + 2 log γ₀/J − 2 log t."""
        b, c = self.evidence[j], self.common
        r = 1 / (self.p + self._narrowed[j])
        matched = (self.s[:, :c] @ b[:, :c].T).mul_(2 * r[:, :1])
        matched += (2 * self.s[:, c:] * r[:, 1:]) @ b[:, c:].T + r @ self._own_squares[j].T
        matched += ((r - 1 / self.p) * self._square).sum(1, keepdim=True) + self._popularity(j).unsqueeze(1)
        size, room = len(b), self.model.limit - len(self.s)
        room = max(min(size, room), 1, size - len(self.s), own)  # removed atoms may be opened again
        penalty = self.model.opening_penalty(torch.arange(1, room + 1, dtype=b.dtype))
        return torch.cat([matched, self._opened[j] - penalty.unsqueeze(1)])

    def _popularity(self, j: int) -> Tensor:
        """The popularity of every atom for client j."""
        if self.known is None:
            return self.model.popularity(self.m.to(self.s.dtype), self.clients)
        own = torch.zeros(len(self.s), dtype=self.s.dtype)
        own[: self.old] = self.known.counts[j].to(own)
        return self.model.own_popularity(own, self._step)

    def objective(self) -> float:
        """Twice the log posterior of the matching, up to constants and the order of new atoms:
        F = Σ_i [‖S_i‖²/P_i − ‖S_0‖²/P_0 + 2 log γ₀/J + Σ_{m < m_i} 2 log m/(J − m)]."""
        opened = len(self.s) - self.old
        total = (self._square / self.p).sum() - self._start.sum() + (self._open - self._nothing) * opened
        if self.known is None:
            steps = self.model.popularity(torch.arange(1, self.clients).to(self.s.dtype), self.clients)
            total += torch.cat([steps.new_zeros(1), steps.cumsum(0)])[self.m - 1].sum()
        else:
            total += sum(self._popularity(j)[a].sum() for j, a in enumerate(self.assignments) if a is not None)
            # A client that opens an atom pays for that, and not for the use of an unused atom.
            total -= opened * self.model.own_popularity(self.s.new_zeros(()), self._step)
        return float(total)

    def copy(self) -> _Snapshot:
        """A copy of all assignments, with the objective."""
        done = [a.clone() for a in self.assignments if a is not None]
        assert len(done) == self.clients
        return _Snapshot(self.objective(), done, len(self.s))

    def at(self, best: _Snapshot, trace: list[float]) -> Clusters:
        """The global units of a copied state, summed anew."""
        eta, lam = self.eta0.repeat(best.units, 1), self.lam0.repeat(best.units, 1)
        if self.known is not None:
            eta[: self.old], lam[: self.old] = self.known.eta[:, self.order], self.known.lam[:, self.order]
        for b, p, a in zip(self.evidence, self.precision, best.assignments, strict=True):
            eta[a] += b
            lam[a] += p
        back = self.order.argsort()
        return Clusters(eta[:, back], lam[:, back], best.assignments, trace)


def _by_precision(precisions: Sequence[Tensor], known: Known | None) -> tuple[Tensor, int]:
    """An order of the coordinates with the largest group of equal precision at all clients first, and its size."""
    rows = torch.stack([*precisions, *([] if known is None else known.lam)])
    seen: dict[bytes, int] = {}
    group = torch.tensor([seen.setdefault(column.tobytes(), len(seen)) for column in rows.T.contiguous().numpy()])
    sizes = torch.bincount(group)
    first = group == sizes.argmax()
    return torch.cat([first.nonzero().flatten(), (~first).nonzero().flatten()]), int(sizes.max())
