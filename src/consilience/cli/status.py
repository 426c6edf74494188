"""`consilience flower status`: what a federation does, for its operators."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from consilience.cli.common import messages

if TYPE_CHECKING:
    from consilience.report.page import Page


def status(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run's directory at the server.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the status as JSON.")] = False,
    serve: Annotated[int | None, typer.Option(metavar="PORT", help="Show a page at this port of 127.0.0.1.")] = None,
    page: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the page to a file, once.")] = None,
) -> None:
    """Show the rounds of a run, which sites are online and have answered, refusals with their reasons, and bytes.

    It reads the run's directory and changes nothing. The page of --serve loads itself again every ten seconds; every
    account of this machine can read it.
    """
    from consilience.core.errors import ConfigError
    from consilience.core.files import write_atomically
    from consilience.flower.status import Status
    from consilience.flower.status_page import HOST, StatusServer, html_of, page_of

    if (as_json, serve is not None, page is not None).count(True) > 1:
        raise ConfigError("choose one of --json, --serve and --page")
    found = Status.read(directory)
    if serve is not None:
        with StatusServer(directory, serve) as server:
            messages.print(f"http://{HOST}:{server.server_port}/ until Ctrl-C")
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                return
    elif page is not None:
        write_atomically(page, html_of(directory), private=True)
        messages.print(str(page), soft_wrap=True)
    elif as_json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        _print_tables(page_of(found))


def _print_tables(shown: "Page") -> None:
    """Print the content of the page as tables of text."""
    console = Console(markup=False, highlight=False)
    console.print(f"{shown.title}: {', '.join(f'{tile.label.lower()} {tile.value}' for tile in shown.tiles)}")
    console.print(shown.lead)
    for section in shown.sections:
        for label, value in section.facts:
            console.print(f"{section.title}: {label.lower()}: {value}")
        for content in section.tables:
            table = Table(*content.head, title=section.title, title_justify="left")
            for row in content.rows:
                table.add_row(*(cell.text for cell in row))
            console.print(table)
