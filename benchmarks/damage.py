"""Damaged and exchanged files of runs: how often is a result silently another one, and how often is there a traceback?

    python benchmarks/damage.py [--bytes 200] [--exchanged 40] [--directories 500] [--seed 0]
    PYTHONPATH=/another/checkout/src python benchmarks/damage.py

Alters single bytes of checkpoints, posteriors and client states, exchanges files between runs, clients and rounds, and
damages copies of a run directory in many ways, on which every command is called that reads one. It prints the counts.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import consilience as cs
from consilience.core.errors import ConsilienceError
from consilience.core.records import Point, leaves
from consilience.flower.messages import Token
from consilience.flower.storage import ClientStorage, Result

SIZES = (7, 3, 1, 12, 5)
ROUNDS = 4
FEATURES = 1000  # so that most bytes of a file are weights
TRAIN = cs.SGD(lr=0.1, batch_size=4)
Damage = Callable[[Path, random.Random], None]


@contextmanager
def folder() -> Iterator[Path]:
    """A folder that is deleted at the end. The log is silent meanwhile."""
    logging.getLogger("consilience").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as place:
        yield Path(place)


def learn(out: Path, *, rounds: int = ROUNDS, seed: int = 0, resume: bool = False) -> cs.runs.Run:
    """A small run whose client states are in files."""
    x = 0.05 * torch.randn(sum(SIZES), FEATURES, generator=torch.Generator().manual_seed(0))
    owner = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    data = cs.Dataset(x, x.sum(dim=1, keepdim=True), name="plane")
    federation, module = cs.Federation.from_owner(data, owner), nn.Linear(FEATURES, 1)
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    storage = cs.runs.Storage(out, checkpoint_every=1, state_memory=0)
    options: dict[str, Any] = {"rounds": rounds, "test": federation, "seed": seed, "out": storage, "resume": resume}
    engine = cs.Simulator(device="cpu", chunk=4, workers=1)
    method = cs.FedEP(cs.inference.Identity(TRAIN))
    return cs.fit(method, cs.Regression(module), federation, engine=engine, progress=False, **options)


def same(one: Any, other: Any) -> bool:
    """Whether two records are equal in every bit."""
    a, b = dict(leaves(one)), dict(leaves(other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def alter(path: Path, chance: random.Random) -> None:
    """Change one byte, anywhere in the file."""
    data = bytearray(path.read_bytes())
    at = chance.randrange(len(data))
    data[at] ^= chance.randrange(1, 256)
    path.write_bytes(data)


class Victims:
    """A run, the run of another seed, and the states of two sites; attacks change copies of them."""

    def __init__(self, place: Path) -> None:
        self.place, self.run, self.other = place, place / "run", place / "other"
        learn(self.run), learn(self.other, seed=1)
        self.whole = learn(place / "whole", rounds=ROUNDS + 2)
        self.states = self.whole.states.gather(torch.arange(len(SIZES)))
        self.posterior = cs.load_posterior(self.run)
        self.sites = place / "sites"
        self.results = {
            (experiment, client, number): Result(None, Point(torch.randn(FEATURES)))
            for experiment in ("a" * 16, "b" * 16) for client in ("Basel", "Bern") for number in (1, 2)
        }  # fmt: skip
        for (experiment, client, number), result in self.results.items():
            ClientStorage(self.sites, experiment, client).write(Token(1, number), result, "{}")

    def copy(self) -> Path:
        """A fresh copy of the run."""
        copy = self.place / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.run, copy)
        return copy

    def resumed(self, copy: Path) -> str:
        """What a resumed run comes to: "silent" if it ends with other weights, states or metrics."""
        try:
            run = learn(copy, rounds=ROUNDS + 2, resume=True)
        except ConsilienceError:
            return "refused"
        except Exception as error:
            return f"traceback: {type(error).__name__}"
        equal = same(run.server, self.whole.server) and same(run.states.gather(torch.arange(len(SIZES))), self.states)
        known = [line["eval"] for line in self.whole.history]
        return "same result" if equal and [line["eval"] for line in run.history] == known else "silent"

    def read(self, copy: Path) -> str:
        """What reading the posterior, the metrics and the scores comes to."""
        try:
            stored, belief = cs.load_run(copy), cs.load_posterior(copy)
        except ConsilienceError:
            return "refused"
        except Exception as error:
            return f"traceback: {type(error).__name__}"
        fresh = cs.load_run(self.run)
        equal = stored.history == fresh.history and stored.evaluation == fresh.evaluation
        return "same result" if equal and same(belief, self.posterior) else "silent"

    def site(self, sites: Path) -> str:
        """What the states of all sites come to."""
        lost = False
        for (experiment, client, number), result in self.results.items():
            try:
                found = ClientStorage(sites, experiment, client).read(Token(1, number))
            except Exception as error:
                return f"traceback: {type(error).__name__}"
            if found is not None and not same(found[0], result):
                return "silent"
            lost |= found is None
        return "refused" if lost else "same result"


def altered(victims: Victims, count: int, chance: random.Random) -> Counter[str]:
    """Outcomes of `count` altered bytes: half in checkpoints, the others in posteriors and in states."""
    found: Counter[str] = Counter()
    for number in range(count):
        kind = ("checkpoint", "posterior", "checkpoint", "state", "checkpoint", "site")[number % 6]
        if kind == "site":
            sites = victims.place / "sites copy"
            shutil.rmtree(sites, ignore_errors=True)
            shutil.copytree(victims.sites, sites)
            alter(chance.choice(sorted(sites.rglob("*.safetensors"))), chance)
            found[victims.site(sites)] += 1
            continue
        copy = victims.copy()
        if kind == "checkpoint":
            alter(max((copy / "checkpoints").glob("*.safetensors")), chance)
        elif kind == "posterior":
            alter(copy / "posterior.safetensors", chance)
        else:
            alter(chance.choice(sorted((copy / "states").glob(f"*-{ROUNDS}.safetensors"))), chance)
        found[victims.read(copy) if kind == "posterior" else victims.resumed(copy)] += 1
    return found


def exchanged(victims: Victims, count: int, chance: random.Random) -> Counter[str]:
    """Outcomes of `count` files that were replaced by files of another run, client, round, experiment or token."""
    found: Counter[str] = Counter()
    for number in range(count):
        copy, kind, last = victims.copy(), number % 8, f"round-{ROUNDS:07d}.safetensors"
        clients = chance.sample(range(len(SIZES)), 2)
        state = copy / "states" / f"{clients[0]}-{ROUNDS}.safetensors"
        if kind == 0:
            shutil.copy(victims.other / "checkpoints" / last, copy / "checkpoints" / last)
        elif kind == 1:
            before = victims.run / "checkpoints" / f"round-{ROUNDS - 1:07d}.safetensors"
            shutil.copy(before, copy / "checkpoints" / last)
        elif kind == 2:
            shutil.copy(victims.run / "states" / f"{clients[1]}-{ROUNDS}.safetensors", state)
        elif kind == 3:
            shutil.copy(victims.run / "states" / f"{clients[0]}-{ROUNDS - 1}.safetensors", state)
        elif kind == 4:
            shutil.copy(victims.other / "states" / state.name, state)
        elif kind == 5:
            name = ("posterior.safetensors", "metrics.jsonl", "evaluation.json")[number // 8 % 3]
            shutil.copy(victims.other / name, copy / name)
        elif kind == 6:
            shutil.copy(victims.other / "run.json", copy / "run.json")
        if kind < 5:
            found[victims.resumed(copy)] += 1
        elif kind < 7:
            found[victims.read(copy)] += 1
        else:
            sites = victims.place / "sites copy"
            shutil.rmtree(sites, ignore_errors=True)
            shutil.copytree(victims.sites, sites)
            shutil.copy(*chance.sample(sorted(sites.rglob("*.safetensors")), 2))
            found[victims.site(sites)] += 1
    return found


def _json(change: Callable[[Any, random.Random], Any]) -> Damage:
    """Damage to one value of a JSON file, or of a line."""

    def damage(path: Path, chance: random.Random) -> None:
        try:
            lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            at = chance.randrange(len(lines))
            lines[at] = json.dumps(_changed(json.loads(lines[at]), change, chance))
            path.write_text("\n".join(lines) + "\n")
        except ValueError:  # no JSON
            alter(path, chance)

    return damage


def _changed(value: Any, change: Callable[[Any, random.Random], Any], chance: random.Random) -> Any:
    if isinstance(value, dict | list) and value and chance.random() < 0.8:
        at = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
        value[at] = _changed(value[at], change, chance)
        return value
    return change(value, chance)


def _folder(path: Path, _: random.Random) -> None:
    path.unlink()
    path.mkdir()


WRONG: tuple[Any, ...] = (None, True, -1, 1e308, "text", [], [1, "a"], {}, {"a": {"b": []}})
DAMAGES: dict[str, Damage] = {
    "a byte": alter,
    "truncated": lambda path, chance: path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)]),
    "deleted": lambda path, _: path.unlink(),
    "empty": lambda path, _: path.write_bytes(b""),
    "random bytes": lambda path, chance: path.write_bytes(chance.randbytes(chance.randrange(1, 2000))),
    "a folder": _folder,
    "binary in text": lambda path, chance: path.write_bytes(path.read_bytes() + b"\x00\xff\xfe\x80\n"),
    "another type": _json(lambda _, chance: chance.choice(WRONG)),
    "not a number": _json(lambda _, chance: chance.choice([float("nan"), float("inf"), -float("inf")])),
    "another field": _json(lambda value, _: {"something": value}),
    "nested": lambda path, _: path.write_bytes(b"[" * 100_000),
    "another kind": lambda path, chance: path.write_text(
        chance.choice(["{}", "[]", "null", "3", '"text"', '{"round": "a"}'])
    ),
}

OWN = """
import torch
import consilience as cs
def clouds():
    y = torch.arange(60) % 3
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0)) + 4.0 * y[:, None]
    data = cs.Dataset(x, y, name="clouds")
    return cs.Data(data, data)
