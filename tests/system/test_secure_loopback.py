"""Secure sums among real processes, over TLS, with keys: the simulator's bits, and a server that holds no update."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

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

ROUNDS = {"FedEP": 2, "FedAvg": 1}
PATTERN = 48  # bytes of an update that are searched for


@pytest.fixture
def federation(tmp_path):
    with Loopback(tmp_path / "net", secure=True) as net:
        for site in five_sites()[0].names:
            net.node(site, states=str(tmp_path / "sites" / site), five=True)
        yield net


def simulated(method):
    engine = cs.Simulator(device="cpu", chunk=1, workers=1, secure=True)
    return cs.fit(METHODS[method], task(), five_sites()[0], rounds=ROUNDS[method], engine=engine, progress=False).server


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
            patterns[f"{site} {token}"] = bytes_of(dict(leaves(update))["eta"])
    return patterns


def assert_simulated(out, method):
    found, wanted = RunDirectory(out).latest()[1].server, simulated(method)
    for (name, one), (_, other) in zip(leaves(found), leaves(wanted), strict=True):
        assert torch.equal(one, other), name


def held_by_server(folder, out):
    """What the server's processes have in memory and in files, while they are stopped; by process and path."""
    servers = processes_with(f"FLWR_HOME={folder / 'net' / 'flwr' / SUPERLINK}")
    for process in servers:
        os.kill(process, signal.SIGSTOP)
    try:
        memory = {f"process {process}": memory_of(process) for process in servers}
        files = {str(path): path.read_bytes() for place in (folder / "net", out) for path in place.rglob("*")
                 if path.is_file()}  # fmt: skip
    finally:
        for process in servers:
            os.kill(process, signal.SIGCONT)
    return memory, files


@pytest.mark.slow
def test_five_sites_learn_the_simulators_bits_and_the_server_holds_no_update(federation, tmp_path):
    out = tmp_path / "FedEP"
    run = federation.start(APP, method="FedEP", rounds=ROUNDS["FedEP"], out=str(out), clients=5, secure=True)
    wait_for((out / "checkpoints" / "round-0000001.safetensors").exists)
    memory, files = held_by_server(tmp_path, out)
    known = bytes_of(RunDirectory(out).checkpoint(1).server.q.eta)
    assert any(known in held for held in memory.values()), "the search finds what the server knows"
    assert any(known in held for held in files.values())
    updates = updates_of(tmp_path, Registry.read(out).experiment)
    assert len(updates) >= 5
    for what, pattern in updates.items():
        assert not [where for where, held in (memory | files).items() if pattern in held], what
    assert federation.wait(run) == "finished:completed", federation.log(SUPERLINK).read_text()[-3000:]
    assert_simulated(out, "FedEP")
    assert RunDirectory(out).history()[-1]["eval"]["accuracy"] > 0.5, "scores are sums, too"
    out = tmp_path / "FedAvg"
    status = federation.run(APP, method="FedAvg", rounds=ROUNDS["FedAvg"], out=str(out), clients=5, secure=True)
    assert status == "finished:completed", federation.log(SUPERLINK).read_text()[-3000:]
    assert_simulated(out, "FedAvg")
