"""A federation in memory: Flower's own messages, client apps called in this process, and faults between them."""

import itertools
import json
import os
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

import consilience as cs
from consilience.core.records import Tree, leaves, pack, unpack
from consilience.flower import Participation, client_app
from consilience.flower import app as flower_app
from consilience.flower.coordinator import Coordinator
from consilience.flower.messages import NO_STATE, SiteInfo, Token, TrainReply, TrainRequest, decode, encode
from consilience.flower.registry import Registry
from consilience.flower.storage import ClientStorage
from support.scenarios import NAMES, blobs, linear
from support.sealed import content, lines
from support.secure_sums import proofs

BAD = "Chur"  # the site that misbehaves
SIZES = (7, 3, 4, 12, 5)
PRIOR = 0.7
TRAIN = cs.SGD(lr=0.05, batch_size=4)
LAPLACE = cs.inference.Laplace(TRAIN, kappa=1.0, s0=0.05, epochs=1)
FEDAVG, SCAFFOLD, FEDEP = cs.FedAvg(TRAIN), cs.SCAFFOLD(TRAIN), cs.FedEP(LAPLACE, prior=PRIOR)
every_method = pytest.mark.parametrize("method", [FEDAVG, FEDEP, SCAFFOLD], ids=lambda method: method.name)
with_states = pytest.mark.parametrize("method", [FEDEP, SCAFFOLD], ids=lambda method: method.name)
HEARTBEATS = 60.0  # seconds after which the SuperLink reports that a node is down
SHORT = {"timeout": 20.0, "patience": 300.0}
UNAVAILABLE = Error(5, "Error: Node Unavailable")
LATER = object()  # what a fault returns for a node that is not ready to answer yet
TRAIN_REQUEST = TrainRequest(
    experiment="0123456789abcdef",
    fingerprint="f",
    stage=1,
    round=3,
    client=2,
    round_size=4,
    examples=100,
    seed=-1,
    precision="float64",
    token=Token(1, 9),
    base=NO_STATE,
    keep=[Token(1, 2), Token(1, 5)],
)


def site_info(name="Basel", examples=5, held_out=0, x=("float32", [3]), y=("float32", [1]), fingerprint="f"):
    return SiteInfo(name=name, examples=examples, held_out=held_out, x=x, y=y, fingerprint=fingerprint)


def json_content(value):
    """The content of a message with this payload, valid or not."""
    return RecordDict({"payload": ConfigRecord({"json": json.dumps(value)})})


def echo(message, context):
    """An app that sends every message back."""
    return Message(message.content, reply_to=message)


class Killed(BaseException):
    """The server's process was killed. Nothing in it can catch this."""


@dataclass
class Node:
    """A node: its app and settings, its start, the end of the time for which the SuperLink reports it as online, and
    the site for which its key is registered."""

    app: Any
    settings: dict
    since: str
    registered: str = ""
    up: bool = True
    until: float = float("inf")


@dataclass
class MemoryGrid(Grid):
    """Nodes answer when the server pulls replies. `fault(node, message, answer)` returns the reply, None for no reply,
    or LATER. After `calls_left` calls the server is killed."""

    fault: Any = None
    nodes: dict[int, Node] = field(default_factory=dict)
    now: float = 0.0
    delivered: list = field(default_factory=list)
    calls_left: int | None = None

    def __post_init__(self):
        self._ids, self._numbers, self._ticks = itertools.count(100), itertools.count(1), itertools.count(1)
        self._waiting: dict[str, Message] = {}
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # as in a server app's process

    # simulated time, so that no test waits
    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def start(self, app, node_id=None, registered="", **settings):
        node_id = node_id or next(self._ids)
        self.nodes[node_id] = Node(app, settings, f"{next(self._ticks):06d}", registered)
        return node_id

    def kill(self, node_id, noticed=0.0):
        """A node goes down. The SuperLink notices it after `noticed` seconds; until then the node does not answer."""
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
            number = f"message-{next(self._numbers)}"
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
        self._call()  # killed before it reads them
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
    """Skips reports and fsync, which only take time in a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flower_app, "write_report", lambda place: place / "report.html")
        patch.setattr(os, "fsync", lambda file: None)
        yield patch


@dataclass
class Delivery:
    """A training request that has reached its site. Each call of `answer()` lets the client answer it."""

    world: "World"
    site: str
    request: TrainRequest
    message: Message
    answer: Callable[..., Message]

    def reply(self, content):
        return Message(content, reply_to=self.message)

    def with_update(self, change, **fields):
        """The client's reply with another update and other fields."""
        reply, records = decode(self.answer().content, TrainReply)
        update = pack(change(unpack(records["update"])))
        return self.reply(encode(reply.model_copy(update=fields), update=update))


