"""Prediction sets of real sites: counts and scores are the simulator's, and wrong counts are rejected."""

from dataclasses import replace

import pytest
import torch

import consilience as cs
from consilience.core.errors import ConsilienceError, TaskError
from consilience.core.records import pack, unpack
from consilience.flower.messages import CALIBRATION, CalibrateReply, decode, encode
from support.flower_grid import BAD, FEDAVG, LAPLACE, TRAIN, World, assert_same, score
from support.scenarios import NAMES, blobs

POOLING = cs.PartialPooling(cs.inference.Identity(TRAIN))
QUERY = f"query.{CALIBRATION}"
pytestmark = pytest.mark.usefixtures("_unhurried")


class Calibrated(World):
    """Sites that also hold calibration examples."""

    def data(self, k):
        own = self.calibration.client(k)
        return replace(super().data(k), calibration=own)


@pytest.fixture
def world(tmp_path):
    def make(method, each=400, **options):
        task, train, test = blobs(clients=4, each=each)
        train, calibration = (replace(part, names=NAMES[:4]) for part in train.split(0.4, seed=1))
        there = Calibrated(method, task, train, tmp_path, replace(test, names=NAMES[:4]), **options)
        there.calibration = calibration
        return there

    return make


def wrong(change):
    """A site's reply with other counts."""

    def instead(reply):
        counts = unpack(decode(reply.content, CalibrateReply)[1]["counts"])
        reply.content = encode(CalibrateReply(), counts=pack(change(counts)))
        return reply

    return instead


@pytest.mark.parametrize("method", [FEDAVG, cs.FedEP(LAPLACE), POOLING], ids=lambda method: method.name)
def test_counts_coverage_and_sizes_are_the_simulators(world, method):
    there = world(method)
    run, saved = score(there, 2)
    wanted = there.simulated(2, test=there.held_out, calibration=there.calibration)
    assert_same(run.calibration.counts, wanted.calibration.counts)
    assert run.calibration.names == ()  # the sum alone leaves the sites
    kind = "point" if method is FEDAVG else "marginal"
    ours, theirs = saved[kind]["metrics"], getattr(wanted.evaluation, kind)
    for name in ("coverage", "set_size", "naive_coverage", "naive_set_size"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-9)
    for ours, theirs in zip(saved["clients"], wanted.evaluation.clients, strict=True):
        assert ours["metrics"]["coverage"] == pytest.approx(theirs["metrics"]["coverage"])


@pytest.mark.parametrize("method", [FEDAVG, POOLING], ids=lambda method: method.name)
def test_secure_sums_of_counts_are_the_simulators(world, method):
    """The server sees the sum of the counts and of the coverages. Each site uses its own threshold."""
    there = world(method, secure=True)
    run, saved = score(there, 2)
    wanted = there.simulated(2, test=there.held_out, calibration=there.calibration)
    assert torch.equal(run.calibration.counts, wanted.calibration.counts)
    assert torch.equal(run.calibration.clients, wanted.calibration.clients)
    assert run.calibration.names == ()
    kind = "point" if method is FEDAVG else "marginal"
    for name in ("coverage", "set_size", "naive_coverage", "naive_set_size"):
        assert saved[kind]["metrics"][name] == pytest.approx(getattr(wanted.evaluation, kind)[name], rel=1e-6)
    assert saved["clients"] == []


def test_under_secure_sums_too_few_calibration_examples_do_not_lose_the_run(world, caplog):
    run = world(FEDAVG, each=20, secure=True).serve(1)
    assert run.calibration is None
    assert "there are no prediction sets: sets of coverage 0.9 need at least 36" in caplog.text


@pytest.mark.parametrize("method", [FEDAVG, POOLING], ids=lambda method: method.name)
def test_a_site_keeps_the_belief_that_it_predicts_with(world, method):
    there = world(method)
    score(there, 2)
    wanted = there.simulated(2, test=there.held_out, calibration=there.calibration)
    kept = {name: file for name in NAMES[:4] for file in there.folder.rglob(f"{name}-*/posterior.safetensors")}
    assert set(kept) == set(NAMES[:4])
    for name, file in kept.items():
        assert_same(cs.load_posterior(file), wanted.personal(name))
        assert file.stat().st_mode & 0o077 == 0


def test_the_server_knows_no_client_and_changes_none(world):
    run = world(POOLING).serve(1)
    with pytest.raises(TaskError, match="are at the clients' sites, and only they can use them"):
        run.personal(NAMES[0])
    for change in (lambda: run.forget(NAMES[0]), lambda: run.join("Lugano", run.federation.client(0))):
        with pytest.raises(ConsilienceError, match="only a simulated run can change its clients"):
            change()


def test_a_site_makes_sets_without_the_server(world):
    there = world(POOLING)
    score(there, 2)
    wanted = there.simulated(2, calibration=there.calibration)
    (file,) = there.folder.rglob(f"{NAMES[0]}-*/posterior.safetensors")
    belief, task = cs.load_posterior(file), there.task.prepare(dtype=torch.float64)
    own = cs.evaluation.calibrate(task, belief, there.calibration.client(0))
    x = there.held_out.client(0).x
    found = cs.evaluation.prediction_sets(task, belief, own, x)
    assert torch.equal(found.members, wanted.sets(x, client=NAMES[0]).members)
    assert "no other client" in found.guarantee
    torch.testing.assert_close(cs.evaluation.predict_inputs(task, belief, x), wanted.predict(x, client=NAMES[0]))


@pytest.mark.parametrize(
    "change",
    [
        lambda found: replace(found, counts=found.counts - 1),
        lambda found: replace(found, counts=found.counts * 1000),
        lambda found: replace(found, counts=torch.zeros_like(found.counts)),
        lambda found: replace(found, counts=found.counts[:-1]),
        lambda found: replace(found, score="aps"),
    ],
    ids=["negative", "too many", "none", "another form", "another score"],
)
def test_wrong_counts_are_rejected(world, change, caplog):
    there = world(FEDAVG)
    there.instead[QUERY, BAD] = wrong(change)
    run = there.serve(1)
    assert int(run.calibration.clients) == 3
    assert f"the calibration of '{BAD}' is rejected" in caplog.text


def test_too_few_calibration_examples_at_sites_do_not_lose_the_run(world, caplog):
    run = world(FEDAVG, each=20).serve(1)
    assert run.calibration is None
    assert "there are no prediction sets: sets of coverage 0.9 need at least 36" in caplog.text
    assert "coverage" not in run.latest.point
