"""The status of a federation: what happened, read without a trace, and shown without running what it quotes."""

import json
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from consilience.cli import app
from consilience.core.errors import CheckpointError, ConfigError
from consilience.flower.activity import EVERY, FILE, Activity, Snapshot
from consilience.flower.audit import AuditLog
from consilience.flower.messages import TrainReply, encode
from consilience.flower.status import LATE, LATEST, Status
from consilience.flower.status_page import StatusServer, html_of, page_of, sentence
from support.flower_grid import FEDAVG, unhurried
from support.pages import check_page
from support.scenarios import NAMES, blobs
from support.trust import Sites

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a run of three rounds: one site fails in the second, and one does not answer in the third."""
    task, train, test = blobs(clients=4)
    names = (*NAMES[:3], HOSTILE)
    folder = tmp_path_factory.mktemp("status")
    with unhurried():
        there = Sites(FEDAVG, task, replace(train, names=names), folder, replace(test, names=names))
        reason = "round 2 failed; the log of its node says why"
        there.faults[2, HOSTILE] = lambda delivery: delivery.reply(encode(TrainReply(status="failed", reason=reason)))
        there.faults[3, "Bern"] = lambda delivery: None
        there.serve(3, evaluate_every=1)
    AuditLog(there.out).write("refused", site=HOSTILE, reason="no certificate")
    return there.out


def test_the_status_says_who_answered_and_why_others_did_not(run):
    found = Status.read(run)
    assert (found.round, found.planned, found.secure, found.chain) == (3, 3, False, "")
    sites = {site.name: site for site in found.sites}
    assert sites.keys() == {*NAMES[:3], HOSTILE}
    assert [(sites[name].answered, sites[name].asked, sites[name].round) for name in ("Basel", "Bern", HOSTILE)] == [
        (3, 3, 3), (2, 3, 2), (2, 3, 3)
    ]  # fmt: skip
    assert (sites[HOSTILE].refused_round, sites[HOSTILE].reason) == (2, "round 2 failed; the log of its node says why")
    assert (sites["Bern"].refused_round, sites["Bern"].reason) == (3, "it did not reply within 20 seconds")
    assert sites["Basel"].bytes_up > sites["Bern"].bytes_up > 0
    assert found.bytes_up == sum(line["bytes_up"] for line in found.rounds) > 0
    assert all(site.online and 0 <= found.sign - site.seen < 60 for site in found.sites)
    assert found.events[-1]["site"] == HOSTILE


def test_reading_the_status_changes_nothing(run):
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}
    html_of(run)
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}


def test_the_page_escapes_what_sites_say_and_loads_nothing(run):
    page = html_of(run)
    check_page(page)
    assert HOSTILE not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert 'http-equiv="refresh"' in page
    assert not any(word in page for word in ("http://", "https://", "<form", "url("))


def test_a_damaged_audit_log_is_named(run, tmp_path):
    log = AuditLog(tmp_path)
    for site in ("Basel", "Bern"):
        log.write("admitted", site=site)
    copy = tmp_path / "run"
    copy.mkdir()
    for name in ("run.json", "metrics.jsonl", "sites.json", FILE):
        (copy / name).write_bytes((run / name).read_bytes())
    (copy / log.path.name).write_text(log.path.read_text().replace("Basel", "Chur"))
    found = Status.read(copy)
    assert found.chain.startswith("line 2 of")
    assert "Damaged" in html_of(copy)


def test_a_server_without_a_sign_may_be_down(run):
    found = replace(Status.read(run), planned=9)
    late = replace(found, read_at=found.sign + LATE + 1)
    assert "is not at work" in sentence(late)
    assert page_of(late).tiles[1].value == "–", "nobody knows who is online"
    busy = replace(found, read_at=found.sign + 1, doing="asks for updates", waits_for=["Basel", "Bern"])
    assert sentence(busy) == "The server's last sign is 1 s ago: it asks for updates; it waits for Basel and Bern."
    assert sentence(replace(found, sign=0.0)) == "The server has left no sign of its work."


def test_refusals_before_the_latest_rounds_are_those_of_the_sites(run):
    found = Status.read(run)
    recent = replace(found, rounds=found.rounds[2:])
    (table,) = page_of(recent).sections[1].tables
    assert [(row[0].text, row[1].text) for row in table.rows] == [("3", "Bern"), ("2", HOSTILE)]
    assert len(found.rounds) <= LATEST


def test_a_directory_without_a_run_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="is not a run directory"):
        Status.read(tmp_path)
    assert "is not a run directory" in html_of(tmp_path)


# The command


def command(*words):
    return CliRunner().invoke(app, ["flower", "status", *map(str, words)])


def test_the_command_prints_tables_or_json_or_writes_the_page(run, tmp_path):
    shown = command(run)
    assert shown.exit_code == 0
    assert all(word in shown.output for word in ("rounds 3 of 3", "Basel", "did not", "refused"))
    assert json.loads(command(run, "--json").stdout)["sites"][1]["name"] == "Basel"
    assert command(run, "--page", tmp_path / "page.html").exit_code == 0
    check_page((tmp_path / "page.html").read_text())


def test_the_command_shows_the_status_in_one_way(run, tmp_path):
    done = command(run, "--json", "--page", tmp_path / "page.html")
    assert str(done.exception) == "choose one of --json, --serve and --page"


# The server of the page


@pytest.fixture
def server(run):
    with StatusServer(run, 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def fetched(server, path="/", method="GET", host=None):
    """(status, headers, text) of the answer to a request."""
    address = f"127.0.0.1:{server.server_port}"
    request = urllib.request.Request(f"http://{address}{path}", method=method, headers={"Host": host or address})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


def test_the_page_is_served_to_this_machine_alone(server):
    assert server.server_address[0] == "127.0.0.1"
    code, headers, page = fetched(server)
    assert (code, headers.get_content_type()) == (200, "text/html")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "FedAvg" in page
    assert fetched(server, host=f"localhost:{server.server_port}")[0] == 200
    assert fetched(server, host="evil.example.org")[0] == 403, "a name of another machine, as in DNS rebinding"


def test_the_status_is_served_as_json(server, run):
    code, headers, text = fetched(server, "/status.json")
    found, wanted = json.loads(text), Status.read(run).to_json()
    assert (code, headers.get_content_type()) == (200, "application/json")
    assert {**found, "read_at": 0} == {**json.loads(json.dumps(wanted)), "read_at": 0}


@pytest.mark.parametrize(
    ("path", "method", "code"),
    [("/", "POST", 501), ("/", "DELETE", 501), ("/", "HEAD", 200), ("/run.json", "GET", 404), ("/../etc", "GET", 404)],
)
def test_nothing_else_is_served(server, path, method, code):
    assert fetched(server, path, method)[0] == code


def test_a_port_in_use_is_named(server, run):
    with pytest.raises(ConfigError, match=r"port .* cannot be used: .*\. Choose another --serve PORT"):
        StatusServer(run, server.server_port)


# The file of the server's activity


def test_the_file_is_written_from_open_on_and_not_more_often_than_needed(tmp_path):
    now = [100.0]
    activity = Activity(clock=lambda: now[0])
    activity.online(["Basel"])
    assert not (tmp_path / FILE).exists()
    activity.open(tmp_path, secure=True)
    assert Snapshot.read(tmp_path).sites["Basel"].online
    activity.online(["Bern"])
    assert "Bern" not in Snapshot.read(tmp_path).sites
    now[0] += EVERY
    activity.online(["Bern"])
    found = Snapshot.read(tmp_path)
    assert [(name, site.online, site.seen) for name, site in found.sites.items()] == [
        ("Basel", False, 100.0), ("Bern", True, 100.0 + EVERY)
    ]  # fmt: skip
    assert found.secure
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_a_server_that_starts_again_goes_on_with_the_file(run, tmp_path):
    (tmp_path / FILE).write_bytes((run / FILE).read_bytes())
    activity = Activity()
    activity.online(["Basel"])
    activity.open(tmp_path, secure=False)
    sites = Snapshot.read(tmp_path).sites
    assert (sites["Bern"].answered, sites["Bern"].online) == (2, False)


def test_a_file_that_cannot_be_written_or_read_stops_nothing(tmp_path, caplog):
    activity = Activity()
    activity.open(tmp_path / "gone", secure=False)
    assert "cannot be written" in caplog.text
    (tmp_path / FILE).write_text("{")
    assert Snapshot.read(tmp_path) == Snapshot()
    assert time.time() > activity.now.time
