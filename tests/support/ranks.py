"""What two ranks do in test_distributed.py, and the simulator beside them: python ranks.py OUT, under torchrun."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import consilience as cs
from consilience.core.records import tree_map
from consilience.engines import InMemory
from consilience.engines.sharded import Sharded

SIZES = (40, 33, 21, 20, 7, 3, 1)
TRAIN = cs.SGD(lr=0.1, momentum=0.9, epochs=2, batch_size=8, weight_decay=0.01)
LOCAL = cs.SGD(lr=0.1, batch_size=8)
KEPT: list[Any] = []  # runs that live as long as the process: they must not keep it from ending well


@cs.algorithm
class Sick(cs.Algorithm):
    """FedAvg, where the updates of some clients are NaN from a round on."""

    sick: tuple[int, ...] = (2,)
    since: int = 1
    inner: cs.FedAvg = cs.FedAvg(TRAIN)

    def start(self, task, info):
        return self.inner.start(task, info)

    def message(self, server, ids):
        return self.inner.message(server, ids)

    def local(self, task, message, state, cohort):
        update, state = self.inner.local(task, message, state, cohort)
        bad = sum(cohort.ids == client for client in self.sick).bool() & (cohort.round >= self.since)
        return tree_map(lambda x: torch.where(bad.view(-1, *[1] * (x.dim() - 1)), torch.nan, x), update), state

    def fuse(self, server, update):
        return self.inner.fuse(server, update)

    def posterior(self, server):
        return self.inner.posterior(server)


@cs.algorithm
class Broken(Sick):
    """A client whose code fails."""

    def local(self, task, message, state, cohort):
        if 3 in cohort.ids:
            raise ValueError("no disk")
        return self.inner.local(task, message, state, cohort)


@cs.algorithm
class Drifting(Sick):
    """A server that is not the same in all ranks."""

    def fuse(self, server, update):
        return tree_map(lambda leaf: leaf + int(os.environ["RANK"]), server)


@dataclass(frozen=True)
class Case:
    algorithm: Any
    cohort: int | None = 5
    rounds: int = 3
    options: tuple[tuple[str, Any], ...] = ()
    norm: bool = False


STOPPING = (("validation", 0.3), ("patience", 2), ("evaluate_every", 1))
CASES = {
    "FedAvg": Case(cs.FedAvg(TRAIN, server=cs.server.Adam())),
    "FedAvg of everyone": Case(cs.FedAvg(TRAIN), cohort=None),
    "FedEP": Case(cs.FedEP(cs.inference.Identity(TRAIN)), options=(("debug", True),)),
    "SCAFFOLD of one client": Case(cs.SCAFFOLD(LOCAL), cohort=1),
    "FedNP": Case(cs.FedNP(TRAIN), rounds=2),
    "PFNM": Case(cs.PFNM(LOCAL), rounds=2),
    "Ensemble of one client": Case(cs.algorithms.Ensemble(LOCAL), cohort=1, rounds=1),
    "MOON": Case(cs.algorithms.MOON(TRAIN), rounds=2),
    "Switch": Case(cs.Switch(cs.FedAvg(LOCAL), cs.FedEP(cs.inference.Identity(LOCAL)), at=2)),
    "BatchNorm": Case(cs.FedAvg(TRAIN), rounds=2, norm=True),
    "FedBN": Case(cs.algorithms.FedBN(TRAIN), rounds=2, norm=True),
    "early stopping": Case(cs.LocalOnly(TRAIN), cohort=None, rounds=20, options=STOPPING),
    "a sick client": Case(Sick(), cohort=None, rounds=2),
    "nobody well": Case(Sick(sick=tuple(range(7)), since=2), cohort=3, rounds=2),
    "one well, so that a rank has none": Case(Sick(sick=(0, 1, 2, 3, 4, 5)), cohort=None, rounds=2),
}


def federation():
    made = torch.Generator().manual_seed(0)
    x = torch.randn(sum(SIZES), 5, generator=made)
    y = (x @ torch.randn(5, 3, generator=made)).argmax(1)
    owner = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    shuffled = torch.randperm(len(owner), generator=made)
    data = cs.Dataset(x, y, name="blobs")
    return cs.Federation.from_owner(data, owner[shuffled], names=[f"site {k}" for k in range(len(SIZES))])


def task(seed=1, norm=False):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)]
        return cs.Classification(nn.Sequential(*layers, *[nn.BatchNorm1d(3)] * norm))


def learn(case, engine, **options):
    same = dict(rounds=case.rounds, cohort=case.cohort, engine=engine, progress=False, **dict(case.options))
    return cs.fit(case.algorithm, task(norm=case.norm), federation(), test=federation(), **same | options)


def everything(run):
    """The server and every client's state."""
    return run.server, *(run.states.gather(torch.tensor([c])) for c in range(len(run.federation)))


