"""Client states of several ranks, of which each keeps those of its own clients."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from consilience.core.records import Tree, blueprint, rows, tree_map
from consilience.engines.ranks import Ranks
from consilience.engines.states import Fresh, InMemory, OnDisk, States

T = TypeVar("T")
PIECE = 64  # clients whose states are sent at once


class Peers(Ranks):
    """Ranks that can send each other states."""

    leading = False
    """Whether this rank works for all (`led`), while the others wait for its requests."""

    @abstractmethod
    def ask(self, request: dict[str, Any]) -> None:
        """Let the ranks that wait do what this one does now."""

    @abstractmethod
    def answer_by(self, answer: Callable[[dict[str, Any]], None]) -> None:
        """What this rank does for requests of the one that leads."""

    @abstractmethod
    def agreed(self, work: Callable[[], T]) -> T:
        """This rank's result of work that all ranks do; a failure in one is raised in all."""

    @abstractmethod
    def told(self, words: list[int]) -> list[list[int]]:
        """What each rank tells all."""

    @abstractmethod
    def rows(self, tree: Tree, plan: dict[str, Any], counts: list[int]) -> Tree:
        """All ranks' rows, in the order of ranks, of which this one gives counts[rank]."""


class Sharded(States):
    """The states of all clients. Rank r keeps those of the clients r, r + size, r + 2 size, … in `local`.

    Outside of rounds all ranks call a method together, or rank 0 alone while it works for all (`Ranks.led`). In a round
    `lent` gives each rank the states of the clients that it is dealt. A client that is computed by another rank than
    its own is a guest there: its state is sent, and the new one is sent back by `commit`.
    """

    def __init__(self, local: States, fresh: Fresh, peers: Peers) -> None:
        super().__init__(fresh, local.device)
        self._local, self._peers, self._guests = local, peers, False
        peers.answer_by(self._answer)

    @property
    def local(self) -> States:
        return self._local

    def _home(self, ids: Tensor) -> Tensor:
        return ids % self._peers.size

    def _answer(self, request: dict[str, Any]) -> None:
        if "gather" in request:
            self._gathered(torch.tensor(request["gather"], dtype=torch.int64))
        elif "forget" in request:
            saved, *spared = (torch.tensor(pairs, dtype=torch.int64).view(-1, 2) for pairs in request["forget"])
            self._forgotten(saved, spared)
        else:
            self._map()

    def gather(self, ids: Tensor) -> Tree:
        if self._one is None:
            return None
        if self._peers.leading:
            self._peers.ask({"gather": ids.tolist()})
        return self._gathered(ids)

    def _gathered(self, ids: Tensor) -> Tree:
        """The states of the same clients, in all ranks."""
        home = self._home(ids)
        mine = self._peers.agreed(lambda: self._local.gather(ids[home == self._peers.rank]))
        counts = torch.bincount(home, minlength=self._peers.size).tolist()
        found = self._peers.rows(mine, blueprint(self._one), counts)
        return rows(found, home.argsort(stable=True).argsort())

    def lent(self, ids: Tensor, hands: Sequence[slice | Tensor]) -> Tree:
        if self._one is None:
            return None
        rank, home, host = self._peers.rank, self._home(ids), torch.empty_like(ids)
        for other, hand in enumerate(hands):
            host[hand] = other
        away = home != host
        self._guests = bool(away.any())
        own = ids[home == rank]
        known = self._peers.agreed(lambda: self._local.gather(own))
        if not self._guests:
            return rows(known, _places(ids[host == rank], own))
        sent = [ids[away & (home == other)] for other in range(self._peers.size)]
        guests = self._peers.rows(rows(known, _places(sent[rank], own)), blueprint(self._one), list(map(len, sent)))
        everyone = torch.cat([own, *sent])
        return rows(tree_map(lambda a, b: torch.cat([a, b]), known, guests), _places(ids[host == rank], everyone))

    def commit(self, ids: Tensor, states: Tree, round: int) -> None:
        """Keep the new states of the clients `ids`, which this rank has computed. All ranks call this together."""
        if self._one is None:
            return
        states = states if len(ids) else rows(self._one, slice(0))
        here = self._home(ids) == self._peers.rank
        self._peers.agreed(lambda: self._local.commit(ids[here], rows(states, here), round))
        if not self._guests:
            return
        told = self._peers.told(ids[~here].tolist())
        found = self._peers.rows(rows(states, ~here), blueprint(self._one), list(map(len, told)))
        back = torch.tensor([client for one in told for client in one], dtype=torch.int64)
        mine = self._home(back) == self._peers.rank
        self._peers.agreed(lambda: self._local.commit(back[mine], rows(found, mine), round))

    def snapshot(self) -> Tree:
        """What a checkpoint holds of all ranks' states, which are in files, if rank 0 asks; else this rank's own."""
        if self._one is None or not self._peers.leading:
            return self._local.snapshot()
        self._peers.ask({})
        return self._map()

    def _map(self) -> Tensor:
        """The clients that have a state, and the state's round, [clients, 2], after all ranks have written theirs."""
        mine = self._peers.agreed(self._local.snapshot)
        counts = [count for (count,) in self._peers.told([len(mine)])]
        found: Tensor = self._peers.rows(mine, blueprint(mine), counts)
        return found[found[:, 0].argsort()]

    def restore(self, saved: Tree) -> None:
        """Return to a snapshot of all ranks, or of this one."""
        if saved is not None:
            clients = saved[:, 0] if isinstance(saved, Tensor) else saved[0]
            mine = self._home(clients) == self._peers.rank
            saved = rows(saved, mine) if isinstance(saved, Tensor) or mine.any() else None
        self._local.restore(saved)

    def forget(self, saved: Tree, spared: Sequence[Tree] = ()) -> None:
        if self._one is not None:
            spared = [pairs for pairs in spared if isinstance(pairs, Tensor)]
            self._peers.ask({"forget": [pairs.tolist() for pairs in (saved, *spared)]})
            self._forgotten(saved, spared)

    def _forgotten(self, saved: Tensor, spared: Sequence[Tensor]) -> None:
        maps = [pairs[self._home(pairs[:, 0]) == self._peers.rank] for pairs in (saved, *spared)]
        self._peers.agreed(lambda: self._local.forget(maps[0], maps[1:]))

    def complete(self) -> States:
        """The states of all clients, in this rank: read from the files, or copied from the others."""
        if self._one is None:
            return self._local
        if isinstance(self._local, OnDisk):
            return self._local.of_all(self._map())
        assert isinstance(self._local, InMemory)
        whole, taken = InMemory(self._fresh, self.device), self._peers.told(self._local.clients())
        clients = torch.tensor(sorted(client for some in taken for client in some), dtype=torch.int64)
        for piece in torch.split(clients, PIECE):
            whole.commit(piece, self._gathered(piece), 0)
        return whole

    def __contains__(self, client: int) -> bool:
        return client in self._local

    def _read(self, client: int, like: Tree) -> Tree:
        return rows(self.gather(torch.tensor([client])), 0)

    def _write(self, client: int, state: Tree, round: int) -> None:
        raise NotImplementedError("states of several ranks are written by commit")

    def remove(self, client: int) -> None:
        self._local.remove(client)


def _places(some: Tensor, of: Tensor) -> Tensor:
    """Where each of some clients is in a list of clients."""
    order = of.argsort()
    return order[torch.searchsorted(of[order], some)]
