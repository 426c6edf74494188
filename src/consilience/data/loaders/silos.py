"""The user's own tables: a folder with one CSV file for each silo."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from consilience.core.errors import DataError, nearest
from consilience.data.dataset import Data, Dataset
from consilience.data.prepared import prepare_tables, prepared
from consilience.data.tables import CSV, FILE, MINIMUM, Preparation, Roles, Table, read_csv
from consilience.data.trees import cat

log = logging.getLogger("consilience")
_GROUP = "silo"


def csv_silos(
    folder: Path,
    target: str | Sequence[str] = "target",
    features: Sequence[str] | None = None,
    ignore: Sequence[str] = (),
    categorical: Sequence[str] = (),
    missing: Sequence[str] = (),
    numbers: bool = False,
    minimum: int = MINIMUM,
) -> Data:
    """Your own tables: one CSV file for each silo (group "silo", named by the files), as `Federation.from_tables` reads
    and prepares them.

    `<folder>/test/` may hold test rows, in files of the same names; they are not part of any sum. Without it the test
    set is empty, and `run.holdout` or `Federation.split` holds out a share of every silo. The sums are then of all
    rows, also of those that are held out, but without their targets. A `preparation.json` in the folder, such as that
    of another run, takes the place of sums over these files."""
    folder = Path(folder).expanduser().resolve()
    silos, tests = _tables(folder), _tables(folder / "test")
    if not silos:
        raise DataError(
            f"there is no CSV file in {folder}: csv-silos reads one file a silo from the folder that data.root names"
        )
    for name, table in tests.items():
        if name not in silos:
            raise DataError(f"{table.name} is the test file of no silo; {nearest(name, silos)}")
    agreed = Preparation.read(folder / FILE) if (folder / FILE).exists() else None
    how: dict[str, Any] = {"features": features, "ignore": ignore, "categorical": categorical}
    roles = Roles.of(target, **how, missing=missing, numbers=numbers, minimum=minimum)
    train, names = prepare_tables(silos, roles, agreed), tuple(silos)
    preparation = train[names[0]].preparation
    assert preparation is not None
    data = _joined(train, names, folder.name)
    if tests:
        for remark in (remark for table in tests.values() for remark in preparation.differences(table)):
            log.warning("%s", remark)
        held_out = {name: prepared(table, preparation) for name, table in tests.items()}
        return Data(data, _joined(held_out, names, f"{folder.name}/test"))
    return Data(
        data, replace(data[:0], name=f"{folder.name}/test (no such folder: set run.holdout to split the silos)")
    )


def _tables(folder: Path) -> dict[str, Table]:
    found: dict[str, Table] = {}
    for path in sorted(folder.glob(CSV)):
        if path.stem in found:
            raise DataError(f"{found[path.stem].name} and {path} are two files of the silo {path.stem!r}: keep one")
        found[path.stem] = read_csv(path)
    return found


def _joined(silos: Mapping[str, Dataset], names: tuple[str, ...], name: str) -> Dataset:
    first, *_ = parts = list(silos.values())
    owner = [names.index(silo) for silo, part in silos.items() for _ in range(len(part))]
    return replace(
        first,
        x=cat(*(part.x for part in parts)),
        y=cat(*(part.y for part in parts)),
        groups={_GROUP: torch.tensor(owner)},
        group_names={_GROUP: names},
        name=name,
    )
