"""Rows of different lengths: how they are stored, padded and refused."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import consilience as cs
from consilience.core.errors import DataError
from consilience.data.cohort import Cohort

ROWS = [[1, 2, 3], [4], [], [5, 6]]
Y = torch.tensor([0, 1, 1, 0])


def refused(make: Any) -> str:
    with pytest.raises(DataError) as caught:
        make()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def sentences(count: int = 40, **settings: Any) -> tuple[list[Tensor], cs.Ragged]:
    """Rows of 0 to 9 numbers, no two of which are equal."""
    sizes = torch.randint(0, 10, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = list(torch.arange(1, sum(sizes) + 1).split(sizes))
    return rows, cs.Ragged(rows, **settings)


def batches(federation: cs.Federation, ids: list[int], size: int = 4, **options: Any) -> list[Any]:
    found = Cohort(federation, torch.tensor(ids), round=1, round_size=len(ids), seed=0, **options)
    return list(found.epoch(0, size))


# Storage


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        [np.array(row, dtype=np.int64) for row in ROWS],
        [torch.tensor(row, dtype=torch.int64) for row in ROWS],
        (row for row in ROWS),
    ],
    ids=["lists", "arrays", "tensors", "generator"],
)
def test_rows_lie_one_after_another(rows: Any) -> None:
    found = cs.Ragged(rows)
    assert found.values.tolist() == [1, 2, 3, 4, 5, 6]
    assert found.values.dtype == torch.int64
    assert found.offsets.tolist() == [0, 3, 4, 4, 6]
    assert (len(found), found.width, found.shape, found.dim()) == (4, 3, (4, 3), 2)


def test_ready_values_and_offsets_are_the_same_rows() -> None:
    found = cs.Ragged.from_values(np.arange(1, 7), [0, 3, 4, 4, 6], padding=9)
    assert [found[i].tolist() for i in range(-4, 4)] == ROWS * 2
    assert found.padding == 9


def test_rows_by_index_are_ragged_again() -> None:
    rows, found = sentences(mask="m", padding=-1)
    for index in (slice(3, 9), torch.tensor([5, 0, 0, 39]), [7], torch.arange(40) % 3 == 0, slice(0)):
        part = found[index]
        expected = [rows[i] for i in torch.arange(40)[index].tolist()]
        assert [row.tolist() for row in (part[i] for i in range(len(part)))] == [row.tolist() for row in expected]
        assert (part.mask, part.padding) == ("m", -1)
    with pytest.raises(IndexError, match="there are 40 rows, and no row 40"):
        found[40]


def test_joined_rows_keep_their_order_and_settings() -> None:
    one, two = cs.Ragged(ROWS, mask="m"), cs.Ragged([[7, 8, 9, 10]], mask="m")
    both = cs.Ragged.cat([one, two])
    assert [both[i].tolist() for i in range(5)] == [*ROWS, [7, 8, 9, 10]]
    assert (both.mask, both.width) == ("m", 4)


def test_a_repr_names_the_form_and_the_longest_row() -> None:
    found = cs.Ragged([torch.zeros(2, 3), torch.zeros(5, 3)], mask="m", lengths="n", padding=-1)
    assert repr(found) == "Ragged(2 rows, L × 3 float32 with mask m and lengths n and padding -1, at most 5 long)"


# Padding


def test_rows_are_padded_to_the_longest_of_those_asked_for() -> None:
    padded, more = cs.Ragged(ROWS, mask="mask", lengths="n", padding=-7).padded(torch.tensor([3, 1, 2]))
    assert padded.tolist() == [[5, 6], [4, -7], [-7, -7]]
    assert more["mask"].tolist() == [[1, 1], [1, 0], [0, 0]]
    assert more["mask"].dtype == more["n"].dtype == torch.int64
    assert more["n"].tolist() == [2, 1, 0]


@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 1, 3)])
def test_padding_agrees_with_a_loop_over_rows(shape: tuple[int, ...]) -> None:
    rows, found = sentences(mask="mask", padding=-1)
    index = torch.randint(40, shape, generator=torch.Generator().manual_seed(1))
    expected = [rows[i] for i in index.flatten().tolist()]
    loop = torch.nn.utils.rnn.pad_sequence(expected, batch_first=True, padding_value=-1)
    padded, more = found.padded(index)
    assert torch.equal(padded, loop.view(*shape, -1))
    assert torch.equal(more["mask"], (padded != -1).long())


def test_a_fixed_width_adds_columns_or_cuts_rows() -> None:
    found = cs.Ragged(ROWS, lengths="n")
    padded, more = found.padded(torch.tensor([0, 1]), 2)
    assert (padded.tolist(), more["n"].tolist()) == ([[1, 2], [4, 0]], [2, 1])
    assert found.padded(torch.tensor([0, 1]), 4)[0].tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]]


def test_empty_rows_are_padding_only() -> None:
    found = cs.Ragged(ROWS, mask="mask", padding=3)[[2]]
    padded, more = found.padded(torch.tensor([0, 0]))
    assert (padded.tolist(), more["mask"].tolist()) == ([[3], [3]], [[0], [0]])


def test_rows_of_vectors_and_of_bool_are_padded_too() -> None:
    vectors = cs.Ragged([torch.ones(1, 2), torch.ones(3, 2)], padding=-1.5)
    assert vectors.padded(torch.tensor([0, 1]))[0][0].tolist() == [[1, 1], [-1.5, -1.5], [-1.5, -1.5]]
    assert cs.Ragged([[True], [True, True]]).padded(torch.tensor([0, 1]))[0].tolist() == [[True, False], [True, True]]


# In a data set


def test_in_a_dict_masks_and_lengths_are_further_keys() -> None:
    x = {"ids": cs.Ragged(ROWS, mask="attention_mask"), "age": torch.rand(4), "wav": cs.Ragged(ROWS, lengths="n")}
    found = cs.Dataset(x, Y).inputs(torch.tensor([3, 1]))
    assert list(found) == ["ids", "attention_mask", "age", "wav", "n"]
    assert found["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert found["n"].tolist() == [2, 1]


def test_in_a_tuple_masks_and_lengths_follow_by_position() -> None:
    both = cs.Dataset((cs.Ragged(ROWS, mask="m"), torch.rand(4), cs.Ragged(ROWS, mask="m", lengths="n")), Y)
    shapes = [tuple(leaf.shape) for leaf in both.inputs(torch.tensor([0, 1]))]
    assert shapes == [(2, 3), (2, 3), (2,), (2, 3), (2, 3), (2,)]
    alone = cs.Dataset(cs.Ragged(ROWS, lengths="n"), Y).inputs(torch.tensor([3, 1]))
    assert isinstance(alone, tuple)
    assert [leaf.tolist() for leaf in alone] == [[[5, 6], [4, 0]], [2, 1]]
    assert isinstance(cs.Dataset(cs.Ragged(ROWS), Y).inputs(torch.tensor([3, 1])), Tensor)


def test_entries_have_widths_of_their_own() -> None:
    long = [[1], [2, 3, 4, 5, 6], [7], [8]]
    data = cs.Dataset({"a": cs.Ragged(ROWS), "b": cs.Ragged(long)}, cs.Ragged(ROWS, padding=-100))
    rows = torch.tensor([0, 3])
    assert [leaf.shape[1] for leaf in data.inputs(rows).values()] == [3, 1]
    assert data.widths == {"x.a": 3, "x.b": 5, "y": 3}
    assert [leaf.shape[1] for leaf in data.inputs(rows[1:], width=data.widths).values()] == [3, 5]
    assert data.targets(rows[1:], width=data.widths).tolist() == [[5, 6, -100]]


def test_ragged_targets_are_padded_with_their_own_value() -> None:
    data = cs.Dataset(cs.Ragged(ROWS), cs.Ragged([np.array(row, np.int32) for row in ROWS], padding=-100))
    assert data.y.dtype == torch.int64
    assert data.targets(torch.tensor([[3], [1]])).tolist() == [[[5, 6]], [[4, -100]]]
    assert data.labels is None
    assert cs.partition.iid(data, 2).label_counts() is None


def test_one_example_has_its_own_length() -> None:
    x, y = cs.Dataset({"ids": cs.Ragged(ROWS, mask="m")}, Y)[3]
    assert (x["ids"].tolist(), x["m"].tolist(), int(y)) == ([5, 6], [1, 1], 0)


# In a cohort


def test_a_clients_batch_does_not_depend_on_its_neighbours() -> None:
    """Padding only adds columns filled with `padding`, with mask 0."""
    _, found = sentences(mask="mask", lengths="n", padding=-3)
    federation = cs.partition.iid(cs.Dataset({"ids": found}, torch.arange(40)), 4)
    together = batches(federation, [0, 1, 2, 3])
    for client in range(4):
        for (_, alone), (_, cohort) in zip(batches(federation, [client]), together, strict=True):
            width = alone.x["ids"].shape[-1]
            assert torch.equal(cohort.y[client], alone.y[0])
            assert torch.equal(cohort.x["n"][client], alone.x["n"][0])
            for key, padding in (("ids", -3), ("mask", 0)):
                mine, theirs = alone.x[key][0], cohort.x[key][client]
                assert torch.equal(theirs[:, :width], mine)
                assert bool((theirs[:, width:] == padding).all())
            assert alone.size == cohort.size == alone.x["ids"].shape[1]


def test_compiled_cohorts_have_one_width_with_the_same_contents() -> None:
    _, found = sentences(mask="mask")
    federation = cs.partition.iid(cs.Dataset({"ids": found}, cs.Ragged(found, padding=-100)), 4)
    plain, static = (batches(federation, [0, 1], static=static) for static in (False, True))
    assert {batch.x["ids"].shape for _, batch in static} == {(2, 4, found.width)}
    assert {batch.y.shape[-1] for _, batch in static} == {found.width}
    for (_, one), (_, two) in zip(plain, static, strict=True):
        width, rows = one.x["ids"].shape[-1], one.size
        assert torch.equal(one.x["ids"], two.x["ids"][:, :rows, :width])
        assert not two.x["mask"][:, :rows, width:].any()


# What is refused


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: cs.Ragged([]), "Ragged needs at least one row, got none"),
        (lambda: cs.Ragged([1, 2]), "every row must be a list, an array or a tensor of numbers"),
        (lambda: cs.Ragged([["a"], ["b", "c"]]), "Ragged: rows must be numbers"),
        (lambda: cs.Ragged([torch.zeros(2, 3), torch.zeros(1, 4)]), "rows may differ in length only"),
        (lambda: cs.Ragged(ROWS, padding=0.5), "padding must be a value of int64, as the rows are, got 0.5"),
        (lambda: cs.Ragged(ROWS, padding=float("inf")), "padding must be a value of int64"),
        (lambda: cs.Ragged([[0.5]], padding=float("nan")), "padding must be a value of float32"),
        (lambda: cs.Ragged(ROWS, mask=""), "mask is the name of a further input, such as 'mask', got ''"),
        (lambda: cs.Ragged(ROWS, mask="m", lengths="m"), "mask and lengths have the same name, 'm'"),
        (lambda: cs.Ragged.from_values([1, 2], [0, 3]), "offsets go from 0 to 3, but must go from 0 to the number of"),
        (lambda: cs.Ragged.from_values([1, 2], [1, 2]), "offsets go from 1 to 2, but"),
        (lambda: cs.Ragged.from_values([1, 2], [0, 2, 1, 2]), "offsets must not decrease"),
        (lambda: cs.Ragged.from_values([1, 2], [0.0, 2.0]), "offsets must be whole numbers [N + 1]"),
        (lambda: cs.Ragged.from_values([1, 2], []), "offsets must be whole numbers [N + 1]"),
        (lambda: cs.Dataset(cs.Ragged(ROWS), Y[:3]), "data: x has 4 rows but y has 3"),
        (lambda: cs.Dataset({"m": Y, "a": cs.Ragged(ROWS, mask="m")}, Y), "x.a names a further input 'm', which is"),
        (
            lambda: cs.Dataset({"a": cs.Ragged(ROWS, mask="m"), "b": cs.Ragged(ROWS, lengths="m")}, Y),
            "x.b names a further input 'm', which is a key already",
        ),
        (lambda: cs.Dataset({"a": cs.Ragged([[0.0], [float("nan")]])}, Y[:2]), "x.a holds values that are not finite"),
        (lambda: cs.Dataset(cs.Ragged(ROWS), Y, scale=2.0), "scale and shift are for x of one tensor"),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit_get_a_sentence(make: Any, sentence: str) -> None:
    assert sentence in refused(make)
