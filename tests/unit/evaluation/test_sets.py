"""Prediction sets: their coverage on simulated scores is known, and they follow the belief of a run."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta, betabinom, kstest
from torch import nn

import consilience as cs
from consilience.core import pack, unpack
from consilience.core.errors import ConfigError, DataError, TaskError
from consilience.evaluation.calibration import EDGES, OWN, Calibration, calibrate, prediction_sets
from consilience.evaluation.sets import Classes, aps, lac, shares
from support.scenarios import blobs, linear

ENGINE = cs.Simulator(device="cpu", chunk=6, workers=1)
SGD = cs.SGD(lr=0.2, epochs=3)


def calibration(*clients, score="residual"):
    """The calibration of clients with these scores."""
    bins = len(EDGES[score]) + 1
    counts = torch.stack([torch.bincount(torch.bucketize(one, EDGES[score]), minlength=bins) for one in clients])
    return Calibration(counts.sum(0), torch.tensor([len(clients)]), counts[:0], (), score, 10)


def folded(generator, mean, n):
    return np.abs(generator.normal(mean, 1.0, n))


def covered(mean, t):
    """P(|N(mean, 1)| ≤ t)."""
    return 0.5 * (math.erf((t - mean) / 2**0.5) - math.erf((-t - mean) / 2**0.5))


def test_one_client_has_the_coverage_of_split_conformal_prediction():
    """Given the calibration examples, coverage has a Beta distribution, raised by at most the probability of a bin."""
    made, n, found = np.random.default_rng(0), 200, []
    for _ in range(2000):
        t = calibration(torch.from_numpy(folded(made, 0.0, n))).threshold(0.9).value
        found.append(covered(0.0, t))
    rank = math.ceil(0.9 * (n + 1))
    assert 0.9 - 4 * 0.021 / 2000**0.5 <= np.mean(found) <= 0.9 + 1 / (n + 1) + 0.003 + 4 * 0.021 / 2000**0.5
    exact, a_bin = beta(rank, n + 1 - rank).cdf, 0.0045
    assert kstest(found, exact, alternative="greater").pvalue > 1e-3
    assert kstest(np.array(found) - a_bin, exact, alternative="less").pvalue > 1e-3


def test_clients_that_differ_are_covered_together_and_not_one_by_one():
    made, sizes, means = np.random.default_rng(1), (20, 50, 10, 120), (0.0, 1.0, 3.0, -0.3)
    weights = np.array([n + 1 for n in sizes]) / (sum(sizes) + 4)
    each = []
    for _ in range(2000):
        scores = [torch.from_numpy(folded(made, m, n)) for m, n in zip(means, sizes, strict=True)]
        t = calibration(*scores).threshold(0.9).value
        each.append([covered(m, t) for m in means])
    mixture = np.array(each) @ weights
    error = 4 * mixture.std() / 2000**0.5
    assert 0.9 - error <= mixture.mean() <= 0.9 + 4 / (sum(sizes) + 4) + 0.003 + error
    assert np.mean(each, 0).min() < 0.5  # the client that differs most


@given(st.lists(st.floats(1e-3, 1e3), min_size=20, max_size=200), st.floats(0.5, 0.95), st.integers(0, 19))
@settings(max_examples=50, deadline=None)
def test_a_threshold_is_the_exact_one_rounded_up_to_an_edge(scores, coverage, cut):
    values = torch.tensor(scores, dtype=torch.float64)
    rank = math.ceil(coverage * (len(values) + 1) - 1e-9)
    exact = float(values.sort().values[min(rank, len(values)) - 1])
    found = calibration(values)
    if rank <= len(values):
        threshold = found.threshold(coverage).value
        place = int((EDGES["residual"] < threshold).sum())
        assert threshold >= exact
        assert place == 0 or float(EDGES["residual"][place - 1]) < exact
    halves = calibration(values[:cut], values[cut:])
    assert torch.equal(halves.counts, found.counts)
    assert torch.equal(calibration(values[cut:], values[:cut]).counts, found.counts)


def test_more_clients_need_a_higher_rank():
    scores = torch.linspace(0.01, 1, 100).double()
    one, many = calibration(scores).threshold(0.9).value, calibration(*scores.chunk(10)).threshold(0.9).value
    assert one == pytest.approx(0.91, rel=0.02)
    assert many == pytest.approx(0.99, rel=0.02)


def test_equal_scores_are_always_covered_and_scores_beyond_all_edges_make_endless_sets():
    assert calibration(torch.full((50,), 0.5).double()).threshold(0.9).value >= 0.5
    assert calibration(torch.full((50,), 1e9).double()).threshold(0.9).value == math.inf
    assert calibration(torch.full((50,), math.nan).double()).threshold(0.9).value == math.inf


def test_too_few_examples_for_a_coverage_are_refused():
    found = calibration(torch.rand(8).double())
    with pytest.raises(
        DataError, match=r"coverage 0\.9 need at least 9 calibration examples of 1 client, and there are"
    ):
        found.threshold(0.9)
    assert found.threshold(0.8).value < 1.1
    with pytest.raises(DataError, match="coverage is a probability between 0 and 1, got 90"):
        found.threshold(90)


def test_scores_of_classes():
    p = torch.tensor([[0.5, 0.2, 0.3]]).double()
    u = torch.tensor([[0.25]]).double()
    torch.testing.assert_close(lac(p, u), torch.tensor([[0.5, 0.8, 0.7]]).double())
    torch.testing.assert_close(aps(p, u), torch.tensor([[0.125, 0.85, 0.575]]).double())
    assert Classes(p, lac(p, u)).naive(0.75).members.tolist() == [[True, False, True]]


@pytest.mark.parametrize("score", ["lac", "aps"])
def test_labels_drawn_from_the_model_are_covered_as_promised(score):
    """Where the model is right, the truth is a draw from its probabilities."""
    made = torch.Generator().manual_seed(0)
    p = torch.randn(40_000, 5, generator=made).mul(2).softmax(1).double()
    y = p.multinomial(1, generator=made).squeeze(1)
    half = 20_000
    scores = Classes.of(p[:half], score).scores(y[:half])
    sets = Classes.of(p[half:], score).sets(calibration(scores, score=score).threshold(0.9))
    assert float(sets.covers(y[half:]).double().mean()) == pytest.approx(0.9, abs=0.012)
    assert len(sets) == half
    assert float(sets.sizes.double().mean()) < 5


def test_an_example_that_is_predicted_alone_has_the_same_share_as_among_others():
    """Shares by place would give every patient who comes alone the first share, and coverage would depend on it."""
    made = torch.Generator().manual_seed(1)
    p = torch.randn(4000, 4, generator=made).softmax(1).double()
    together = shares(p)
    assert torch.equal(torch.cat([shares(p[i : i + 1]) for i in range(50)]), together[:50])
    assert torch.equal(shares(p.float()), together)
    assert kstest(together[:, 0].numpy(), "uniform").pvalue > 1e-3
    for column in p.T:
        assert abs(float(torch.corrcoef(torch.stack([column, together[:, 0]]))[0, 1])) < 0.06


@pytest.fixture(scope="module")
def clouds():
    """Noisy classes at six clients, of which two have many examples: (task, train, calibration, test)."""
    task, train, test = blobs(6, each=240)
    train, held = train.split(0.4, seed=1)
    made = torch.Generator().manual_seed(3)
    noisy = torch.rand(len(train.data), generator=made) < 0.25
    y = torch.where(noisy, torch.randint(3, (len(train.data),), generator=made), train.data.y)
    data = replace(train.data, y=y)
    return task, *(replace(part, data=data) for part in (train, held, test))


METHODS = [cs.FedAvg(SGD), cs.FedEP(cs.inference.Identity(SGD)), cs.LocalOnly(SGD),
           cs.PartialPooling(cs.inference.Identity(SGD))]  # fmt: skip


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_sets_of_any_belief_cover_at_all_clients_and_at_each(clouds, method, tmp_path):
    task, train, held, test = clouds
    run = cs.fit(method, task, train, rounds=5, test=test, calibration=held, engine=ENGINE, progress=False,
                 out=tmp_path / "run")  # fmt: skip
    found = run.evaluation
    overall = (found.marginal or found.point)["coverage"]
    low, high = betabinom(test.examples, 0.9 * (held.examples + 6), 0.1 * held.examples).ppf([5e-4, 1 - 5e-4])
    assert low / test.examples - 0.02 <= overall <= high / test.examples + 0.02
    own = dict(zip(run.calibration.names, run.calibration.own.sum(1).tolist(), strict=True))
    for client in found.clients:
        n, m, metrics = own[client["name"]], client["examples"], client["metrics"]
        rank = math.ceil(0.9 * (n + 1))
        low = betabinom(m, rank, n + 1 - rank).ppf(5e-4) / m
        assert metrics["coverage"] >= low
        assert 0 <= metrics["set_size"] <= 3
        assert metrics["naive_set_size"] >= 1
    stored = cs.load_run(tmp_path / "run")
    assert stored.evaluation.clients == found.clients
    assert torch.equal(stored.calibration.counts, run.calibration.counts)


def test_a_run_makes_sets_for_a_client_and_for_a_new_one(clouds):
    task, train, held, test = clouds
    run = cs.fit(cs.FedAvg(SGD), task, train, rounds=3, engine=ENGINE, progress=False)
    x, y = test.client(0).x, test.client(0).y
    with pytest.raises(DataError, match=r"call run\.calibrate\(data\)"):
        run.sets(x)
    run.calibrate(held)
    own, new = run.sets(x, client=0), run.sets(x)
    assert own.guarantee == "at least 0.9 of the examples of '0' are covered"
    assert "no new one" in new.guarantee
    assert set(own[0]) <= {"red", "green", "blue"}
    assert own.covers(y).shape == (len(x),)
    wider = run.sets(x, coverage=0.97)
    assert bool((wider.members >= new.members).all())
    assert torch.equal(run.sets(test.client(0)).members, new.members)


def test_few_examples_of_a_client_use_the_threshold_of_all():
    task, train, test = blobs(6, each=20)
    run = cs.fit(cs.FedAvg(SGD), task, train, rounds=1, engine=ENGINE, progress=False)
    run.calibrate(test, samples=1)
    assert run.calibration.names == ()
    assert int(run.calibration.clients) == 6
    assert run.sets(test.client(1), coverage=0.7, client=1).threshold == run.calibration.threshold(0.7)


def test_a_client_with_too_few_examples_for_a_coverage_uses_the_threshold_of_all():
    few, many = torch.rand(60).double(), torch.rand(300).double()
    found = calibration(few, many).with_own("a", calibration(few).counts)
    assert found.threshold(0.9, "a").guarantee == "at least 0.9 of the examples of 'a' are covered"
    assert found.threshold(0.99, "a") == found.threshold(0.99)


def test_a_new_client_calibrates_itself(clouds):
    """The sets are those of its own belief, and no other client's."""
    task, train, held, test = clouds
    infer = cs.inference.Identity(SGD)
    run = cs.fit(cs.PartialPooling(infer), task, train, rounds=2, engine=ENGINE, progress=False)
    run.calibrate(held.client(0))
    found = run.sets(test.client(0))
    wanted = prediction_sets(run.network, run.newcomer(), run.calibration, test.client(0))
    assert torch.equal(found.members, wanted.members)
    assert found.guarantee.endswith("where the calibration examples come are covered; this holds for no other client")
    with pytest.raises(DataError, match="the calibration is of a new client's examples, and '1' predicts with a"):
        run.sets(test.client(1), client=1)
    run.calibrate(cs.Federation.from_silos({"Zug": held.client(0)[:20]}))
    assert run.calibration.threshold(0.9, "Zug").guarantee == "at least 0.9 of the examples of 'Zug' are covered"


