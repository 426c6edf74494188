"""The gate on real sockets: sites get through, strangers do not, and idle connections keep nobody out."""

import asyncio
import contextlib
import socket
import ssl
import threading
from base64 import b64encode

import httpx
import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from consilience.flower.deployment import gate
from consilience.flower.deployment.certificates import certify, make_key, make_server_certificate
from consilience.flower.deployment.gate import Gate, Site
from consilience.flower.deployment.node import client_tls

SITES = ("north", "south")


@pytest.fixture
def folder(tmp_path):
    make_server_certificate(tmp_path)
    for name in SITES:
        certify(tmp_path, name, make_key(tmp_path / f"{name}.key"))
    return tmp_path


@pytest.fixture
def port(folder, monkeypatch):
    """The port of a gate before a SuperLink that says yes. It has few places, and little patience for handshakes."""
    monkeypatch.setattr(gate, "STRANGERS", 8)
    monkeypatch.setattr(gate, "STRANGERS_OF_ADDRESS", 8)
    monkeypatch.setattr(gate, "HANDSHAKE", 2.0)
    monkeypatch.setattr(gate, "CONNECTIONS_OF_SITE", 4)
    transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=httpx.ByteStream(b"yes")))
    loop, begun = asyncio.new_event_loop(), threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)

    async def serve():
        async with httpx.AsyncClient(transport=transport, base_url="https://superlink") as client:
            begun.set()
            await Gate(client, gate.server_tls(folder)).serve(listener)

    task = loop.create_task(serve())

    def run():
        with contextlib.suppress(asyncio.CancelledError), listener:
            loop.run_until_complete(task)

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(10)
    yield listener.getsockname()[1]
    loop.call_soon_threadsafe(task.cancel)
    thread.join(10)
    loop.run_until_complete(asyncio.sleep(0.1))
    for left in asyncio.all_tasks(loop):
        left.cancel()
    loop.run_until_complete(asyncio.sleep(0.1))
    loop.close()


def site(folder, name):
    """(the TLS settings of a site, the headers of its requests)."""
    tls = client_tls(folder / "ca.crt", folder / f"{name}.crt", folder / f"{name}.key")
    seen = Site.of(ssl.PEM_cert_to_DER_cert((folder / f"{name}.crt").read_text()))
    return tls, {"flwr-public-key": seen.key.decode()}


def ask(port, tls, headers):
    with httpx.Client(verify=tls, base_url=f"https://localhost:{port}", timeout=10) as client:
        return client.post("/v1/fleet/get-run", content=b"x", headers=headers)


def test_a_site_gets_through_with_its_own_key_only(folder, port):
    (north, key), (_, other) = (site(folder, name) for name in SITES)
    assert (ask(port, north, key).status_code, ask(port, north, key).content) == (200, b"yes")
    assert ask(port, north, other).status_code == 403


def test_a_stranger_does_not_get_through(folder, port):
    with pytest.raises(httpx.TransportError):
        ask(port, ssl.create_default_context(cafile=str(folder / "ca.crt")), {})


def test_idle_strangers_keep_no_site_out_and_are_ended(folder, port):
    held = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(40)]
    tls, key = site(folder, "north")
    assert all(ask(port, tls, key).status_code == 200 for _ in range(3))
    assert [one.recv(1) for one in held] == [b""] * 40, "the last ones after the time of a handshake"
    for one in held:
        one.close()


def test_a_site_that_holds_many_connections_ends_its_own_oldest_ones(folder, port):
    tls, _ = site(folder, "south")
    held = [
        tls.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=10), server_hostname="localhost")
        for _ in range(6)
    ]
    for one in held[:2]:
        with contextlib.suppress(ConnectionError):
            assert one.recv(1) == b""
    assert ask(port, *site(folder, "north")).status_code == 200
    for one in held:
        one.close()


def test_the_header_that_the_gate_compares_is_flowers(folder):
    _, headers = site(folder, "north")
    key = (folder / "north.pub").read_bytes()
    assert headers["flwr-public-key"] == b64encode(public_key_to_bytes(load_ssh_public_key(key))).decode()
