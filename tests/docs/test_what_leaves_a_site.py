"""The table of updates in docs/deploy.md is true of every method."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import consilience as cs
from consilience.core.records import leaves
from consilience.flower.client import CLASS_COUNTS
from support.methods import ALGORITHMS, federation, label, task_of

DEPLOY = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
ROW = re.compile(r"^\| ([A-Z][\w, ]+) \| (.*`.*) \|$", re.MULTILINE)
TABLE = {
    method.strip(): set(re.findall(r"`([^`]+)`", fields))
    for methods, fields in ROW.findall(DEPLOY.partition("\n## What leaves a site\n")[2].partition("\n## ")[0])
    for method in methods.split(",")
}


def sent(method):
    """The names of the fields of an update, and the update of two clients."""
    task = method.adapt(task_of(method), 0).prepare(torch.device("cpu"), torch.float64)
    clients, ids = federation(), torch.tensor([0, 1])
    info = cs.data.Info(task.initial(), *torch.tensor([0, len(clients), clients.examples]))
    cohort = cs.data.Cohort(clients, ids, round=1, round_size=2, seed=0, dtype=torch.float64)
    state = method.client(task, info, clients.sizes[ids].double().unsqueeze(1))
    update, _ = method.local(task, method.message(method.start(task, info), ids), state, cohort)
    return {name for name, _ in leaves(update)}, update


REAL = [method for method in ALGORITHMS if len(method.arrange(federation())) > 1]


@pytest.mark.parametrize("method", REAL, ids=label)
def test_an_update_has_the_fields_of_the_table(method):
    fields, _ = sent(method)
    if isinstance(method, cs.Private):
        fields = {name.partition(".")[0] for name in fields}
    row = type(getattr(method, "method", method) if isinstance(method, cs.Robust) else method).__name__
    assert fields == TABLE["Ensemble by class" if method.name == "Ensemble by class" else row]


@pytest.mark.parametrize(
    "method", [m for m in REAL if not CLASS_COUNTS & TABLE.get(type(m).__name__, set())], ids=label
)
def test_no_other_update_has_a_number_for_each_class(method):
    if method.name == "Ensemble by class":
        return
    _, update = sent(method)
    clients = federation()
    counts = torch.bincount(clients.data.y[clients.indices(0)], minlength=3).double()
    assert not any(leaf[0].numel() == 3 and torch.equal(leaf[0].flatten(), counts) for _, leaf in leaves(update))
