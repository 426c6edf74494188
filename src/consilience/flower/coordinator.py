"""The server's view of the sites that are online: waits for them, sends requests by site name, yields replies."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from flwr.app import RecordDict
from flwr.serverapp import Grid

from consilience.core import ConfigError, ConsilienceError, Count, DataError, Positive, RecordError, check_types
from consilience.data.tables import Preparation
from consilience.flower.activity import Activity
from consilience.flower.messages import Failure, InfoRequest, SiteInfo, decode, encode
from consilience.flower.registry import by_form, form_of
from consilience.flower.transport import Node, Reply, Transport

log = logging.getLogger("consilience")
REFRESH = 3.0  # seconds between two looks at the list of nodes
INFO_TIMEOUT = 120.0  # seconds that a run waits for the information of a new node
REMINDER = 30.0  # seconds between two log lines while the server waits


@dataclass(frozen=True)
class Participation:
    """How many sites a run needs and how long the server waits for them.

    A run begins when `clients` sites are online. A round counts if at least `min_clients` of its clients send an
    update that is accepted. The clients of a round have `timeout` seconds. If too few are online, the server waits
    `patience` seconds before it gives up. No site counts for more than `max_examples`, which by default is 10 times the
    median of all sites, and no more than all other sites have together if there are three or more."""

    clients: Count
    min_clients: Count = 1
    timeout: Positive = 600.0
    patience: Positive = 3600.0
    max_examples: Count | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.min_clients > self.clients:
            raise ConfigError(f"min_clients is {self.min_clients}, but there are only {self.clients} clients")


@dataclass
class Coordinator:
    """Knows sites by name. If several nodes have one name, the latest counts, except that a node whose key is
    registered for a site is the only one that can act as this site. Where nodes have keys, a node without a registered
    name cannot act as any site."""

    grid: Grid
    participation: Participation
    fingerprint: str
    preparation: Preparation | None = None
    """How the sites' tables become examples; None before it is known, and if they hold no tables."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    online: dict[str, tuple[Node, SiteInfo]] = field(default_factory=dict)
    capped: set[str] = field(default_factory=set)
    """The sites that count for fewer held-out examples than they have. Each is logged once."""
    activity: Activity = field(default_factory=Activity)
    _asked: dict[Node, float] = field(default_factory=dict)
    _unknown: set[Node] = field(default_factory=set)
    _registered: set[str] = field(default_factory=set)
    _refreshed: float = float("-inf")
    _requests: int = 0

    def __post_init__(self) -> None:
        self._transport = Transport(self.grid, self.clock)

    def next_request(self) -> int:
        """The number of the next training request; the first is 1."""
        self._requests += 1
        return self._requests

    def gather(self, count: int) -> list[SiteInfo]:
        """The information of the online sites with the most frequent form of examples, as soon as `count` of them are
        online. The log names the others, which are left out."""
        for _ in self.waiting(lambda: f"{len(self.online)} of {count} sites are online{self._names()}{self._forms()}"):
            self.poll()
            alike, *odd = self._groups() or [[]]
            if len(alike) >= count and len(alike) > max(map(len, odd), default=0) and not self._unknown:
                if odd:
                    names = ", ".join(repr(site.name) for group in odd for site in group)
                    log.warning("the run begins without %s%s", names, self._forms())
                return alike
        if forms := self._forms():
            raise DataError(f"patience = {self.participation.patience:g} seconds have passed{forms}")
        raise ConsilienceError(
            f"only {len(self.online)} of {count} sites came online within patience = "
            f"{self.participation.patience:g} seconds{self._names()}. Start the nodes of the others, each with a site= "
            "of its own, and run the app again"
        )

    def waiting(self, news: Callable[[], str]) -> Iterator[None]:
        """Iterate until `patience` has passed, with a log line every `REMINDER` seconds."""
        end, said = self.clock() + self.participation.patience, self.clock()
        while self.clock() < end:
            yield
            if self.clock() - said > REMINDER:
                said = self.clock()
                log.warning("waiting: %s", news())
            self.sleep(0.2)

    def available(self, names: Iterable[str]) -> list[str]:
        """Which of these sites are online, once every online node has sent its information."""
        end = self.clock() + INFO_TIMEOUT
        self.poll(now=True)
        while self._unknown and self.clock() < end:
            self.sleep(0.1)
            self.poll()
        return [name for name in names if name in self.online]

    def ask(
        self,
        kind: str,
        names: Iterable[str],
        content: Callable[[str], RecordDict],
        seconds: float,
        longest: int = 0,
    ) -> Iterator[tuple[str, RecordDict | Failure]]:
        """Send the sites their requests and yield (site, reply) as replies come; at last, a failure for each site
        without a reply. `content(name)` makes a site's request when it is sent, and a reply is read when the one before
        has been used. The packed records of a reply have at most `longest` bytes. A site whose node restarts meanwhile
        gets its request again, so a site must tolerate repeats."""
        sent: dict[str, Node] = {}
        end = self.clock() + seconds
        missing, pause = set(names), 0.02
        self.activity.asks(kind, missing)
        while missing and self.clock() < end:
            for name in sorted(missing & self.online.keys()):
                if sent.get(name) != self.online[name][0]:
                    sent[name] = self.online[name][0]
                    left = end - self.clock()
                    self._transport.send(kind, f"{kind} {name}", sent[name], content(name), left, longest)
            for name, node, reply in self._replies():
                if name in missing and (node == sent.get(name) or not isinstance(reply, Failure)):
                    missing.discard(name)
                    self.activity.hears(name, reply)
                    yield name, reply
                del reply  # before the next is read
            if missing:
                self.sleep(pause)
                pause = min(1.5 * pause, 1.0)
        self._transport.forget(kind)
        for name in sorted(missing):
            yield name, Failure(f"it did not reply within {seconds:g} seconds")

    def poll(self, now: bool = False) -> None:
        """Look at the list of nodes, if it is time or `now`, and handle what nodes have sent about themselves."""
        for _ in self._replies(now):
            pass

    def _replies(self, now: bool = False) -> Iterator[Reply]:
        """New replies as (site, node, content). Handles the nodes' information itself."""
        if now or self.clock() - self._refreshed > REFRESH:
            self._refresh()
        for label, node, content in self._transport.collect():
            kind, _, name = label.partition(" ")
            if kind == "query":
                self._admit(node, content)
            else:
                yield name, node, content
            del content  # before the next is read

    def _refresh(self) -> None:
        """Drop nodes that are offline and ask new ones for their information."""
        self._refreshed, up = self.clock(), self._transport.nodes()
        self._registered |= {node.name for node in up if node.name}
        self.online = {name: known for name, known in self.online.items() if known[0] in up}
        self.activity.online(self.online)
        known = {node for node, _ in self.online.values()}
        self._unknown &= up
        for node in [node for node in self._unknown if self._refreshed - self._asked[node] > INFO_TIMEOUT]:
            log.warning("node %d sent no information for %g seconds: the run does not wait for it", node.id,
                        INFO_TIMEOUT)  # fmt: skip
            self._unknown.discard(node)
        expires = max(INFO_TIMEOUT, self.participation.timeout)
        for node in sorted(up - known, key=lambda node: node.since):
            if node not in self._asked:
                self._unknown.add(node)
            if self._refreshed - self._asked.get(node, float("-inf")) > expires:
                self._asked[node] = self._refreshed
                self._transport.send("query", "query", node, encode(InfoRequest(preparation=self.preparation)), expires)

    def _admit(self, node: Node, content: RecordDict | Failure) -> None:
        """Take a node in as a site, or log why it is rejected."""
        self._unknown.discard(node)
        try:
            site, _ = decode(content, SiteInfo)
        except RecordError as error:
            log.warning("node %d is rejected: its information is not valid: %s", node.id, error)
            return
        if reason := self._objection(node, site):
            log.warning("node %d is rejected: %s", node.id, reason)
            return
        before = self.online.get(site.name)
        if before is not None and before[0].since > node.since and before[0].name == node.name:
            return
        if before is not None:
            log.warning("%r has restarted, or two nodes have this name: the later node counts", site.name)
        self.online[site.name] = (node, site)

    def _objection(self, node: Node, site: SiteInfo) -> str:
        if site.fingerprint != self.fingerprint:
            return (
                f"the method or network of {site.name!r} is not the server's; start it with the same app and the same "
                "version of consilience"
            )
        if not node.name and self._transport.encrypted:
            return (
                f"its key is registered without a name, so it cannot act as {site.name!r}. Unregister it (./flwr.sh "
                f"supernode list, unregister) and register it with the name: ./register.sh {site.name!r} KEY.pub"
            )
        if node.name and node.name != site.name:
            return f"its key is registered for {node.name!r}, but its name is {site.name!r}"
        if not node.name and site.name in self._registered:
            return f"another key is registered for {site.name!r}"
        return ""

    def _names(self) -> str:
        return f" ({', '.join(sorted(self.online))})" if self.online else ""

    def _groups(self) -> list[list[SiteInfo]]:
        return by_form(info for _, info in self.online.values())

    def _forms(self) -> str:
        """The forms of the sites' examples, in words, if they differ."""
        groups = self._groups()
        if len(groups) < 2:
            return ""
        forms = (f"{form_of(group[0])} at {', '.join(repr(site.name) for site in group)}" for group in groups)
        return f". The sites have different data: an example is {', but '.join(forms)}. Let all read the same columns"
