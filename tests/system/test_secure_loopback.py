"""Secure sums among real processes, over TLS, with keys: the simulator's bits, and a server that holds no update."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import consilience as cs
from consilience.core.records import leaves
from consilience.flower.loopback import SUPERLINK, Loopback
from consilience.flower.messages import Token
from consilience.flower.registry import Registry
from consilience.flower.storage import ClientStorage
from consilience.runs.directory import RunDirectory
from support.processes import memory_of, processes_with

APP = Path(__file__).parents[2] / "benchmarks" / "drill_app"
sys.path.insert(0, str(APP))
from drill.setting import METHODS, five_sites, task  # noqa: E402

ROUNDS = 3
PATTERN = 48  # bytes of an update that are searched for


@pytest.fixture
def federation(tmp_path):
    with Loopback(tmp_path / "net", secure=True) as net:
        for site in five_sites()[0].names:
            net.node(site, states=str(tmp_path / "sites" / site), five=True)
        yield net


def simulated(method):
    engine = cs.Simulator(device="cpu", chunk=1, workers=1, secure=True)
    return cs.fit(METHODS[method], task(), five_sites()[0], rounds=ROUNDS, engine=engine, progress=False).server


def wait_for(seen, seconds=500.0):
    end = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < end, "the run is stuck"
        time.sleep(0.02)


def bytes_of(tensor):
    """The middle of a tensor's bytes."""
    data = tensor.detach().contiguous().numpy().tobytes()
    middle = len(data) // 2 // 8 * 8
    return data[middle : middle + PATTERN]


def updates_of(folder, experiment):
    """Bytes of every update that sites have computed: as numbers, and as integers in fixed point."""
    patterns = {}
    for site in five_sites()[0].names:
        storage = ClientStorage(folder / "sites" / site, experiment, site)
        for token in storage.tokens():
            update = storage.read(Token(*token))[0].update.update
            patterns[f"{site} {token}"] = bytes_of(leaves_by_name(update)["eta"])
    return patterns


def leaves_by_name(tree):
    return dict(leaves(tree))


@pytest.mark.slow
def test_five_sites_learn_the_simulators_bits_and_the_server_holds_no_update(federation, tmp_path):
    out = tmp_path / "run"
    run = federation.start(APP, method="FedEP", rounds=ROUNDS, out=str(out), clients=5, secure=True)
    wait_for(lambda: out.exists() and len(RunDirectory(out).history()) == 2)
    servers = processes_with(f"FLWR_HOME={tmp_path / 'net' / 'flwr' / SUPERLINK}")
    for process in servers:
        os.kill(process, signal.SIGSTOP)
    try:
        saved = RunDirectory(out).latest()[1]
        updates = updates_of(tmp_path, Registry.read(out).experiment)
        memory = {process: memory_of(process) for process in servers}
        files = {path: path.read_bytes() for path in (tmp_path / "net").rglob("*") if path.is_file()}
        files |= {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    finally:
        for process in servers:
            os.kill(process, signal.SIGCONT)
    known = bytes_of(saved.server.q.eta)
    assert any(known in held for held in memory.values()), "the search finds what the server knows"
    assert any(known in held for held in files.values())
    assert len(updates) >= 5
    for what, pattern in updates.items():
        assert not [process for process, held in memory.items() if pattern in held], f"{what} is in the memory"
        assert not [path for path, held in files.items() if pattern in held], f"{what} is in a file"
    assert federation.wait(run) == "finished:completed", federation.log(SUPERLINK).read_text()[-3000:]
    for (name, found), (_, wanted) in zip(leaves(RunDirectory(out).latest()[1].server), leaves(simulated("FedEP")),
                                          strict=True):  # fmt: skip
        assert torch.equal(found, wanted), name
    assert RunDirectory(out).history()[-1]["eval"]["accuracy"] > 0.6, "scores are sums, too"


@pytest.mark.slow
def test_fedavg_at_five_sites_is_the_simulators_to_the_last_bit(federation, tmp_path):
    out = tmp_path / "run"
    status = federation.run(APP, method="FedAvg", rounds=ROUNDS, out=str(out), clients=5, secure=True)
    assert status == "finished:completed", federation.log(SUPERLINK).read_text()[-3000:]
    wanted = simulated("FedAvg")
    assert np.array_equal(RunDirectory(out).latest()[1].server.theta, wanted.theta)
