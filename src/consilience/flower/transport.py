"""Messages to nodes and their replies, through Flower's grid."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from consilience.flower.messages import Failure


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


Reply = tuple[str, Node, RecordDict | Failure]
"""The label of the request, the node that it was sent to, and the content or the reason why there is none."""


@dataclass
class Transport:
    """Sends messages and collects the replies. Each message has a label until it expires."""

    grid: Grid
    clock: Callable[[], float]
    _open: dict[str, _Sent] = field(default_factory=dict)
    _undelivered: list[tuple[str, Node]] = field(default_factory=list)

    def nodes(self) -> set[Node]:
        """The nodes that the SuperLink reports as online."""
        return {Node(node.node_id, node.last_activated_at, node.name) for node in self.grid.get_nodes()}

    @property
    def encrypted(self) -> bool:
        """Whether the SuperLink uses TLS. It then accepts the nodes of registered keys only."""
        return not getattr(self.grid, "_insecure", True)

    def send(self, kind: str, label: str, node: Node, content: RecordDict, seconds: float) -> None:
        """Send a message that expires after `seconds`. Messages are sent one by one, because the SuperLink may refuse a
        request that holds all messages of a round."""
        number = next(iter(self.grid.push_messages([Message(content, node.id, kind, ttl=seconds)])), None)
        if number:
            self._open[number] = _Sent(label, node, self.clock() + seconds)
        else:
            self._undelivered.append((label, node))

    def collect(self) -> list[Reply]:
        """The replies since the last call. A reply is identified by the message that it answers, never by the sender
        that it names."""
        now = self.clock()
        self._open = {number: sent for number, sent in self._open.items() if sent.until > now}
        refusal = Failure("the SuperLink did not accept the message for it, which may be too large")
        found: list[Reply] = [(*undelivered, refusal) for undelivered in self._undelivered]
        self._undelivered.clear()
        for reply in self.grid.pull_messages(list(self._open)) if self._open else ():
            sent = self._open.pop(reply.metadata.reply_to_message_id, None)
            if sent is not None:
                found.append((sent.label, sent.node, _failure(reply) if reply.has_error() else reply.content))
        return found

    def forget(self, kind: str) -> None:
        """Ignore all later replies to messages of this kind."""
        self._open = {number: sent for number, sent in self._open.items() if not sent.label.startswith(f"{kind} ")}


def _failure(reply: Message) -> Failure:
    """A node's error without Flower's wrapping: "<class 'a.B'>:<'text'>" becomes "B: text"."""
    reason = reply.error.reason or f"error {reply.error.code}"
    wrapped = re.fullmatch(r"<class '(?:.*\.)?(\w+)'>:<'(.*)'>", reason, re.DOTALL)
    return Failure(f"{wrapped[1]}: {wrapped[2]}" if wrapped else reason)
