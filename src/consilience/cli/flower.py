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


def certificate(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME…]", help="Names and addresses by which sites reach the server.")
    ] = None,
    site: Annotated[str | None, typer.Option(help="Sign the public key of this site instead.")] = None,
    key: Annotated[Path | None, typer.Option(help="Public key of the site, from ssh-keygen -t ecdsa.")] = None,
    certificates: Annotated[Path, typer.Option(help="Folder of all certificates.")] = Path("certificates"),
) -> None:
    """Make a certificate for the server, and an authority that signs it unless there is one; or one for a site's key.

    Without --site: ca.key, ca.crt, server.key and server.crt. With --site and --key: SITE.crt.
    """
    from consilience.core.errors import ConfigError
    from consilience.flower.deployment.certificates import certify, make_server_certificate

    if (site is None) != (key is None) or (site is not None and names):
        raise ConfigError("a certificate is for NAMEs of the server, or for --site with its --key")
    if site is not None and key is not None:
        files = [certify(certificates, site, key)]
    else:
        files = make_server_certificate(certificates, tuple(names or ()))
    for file in files:
        messages.print(str(file), soft_wrap=True)


def node(
    context: typer.Context,
    port: Annotated[int, typer.Option(help="Port of the node's own processes, on this machine only.")] = 9094,
    authority: Annotated[Path | None, typer.Option(help="ca.crt of the federation.")] = None,
    certificate: Annotated[Path | None, typer.Option(help="The site's certificate.")] = None,
    key: Annotated[Path | None, typer.Option(help="The site's private key.")] = None,
) -> None:
    """Start a site's SuperNode. All other options are those of flower-supernode.

    It shows its certificate to the gate, waits while the server counts an earlier node with its key as online, and
    gives its work to no other account of this machine.
    """
    from consilience.flower.deployment.node import run_node

    run_node(port, context.args, authority=authority, certificate=certificate, key=key)
