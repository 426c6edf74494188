"""`consilience flower sites | admit | remove | forget`: who takes part in a federation."""

from pathlib import Path
from typing import Annotated

import typer

from consilience.cli.common import messages

Run = Annotated[Path, typer.Argument(metavar="DIR", help="The run's directory at the server.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The site's name.")]
_STATUS = {"active": "yes", "removed": "no", "leaving": "no, and is to be forgotten", "forgotten": "no, is forgotten"}


def sites(directory: Run) -> None:
    """List the sites of a run: their examples, and whether they take part."""
    from rich.table import Table

    from consilience.core.errors import ConfigError
    from consilience.flower.registry import Registry

    registry = Registry.read(directory)
    if registry is None:
        raise ConfigError(f"{directory} holds no run of a federation: give the run's directory at the server")
    table = Table("site", "examples", "takes part")
    for member in registry.members:
        table.add_row(member.name, f"{member.examples:,}", _STATUS[member.status])
    for name in registry.invited:
        table.add_row(name, "", "joins when it is online")
    messages.print(table)


def admit(directory: Run, name: Name) -> None:
    """Let a new site join, or one that was removed or forgotten take part again.

    A new site joins in the first round for which it is online. Register its key before (docs/deploy.md).
    """
    from consilience.flower import changes

    changes.admit(directory, name)
    messages.print(f"{name} takes part from the next round for which it is online", soft_wrap=True)


def remove(directory: Run, name: Name) -> None:
    """Let a site take no further part. What the model has learned from it stays."""
    from consilience.flower import changes

    changes.remove(directory, name)
    messages.print(f"{name} takes part in no further round; what was learned from it stays", soft_wrap=True)


def forget(
    directory: Run,
    name: Name,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Under secure aggregation, if the site is gone: take out an estimate.")
    ] = False,
) -> None:
    """Let a site take no further part, and take its part out of what was learned.

    The server does so before its next round, or when it starts again. `flower sites` shows when it is done.
    """
    from consilience.flower import changes

    changes.forget(directory, name, estimate=estimate)
    messages.print(f"{name} is forgotten before the next round", soft_wrap=True)
