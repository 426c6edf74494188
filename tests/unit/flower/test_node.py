"""A site's node waits while the server counts an earlier node with its key as online."""

import httpx
import pytest
from flwr.common.config import parse_config_args
from flwr.proto.fleet_pb2 import ActivateNodeRequest, ActivateNodeResponse

from consilience.core.errors import ConfigError
from consilience.flower.deployment import node
from consilience.flower.deployment.node import FORGOTTEN, SiteClient, _with_files, run_node


@pytest.fixture
def server(monkeypatch):
    """A server that answers with these codes, one after the other; the last one stays. Time passes in sleeps only."""
    now = [0.0]
    monkeypatch.setattr(node.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(node.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def server(*codes):
        left = list(codes)

        def answer(request):
            code = left.pop(0) if len(left) > 1 else left[0]
            if code is None:
                raise httpx.ConnectError("tlsv13 alert certificate required")
            return httpx.Response(code, content=ActivateNodeResponse(node_id=7).SerializeToString())

        client = SiteClient("https://gate", interceptors=[])
        client._client = httpx.Client(transport=httpx.MockTransport(answer))
        return client, now

    return server


def test_a_node_waits_until_the_server_has_forgotten_an_earlier_one(server, caplog):
    client, now = server(*[412] * 12, 200)
    assert client.ActivateNode(ActivateNodeRequest()).node_id == 7
    assert now[0] == FORGOTTEN
    assert "for 60 s after a node with the same key was killed, and if the key is not registered" in caplog.text


def test_a_node_that_is_not_registered_is_refused_in_the_end(server):
    client, now = server(412)
    with pytest.raises(httpx.HTTPStatusError):
        client.ActivateNode(ActivateNodeRequest())
    assert FORGOTTEN < now[0] < 2 * FORGOTTEN


@pytest.mark.parametrize("code", [401, 403, 500])
def test_other_refusals_are_not_waited_for(server, code):
    client, now = server(code)
    with pytest.raises(httpx.HTTPStatusError):
        client.ActivateNode(ActivateNodeRequest())
    assert now[0] == 0


def test_a_server_that_cannot_be_reached_is_named(server, caplog):
    client, _ = server(None)
    with pytest.raises(httpx.ConnectError):
        client.ActivateNode(ActivateNodeRequest())
    assert "the server cannot be reached: tlsv13 alert certificate required" in caplog.text


def test_a_node_needs_all_of_its_certificates(tmp_path):
    with pytest.raises(ConfigError, match="needs all of --authority, --certificate and --key"):
        run_node(9094, [], key=tmp_path / "key")


@pytest.mark.parametrize("options", [[], ["--node-config", 'site="north"', "--verbose"]])
def test_the_site_signs_secure_sums_with_the_files_of_the_node(options, tmp_path):
    files = {name: tmp_path / name for name in ("authority", "certificate", "key")}
    found = _with_files(options, **files)
    settings = parse_config_args([found[found.index("--node-config") + 1]])
    assert {name: settings[name] for name in files} == {name: str(path) for name, path in files.items()}
    assert settings.get("site") == ("north" if options else None)
    assert found.count("--node-config") == 1
