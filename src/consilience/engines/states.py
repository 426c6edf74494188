"""Client states between rounds: on the device, on the host, or in files."""

import os
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm
from consilience.core.errors import CheckpointError, RecordError
from consilience.core.files import CHECKPOINTS, private_folder, read_file, write_atomically
from consilience.core.records import Tree, check, nbytes, rows, stack, to, tree_map
from consilience.core.seals import seal, unseal
from consilience.data import Federation, Info
from consilience.engines.work import check_rows
from consilience.tasks.task import Task

Fresh = Callable[[Tensor], Tree]
WRITERS = 4  # threads that write files of states
_FILE, _UNFINISHED = re.compile(r"(\d+)-(\d+)\.safetensors"), re.compile(r"\.(\d+)-")


def fresh_states(
    algorithm: Algorithm, task: Task, federation: Federation, server: Tree, ids: Tensor, seed: int
) -> Tree:
    """The states of clients that begin now, around the server's present mean."""
    mean, initial = algorithm.posterior(server).mean, task.initial()
    numbers = (torch.tensor(value) for value in (seed, len(federation), federation.examples))
    info = Info(mean if mean.shape == initial.shape else initial, *numbers)
    return algorithm.client(task, info, federation.sizes[ids].to(initial).unsqueeze(1))


class States(ABC):
    """The states of all clients, kept on `device`. A client that never took part has the state `fresh(ids)`."""

    known = True
    """Whether they are here; else only the clients have them."""

    def __init__(self, fresh: Fresh, device: torch.device | str = "cpu") -> None:
        self._fresh, self.device = fresh, torch.device(device)

    @cached_property
    def _one(self) -> Tree:
        return self._made(torch.tensor([0]))

    def _made(self, ids: Tensor) -> Tree:
        made = self._fresh(ids)
        check_rows(made, len(ids), "client")
        return to(made, self.device)

    def gather(self, ids: Tensor) -> Tree:
        """The states of `ids`, stacked; None for a stateless method."""
        if not len(ids):
            return rows(self._one, slice(0))
        new = [i for i, client in enumerate(ids.tolist()) if client not in self]
        made = self._made(ids[new]) if new else self._one
        if made is None or len(new) == len(ids):
            return made
        at = {i: row for row, i in enumerate(new)}
        return stack([rows(made, at[i]) if i in at else self._read(int(c), made) for i, c in enumerate(ids)])

    @property
    def local(self) -> "States":
        """The states that are kept here, where several ranks share the clients."""
        return self

    def lent(self, ids: Tensor, hands: Sequence[slice | Tensor]) -> Tree:
        """The states of the clients `ids[hands[rank]]`, which this rank computes in a round."""
        return self.gather(ids[hands[0]])

    def complete(self) -> "States":
        """The states of all clients, for use after the run."""
        return self

    def commit(self, ids: Tensor, states: Tree, round: int) -> None:
        """Keep the new states of clients whose updates were accepted. Shapes and dtypes must not change."""
        if not len(ids):
            return
        check(states, tree_map(lambda leaf: leaf.expand(len(ids), *leaf.shape[1:]), self._one), "client state")
        if states is None:
            return
        for i, client in enumerate(ids.tolist()):
            self._write(client, rows(states, i), round)

    @abstractmethod
    def __contains__(self, client: int) -> bool:
        """Whether the client took part before."""

    @abstractmethod
    def _read(self, client: int, like: Tree) -> Tree:
        """A client's state, which must have the shapes of a row of `like`."""

    @abstractmethod
    def _write(self, client: int, state: Tree, round: int) -> None:
        """Keep a client's state."""

    @abstractmethod
    def snapshot(self) -> Tree:
        """The states as a checkpoint holds them."""

    @abstractmethod
    def restore(self, saved: Tree) -> None:
        """Return to a snapshot."""

    @abstractmethod
    def remove(self, client: int) -> None:
        """Forget a client's state, as if it had never taken part."""

    def forget(self, saved: Tree, spared: Sequence[Tree] = ()) -> None:  # noqa: B027 (states in memory have no files)
        """`saved` is now in a checkpoint: drop files that no kept checkpoint needs, nor any of `spared`."""


