"""The gate passes on the requests of sites and no others, within limits of bytes, time and connections."""

import asyncio

import httpx
import pytest

from consilience.core.errors import ConfigError
from consilience.flower.deployment import gate
from consilience.flower.deployment.gate import HEADER_BYTES, MAX_BYTES, Gate, Places, Site, run_gate

NORTH = Site("north", b"the key of north")


class Written(bytearray):
    write = bytearray.extend

    async def drain(self):
        pass


def request(path, body=b"x", method="POST", **headers):
    lines = {"host": "gate", "content-length": len(body), "flwr-public-key": NORTH.key.decode(), **headers}
    head = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in lines.items()), "", ""]
    return "\r\n".join(head).encode() + body


def converse(*pieces, fails=False, more=False):
    """(all that the gate sends to north, the requests that reached the SuperLink as (URL, headers, body))."""
    seen, written = [], Written()

    async def superlink(request):
        body = await request.aread()
        if fails:
            raise httpx.ConnectError("refused")
        seen.append((str(request.url), request.headers, body))
        return httpx.Response(401, stream=httpx.ByteStream(b"answer"), headers={"x-flower": "1"})

    async def talk():
        reader = asyncio.StreamReader()
        for piece in pieces:
            reader.feed_data(piece)
        if not more:
            reader.feed_eof()
        transport = httpx.MockTransport(superlink)
        async with httpx.AsyncClient(base_url="https://127.0.0.1:8000", transport=transport) as client:
            await Gate(client, None).converse(NORTH, reader, written)

    asyncio.run(talk())
    return bytes(written), seen


def status(answer):
    return int(answer.split(b" ", 2)[1])


def test_the_requests_of_a_connection_are_passed_on_unchanged():
    first = request("/v1/fleet/pull-messages", b"\x00body", **{"flwr-signature": "s"})
    answer, seen = converse(first, request("/v1/fleet/get-run"))
    assert answer.count(b"HTTP/1.1 401") == answer.count(b"x-flower: 1") == answer.count(b"answer") == 2
    (url, headers, body), (last, _, _) = seen
    assert url == "https://127.0.0.1:8000/v1/fleet/pull-messages"
    assert (body, headers["flwr-signature"], headers["host"]) == (b"\x00body", "s", "127.0.0.1:8000")
    assert last.endswith("/get-run")


@pytest.mark.parametrize(
    "path",
    [
        "/", "/docs", "/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/v1/fleet/",
        "/v1/fleet/../control/start-run", "/v1/fleet/%2e%2e/control/start-run", "/v1/fleet/..%2fcontrol%2fstart-run",
        "//v1/fleet/get-run", "/v1/fleet/get-run/", "/V1/fleet/get-run", "/v1/fleet/get-run%0a", "/v1/fleet/get-run?a",
    ],
)  # fmt: skip
def test_no_other_path_reaches_the_superlink(path):
    answer, seen = converse(request(path))
    assert (status(answer), seen) == (403, [])


def test_a_site_cannot_send_requests_with_the_key_of_another():
    answer, seen = converse(request("/v1/fleet/pull-messages", **{"flwr-public-key": "another"}))
    assert (status(answer), seen) == (403, [])
    assert b"not signed with the key of the certificate" in answer


def test_a_request_names_one_key():
    head = request("/v1/fleet/pull-messages").replace(b"host: gate", b"flwr-public-key: another")
    assert status(converse(head.replace(b"\r\n\r\n", b"\r\nhost: gate\r\n\r\n"))[0]) == 403


def test_requests_have_a_largest_size_and_must_be_posts():
    assert status(converse(request("/v1/fleet/push-object", b"0" * MAX_BYTES))[0]) == 401
    answer, seen = converse(request("/v1/fleet/push-object", b"0" * (MAX_BYTES + 1)))
    assert (status(answer), seen) == (413, [])
    answer, seen = converse(request("/v1/fleet/get-run", method="GET"))
    assert (status(answer), seen) == (405, [])


def test_a_body_of_unknown_length_has_the_same_largest_size():
    head = request("/v1/fleet/push-object", b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    piece = b"%x\r\n%s\r\n" % (1 << 20, b"0" * (1 << 20))
    assert status(converse(head, piece, b"0\r\n\r\n")[0]) == 401
    answer, seen = converse(head, *[piece] * (MAX_BYTES // (1 << 20) + 1), more=True)
    assert (status(answer), seen) == (413, [])


def test_headers_have_a_largest_size():
    answer, seen = converse(request("/v1/fleet/get-run", **{"x": "0" * 2 * HEADER_BYTES}))
    assert (status(answer), seen) == (431, [])


@pytest.mark.parametrize("sent", [b"", b"POST /v1/fleet/get-run HTTP/1.1\r\n", request("/v1/fleet/get-run")[:-1]])
def test_a_request_must_come_in_time(sent, monkeypatch):
    monkeypatch.setattr(gate, "IDLE", 0.05)
    monkeypatch.setattr(gate, "REQUEST", 0.05)
    with pytest.raises(TimeoutError):
        converse(sent, more=True)


def test_what_is_not_http_is_refused():
    assert status(converse(b"\x16\x03\x01 nonsense\r\n\r\n")[0]) == 400


def test_a_superlink_that_is_down_is_unavailable():
    assert status(converse(request("/v1/fleet/get-run"), fails=True)[0]) == 503


@pytest.mark.parametrize(
    ("peers", "ended"), [("aaa", [0]), ("aaabbb", [0, 3]), ("abcdef", [0, 1]), ("ab", []), ("abcdb", [0])]
)
def test_a_connection_beyond_the_limits_ends_the_peers_oldest_or_the_oldest_of_all(peers, ended):
    async def run():
        places = Places(each=2, total=4)

        async def hold(peer):
            with places.hold(peer):
                await asyncio.sleep(10)

        tasks = []
        for peer in peers:
            tasks.append(asyncio.create_task(hold(peer)))
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        found = [i for i, task in enumerate(tasks) if task.done()]
        for task in tasks:
            task.cancel()
        return found

    assert asyncio.run(run()) == ended


def test_a_gate_needs_certificates(tmp_path):
    with pytest.raises(ConfigError, match=r"ca\.crt is missing: the gate needs the SuperLink's certificates"):
        run_gate("127.0.0.1:8000", "127.0.0.1", 8443, tmp_path)
