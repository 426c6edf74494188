"""The checked updates of an attempt: added up as they arrive, or kept one by one for methods that need them so."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

import torch

from consilience.core.errors import CheckpointError, RecordError
from consilience.core.files import below, explained, named, private_folder, read_file, write_atomically
from consilience.core.records import Tree, tree_map
from consilience.core.seals import seal, unseal
from consilience.flower.updates import LARGE, magnitude
from consilience.secure import Fold

FOLDER = "arriving"


class Spill:
    """Updates in files, one a client, in a private folder of `root`. They outlive neither the attempt nor, in the end,
    a server that is killed: the next one calls `clear` when it starts."""

    def __init__(self, root: Path, like: Tree = None) -> None:
        self._folder, self._like = below(root, FOLDER), like

    def clear(self) -> None:
        """Delete the folder."""
        if self._folder.exists():
            with explained(self._folder), named(self._folder):
                shutil.rmtree(self._folder)

    def write(self, client: int, update: Tree) -> None:
        """Keep the update of a client."""
        with explained(self._folder):
            private_folder(self._folder)
            write_atomically(self._path(client), seal(update, client=str(client)), private=True, lasting=False)

    def read(self, client: int) -> Tree:
        """The update of a client."""
        path = self._path(client)
        try:
            return unseal(read_file(path), self._like, client=str(client))
        except (OSError, RecordError) as error:
            raise CheckpointError(
                f"the update in {path} cannot be read ({error}): look after the disk and run the app again, which "
                "computes the round again"
            ) from error

    def drop(self, client: int) -> None:
        """Delete the update of a client."""
        self._path(client).unlink(missing_ok=True)

    def _path(self, client: int) -> Path:
        return self._folder / f"{client}.safetensors"


class Updates(ABC):
    """The updates that are accepted so far. `sizes` are their magnitudes by client."""

    def __init__(self) -> None:
        self.sizes: dict[int, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def take(self, client: int, update: Tree) -> None:
        """Accept a client's update; a RecordError if it cannot be one of them."""
        size = magnitude(update)
        self._take(client, update, size)
        self.sizes[client] = size

    def drop(self, client: int) -> None:
        """Take away what `take` accepted, as if it had never come."""
        del self.sizes[client]
        self._drop(client)

    @abstractmethod
    def _take(self, client: int, update: Tree, size: float) -> None: ...

    @abstractmethod
    def _drop(self, client: int) -> None: ...

    @abstractmethod
    def of(self, client: int) -> Tree:
        """The update of a client, as it came."""

    @abstractmethod
    def together(self) -> Tree:
        """What `fuse` gets, or None if there is no update."""


class Folded(Updates):
    """One sum in fixed point, whose memory does not grow with the number of clients. An update that may be needed again
    is written to a file: all updates if `again`, else those so large that the server may have to drop them."""

    def __init__(self, fold: Fold, spill: Spill, again: bool) -> None:
        super().__init__()
        self._fold, self._spill, self._again = fold, spill, again

    def __exit__(self, *_: object) -> None:
        self._spill.clear()

    def _take(self, client: int, update: Tree, size: float) -> None:
        if reason := self._fold.beyond(update):
            raise RecordError(reason)
        if self._again or size > LARGE:
            self._spill.write(client, update)
        self._fold.add(update)

    def _drop(self, client: int) -> None:
        self._fold.remove(self._spill.read(client))
        self._spill.drop(client)

    def of(self, client: int) -> Tree:
        return self._spill.read(client)

    def together(self) -> Tree:
        return self._fold.value() if self.sizes else None


class OneByOne(Updates):
    """All updates in memory, because `fuse` needs every one."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[int, Tree] = {}

    def _take(self, client: int, update: Tree, size: float) -> None:
        self._kept[client] = update

    def _drop(self, client: int) -> None:
        del self._kept[client]

    def of(self, client: int) -> Tree:
        return self._kept[client]

    def together(self) -> Tree:
        rows = [self._kept[client] for client in sorted(self._kept)]
        return tree_map(lambda *parts: torch.cat(parts), *rows) if rows else None
