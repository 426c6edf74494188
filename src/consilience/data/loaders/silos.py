"""The user's own tables: a folder with one CSV file for each silo."""

from __future__ import annotations

import csv
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from consilience.core.errors import DataError, nearest
from consilience.data.dataset import Data, Dataset

CSV = "*.[cC][sS][vV]"  # Path.glob is case-sensitive, and some programs write .CSV
_SCALING = "scaling.toml"
_GROUP = "silo"
_MISSING = ("", "?", "-", "na", "n/a", "null", "none")


@dataclass(frozen=True)
class Table:
    """One file: its feature columns as numbers, its target column as text."""

    path: Path
    features: tuple[str, ...]
    x: Tensor
    targets: tuple[str, ...]


def csv_silos(folder: Path, target: str = "target", numbers: bool = False) -> Data:
    """Your own tables: one CSV file for each silo, all with the same columns (group "silo", named by the files).

    Every column but `target` is a feature and must be numeric, without empty cells; codes and gaps are refused. Targets
    are class names, unless all are numbers and one has a decimal point; then they are real. With `numbers` whole ones
    are real, too. Numbers in some files and names in all others are refused, because they are probably the same
    classes. `<folder>/test/` may hold test rows, in files of the same names; without it the test set is empty, and
    `run.holdout` or `Federation.split` holds out a share of every silo.

    Features are standardised by the constants of `<folder>/scaling.toml`, if there is one, with a line for each
    feature: `age = { centre = 54, spread = 9 }`. Silos that may not pool their rows can agree on these in advance.
    Without it every silo uses the mean and deviation of its own training rows (before any is held out, without labels):
    nothing has to be exchanged, but differences in level between silos are lost, and users of the model elsewhere must
    standardise by their own figures.
    """
    folder = Path(folder).expanduser().resolve()
    silos, tests = _tables(folder, target), _tables(folder / "test", target)
    if not silos:
        raise DataError(
            f"there is no CSV file in {folder}: csv-silos reads one file a silo from the folder that data.root names"
        )
    features = next(iter(silos.values())).features
    for name, table in tests.items():
        if name not in silos:
            raise DataError(f"{table.path} is the test file of no silo; {nearest(name, silos)}")
    silos, tests = ({name: in_order(table, features) for name, table in part.items()} for part in (silos, tests))
    tables = [*silos.values(), *tests.values()]
    if not numbers:
        _check_spelling(tables)
    agreed = _agreed(folder / _SCALING, features)
    scales = {name: agreed or own_scale(table.x) for name, table in silos.items()}
    kind = _Targets.of(tables, numbers)
    how = f"standardised by {_SCALING}" if agreed else "every silo standardised by its own mean and deviation"
    names = tuple(silos)
    train = _joined(silos, names, scales, kind, folder.name, f"{', '.join(features)}; {how}")
    if tests:
        return Data(train, _joined(tests, names, scales, kind, f"{folder.name}/test", train.note))
    empty = train[:0]
    return Data(train, replace(empty, name=f"{folder.name}/test (no such folder: set run.holdout to split the silos)"))


def features_of(folder: Path, target: str = "target") -> tuple[tuple[str, ...], dict[str, Any]]:
    """The feature columns of a folder of silos in their order, and the content of its scaling.toml, if there is one."""
    folder = Path(folder).expanduser().resolve()
    first = read_table(sorted(folder.glob(CSV))[0], target)
    scaling = folder / _SCALING
    return first.features, tomllib.loads(scaling.read_text(encoding="utf-8")) if scaling.exists() else {}


def _tables(folder: Path, target: str) -> dict[str, Table]:
    found: dict[str, Table] = {}
    for path in sorted(folder.glob(CSV)):
        if path.stem in found:
            raise DataError(f"{found[path.stem].path} and {path} are two files of the silo {path.stem!r}: keep one")
        found[path.stem] = read_table(path, target)
    return found


