"""Attacks by one registered site with well-formed messages, and on what leaves a site.

Runs are those of tests/support/flower_grid.py: sites in memory, Flower's own messages, and a server that may have to
start again. Chur is the site that misbehaves.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from attacking import Outcome, attack

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
CLIP = 0.5
LUGGAGE = 400  # megabytes
FUZZED = int(os.environ.get("FUZZED", "50000"))  # records of the campaign


@contextlib.contextmanager
def world(method: Any = None, *, blobs: bool = False, **options: Any) -> Iterator[Any]:
    """Five sites of a regression, or four of a classification with held-out examples, and FedAvg or a method."""
    from support.flower_grid import FEDAVG, World, unhurried

    logging.getLogger("consilience").addHandler(logging.NullHandler())
    with tempfile.TemporaryDirectory() as folder, unhurried(), contextlib.redirect_stdout(io.StringIO()):
        make: Callable[..., Any] = World.blobs if blobs else World.linear
        found = make(FEDAVG if method is None else method, Path(folder))
        for name, value in options.items():
            setattr(found, name, value)
        yield found


def sent(change: Callable[[Any], Any] = lambda update: update, **fields: Any) -> Callable[[Any], Any]:
    """A fault: the client's reply with another update and other fields."""
    return lambda delivery: delivery.with_update(change, **fields)


def packed(**records: bytes) -> Callable[[Any], Any]:
    """A fault: the client's reply with these packed records in place of, or beside, its own."""

    def fault(delivery: Any) -> Any:
        from consilience.flower.messages import TrainReply, decode, encode

        reply, own = decode(delivery.answer().content, TrainReply)
        return delivery.reply(encode(reply, **own | records))

    return fault


def says(kind: str, **changes: Any) -> Callable[[Any], Any]:
    """Another reply to a message that is not about training."""

    def instead(reply: Any) -> Any:
        from consilience.flower import messages
        from support.flower_grid import json_content

        fields = json.loads(messages.decode(reply.content, getattr(messages, kind))[0].model_dump_json())
        reply.content = json_content(fields | changes)
        return reply

    return instead


def ran(there: Any, rounds: int = 1, **options: Any) -> Any:
    """The run, or the text of the error with which the server ended."""
    try:
        return there.serve(rounds, **options)
    except Exception as error:
        return f"the server ended: {type(error).__name__}: {str(error)[:60]}"


def refused(run: Any, round: int = 1) -> dict[str, str]:
    return {entry["client"]: entry["reason"] for entry in run.history[round - 1]["rejected"]}


def rejection(there: Any, round: int = 1) -> Outcome:
    """Whether the bad site was rejected and named in this round."""
    run = ran(there, round)
    if isinstance(run, str):
        return Outcome(run, False)
    reason = refused(run, round).get("Chur")
    if reason is None:
        return Outcome("accepted", False)
    return Outcome(f"rejected: {reason[:90]}", len(reason) <= 1000 and reason.isprintable())


@attack("an unrequested record of 200 MB in an answer")
def more_records() -> Outcome:
    with world(always={"Chur": packed(luggage=bytes(200_000_000))}) as there:
        return rejection(there)


