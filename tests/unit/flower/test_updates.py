"""Updates are accepted only with the right form, finite numbers and a weight that the client can have."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import consilience as cs
from consilience.algorithms.fedbe import Update as Models
from consilience.algorithms.shared.one_shot import Update as OneShot
from consilience.core.errors import RecordError
from consilience.core.records import Point, Weighted, leaves, pack, record
from consilience.engines.template import EXAMPLES
from consilience.flower.updates import check_update, magnitude

P = 3
CLIENT = 3


@record
class Mixed:
    """An update with a weighted part and a part without a weight."""

    change: Weighted
    factor: cs.Gaussian


@record
class Owned:
    """An update that names its client."""

    theta: torch.Tensor
    client: torch.Tensor


def weighted(weight, value=2.0, size=P, dtype=torch.float64):
    return Weighted(Point(torch.full((size,), value * weight, dtype=dtype)), torch.tensor([weight], dtype=dtype))


TEMPLATE = weighted(float(EXAMPLES))  # of methods whose weights are numbers of examples


def checked(update, template=TEMPLATE, examples=5):
    return check_update(
        update if isinstance(update, bytes) else pack(update), template, client=CLIENT, examples=examples
    )


def test_a_sound_update_is_accepted_unchanged():
    update, claimed = checked(weighted(5.0))
    assert claimed is None
    assert update.weight.tolist() == [5.0]
    assert update.total.theta.tolist() == [10.0] * P


REJECTED = [
    (Point(torch.zeros(P, dtype=torch.float64)), r"expected Weighted\(.*got Point"),
    (None, "got None"),
    ((weighted(1.0),), "expected Weighted"),
    (Weighted(None, torch.ones(1, dtype=torch.float64)), "total=None"),
    (weighted(1.0, size=P + 1), r"total.theta has shape \(4,\) where \(3,\) was expected"),
    (weighted(1.0, size=0), "total.theta has shape"),
    (weighted(1.0, dtype=torch.float32), "total.theta is torch.float32"),
    (weighted(1.0, math.nan), "update's total.theta is not finite"),
    (weighted(1.0, math.inf), "update's total.theta is not finite"),
    (weighted(math.nan), "is not finite"),
    (Weighted(TEMPLATE.total, torch.zeros(1, dtype=torch.float64)), "the weight 0, which is not positive"),
    (Weighted(TEMPLATE.total, -TEMPLATE.weight), "the weight -2, which is not positive"),
    (Weighted(TEMPLATE.total, torch.tensor([1e-310], dtype=torch.float64)), "over its weight 1e-310 is not finite"),
    *[(data, "record") for data in (b"", b"\x00" * 8, b"no record", b"\xff" * 100)],
]


@pytest.mark.parametrize(("update", "message"), REJECTED, ids=range(len(REJECTED)))
def test_an_update_of_another_kind_is_rejected(update, message):
    with pytest.raises(RecordError, match=message):
        checked(update)


PACKED = pack(TEMPLATE)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(at=st.integers(0, len(PACKED) - 1), bit=st.integers(0, 7), cut=st.none() | st.integers(0, len(PACKED)))
def test_a_damaged_update_is_rejected_or_still_sound(at, bit, cut):
    data = bytearray(PACKED)
    data[at] ^= 1 << bit
    try:
        update, _ = checked(bytes(data[:cut]))
    except RecordError:
        return
    assert [leaf.shape for _, leaf in leaves(update)] == [leaf.shape for _, leaf in leaves(TEMPLATE)]
    assert all(bool(leaf.isfinite().all()) for _, leaf in leaves(update))
    assert 0 < float(update.weight) <= 5 * (1 + 1e-6)


@pytest.mark.parametrize(("template", "most"), [(TEMPLATE, 40.0), (weighted(1.0), 1.0)], ids=["examples", "uniform"])
def test_a_weight_above_the_largest_is_reduced_and_the_mean_stays(template, most):
    for weight in (1.01 * most, 1e9):
        update, claimed = checked(weighted(weight), template, 40)
        assert update.weight.tolist() == pytest.approx([most])
        assert update.mean.theta.tolist() == pytest.approx([2.0] * P)
        assert claimed == pytest.approx(weight)
    rounded = weighted(most * (1 + 2e-7), dtype=torch.float32)
    _, claimed = checked(rounded, weighted(float(template.weight), dtype=torch.float32), 40)
    assert claimed is None, "a rounding error is no claim"


def test_only_the_weighted_part_of_an_update_is_reduced():
    factor = cs.Gaussian(torch.ones(2).double(), 5 * torch.ones(2).double())
    found, claimed = checked(Mixed(weighted(80.0), factor), Mixed(TEMPLATE, factor), 40)
    assert found.change.weight.tolist() == [40.0]
    assert found.change.total.theta.tolist() == [80.0] * P
    assert found.factor.lam.tolist() == [5.0, 5.0]
    assert claimed == 80


def test_updates_without_weights_are_not_reduced():
    delta = cs.Gaussian(torch.full((P,), 1e6), torch.full((P,), 1e6))
    update, claimed = checked(delta, delta, 1)
    assert torch.equal(update.eta, delta.eta)
    assert claimed is None


@pytest.mark.parametrize("inside", [False, True], ids=["whole", "part"])
def test_an_update_cannot_name_another_client(inside):
    def owned(client):
        update = Owned(torch.zeros(1, P), torch.tensor([client]))
        return (update, TEMPLATE) if inside else update

    update, _ = checked(owned(CLIENT), owned(0))
    assert (update[0] if inside else update).client.tolist() == [CLIENT]
    for other in (0, CLIENT - 1, 10**6, -1):
        with pytest.raises(RecordError, match="client is another client's"):
            checked(owned(other), owned(0))


@pytest.mark.parametrize(
    "template",
    [
        OneShot(torch.zeros(1, P), torch.tensor([[2.0, 0.0]]), torch.tensor([0])),
        Models(torch.zeros(1, P), torch.tensor([[2.0]])),
    ],
    ids=["by class", "in all"],
)
def test_numbers_of_examples_are_reduced_as_weights_are(template):
    def claiming(*counts):
        name = "labels" if hasattr(template, "labels") else "n"
        own = {"client": torch.tensor([CLIENT])} if name == "labels" else {}
        return replace(template, **{name: torch.tensor([counts[: getattr(template, name).shape[1]]])}, **own)

    assert checked(claiming(5.0, 0.0), template)[1] is None
    found, claimed = checked(claiming(1e6, 0.0), template)
    assert claimed == 1e6
    assert float((found.labels if hasattr(found, "labels") else found.n).sum()) == 5
    for wrong in ((-1.0, 6.0), (0.0, 0.0)):
        with pytest.raises(RecordError, match="are not numbers of examples"):
            checked(claiming(*wrong), template)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_magnitude_of_numbers_is_relative_to_the_largest(dtype):
    largest = torch.finfo(dtype).max

    def of(value):
        return magnitude((Point(torch.tensor([0.5, -value], dtype=dtype)), torch.tensor([2**60]), torch.zeros(0), None))

    assert [of(value) for value in (0.0, 1.0, largest**0.5, largest)] == pytest.approx([0, 0, 0.5, 1])
    assert of(math.inf) == math.inf
    assert math.isnan(of(math.nan))
