"""Messages to nodes and their replies, through Flower's grid."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from consilience.core.errors import RecordError
from consilience.core.text import LONGEST
from consilience.flower.messages import LONGEST_PAYLOAD, Failure

OVERHEAD = 5 * LONGEST_PAYLOAD  # bytes of a reply beside its records: the payload, and the parts of Flower's messages


@dataclass(frozen=True)
class Node:
    """A SuperNode since it last came up. After a restart it is another `Node`. `name` is the site for which the node's
    key is registered, or empty."""

    id: int
    since: str
    name: str = ""


@dataclass(frozen=True)
class _Sent:
    label: str
    node: Node
    until: float
    longest: int


Reply = tuple[str, Node, RecordDict | Failure]
"""The label of the request, the node that it was sent to, and the content or the reason why there is none."""


@dataclass
class Transport:
    """Sends messages and collects the replies. Each message has a label until it expires."""

    grid: Grid
    clock: Callable[[], float]
    _open: dict[str, _Sent] = field(default_factory=dict)
    _undelivered: list[tuple[str, Node]] = field(default_factory=list)
    _meter: "Meter | None" = None

    def __post_init__(self) -> None:
        client = getattr(self.grid, "_runtime_client", None)
        if hasattr(client, "PullObject"):
            self._meter = self.grid._client = Meter(client)  # type: ignore[attr-defined]

    def nodes(self) -> set[Node]:
        """The nodes that the SuperLink reports as online."""
        return {Node(node.node_id, node.last_activated_at, node.name) for node in self.grid.get_nodes()}

    @property
    def encrypted(self) -> bool:
        """Whether the SuperLink uses TLS. It then accepts the nodes of registered keys only."""
        return not getattr(self.grid, "_insecure", True)

    def send(self, kind: str, label: str, node: Node, content: RecordDict, seconds: float, longest: int = 0) -> None:
        """Send a message that expires after `seconds`, and whose reply has records of at most `longest` bytes. Messages
        are sent one by one, because the SuperLink may refuse a request that holds all messages of a round."""
        number = next(iter(self.grid.push_messages([Message(content, node.id, kind, ttl=seconds)])), None)
        if number:
            self._open[number] = _Sent(label, node, self.clock() + seconds, longest)
        else:
            self._undelivered.append((label, node))

    def collect(self) -> Iterator[Reply]:
        """The replies since the last call, each read when the one before has been used. A reply is identified by the
        message that it answers, never by the sender that it names."""
        now = self.clock()
        self._open = {number: sent for number, sent in self._open.items() if sent.until > now}
        refusal = Failure("the SuperLink did not accept the message for it, which may be too large")
        undelivered, self._undelivered = self._undelivered, []
        for label, node in undelivered:
            yield label, node, refusal
        for number, content in self._pulled():
            sent = self._open.pop(number, None)
            if sent is not None:
                yield sent.label, sent.node, content
            del content  # before the next is read

    def _pulled(self) -> Iterator[tuple[str, RecordDict | Failure]]:
        """(number of the message, content of its reply). Replies are read one by one: one is in memory at a time, and a
        reply that is too long or cannot be read is not another's failure."""
        for number, sent in list(self._open.items()):
            if self._meter is not None:
                self._meter.left = sent.longest + OVERHEAD
            try:
                replies = self.grid.pull_messages([number])
                found = [(reply.metadata.reply_to_message_id, _content(reply)) for reply in replies]
                del replies
            except httpx.HTTPError:
                raise
            except RecordError as error:
                found = [(number, Failure(error))]
            except Exception as error:  # Flower raises many types for malformed messages
                found = [(number, Failure(f"its reply cannot be read ({type(error).__name__})"))]
            while found:
                yield found.pop()

    def forget(self, kind: str) -> None:
        """Ignore all later replies to messages of this kind."""
        self._open = {number: sent for number, sent in self._open.items() if not sent.label.startswith(f"{kind} ")}


class Meter:
    """A client of the SuperLink that reads no more than `left` bytes of objects. Flower pulls a reply object by
    object."""

    def __init__(self, client: Any) -> None:
        self._client, self.left = client, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def PullObject(self, request: Any) -> Any:  # noqa: N802, as Flower names it
        if self.left < 0:
            raise RecordError("its reply is longer than was expected")
        found = self._client.PullObject(request)
        self.left -= len(found.object_content)
        return found


def _content(reply: Message) -> RecordDict | Failure:
    """A reply's content, or a node's error without Flower's wrapping: "<class 'a.B'>:<'text'>" becomes "B: text"."""
    if not reply.has_error():
        return reply.content
    reason = (reply.error.reason or f"error {reply.error.code}")[: 2 * LONGEST]
    wrapped = re.fullmatch(r"<class '(?:.*\.)?(\w+)'>:<'(.*)'>", reason, re.DOTALL)
    return Failure(f"{wrapped[1]}: {wrapped[2]}" if wrapped else reason)