class InMemory(States):
    """States in memory. A checkpoint holds them all."""

    def __init__(self, fresh: Fresh, device: torch.device | str = "cpu") -> None:
        super().__init__(fresh, device)
        self._rows: dict[int, Tree] = {}

    def __contains__(self, client: int) -> bool:
        return client in self._rows

    def _read(self, client: int, like: Tree) -> Tree:
        return self._rows[client]

    def _write(self, client: int, state: Tree, round: int) -> None:
        self._rows[client] = tree_map(torch.clone, state)  # a view would keep the whole cohort in memory

    def remove(self, client: int) -> None:
        self._rows.pop(client, None)

    def clients(self) -> list[int]:
        """The clients that have a state."""
        return list(self._rows)

    def snapshot(self) -> Tree:
        """(ids, stacked rows), or None if no client has a state."""
        if not self._rows:
            return None
        clients = sorted(self._rows)
        return torch.tensor(clients), stack([to(self._rows[c], "cpu") for c in clients])

    def restore(self, saved: Tree) -> None:
        if isinstance(saved, Tensor):
            raise CheckpointError("the client states of this checkpoint are in files")
        self._rows = (
            {} if saved is None else {c: to(rows(saved[1], i), self.device) for i, c in enumerate(saved[0].tolist())}
        )


