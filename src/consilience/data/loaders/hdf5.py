"""TFF's HDF5 form: a group "examples" with a group for every client, which holds its columns."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from consilience.core.errors import DataError, nearest

Array = npt.NDArray[Any]
Choice = Callable[[Sequence[str]], Sequence[str]]
"""The clients to read, from the sorted ids of all clients."""


def read_clients(
    path: Path, columns: Sequence[str], choose: Choice = lambda ids: ids, rows: int | None = None
) -> Iterator[tuple[str, list[Array]]]:
    """(id, columns) of the chosen clients, with the first `rows` examples of each."""
    try:
        import h5py
    except ImportError as error:
        raise DataError(
            f"{path} is an HDF5 file, which needs the package h5py: install it with pip install 'consilience[tff]'"
        ) from error
    try:
        with h5py.File(path, "r") as file:
            examples = file.get("examples")
            if not isinstance(examples, h5py.Group) or not len(examples):
                raise DataError(f"{path} is not in TFF's form: it has no group 'examples' with a group for each client")
            for client in choose(sorted(examples)):
                yield client, _columns(path, client, examples[client], columns, rows)
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path} is not an HDF5 file, or is damaged: {reason}") from error


def _columns(path: Path, client: str, group: Any, names: Sequence[str], rows: int | None) -> list[Array]:
    shapes = {name: column.shape for name, column in group.items() if getattr(column, "shape", ())}
    for name in names:
        if name not in shapes:
            raise DataError(f"{path}: client {client!r} has no dataset {name!r}; {nearest(name, shapes)}")
        if shapes[name][0] != shapes[names[0]][0]:
            first, this = (f"{shapes[n][0]} rows of {n!r}" for n in (names[0], name))
            raise DataError(f"{path}: client {client!r} has {first} but {this}")
    return [group[name][:rows] for name in names]
