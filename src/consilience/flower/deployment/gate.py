"""A gate before Flower's link: sites get through to what is for sites, and nobody to anything else.

Flower serves all its interfaces at one port. One is for sites, who sign what they send with registered keys. The others
start runs, which is to say code at every site, register keys, and hand the server's work to whoever asks first; they
ask for no password. So the link itself should be reachable from its own machine alone, and this be what others reach.
"""

from __future__ import annotations

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
OPEN = re.compile(r"/v1/fleet/[a-z]+(-[a-z]+)*")  # what sites call; no dots, so that no path can lead out of it
LARGEST = 64 << 20  # bytes of one request: Flower cuts what is larger than 5 MB into pieces
_HOP = {"host", "connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "content-length"}


def gate(
    link: str, verify: ssl.SSLContext | bool = True, transport: httpx.AsyncBaseTransport | None = None
) -> Starlette:
    """An app that passes requests of sites on to the link at the address `link` (https://127.0.0.1:8000)."""
    client = httpx.AsyncClient(base_url=link, verify=verify, timeout=60.0, transport=transport, trust_env=False)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    async def pass_on(request: Request) -> Response:
        path = request.scope["path"]
        if not OPEN.fullmatch(path):
            who = request.client.host if request.client else "somebody"
            log.warning("%s asked for %s, which is not for sites", who, path)
            return PlainTextResponse("not for sites", 403)
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > LARGEST:
                return PlainTextResponse("too much at once", 413)
        headers = [(name, value) for name, value in request.headers.items() if name not in _HOP]
        try:
            answer = await client.post(path, content=bytes(body), headers=headers)
        except httpx.TransportError as error:
            log.warning("the link does not answer: %s", error)
            return PlainTextResponse("the link does not answer", 503)
        kept = {name: value for name, value in answer.headers.items() if name not in _HOP | {"content-encoding"}}
        return Response(answer.content, answer.status_code, kept)

    return Starlette(routes=[Route("/{path:path}", pass_on, methods=["POST"])], lifespan=lifespan)


def keep(link: str, host: str, port: int, certificates: Path) -> None:
    """Keep the gate at host:port, before the link at host:port `link`, until somebody ends it. `certificates` has
    ca.crt, server.crt and server.key, which are the link's too."""
    files = {name: certificates / name for name in ("ca.crt", "server.crt", "server.key")}
    for file in files.values():
        if not file.is_file():
            raise ConfigError(f"there is no {file}: the gate needs the link's certificates (docs/deploy.md)")
    app = gate(f"https://{link}", ssl.create_default_context(cafile=str(files["ca.crt"])))
    print(f"sites may come to {host}:{port}", flush=True)
    uvicorn.run(
        app,
        host=host,
        port=port,
        log_level="warning",
        ssl_certfile=str(files["server.crt"]),
        ssl_keyfile=str(files["server.key"]),
    )
