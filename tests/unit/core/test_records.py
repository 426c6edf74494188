import contextlib
import dataclasses
import json
import pickle
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from consilience.core import records
from consilience.core.errors import RecordError
from consilience.core.gaussian import Gaussian
from consilience.core.records import Addressed, Point, Tree, Weighted, pack, record, static, unpack
from consilience.data.batch import Batch
from support.fuzzing import everything, mutated
from support.fuzzing import nested as nested_lists

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@record
class Nested:
    """A record of everything that a record may hold."""

    model: Gaussian
    parts: Tree
    nothing: Tree
    count: torch.Tensor
    sizes: tuple[int, ...] = static((3, 4))
    kind: str = static("plain")


def tensor(shape, dtype, seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 100
    return values > 0 if dtype == torch.bool else values.abs().to(dtype)


def nested():
    parts = (Point(torch.arange(3.0)), None, (torch.zeros(2, 0), torch.ones((), dtype=torch.int64)), ())
    return Nested(Gaussian(torch.randn(4), torch.ones(1)), parts, None, torch.tensor([True, False]))


def same(a, b):
    """Same types in the same places, same names, same bits."""
    assert records.blueprint(a) == records.blueprint(b)
    for (name, x), (other, y) in zip(records.leaves(a), records.leaves(b), strict=True):
        assert name == other
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert torch.equal(x, y)


shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
tensors = st.builds(tensor, shapes, st.sampled_from(DTYPES), st.integers(0, 100))
trees = st.recursive(
    st.one_of(st.none(), tensors),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(["a", "b", "ids", "mask"]), inner, max_size=3),
        st.builds(Point, inner),
        st.builds(Addressed, inner, inner),
    ),
    max_leaves=8,
)


@settings(max_examples=20, deadline=None)
@given(trees)
def test_unpack_undoes_pack(tree):
    same(unpack(pack(tree)), tree)
    same(unpack(pack(tree), like=tree), tree)


def test_what_is_unpacked_can_be_changed_in_place_without_harm():
    data = pack(Point(torch.zeros(3)))
    unpack(data).theta.add_(1)
    assert torch.equal(unpack(data).theta, torch.zeros(3))


def test_leaves_that_share_memory_are_expanded_or_want_gradients_survive():
    x = torch.arange(6.0)
    value = (x, x, x[1:4], x.view(2, 3).mT, x[:1].expand(3, 4), torch.ones(2, requires_grad=True))
    back = unpack(pack(value))
    same(back, value)
    assert not back[-1].requires_grad


def test_notes_travel_in_the_header():
    data = pack(Point(torch.ones(1)), round="7")
    assert records.notes(data)["round"] == "7"


def test_pack_refuses_what_is_no_record_by_its_type():
    with pytest.raises(RecordError, match="a int cannot be part of a record"):
        pack(Point({"a": 1}))
    with pytest.raises(RecordError, match="a float cannot be part of a record"):
        pack((torch.ones(1), 0.5))


def test_dicts_are_trees_in_the_order_of_their_keys():
    tree = {"b": torch.ones(2, 3), "a": (torch.zeros(2), None)}
    assert [name for name, _ in records.leaves(tree)] == ["b", "a.0"]
    doubled = records.add(tree, tree)
    assert (list(doubled), doubled["b"].sum().item()) == (["b", "a"], 12)
    assert records.rows(tree, 0)["b"].shape == (3,)
    stacked = records.stack([tree, dict(reversed(tree.items()))])
    assert stacked["a"][0].shape == (2, 2)
    records.check(dict(reversed(tree.items())), tree)
    with pytest.raises(RecordError, match="dicts differ in their keys: b, a"):
        records.add(tree, {"b": tree["b"]})
    with pytest.raises(RecordError, match="the keys of a dict must be text, got 1"):
        pack({1: torch.ones(1)})
    with pytest.raises(RecordError, match=r"expected dict\(b, a=tuple\(0, 1=None\)\), got dict\(b\)"):
        records.check({"b": tree["b"]}, tree)


def test_records_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Point(torch.ones(1)).theta = torch.zeros(1)


def defined_in(module, **fields):
    """A record type called Mine, as a file would define it."""
    return record(type("Mine", (), {"__module__": module, "__annotations__": fields}))


def test_types_of_one_name_in_two_modules_do_not_collide():
    one, other = defined_in("first", a=torch.Tensor), defined_in("second", b=torch.Tensor)
    for kind in (one, other):
        assert type(unpack(pack(kind(torch.ones(2))))) is kind
    with pytest.raises(RecordError, match=r"expected Mine\(b\), got Mine\(a\)"):
        unpack(pack(one(torch.ones(2))), like=other(torch.ones(2)))


def test_two_user_files_of_one_name_may_not_define_the_same_type():
    defined_in("consilience_user_01234567_own", a=torch.Tensor)
    defined_in("consilience_user_01234567_own", a=torch.Tensor)  # the same file again, as in a notebook
    with pytest.raises(RecordError, match=r"two files define the record type own\.Mine: rename one of the files"):
        defined_in("consilience_user_89abcdef_own", a=torch.Tensor)


