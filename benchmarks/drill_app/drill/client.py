"""The app of the sites, which may misbehave: the node's setting `fault` says how, `when` in which round."""

import os
import signal
import time
from functools import cache
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

import consilience as cs
from consilience.core.records import Weighted, pack, tree_map, unpack
from consilience.flower import client_app
from consilience.flower.messages import SECURE, SiteInfo, TrainReply, TrainRequest, decode, encode
from drill.setting import METHODS, five_sites, hospitals, task

app = ClientApp()


@cache
def honest(method: str) -> ClientApp:
    """The app without faults."""

    def load(node):
        train, test = five_sites() if node.get("five") else hospitals()
        client = train.names.index(node["site"])
        return cs.Data(train.client(client), test.client(client))

    return client_app(METHODS[method], task(), load)


@app.query()
def query(message: Message, context: Context) -> Message:
    """The site's information; with the fault "boast" it claims 10⁹ examples."""
    reply = honest(str(context.run_config["method"]))(message, context)
    if context.node_config.get("fault") != "boast":
        return reply
    info, _ = decode(reply.content, SiteInfo)
    return Message(encode(info.model_copy(update={"examples": 10**9})), reply_to=message)


@app.query(SECURE)
def step(message: Message, context: Context) -> Message:
    """A step of a secure sum."""
    return honest(str(context.run_config["method"]))(message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """The site's scores."""
    return honest(str(context.run_config["method"]))(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """The reply to a training request, with a fault if the node has one."""
    node, (request, _) = context.node_config, decode(message.content, TrainRequest)
    fault = str(node.get("fault", "")) if request.round == node.get("when", request.round) else ""
    mark(node, request, "begun")
    if fault == "raise":
        raise ValueError("the database is down")
    if fault == "sleep":
        time.sleep(float(node["seconds"]))
    reply = honest(str(context.run_config["method"]))(message, context)
    mark(node, request, "computed")
    if fault == "lose" and not (Path(str(node["marks"])) / "lost").exists():
        (Path(str(node["marks"])) / "lost").touch()
        os.kill(os.getpid(), signal.SIGKILL)  # the update is on the disk, and no reply is sent
    if fault == "luggage":  # a record that nobody asked for
        done, records = decode(reply.content, TrainReply)
        more = os.urandom(10**6) * int(node["megabytes"])
        return Message(encode(done, **records, luggage=more), reply_to=message)
    if fault in ("nan", "shape", "boast"):
        done, records = decode(reply.content, TrainReply)
        return Message(encode(done, update=pack(changed(fault, unpack(records["update"])))), reply_to=message)
    return reply


def mark(node, request: TrainRequest, what: str) -> None:
    """Write a file that shows the progress, and wait, so that the drill can kill this process."""
    if "marks" in node and node.get("linger") == f"{what}-{request.round}":
        (Path(str(node["marks"])) / f"{what}-{request.round}").touch()
        time.sleep(float(node["seconds"]))


def changed(fault: str, update):
    """An update that the server must reject or change."""
    if fault == "nan":
        return tree_map(lambda leaf: torch.full_like(leaf, torch.nan), update)
    if fault == "shape":
        return tree_map(lambda leaf: torch.cat([leaf, leaf]), update)
    if isinstance(update, Weighted):
        return tree_map(lambda leaf: leaf * (1e9 / float(update.weight.sum())), update)
    return update