"""
CONFIG = """
[data]
name = "own.py:clouds"
[partition]
name = "iid"
clients = 3
[model]
name = "logistic"
[algorithm]
name = "FedEP"
batch_size = 10
[run]
rounds = 2
checkpoint_every = 1
[compare]
algorithms = ["FedAvg"]
seeds = 1
[engine]
device = "cpu"
chunk = 4
workers = 1
"""


def directories(place: Path, count: int, chance: random.Random) -> tuple[Counter[str], Counter[str]]:
    """(outcomes of `count` damaged directories, the tracebacks by command and error). A directory counts as a traceback
    if one of the commands gives one."""
    from typer.testing import CliRunner

    from consilience.cli import app

    invoke = CliRunner().invoke
    (place / "own.py").write_text(OWN)
    config = place / "config.toml"
    config.write_text(CONFIG)
    assert not invoke(app, ["run", str(config), "--out", str(place / "run")]).exception
    assert not invoke(app, ["compare", str(config), "--out", str(place / "both")]).exception
    found: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    for number in range(count):
        source = place / ("both" if number % 4 == 3 else "run")
        copy = place / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(source, copy)
        kind = sorted(DAMAGES)[number % len(DAMAGES)]
        files = sorted(path for path in copy.rglob("*") if path.is_file() and path.stat().st_size)
        DAMAGES[kind](chance.choice(files), chance)
        run = copy / "FedAvg" / "seed-0" if source.name == "both" else copy
        whole = ["compare" if source.name == "both" else "run", str(config), "--out", str(copy), "--resume"]
        calls: dict[str, Callable[[], BaseException | None]] = {
            "report": lambda at=copy: invoke(app, ["report", str(at)]).exception,
            "rewind": lambda at=run: invoke(app, ["rewind", str(at)]).exception,
            "load_run": lambda at=run: _raised(lambda: (repr(cs.load_run(at)), cs.load_run(at)._repr_html_())),
            "load_posterior": lambda at=run: _raised(lambda: cs.load_posterior(at)),
            whole[0]: lambda words=tuple(whole): invoke(app, words).exception,
            "rewind to": lambda at=run: invoke(app, ["rewind", str(at), "--round", "1"]).exception,
        }
        raised = {name: error for name, call in calls.items() if (error := call()) is not None}
        wrong = {n: e for n, e in raised.items() if not isinstance(e, ConsilienceError | SystemExit)}
        refused = any(isinstance(error, ConsilienceError) for error in raised.values())
        found["traceback" if wrong else "refused in a sentence" if refused else "not needed, or mended"] += 1
        errors.update(f"{name}: {kind}: {type(error).__name__}" for name, error in wrong.items())
    return found, errors


def _raised(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def shown(found: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in found.most_common())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=200)
    parser.add_argument("--exchanged", type=int, default=40)
    parser.add_argument("--directories", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    with folder() as place:
        victims = Victims(place)
        print(f"{given.bytes} altered bytes: {shown(altered(victims, given.bytes, chance))}", flush=True)
        print(f"{given.exchanged} exchanged files: {shown(exchanged(victims, given.exchanged, chance))}", flush=True)
    with folder() as place:
        found, errors = directories(place, given.directories, chance)
        print(f"{given.directories} damaged directories: {shown(found)}", flush=True)
        for error, count in errors.most_common():
            print(f"  {count:4} {error}")


if __name__ == "__main__":
    main()
