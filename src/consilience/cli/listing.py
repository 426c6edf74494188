"""`consilience list`: names to choose from."""

import inspect
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from consilience.core.errors import ConfigError, nearest


def list_(
    what: Annotated[
        str | None, typer.Argument(help="algorithms, data, partitions, models, recipes; default: all.")
    ] = None,
) -> None:
    """List algorithms, data sets, partitions, models and recipes."""
    from consilience.config.build import ALGORITHMS, PARTITIONS
    from consilience.data import DATASETS
    from consilience.models import MODELS
    from consilience.recipes import RECIPES

    groups: dict[str, Mapping[str, Any]] = {
        "algorithms": ALGORITHMS,
        "data": DATASETS,
        "partitions": PARTITIONS,
        "models": MODELS,
        "recipes": {name: recipe.title for name, recipe in RECIPES.items()},
    }
    if what is not None and what not in groups:
        raise ConfigError(f"unknown group {what!r}; {nearest(what, groups)}")
    for group, entries in groups.items():
        if what in (None, group):
            table = Table("name", "what it is", title=group, title_justify="left")
            for name, entry in entries.items():
                text = entry if isinstance(entry, str) else inspect.getdoc(entry) or ""
                table.add_row(name, " ".join(text.split("\n\n")[0].split()))
            Console(markup=False).print(table)
