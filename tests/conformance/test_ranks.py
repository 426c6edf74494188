"""Two processes of `Distributed` compute the simulator's run. They are started once, and compute all methods one after
another: python test_ranks.py OUT, under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch

import consilience as cs
from support.methods import COHORT, ENGINES, SICK, assert_close, cases, federation, learn, parts, poisoned
from support.once import once

PATIENCE = 300.0  # seconds; only a failure takes as long
METHODS = [method for method in ENGINES if not isinstance(method, cs.Switch)]  # support/ranks.py has a Switch


def sick(method, engine):
    """A run in whose second round a client of the second rank sends NaN."""
    return learn(poisoned(method, round=2), engine=engine)


def facts(run):
    """The metrics of every round, without times."""
    return [{key: value for key, value in line.items() if key != "seconds"} for line in run.history]


def main(out: Path) -> None:
    engine = cs.Distributed(device="cpu", chunk=2, precision="float64", timeout=120)
    rank = 0 if engine.leads else 1
    for method in METHODS:
        name = f"{METHODS.index(method)}.{rank}"
        try:
            run = sick(method, engine)
        except Exception:  # reported by this method's test; the others have theirs
            (out / f"{name}.error").write_text(traceback.format_exc())
        else:
            (out / f"{name}.json").write_text(json.dumps(facts(run)))
            (out / f"{name}.safetensors").write_bytes(cs.core.pack(tuple(tree for _, tree in parts(run))))


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The folder with the results of two ranks."""
    return once(tmp_path_factory, "conformance of ranks", launched)


def launched(folder):
    """(exit status, output) of two ranks."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    env |= {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2"]
    pipe = subprocess.PIPE
    command = [*torchrun, __file__, str(folder)]
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        try:
            said, _ = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.terminate()  # not killed: torchrun ends its ranks
            said, _ = process.communicate()
        except BaseException:
            process.terminate()
            raise
    return process.returncode, said


@cases(METHODS, core=False)
def test_two_ranks_compute_the_simulators_run(method, out):
    name = METHODS.index(method)
    assert not (errors := [path.read_text() for path in out.glob(f"{name}.*.error")]), "\n".join(errors)
    run = sick(method, cs.Simulator(device="cpu", chunk=3, workers=1, precision="float64"))
    wanted = tuple(tree for _, tree in parts(run))
    mine, theirs = ((out / f"{name}.{rank}.safetensors").read_bytes() for rank in (0, 1))
    assert mine == theirs, "the ranks hold different numbers"
    assert_close(cs.core.unpack(mine, like=wanted), wanted)
    text, also = ((out / f"{name}.{rank}.json").read_text() for rank in (0, 1))
    assert text == also
    told = json.loads(text)
    for got, line in zip(told, facts(run), strict=True):
        near = {key: pytest.approx(x, rel=1e-9, nan_ok=True) for key, x in line.items() if isinstance(x, float)}
        assert got == line | near
    if len(method.arrange(federation())) > SICK:
        rejected = [[client["client"] for client in line["rejected"]] for line in told]
        turn = method.turn(2, COHORT, len(federation()))  # of a method that says in which order clients take part
        taken = turn is None or SICK in turn.tolist()
        assert rejected == [[], [f"site {SICK}"] if taken else [], []]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
