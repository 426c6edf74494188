"""Every Python block of the documentation runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import consilience as cs
from scenarios import blobs

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md", *sorted((ROOT / "docs" / "methods").glob("*.md"))]


def blocks(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run_in_order(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    with torch.random.fork_rng():
        for block in blocks(page):
            exec(compile(block, str(page), "exec"), namespace)
    assert capsys.readouterr().out


def test_the_algorithm_in_contributing_works_and_does_what_it_says():
    namespace = {}
    (block,) = blocks(ROOT / "CONTRIBUTING.md")
    exec(compile(block, "CONTRIBUTING.md", "exec"), namespace)
    task, federation, _ = blobs()
    options = {"rounds": 1, "engine": cs.Simulator(device="cpu", chunk=4, workers=1), "progress": False}
    short = cs.fit(namespace["FedClip"](cs.SGD(lr=0.1), length=1e-3), task, federation, **options)
    assert 0 < (short.posterior.mean - task.initial()).norm() <= 1.001e-3
    free = cs.fit(namespace["FedClip"](cs.SGD(lr=0.1), length=1e6), task, federation, **options)
    fedavg = cs.fit(cs.FedAvg(cs.SGD(lr=0.1)), task, federation, **options)
    torch.testing.assert_close(free.posterior.mean, fedavg.posterior.mean)
