"""The registry of an experiment: order, limits, starts."""

import itertools
from string import ascii_lowercase
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from consilience.core.errors import CheckpointError
from consilience.flower import registry
from consilience.flower.messages import Dtype
from consilience.flower.registry import Registry, by_form, form_of
from support.flower_grid import site_info


def test_clients_are_in_the_order_of_their_names():
    sites = [site_info(name, n) for name, n in (("Zug", 3), ("Basel", 7), ("bern", 4))]
    for order in itertools.permutations(sites):
        federation = Registry.of(order).federation("f")
        assert federation.names == ("Basel", "Zug", "bern")
        assert federation.sizes.tolist() == [7, 3, 4]
        assert federation.examples == 14
        assert federation.data.x.shape == (1, 3)


def test_the_server_knows_neither_labels_nor_order_and_needs_no_memory_for_examples():
    federation = Registry.of([site_info(name, 10**12, y=("int64", [])) for name in ("a", "b")]).federation("f")
    assert federation.examples == 2 * 10**12
    assert federation.label_counts() is None
    assert len(federation.order) == 1


@pytest.mark.parametrize("dtype", get_args(Dtype))
def test_every_dtype_that_a_site_may_name_is_one_of_torch(dtype):
    data = Registry.of([site_info(x=(dtype, [2, 3]), y=(dtype, []))]).federation("f").data
    assert data.x.dtype == getattr(torch, dtype)
    assert data.y.dtype == (data.x.dtype if data.x.is_floating_point() else torch.int64)
    assert (data.x.shape, data.y.shape) == ((1, 2, 3), (1,))


TREE = {"ids": {"values": ("int64", []), "mask": "mask", "lengths": None, "padding": 3}, "age": ("float32", [1])}


@pytest.mark.parametrize("x", [TREE, list(TREE.values()), TREE["ids"]], ids=["dict", "tuple", "ragged"])
def test_the_server_has_an_example_of_every_input(x, tmp_path):
    Registry.of([site_info(x=x)]).started(tmp_path)
    found = Registry.read(tmp_path).federation("f").data.inputs(torch.tensor([0, 0]))
    leaves = list(found.values() if isinstance(found, dict) else found)
    assert [tuple(leaf.shape) for leaf in leaves] == [(2, 16), (2, 16), (2, 1)][: len(leaves)]
    assert not isinstance(found, dict) or list(found) == ["ids", "mask", "age"]


def test_sites_are_grouped_by_the_form_of_their_examples_and_the_largest_group_comes_first():
    other = TREE | {"ids": TREE["ids"] | {"padding": 0}}
    sites = [site_info("Aarau", x=other), site_info("Zug", x=TREE), site_info("Bern", y=("int64", []), x=TREE)]
    found = by_form([*sites, site_info("Basel", x=TREE)])
    assert [[site.name for site in group] for group in found] == [["Basel", "Zug"], ["Aarau"], ["Bern"]]
    assert "padding 3, mask mask" in form_of(found[0][0])
    assert "padding 0" in form_of(found[1][0])


@pytest.mark.parametrize(
    ("counts", "most", "wanted"),
    [
        ((3, 5, 10**9), None, [3, 5, 8]),
        ((5, 10**9), None, [5, 50]),
        ((2, 2, *[3] * 20, 10**9), None, [2, 2, *[3] * 20, 30]),
        ((3, 50), 20, [3, 20]),
    ],
    ids=["all others together", "two sites", "10 times the median", "max_examples"],
)
def test_a_claim_of_very_many_examples_is_reduced_and_named(counts, most, wanted, caplog):
    found = Registry.of([site_info(name, n) for name, n in zip(ascii_lowercase, counts, strict=False)], most)
    assert [member.examples for member in found.members] == wanted
    name = found.names[-1]
    assert caplog.messages == [f"{name!r} claims {counts[-1]} examples: it counts for max_examples = {wanted[-1]}"]


@pytest.mark.parametrize("counts", [(303, 294, 123, 200), (5, 50), (100, 60, 40), (35, 18, 16, 9, 4, 1)])
def test_honest_sizes_count_in_full(counts, caplog):
    found = Registry.of([site_info(name, n) for name, n in zip(ascii_lowercase, counts, strict=False)])
    assert [member.examples for member in found.members] == list(counts)
    assert not caplog.messages


@pytest.fixture
def now(monkeypatch):
    clock = SimpleNamespace(time=lambda: clock.seconds, seconds=1000.7)
    monkeypatch.setattr(registry, "time", clock)
    return clock


def test_a_registry_is_read_as_it_was_written_and_every_start_has_a_larger_number(tmp_path, now):
    assert Registry.read(tmp_path) is None
    new = Registry.of([site_info("a", 3), site_info("b", 5)])
    first = new.started(tmp_path / "new")
    assert (new.start, first.start) == (0, 1000)
    assert Registry.read(tmp_path / "new") == first
    assert first.started(tmp_path / "new").start == 1001, "within the same second"
    now.seconds = 500.0
    assert Registry.read(tmp_path / "new").started(tmp_path / "new").start == 1002, "though the clock was set back"


def test_a_start_after_a_restored_backup_has_a_new_number(tmp_path, now):
    backup = Registry.of([site_info()]).started(tmp_path)
    given = []
    for now.seconds in (2000.0, 3000.0):
        given.append(Registry.read(tmp_path).started(tmp_path).start)
    now.seconds = 4000.0
    assert backup.started(tmp_path).start > max(given)


def test_a_start_is_numbered_after_those_that_another_server_has_written_meanwhile(tmp_path, now):
    early = Registry.of([site_info()])
    stored = early.started(tmp_path).started(tmp_path)
    assert early.started(tmp_path).start > stored.start


def test_a_new_experiment_does_not_replace_another(tmp_path):
    first = Registry.of([site_info()]).started(tmp_path)
    with pytest.raises(CheckpointError, match=r"another server has begun a run in .*: run the app again to resume"):
        Registry.of([site_info()]).started(tmp_path)
    assert Registry.read(tmp_path) == first


def test_two_experiments_have_different_names():
    assert Registry.of([site_info()]).experiment != Registry.of([site_info()]).experiment


@pytest.mark.parametrize("text", ["", "{", "[]", '{"experiment": "e"}', '{"start": -1}'])
def test_a_damaged_registry_is_named_with_a_way_out(tmp_path, text):
    (tmp_path / "sites.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"sites\.json is damaged: restore it from a backup, or choose another"):
        Registry.read(tmp_path)


def test_an_altered_registry_is_refused(tmp_path):
    Registry.of([site_info(examples=5)]).started(tmp_path)
    file = tmp_path / "sites.json"
    file.write_text(file.read_text().replace('"examples": 5', '"examples": 6'))
    with pytest.raises(CheckpointError, match=r"sites\.json is damaged: restore it from a backup"):
        Registry.read(tmp_path)