def test_intervals_of_numbers_cover_though_the_noise_is_wrong():
    """The task takes the noise to be 1, and it is 0.1: naive intervals are ten times too wide."""
    task, whole = linear((150, 200, 120), names=("a", "b", "c"))
    train, test = whole.split(0.4, seed=0)
    train, held = train.split(0.5, seed=1)
    run = cs.fit(cs.FedEP(cs.inference.Newton(), damping=1.0, prior=0.01), task, train, rounds=2, test=test,
                 calibration=held, engine=ENGINE, progress=False)  # fmt: skip
    scores = run.evaluation.marginal
    assert scores["coverage"] == pytest.approx(0.9, abs=0.08)
    assert scores["interval_width"] == pytest.approx(2 * 1.645 * 0.1, rel=0.25)
    assert scores["naive_interval_width"] > 8 * scores["interval_width"]
    assert scores["naive_coverage"] == 1
    low, high = run.sets(test.client("a"), client="a")[0]
    assert low < high


@pytest.mark.slow
def test_training_examples_of_an_overfitted_network_undercover():
    """Why calibration examples must be held out."""
    made = torch.Generator().manual_seed(0)
    x, y = torch.randn(600, 10, generator=made), torch.randint(2, (600,), generator=made)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 256), nn.ReLU(), nn.Linear(256, 2))
    task, data = cs.Classification(net), cs.Dataset(x, y)
    federation = cs.Federation.from_owner(data[:200], torch.zeros(200, dtype=torch.int64))
    run = cs.fit(cs.FedAvg(cs.SGD(lr=0.5, epochs=60)), task, federation, rounds=10, engine=ENGINE, progress=False)
    test = data[400:]
    wrong = prediction_sets(run.network, run.posterior, calibrate(run.network, run.posterior, data[:200]), test)
    right = prediction_sets(run.network, run.posterior, calibrate(run.network, run.posterior, data[200:400]), test)
    assert float(wrong.covers(test.y).double().mean()) < 0.75
    assert float(right.covers(test.y).double().mean()) > 0.82


