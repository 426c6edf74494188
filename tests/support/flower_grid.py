"""A grid in memory: Flower's own messages, client apps called in this process, and whatever may go wrong between."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

import consilience as cs
from consilience.core.records import Tree, pack, unpack
from consilience.flower import Participation, client_app
from consilience.flower import app as flower_app
from consilience.flower.coordinator import Coordinator
from consilience.flower.messages import NO_STATE, TrainReply, TrainRequest, decode, encode
from consilience.flower.registry import Registry
from consilience.flower.storage import ClientStorage

HEARTBEATS = 60.0  # seconds after which the SuperLink reports that a node is down
SHORT = {"timeout": 20.0, "patience": 300.0}
UNAVAILABLE = Error(5, "Error: Node Unavailable")
LATER = object()  # what a fault returns for a node that is not ready to answer yet


class Killed(BaseException):
    """The server's process is no more. Nothing in it can catch this."""


@dataclass
class Node:
    """A node that was started: its app, its settings, since when it is up, until when the link thinks so, and the site
    that its key is registered for, if it is for one."""

    app: Any
    settings: dict
    since: str
    registered: str = ""
    up: bool = True
    until: float = float("inf")


@dataclass
class MemoryGrid(Grid):
    """Nodes answer when the server looks for answers. `fault(node, message, answer)` may change or lose what a node
    does: it returns the reply, None if none is sent, or LATER. After `calls_left` calls the server is dead."""

    fault: Any = None
    nodes: dict[int, Node] = field(default_factory=dict)
    now: float = 0.0
    delivered: list = field(default_factory=list)
    calls_left: int | None = None

    def __post_init__(self):
        self._ids, self._numbers, self._ticks = itertools.count(100), itertools.count(1), itertools.count(1)
        self._waiting: dict[str, Message] = {}
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # as in a server app's process

    # time, so that no test waits
    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def start(self, app, node_id=None, registered="", **settings):
        node_id = node_id or next(self._ids)
        self.nodes[node_id] = Node(app, settings, f"{next(self._ticks):06d}", registered)
        return node_id

    def kill(self, node_id, noticed=0.0):
        """A node goes down, which the link notices after so many seconds: till then it is one that does not answer."""
        self.nodes[node_id].up, self.nodes[node_id].until = False, self.now + noticed

    def set_run(self, run):
        raise NotImplementedError

    run = None

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def send_and_receive(self, *args, **kwargs):
        raise NotImplementedError

    def _call(self):
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise Killed

    def get_node_ids(self):
        return [i for i, node in self.nodes.items() if node.until > self.now]

    def get_nodes(self):
        self._call()
        up = [(i, self.nodes[i]) for i in self.get_node_ids()]
        return [
            NodeInfo(node_id=i, status="online", last_activated_at=node.since, name=node.registered) for i, node in up
        ]

    def push_messages(self, messages):
        self._call()
        numbers = []
        for message in messages:
            number = f"letter-{next(self._numbers)}"
            message.metadata.__dict__["_message_id"] = number
            self._waiting[number] = message
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids):
        self._call()
        replies = []
        for number in message_ids:
            message = self._waiting.get(number)
            if message is None:
                continue
            node = self.nodes.get(message.metadata.dst_node_id)
            if node is not None and node.up:
                reply = self._answer(message, node)
            elif node is None or node.until <= self.now:
                reply = Message(UNAVAILABLE, reply_to=message)
            else:
                reply = LATER
            if reply is LATER:
                continue
            del self._waiting[number]
            if reply is not None:
                replies.append(reply)
        self._call()  # dead before it could read them
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


