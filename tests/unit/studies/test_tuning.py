"""Tuning: every method the same number of trials, on training data only, and the best settings are found."""

import json
import logging
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import consilience as cs
from consilience.core.errors import ClientError, ConfigError, DataError
from consilience.core.ranges import Choice, Range, Ranges
from consilience.studies.compare import compare
from consilience.studies.knobs import candidates, knobs, settings, with_settings
from consilience.studies.setting import Setting
from consilience.studies.tune import tune
from support.methods import ALGORITHMS, label
from support.scenarios import blobs, linear

TRAIN = cs.SGD(lr=0.1, epochs=2)
OPTIONS = {
    "rounds": 2,
    "cohort": 4,
    "engine": cs.Simulator(device="cpu", chunk=6, workers=1, threads=1),
    "progress": False,
}


@dataclass(frozen=True)
class Planted(cs.SGD):
    """Of three step sizes one is of use."""

    ranges: ClassVar[Ranges] = {"lr": Choice((1e-6, 0.3, 1e-5))}
    lr: float = 1e-5


@dataclass(frozen=True)
class Wild(cs.SGD):
    """Steps that leave the numbers, if they are long."""

    ranges: ClassVar[Ranges] = {"lr": Choice((1e30, 1e35))}

    def move(self, theta, memory, slope, n, noise, lr):
        theta.sub_(slope if self.lr < 1 else torch.inf, alpha=self.lr)


@dataclass(frozen=True)
class Fixed(cs.SGD):
    """Nothing to tune."""

    ranges: ClassVar[Ranges] = {}


@dataclass(frozen=True)
class FixedServer(cs.server.Momentum):
    """Nothing to tune at the server either."""

    ranges: ClassVar[Ranges] = {}


def at(seed=0):
    return Setting(*blobs(seed=seed))


def counting(seen):
    """A callback that counts rounds."""
    return {**OPTIONS, "callbacks": [lambda run, line: seen.append(line["round"])]}


# What is tuned


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (cs.FedAvg(TRAIN), {"train.lr": 0.1, "server.lr": 1.0}),
        (cs.FedAvg(cs.optim.AMSGrad(), cs.server.Adam()), {"train.lr": 0.001, "server.lr": 0.01}),
        (cs.FedProx(TRAIN, mu=0.5), {"train.lr": 0.1, "server.lr": 1.0, "mu": 0.5}),
        (cs.FedEP(cs.inference.Identity(TRAIN)), {"infer.train.lr": 0.1, "infer.scale": 0.05, "server.lr": 1.0}),
        (cs.FedEP(cs.inference.Laplace(TRAIN)), {"infer.train.lr": 0.1, "infer.kappa": 500.0, "server.lr": 1.0}),
        (cs.FedEP(cs.inference.Newton()), {"server.lr": 1.0}),
        (cs.algorithms.FedSGD(), {"server.lr": 0.1}),
        (cs.PFNM(), {"train.lr": 0.01, "how.variance": 1.0, "how.mass": 1.0}),
        (cs.PFNM(how=cs.matching.DPMeans()), {"train.lr": 0.01, "how.penalty": 10.0}),
        (cs.LocalOnly(Fixed()), {}),
    ],
    ids=lambda value: value.name if isinstance(value, cs.Algorithm) else "",
)
def test_settings_are_found_at_any_depth(method, expected):
    assert settings(method) == expected
    assert with_settings(method, expected) == method


def test_what_both_methods_of_a_switch_share_is_tuned_together():
    method = cs.Switch(cs.FedAvg(TRAIN), cs.FedEP(cs.inference.Identity(TRAIN)), at=2)
    assert {knob.paths for knob in knobs(method)} == {
        ("first.train.lr", "then.infer.train.lr"),
        ("first.server.lr", "then.server.lr"),
        ("then.infer.scale",),
    }
    for drawn in candidates("x", method, 5)[1:]:
        version = with_settings(method, drawn)
        assert version.first.train == version.then.infer.train != TRAIN
        assert version.first.server == version.then.server
        assert version.at == 2
    other = replace(method, then=cs.FedEP(cs.inference.Identity(replace(TRAIN, lr=0.2)), cs.server.Adam()))
    assert len(knobs(other)) == 5


def test_a_sites_optimiser_that_is_the_servers_stays_so():
    both = cs.FedEP(cs.inference.Newton(), cs.server.Momentum(0.5), site=cs.server.Momentum(0.5))
    assert [knob.paths for knob in knobs(both)] == [("server.lr", "site.lr")]
    assert [knob.paths for knob in knobs(replace(both, site=None))] == [("server.lr",)]


def test_a_component_may_say_where_its_parts_are_tuned():
    (knob,) = knobs(cs.algorithms.FedSGD(server=cs.server.Adam()))
    assert knob.within == cs.algorithms.FedSGD.ranges["server.lr"] != cs.server.Adam.ranges["lr"]


