"""`consilience flower`: real federations, through Flower."""

from pathlib import Path
from typing import Annotated

import typer

from consilience.cli.common import ConfigFile, Overrides, messages


def new(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that is not there yet.")],
    config: ConfigFile,
    set_: Overrides = None,
) -> None:
    """Make a Flower app of a simulation's model and method, with the scripts that run it at real sites.

    The config's data give the shape of an example, its partition the number of sites. Next: README.md in DIR.
    """
    from consilience.config import read_config
    from consilience.flower.deployment.create import write_app

    for file in write_app(directory, read_config(config, set_)):
        messages.print(str(file), soft_wrap=True)


def gate(
    superlink: Annotated[str, typer.Option(help="Address of the SuperLink on this machine.")] = "127.0.0.1:8000",
    host: Annotated[str, typer.Option(help="Address on which sites connect.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="Port on which sites connect.")] = 8443,
    certificates: Annotated[Path, typer.Option(help="Folder of ca.crt, server.crt and server.key.")] = Path(
        "certificates"
    ),
) -> None:
    """Start the proxy that sites connect to: it passes on the requests of sites and refuses all others."""
    from consilience.flower.deployment.gate import run_gate

    run_gate(superlink, host, port, certificates)
