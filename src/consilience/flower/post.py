"""The post: letters to nodes and their answers, through Flower's grid. Who does not answer is nobody's error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from consilience.flower.letters import Failed


@dataclass(frozen=True)
class Node:
    """A node as it is up now; one that was down in between is another. `name` is the site that its key was registered
    for, if it was for one."""

    id: int
    since: str
    name: str = ""


@dataclass(frozen=True)
class _Sent:
    label: str
    node: Node
    until: float


@dataclass
class Post:
    """Letters, each known by a label of ours until its time is up."""

    grid: Grid
    clock: Callable[[], float]
    _open: dict[str, _Sent] = field(default_factory=dict)
    _refused: list[tuple[str, Node]] = field(default_factory=list)

    def nodes(self) -> set[Node]:
        """Those that are up, as far as the link knows."""
        return {Node(node.node_id, node.last_activated_at, node.name) for node in self.grid.get_nodes()}

    def send(self, kind: str, letters: Iterable[tuple[str, Node, RecordDict]], seconds: float) -> None:
        """Letters that are not delivered any more after so many seconds. One by one: all of a round's in one request
        may be too much for the link."""
        for label, node, content in letters:
            number = next(iter(self.grid.push_messages([Message(content, node.id, kind, ttl=seconds)])), None)
            if number:
                self._open[number] = _Sent(label, node, self.clock() + seconds)
            else:
                self._refused.append((label, node))

    def collect(self) -> list[tuple[str, Node, RecordDict | Failed]]:
        """What has come since the last time: label, node, and contents or what went wrong. Answers are told apart by
        the letter that they answer, never by who they say they are from."""
        now = self.clock()
        self._open = {number: sent for number, sent in self._open.items() if sent.until > now}
        refusal = Failed("the link has not taken the letter for it, which may be too large")
        found: list[tuple[str, Node, RecordDict | Failed]] = [(*refused, refusal) for refused in self._refused]
        self._refused.clear()
        for reply in self.grid.pull_messages(list(self._open)) if self._open else ():
            sent = self._open.pop(reply.metadata.reply_to_message_id, None)
            if sent is not None:
                found.append((sent.label, sent.node, _words(reply) if reply.has_error() else reply.content))
        return found

    def forget(self, kind: str) -> None:
        """Whatever still comes of this kind comes too late."""
        self._open = {number: sent for number, sent in self._open.items() if not sent.label.startswith(f"{kind} ")}


def _words(reply: Message) -> Failed:
    """A node's error without Flower's wrapping: <class 'a.B'>:<'so and so'> is B: so and so."""
    reason = reply.error.reason or f"error {reply.error.code}"
    wrapped = re.fullmatch(r"<class '(?:.*\.)?(\w+)'>:<'(.*)'>", reason, re.DOTALL)
    return Failed(f"{wrapped[1]}: {wrapped[2]}" if wrapped else reason)
