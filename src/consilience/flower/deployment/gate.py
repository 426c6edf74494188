"""A reverse proxy before Flower's SuperLink, which passes on the requests of sites and no others.

Flower serves all its interfaces at one port. One is for sites, which sign their requests with registered keys. The
others start runs, and so run code at every site, register keys, and hand out the server's work; they need no password.
So the SuperLink should be reachable from its own machine only, and sites should reach this proxy.
"""

import logging
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from consilience.core.errors import ConfigError

log = logging.getLogger("consilience")
OPEN = re.compile(r"/v1/fleet/[a-z]+(-[a-z]+)*")  # the sites' interface; without dots, no path can lead out of it
MAX_BYTES = 64 << 20  # of one request: Flower splits objects above 5 MB
_HOP = {"host", "connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "content-length"}


def gate_app(
    superlink: str, verify: ssl.SSLContext | bool = True, transport: httpx.AsyncBaseTransport | None = None
) -> Starlette:
    """An app that passes the requests of sites on to the SuperLink at a URL such as https://127.0.0.1:8000."""
    client = httpx.AsyncClient(base_url=superlink, verify=verify, timeout=60.0, transport=transport, trust_env=False)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    async def pass_on(request: Request) -> Response:
        path = request.scope["path"]
        if not OPEN.fullmatch(path):
            sender = request.client.host if request.client else "an unknown address"
            log.warning("refused a request of %s for %s, which is not for sites", sender, path)
            return PlainTextResponse("not for sites", 403)
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_BYTES:
                return PlainTextResponse("the request is too large", 413)
        headers = [(name, value) for name, value in request.headers.items() if name not in _HOP]
        try:
            answer = await client.post(path, content=bytes(body), headers=headers)
        except httpx.TransportError as error:
            log.warning("the SuperLink does not answer: %s", error)
            return PlainTextResponse("the SuperLink does not answer", 503)
        kept = {name: value for name, value in answer.headers.items() if name not in _HOP | {"content-encoding"}}
        return Response(answer.content, answer.status_code, kept)

    return Starlette(routes=[Route("/{path:path}", pass_on, methods=["POST"])], lifespan=lifespan)


def run_gate(superlink: str, host: str, port: int, certificates: Path) -> None:
    """Serve the gate at host:port for the SuperLink at host:port `superlink`, until the process ends. `certificates`
    holds ca.crt, server.crt and server.key, which the SuperLink uses too."""
    files = {name: certificates / name for name in ("ca.crt", "server.crt", "server.key")}
    for file in files.values():
        if not file.is_file():
            raise ConfigError(f"{file} is missing: the gate needs the SuperLink's certificates (docs/deploy.md)")
    app = gate_app(f"https://{superlink}", ssl.create_default_context(cafile=str(files["ca.crt"])))
    print(f"sites can connect to {host}:{port}", flush=True)
    uvicorn.run(
        app,
        host=host,
        port=port,
        log_level="warning",
        ssl_certfile=str(files["server.crt"]),
        ssl_keyfile=str(files["server.key"]),
    )
