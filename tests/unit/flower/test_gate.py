"""The gate passes on the requests of sites and no others."""

import asyncio

import httpx
import pytest

from consilience.core.errors import ConfigError
from consilience.flower.deployment.gate import MAX_BYTES, gate_app, run_gate


def asked(path, content=b"x", method="POST", fails=False, **headers):
    """(the gate's response, the requests that reached the SuperLink)."""
    seen = []

    def superlink(request):
        if fails:
            raise httpx.ConnectError("refused")
        seen.append(request)
        return httpx.Response(401, content=b"answer", headers={"x-flower": "1"})

    async def ask():
        app = gate_app("https://127.0.0.1:8000", transport=httpx.MockTransport(superlink))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="https://gate") as client:
            request = client.build_request(method, "/", content=content, headers=headers)
            request.url = request.url.copy_with(raw_path=path.encode())
            return await client.send(request)

    return asyncio.run(ask()), seen


def test_a_sites_request_is_passed_on_unchanged():
    answer, seen = asked("/v1/fleet/pull-messages", b"\x00body", **{"flwr-signature": "s"})
    assert (answer.status_code, answer.content, answer.headers["x-flower"]) == (401, b"answer", "1")
    (request,) = seen
    assert str(request.url) == "https://127.0.0.1:8000/v1/fleet/pull-messages"
    assert (request.content, request.headers["flwr-signature"]) == (b"\x00body", "s")
    assert request.headers["host"] == "127.0.0.1:8000"


@pytest.mark.parametrize(
    "path",
    [
        "/", "/docs", "/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/v1/fleet/",
        "/v1/fleet/../control/start-run", "/v1/fleet/%2e%2e/control/start-run", "/v1/fleet/..%2fcontrol%2fstart-run",
        "//v1/fleet/get-run", "/v1/fleet/get-run/", "/V1/fleet/get-run", "/v1/fleet/get-run%0a",
    ],
)  # fmt: skip
def test_no_other_path_reaches_the_superlink(path):
    answer, seen = asked(path)
    assert (answer.status_code, seen) == (403, [])


def test_requests_have_a_largest_size_and_must_be_posts():
    assert asked("/v1/fleet/push-object", b"0" * MAX_BYTES)[0].status_code == 401
    answer, seen = asked("/v1/fleet/push-object", b"0" * (MAX_BYTES + 1))
    assert (answer.status_code, seen) == (413, [])
    answer, seen = asked("/v1/fleet/get-run", method="GET")
    assert (answer.status_code, seen) == (405, [])


def test_a_superlink_that_is_down_is_unavailable():
    assert asked("/v1/fleet/get-run", fails=True)[0].status_code == 503


def test_a_gate_needs_certificates(tmp_path):
    with pytest.raises(ConfigError, match=r"ca\.crt is missing: the gate needs the SuperLink's certificates"):
        run_gate("127.0.0.1:8000", "127.0.0.1", 8443, tmp_path)