class OnDisk(States):
    """States in immutable files, one for each client and round. The checkpoint holds the map client → round. A file
    that a checkpoint names is never written again, so a kill leaves both consistent.

    Files are written for a checkpoint. Up to `room` bytes on `device` hold the states that were committed last; states
    that do not fit are written at once. Files are sealed with the id of the `run`, the client and the round. Those of
    the newest `keep` checkpoints are kept. Of several ranks that share a folder each has a `share` (rank, size): the
    clients rank, rank + size, …
    """

    def __init__(
        self,
        fresh: Fresh,
        folder: Path,
        room: int = 0,
        device: torch.device | str = "cpu",
        run: str = "",
        keep: int = CHECKPOINTS,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        super().__init__(fresh, device)
        self._folder, self._room, self._run, self._keep, self._share = folder, room, run, keep, share
        self._round: dict[int, int] = {}
        self._held: dict[int, Tree] = {}  # in the order of their last commits
        self._unwritten: set[int] = set()
        private_folder(folder)
        self._kept: deque[Tensor] = deque([self._stored()] * keep, maxlen=keep)  # those of a stage before
        self._left: list[tuple[int, int]] | None = None  # files that were replaced since; None if only the folder knows

    def _about(self, client: int) -> dict[str, str]:
        return {"run": self._run, "client": str(client), "round": str(self._round[client])}

    def _path(self, client: int, round: int) -> Path:
        return self._folder / f"{client}-{round}.safetensors"

    def __contains__(self, client: int) -> bool:
        return client in self._round

    def _read(self, client: int, like: Tree) -> Tree:
        if client in self._held:
            return self._held[client]
        path = self._path(client, self._round[client])
        try:
            return to(unseal(read_file(path), like=rows(like, 0), **self._about(client)), self.device)
        except (OSError, RecordError) as error:
            raise CheckpointError(
                f"the state of client {client} cannot be read from {path}: {error}. Restore the file from a backup, or "
                "go back to an earlier checkpoint by `consilience rewind`"
            ) from error

    def _write(self, client: int, state: Tree, round: int) -> None:
        self._replaced(client)
        self._round[client] = round
        self._unwritten.add(client)
        self._held.pop(client, None)
        self._held[client] = tree_map(torch.clone, state)
        most = self._room // max(1, nbytes(state))
        while len(self._held) > most:
            oldest = next(iter(self._held))
            self._file(oldest)
            del self._held[oldest]

    def _file(self, client: int) -> None:
        """Write a client's state, if it is in no file yet."""
        if client in self._unwritten:
            sealed = seal(self._held[client], **self._about(client))
            write_atomically(self._path(client, self._round[client]), sealed, private=True)
            self._unwritten.remove(client)

    def _replaced(self, client: int) -> None:
        """Note that a client's present file will not be needed by later checkpoints."""
        if self._left is not None and client in self._round:
            self._left.append((client, self._round[client]))

    def remove(self, client: int) -> None:
        self._replaced(client)
        self._round.pop(client, None)
        self._held.pop(client, None)
        self._unwritten.discard(client)

    def _map(self) -> Tensor:
        """The clients that have a state, and the state's round, [clients, 2]."""
        found = torch.tensor([[*self._round], [*self._round.values()]], dtype=torch.int64).T
        return found[found[:, 0].argsort()]

    def snapshot(self) -> Tree:
        """The map, after all its states are written."""
        with ThreadPoolExecutor(WRITERS) as pool:
            list(pool.map(self._file, tuple(self._unwritten)))
        return self._map()

    def restore(self, saved: Tree) -> None:
        self._round = dict(saved.tolist()) if isinstance(saved, Tensor) else {}
        self._held, self._unwritten, self._left = {}, set(), None
        if isinstance(saved, tuple):  # of a run that kept them in memory: they are written with the next checkpoint
            for i, client in enumerate(saved[0].tolist()):
                self._write(client, to(rows(saved[1], i), self.device), 0)
        elif saved is not None:  # earlier checkpoints may name any earlier file
            stored = self._stored()
            earlier = stored[stored[:, 1] <= max(self._round.values(), default=0)]
            self._kept.extend([*[earlier] * (self._keep - 1), saved])

    def _stored(self) -> Tensor:
        """The clients and rounds of all files, [files, 2]."""
        found = (_FILE.fullmatch(name) for name in os.listdir(self._folder))
        pairs = [(int(name[1]), int(name[2])) for name in found if name and self._is_mine(int(name[1]))]
        return torch.tensor(pairs, dtype=torch.int64).view(-1, 2)

    def _is_mine(self, client: int) -> bool:
        rank, size = self._share
        return client % size == rank

    def of_all(self, saved: Tensor) -> "OnDisk":
        """The states of all ranks' clients, whose files `saved` names."""
        whole = OnDisk(self._fresh, self._folder, device=self.device, run=self._run, keep=self._keep)
        whole.restore(saved)
        return whole

    def forget(self, saved: Tree, spared: Sequence[Tree] = ()) -> None:
        """Delete files that neither the kept checkpoints nor the present states name. After the first time only files
        that were replaced since are looked at, so that the cost does not grow with the number of clients' files."""
        self._kept.append(saved)
        if self._left is None:
            self._left = [(client, round) for client, round in self._stored().tolist()]
            for entry in os.scandir(self._folder):
                other = _UNFINISHED.match(entry.name)
                if other and self._is_mine(int(other[1])):
                    os.unlink(entry.path)
        found = torch.tensor(self._left, dtype=torch.int64).view(-1, 2)
        present = torch.tensor([self._round.get(client) == round for client, round in self._left], dtype=torch.bool)
        named = torch.zeros_like(present)
        for kept in (*self._kept, *(pairs for pairs in spared if isinstance(pairs, Tensor))):
            named |= torch.isin(_joint(found), _joint(kept))
        for client, round in found[~(named | present)].tolist():
            self._path(client, round).unlink(missing_ok=True)
        self._left = [(client, round) for client, round in found[named & ~present].tolist()]


def _joint(pairs: Tensor) -> Tensor:
    """Clients and rounds [N, 2] as one number each."""
    return (pairs[:, 0] << 32) + pairs[:, 1]