def test_static_fields_survive_and_are_not_leaves():
    value = dataclasses.replace(nested(), sizes=(7, (8, 9)), kind="other")
    for back in (
        unpack(pack(value), like=value),
        records.tree_map(lambda leaf: leaf, value),
        torch.utils._pytree.tree_unflatten(*torch.utils._pytree.tree_flatten(value)),
        records.assemble(records.blueprint(value), dict(records.leaves(value))),
    ):
        same(back, value)
        assert (back.sizes, back.kind) == ((7, (8, 9)), "other")


def test_records_that_differ_in_a_static_field_are_neither_added_nor_taken_for_each_other():
    value = nested()
    other = dataclasses.replace(value, kind="other")
    with pytest.raises(RecordError, match="records of type Nested differ in a static field"):
        records.add(value, other)
    with pytest.raises(RecordError, match=r"expected .*kind='plain'\), got .*kind='other'\)"):
        unpack(pack(other), like=value)


def header(tree, edit):
    """The bytes of a record whose header was edited."""
    data = pack(tree)
    arrays = {name: leaf.clone() for name, leaf in records.leaves(tree)}
    return save(arrays, metadata={"record": json.dumps(edit(json.loads(records.notes(data)["record"])))})


def gaussian():
    return Gaussian(torch.ones(2), torch.ones(2))


def saved(like, **arrays):
    """Arrays under the header of another record."""
    return save(arrays, metadata={"record": records.notes(pack(like))["record"]})


POINT = Point(torch.ones(2))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(POINT, lambda s: s | {"type": "consilience.core.records.Piont"}), r"Piont'; did you mean '.*\.Point'"),
        (header(POINT, lambda s: s | {"fields": {"thetas": "tensor"}}), "fields thetas where theta were expected"),
        (saved(gaussian(), eta=torch.ones(2)), "lam"),
        (saved(POINT, theta=torch.ones(2), stowaway=torch.ones(1)), "stowaway"),
        (save({"theta": torch.ones(2)}), "not written by consilience"),
        *[
            (len(text).to_bytes(8, "little") + text, "no record")
            for text in (b'{"__metadata__":null}', b'{"__metadata__":5}', b"[]", b"[" * 100_000)
        ],
    ],
    ids=["type", "fields", "array missing", "array too many", "not ours", "null", "5", "list", "deep"],
)
def test_bytes_that_are_no_record_are_refused_by_what_is_wrong(data, message):
    with pytest.raises(RecordError, match=message):
        unpack(data)


@pytest.mark.parametrize("structure", ["5", '"tensors"', "[[", "{}", '{"type": ["Point"], "fields": {}}', "[1, 2]"])
def test_a_header_that_describes_no_record_is_refused(structure):
    with pytest.raises(RecordError):
        unpack(save({"theta": torch.ones(1)}, metadata={"record": structure}))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Gaussian(torch.ones(3), torch.ones(2)), r"eta has shape \(3,\) where \(2,\) was expected"),
        (Gaussian(torch.ones(2), torch.ones(2).double()), "lam is torch.float64 where torch.float32 was expected"),
        (Point(torch.ones(2)), r"expected Gaussian\(eta, lam\), got Point\(theta\)"),
        ((gaussian(),), r"expected Gaussian\(eta, lam\), got tuple"),
        (Gaussian(torch.ones(2), None), r"expected Gaussian\(eta, lam\), got Gaussian\(eta, lam=None\)"),
        (None, r"expected Gaussian\(eta, lam\), got None"),
    ],
    ids=["shape", "dtype", "type", "tuple", "none inside", "none"],
)
def test_a_record_that_was_not_asked_for_is_refused_by_what_is_wrong(value, message):
    with pytest.raises(RecordError, match=message):
        unpack(pack(value), like=gaussian())


def test_a_difference_deep_inside_is_named():
    weight = torch.ones(1)
    here, there = Weighted(Addressed(weight, None), weight), Weighted(Moved(weight, None), weight)
    message = r"expected Weighted\(total=Moved\(shared, own=None\), weight\), got Weighted\(total=Addressed"
    with pytest.raises(RecordError, match=message):
        records.check(here, there)


@record
class Moved:
    """Fields like those of `Addressed`."""

    shared: Tree
    own: Tree


def test_every_cut_is_noticed():
    data = pack(nested())
    for end in range(0, len(data), 7):
        with pytest.raises(RecordError):
            unpack(data[:end])


@settings(max_examples=20, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data):
    with pytest.raises(RecordError, match="no record"):
        unpack(data)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_a_flipped_byte_gives_a_record_of_the_same_form_or_a_record_error(data):
    value = nested()
    packed = bytearray(pack(value))
    place = data.draw(st.integers(0, len(packed) - 1))
    packed[place] ^= data.draw(st.integers(1, 255))
    try:
        back = unpack(bytes(packed), like=value)
    except RecordError:
        return
    records.check(back, value)