def test_what_cannot_be_calibrated_is_refused(clouds):
    task, train, held, _ = clouds
    for same in (train, train.data):
        with pytest.raises(DataError, match="the calibration examples are training examples too"):
            cs.fit(cs.FedAvg(), task, train, rounds=1, calibration=same, progress=False)
    for use in ("validation", "test"):
        with pytest.raises(DataError, match=f"the calibration examples are {use} examples too"):
            cs.fit(cs.FedAvg(), task, train, rounds=1, calibration=held, progress=False, **{use: held})
    few = cs.Federation.from_silos({"a": held.client(0)[:5]})
    with pytest.raises(DataError, match="need at least 9 calibration examples of 1 client, and there are 5"):
        cs.fit(cs.FedAvg(), task, train, rounds=1, calibration=few, progress=False)
    many = replace(train.data, y=torch.zeros(len(train.data), 3))
    labels = cs.Federation.from_owner(many, torch.zeros(len(many), dtype=torch.int64))
    with pytest.raises(TaskError, match="prediction sets need classes or numbers to predict, and the task is multi"):
        cs.fit(cs.FedAvg(), cs.MultiLabel(task.module), labels, rounds=1, calibration=many, progress=False)
    alone = cs.fit(cs.LocalOnly(SGD), task, train, rounds=1, engine=ENGINE, progress=False)
    with pytest.raises(DataError, match="every client of LocalOnly has a model of its own"):
        alone.calibrate(held.client(0))
    with pytest.raises(DataError, match="score must be one of lac, aps, got 'raps'"):
        alone.calibrate(held, score="raps")
    with pytest.raises(DataError, match=r"the module cannot take examples of data, of shape \(1,\)"):
        alone.calibrate((torch.zeros(20, 1), torch.zeros(20, dtype=torch.int64)))
    alone.calibrate(held)
    with pytest.raises(DataError, match=r"the module cannot take examples of data, of shape \(1,\)"):
        alone.sets(torch.zeros(20, 1), client=0)
    with pytest.raises(ConfigError, match=r"coverage must be a number, got '0\.9'"):
        alone.sets(held.client(0), client=0, coverage="0.9")


def test_sets_take_one_target_for_each_prediction(clouds):
    task, train, held, test = clouds
    run = cs.fit(cs.FedAvg(SGD), task, train, rounds=1, engine=ENGINE, progress=False)
    run.calibrate(held)
    y, found = test.client(0).y, run.sets(test.client(0))
    with pytest.raises(DataError, match=f"y must be the targets of the {len(y)} predictions, and has 3"):
        found.covers(y[:3])
    with pytest.raises(DataError, match="y must be the numbers of 3 classes, from 0"):
        found.covers(y - 1)


def test_a_calibration_is_a_record(clouds):
    task, train, held, _ = clouds
    run = cs.fit(cs.FedAvg(SGD), task, train, rounds=1, engine=ENGINE, progress=False)
    found = run.calibrate(held)
    again = unpack(pack(found))
    assert again.names == found.names
    assert torch.equal(again.own, found.own)
    assert min(found.own.sum(1).tolist()) >= OWN
    assert repr(found).startswith("Calibration(lac scores of")
