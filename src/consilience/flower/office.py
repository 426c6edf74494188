"""The office: which sites are there now, and what they answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from flwr.app import RecordDict
from flwr.serverapp import Grid

from consilience.core.errors import ConfigError, ConsilienceError, RecordError
from consilience.flower.letters import Failed, Introduction, Invitation, letter, opened
from consilience.flower.post import Node, Post

log = logging.getLogger("consilience")
CENSUS = 3.0  # seconds between two looks for nodes that have come or gone
INTRODUCTION = 120.0  # seconds that others wait for a node that has not said yet who it is
REMINDER = 30.0  # seconds between two lines of the log that say whom the server is waiting for


@dataclass(frozen=True)
class Manners:
    """How a server deals with its sites. A run begins when `clients` of them are there, and a round counts if at least
    `min_clients` of its clients sent an update that is fit to use. A round's clients have `timeout` seconds; where too
    few are there, the server waits `patience` seconds for more before it gives up. No site counts for more than
    `max_examples`, a hundred times the median of all when None."""

    clients: int
    min_clients: int = 1
    timeout: float = 600.0
    patience: float = 3600.0
    max_examples: int | None = None

    def __post_init__(self) -> None:
        for name in ("clients", "min_clients", "max_examples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.min_clients > self.clients:
            raise ConfigError(f"min_clients is {self.min_clients}, but there are only {self.clients} clients")
        for name in ("timeout", "patience"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be a positive number of seconds, got {getattr(self, name)}")


@dataclass
class Office:
    """Knows sites by name. A site's node may be down, and come back as another: the latest counts."""

    grid: Grid
    manners: Manners
    fingerprint: str
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    here: dict[str, tuple[Node, Introduction]] = field(default_factory=dict)
    _asked: dict[Node, float] = field(default_factory=dict)
    _unknown: set[Node] = field(default_factory=set)
    _registered: set[str] = field(default_factory=set)
    _looked: float = float("-inf")
    _orders: int = 0

    def __post_init__(self) -> None:
        self._post = Post(self.grid, self.clock)

    def next_order(self) -> int:
        """The number of the next order; the first is 1."""
        self._orders += 1
        return self._orders

    def gather(self, count: int) -> list[Introduction]:
        """All sites that are here once `count` are."""
        for _ in self.waiting(lambda: f"{len(self.here)} of {count} sites are here" + _names(self.here)):
            self.look()
            if len(self.here) >= count and not self._unknown:
                return [introduction for _, introduction in self.here.values()]
        raise ConsilienceError(
            f"only {len(self.here)} of {count} sites came within patience = {self.manners.patience:g} seconds"
            f"{_names(self.here)}: are the others' nodes running, with a site= of their own?"
        )

    def waiting(self, news: Callable[[], str]) -> Iterator[None]:
        """As long as patience lasts, with a line in the log now and then."""
        end, said = self.clock() + self.manners.patience, self.clock()
        while self.clock() < end:
            yield
            if self.clock() - said > REMINDER:
                said = self.clock()
                log.warning("waiting: %s", news())
            self.sleep(0.2)

    def settled(self, names: Iterable[str]) -> list[str]:
        """Which of these sites are here, once every node that is up has said who it is."""
        end = self.clock() + INTRODUCTION
        self.look(now=True)
        while self._unknown and self.clock() < end:  # at most until the census gives them up
            self.sleep(0.1)
            self.look()
        return [name for name in names if name in self.here]

    def ask(
        self, kind: str, letters: Mapping[str, RecordDict], seconds: float
    ) -> Iterator[tuple[str, RecordDict | Failed]]:
        """The answers of sites, by name, in the order in which they come, and in the end what is missing. A site whose
        node comes back in the meantime gets its letter again: answering twice does no harm."""
        sent: dict[str, Node] = {}
        end = self.clock() + seconds
        missing, pause = set(letters), 0.02
        while missing and self.clock() < end:
            for name in [name for name in missing if name in self.here and sent.get(name) != self.here[name][0]]:
                sent[name] = self.here[name][0]
                self._post.send(kind, [(f"{kind} {name}", sent[name], letters[name])], end - self.clock())
            for name, node, content in self.look():
                if name in missing and (node == sent.get(name) or not isinstance(content, Failed)):
                    missing.discard(name)
                    yield name, content
            if missing:
                self.sleep(pause)
                pause = min(1.5 * pause, 1.0)
        self._post.forget(kind)
        for name in sorted(missing):
            yield name, Failed(f"it did not answer within {seconds:g} seconds")

    def look(self, now: bool = False) -> list[tuple[str, Node, RecordDict | Failed]]:
        """What has come: (site, node, answer). Introductions are dealt with here."""
        if now or self.clock() - self._looked > CENSUS:
            self._census()
        answers = []
        for label, node, content in self._post.collect():
            kind, _, name = label.partition(" ")
            if kind == "query":
                self._welcome(node, content)
            else:
                answers.append((name, node, content))
        return answers

    def _census(self) -> None:
        """Forget who has gone, and ask who has come."""
        self._looked, up = self.clock(), self._post.nodes()
        self._registered |= {node.name for node in up if node.name}
        self.here = {name: known for name, known in self.here.items() if known[0] in up}
        known = {node for node, _ in self.here.values()}
        self._unknown &= up
        for node in [node for node in self._unknown if self._looked - self._asked[node] > INTRODUCTION]:
            log.warning("node %d has not said who it is for %g seconds: nobody waits for it", node.id, INTRODUCTION)
            self._unknown.discard(node)
        lasts = max(INTRODUCTION, self.manners.timeout)
        for node in sorted(up - known, key=lambda node: node.since):
            if node not in self._asked:
                self._unknown.add(node)
            if self._looked - self._asked.get(node, float("-inf")) > lasts:
                self._asked[node] = self._looked
                self._post.send("query", [("query", node, letter(Invitation()))], lasts)

    def _welcome(self, node: Node, content: RecordDict | Failed) -> None:
        self._unknown.discard(node)
        try:
            site, _ = opened(content, Introduction)
        except RecordError as error:
            log.warning("node %d does not say who it is: %s", node.id, error)
            return
        if site.fingerprint != self.fingerprint:
            log.warning(
                "%r is left out: its method or network is not the server's; all must run the same app, and the same "
                "version of consilience",
                site.name,
            )
            return
        if node.name and node.name != site.name:
            log.warning("node %d is left out: it is registered as %r, and says it is %r", node.id, node.name, site.name)
            return
        if not node.name and site.name in self._registered:
            log.warning("node %d is left out: the key of %r is registered, and it has another", node.id, site.name)
            return
        before = self.here.get(site.name)
        if before is not None and before[0].since > node.since and before[0].name == node.name:
            return
        if before is not None:
            log.warning("%r has come back, or two nodes call themselves so: the later one counts", site.name)
        self.here[site.name] = (node, site)


def _names(here: Mapping[str, object]) -> str:
    return f" ({', '.join(sorted(here))})" if here else ""