def read_table(path: Path, target: str) -> Table:
    """A CSV file of numbers and a target, with column names in its first line. A row is a line: a quote that is left
    open would take the rows after it into its cell."""
    lines = _lines(path)
    head = [name.strip() for name in next(lines, (1, []))[1]]
    if not head:
        raise DataError(f"{path} is empty, or its first line is")
    if target not in head:
        raise DataError(f"{path} has no column {target!r}; {nearest(target, head)}")
    if len(set(head)) < len(head) or len(head) < 2:
        raise DataError(f"{path}: a target and at least one feature are needed, each with its own name, got {head}")
    values, targets = [], []
    for number, row in lines:
        if not row:
            continue
        if len(row) != len(head):
            raise DataError(f"{path}, line {number}: {len(row)} cells, but the first line names {len(head)} columns")
        cells = dict(zip(head, (cell.strip() for cell in row), strict=True))
        targets.append(cells.pop(target))
        if not targets[-1]:
            raise DataError(f"{path}, line {number}: the target is empty")
        values.append([_number(path, number, name, cell) for name, cell in cells.items()])
    if not values:
        raise DataError(f"{path} has no rows")
    features = tuple(name for name in head if name != target)
    return Table(path, features, torch.tensor(values, dtype=torch.float64), tuple(targets))


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The cells of the rows, each with the number of its line; only the first row may span lines."""
    number = 1
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            for row in reader:
                if reader.line_num > number > 1:
                    raise DataError(f"{path}, line {number}: a quote that opens here is not closed in the same line")
                yield number, row
                number = reader.line_num + 1
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no text in UTF-8") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    except csv.Error as error:
        raise DataError(f"{path}, line {number}: {error}; is a quote that opens here not closed?") from error


def _number(path: Path, line: int, column: str, cell: str) -> float:
    where = f"{path}, line {line}: column {column!r}"
    if cell.lower() in _MISSING:
        what = f"is missing ({cell!r})" if cell else "is empty"
        raise DataError(f"{where} {what}: fill it in (and mark it in a column of 0 and 1), or drop the row")
    try:
        value = float(cell)
    except ValueError:
        raise DataError(
            f"{where} holds {cell!r}, which is not a number: write categories as columns of 0 and 1, the same in all "
            "silos"
        ) from None
    if not math.isfinite(value):
        raise DataError(f"{where} holds {cell!r}, which is not finite")
    return value


def in_order(table: Table, features: Sequence[str], others: str = "the first silo") -> Table:
    """The table with its columns in the order of `features`."""
    if set(table.features) != set(features):
        odd = sorted(set(features) ^ set(table.features))
        raise DataError(f"{table.path} has other columns than {others}; they differ in {', '.join(odd)}")
    place = {name: column for column, name in enumerate(table.features)}
    x = table.x[:, [place[name] for name in features]]
    return replace(table, features=tuple(features), x=x)


def _agreed(path: Path, features: Sequence[str]) -> tuple[Tensor, Tensor] | None:
    """(centre, spread) [features] from a file, if it is there."""
    if not path.exists():
        return None
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise _unclear(str(path), features, error) from error
    return agreed_scale(table, features, str(path))


def agreed_scale(table: Mapping[str, Any], features: Sequence[str], where: str) -> tuple[Tensor, Tensor]:
    """(centre, spread) [features] from entries such as age = { centre = 54, spread = 9 }."""
    if odd := sorted(set(table) ^ set(features)):
        raise DataError(f"{where} must have a line for each feature and no others; they differ in {', '.join(odd)}")
    try:
        centre, spread = (torch.tensor([float(table[name][key]) for name in features]) for key in ("centre", "spread"))
    except (KeyError, TypeError, ValueError) as error:
        raise _unclear(where, features, error) from error
    if not bool((spread > 0).all()):
        raise DataError(f"{where}: every spread must be positive")
    return centre.double(), spread.double()


def _unclear(where: str, features: Sequence[str], error: Exception) -> DataError:
    example = f"{features[0]} = {{ centre = 0, spread = 1 }}"
    return DataError(f"{where} must have lines such as `{example}` ({error})")


def own_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    """A silo's own mean and deviation; a constant column becomes 0."""
    spread = x.std(0, correction=0)
    return x.mean(0), torch.where(spread > 0, spread, 1)


def _check_spelling(tables: Sequence[Table]) -> None:
    """Refuse 0 and 1 in one file where another has well and ill, unless one file has both kinds."""
    kinds = [{_numeric(text) for text in table.targets} for table in tables]
    if all(len(kind) == 1 for kind in kinds) and {True} in kinds and {False} in kinds:
        numbers, names = (tables[kinds.index({kind})] for kind in (True, False))
        raise DataError(
            f"the targets of {numbers.path} are numbers ({numbers.targets[0]!r}, …) and those of {names.path} names "
            f"({names.targets[0]!r}, …): write the same classes alike in all files"
        )


def _numeric(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class _Targets:
    """The form of the targets: classes, or real numbers if there are none."""

    classes: tuple[str, ...]
    whole: bool

    @classmethod
    def of(cls, tables: Sequence[Table], numbers: bool) -> _Targets:
        """Real if all are numbers and one has a decimal point, or if `numbers`; else classes, in their order."""
        texts = [text for table in tables for text in table.targets]
        if numbers:
            for table in tables:
                if odd := next((text for text in table.targets if not _numeric(text)), None):
                    raise DataError(f"{table.path}: the target {odd!r} is not a number, which a regression needs")
            return cls((), whole=False)
        if all(text.lstrip("+-").isdecimal() for text in texts):
            return cls(tuple(str(number) for number in sorted({int(text) for text in texts})), whole=True)
        return cls(() if all(map(_numeric, texts)) else tuple(sorted(set(texts))), whole=False)

    def read(self, texts: Sequence[str]) -> Tensor:
        """[N] numbers of classes, or [N, 1] real."""
        if not self.classes:
            return torch.tensor([[float(text)] for text in texts])
        code = {name: number for number, name in enumerate(self.classes)}
        return torch.tensor([code[str(int(text)) if self.whole else text] for text in texts], dtype=torch.int64)


def _joined(
    tables: Mapping[str, Table],
    names: tuple[str, ...],
    scales: Mapping[str, tuple[Tensor, Tensor]],
    kind: _Targets,
    name: str,
    note: str,
) -> Dataset:
    x = torch.cat([(table.x - scales[silo][0]) / scales[silo][1] for silo, table in tables.items()])
    silo = [names.index(silo) for silo, table in tables.items() for _ in table.targets]
    return Dataset(
        x.float(),
        torch.cat([kind.read(table.targets) for table in tables.values()]),
        classes=kind.classes,
        groups={_GROUP: torch.tensor(silo)},
        group_names={_GROUP: names},
        name=name,
        note=note,
    )
