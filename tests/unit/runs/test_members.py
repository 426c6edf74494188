"""Clients that are forgotten, or join after the run."""

from dataclasses import replace

import pytest
import torch

import consilience as cs
from consilience.core.errors import ConfigError, ConsilienceError, DataError
from consilience.evaluation.shift import estimate_shift
from support.scenarios import blobs, linear

ENGINE = cs.Simulator(device="cpu", precision="float64", chunk=4, workers=1)
NAMES = ["Basel", "Bern", "Genf", "Chur"]
EP = cs.FedEP(cs.inference.Newton(), damping=1.0, prior=1.0)
POOLING = cs.PartialPooling(cs.inference.Newton(), damping=1.0, prior=1.0, tau=0.5, learn=False)
IDENTITY = cs.FedEP(cs.inference.Identity(cs.SGD(lr=0.05, epochs=3, batch_size=5)), prior=1.0)
both = pytest.mark.parametrize("method", [EP, POOLING], ids=["FedEP", "PartialPooling"])


def fit(method, world, rounds=2):
    return cs.fit(method, *world, rounds=rounds, engine=ENGINE, progress=False)


@pytest.fixture
def world():
    return linear((30, 12, 8, 20), names=NAMES)


def others(federation, without):
    return cs.Federation.from_silos({name: federation.client(name) for name in NAMES if name != without})