class Trap:
    """Pickled code that shows whether it was run."""

    sprung = False

    def __reduce__(self):
        return (setattr, (Trap, "sprung", True))


def test_a_pickle_is_refused_and_not_run():
    with pytest.raises(RecordError, match="no record"):
        unpack(pickle.dumps(Trap()))
    assert not Trap.sprung


def test_tree_map_reaches_every_tensor_and_nothing_else():
    value = nested()
    doubled = records.tree_map(lambda leaf: leaf + leaf, value)
    assert isinstance(doubled.model, Gaussian)
    assert doubled.nothing is None
    for (_, x), (_, y) in zip(records.leaves(value), records.leaves(doubled), strict=True):
        assert torch.equal(y, x + x)


def test_records_are_pytrees():
    value = nested()
    flat, spec = torch.utils._pytree.tree_flatten(value)
    assert [id(x) for x in flat if x is not None] == [id(leaf) for _, leaf in records.leaves(value)]
    same(torch.utils._pytree.tree_unflatten(flat, spec), value)


def test_records_add_leaf_by_leaf():
    total = records.add(gaussian(), Gaussian(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])))
    assert total.eta.tolist() == [2, 3]
    assert total.lam.tolist() == [4, 5]


def test_stack_and_rows_are_inverse():
    clients = [Addressed(torch.randn(3), (torch.randn(()), None)) for _ in range(4)]
    together = records.stack(clients)
    assert together.shared.shape == (4, 3)
    for i, client in enumerate(clients):
        same(records.rows(together, i), client)
    same(records.rows(together, torch.tensor([2, 0])), records.stack([clients[2], clients[0]]))


def test_leaves_are_named_by_their_path():
    names = [name for name, _ in records.leaves(nested())]
    assert names == ["model.eta", "model.lam", "parts.0.theta", "parts.2.0", "parts.2.1", "count"]


def test_a_weighted_sum_knows_its_mean():
    weight = torch.tensor([[1.0], [2.0], [5.0]])
    value = Addressed(torch.randn(3, 4), (torch.randn(3, 4, 4), torch.randn(3)))
    summed = records.tree_map(lambda leaf: leaf.sum(0), Weighted.of(value, weight))
    for (_, mean), (_, leaf) in zip(records.leaves(summed.mean), records.leaves(value), strict=True):
        expected = sum(w * row for w, row in zip([1 / 8, 2 / 8, 5 / 8], leaf, strict=True))
        assert mean.shape == expected.shape
        torch.testing.assert_close(mean, expected)


def test_the_mean_of_unsummed_updates_is_each_client_s_own():
    value = (torch.randn(3, 4), torch.randn(3, 4, 4), torch.randn(3))
    means = Weighted.of(value, torch.tensor([[1.0], [2.0], [5.0]])).mean
    for mean, leaf in zip(means, value, strict=True):
        torch.testing.assert_close(mean, leaf)


def test_nbytes_counts_every_leaf_in_its_own_type():
    batch = Batch(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.bfloat16), None)
    assert records.nbytes((batch, None, torch.zeros((), dtype=torch.bool))) == 6 * 4 + 6 * 8 + 2 * 2 + 1
    assert records.nbytes(None) == 0


@pytest.mark.parametrize("levels", [65, 492, 5000, 100_000])
def test_a_record_that_is_nested_too_deeply_is_refused(levels):
    with pytest.raises(RecordError, match=r"nested more than 64 levels deep|damaged record"):
        unpack(nested_lists(levels))
    assert unpack(nested_lists(64)) is not None


def test_pack_refuses_what_unpack_would_refuse():
    deep = ()
    for _ in range(64):
        deep = (deep,)
    with pytest.raises(RecordError, match="nested more than 64 levels deep"):
        pack(deep)


def test_static_fields_of_another_type_differ():
    with pytest.raises(RecordError, match=r"expected Everything\(.*rate=1.0\), got Everything\(.*rate=True\)"):
        unpack(pack(dataclasses.replace(everything(), rate=True)), like=everything())


def test_a_header_with_a_key_twice_is_refused():
    text = json.dumps(json.dumps({"a": "tensor"})[:-1] + ', "a": null}')
    header = f'{{"__metadata__": {{"record": {text}}}}}'.encode()
    with pytest.raises(RecordError, match="the record's header has a key twice"):
        unpack(len(header).to_bytes(8, "little") + header)


@pytest.mark.slow
def test_no_damaged_record_raises_another_error_or_has_another_structure():
    draw, wanted = random.Random(0), everything()
    for _ in range(1500):
        data = mutated(pack(wanted), draw)
        assert isinstance(records.notes(data), dict)
        with contextlib.suppress(RecordError):
            unpack(data)
        with contextlib.suppress(RecordError):
            assert json.dumps(records.blueprint(unpack(data, like=wanted))) == json.dumps(records.blueprint(wanted))