@attack(f"an unrequested record of {LUGGAGE} MB in an answer, through a SuperLink")
def luggage() -> Outcome:
    from consilience.flower.loopback import Loopback

    app = Path(__file__).parents[1] / "drill_app"
    with tempfile.TemporaryDirectory() as folder, Loopback(Path(folder)) as federation:
        federation.node("Cleveland", states=f"{folder}/a")
        federation.node("Hungary", states=f"{folder}/b", fault="luggage", megabytes=LUGGAGE)
        run = federation.start(app, method="FedAvg", rounds=1, out=f"{folder}/run")
        federation.wait(run)
        peak = float(federation.log(f"run-{run}").read_text().partition("peak memory: ")[2].split()[0])
        line = json.loads((Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()[0])
    who = ", ".join(entry["client"] for entry in line["rejected"]) or "nobody"
    return Outcome(f"rejected: {who}; the server's peak memory is {peak:,.0f} MB", who == "Hungary")


@attack("an update of 200 MB where 200 bytes are expected")
def long_update() -> Outcome:
    import resource

    from support.fuzzing import zeros

    with world() as there:
        ran(there)
        there.always["Chur"] = packed(update=zeros(25_000_000))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = rejection(there, 2)
        more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000
        return Outcome(f"{found.text}; {more:.0f} MB more memory", found.withstood and more < 100)


@attack("an unrequested record in the server's request to a site")
def request_with_more() -> Outcome:
    from consilience.core.errors import RecordError
    from consilience.flower.messages import TrainRequest, decode, encode
    from support.flower_grid import TRAIN_REQUEST

    try:
        _, records = decode(encode(TRAIN_REQUEST, luggage=bytes(1000)), TrainRequest)
        return Outcome(f"read: {', '.join(records)}", False)
    except RecordError as error:
        return Outcome(f"refused: {error}", True)


@attack("a reason of 20 MB")
def long_reason() -> Outcome:
    from consilience.flower.messages import TrainReply, encode

    def fault(delivery: Any) -> Any:
        return delivery.reply(encode(TrainReply.model_construct(status="failed", reason="x" * 20_000_000)))

    with world(always={"Chur": fault}) as there:
        run = ran(there)
        size = len(json.dumps(run.history))
        return Outcome(f"a line of metrics.jsonl has {size:,} characters", size < 10_000)


@attack("100,000 guards in an answer")
def many_guards() -> Outcome:
    with world(always={"Chur": sent(guards={f"guard {i}": 1 for i in range(100_000)})}) as there:
        run = ran(there)
        return Outcome(f"{len(run.history[0]['guards']):,} guards in the metrics", len(run.history[0]["guards"]) < 10)


@attack("escape codes of terminals in a reason")
def escape_codes() -> Outcome:
    from consilience.flower.messages import TrainReply, encode

    def fault(delivery: Any) -> Any:
        return delivery.reply(encode(TrainReply.model_construct(status="failed", reason="\x1b[2J\x1b]0;gone\x07")))

    with world(always={"Chur": fault}) as there:
        reason = refused(ran(there))["Chur"]
        return Outcome(f"the log and the metrics have {reason!r}"[:90], reason.isprintable())


@attack("492 nested lists in an update of 1 kB")
def nested_lists() -> Outcome:
    from support.fuzzing import nested

    with world(always={"Chur": packed(update=nested(492))}) as there:
        return rejection(there)


@attack(f"{FUZZED:,} fuzzed records through unpack, notes and check_update")
def fuzzed_records() -> Outcome:
    from consilience.core.errors import RecordError
    from consilience.core.records import blueprint, notes, unpack
    from consilience.flower.updates import check_update
    from support.fuzzing import mutated, packed_seeds

    def exact(tree: Any) -> str:
        return json.dumps(blueprint(tree), sort_keys=True)

    draw, seeds = random.Random(24), [(data, like, exact(like)) for data, like in packed_seeds()]
    others, accepted, differ, unbounded = Counter[str](), 0, 0, 0
    for i in range(FUZZED):
        data, like, plan = seeds[i % len(seeds)]
        data = mutated(data, draw)
        for read in (unpack, notes, lambda data, like=like: check_update(data, like, client=0, examples=5)):
            try:
                found = read(data)
            except RecordError as error:
                unbounded += len(str(error)) > 1000 or not str(error).isprintable()
            except BaseException as error:
                others[type(error).__name__] += 1
            else:
                if read not in (unpack, notes):
                    accepted, differ = accepted + 1, differ + (exact(found[0]) != plan)
    text = f"{accepted:,} accepted, {differ} of another structure; other errors: {dict(others) or 'none'}; "
    return Outcome(text + f"{unbounded:,} texts that are long or not printable", not (others or differ or unbounded))


def private(change: Callable[[Any], Any]) -> Outcome:
    import torch

    import consilience as cs
    from support.flower_grid import FEDAVG

    with world(cs.Private(FEDAVG, clip=CLIP, noise=1.0, noise_from="seed"), always={"Chur": sent(change)}) as there:
        run = ran(there)
        if isinstance(run, str):
            return Outcome(run, False)
        start = there.task.prepare(torch.device("cpu"), torch.float64).initial()
        moved, spent = float((run.posterior.mean - start).norm()), run.history[0].get("epsilon")
        who = f"rejected: {refused(run).get('Chur', 'nobody')[:60]}; "
        return Outcome(f"{who}ε = {spent:.3g}, the mean moved by {moved:.2g}", "Chur" in refused(run))


def planning(clients: float) -> Callable[[Any], Any]:
    import torch

    from consilience.core.records import Weighted

    return lambda update: replace(
        update, planned=Weighted(torch.tensor([clients], dtype=torch.float64), update.planned.weight)
    )


@attack("Private: a client plans −20 clients in place of 5")
def planned_negative() -> Outcome:
    return private(planning(-20.0))


@attack("Private: a client plans 100 clients")
def planned_many() -> Outcome:
    return private(planning(100.0))


@attack("Private: a client plans 10³⁰ clients")
def planned_infinite() -> Outcome:
    return private(planning(1e30))


@attack("Private: an update of 100 times its length")
def not_clipped() -> Outcome:
    from consilience.core.records import Weighted, tree_map

    def longer(update: Any) -> Any:
        total = tree_map(lambda leaf: leaf * 100, update.update.total)
        return replace(update, update=Weighted(total, update.update.weight))

    return private(longer)


@attack("two finite updates whose sum overflows, then a restart")
def overflow() -> Outcome:
    import torch

    from consilience.core.records import Point, leaves

    with world() as there:
        for site in ("Bern", "Chur"):
            large = Point(torch.full((4,), 1.2e308, dtype=torch.float64))
            there.faults[2, site] = sent(lambda update, large=large: replace(update, total=large))
        run = ran(there, 2)
        if isinstance(run, str):
            return Outcome(run, False)
        finite = all(bool(leaf.isfinite().all()) for _, leaf in leaves(run.server))
        again = ran(there, 3)
        learned = not isinstance(again, str) and bool(again.history[-1]["clients"])
        who, state = ", ".join(refused(run, 2)) or "nobody", "finite" if finite else "not finite"
        text = f"rejected: {who}; the server's state is {state}; the restart learns"
        return Outcome(text if learned else f"{text} nothing", finite and learned)


@attack("an accuracy of 10⁶")
def accuracy() -> Outcome:
    with world(blobs=True) as there:

        def fault(reply: Any) -> Any:
            from consilience.flower.messages import EvaluateReply, decode

            return says("EvaluateReply", point=decode(reply.content, EvaluateReply)[0].point | {"accuracy": 1e6})(reply)

        there.instead["evaluate", "Chur"] = fault
        run = ran(there, evaluate_every=1)
        found = run.history[-1]["eval"]["accuracy"]
        return Outcome(f"the reported accuracy is {found:.4g}", found <= 1)


@attack("a claim of 10¹² held-out examples, with accuracy 0")
def held_out() -> Outcome:
    from consilience.flower.messages import EvaluateReply, decode

    def boasts(reply: Any) -> Any:
        fields = decode(reply.content, EvaluateReply)[0]
        count = [10**9 * n // fields.examples for n in fields.reliability.count]
        bins = fields.reliability.model_dump() | {"count": count}
        point = fields.point | {"accuracy": 0.0}
        return says("EvaluateReply", examples=sum(count), reliability=bins, point=point)(reply)

    with world(blobs=True) as there:
        there.instead = {("query", "Chur"): says("SiteInfo", held_out=10**12), ("evaluate", "Chur"): boasts}
        found = ran(there, evaluate_every=1).history[-1]["eval"]["accuracy"]
    with world(blobs=True) as there:
        honest = ran(there, evaluate_every=1).history[-1]["eval"]["accuracy"]
    return Outcome(f"the reported accuracy is {found:.2g} in place of {honest:.2g}", found > honest / 3)


@attack("one of four equal sites claims 100 times the examples")
def claimed_size() -> Outcome:
    from consilience.flower.registry import Registry
    from support.flower_grid import site_info

    names = ("Basel", "Bern", "Chur", "Genf")
    sizes = [m.examples for m in Registry.of([site_info(n, 20_000 if n == "Chur" else 200) for n in names]).members]
    share = sizes[2] / sum(sizes)
    return Outcome(f"it has {share:.0%} of the weight", share <= 0.5)


@attack("FedBE: a model with the weight of 10⁹ examples")
def count_of_examples() -> Outcome:
    import torch

    import consilience as cs
    from support.flower_grid import TRAIN

    many = sent(lambda update: replace(update, n=torch.full_like(update.n, 1e9)))
    with world(cs.algorithms.FedBE(TRAIN), always={"Chur": many}) as there:
        run = ran(there)
        if isinstance(run, str):
            return Outcome(run, False)
        share = float(run.server.n.max() / run.server.n.sum())
        return Outcome(f"it has {share:.0%} of the weight", share <= 0.5)


@attack("PFNM: negative class counts")
def negative_counts() -> Outcome:
    import consilience as cs
    from support.flower_grid import TRAIN

    wrong = sent(lambda update: replace(update, labels=-update.labels))
    with world(cs.PFNM(TRAIN), blobs=True, always={"Chur": wrong}) as there:
        return rejection(there)


@attack("an Ensemble with equal weights asks for class counts")
def class_counts() -> Outcome:
    import consilience as cs
    from support.flower_grid import TRAIN

    with world(cs.algorithms.Ensemble(TRAIN), blobs=True) as there:
        labels = ran(there).server.labels
        count = 0 if labels is None else labels.numel()
        return Outcome(f"{count} exact class counts have left the sites", labels is None)


@attack("Private(FedSEP): one client's size in the model of round 0")
def size_in_state() -> Outcome:
    import torch

    import consilience as cs
    from consilience.core.errors import ConfigError
    from consilience.core.records import leaves

    def started(true: int, **options: Any) -> Any:
        method = cs.Private(cs.algorithms.FedSEP(), noise_from="seed", **options)
        return method.start(None, cs.data.Info(torch.zeros(4), *torch.tensor([0, 10, true]))).method

    def gap(**options: Any) -> float:
        pairs = zip(leaves(started(1000, **options)), leaves(started(1900, **options)), strict=True)
        return max(float((a - b).abs().max()) for (_, a), (_, b) in pairs)

    try:
        return Outcome(f"a client with 1000 examples in place of 100 moves it by {gap():.3g}", False)
    except ConfigError:
        moved = gap(examples=1000)
        return Outcome(f"refused without a public number; with one it moves by {moved:g}", moved == 0)
