"""A real federation: a link and two sites as processes, over TLS, with keys. It learns what the simulator learns."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

import consilience as cs
from consilience.core.records import leaves
from consilience.flower.loopback import Loopback
from consilience.runs.directory import RunDirectory
from support import certificates

APP = Path(__file__).parents[2] / "benchmarks" / "drill_app"
sys.path.insert(0, str(APP))
from drill.setting import METHODS, hospitals, task  # noqa: E402

SITES = ("Cleveland", "Hungary")


def learned_by_the_simulator(method):
    everyone = hospitals()[0]
    federation = cs.Federation.from_silos({site: everyone.client(everyone.names.index(site)) for site in SITES})
    engine = cs.Simulator(device="cpu", chunk=1, workers=1)
    return cs.fit(method, task(), federation, rounds=3, engine=engine, progress=False).server


def processes_in(folder):
    """Those that work in a folder, whoever started them."""
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
    link, nodes, public = certificates.make(tmp_path / "keys", SITES)
    with Loopback(tmp_path / "net", (link, nodes)) as federation:
        for site in SITES:
            federation.register(site, public[site])
            federation.node(site, states=str(tmp_path / site))
        runs = [federation.start(APP, method=name, out=str(tmp_path / name)) for name in METHODS]
        for run in runs:  # side by side: most of their time they wait
            assert federation.wait(run) == "finished:completed", federation.log("link").read_text()[-3000:]
    assert not processes_in(tmp_path / "net"), "something outlived the federation"
    for name, method in METHODS.items():
        done, saved = RunDirectory(tmp_path / name).latest()
        assert done == 3
        for (leaf, x), (_, y) in zip(leaves(saved.server), leaves(learned_by_the_simulator(method)), strict=True):
            torch.testing.assert_close(
                x, y, rtol=1e-5, atol=1e-6, msg=lambda m, where=f"{name} {leaf}": f"{where}: {m}"
            )
        scores = RunDirectory(tmp_path / name).history()[-1]["eval"]
        assert scores["accuracy"] > 0.6  # by what the sites held out
        assert (tmp_path / name / "report.html").exists()