def assert_same(q, p):
    torch.testing.assert_close(q.mean, p.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(q.variance, p.variance, rtol=1e-9, atol=1e-9)


@both
def test_a_forgotten_client_was_never_there_in_the_conjugate_case(world, method):
    run, never = fit(method, world), fit(method, (world[0], others(world[1], "Basel")))
    left = run.forget("Basel")
    assert left.federation.names == ("Bern", "Genf", "Chur")
    assert_same(left.posterior, never.posterior)
    assert_same(left.personal("Chur"), never.personal("Chur"))
    assert len(run.federation) == 4  # the run itself stays


@both
def test_a_client_that_joins_late_was_always_there_in_the_conjugate_case(world, method):
    run = fit(method, world)
    late = fit(method, (world[0], others(world[1], "Basel"))).join("Basel", world[1].client("Basel"))
    assert_same(late.posterior, run.posterior)
    assert_same(late.personal("Basel"), run.personal("Basel"))


@pytest.mark.slow
@both
def test_a_client_that_joins_learns_without_damping(world, method):
    """It learns alone: with damping, most of its factor would still be that of no data."""
    slow = replace(method, damping=0.3)
    run = fit(slow, world, 100)
    late = fit(slow, (world[0], others(world[1], "Basel")), 100).join("Basel", world[1].client("Basel"))
    assert_same(late.posterior, run.posterior)
    assert_same(late.personal("Basel"), run.personal("Basel"))


def test_forgetting_and_joining_again_changes_nothing(world):
    run = fit(EP, world)
    assert_same(run.forget("Bern").join("Bern", world[1].client("Bern")).posterior, run.posterior)


@pytest.mark.slow
def test_rounds_after_forgetting_come_to_the_run_that_never_had_the_client(world):
    """Sites of Identity are not exact, so the others' factors have traces of the client that was forgotten."""
    run, never = fit(IDENTITY, world, 60), fit(IDENTITY, (world[0], others(world[1], "Basel")), 60)
    at_once, later = run.forget("Basel"), run.forget("Basel", rounds=60)

    def apart(one):
        return float((one.posterior.mean - never.posterior.mean).norm())

    assert apart(later) < 0.5 * apart(at_once) or apart(later) < 1e-3


def test_a_test_federation_without_names_still_finds_the_clients_that_are_left(world):
    task, federation = world
    numbered = cs.Federation.from_silos([federation.client(name) for name in NAMES])
    run = fit(POOLING, (task, numbered)).forget(0)
    assert run.federation.names == ("1", "2", "3")
    found = run.evaluate(numbered)
    own = run.evaluate(cs.Federation.from_silos({"3": numbered.client(3)}))
    assert found.clients[3]["metrics"] == pytest.approx(own.clients[0]["metrics"])


def test_changes_show_every_clients_scores_before_and_after(world):
    run = fit(POOLING, world)
    left = run.forget("Basel")
    found = cs.runs.changes(run, left, world[1])
    assert [(row["client"], row["was"], row["is"]) for row in found.rows][:2] == [
        ("Basel", True, False),
        ("Bern", True, True),
    ]
    basel = found.rows[0]
    own, new = (
        cs.evaluate(run.task, belief, world[1].client("Basel")).point
        for belief in (run.personal("Basel"), left.newcomer())
    )
    assert basel["before"] == pytest.approx(own)
    assert basel["after"] == pytest.approx(new)
    distance = (left.posterior.mean - run.posterior.mean).abs() / run.posterior.variance.sqrt()
    assert found.moved == pytest.approx(float(distance.mean()))
    text = repr(found)
    assert "left" in text.splitlines()[1]
    assert "has moved by" in text


def test_changes_need_the_test_data_of_clients(world):
    run = fit(POOLING, world)
    with pytest.raises(DataError, match="pass test=, a Federation"):
        cs.runs.changes(run, run.forget("Basel"))
    with pytest.raises(DataError, match="pass test=, a Federation"):
        cs.runs.changes(run, run.forget("Basel"), world[1].client("Bern"))


def test_arrays_join_clients_whose_classes_have_names():
    task, train, _ = blobs(4)
    run = fit(cs.FedEP(cs.inference.Identity(cs.SGD(lr=0.1))), (task, train))
    late = run.join("Zug", (train.client(0).x.numpy(), train.client(0).y.numpy()))
    assert late.federation.data.classes == train.data.classes
    assert late.federation.number("Zug") == 4


def test_what_cannot_be_forgotten_or_joined_is_refused(world):
    run = fit(EP, world)
    with pytest.raises(DataError, match="no client 'Bsel'; did you mean 'Basel'"):
        run.forget("Bsel")
    with pytest.raises(DataError, match="a client 'Bern' already"):
        run.join("Bern", world[1].client("Basel"))
    with pytest.raises(ConsilienceError, match="FedAvg cannot forget a client"):
        fit(cs.FedAvg(), world).forget("Basel")
    with pytest.raises(ConsilienceError, match="cannot join a run of FedAvg"):
        fit(cs.FedAvg(), world).join("Zug", world[1].client("Basel"))
    with pytest.raises(ConfigError, match="rounds must be at least 0, got -1"):
        run.forget("Basel", rounds=-1)
    with pytest.raises(ConfigError, match="client must be a whole number or a string, got None"):
        run.forget(None)
    with pytest.raises(ConfigError, match="name must be a string, got 5"):
        run.join(5, world[1].client("Basel"))
    alone = fit(EP, (world[0], cs.Federation.from_silos({"Basel": world[1].client("Basel")})))
    with pytest.raises(DataError, match="the only client"):
        alone.forget("Basel")


def test_a_shift_of_class_frequencies_is_found_from_predictions_without_labels():
    made = torch.Generator().manual_seed(0)
    y = (torch.rand(20_000, generator=made) < 0.9).long()
    x = torch.randn(len(y), generator=made) + 1.5 * y
    likelihood = torch.stack([-(x**2) / 2, -((x - 1.5) ** 2) / 2], 1)
    old = torch.tensor([300, 100])
    p = (likelihood + old.log()).softmax(1)
    shift = estimate_shift(p, old)
    assert shift.new[1] == pytest.approx(0.9, abs=0.01)
    exact = (likelihood + torch.tensor([0.1, 0.9]).log()).softmax(1)
    torch.testing.assert_close(shift(p), exact, rtol=0, atol=0.02)


def test_without_a_shift_predictions_stay_and_absent_classes_stay_absent():
    p = torch.tensor([[0.7, 0.3, 0.0], [0.2, 0.8, 0.0]]).repeat(50, 1)
    shift = estimate_shift(p, torch.tensor([45, 55, 0]))
    torch.testing.assert_close(shift.new.float(), torch.tensor([0.45, 0.55, 0.0]), rtol=0, atol=0.02)
    with pytest.raises(DataError, match="probabilities of 2 classes"):
        estimate_shift(p, torch.tensor([1, 1]))
    with pytest.raises(DataError, match="probabilities of 3 classes"):
        shift(p[:, :1])
    with pytest.raises(DataError, match="from unlabelled inputs, and there are none"):
        estimate_shift(p[:0], torch.tensor([45, 55, 0]))
