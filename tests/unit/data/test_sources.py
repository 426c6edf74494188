"""Dataset.of: torch data sets, loaders, tables and Hugging Face data sets become the same tensors."""

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import consilience as cs
from consilience.core.errors import DataError

X = torch.arange(8.0).view(4, 2)
Y = torch.tensor([0, 1, 1, 0])
TABLE = pd.DataFrame({"age": [40, 60, 50, 70], "dose": [1.5, 3, 2, 4], "ward": ["b", "a", "a", "b"], "ill": Y.numpy()})


class Pairs(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A map-style data set without tensors of its own."""

    def __init__(self, x: Any, y: Any, classes: Any = ()) -> None:
        self.x, self.y, self.classes = x, y, classes

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


class Hub:
    """Columns as Hugging Face's `datasets.Dataset` has them: lists, names, and features that may know classes."""

    def __init__(self, columns: dict[str, Any], **names: list[str]) -> None:
        self.columns_, self.column_names = columns, list(columns)
        self.features = {name: type("ClassLabel", (), {"names": names.get(name)}) for name in columns}

    def __getitem__(self, name: str) -> Any:
        return self.columns_[name]


class Endless(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    "source",
    [
        (X, Y),
        TensorDataset(X, Y),
        Pairs(X, Y),
        Pairs(X.numpy(), Y.tolist()),
        list(zip(X, Y, strict=True)),
        Subset(TensorDataset(X.repeat(2, 1), Y.repeat(2)), range(4)),
        DataLoader(TensorDataset(X, Y), batch_size=3, shuffle=True),
        cs.Dataset(X, Y),
        DataLoader(cs.Dataset(X, Y), batch_size=3),  # type: ignore[arg-type]
    ],
    ids=["pair", "TensorDataset", "map-style", "arrays", "list", "Subset", "DataLoader", "ours", "loader of ours"],
)
def test_examples_by_index_become_tensors_in_their_order(source: Any) -> None:
    data = cs.Dataset.of(source, name="d")
    assert torch.equal(data.x, X)
    assert torch.equal(data.y, Y)
    assert data.name == "d"


@pytest.mark.parametrize(
    "table",
    [TABLE, pa.Table.from_pandas(TABLE), Hub(TABLE.to_dict("list")), Hub({k: v.to_numpy() for k, v in TABLE.items()})],
    ids=["pandas", "arrow", "lists", "arrays"],
)
def test_columns_become_features_targets_and_groups(table: Any) -> None:
    data = cs.Dataset.of(table, target="ill", groups=["ward"])
    assert data.x.dtype == torch.float32
    assert data.x.tolist() == [[40, 1.5], [60, 3], [50, 2], [70, 4]]
    assert torch.equal(data.y, Y)
    assert cs.partition.by_group(data, "ward").names == ("a", "b")
    assert data.groups["ward"].tolist() == [1, 0, 0, 1]
    assert cs.Dataset.of(table, target="ill", inputs="dose").x.tolist() == [[1.5], [3], [2], [4]]


def test_names_are_numbered_and_real_targets_have_a_column() -> None:
    named = cs.Dataset.of(TABLE, target="ward", inputs=["age"])
    assert (named.y.tolist(), named.classes) == ([1, 0, 0, 1], ("a", "b"))
    assert cs.Dataset.of(TABLE, target="dose", inputs="age").y.shape == (4, 1)
    assert cs.Dataset.of((X, X[:, 0])).y.shape == (4, 1)
    assert cs.Dataset.of(TABLE, target="ill", inputs="dose", groups=["age"]).group_names["age"] == (
        "40",
        "50",
        "60",
        "70",
    )


def test_class_names_come_from_the_source() -> None:
    ours = cs.Dataset(X, Y, classes=("cat", "dog"))
    assert cs.Dataset.of(DataLoader(ours)) is ours  # type: ignore[arg-type]
    assert cs.Dataset.of(Pairs(X, Y, ["cat", "dog"])).classes == ("cat", "dog")
    table = Hub({"x": X.tolist(), "label": Y.tolist()}, label=["cat", "dog"])
    assert cs.Dataset.of(table, target="label").classes == ("cat", "dog")


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_images_become_inputs_from_zero_to_one(mode: str) -> None:
    images = [Image.fromarray(np.full((3, 5), value, np.uint8)).convert(mode) for value in (0, 255)]
    for source, options in (
        (Pairs(images, [0, 1]), {}),
        (Hub({"image": images, "label": [0, 1]}), {"target": "label"}),
    ):
        data = cs.Dataset.of(source, **options)
        assert (data.x.dtype, data.x.shape[1:]) == (torch.uint8, (len(mode), 3, 5))
        assert [float(x.max()) for x, _ in data] == [0, 1]


def test_lists_of_token_ids_stay_integers() -> None:
    assert cs.Dataset.of(Hub({"ids": [[1, 2], [3, 4]], "label": [0, 1]}), target="label").x.dtype == torch.int64


def test_examples_of_several_inputs_become_a_tuple_or_a_dict() -> None:
    pairs = cs.Dataset.of(Pairs([(x, y.float(), [1, 2]) for x, y in zip(X, Y, strict=True)], Y))
    assert [tuple(column.shape) for column in pairs.x] == [(4, 2), (4,), (4, 2)]
    assert torch.equal(pairs.x[0], X)
    named = cs.Dataset.of(Pairs([{"x": x, "ids": list(range(i + 1))} for i, x in enumerate(X)], Y))
    assert torch.equal(named.x["x"], X)
    assert [named.x["ids"][i].tolist() for i in range(4)] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert cs.Dataset.of(Pairs([(1.5, 2.0), (3.0, 4.0)], Y[:2])).x.tolist() == [[1.5, 2], [3, 4]]


def test_a_pair_may_hold_a_tree() -> None:
    ragged = cs.Ragged([[1], [2, 3], [], [4]], mask="m")
    data = cs.Dataset.of(({"ids": ragged, "x": X.numpy()}, Y))
    assert data.x["ids"] is ragged
    assert torch.equal(data.x["x"], X)


def test_rows_of_different_lengths_become_ragged() -> None:
    ids, mask = [[5, 6], [7], [], [8, 9, 10]], [[1, 1], [1], [], [1, 1, 1]]
    table = Hub({"input_ids": ids, "attention_mask": mask, "age": [1.0, 2, 3, 4], "label": Y.tolist()})
    both = cs.Dataset.of(table, target="label", inputs=["input_ids", "attention_mask"])
    found = both.inputs(torch.tensor([1, 3]))
    assert found["input_ids"].tolist() == [[7, 0, 0], [8, 9, 10]]
    assert found["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert isinstance(cs.Dataset.of(table, target="label", inputs="input_ids").x, cs.Ragged)
    mixed = cs.Dataset.of(table, target="label", inputs=["input_ids", "age"])
    assert mixed.x["age"].tolist() == [1, 2, 3, 4]
    vectors = cs.Dataset.of(Pairs([X, X[:1]], Y[:2])).x
    assert (vectors.sizes.tolist(), vectors.values.shape) == ([4, 1], (5, 2))


def test_ragged_targets_are_padded_with_the_label_that_torch_ignores() -> None:
    tags = [[0, 1], [1], [2, 0, 0]]
    table = Hub({"ids": [[5, 6], [7], [8, 9, 10]], "tags": tags})
    data = cs.Dataset.of(table, target="tags")
    assert data.targets(torch.tensor([1, 0])).tolist() == [[1, -100], [0, 1]]
    own = cs.Dataset.of((data.x, cs.Ragged(tags, padding=-1)))
    assert own.y.padding == -1


def test_images_beside_other_inputs_become_numbers() -> None:
    images = [Image.fromarray(np.full((3, 5), value, np.uint8)) for value in (0, 255)]
    data = cs.Dataset.of(Hub({"image": images, "age": [1.0, 2.0], "label": [0, 1]}), target="label")
    assert data.x["image"].amax((1, 2, 3)).tolist() == pytest.approx([0, 1])


def test_federations_and_partitions_take_the_same_sources() -> None:
    source = TensorDataset(X, Y)
    assert len(cs.partition.iid(source, 2)) == 2
    assert cs.partition.dirichlet(DataLoader(source), 2, alpha=1.0).examples == 4
    assert cs.Federation.from_owner(source, [0, 0, 1, 1]).sizes.tolist() == [2, 2]
    assert cs.Federation.from_silos({"a": source, "b": (X[:1], Y[:1])}).sizes.tolist() == [4, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cs.Dataset.of(TABLE), "say which column to predict: Dataset.of(table, target='ill'); it has age"),
        (lambda: cs.Dataset.of(TABLE, target="il"), "there is no column 'il'; did you mean 'ill'"),
        (lambda: cs.Dataset.of(TABLE, target="ill"), "column 'ward' holds values that are not numbers: use cs.Fed"),
        (lambda: cs.Dataset.of(TABLE[["ill"]], target="ill"), "no column of inputs beside 'ill'"),
        (lambda: cs.Dataset.of(TABLE.replace("b", None), target="ward", inputs="age"), "the target has missing values"),
        (lambda: cs.Dataset.of(type("Splits", (), {"column_names": {"train": ["x"]}})()), "such as data['train']"),
        (lambda: cs.Dataset.of((X, Y), target="ill"), "target, inputs and groups name columns, and a tuple has none"),
        (lambda: cs.Dataset.of(TensorDataset(X, Y, Y)), "a pair (x, y) is expected, got 3 parts"),
        (lambda: cs.Dataset.of(cs.Data(cs.Dataset(X, Y), cs.Dataset(X, Y))), "pass its .train or its .test"),
        (lambda: cs.Dataset.of(DataLoader(Endless())), "a Endless has no rows by index: pass a pair"),
        (lambda: cs.Dataset.of(Pairs([X, X[:, :1]], Y[:2])), "examples must have one shape, found (4, 1) and (4, 2)"),
        (lambda: cs.Dataset.of(Pairs([(X, Y), (X,)], Y[:2])), "all examples must have 2 inputs, as the first has"),
        (lambda: cs.Dataset.of(Pairs([{"a": X}, {"b": X}], Y[:2])), "all examples must have the keys of the first, a"),
        (lambda: cs.Dataset.of(Pairs([[1], None], Y[:2])), "some cells of a column are lists and others are not"),
        (lambda: cs.Dataset.of([{"x": 1}] * 3), "every example of a list must be a pair (x, y), found dict"),
        (lambda: cs.Dataset.of(TABLE.rename(columns={"ill": 3}), target="il"), "no column 'il'; allowed: 3, age"),
        (lambda: cs.Dataset.of(Pairs([Image.new("I;16", (2, 2))], [0])), "more than eight bits a pixel"),
    ],
)  # fmt: skip
def test_sources_that_cannot_be_read_name_the_way_out(make: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        make()
    assert message in str(caught.value)
