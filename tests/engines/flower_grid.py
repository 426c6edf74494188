"""A grid in memory: Flower's own messages, client apps called in this process, and whatever may go wrong between."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity


@dataclass
class Node:
    """A node that is up: its app, its settings, and what it has been sent but has not looked at."""

    app: object
    settings: dict
    since: str


@dataclass
class MemoryGrid(Grid):
    """Nodes answer when the server looks for answers. `fault(number, node, message, answer)` may change or lose what a
    node does: it returns the reply, or None if none is sent."""

    fault: object = None
    nodes: dict[int, Node] = field(default_factory=dict)
    now: float = 0.0
    delivered: list = field(default_factory=list)

    def __post_init__(self):
        self._ids, self._numbers, self._ticks = itertools.count(100), itertools.count(1), itertools.count(1)
        self._waiting: dict[str, Message] = {}
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # as in a server app's process

    # time, so that no test waits
    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def start(self, app, node_id=None, **settings):
        node_id = node_id or next(self._ids)
        self.nodes[node_id] = Node(app, settings, f"{next(self._ticks):06d}")
        return node_id

    def kill(self, node_id):
        self.nodes.pop(node_id)

    def set_run(self, run):
        raise NotImplementedError

    run = None

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def send_and_receive(self, *args, **kwargs):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.nodes)

    def get_nodes(self):
        return [NodeInfo(node_id=i, status="online", last_activated_at=n.since) for i, n in self.nodes.items()]

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            number = f"letter-{next(self._numbers)}"
            message.metadata.__dict__["_message_id"] = number
            self._waiting[number] = message
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids):
        replies = []
        for number in message_ids:
            message = self._waiting.get(number)
            node = None if message is None else self.nodes.get(message.metadata.dst_node_id)
            if node is None:
                continue
            reply = self._answer(message, node)
            del self._waiting[number]
            if reply is not None:
                replies.append(reply)
        return replies

    def _answer(self, message, node):
        def answer(again=message):
            self.delivered.append((again.metadata.message_type, node.settings.get("site")))
            context = Context(1, again.metadata.dst_node_id, node.settings, RecordDict(), {})
            try:
                return node.app(again, context)
            except Exception as error:  # as a supernode does
                return Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=again)

        return answer() if self.fault is None else self.fault(node, message, answer)
