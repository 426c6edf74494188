"""The status of a federation as a page for its operators, and a server that shows it on this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from consilience.core import text
from consilience.core.errors import ConfigError, ConsilienceError
from consilience.flower.status import SiteStatus, Status
from consilience.report.page import Cell, Page, Section, Table, Tile, render

REFRESH = 10  # seconds
HOST = "127.0.0.1"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def ago(status: Status, when: float) -> str:
    """How long before the status was read."""
    return f"{text.duration(max(0.0, status.read_at - when))} ago" if when else "never"


def sentence(status: Status) -> str:
    """What the server does, in a sentence."""
    if not status.sign:
        return "The server has left no sign of its work."
    sign = f"The server's last sign is {ago(status, status.sign)}"
    if status.round >= status.planned and not status.waits_for:
        return f"{sign}. All rounds are done."
    if status.late:
        return f"{sign}: it computes for long, waits for another process, or is not at work."
    waits = f"; it waits for {text.listing(status.waits_for)}" if status.waits_for else ""
    return f"{sign}: it {status.doing}{waits}."


def page_of(status: Status) -> Page:
    """The page."""
    online = sum(site.online for site in status.sites)
    tiles = [
        Tile("Rounds", f"{status.round} of {status.planned}"),
        Tile("Sites online", text.NONE if status.late else f"{online} of {len(status.sites)}"),
        Tile("Updates received", text.data_size(status.bytes_up)),
        Tile("Sent in rounds", text.data_size(status.bytes_down)),
    ]
    sums = "The server sees sums over sites and no site's own update." if status.secure else ""
    lead = " ".join(filter(None, [sentence(status), sums]))
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(status.read_at))
    return Page(
        "Federation", f"{status.method} in {status.directory}", lead, tiles, "", _sections(status),
        f"Read {when}.", refresh=REFRESH,
    )  # fmt: skip


def _sections(status: Status) -> list[Section]:
    events = [
        [Cell(str(event.get("time", ""))), Cell(str(event.get("event", ""))), Cell(_facts(event))]
        for event in reversed(status.events)
    ]
    damaged = (("Damaged", f"{status.chain}. Restore it from a backup, and ask who may write it."),)
    return [
        Section("Sites", tables=[Table(SITE_HEAD, [_site(status, site) for site in status.sites])]),
        Section("Latest refusals", tables=_tables(["round", "site", "reason"], _refusals(status))),
        Section("Latest rounds", tables=_rounds(status)),
        Section(
            "Audit log",
            "" if status.chain else "Its lines hang together.",
            facts=damaged if status.chain else (),
            tables=_tables(["time", "event", "facts"], events),
        ),
    ]


SITE_HEAD = ["site", "takes part", "online", "last seen", "examples", "answered", "last round", "received"]
ROUND_HEAD = ["round", "seconds", "answered", "rejected", "received", "sent"]
SCORES = 3  # that are shown


def _tables(head: list[str], rows: list[list[Cell]]) -> list[Table]:
    return [Table(head, rows, prose=True)] if rows else []


def _site(status: Status, site: SiteStatus) -> list[Cell]:
    return [
        Cell(site.name),
        Cell(site.takes_part or "no", quiet=site.takes_part != "active"),
        Cell(text.NONE if status.late else "yes" if site.online else "no", quiet=status.late or not site.online),
        Cell(ago(status, site.seen), sort=site.seen),
        Cell.of(site.examples, 0),
        Cell(f"{site.answered} of {site.asked}", sort=site.answered),
        Cell(str(site.round or text.NONE), sort=site.round),
        Cell(text.data_size(site.bytes_up), sort=site.bytes_up),
    ]


def _refusals(status: Status) -> list[list[Cell]]:
    """Why updates were refused in the latest rounds, and the last refusals of sites before them."""
    shown = [
        (line["round"], str(entry["client"]), str(entry["reason"]))
        for line in reversed(status.rounds)
        for entry in line["rejected"]
    ]
    first = status.rounds[0]["round"] if status.rounds else 0
    older = [(site.refused_round, site.name, site.reason) for site in status.sites if site.reason]
    shown += sorted((entry for entry in older if entry[0] < first), reverse=True)
    return [[Cell(str(at), sort=at), Cell(name), Cell(reason)] for at, name, reason in shown]


def _rounds(status: Status) -> list[Table]:
    scores = [line.get("marginal") or line.get("eval") or {} for line in status.rounds]
    names = text.in_order(name for found in scores for name in found)[:SCORES]
    places = {name: text.decimals(found.get(name) for found in scores) for name in names}
    rows = [
        [
            Cell(str(line["round"]), sort=line["round"]),
            Cell(f"{line['seconds']:.1f}", sort=line["seconds"]),
            Cell(str(line["clients"]), sort=line["clients"]),
            Cell(str(len(line["rejected"])), sort=len(line["rejected"])),
            Cell(text.data_size(line["bytes_up"]), sort=line["bytes_up"]),
            Cell(text.data_size(line["bytes_down"]), sort=line["bytes_down"]),
            *(Cell.of(found.get(name), places[name]) for name in names),
        ]
        for line, found in zip(status.rounds, scores, strict=True)
    ]
    return [Table([*ROUND_HEAD, *map(text.short, names)], rows[::-1])] if rows else []


def _facts(event: dict[str, Any]) -> str:
    """The facts of an event of the audit log as a text."""
    facts = {name: value for name, value in event.items() if name not in ("time", "event")}
    return text.plain(", ".join(f"{name}: {value}" for name, value in facts.items()))


def html_of(folder: Path) -> str:
    """The page of the run in a directory, or one that says why there is none."""
    try:
        return render(page_of(Status.read(folder)))
    except ConsilienceError as error:
        return render(Page("Federation", str(folder), str(error), [], "", [], "", refresh=REFRESH))


class StatusServer(ThreadingHTTPServer):
    """Serves the page at / and the status at /status.json, to programs of this machine, on 127.0.0.1 alone. It answers
    GET and HEAD, changes nothing, and refuses names of other machines, by which a web page could read it."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        handler = type("Handler", (_Handler,), {"folder": folder})
        try:
            super().__init__((HOST, port), handler)
        except OSError as error:
            raise ConfigError(f"port {port} cannot be used: {error.strerror}. Choose another --serve PORT") from error


class _Handler(BaseHTTPRequestHandler):
    folder: ClassVar[Path]
    server: StatusServer
    server_version, sys_version = "consilience", ""

    def do_GET(self) -> None:
        names = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        routes: dict[str, tuple[str, Callable[[], str]]] = {
            "/": ("text/html", lambda: html_of(self.folder)),
            "/status.json": ("application/json", lambda: json.dumps(Status.read(self.folder).to_json())),
        }
        if self.headers.get("Host") not in names:
            return self._answer(HTTPStatus.FORBIDDEN, "text/plain", "This page is for this machine.")
        if self.path not in routes:
            return self._answer(HTTPStatus.NOT_FOUND, "text/plain", "There are / and /status.json.")
        kind, content = routes[self.path]
        try:
            return self._answer(HTTPStatus.OK, kind, content())
        except ConsilienceError as error:
            return self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", str(error))

    do_HEAD = do_GET  # noqa: N815

    def _answer(self, code: HTTPStatus, kind: str, content: str) -> None:
        data = content.encode()
        self.send_response(code)
        for name, value in {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": len(data), **HEADERS}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""
