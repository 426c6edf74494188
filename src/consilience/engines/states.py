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
from consilience.core.errors import CheckpointError, ConfigError, RecordError
from consilience.core.files import CHECKPOINTS, private_folder, read_file, write_atomically
from consilience.core.records import Tree, check, nbytes, rows, stack, to, tree_map
from consilience.core.seals import seal, unseal
from consilience.data import Federation, Info
from consilience.engines.ranks import Ranks
from consilience.engines.work import check_rows
from consilience.tasks.task import Task

Fresh = Callable[[Tensor], Tree]
DEVICE_SHARE = 0.4  # of a GPU's free memory that client states may take
WRITERS = 4  # threads that write files of states
_FILE = re.compile(r"(\d+)-(\d+)\.safetensors")


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
        new = [i for i, client in enumerate(ids.tolist()) if client not in self]
        made = self._made(ids[new]) if new else self._one
        if made is None or len(new) == len(ids):
            return made
        at = {i: row for row, i in enumerate(new)}
        return stack([rows(made, at[i]) if i in at else self._read(int(c), made) for i, c in enumerate(ids)])

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

    def snapshot(self) -> Tree:
        """(ids, stacked rows), or None if no client has a state."""
        if not self._rows:
            return None
        clients = sorted(self._rows)
        return torch.tensor(clients), stack([to(self._rows[c], "cpu") for c in clients])

    def restore(self, saved: Tree) -> None:
        if isinstance(saved, Tensor):
            raise CheckpointError("the run keeps the client states in files: give the same state_memory")
        self._rows = (
            {} if saved is None else {c: to(rows(saved[1], i), self.device) for i, c in enumerate(saved[0].tolist())}
        )


class OnDisk(States):
    """States in immutable files, one for each client and round. The checkpoint holds the map client → round. A file
    that a checkpoint names is never written again, so a kill leaves both consistent.

    Files are written for a checkpoint. Up to `room` bytes on `device` hold the states that were committed last; states
    that do not fit are written at once. Of several ranks that share a folder only one `writes`, and `room` must be 0,
    so that the others read its files. Files are sealed with the id of the `run`, the client and the round. Those of the
    newest `keep` checkpoints are kept.
    """

    def __init__(
        self,
        fresh: Fresh,
        folder: Path,
        writes: bool = True,
        room: int = 0,
        device: torch.device | str = "cpu",
        run: str = "",
        keep: int = CHECKPOINTS,
    ) -> None:
        super().__init__(fresh, device)
        self._folder, self._writes, self._room, self._run, self._keep = folder, writes, room, run, keep
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
            if self._writes:
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
        if not isinstance(saved, Tensor | None):
            raise CheckpointError("the run keeps the client states in memory: give the same state_memory")
        self._round = {} if saved is None else dict(saved.tolist())
        self._held, self._unwritten, self._left = {}, set(), None
        if saved is not None:  # earlier checkpoints may name any earlier file
            stored = self._stored()
            earlier = stored[stored[:, 1] <= max(self._round.values(), default=0)]
            self._kept.extend([*[earlier] * (self._keep - 1), saved])

    def _stored(self) -> Tensor:
        """The clients and rounds of all files, [files, 2]."""
        found = (_FILE.fullmatch(name) for name in os.listdir(self._folder))
        return torch.tensor([(int(name[1]), int(name[2])) for name in found if name], dtype=torch.int64).view(-1, 2)

    def forget(self, saved: Tree, spared: Sequence[Tree] = ()) -> None:
        """Delete files that neither the kept checkpoints nor the present states name. After the first time only files
        that were replaced since are looked at, so that the cost does not grow with the number of clients' files."""
        self._kept.append(saved)
        if self._left is None:
            self._left = [(client, round) for client, round in self._stored().tolist()]
            for entry in os.scandir(self._folder):
                if not _FILE.fullmatch(entry.name):
                    os.unlink(entry.path)
        found = torch.tensor(self._left, dtype=torch.int64).view(-1, 2)
        present = torch.tensor([self._round.get(client) == round for client, round in self._left], dtype=torch.bool)
        named = torch.zeros_like(present)
        for kept in (*self._kept, *spared):
            named |= torch.isin(_joint(found), _joint(kept))
        for client, round in found[~(named | present)].tolist():
            self._path(client, round).unlink(missing_ok=True)
        self._left = [(client, round) for client, round in found[named & ~present].tolist()]


def _joint(pairs: Tensor) -> Tensor:
    """Clients and rounds [N, 2] as one number each."""
    return (pairs[:, 0] << 32) + pairs[:, 1]


def place_states(
    fresh: Fresh,
    clients: int,
    device: torch.device,
    memory: int,
    folder: Path | None,
    ranks: Ranks,
    run: str,
    keep: int,
) -> States:
    """States on the device while they take little of its memory, else on the host, else in files.

    States that need more than `memory` bytes go to files in `folder`, at the latest for a checkpoint, which could not
    hold them all. There they are sealed with the id of the `run`, and `keep` checkpoints may name them."""
    expected = nbytes(fresh(torch.tensor([0]))) * clients
    if device.type != "cuda" or ranks.any(expected >= DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]):
        device = torch.device("cpu")
    on_host = device.type == "cpu"
    if expected <= memory or (folder is None and not on_host):
        return InMemory(fresh, device)
    if folder is None:
        raise ConfigError(
            f"the client states need {expected / 2**30:.1f} GiB, more than state_memory ({memory / 2**30:.1f} GiB): "
            "pass out= so that they can be kept in files"
        )
    if ranks.size > 1:
        return OnDisk(fresh, folder, ranks.leads, run=run, keep=keep)
    return OnDisk(fresh, folder, room=memory if on_host else expected, device=device, run=run, keep=keep)
