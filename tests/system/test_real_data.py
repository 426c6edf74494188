"""The published data sets, where CONSILIENCE_DATA names a folder of them."""

import os

import pytest
import torch

from consilience.data import load

needs_data = pytest.mark.skipif(
    not os.environ.get("CONSILIENCE_DATA"), reason="CONSILIENCE_DATA names no folder of real data sets"
)


@needs_data
@pytest.mark.parametrize(
    ("name", "size", "classes"),
    [("mnist", (1, 28, 28), 10), ("fashion-mnist", (1, 28, 28), 10), ("mnist-writers", (1, 28, 28), 10)]
    + [
        pytest.param(name, (3, 32, 32), classes, marks=pytest.mark.slow)
        for name, classes in (("cifar10", 10), ("cifar100", 100))
    ],
)
def test_the_real_set(name, size, classes):
    data = load(name)
    assert data.train.x.shape == (60000 if size[0] == 1 else 50000, *size)
    assert data.test.x.shape == (10000, *size)
    assert len(data.train.classes) == classes
    inputs = data.train.inputs(torch.arange(len(data.train)))
    assert float(inputs.mean()) == pytest.approx(0, abs=0.01)
    assert float(inputs.std()) == pytest.approx(1, abs=0.01)


@needs_data
def test_real_writers_are_539():
    train = load("mnist-writers").train
    assert int(train.groups["writer"].max()) + 1 == len(train.group_names["writer"]) == 539
    assert int(train.groups["writer"].bincount().median()) == 116
