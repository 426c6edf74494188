"""Data of one's own: what becomes a tensor, which silos may be joined, and the sentence for everything else."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import TensorDataset

import consilience as cs
from consilience.core.errors import DataError
from consilience.data import Data, Dataset

X = torch.arange(12.0).view(4, 3)
Y = torch.tensor([0, 1, 1, 0])
TABLE = pd.DataFrame({"age": [40.0, 60.0, 50.0, 70.0], "dose": [1, 3, 2, 4], "ill": [0, 1, 1, 0]})


def refused(make: Any) -> str:
    with pytest.raises(DataError) as caught:
        make()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What becomes a tensor


@pytest.mark.parametrize(
    "given", [X.double().numpy(), X.numpy()[::-1].copy()[::-1], X.tolist(), pd.DataFrame(X.numpy())]
)
def test_arrays_lists_and_tables_become_tensors(given: Any) -> None:
    data = cs.Dataset(given, Y.numpy())
    assert data.x.dtype == torch.float32
    assert torch.equal(data.x, X)
    assert torch.equal(data.y, Y)


def test_a_table_is_learned_from_like_the_tensors_that_it_holds() -> None:
    data = cs.Dataset(TABLE[["age", "dose"]], TABLE["ill"], groups={"ward": [0, 0, 1, 1]}, scale=0.1, shift=[-5.0, 0.0])
    torch.testing.assert_close(data.inputs(torch.tensor([1])), torch.tensor([[1.0, 0.3]]))
    federation = cs.partition.by_group(data, "ward")
    run = cs.fit(cs.FedAvg(), cs.Classification(torch.nn.Linear(2, 2)), federation, rounds=1, progress=False)
    assert run.predict(data.x).shape == (4, 2)


def test_real_numbers_become_torchs_own_type_but_tensors_and_integers_stay_as_they_are() -> None:
    assert cs.Dataset(X.double(), X.double()).x.dtype == torch.float64
    assert cs.Dataset(X.numpy().astype(np.float16), Y).x.dtype == torch.float16
    assert cs.Dataset(X.numpy().astype(np.uint8), Y).x.dtype == torch.uint8
    assert cs.Dataset(X.tolist(), X.double().numpy()).y.dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert cs.Dataset(X.double().numpy(), Y).x.dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", ["int32", "int16", "uint8", "uint16", "bool"])
def test_labels_of_any_integers_are_classes(kind: str) -> None:
    assert torch.equal(cs.Dataset(X, Y.numpy().astype(kind)).y, Y)
    assert torch.equal(cs.Dataset(X, Y.to(getattr(torch, kind))).y, Y)


def test_ids_as_real_numbers_keep_all_their_digits() -> None:
    ids = np.array([123456789.0, 123456788.0, 1, 1])
    assert cs.Dataset(X, Y, groups={"patient": ids}).groups["patient"].tolist() == [123456789, 123456788, 1, 1]


def test_many_labels_stay_bytes() -> None:
    assert cs.Dataset(X, np.ones((4, 2), np.uint8)).y.dtype == torch.uint8


def test_an_array_that_may_not_be_written_is_copied_without_a_warning() -> None:
    array = X.numpy().copy()
    array.flags.writeable = False
    assert torch.equal(cs.Dataset(array, Y).x, X)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: cs.Dataset(TensorDataset(X, Y), Y), "a list of numbers, not a TensorDataset: Dataset.of(…) reads"),
        (lambda: cs.Dataset(X, None), "y must be a tensor, an array, a table or a list of numbers, not a NoneType"),
        (lambda: cs.Dataset(X, ["ill", "well", "ill", "ill"]), "data: y must be numbers in rows of one length"),
        (lambda: cs.Dataset([[1, 2], [3]], [0, 1]), "data: x must be numbers in rows of one length"),
        (lambda: cs.Dataset(TABLE.assign(sex=True), Y), "make a table's columns of one type by .astype(float)"),
        (lambda: cs.Dataset(5, 3), "data: x must have a row for each example"),
        (lambda: cs.Dataset(X, Y, groups={"ward": ["a", "b", "a", "b"]}), "data: group 'ward' must be numbers"),
        (lambda: cs.Dataset(X, Y, groups={"ward": [0.5, 1, 2, 3]}), "data: group 'ward' must be whole numbers [N]"),
        (lambda: cs.Dataset(X, Y, groups={"ward": X.long()}), "data: group 'ward' must be whole numbers [N]"),
    ],
)  # fmt: skip
def test_what_is_no_data_gets_a_sentence(make: Any, sentence: str) -> None:
    assert sentence in refused(make)


# What is checked


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_targets_must_be_finite_like_inputs(value: float) -> None:
    bad = torch.tensor([0.0, 1.0, value, 2.0])
    assert refused(lambda: cs.Dataset(X, bad)) == "data: y holds values that are not finite; fill or drop them first"
    assert "x holds values that are not finite" in refused(lambda: cs.Dataset(bad.numpy(), Y))


def test_labels_must_be_those_of_the_classes_that_are_named() -> None:
    sentence = "data: labels lie in 0..1, but classes has 1 name (labels 0..0 are allowed)"
    assert refused(lambda: cs.Dataset(X, Y, classes=("a",))) == sentence
    assert "labels lie in -1..0" in refused(lambda: cs.Dataset(X, Y - 1, classes=("a", "b")))
    assert cs.Dataset(X, Y, classes=("a", "b", "c")).classes == ("a", "b", "c")
    assert len(cs.Dataset(X, Y, classes=("a", "b"))[:0]) == 0
    assert cs.Dataset(X, torch.full((4, 1), 7.0), classes=("depth",)).y.dim() == 2


# Rows by index


def test_names_of_features_are_kept_by_an_index_and_fit_the_columns() -> None:
    data = cs.Dataset(X, Y, features=("age", "dose", "sex"))
    assert data[1:3].features == ("age", "dose", "sex")
    sentence = refused(lambda: cs.Dataset(X, Y, features=("age", "dose")))
    assert "features has 2 names, but x is 3 float32" in sentence


def test_an_index_gives_a_model_input_and_a_target() -> None:
    data = cs.Dataset(X.to(torch.uint8), Y, scale=0.5)
    x, y = data[1]
    assert (x.tolist(), int(y)) == ([1.5, 2.0, 2.5], 1)
    assert torch.equal(data[-3][0], x)
    assert [int(y) for _, y in data] == Y.tolist()  # as in a DataLoader
    with pytest.raises(IndexError, match="data has 4 examples, and no index 4"):
        data[4]


@pytest.mark.parametrize("index", [slice(1, None, 2), torch.tensor([1, 3]), [1, 3], Y.new_tensor([0, 1, 0, 1]) > 0])
def test_a_slice_indices_or_a_mask_give_a_data_set(index: Any) -> None:
    data = cs.Dataset(X, Y, classes=("a", "b"), groups={"ward": [5, 6, 7, 8]}, name="d")[index]
    assert isinstance(data, cs.Dataset)
    assert torch.equal(data.x, X[[1, 3]])
    assert (data.y.tolist(), data.groups["ward"].tolist(), data.name) == ([1, 0], [6, 8], "d")
    assert data.x.is_contiguous()


# Silos and owners


def silo(**more: Any) -> cs.Dataset:
    return cs.Dataset(**{"x": X, "y": Y, "classes": ("well", "ill")} | more)


def test_silos_that_are_alike_are_joined() -> None:
    scale = {"scale": 0.5, "shift": [1.0, 2.0, 3.0]}
    fed = cs.Federation.from_silos({"a": silo(**scale), "b": silo(x=X[:2], y=Y[:2], name="other", **scale)})
    assert (fed.names, fed.sizes.tolist(), fed.data.classes) == (("a", "b"), [4, 2], ("well", "ill"))


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"classes": ("ill", "well")}, "in classes, ('well', 'ill') and ('ill', 'well'): "),
        ({"classes": ()}, "in classes, ('well', 'ill') and (): "),
        ({"features": ("a", "b", "c")}, "in features, () and ('a', 'b', 'c'): "),
        ({"scale": torch.tensor(0.5)}, "in scale, None and 0.5: "),
        ({"shift": torch.ones(3)}, "in shift, None and [1.0, 1.0, 1.0]: "),
        ({"x": X[:, :2]}, "in x, 3 float32 and 2 float32: "),
        ({"x": X.double()}, "in x, 3 float32 and 3 float64: "),
        ({"y": Y.float().unsqueeze(1)}, "in y, int64 and 1 float32: "),
    ],
)
def test_silos_that_differ_are_named(other: dict[str, Any], sentence: str) -> None:
    message = refused(lambda: cs.Federation.from_silos({"a": silo(), "b": silo(), "c": silo(**other)}))
    assert message == f"silos 'a' and 'c' differ {sentence}bring all silos to the same before joining them"


def test_there_is_at_least_one_silo() -> None:
    assert "needs a Dataset for each silo, got none" in refused(lambda: cs.Federation.from_silos({}))


@pytest.mark.parametrize(
    "owner", [[1, 0, 1, 1], np.array([1, 0, 1, 1], np.int32), [1.0, 0, 1, 1], pd.Series([1, 0, 1, 1])]
)
def test_owners_may_be_any_whole_numbers(owner: Any) -> None:
    assert cs.Federation.from_owner(silo(), owner).sizes.tolist() == [1, 3]


@pytest.mark.parametrize("owner", [[0.5, 0, 1, 1], [float("nan"), 0, 1, 1], [[0], [0], [1], [1]]])
def test_owners_that_are_no_client_ids_get_a_sentence(owner: Any) -> None:
    sentence = "data: owners must be whole numbers [N], one for each example"
    assert sentence in refused(lambda: cs.Federation.from_owner(silo(), owner))


def test_names_may_come_as_an_array() -> None:
    fed = cs.Federation.from_owner(silo(classes=np.array(["well", "ill"])), Y, names=np.array(["Basel", "Chur"]))
    assert (repr(fed.names), repr(fed.data.classes)) == ("('Basel', 'Chur')", "('well', 'ill')")


def test_owners_that_are_names_get_a_sentence() -> None:
    names = ["Basel", "Chur", "Basel", "Chur"]
    assert "numpy.unique(…, return_inverse=True)" in refused(lambda: cs.Federation.from_owner(silo(), names))


def images(top=255, count=6):
    """Images of bytes, standardised, whose brightest pixel is `top`."""
    x = torch.randint(top + 1, (count, 3, 4, 4), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    x[0, 0, 0, 0] = top
    scale = torch.tensor([0.01, 0.02, 0.03]).view(3, 1, 1)
    return Dataset(x, torch.arange(count) % 2, scale=scale, shift=-scale, name="images")


@pytest.mark.parametrize(
    ("bounds", "low", "high"), [((), 0.0, 1.0), ((-1.0, 1.0), -1.0, 1.0), ((0.0, 255.0), 0.0, 255.0)]
)
@pytest.mark.parametrize("top", [255, 16])
def test_images_are_scaled_between_bounds(bounds, low, high, top):
    part = images(top)
    data = Data(part, part[1:], part[:3]).scaled(*bounds)
    for scaled in (data.train, data.test, data.calibration):
        inputs = scaled.inputs(torch.arange(len(scaled)))
        torch.testing.assert_close(inputs, low + (high - low) * scaled.x.float() / top)
    assert Data(part, part).scaled().calibration is None


def test_only_images_are_scaled():
    table = Dataset(torch.randn(4, 3), torch.arange(4) % 2, name="table")
    with pytest.raises(DataError, match="table: only images of bytes can be scaled"):
        Data(table, table).scaled()
    assert Data(table, table).signed().train is table
