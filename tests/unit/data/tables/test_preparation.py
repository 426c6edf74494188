"""The preparation: equal to scikit-learn's on pooled rows, the same for any division of rows, exact in JSON."""

import json
from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from consilience.core.errors import DataError
from consilience.data.prepared import check_agreed
from consilience.data.tables import Preparation, Roles, Table, agree, summarise
from consilience.data.tables.preparation import Categorical, Numeric, Target
from consilience.data.tables.statistics import exact_squares, exact_sum, fraction


def table(columns: dict[str, list[Any]], name: str = "a") -> Table:
    cells = {key: [None if cell is None else str(cell) for cell in column] for key, column in columns.items()}
    return Table(name, cells, range(2, 2 + len(next(iter(cells.values())))))


def preparation_of(parts: list[Table], **roles: Any) -> Preparation:
    declared = Roles.of("y", **roles)
    return agree({f"site {k}": summarise(part, declared) for k, part in enumerate(parts)}).preparation


def test_it_equals_scikit_learn_on_pooled_rows() -> None:
    draw = np.random.default_rng(0)
    x = {"far": 1e6 + draw.choice([-1.0, 1.0], 300), "wide": draw.lognormal(3, 2, 300), "small": draw.normal(size=300)}
    sex = draw.choice(["m", "f", "x"], 300)
    pooled = table({**{name: column.tolist() for name, column in x.items()}, "sex": sex.tolist(), "y": [0, 1] * 150})
    parts = [pooled.take(range(start, 300, 3)) for start in range(3)]
    found = preparation_of(parts).transform(pooled, dtype=torch.float64)
    numbers = StandardScaler().fit_transform(np.stack(list(x.values()), 1))
    codes = OneHotEncoder(sparse_output=False).fit_transform(sex[:, None])
    assert np.abs(found.numpy() - np.concatenate([numbers, codes], 1)).max() < 1e-12


CELLS = {
    "x": st.one_of(st.none(), st.floats(-1e6, 1e6).map(repr), st.integers(-5, 5).map(str)),
    "offset": st.sampled_from(["1000000", "1000001", "999999.5"]),
    "sex": st.sampled_from(["m", "f", "none", None]),
    "job": st.sampled_from([f"job {i}" for i in range(8)]),
    "y": st.sampled_from(["0", "1", "2"]),
}
ROWS = st.lists(st.tuples(*CELLS.values(), st.integers(0, 4)), min_size=12, max_size=40)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(ROWS)
def test_any_division_of_rows_among_sites_gives_the_same_preparation(rows: list[tuple[Any, ...]]) -> None:
    pooled = table({name: [row[i] for row in rows] for i, name in enumerate(CELLS)})
    owners = [row[-1] for row in rows]
    parts = [pooled.take([i for i, owner in enumerate(owners) if owner == k]) for k in sorted(set(owners))]

    def made(tables: list[Table]) -> Any:
        try:
            return preparation_of(tables, minimum=3)
        except DataError as error:  # no column is left
            return str(error)

    assert made(parts) == made([pooled])


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=30))
def test_sums_are_exact(values: list[float]) -> None:
    x = np.array([value if abs(value) > 1e-100 else 0.0 for value in values])
    total, squares = sum(map(Fraction, x.tolist())), sum(Fraction(value) ** 2 for value in x.tolist())
    for found, wanted in ((exact_sum(x.tolist()), total), (exact_squares(x), squares)):
        assert abs(fraction(found) - wanted) <= abs(wanted) * Fraction(1, 2**120) + Fraction(1, 10**150)


def test_missing_numbers_are_the_mean_and_unknown_categories_are_other() -> None:
    made = Preparation(
        (Numeric("x", 10.0, 2.0, missing=True), Categorical("c", ("a", "b"), other=True, missing=True)),
        Target(("y",), ("0", "1")),
    )
    found = made.transform(table({"x": [12, None], "c": ["b", "new"]}))
    assert found.tolist() == [[1, 0, 0, 1, 0, 0], [0, 1, 0, 0, 1, 0]]
    assert found.dtype == torch.float32
    assert made.transform(table({"c": [None]})).tolist() == [[0, 1, 0, 0, 0, 1]]


def test_without_columns_for_them_gaps_and_unknown_categories_are_zeros() -> None:
    made = Preparation((Numeric("x", 10.0, 2.0), Categorical("c", ("a", "b"))), Target(("y",)))
    assert made.transform(table({"x": [None], "c": ["new"]})).tolist() == [[0, 0, 0]]


