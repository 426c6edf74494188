"""Class frequencies of a client without labels, as a run estimates them."""

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.core.errors import TaskError
from support.scenarios import linear

ENGINE = cs.Simulator(device="cpu", precision="float64", chunk=4, workers=1)
EP = cs.FedEP(cs.inference.Newton(), damping=1.0, prior=1.0)


def patients(count, share, seed):
    """Points around 2y, of which a share has y = 1."""
    made = torch.Generator().manual_seed(seed)
    y = (torch.rand(count, generator=made) < share).long()
    return cs.Dataset(torch.randn(count, 1, generator=made) + 2 * y.unsqueeze(1), y)


def test_a_run_of_a_binary_task_finds_the_share_of_ones_among_unlabelled_inputs():
    hospitals = cs.Federation.from_silos({"Basel": patients(2000, 0.3, 0), "Bern": patients(2000, 0.5, 1)})
    run = cs.fit(EP, cs.Binary(nn.Linear(1, 1)), hospitals, rounds=4, engine=ENGINE, progress=False)
    new = patients(2000, 0.9, 2)
    shift = run.label_shift(new.x)
    assert shift.old[1] == pytest.approx(0.4, abs=0.02)
    assert shift.new[1] == pytest.approx(0.9, abs=0.03)
    before = run.predict(new.x)
    right = torch.arange(len(new)), new.y
    assert -shift(before)[right].log().mean() < -before[right].log().mean() - 0.05


def test_numbers_have_no_class_frequencies():
    task, federation = linear()
    run = cs.fit(EP, task, federation, rounds=1, engine=ENGINE, progress=False)
    with pytest.raises(TaskError, match="needs a task of classes"):
        run.label_shift(federation.data.x)
