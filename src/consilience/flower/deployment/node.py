"""Starts a site's SuperNode. It shows the site's certificate to the gate, waits while the server counts an earlier node
as online, and hands its work to its own processes only."""

import json
import logging
import os
import secrets
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_ssh_private_key
from flwr.common.config import parse_config_args
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, HEARTBEAT_PATIENCE
from flwr.proto.fleet_pb2 import ActivateNodeRequest, ActivateNodeResponse
from flwr.supercore.utils import get_flwr_home
from flwr.supernode import fleet_http_connection
from flwr.supernode.cli.flower_supernode import flower_supernode
from flwr.supernode.fleet_http_client import FleetHttpClient

from consilience.core.errors import ConfigError
from consilience.core.logs import in_json, set_up_logs
from consilience.flower.deployment.certificates import write_private
from consilience.flower.policy import SETTING, Policy

log = logging.getLogger("consilience")
FORGOTTEN = HEARTBEAT_PATIENCE * HEARTBEAT_DEFAULT_INTERVAL  # seconds until the SuperLink misses a killed node
PAUSE = 5.0  # seconds between two attempts


class SiteClient(FleetHttpClient):
    """Flower's client of a node. It has `tls`, and waits while the SuperLink counts an earlier node as online."""

    tls: ssl.SSLContext | None = None

    @classmethod
    def from_server_address(
        cls,
        server_address: str,
        insecure: bool,
        root_certificates: Any,
        interceptors: Any,
        *,
        retry_invoker: Any = None,
    ) -> "SiteClient":
        if cls.tls is None:
            return super().from_server_address(
                server_address, insecure, root_certificates, interceptors, retry_invoker=retry_invoker
            )
        return cls(f"https://{server_address}", interceptors=interceptors, verify=cls.tls, retry_invoker=retry_invoker)

    def ActivateNode(self, request: ActivateNodeRequest) -> ActivateNodeResponse:  # noqa: N802
        start, seconds = time.monotonic(), FORGOTTEN + 2 * PAUSE
        while True:
            try:
                return super().ActivateNode(request)
            except httpx.TransportError as error:  # Flower tries again, and says nothing
                log.warning("the server cannot be reached: %s", error)
                raise
            except httpx.HTTPStatusError as error:
                passed = time.monotonic() - start
                if error.response.status_code != httpx.codes.PRECONDITION_FAILED or passed > seconds:
                    raise
                if not passed // PAUSE:
                    log.warning(
                        "the server refuses this node. It does so for %d s after a node with the same key was killed, "
                        "and if the key is not registered (register.sh). Trying again for %d s", FORGOTTEN, seconds,
                    )  # fmt: skip
                time.sleep(PAUSE)


def run_node(
    port: int,
    options: Sequence[str],
    *,
    authority: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
) -> None:
    """Run a SuperNode with these options of flower-supernode, until it ends. With a `certificate` and `key` of the
    site, and the certificate of the `authority`, it uses them; otherwise it connects as the options say.

    A policy of the site that cannot be used ends it at once.

    The node serves its work at `port` of this machine. Flower lets every process of the machine take it, unless the
    processes that may take it prove that they know a secret, which is in a file that no other account can read."""
    if authority is not None or certificate is not None or key is not None:
        if authority is None or certificate is None or key is None:
            raise ConfigError("a node with a key needs all of --authority, --certificate and --key")
        SiteClient.tls = client_tls(authority, certificate, key)
        trust = ["--root-certificates", str(authority), "--auth-supernode-private-key", str(key)]
        options = [*trust, *_with_files(options, authority=authority, certificate=certificate, key=key)]
    if "--node-config" in options:
        settings = parse_config_args([options[options.index("--node-config") + 1]])
        if SETTING in settings:
            Policy.read(Path(str(settings[SETTING])))
    home = get_flwr_home()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    secret = write_private(home / f"node-{port}.secret", secrets.token_hex(32).encode())
    proof = ["--superexec-auth-secret-file", str(secret)]
    runner = [sys.executable, "-P", str(Path(__file__).with_name("executor.py")), "--insecure", *proof]
    subprocess.Popen([*runner, "--runtime-api-address", f"127.0.0.1:{port}", "--parent-pid", str(os.getpid())])
    fleet_http_connection.FleetHttpClient = SiteClient  # type: ignore[attr-defined]
    logging.getLogger("flwr").propagate = False  # it has a handler of its own
    if in_json():
        set_up_logs()
    sys.argv = ["flower-supernode", "--port", str(port), "--isolation", "process", *proof, *options]
    flower_supernode()


def _with_files(options: Sequence[str], **files: Path) -> list[str]:
    """The options with the paths of these files among the node's settings: secure sums are signed with the same key."""
    found = list(options)
    settings = " ".join(f"{name}={json.dumps(str(path.absolute()))}" for name, path in files.items())
    if "--node-config" in found:
        at = found.index("--node-config") + 1
        found[at] = f"{found[at]} {settings}"
        return found
    return [*found, "--node-config", settings]


def client_tls(authority: Path, certificate: Path, key: Path) -> ssl.SSLContext:
    """The TLS settings of a site: it trusts this authority, and shows its certificate. The key is one of ssh-keygen."""
    for file in (authority, certificate, key):
        if not file.is_file():
            raise ConfigError(f"{file} is missing: a site needs ca.crt, its certificate and its key (docs/deploy.md)")
    try:
        private = load_ssh_private_key(key.read_bytes(), None)
        pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{key} is not a private key of ssh-keygen without a passphrase: {error}") from error
    with tempfile.TemporaryDirectory() as folder:
        file = write_private(Path(folder) / "key", pem)
        try:
            tls = ssl.create_default_context(cafile=str(authority))
            tls.load_cert_chain(certificate, file)
        except ssl.SSLError as error:
            raise ConfigError(f"{certificate} is not the certificate of the key {key}: {error.reason}") from error
    return tls