def watch_states(found):
    """Note which clients' states this rank holds at the end of each run, before it completes them."""
    complete = Sharded.complete

    def noted(states):
        held = states.local
        found.append(sorted(held.clients() if isinstance(held, InMemory) else held.snapshot()[:, 0].tolist()))
        return complete(states)

    Sharded.complete = noted


def study(engine, out, compare):
    """A comparison of tuned methods, one of which diverges as soon as it is tuned, and the tuning alone."""
    methods = [cs.FedAvg(LOCAL), cs.FedEP(cs.inference.Identity(LOCAL)), cs.SCAFFOLD(LOCAL)]
    train, test = federation().split(0.3)
    setting = cs.studies.Setting(task(), train, test)
    same = {"rounds": 2, "engine": engine, "progress": False, "out": out}
    if compare:
        found = cs.compare(methods, setting, seeds=2, tune=2, **same)
        return {**found.content(), "seconds": 0}
    labelled = {"FedAvg": cs.FedAvg(LOCAL), "sick": Sick(sick=tuple(range(7)))}
    return cs.tune(labelled, setting, trials=2, **same).tuning


def refusal(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was wrong"


def main(out: Path) -> None:
    engine = cs.Distributed(device="cpu", chunk=2, precision="float64", timeout=60)
    rank = 0 if engine.leads else 1
    heard: list[int] = []
    held: list[list[int]] = []
    watch_states(held)
    for name, case in CASES.items():
        run = learn(case, engine, callbacks=[lambda run, line: heard.append(line["round"])])
        KEPT.append(run)
        lines = [{**line, "seconds": 0} for line in run.history]
        (out / f"{name}.{rank}.txt").write_text(f"{json.dumps(lines)}\n{len(heard)}")
        (out / f"{name}.{rank}.safetensors").write_bytes(cs.core.pack(everything(run)))
        (out / f"{name}.{rank}.held").write_text(json.dumps(held[-1] if held else []))
        held.clear()
    ep = CASES["FedEP"]
    for name, memory in (("run", 8 << 30), ("files", 0)):
        options = {"out": cs.runs.Storage(out / name, checkpoint_every=2, state_memory=memory)}
        learn(ep, engine, rounds=3, **options)
        run = learn(ep, engine, rounds=5, resume=True, **options)
        (out / f"{name}.{rank}.safetensors").write_bytes(cs.core.pack(everything(run)))
    secret = learn(Case(cs.Private(cs.FedAvg(TRAIN))), engine)
    (out / f"secret.{rank}.safetensors").write_bytes(cs.core.pack(secret.server))
    (out / f"plan.{rank}.txt").write_text(str(learn(CASES["FedAvg"], cs.Distributed(device="cpu")).plan))
    for name, compare in (("compared", True), ("tuned", False)):
        found = study(engine, out / name, compare)
        (out / f"{name}.{rank}.json").write_text(json.dumps(found))
    said = [
        refusal(lambda: learn(ep, engine, out=out / "run")),
        refusal(lambda: learn(Case(Broken()), engine, cohort=None)),
        refusal(lambda: cs.fit(ep.algorithm, task(seed=rank), federation(), rounds=1, engine=engine, progress=False)),
        refusal(lambda: learn(CASES["FedAvg"], engine, callbacks=[lambda *_: 1 / 0])),
        refusal(lambda: learn(Case(Drifting()), engine)),
        refusal(lambda: learn(Case(Sick(sick=tuple(range(7)))), engine)),
    ]
    (out / f"said.{rank}.txt").write_text("\n".join(said))


def go_on(out: Path) -> None:
    """Resume the run that two ranks began with as many ranks as there are."""
    engine = cs.Distributed(device="cpu", chunk=2, precision="float64", timeout=60)
    run = learn(CASES["FedEP"], engine, rounds=7, resume=True, out=cs.runs.Storage(out, checkpoint_every=2))
    if engine.leads:
        (out / "resumed.safetensors").write_bytes(cs.core.pack(everything(run)))


if __name__ == "__main__":
    (go_on if sys.argv[2:] else main)(Path(sys.argv[1]))
