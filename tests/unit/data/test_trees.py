"""Examples with several inputs: tuples and dicts go through data sets, federations and cohorts as one tensor does."""

from typing import Any

import pytest
import torch

import consilience as cs
from consilience.core.errors import DataError
from consilience.data.cohort import Cohort

PIXELS = torch.arange(24, dtype=torch.uint8).view(6, 4)
AGE = torch.arange(6.0).view(6, 1)
Y = torch.tensor([0, 1, 1, 0, 1, 0])
TREES: dict[str, Any] = {
    "tuple": (PIXELS, AGE),
    "dict": {"pixels": PIXELS, "age": AGE},
}
both = pytest.mark.parametrize("x", TREES.values(), ids=list(TREES))


def parts(tree: Any) -> list[Any]:
    return list(tree.values() if isinstance(tree, dict) else tree)


def refused(make: Any) -> str:
    with pytest.raises(DataError) as caught:
        make()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@both
def test_inputs_are_the_same_tree(x: Any) -> None:
    data, index = cs.Dataset(x, Y), torch.tensor([[1, 5], [0, 0]])
    found = data.inputs(index, torch.float64)
    assert type(found) is type(x)
    pixels, age = parts(found)
    assert torch.equal(pixels, PIXELS[index])
    assert torch.equal(age, AGE[index].double())
    assert (len(data), data.device) == (6, torch.device("cpu"))


@both
def test_rows_and_single_examples_are_trees(x: Any) -> None:
    data = cs.Dataset(x, Y, groups={"ward": Y})
    part = data[torch.tensor([4, 2])]
    assert torch.equal(parts(part.x)[1], AGE[[4, 2]])
    assert part.groups["ward"].tolist() == part.y.tolist() == [1, 1]
    example, label = data[-1]
    assert (parts(example)[1].tolist(), int(label)) == ([5], 0)
    assert data.to("cpu").x.__class__ is x.__class__


def test_arrays_and_lists_in_a_tree_become_tensors() -> None:
    data = cs.Dataset({"a": AGE.double().numpy(), "b": [[1], [2], [3], [4], [5], [6]]}, Y)
    assert (data.x["a"].dtype, data.x["b"].dtype) == (torch.float32, torch.int64)


def test_reprs_name_the_inputs() -> None:
    assert repr(cs.Dataset(TREES["dict"], Y)) == (
        "Dataset(data: 6 examples, x {pixels: 4 uint8, age: 1 float32}, y int64)"
    )
    found = cs.Dataset((cs.Ragged([[1]] * 6, mask="m"), AGE), Y)._repr_html_()
    assert "(L int64 with mask m, 1 float32)" in found


@both
def test_batches_hold_every_clients_rows(x: Any) -> None:
    federation = cs.Federation.from_owner(cs.Dataset(x, torch.arange(6)), [0, 0, 0, 1, 1, 1])
    cohort = Cohort(federation, torch.tensor([1, 0]), round=1, round_size=2, seed=0, dtype=torch.float64)
    for k, batch in cohort.epoch(0, 2):
        pixels, age = parts(batch.x)
        assert torch.equal(age[..., 0], batch.y[:k].double())
        assert torch.equal(pixels, PIXELS[batch.y])
        assert batch.size == batch.y.shape[1]
    assert [leaf.shape for leaf in parts(cohort.glimpse())] == [(2, 4), (2, 1)]


@both
def test_silos_of_trees_are_joined(x: Any) -> None:
    data = cs.Dataset(x, Y)
    joined = cs.Federation.from_silos({"a": data[:2], "b": data[2:]})
    assert all(torch.equal(one, two) for one, two in zip(parts(joined.data.x), parts(x), strict=True))
    other = cs.Dataset({"pixels": PIXELS, "weight": AGE}, Y)
    sentence = refused(lambda: cs.Federation.from_silos({"a": data, "b": other}))
    assert "silos 'a' and 'b' differ in x" in sentence


def test_ragged_silos_may_differ_in_length_but_not_in_padding() -> None:
    one, two = cs.Dataset(cs.Ragged([[1], [2, 3]]), Y[:2]), cs.Dataset(cs.Ragged([[4, 5, 6]]), Y[:1])
    found = cs.Federation.from_silos([one, two]).data.x
    assert [found[i].tolist() for i in range(3)] == [[1], [2, 3], [4, 5, 6]]
    three = cs.Dataset(cs.Ragged([[4]], padding=9), Y[:1])
    assert "differ in x, L int64 and L int64 with padding 9" in refused(lambda: cs.Federation.from_silos([one, three]))


def test_augmentation_needs_one_tensor() -> None:
    federation = cs.Federation.from_owner(cs.Dataset(TREES["tuple"], Y), [0] * 6)
    sentence = "augmentation is for inputs of one tensor, and x is (4 uint8, 1 float32)"
    options: dict[str, Any] = {"round": 1, "round_size": 1, "seed": 0, "augment": cs.data.Flip()}
    assert sentence in refused(lambda: Cohort(federation, torch.tensor([0]), **options))
    task = cs.Classification(torch.nn.Linear(4, 2), augment=cs.data.Flip())
    assert sentence in refused(lambda: cs.fit(cs.FedAvg(), task, federation, rounds=1, progress=False))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: cs.Dataset((AGE, PIXELS[:5]), Y), "data: x.0 has 6 rows but x.1 has 5"),
        (lambda: cs.Dataset({"a": AGE}, Y[:5]), "data: x.a has 6 rows but y has 5"),
        (lambda: cs.Dataset({"a": AGE, "b": AGE / 0}, Y), "data: x.b holds values that are not finite"),
        (lambda: cs.Dataset((), Y), "data: x has no entries"),
        (lambda: cs.Dataset({}, Y), "data: x has no entries"),
        (lambda: cs.Dataset({1: AGE}, Y), "data: x: the keys of a dict name the module's arguments, got 1"),
        (lambda: cs.Dataset((AGE, 3), Y), "data: x.1 must have a row for each example"),
        (lambda: cs.Dataset({"a": AGE, "b": None}, Y), "data: x.b must be a tensor, an array"),
        (lambda: cs.Dataset((AGE, AGE), Y, shift=1.0), "scale and shift are for x of one tensor"),
    ],
)  # fmt: skip
def test_trees_that_do_not_fit_get_a_sentence(make: Any, sentence: str) -> None:
    assert sentence in refused(make)
