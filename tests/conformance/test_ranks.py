"""What every algorithm owes `Distributed`: two processes come to what the simulator comes to alone. They are started
once, and compute all algorithms one after another: python test_ranks.py OUT, under torchrun."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path

import pytest
import torch

import consilience as cs
from conformance import test_conformance as cases
from consilience.core.records import leaves
from support.once import once

PATIENCE = 300.0  # seconds; only a failure takes as long
SICK, WHEN = 2, 2  # a client, of the second rank's clients in this round


@cache
def federation():
    return inspect.unwrap(cases.federation)()


def sick(algorithm):
    """The algorithm, with a client whose update is NaN in one round: before and after that it is well."""

    class Sick(type(algorithm)):
        def local(self, task, message, state, cohort):
            method = cases.poisoned(algorithm) if cohort.round == WHEN else algorithm
            return method.local(task, message, state, cohort)

    return Sick(**{field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm)})


def learn(algorithm, engine):
    task = inspect.unwrap(cases.task)(algorithm)
    return cs.fit(sick(algorithm), task, federation(), rounds=3, cohort=5, engine=engine, progress=False)


def numbers(run):
    """The server and every client's state."""
    return tuple(tree for _, tree in cases.belief_of_everyone(run))


def facts(run):
    """All that the metrics say of every round, but for its time."""
    return [{key: value for key, value in line.items() if key != "seconds"} for line in run.history]


def main(out: Path) -> None:
    engine = cs.Distributed(device="cpu", chunk=2, precision="float64", timeout=120)
    rank = 0 if engine.leads else 1
    for number, algorithm in enumerate(cases.ALGORITHMS):
        try:
            run = learn(algorithm, engine)
        except Exception:  # is told by this algorithm's test, and all others have theirs
            (out / f"{number}.{rank}.error").write_text(traceback.format_exc())
        else:
            (out / f"{number}.{rank}.json").write_text(json.dumps(facts(run)))
            (out / f"{number}.{rank}.safetensors").write_bytes(cs.core.pack(numbers(run)))


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """What two ranks left behind."""
    return once(tmp_path_factory, "conformance of ranks", launched)


def launched(folder):
    """(exit status, words) of two ranks."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    env |= {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, __file__, str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        try:
            said, _ = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.terminate()  # and not killed: torchrun takes its ranks with it
            said, _ = process.communicate()
        except BaseException:
            process.terminate()
            raise
    return process.returncode, said


@pytest.mark.parametrize("number", range(len(cases.ALGORITHMS)), ids=[cases.label(a) for a in cases.ALGORITHMS])
def test_two_ranks_come_to_what_the_simulator_comes_to(number, out):
    assert not (errors := [path.read_text() for path in out.glob(f"{number}.*.error")]), "\n".join(errors)
    algorithm = cases.ALGORITHMS[number]
    run = learn(algorithm, cs.Simulator(device="cpu", chunk=3, workers=1, precision="float64"))
    mine, theirs = ((out / f"{number}.{rank}.safetensors").read_bytes() for rank in (0, 1))
    assert mine == theirs, "the ranks hold different numbers"
    for (what, tree), got in zip(cases.belief_of_everyone(run), cs.core.unpack(mine, like=numbers(run)), strict=True):
        for (name, x), (_, y) in zip(leaves(tree), leaves(got), strict=True):
            where = f"{what} {name}"
            torch.testing.assert_close(y, x, rtol=1e-10, atol=1e-10, msg=lambda m, w=where: f"{w}: {m}")
    text, also = ((out / f"{number}.{rank}.json").read_text() for rank in (0, 1))
    assert text == also
    told = json.loads(text)
    for got, line in zip(told, facts(run), strict=True):
        near = {key: pytest.approx(x, rel=1e-9, nan_ok=True) for key, x in line.items() if isinstance(x, float)}
        assert got == line | near
    if len(algorithm.arrange(federation())) > SICK:
        left_out = [[client["client"] for client in line["rejected"]] for line in told]
        assert left_out == [[], [f"site {SICK}"], []]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