@dataclass
class World:
    """Sites in memory, each with its own data and disk, and a server that can be restarted.

    `faults[round, site]` is called with the first training request of that round at that site, `always[site]` with all
    others; both return the reply or None. `instead[kind, site]` changes a site's reply to other messages."""

    method: Any
    task: cs.Task
    federation: cs.Federation
    folder: Path
    held_out: cs.Federation | None = None
    participation: dict = field(default_factory=dict)
    secure: bool = False
    faults: dict[tuple[int, str], Callable] = field(default_factory=dict)
    always: dict[str, Callable] = field(default_factory=dict)
    instead: dict[tuple[str, str], Callable] = field(default_factory=dict)
    grid: MemoryGrid = field(default_factory=MemoryGrid)
    requests: list[tuple[str, TrainRequest]] = field(default_factory=list)

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
        app = client_app(
            self.method, self.task, lambda node: self.data(self.names.index(node["site"])), secure=self.secure
        )
        settings = proofs(site) if self.secure else {}
        return self.grid.start(app, site=site, states=str(self.disk(site)), **settings)

    def kill(self, site, noticed=0.0):
        self.grid.kill(self.nodes[site], noticed)

    def restart(self, site):
        """Start another node of the same name, with the same disk."""
        self.kill(site, noticed=HEARTBEATS)
        self.nodes[site] = self.start(site)

    def wipe(self, site):
        shutil.rmtree(self.disk(site), ignore_errors=True)

    def _deliver(self, node, message, answer):
        site, kind = node.settings["site"], message.metadata.message_type
        if kind != "train":
            return self.instead.get((kind, site), lambda reply: reply)(answer())
        request = decode(message.content, TrainRequest)[0]
        self.requests.append((site, request))
        fault = self.faults.pop((request.round, site), None) or self.always.get(site)
        return answer() if fault is None else fault(Delivery(self, site, request, message, answer))

    @classmethod
    def linear(cls, method, folder, sizes=SIZES, **options):
        """A regression with known answers."""
        task, federation = linear(sizes, NAMES[: len(sizes)])
        return cls(method, task, federation, folder, **options)

    @classmethod
    def blobs(cls, method, folder):
        """A classification with held-out examples."""
        task, train, test = blobs(clients=4)
        names = NAMES[:4]
        return cls(method, task, replace(train, names=names), folder, replace(test, names=names))

    def serve(self, rounds, **options):
        """The server's process. It resumes the run in its directory."""
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
                secure=self.secure,
                **options,
            )

    def simulated(self, rounds, missing=(), **options):
        """The same run in the simulator, client by client if sums are secure, whose results are the same to the last
        bit. The updates of the clients `missing` are NaN."""
        data = self.federation.data[torch.arange(len(self.federation.data))]
        for site in missing:
            data.x[self.federation.indices(self.names.index(site))] = torch.nan
        federation = cs.Federation(data, self.federation.order, self.federation.offsets, names=self.names)
        chunk = 1 if self.secure else len(federation)
        engine = cs.Simulator(device="cpu", precision="float64", chunk=chunk, workers=1, secure=self.secure)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cs.Dataset, "__post_init__", lambda data: None)  # which would reject NaN
            return cs.fit(self.method, self.task, federation, rounds=rounds, engine=engine, progress=False, **options)

    def files(self, site):
        return ClientStorage(self.disk(site), Registry.read(self.out).experiment, site)

    def state(self, run, site) -> Tree:
        """A site's state on its own disk, which the next request would name."""
        client = self.names.index(site)
        token = run.states.token(client)
        if token == NO_STATE:  # the next request brings it
            return run.states.gather(torch.tensor([client]))
        work = self.files(site).read(token)
        assert work is not None, f"{site} has no {token}, only {self.files(site).tokens()}"
        return work[0].state


def assert_same(found, wanted, tolerance=1e-10):
    for (name, a), (_, b) in zip(leaves(found), leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def disagreement(world, run):
    """The distance of the server's state from the states on the clients' disks: of q from p₀ Π q_k, or of c from the
    mean of all c_k. The server's mirror of every state must equal the state on the disk."""
    states = [world.state(run, site) for site in world.names]
    for k, state in enumerate(states):
        assert_same(run.states.gather(torch.tensor([k])), state)
    if isinstance(world.method, cs.SCAFFOLD):
        return float((run.server.c - torch.stack([state.c[0] for state in states]).mean(0)).norm())
    product = world.method.before(run.server.q.eta)
    for state in states:
        product = product * state.factor.product()
    return float((run.server.q / product).norm / run.server.q.norm)


def assert_consistent(world, run, rounds):
    """The server agrees with the clients' disks, and every round is there once, with at least one client."""
    if not isinstance(world.method, cs.FedAvg):
        assert disagreement(world, run) < 1e-9
    assert [line["round"] for line in run.history] == list(range(1, rounds + 1))
    assert all(line["clients"] for line in run.history)
    assert lines(world.out) == run.history


def rejected(run):
    """(round, site) of every update that was rejected."""
    return [(line["round"], entry["client"]) for line in run.history for entry in line["rejected"]]


def requested(world, round):
    """The training requests of a round, as (site, request)."""
    return [(site, request) for site, request in world.requests if request.round == round]


def score(world, rounds=1, **options):
    """(a run with scores after every round, its evaluation.json)."""
    run = world.serve(rounds, evaluate_every=1, **options)
    saved = content(world.out / "evaluation.json")
    assert saved["point"]["metrics"] == run.history[-1]["eval"]
    return run, saved
