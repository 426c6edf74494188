"""Options, messages and endings that several commands share."""

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from consilience.core.errors import CheckpointError

messages = Console(stderr=True, markup=False, highlight=False)  # users' names may look like markup

Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override a key: `--set algorithm.lr=0.01`.")]
Out = Annotated[Path | None, typer.Option(help="Directory to write to.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")]
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file; see `consilience run --help`.")]


def set_options(overrides: list[str] | None) -> list[str]:
    """The overrides as words of a command line."""
    return [word for override in overrides or [] for word in ("--set", override)]


def print_report(directory: Path, runs: list[str] | None = None) -> None:
    """Write the report of a directory, and of runs in it, and print its path."""
    from consilience.report import write_report

    try:
        for one in runs or []:
            write_report(directory / one)
        messages.print(f"report: {write_report(directory)}", soft_wrap=True)
    except OSError as error:
        again = shlex.join(["consilience", "report", str(directory)])
        raise CheckpointError(f"the report cannot be written ({error.strerror}): mend that and call {again}") from error


@contextlib.contextmanager
def resumable(command: list[str], leads: bool = True) -> Iterator[None]:
    """On Ctrl-C, print the command that resumes, and exit with 130."""
    from consilience.runs.interrupts import Interrupted

    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stop:
        if leads:
            said = stop if isinstance(stop, Interrupted) else "stopped; the last checkpoint is kept. Resume with"
            messages.print(f"{said}:\n  {shlex.join(command)}", soft_wrap=True)
        raise typer.Exit(130) from stop