@contextmanager
def unhurried():
    """Without what only takes time in a test: reports and the disk's own caches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flower_app, "write_report", lambda place: place / "report.html")
        patch.setattr(os, "fsync", lambda file: None)
        yield patch


@dataclass
class Delivery:
    """An order that has reached its site. `answer()` does the work, as often as it is called."""

    world: World
    site: str
    order: TrainRequest
    message: Message
    answer: Callable[..., Message]

    def reply(self, content):
        return Message(content, reply_to=self.message)

    def with_update(self, change, **facts):
        """The honest answer with another update, and perhaps other facts."""
        answer, records = decode(self.answer().content, TrainReply)
        facts = answer.model_copy(update=facts)
        return self.reply(encode(facts, update=pack(change(unpack(records["update"])))))


@dataclass
class World:
    """Sites in memory, each with data and a disk of its own, and a server that may be started again and again.

    `faults[round, site]` is called once, with the first order of that round that reaches the site; `always[site]`
    with all others. What it returns is the reply, None for none. `instead[kind, site]` makes another reply out of what
    a site says to a letter that is no order."""

    method: Any
    task: cs.Task
    federation: cs.Federation
    folder: Path
    held_out: cs.Federation | None = None
    participation: dict = field(default_factory=dict)
    faults: dict[tuple[int, str], Callable] = field(default_factory=dict)
    always: dict[str, Callable] = field(default_factory=dict)
    instead: dict[tuple[str, str], Callable] = field(default_factory=dict)
    grid: MemoryGrid = field(default_factory=MemoryGrid)
    orders: list[tuple[str, TrainRequest]] = field(default_factory=list)

    def __post_init__(self):
        self.grid.fault = self._deliver
        self.nodes = {name: self.start(name) for name in self.names}

    @property
    def names(self):
        return self.federation.names

    @property
    def out(self):
        return self.folder / "run"

    def disk(self, site):
        return self.folder / "disks" / site

    def data(self, k):
        train = self.federation.client(k)
        return train if self.held_out is None else cs.Data(train, self.held_out.client(k))

    def start(self, site):
        app = client_app(self.method, self.task, lambda node: self.data(self.names.index(node["site"])))
        return self.grid.start(app, site=site, states=str(self.disk(site)))

    def kill(self, site, noticed=0.0):
        self.grid.kill(self.nodes[site], noticed)

    def restart(self, site):
        """Another node of the same name, with the same disk."""
        self.kill(site, noticed=HEARTBEATS)
        self.nodes[site] = self.start(site)

    def wipe(self, site):
        shutil.rmtree(self.disk(site), ignore_errors=True)

    def _deliver(self, node, message, answer):
        site, kind = node.settings["site"], message.metadata.message_type
        if kind != "train":
            return self.instead.get((kind, site), lambda reply: reply)(answer())
        order = decode(message.content, TrainRequest)[0]
        self.orders.append((site, order))
        fault = self.faults.pop((order.round, site), None) or self.always.get(site)
        return answer() if fault is None else fault(Delivery(self, site, order, message, answer))

    def serve(self, rounds, **options):
        """The server's process: it goes on with what is in its directory."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flower_app, "Coordinator", partial(Coordinator, clock=self.grid.clock, sleep=self.grid.sleep))
            return flower_app.serve(
                self.grid,
                self.method,
                self.task,
                participation=Participation(len(self.federation), **SHORT | self.participation),
                rounds=rounds,
                out=self.out,
                precision="float64",
                **options,
            )

    def simulated(self, rounds, missing=(), **options):
        """The same run in the simulator. All that the clients `missing` have to say is NaN."""
        data = self.federation.data[torch.arange(len(self.federation.data))]
        for site in missing:
            data.x[self.federation.indices(self.names.index(site))] = torch.nan
        federation = cs.Federation(data, self.federation.order, self.federation.offsets, names=self.names)
        engine = cs.Simulator(device="cpu", precision="float64", chunk=len(federation), workers=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cs.Dataset, "__post_init__", lambda data: None)  # which would refuse NaN
            return cs.fit(self.method, self.task, federation, rounds=rounds, engine=engine, progress=False, **options)

    def files(self, site):
        return ClientStorage(self.disk(site), Registry.read(self.out).experiment, site)

    def state(self, run, site) -> Tree:
        """A site's state from its own disk, as the next order would name it."""
        client = self.names.index(site)
        token = run.states.token(client)
        if token == NO_STATE:  # the next order will bring it
            return run.states.gather(torch.tensor([client]))
        work = self.files(site).read(token)
        assert work is not None, f"{site} has no {token}, only {self.files(site).tokens()}"
        return work[0].state
