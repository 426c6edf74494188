"""The recipe of BatchNorm: test images with the clients' own labels, and runs that are not repeated."""

from __future__ import annotations

import json

import pytest
import torch

import consilience as cs
from consilience.core.errors import CheckpointError
from consilience.recipes.base import Options
from consilience.recipes.batchnorm import VARIANTS, Study, like
from consilience.tasks.statistics import needs_statistics


def test_clients_have_test_images_with_their_own_labels():
    made = torch.Generator().manual_seed(0)
    train, test = (cs.Dataset(torch.zeros(n, 1), torch.randint(4, (n,), generator=made)) for n in (4000, 1000))
    federation = cs.partition.dirichlet(train, 5, alpha=0.5, seed=1)
    shares = like(federation, test)
    assert len(shares) == 5
    assert shares.examples == 1000
    ours, theirs = (f.label_counts().double() for f in (shares, federation))
    torch.testing.assert_close(ours / ours.sum(0), theirs / theirs.sum(0), atol=0.01, rtol=0)


def test_all_variants_start_from_the_same_convolutions():
    study = Study().quick()
    tasks = [study.task(variant, 3) for variant in VARIANTS.values()]
    firsts = [task.module[0].weight for task in tasks]
    assert all(torch.equal(first, firsts[0]) for first in firsts)
    assert [needs_statistics(task) for task in tasks] == [False, True, False, True]


def test_finished_runs_are_not_repeated(tmp_path, monkeypatch):
    ran, line = [], {"round": 1, "accuracy": 0.5, "accuracy at clients": 0.75, "loss": 1.0}
    broken = ("FedBN", 1)

    def curve(study, name, seed):
        ran.append((name, seed))
        if (name, seed) == broken:
            raise KeyboardInterrupt
        return [line]

    monkeypatch.setattr(Study, "curve", curve)
    monkeypatch.setattr(Study, "data", None)
    options = Options(True, 2, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        Study().quick().run(options)
    assert len((tmp_path / "curves.csv").read_text().splitlines()) == 1 + 7
    ran.clear()
    broken = None
    found = Study().quick().run(options)
    assert ran == [("FedBN", 1)]
    assert {(row.metric, row.mean, row.n) for row in found.rows} == {
        ("accuracy", 0.5, 2),
        ("accuracy at clients", 0.75, 2),
    }
    with pytest.raises(CheckpointError, match="is a run of other settings"):
        Study().run(options)
    assert len(json.loads((tmp_path / "comparison.json").read_text())["rows"]) == 8
