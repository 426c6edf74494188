"""A real federation: a SuperLink and two SuperNodes as processes, over TLS, with keys."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

import consilience as cs
from consilience.core.records import leaves
from consilience.flower.loopback import SUPERLINK, Loopback
from consilience.runs.directory import RunDirectory

APP = Path(__file__).parents[2] / "benchmarks" / "drill_app"
sys.path.insert(0, str(APP))
from drill.setting import METHODS, hospitals, task  # noqa: E402

SITES = ("Cleveland", "Hungary")
METHOD, ROUNDS = "FedEP", 2  # the second round starts from the states on the sites' disks


def simulated():
    everyone = hospitals()[0]
    federation = cs.Federation.from_silos({site: everyone.client(everyone.names.index(site)) for site in SITES})
    engine = cs.Simulator(device="cpu", chunk=1, workers=1)
    return cs.fit(METHODS[METHOD], task(), federation, rounds=ROUNDS, engine=engine, progress=False).server


def processes_of(folder):
    """The processes that use Flower's files in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()
        except OSError:
            continue
        if f"FLWR_HOME={folder}".encode() in environment and int(process.name) != os.getpid():
            found.append(process.name)
    return found


@pytest.mark.slow
def test_two_sites_over_tls_with_keys_learn_what_the_simulator_learns(tmp_path):
    with Loopback(tmp_path / "net", secure=True) as federation:
        for site in SITES:
            federation.node(site, states=str(tmp_path / site))
        status = federation.run(APP, method=METHOD, rounds=ROUNDS, out=str(tmp_path / "run"))
        assert status == "finished:completed", federation.log(SUPERLINK).read_text()[-3000:]
    assert not processes_of(tmp_path / "net"), "a process outlived the federation"
    done, saved = RunDirectory(tmp_path / "run").latest()
    assert done == ROUNDS
    for (name, x), (_, y) in zip(leaves(saved.server), leaves(simulated()), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    assert RunDirectory(tmp_path / "run").history()[-1]["eval"]["accuracy"] > 0.6  # on the sites' held-out examples
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.slow
def test_the_server_stops_to_read_a_reply_that_is_too_long(tmp_path):
    with Loopback(tmp_path / "net") as federation:
        federation.node(SITES[0], states=str(tmp_path / SITES[0]))
        federation.node(SITES[1], states=str(tmp_path / SITES[1]), fault="luggage", megabytes=30)
        assert federation.run(APP, method="FedAvg", rounds=1, out=str(tmp_path / "run")) == "finished:completed"
    (line,) = RunDirectory(tmp_path / "run").history()
    (entry,) = line["rejected"]
    assert entry == {"client": SITES[1], "reason": "its reply is longer than was expected"}