def test_a_category_called_other_is_the_one_of_all_others() -> None:
    rows = table({"c": ["other"] * 3 + ["a"] * 5, "y": [0, 1] * 4})
    made = preparation_of([rows])
    assert made.feature_names == ("c=a", "c=other")
    assert made.transform(rows).sum(0).tolist() == [5, 3]


@pytest.mark.parametrize(
    ("target", "columns", "y"),
    [
        (Target(("y",), ("ill", "well")), {"y": ["well", "ill"]}, [1, 0]),
        (Target(("y",), ("0", "1")), {"y": ["1.0", "0"]}, [1, 0]),
        (Target(("y",), ("well", "ill")), {"y": ["1", "0"]}, [1, 0]),
        (Target(("y",)), {"y": ["1.5", "2"]}, [[1.5], [2]]),
        (Target(("t", "e")), {"t": ["3.5", "2"], "e": ["1", "False"]}, [[3.5, 1], [2, 0]]),
    ],
)
def test_targets_are_classes_numbers_or_times_and_events(target: Target, columns: Any, y: Any) -> None:
    assert target.read(table(columns)).tolist() == y


def test_json_is_exact() -> None:
    rows = {"x": [0.1, 1 / 3, None, 1e-7], "c": ["a", "é", "a", "é"], "y": ["0", "1", "1", "0"]}
    made = preparation_of([table(rows)], minimum=1)
    assert Preparation.from_json(json.dumps(made.to_json())) == made


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as a preparation"),
        ("[1]", "this is no preparation of tables"),
        ('{"columns": [], "target": {"columns": ["y"]}}', "no column is left to predict from"),
        (
            '{"columns": [{"kind": "numeric", "name": "x", "mean": 0, "sd": -1}], "target": {"columns": ["y"]}}',
            "columns.0.numeric.sd: Input should be greater than or equal to 0",
        ),
    ],
)
def test_a_file_that_is_no_preparation_is_named(tmp_path, text: str, message: str) -> None:
    (tmp_path / "preparation.json").write_text(text)
    with pytest.raises(DataError) as caught:
        Preparation.read(tmp_path / "preparation.json")
    assert message in str(caught.value)
    assert "preparation.json" in str(caught.value)


def test_a_table_is_told_in_what_it_differs() -> None:
    made = preparation_of([table({"age": [1, 2], "dose": [3, 4], "id": [1, 2], "y": [0, 1]})])
    assert made.differences(table({"age": [1], "dose": [2], "y": [0], "id": [1]})) == []
    assert made.differences(table({"ages": [1], "dose": [1]}, "new")) == [
        "new has no column 'age', which counts as missing",
        "column 'ages' of new is not used: no site had it",
    ]
    assert made.differences(table({"dose": [1], "a": [1], "b": [1]}, "new"))[1:] == [
        "columns 'a' and 'b' of new are not used: no site had them"
    ]


def test_unknown_categories_of_new_rows_are_named_where_they_count_as_none() -> None:
    made = preparation_of([table({"sex": ["m", "f", "m"], "job": ["a", "a", "b"], "y": [0, 1, 0]})], minimum=1)
    told = made.differences(table({"sex": ["m", None, "M"], "job": ["a", "a", "a"]}, "new"))
    assert told == ["column 'sex' of new holds categories that no site had, such as 'M': they count as none"]
    rare = preparation_of([table({"sex": ["m", "m", "f"], "y": [0, 1, 0]})], minimum=2)
    assert rare.differences(table({"sex": ["x"]}, "new")) == []


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"Age": [1], "dose": [1]}, "new has a column 'Age', and the model knows 'age': rename it"),
        ({"weight": [1]}, "new has none of the model's columns; it needs columns 'age' and 'dose'"),
    ],
)
def test_new_rows_without_the_models_columns_are_refused(columns, message: str) -> None:
    made = preparation_of([table({"age": [1, 2], "dose": [3, 4], "y": [0, 1]})])
    with pytest.raises(DataError) as caught:
        made.differences(table(columns, "new"))
    assert str(caught.value) == message


def test_declarations_beside_a_preparation_are_refused() -> None:
    made = preparation_of([table({"age": [1, 2], "y": [0, 1]})])
    check_agreed(made, Roles.of("y"))
    with pytest.raises(DataError, match="says how columns are read: leave out ignore and minimum"):
        check_agreed(made, Roles.of("y", ignore="id", minimum=3))
    with pytest.raises(DataError, match="is for the target 'y', and the target here is 'target'"):
        check_agreed(made, Roles.of("target"))