@pytest.mark.parametrize("method", [m for m in ALGORITHMS if knobs(m)], ids=label)
def test_every_method_accepts_the_settings_that_it_declares(method):
    drawn = candidates("method", method, 5)
    assert settings(with_settings(method, drawn[-1])) == drawn[-1]


def test_a_setting_with_the_range_none_is_not_tuned():
    """Sites must add up to q, so the server of PartialPooling is plain; that of FedAvg, before a switch, is not."""
    found = [path for knob in knobs(cs.Switch(cs.FedAvg(TRAIN), cs.PartialPooling(), at=2)) for path in knob.paths]
    assert "first.server.lr" in found
    assert "then.tau" in found
    assert "then.server.lr" not in found


def test_ranges_of_what_is_not_there_are_refused():
    @cs.algorithm
    class Odd(cs.FedAvg):
        ranges: ClassVar[Ranges] = {"mu": Range(0.1, 1.0)}

    with pytest.raises(ConfigError, match="the ranges of Odd name 'mu', which it does not have"):
        knobs(Odd())


@pytest.mark.parametrize("wrong", [(0.0, 1.0, True), (1.0, 1.0, False), (2.0, 1.0, True), (0.0, float("nan"), False)])
def test_a_range_that_is_none_is_refused(wrong):
    with pytest.raises(ConfigError, match="a range needs"):
        Range(*wrong)


def test_a_log_range_has_as_many_draws_in_every_decade():
    shares = torch.linspace(0, 1, 301).tolist()
    found = torch.tensor([Range(1e-3, 1.0).at(share) for share in shares]).log10()
    assert torch.allclose(found, torch.linspace(-3, 0, 301), atol=1e-5)
    assert Range(1.0, 3.0, log=False).at(0.25) == 1.5
    assert [Choice(("a", "b")).at(share) for share in (0.0, 0.49, 0.5, 0.999, 1.0)] == ["a", "a", "b", "b", "b"]


def test_draws_lie_within_their_ranges_and_depend_on_seed_method_and_trial_only():
    method = cs.FedProx(TRAIN)
    found = candidates("FedProx", method, 40)
    assert found[0] == settings(method)
    within = {knob.paths[0]: knob.within for knob in knobs(method)}
    assert all(within[path].low <= value <= within[path].high for drawn in found[1:] for path, value in drawn.items())
    assert len({drawn["mu"] for drawn in found}) == 40
    assert candidates("FedProx", method, 40) == found
    assert candidates("FedProx", method, 10) == found[:10]
    assert candidates("FedProx", method, 10, seed=1)[1] != found[1]
    assert candidates("other", method, 10)[1] != found[1]


# Trials


def test_the_planted_setting_is_found():
    method = cs.FedAvg(Planted(epochs=2), FixedServer())
    tuned = tune({"FedAvg": method}, at(), trials=8, **{**OPTIONS, "rounds": 3})
    assert tuned.methods["FedAvg"].train.lr == 0.3
    (entry,) = tuned.tuning
    assert entry["chosen"] == {"train.lr": 0.3}
    assert (entry["method"], entry["trials"], entry["metric"]) == ("FedAvg", 8, "nll")
    assert entry["all"][0] == {"settings": {"train.lr": 1e-5}, "score": pytest.approx(1.2, abs=0.4)}
    assert entry["score"] == min(trial["score"] for trial in entry["all"]) < 0.5


def test_all_methods_have_the_same_effort():
    seen, started = [], []
    methods = {"FedAvg": cs.FedAvg(TRAIN), "FedEP": cs.FedEP(cs.inference.Identity(TRAIN)), "Pooled": cs.Pooled(TRAIN)}
    tuned = tune(methods, at(), trials=3, on_trial=lambda *trial: started.append(trial), **counting(seen))
    assert started == [(label, k) for label in methods for k in range(3)]
    assert seen == [1, 2] * 9
    assert [entry["trials"] for entry in tuned.tuning] == [3, 3, 3]


class Trap(cs.Dataset):
    """Test data that nobody may look at."""

    def __getattribute__(self, name):
        if name == "__class__":
            return Trap
        raise AssertionError(f"the test data was asked for its {name}")


def test_test_data_is_never_looked_at():
    task, train, test = blobs()
    trapped = tune({"FedAvg": cs.FedAvg(TRAIN)}, Setting(task, train, object.__new__(Trap)), trials=2, **OPTIONS)
    usual = tune({"FedAvg": cs.FedAvg(TRAIN)}, Setting(task, train, test.data[test.order]), trials=2, **OPTIONS)
    assert trapped == usual


