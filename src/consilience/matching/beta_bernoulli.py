"""Matching by a Beta-Bernoulli process: the model behind PFNM (Yurochkin et al., 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from consilience.core.errors import ConfigError
from consilience.core.ranges import Range, Ranges
from consilience.matching.clusters import Clusterer, Clusters, Known, Units

SAME = 1e-12  # of the objective: a sweep that moves it less has changed nothing


@dataclass(frozen=True)
class BetaBernoulli(Clusterer):
    """Global units θ_i ~ N(μ₀, σ₀²) are atoms of a Beta process of mass γ₀; each client picks a subset of them by a
    Bernoulli process and sees each with noise of variance σ². No two units of a client are the same global one.

    MAP inference takes one client out, matches its units to what is left or to new atoms by a linear assignment, and
    puts it back: widest client first, then all in random order, for at most `sweeps` sweeps; the best state is kept.
    `variance` is σ², `prior_variance` σ₀², `mass` γ₀ (small: no wider than the widest client; large: wide).
    `popularity_weight` is the weight of log m/(J − m): 2 as derived, 1 as printed in the paper. `popularity_cap` bounds
    m there (the authors' code: 10). Beyond `limit` global units a client may add no more than one.
    Without `new_penalty` the −2 log t for the t-th new atom is left out, and the objective can never fall.
    """

    ranges: ClassVar[Ranges] = {"variance": Range(0.1, 3.0), "mass": Range(1e-3, 50.0)}
    variance: float = 1.0
    prior_variance: float = 10.0
    mass: float = 1.0
    sweeps: int = 5
    popularity_weight: float = 2.0
    popularity_cap: int | None = None
    limit: int = 700
    new_penalty: bool = True

    def __post_init__(self) -> None:
        for name in ("variance", "prior_variance", "mass"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a positive number, got {getattr(self, name)}")
        for name, low in {"sweeps": 0, "popularity_weight": 0, "popularity_cap": 1, "limit": 1}.items():
            value = getattr(self, name)
            if value is not None and not value >= low:
                raise ConfigError(f"{name} must be at least {low}, got {value}")

    @property
    def name(self) -> str:
        """After the paper."""
        return "PFNM"

    def prior(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """(μ₀/σ₀², 1/σ₀²)."""
        return mean / self.prior_variance, torch.full_like(mean, 1 / self.prior_variance)

    def evidence(self, precision: Tensor) -> Tensor:
        """1/σ² for a plain observation."""
        return precision / self.variance

    def cluster(self, clients: Sequence[Units], mean: Tensor, known: Known | None, seed: int) -> Clusters:
        """Take out, match, put back, until nothing changes or the sweeps are over."""
        state = Buffet(self, clients, mean, known)
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


class Buffet:
    """Who has which atom (dish), and what the atoms are: S_i, P_i in natural parameters, m_i clients each. All that
    changes when a client leaves the table or sits down again.

    Coordinates that every client knows equally well have one precision an atom. The largest such group comes first
    (`common` of them), and there a sum over coordinates is a matrix product without any scaling.
    """

    def __init__(self, model: BetaBernoulli, clients: Sequence[Units], mean: Tensor, known: Known | None) -> None:
        self.model, self.known, self.clients = model, known, len(clients)
        self.order, self.common = _by_precision([u.precision for u in clients], known)
        self.eta0, self.lam0 = (t[self.order] for t in model.prior(mean))
        self.precision = [model.evidence(units.precision)[self.order] for units in clients]
        self.evidence = [u.values[:, self.order] * p for u, p in zip(clients, self.precision, strict=True)]
        self.old = 0 if known is None else len(known.eta)  # atoms of earlier steps come first, and never die
        empty = mean.new_zeros(0, len(mean))
        s, p = (empty, empty) if known is None else (known.eta[:, self.order], known.lam[:, self.order])
        p = torch.cat([p[:, :1], p[:, self.common :]], dim=1)
        self._buffers = [s, p, torch.zeros(self.old, dtype=torch.int64), self._squares(s)]
        self._hold(self.old)
        self.assignments: list[Tensor | None] = [None] * self.clients
        self._step = 1 if known is None else int(known.step)
        self._open = 2 * (math.log(model.mass) - math.log(self._step * self.clients))
        self._nothing = float((self.eta0.square() / self.lam0).sum())
        self._start = (self._square / self.p).sum(1)  # what atoms of earlier steps were worth before this one
        self._narrowed = [self._narrow(p) for p in self.precision]
        self._own_squares = [self._squares(b) for b in self.evidence]
        self._alone = [
            ((self.eta0 + b).square() / (self.lam0 + p)).sum(1) - self._nothing + self._open
            for b, p in zip(self.evidence, self.precision, strict=True)
        ]  # what units gain by atoms of their own

    def _hold(self, atoms: int) -> None:
        """Make room for so many atoms, or leave out the last ones. Buffers grow by half, so that few rows are moved."""
        lacking = atoms - len(self._buffers[0])
        if lacking > 0:
            more = lacking + len(self._buffers[0]) // 2
            self._buffers = [torch.cat([b, b.new_zeros(more, *b.shape[1:])]) for b in self._buffers]
        self.s, self.p, self.m, self._square = (b[:atoms] for b in self._buffers)

    def _narrow(self, precision: Tensor) -> Tensor:
        """A precision [D] as it is kept: once for all common coordinates."""
        return torch.cat([precision[:1], precision[self.common :]])

    def _squares(self, values: Tensor) -> Tensor:
        """v², summed over the common coordinates."""
        common, rest = values[:, : self.common], values[:, self.common :]
        return torch.cat([common.square().sum(1, keepdim=True), rest.square()], dim=1)

    def update(self, j: int) -> None:
        """One step of inference: client j leaves, is matched, and sits down again."""
        from scipy.optimize import linear_sum_assignment  # half a second of every start, if it stood above

        before = self.assignments[j]
        own = 0 if before is None else int(((self.m[before] == 1) & (before >= self.old)).sum())
        self.leave(j)
        units, chosen = linear_sum_assignment(self.gains(j, own).T.numpy(), maximize=True)
        assert len(units) == len(self.evidence[j])  # there are never fewer columns than units
        self.join(j, torch.from_numpy(chosen))

    def leave(self, j: int) -> None:
        """Take client j out; atoms that were its own alone are gone, unless they come from an earlier step."""
        mine = self.assignments[j]
        if mine is None:
            return
        self.assignments[j] = None
        self._add(mine, -1, j)
        gone = mine[(self.m[mine] == 0) & (mine >= self.old)]
        if not len(gone):
            return
        # The last atoms move to where others have gone: all else stays in its place.
        number = torch.arange(len(self.s))
        last = number[len(self.s) - len(gone) :]
        moved, free = last[~torch.isin(last, gone)], gone[gone < last[0]]
        for table in (self.s, self.p, self.m, self._square):
            table[free] = table[moved]
        number[moved] = free
        self._hold(len(self.s) - len(gone))
        self.assignments = [None if a is None else number[a] for a in self.assignments]

    def join(self, j: int, chosen: Tensor) -> None:
        """Put client j back: unit l is atom chosen[l]; numbers beyond the atoms there are open new ones."""
        before, fresh, chosen = len(self.s), chosen >= len(self.s), chosen.clone()
        # New atoms are numbered in the order of the units, so that numbering does not depend on the solver.
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
        """What each atom [G + new] would gain from each unit [L_j] of client j, who is out; `own` atoms were its own.

        Matching gains Σ_d (S + b)²/(P + p) − S²/P + w log m/(J − m), with b = v p and p the same for all units of a
        client: a few matrix products. The t-th new atom gains the same from the prior, + 2 log γ₀/J − 2 log t.
        """
        b, c = self.evidence[j], self.common
        r = 1 / (self.p + self._narrowed[j])
        matched = (self.s[:, :c] @ b[:, :c].T).mul_(2 * r[:, :1])
        matched += (2 * self.s[:, c:] * r[:, 1:]) @ b[:, c:].T + r @ self._own_squares[j].T
        matched += ((r - 1 / self.p) * self._square).sum(1, keepdim=True) + self._popularity(j).unsqueeze(1)
        size, room = len(b), self.model.limit - len(self.s)
        room = max(min(size, room), 1, size - len(self.s), own)  # who was let in once may stay
        ranks = torch.arange(1, room + 1, dtype=b.dtype).log() if self.model.new_penalty else b.new_zeros(room)
        return torch.cat([matched, self._alone[j] - 2 * ranks.unsqueeze(1)])

    def _popularity(self, j: int) -> Tensor:
        """w log m/(J − m) of every atom, for client j; in a stream m is how often j itself has used the atom, and
        w log (1 + m)/(s − m) at step s."""
        if self.known is None:
            return self._log_odds(self.m)
        own = torch.zeros(len(self.s), dtype=self.s.dtype)
        own[: self.old] = self.known.counts[j].to(own)
        return self.model.popularity_weight * ((1 + own) / (self._step - own)).log()

    def _log_odds(self, m: Tensor) -> Tensor:
        m = m.clamp_max(self.model.popularity_cap or self.clients).to(self.s.dtype)
        return self.model.popularity_weight * (m / (self.clients - m)).log()

    def objective(self) -> float:
        """Twice the log posterior of the matching, up to constants and the order of new atoms:
        F = Σ_i [‖S_i‖²/P_i − ‖S_0‖²/P_0 + 2 log γ₀/J + Σ_{m < m_i} w log m/(J − m)]."""
        opened = len(self.s) - self.old
        total = (self._square / self.p).sum() - self._start.sum() + (self._open - self._nothing) * opened
        if self.known is None:
            steps = self._log_odds(torch.arange(1, self.clients))
            total += torch.cat([steps.new_zeros(1), steps.cumsum(0)])[self.m - 1].sum()
        else:
            total += sum(self._popularity(j)[a].sum() for j, a in enumerate(self.assignments) if a is not None)
            # Who opens an atom pays for that, and not for using one that nobody has used before.
            total -= opened * self.model.popularity_weight * math.log(1 / self._step)
        return float(total)

    def copy(self) -> _Snapshot:
        """The assignments of all clients, and what they are worth."""
        done = [a.clone() for a in self.assignments if a is not None]
        assert len(done) == self.clients
        return _Snapshot(self.objective(), done, len(self.s))

    def at(self, best: _Snapshot, trace: list[float]) -> Clusters:
        """The global units of a state, summed afresh."""
        eta, lam = self.eta0.repeat(best.units, 1), self.lam0.repeat(best.units, 1)
        if self.known is not None:
            eta[: self.old], lam[: self.old] = self.known.eta[:, self.order], self.known.lam[:, self.order]
        for b, p, a in zip(self.evidence, self.precision, best.assignments, strict=True):
            eta[a] += b
            lam[a] += p
        back = self.order.argsort()
        return Clusters(eta[:, back], lam[:, back], best.assignments, trace)


def _by_precision(precisions: Sequence[Tensor], known: Known | None) -> tuple[Tensor, int]:
    """An order of the coordinates in which the largest group that everyone knows equally well comes first, and its
    size."""
    rows = torch.stack([*precisions, *([] if known is None else known.lam)])
    seen: dict[bytes, int] = {}
    group = torch.tensor([seen.setdefault(column.tobytes(), len(seen)) for column in rows.T.contiguous().numpy()])
    sizes = torch.bincount(group)
    first = group == sizes.argmax()
    return torch.cat([first.nonzero().flatten(), (~first).nonzero().flatten()]), int(sizes.max())
