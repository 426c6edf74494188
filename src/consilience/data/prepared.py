"""Data sets from tables: all sites' by a common preparation, and new rows by that of a run."""

import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from consilience.core.errors import DataError, nearest
from consilience.core.text import listing
from consilience.data.dataset import Dataset
from consilience.data.tables import Preparation, Roles, Table, agree, as_table, is_table, summarise

log = logging.getLogger("consilience")


def prepare_tables(
    tables: Mapping[str, Table], roles: Roles, preparation: Preparation | None = None
) -> dict[str, Dataset]:
    """The data sets of these sites, by the preparation that follows from the sums of all of them, or by one that was
    agreed before. The log has a sentence for each column that is not used as it is."""
    if not tables:
        raise DataError("a table for each silo is needed, got none")
    if preparation is None:
        known = dict.fromkeys(name for table in tables.values() for name in table.columns)
        for name in roles.ignore:
            if name not in known:
                raise DataError(f"no table has the column {name!r} that is to be ignored; {nearest(name, known)}")
        found = agree({name: summarise(table, roles) for name, table in tables.items()})
        preparation, remarks = found.preparation, list(found.remarks)
    else:
        check_agreed(preparation, roles)
        remarks = [remark for table in tables.values() for remark in preparation.differences(table)]
    for remark in remarks:
        log.warning("%s", remark)
    return {name: prepared(table, preparation, name=name) for name, table in tables.items()}


def check_agreed(preparation: Preparation, roles: Roles) -> None:
    """Refuse declarations of columns beside a preparation, which would have no effect."""
    given = [field.name for field in fields(roles) if field.name not in ("target", "classes", "declared")]
    default = Roles(roles.target)
    given = [name for name in given if getattr(roles, name) != getattr(default, name)]
    if given:
        raise DataError(f"the preparation says how columns are read: leave out {listing(given)}, or the preparation")
    if roles.target != preparation.target.columns:
        theirs, ours = listing(preparation.target.columns), listing(roles.target)
        raise DataError(f"the preparation is for the target {theirs!r}, and the target here is {ours!r}")


def prepared(table: Table, preparation: Preparation, *, name: str | None = None) -> Dataset:
    """The examples of a table."""
    table = table.without(preparation.missing)
    for column in preparation.target.columns:
        if column not in table.columns:
            raise DataError(f"{table.name} has no column {column!r}, which is the target")
    columns = ", ".join(column.name for column in preparation.columns)
    return Dataset(
        preparation.transform(table),
        preparation.target.read(table),
        classes=preparation.target.classes,
        features=preparation.feature_names,
        preparation=preparation,
        name=name or table.name,
        note=f"{columns}; numbers are standardised and categories listed alike at all sites",
    )


def model_inputs(x: Any, preparation: Preparation | None) -> Any:
    """Model inputs of new rows: a table (a data frame or a CSV file) is prepared, everything else is returned."""
    if isinstance(x, Mapping) and preparation is not None:
        raise DataError("new rows are a data frame, the path of a CSV file, or model inputs [N, features], not a dict")
    if not _is_raw(x, preparation):
        return x
    return _must(preparation).transform(_read(x, preparation))


def examples(source: Any, preparation: Preparation | None) -> Dataset:
    """A data set of new rows: a table is prepared, everything else is read by `Dataset.of`."""
    if not _is_raw(source, preparation):
        return Dataset.of(source)
    return prepared(_read(source, preparation), _must(preparation))


def _is_raw(source: Any, preparation: Preparation | None) -> bool:
    """Whether the source is a table to prepare: a file, or a data frame where the model was trained on tables."""
    return is_table(source) and (preparation is not None or isinstance(source, str | Path))


def _read(source: Any, preparation: Preparation | None) -> Table:
    table = as_table(source)
    for remark in _must(preparation).differences(table):
        log.warning("%s", remark)
    return table


def _must(preparation: Preparation | None) -> Preparation:
    if preparation is None:
        raise DataError(
            "the model was not trained on prepared tables, so a table cannot be turned into its inputs: pass numbers "
            "[N, ...], or train it on cs.Federation.from_tables or csv-silos"
        )
    return preparation