def test_trials_learn_from_four_fifths_and_are_judged_by_the_rest(tmp_path):
    task, train, test = blobs()
    tune({"FedAvg": cs.FedAvg(TRAIN)}, Setting(task, train, test), trials=1, out=tmp_path, **OPTIONS)
    where = tmp_path / "tuning" / "FedAvg" / "trial-0"
    facts = json.loads((where / "run.json").read_text())
    assert facts["federation"]["sizes"] == [size - size // 5 for size in train.sizes.tolist()]
    judged = json.loads((where / "evaluation.json").read_text())["clients"]
    assert [client["examples"] for client in judged] == [size // 5 for size in train.sizes.tolist()]


def test_clients_are_judged_by_their_own_models_only_if_they_are_tested_so():
    task, train, test = blobs()
    method = {"LocalOnly": cs.LocalOnly(TRAIN)}
    own = tune(method, Setting(task, train, test), trials=1, **OPTIONS).tuning[0]["score"]
    one = tune(method, Setting(task, train, test.data[test.order]), trials=1, **OPTIONS).tuning[0]["score"]
    assert own < one


def test_a_trial_that_diverges_is_the_worst_and_the_log_is_not_filled(tmp_path, caplog):
    tuned = tune({"FedAvg": cs.FedAvg(Wild(lr=0.1))}, at(), trials=3, out=tmp_path, **OPTIONS)
    (entry,) = tuned.tuning
    assert [trial["score"] is None for trial in entry["all"]] == [False, True, True]
    assert tuned.methods["FedAvg"].train.lr == 0.1
    assert not caplog.records
    reason = (tmp_path / "tuning" / "FedAvg" / "trial-1" / "diverged.txt").read_text()
    assert reason == "no update of round 1 was finite\n"


def test_where_all_trials_diverge_the_method_stays_as_it_is(caplog):
    tuned = tune({"FedAvg": cs.FedAvg(Wild(lr=1e33))}, at(), trials=2, **OPTIONS)
    assert tuned.methods["FedAvg"].train.lr == 1e33
    (entry,) = tuned.tuning
    assert (entry["score"], entry["chosen"]["train.lr"]) == (None, 1e33)
    assert "all trials of FedAvg diverged: it is run as given" in caplog.text


@cs.algorithm
class Fragile(cs.FedAvg):
    """Its own code breaks for large steps."""

    def local(self, task, message, state, cohort):
        if self.train.lr > 0.2:
            raise ArithmeticError("too far")
        return super().local(task, message, state, cohort)


@cs.algorithm
class Unplugged(cs.FedAvg):
    """The device fails in its second trial."""

    failure: str = "AcceleratorError"

    def local(self, task, message, state, cohort):
        if self.train.lr != 0.1:
            raise getattr(torch, self.failure)("CUDA error: operation failed")
        return super().local(task, message, state, cohort)


@pytest.mark.parametrize("failure", ["AcceleratorError", "OutOfMemoryError"])
def test_a_failure_of_the_device_is_not_taken_for_a_bad_setting(failure):
    with pytest.raises((ClientError, torch.OutOfMemoryError), match="CUDA error"):
        tune({"Unplugged": Unplugged(Planted(lr=0.1, epochs=2), failure=failure)}, at(), trials=2, **OPTIONS)


def test_a_clients_error_ends_the_trial_and_nothing_else(tmp_path, caplog):
    methods = {"Fragile": Fragile(replace(Planted(epochs=2), lr=1e-5))}
    first = tune(methods, at(), trials=8, out=tmp_path, **OPTIONS)
    scores = {trial["settings"]["train.lr"]: trial["score"] for trial in first.tuning[0]["all"]}
    assert scores[0.3] is None
    assert None not in (scores[1e-5], scores[1e-6])
    assert "too far" in caplog.text


def test_a_users_mistake_is_no_divergence():
    with pytest.raises(ConfigError, match="cohort is 9, but the federation has 6 clients"):
        tune({"FedAvg": cs.FedAvg(TRAIN)}, at(), trials=2, **{**OPTIONS, "cohort": 9})


def test_a_method_without_ranges_has_one_trial_and_the_log_says_so(caplog):
    tuned = tune({"LocalOnly": cs.LocalOnly(Fixed())}, at(), trials=5, **OPTIONS)
    assert (tuned.tuning[0]["trials"], tuned.tuning[0]["chosen"]) == (1, {})
    assert "LocalOnly has no settings with ranges: nothing to tune" in caplog.text


@pytest.mark.parametrize("trials", [0, -1])
def test_less_than_one_trial_is_refused(trials):
    with pytest.raises(ConfigError, match=f"tune must be at least 1, got {trials}"):
        compare([cs.FedAvg(TRAIN)], at(), tune=trials, **OPTIONS)


def test_clients_with_too_little_data_to_hold_any_out_are_refused_together():
    task, federation = linear(sizes=(4, 3, 1), names=None)
    with pytest.raises(DataError, match="tuning holds out 20% of every client's examples, but no client has 5"):
        tune({"FedAvg": cs.FedAvg(TRAIN)}, Setting(task, federation, federation), trials=2, **OPTIONS)


def test_the_score_to_tune_by_may_be_chosen():
    by = {
        select: tune({"A": cs.FedAvg(TRAIN)}, at(), trials=2, select=select, **OPTIONS) for select in ("accuracy", None)
    }
    assert [found.tuning[0]["metric"] for found in by.values()] == ["accuracy", "nll"]
    (entry,) = by["accuracy"].tuning
    assert entry["score"] == max(trial["score"] for trial in entry["all"])
    with pytest.raises(ConfigError, match="select: 'acuracy' is no score to select by; did you mean 'accuracy'"):
        tune({"A": cs.FedAvg(TRAIN)}, at(), trials=1, select="acuracy", **OPTIONS)


# In a comparison


def test_the_best_settings_are_used_for_all_seeds_on_all_training_data(tmp_path):
    methods = {"one": cs.FedAvg(Planted(epochs=2)), "two": cs.FedProx(TRAIN)}
    result = compare(methods, at, seeds=2, tune=2, out=tmp_path, **OPTIONS)
    saved = json.loads((tmp_path / "comparison.json").read_text())
    assert saved["tuning"] == result.tuning
    for entry in saved["tuning"]:
        assert set(entry) == {"method", "trials", "chosen", "score", "metric", "all"}
        assert len(entry["all"]) == entry["trials"] == 2
        assert all(set(trial) == {"settings", "score"} for trial in entry["all"])
        for seed in range(2):
            facts = json.loads((tmp_path / entry["method"] / f"seed-{seed}" / "run.json").read_text())
            assert facts["algorithm"]["train"]["lr"] == entry["chosen"]["train.lr"]
            assert facts["algorithm"]["server"]["lr"] == entry["chosen"]["server.lr"]
            assert facts["federation"]["examples"] == at(seed).federation.examples
    assert {run["directory"].split("/")[0] for run in saved["runs"]} == set(methods)


def test_other_test_data_leads_to_the_same_choice():
    task, train, test = blobs()
    shuffled = replace(test, data=replace(test.data, y=test.data.y.flip(0)))
    found = [compare([cs.FedAvg(TRAIN)], Setting(task, train, t), seeds=1, tune=3, **OPTIONS) for t in (test, shuffled)]
    assert found[0].tuning == found[1].tuning
    assert found[0].rows != found[1].rows


@pytest.mark.slow
def test_a_cut_comparison_goes_on_to_the_same_result_and_runs_nothing_again(tmp_path):
    methods = {
        "wild": cs.FedAvg(Wild(lr=0.1)),
        "switch": cs.Switch(cs.FedAvg(TRAIN), cs.FedEP(cs.inference.Identity(TRAIN)), at=1),
    }
    options = {"seeds": 1, "tune": 2}
    whole = compare(methods, at, out=tmp_path / "whole", **options, **OPTIONS)

    stored = cs.runs.Storage(tmp_path / "cut", checkpoint_every=1)
    seen = []

    def cut(run, line):
        seen.append(line["round"])
        if len(seen) == 6:  # in the middle of a trial
            raise KeyboardInterrupt

    cutting = {**OPTIONS, "callbacks": [cut]}
    with pytest.raises(KeyboardInterrupt):
        compare(methods, at, out=stored, **options, **cutting)
    assert not (tmp_path / "cut" / "comparison.json").exists()
    again = []
    going_on = counting(again)
    result = compare(methods, at, out=stored, resume=True, **options, **going_on)
    assert result.tuning == whole.tuning
    timeless = [row for row in result.rows if row.metric != "seconds"]
    assert timeless == [row for row in whole.rows if row.metric != "seconds"]
    rounds = 2 + 1 + 2 * 2 + (2 + 1 + 1)  # tuning of both, and three runs, of which one is a warm start
    assert len(seen) - 1 + len(again) == rounds
    again.clear()
    compare(methods, at, out=stored, resume=True, **options, **going_on)
    assert not again


def test_more_trials_go_on_from_fewer(tmp_path):
    method = {"FedAvg": cs.FedAvg(TRAIN)}
    few = tune(method, at(), trials=2, out=tmp_path, **OPTIONS)
    seen = []
    more = tune(method, at(), trials=3, out=tmp_path, resume=True, **counting(seen))
    assert seen == [1, 2]
    assert more.tuning[0]["all"][:2] == few.tuning[0]["all"]


def test_the_log_is_as_before_after_a_trial(caplog):
    tune({"FedAvg": cs.FedAvg(Wild(lr=1e33))}, at(), trials=1, **OPTIONS)
    logging.getLogger("consilience.rejections").warning("the update of client 1 was rejected")
    assert "was rejected" in caplog.text
