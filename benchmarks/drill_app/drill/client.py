"""A site's half, which may misbehave: the node's setting `fault` says how, `when` in which round."""

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
from consilience.flower.messages import SiteInfo, TrainReply, TrainRequest, decode, encode
from drill.setting import METHODS, hospitals, task

app = ClientApp()


@cache
def honest(method: str) -> ClientApp:
    """The app as it should be."""

    def load(node):
        train, test = hospitals()
        client = train.names.index(node["site"])
        return cs.Data(train.client(client), test.client(client))

    return client_app(METHODS[method], task(), load)


@app.query()
def query(message: Message, context: Context) -> Message:
    """Who is it? One who boasts claims a thousand million examples."""
    reply = honest(str(context.run_config["method"]))(message, context)
    if context.node_config.get("fault") != "boast":
        return reply
    facts, _ = decode(reply.content, SiteInfo)
    return Message(encode(facts.model_copy(update={"examples": 10**9})), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Scores are honest."""
    return honest(str(context.run_config["method"]))(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Result, with whatever goes wrong in it."""
    node, (order, _) = context.node_config, decode(message.content, TrainRequest)
    fault = str(node.get("fault", "")) if order.round == node.get("when", order.round) else ""
    mark(node, order, "begun")
    if fault == "raise":
        raise ValueError("the database is down")
    if fault == "sleep":
        time.sleep(float(node["seconds"]))
    reply = honest(str(context.run_config["method"]))(message, context)
    mark(node, order, "computed")
    if fault == "lose" and not (Path(str(node["marks"])) / "lost").exists():
        (Path(str(node["marks"])) / "lost").touch()
        os.kill(os.getpid(), signal.SIGKILL)  # what was computed is on the disk, and nobody hears of it
    if fault in ("nan", "shape", "boast"):
        answer, records = decode(reply.content, TrainReply)
        return Message(encode(answer, update=pack(spoilt(fault, unpack(records["update"])))), reply_to=message)
    return reply


def mark(node, order: TrainRequest, what: str) -> None:
    """Say how far this is, and stay there for a moment, so that somebody may kill it."""
    if "marks" in node and node.get("linger") == f"{what}-{order.round}":
        (Path(str(node["marks"])) / f"{what}-{order.round}").touch()
        time.sleep(float(node["seconds"]))


def spoilt(fault: str, update):
    """An update that must not reach the model, or not as it is."""
    if fault == "nan":
        return tree_map(lambda leaf: torch.full_like(leaf, torch.nan), update)
    if fault == "shape":
        return tree_map(lambda leaf: torch.cat([leaf, leaf]), update)
    if isinstance(update, Weighted):
        return tree_map(lambda leaf: leaf * (1e9 / float(update.weight.sum())), update)
    return update
