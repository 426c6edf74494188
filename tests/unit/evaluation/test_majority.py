"""The majority baseline is the accuracy of each client's most frequent class in training."""

import pytest
import torch
from torch import nn

import consilience as cs
from support.runs import TRAIN, fit
from support.scenarios import linear

TRAINED = {"Basel": [0, 0, 0, 1], "Chur": [1, 1, 1, 1, 0], "Genf": [0, 1, 1]}
TESTED = {"Basel": [0, 1, 1, 1], "Chur": [1, 1], "Zug": [1, 0]}


def silos(labels: dict[str, list[int]], kind: torch.dtype = torch.int64) -> cs.Federation:
    generator = torch.Generator().manual_seed(0)
    data = {
        name: cs.Dataset(torch.randn(len(y), 2, generator=generator), torch.tensor(y).to(kind), name="labels")
        for name, y in labels.items()
    }
    return cs.Federation.from_silos(data)


def test_each_client_has_the_accuracy_of_its_own_class_and_a_new_client_that_of_all() -> None:
    run = fit(cs.FedAvg(TRAIN), cs.Classification(nn.Linear(2, 2)), silos(TRAINED), rounds=1, test=silos(TESTED))
    assert run.evaluation is not None
    assert {one["name"]: one["majority"] for one in run.evaluation.clients} == {"Basel": 0.25, "Chur": 1.0, "Zug": 0.5}
    assert run.evaluation.majority == pytest.approx((1 + 2 + 1) / 8)


@pytest.mark.parametrize("method", [cs.FedAvg(TRAIN), cs.Pooled(TRAIN), cs.LocalOnly(TRAIN)], ids=lambda m: m.name)
def test_test_data_of_no_client_have_the_class_of_all(method: cs.Algorithm) -> None:
    test = silos(TESTED).data
    run = fit(method, cs.Classification(nn.Linear(2, 2)), silos(TRAINED), rounds=1, test=test)
    assert run.evaluation is not None
    assert run.evaluation.majority == pytest.approx(float((test.y == 1).double().mean()))


def test_labels_may_be_floats() -> None:
    train, test = silos(TRAINED, torch.float32), silos(TESTED, torch.float32)
    run = fit(cs.FedAvg(TRAIN), cs.Binary(nn.Linear(2, 1)), train, rounds=1, test=test)
    assert run.evaluation is not None
    assert run.evaluation.majority == pytest.approx(0.5)


def test_numbers_have_no_majority() -> None:
    task, federation = linear()
    run = fit(cs.FedAvg(TRAIN), task, federation, rounds=1, test=federation)
    assert run.evaluation is not None
    assert run.evaluation.majority is None
    assert "majority" not in run.evaluation.clients[0]
