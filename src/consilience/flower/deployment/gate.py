"""A reverse proxy before Flower's SuperLink, which passes on the requests of sites and no others.

Flower serves all its interfaces at one port. One is for sites, which sign their requests with registered keys. The
others start runs, and so run code at every site, register keys, and hand out the server's work; they need no password.
So the SuperLink should be reachable from its own machine only, and sites should reach this proxy. A peer without a
certificate of the federation's authority does not get past the TLS handshake. Requests and responses are streamed, and
everything has a limit: the time, the bytes, and the connections of a peer.
"""

import asyncio
import logging
import re
import resource
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import h11
import httpx
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER

from consilience.core.errors import ConfigError
from consilience.core.logs import tell

log = logging.getLogger("consilience")
OPEN = re.compile(r"/v1/fleet/[a-z]+(-[a-z]+)*")  # the sites' interface; without dots, no path can lead out of it
MAX_BYTES = 2 * FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE  # of one request: Flower sends arrays in chunks of half this size
HEADER_BYTES = 8 << 10  # of the first line and all headers of a request
PIECE = 64 << 10  # bytes that are read at once
HANDSHAKE = 10.0  # seconds of the TLS handshake
IDLE = 30.0  # seconds until all headers of the next request are there
REQUEST = 300.0  # seconds from the end of the headers to the end of the response
ANSWER = 60.0  # seconds that the SuperLink has to answer
KEEP = 2.0  # seconds that a connection to the SuperLink is kept; the SuperLink itself ends it after five
STRANGERS, STRANGERS_OF_ADDRESS = 512, 256  # connections without a finished handshake
CONNECTIONS, CONNECTIONS_OF_SITE = 4096, 16  # connections of sites; Flower needs about four for each
_HOP = {b"host", b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade"}


@dataclass(frozen=True)
class Site:
    """A site as its certificate names it, with the header of requests that its key signs."""

    name: str
    key: bytes

    @classmethod
    def of(cls, certificate: bytes) -> "Site":
        found = x509.load_der_x509_certificate(certificate)
        key = found.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (name,) = found.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        return cls(str(name.value), b64encode(key))


@dataclass
class Places:
    """Places for connections: at most `each` of a peer and `total` of all. A connection beyond these limits takes the
    place of the peer's oldest, or of the oldest of all, which ends. So idle connections keep nobody out."""

    each: int
    total: int
    _held: dict[asyncio.Task[None], str] = field(default_factory=dict)

    @contextmanager
    def hold(self, peer: str) -> Iterator[None]:
        """Hold a place for the current task."""
        own = [task for task, holder in self._held.items() if holder == peer]
        if len(own) >= self.each or len(self._held) >= self.total:
            oldest = own[0] if len(own) >= self.each else next(iter(self._held))
            del self._held[oldest]
            oldest.cancel()
        task = asyncio.current_task()
        assert task is not None
        self._held[task] = peer
        try:
            yield
        finally:
            self._held.pop(task, None)


class RefusedError(Exception):
    """A request that is not passed on."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Writer(Protocol):
    """The part of asyncio.StreamWriter that a conversation needs."""

    def write(self, data: bytes) -> None: ...
    async def drain(self) -> None: ...


class Gate:
    """Takes connections and passes the requests of sites on to `superlink`."""

    def __init__(self, superlink: httpx.AsyncClient, tls: ssl.SSLContext, connections: int = CONNECTIONS) -> None:
        self._superlink, self._tls = superlink, tls
        self._strangers = Places(STRANGERS_OF_ADDRESS, STRANGERS)
        self._sites = Places(CONNECTIONS_OF_SITE, connections)
        self._tasks: set[asyncio.Task[None]] = set()
        self._said = float("-inf")

    async def serve(self, listener: socket.socket) -> None:
        """Take connections until this task is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("no connection can be taken: %s", error.strerror)
                await asyncio.sleep(1.0)
                continue
            task = loop.create_task(self._connected(connection, address[0]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connected(self, connection: socket.socket, address: str) -> None:
        """Serve one connection, from the handshake to its end."""
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(PIECE)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            with self._strangers.hold(address):
                transport, _ = await loop.connect_accepted_socket(
                    lambda: protocol,
                    connection,
                    ssl=self._tls,
                    ssl_handshake_timeout=HANDSHAKE,
                    ssl_shutdown_timeout=HANDSHAKE,
                )
        except OSError as error:  # of TLS, or of time
            self._warn("refused a connection of %s: %s", address, str(error) or type(error).__name__)
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            site = Site.of(transport.get_extra_info("ssl_object").getpeercert(binary_form=True))
            with self._sites.hold(site.name), suppress(OSError):
                await self.converse(site, reader, writer)
                writer.close()
                await writer.wait_closed()
        finally:
            transport.abort()

    async def converse(self, site: Site, reader: asyncio.StreamReader, writer: Writer) -> None:
        """Answer the requests of a site on one connection, until it ends or a request is refused."""
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADER_BYTES)
        try:
            while True:
                async with asyncio.timeout(IDLE):
                    request = await _next(http, reader, HEADER_BYTES)
                if not isinstance(request, h11.Request):
                    return
                async with asyncio.timeout(REQUEST):
                    await self._pass_on(site, request, http, reader, writer)
                if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
                    return
                http.start_next_cycle()
        except (RefusedError, h11.RemoteProtocolError) as error:
            status = error.status if isinstance(error, RefusedError) else error.error_status_hint
            self._warn("refused a request of %r: %s", site.name, error)
            if http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                body = str(error).encode()
                headers = [("content-length", str(len(body))), ("content-type", "text/plain"), ("connection", "close")]
                for event in h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage():
                    writer.write(http.send(event) or b"")
                await writer.drain()

    async def _pass_on(
        self, site: Site, request: h11.Request, http: h11.Connection, reader: asyncio.StreamReader, writer: Writer
    ) -> None:
        path = request.target.decode("ascii")
        if not OPEN.fullmatch(path):
            raise RefusedError(403, f"{path[:80]!r} is not for sites")
        if request.method != b"POST":
            raise RefusedError(405, "the method is not POST")
        if [value for name, value in request.headers if name == FLEET_HTTP_PUBLIC_KEY_HEADER.encode()] != [site.key]:
            raise RefusedError(403, "the request is not signed with the key of the certificate")
        if int(dict(request.headers).get(b"content-length", b"0")) > MAX_BYTES:
            raise RefusedError(413, f"the request has more than {MAX_BYTES} bytes")
        kept = [(name, value) for name, value in request.headers if name not in _HOP]
        passed = self._superlink.build_request("POST", path, content=_body(http, reader), headers=kept)
        try:
            answer = await self._superlink.send(passed, stream=True)
        except httpx.TransportError as error:
            raise RefusedError(503, f"the SuperLink does not answer: {error}") from error
        try:
            found = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() not in _HOP]
            writer.write(http.send(h11.Response(status_code=answer.status_code, headers=found)) or b"")
            async for piece in answer.aiter_raw():
                writer.write(http.send(h11.Data(data=piece)) or b"")
                await writer.drain()
            writer.write(http.send(h11.EndOfMessage()) or b"")
            await writer.drain()
        except httpx.TransportError as error:
            raise ConnectionError("the SuperLink's answer was cut short") from error
        finally:
            await answer.aclose()

    def _warn(self, text: str, *values: object) -> None:
        """Log a line, but not more than one a second: strangers cannot fill the disk."""
        if time.monotonic() - self._said > 1.0:
            self._said = time.monotonic()
            log.warning(text, *values)


async def _next(http: h11.Connection, reader: asyncio.StreamReader, size: int) -> object:
    """The next event of a connection, which is read `size` bytes at a time."""
    while (event := http.next_event()) is h11.NEED_DATA:
        http.receive_data(await reader.read(size))
    return event


async def _body(http: h11.Connection, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The pieces of a request's body as they come."""
    total = 0
    while isinstance(event := await _next(http, reader, PIECE), h11.Data):
        total += len(event.data)
        if total > MAX_BYTES:
            raise RefusedError(413, f"the request has more than {MAX_BYTES} bytes")
        yield bytes(event.data)


def run_gate(superlink: str, host: str, port: int, certificates: Path) -> None:
    """Serve the gate at host:port for the SuperLink at host:port `superlink`, until the process ends. `certificates`
    holds ca.crt, server.crt and server.key, which the SuperLink uses too."""
    tls = server_tls(certificates)
    trusted = ssl.create_default_context(cafile=str(certificates / "ca.crt"))

    async def serve() -> None:
        limits = httpx.Limits(keepalive_expiry=KEEP)
        async with httpx.AsyncClient(
            base_url=f"https://{superlink}", verify=trusted, timeout=ANSWER, limits=limits, trust_env=False
        ) as client:
            with socket.create_server((host, port), family=_family(host), backlog=STRANGERS) as listener:
                listener.setblocking(False)
                tell(f"sites can connect to {host}:{port}")
                await Gate(client, tls, _connections()).serve(listener)

    with suppress(KeyboardInterrupt):
        asyncio.run(serve())


def server_tls(certificates: Path) -> ssl.SSLContext:
    """The TLS settings of the gate: a peer must show a certificate of the authority in this folder."""
    for name in ("ca.crt", "server.crt", "server.key"):
        if not (certificates / name).is_file():
            raise ConfigError(
                f"{certificates / name} is missing: the gate needs the SuperLink's certificates (docs/deploy.md)"
            )
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates / "ca.crt"))
    tls.verify_mode = ssl.CERT_REQUIRED
    tls.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    return tls


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _connections() -> int:
    """The number of connections of sites for which this process may open files: each needs one, and one more while its
    request is passed on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = STRANGERS + 64  # handshakes, and files of this process
    wanted = 2 * CONNECTIONS + others
    if soft < wanted:
        soft = min(wanted, hard) if hard != resource.RLIM_INFINITY else wanted
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(CONNECTIONS, (soft - others) // 2)
