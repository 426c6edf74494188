"""The command: `consilience demo | run | compare | reproduce | report | rewind | list | flower`."""

import sys
from typing import Annotated

import typer
from rich.logging import RichHandler
from rich.text import Text

from consilience.cli.common import messages
from consilience.cli.flower import certificate, gate, new, node
from consilience.cli.listing import list_
from consilience.cli.recipes import demo, reproduce
from consilience.cli.runs import compare, report, rewind, run
from consilience.cli.sites import admit, forget, remove, sites
from consilience.cli.status import status
from consilience.core.errors import ConsilienceError
from consilience.core.logs import set_up_logs

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False, add_completion=False
)
app.command()(demo)
app.command()(run)
app.command()(compare)
app.command()(reproduce)
app.command()(report)
app.command()(rewind)
app.command("list")(list_)
flower = typer.Typer(help="Real federations, through Flower (docs/deploy.md).", no_args_is_help=True)
flower.command()(new)
flower.command()(gate)
flower.command()(certificate)
flower.command()(status)
flower.command()(sites)
flower.command()(admit)
flower.command()(remove)
flower.command()(forget)
flower.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(node)
app.add_typer(flower, name="flower")


def _version(wanted: bool) -> None:
    if wanted:
        from consilience.core.version import __version__

        print(f"consilience {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Federated learning with calibrated uncertainty: one model from data that stay where they are."""


def main() -> None:
    """Entry point: a user's mistake is one sentence and exit code 2."""
    set_up_logs(RichHandler(console=messages, show_path=False, show_time=False))
    try:
        app()
    except ConsilienceError as error:
        messages.print(Text("error:", "red"), error, soft_wrap=True)
        sys.exit(2)
