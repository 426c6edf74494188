"""What must be equal for a run to be resumed: the contents and the form of examples."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import consilience as cs
from consilience.runs.identity import differences, identity

ROWS = [[1, 2], [3], [], [4]]
Y = torch.tensor([0, 1, 1, 0])


def of(data: cs.Dataset) -> Any:
    task = cs.Classification(torch.nn.Linear(2, 2, bias=False))
    torch.nn.init.ones_(task.module.weight)
    return identity(cs.FedAvg(), task, cs.Federation.from_owner(data, Y), 2, 0, "float32")


def named(**changes: Any) -> cs.Dataset:
    return cs.Dataset({"ids": cs.Ragged(ROWS, mask="m"), "age": torch.arange(4.0)} | changes, Y)


def test_equal_trees_are_the_same_run() -> None:
    assert differences(of(named()), of(named())) == []


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (named(age=torch.zeros(4)), ["contents.inputs.age"]),
        (named(ids=cs.Ragged([[1], [2, 3], [], [4]], mask="m")), ["contents.inputs.ids"]),
        (named(ids=cs.Ragged(ROWS, mask="m", padding=9)), ["federation.inputs"]),
        (named(ids=cs.Ragged(ROWS, mask="other")), ["federation.inputs"]),
        (replace(named(), y=cs.Ragged(ROWS)), ["federation.labels", "federation.targets"]),
    ],
    ids=["values", "lengths", "padding", "mask", "targets"],
)
def test_every_difference_between_trees_is_named(data: cs.Dataset, where: list[str]) -> None:
    assert [text.split(" is ")[0] for text in differences(of(named()), of(data))] == where


def test_one_tensor_has_one_checksum_and_no_form() -> None:
    found = of(cs.Dataset(torch.ones(4, 2), Y))
    assert list(found["contents"]) == ["inputs"]
    assert not {"inputs", "targets"} & set(found["federation"])
