"""Switch: what the second method starts from, and that a run across the switch is one run, however it is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import consilience as cs
from consilience.algorithms.shared.factors import Server
from consilience.core.errors import CheckpointError, ConfigError
from support.runs import (
    PARAMETERS,
    TRAIN,
    Power,
    assert_same,
    assert_same_run,
    checkpoints,
    cut,
    files,
    fit,
    read_lines,
    timeless,
)
from support.scenarios import SIZES, linear
from support.switch import AT, FEDEP, FIRST, ROUNDS, SCALE, SWITCH

# What the second method starts from


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize(
    "server",
    [
        cs.server.Momentum(),
        cs.server.Momentum(momentum=0.9),
        cs.server.Adam(),
    ],
    ids=repr,
)
def test_a_switch_from_fedavg_to_itself_is_fedavg(server: Any, at: int) -> None:
    task, federation = linear()
    algorithm = cs.FedAvg(TRAIN, server=server)
    options = {"rounds": 4, "cohort": 3, "test": federation}
    switched = fit(cs.Switch(algorithm, algorithm, at=at), task, federation, **options)
    assert_same_run(fit(algorithm, task, federation, **options), switched)


def test_an_optimizer_without_memory_of_its_own_takes_none_over() -> None:
    task, federation = linear()
    plain, heavy = cs.FedAvg(TRAIN), cs.FedAvg(TRAIN, server=cs.server.Momentum(momentum=0.9))
    assert fit(cs.Switch(heavy, plain, at=AT), task, federation).server.memory.first is None
    begun = start_of(cs.Switch(plain, heavy, at=AT))
    assert torch.equal(begun.memory.first.theta, torch.zeros(PARAMETERS))


class Begun(Exception):  # noqa: N818
    """Carries what the second method began with."""


def start_of(switch: cs.Switch) -> Any:
    """The server's state at the switch: what the second method makes of what the first leaves."""

    def catching(task: cs.Task, info: cs.data.Info) -> Any:
        raise Begun(switch.then.start(task, info))

    task, federation = linear()
    second = type("Second", (type(switch.then),), {"start": lambda self, task, info: catching(task, info)})
    with pytest.raises(Begun) as caught:
        fit(cs.Switch(switch.first, second(), switch.at), task, federation, rounds=switch.at + 1)
    return caught.value.args[0]


@pytest.fixture(scope="module")
def left() -> cs.runs.Run:
    """The run of the first method alone."""
    task, federation = linear()
    return fit(FIRST, task, federation, rounds=AT)


def test_fedep_starts_around_the_weights_of_fedavg_with_what_all_examples_are_worth(left: cs.runs.Run) -> None:
    begun = start_of(SWITCH)
    precision = torch.tensor([SCALE * sum(SIZES)])
    assert isinstance(begun, Server)
    assert_same(begun.q, cs.Gaussian.of(left.posterior.mean, precision))


def test_every_site_starts_there_too_and_stays_until_its_client_takes_part() -> None:
    task, federation = linear()
    run = fit(SWITCH, task, federation, rounds=AT + 2, cohort=1)
    alone = fit(FIRST, task, federation, rounds=AT, cohort=1)
    n = federation.sizes.float().unsqueeze(1)
    sites = run.states.gather(torch.arange(len(SIZES))).factor
    fresh = cs.Gaussian.of(alone.posterior.mean.expand(len(SIZES), -1), SCALE * n)
    untouched = (sites.eta == fresh.eta).all(1)
    assert 3 <= int(untouched.sum()) < len(SIZES)
    assert torch.equal(sites.lam, fresh.lam)


@pytest.mark.parametrize(
    "infer",
    [cs.inference.Identity(TRAIN), cs.inference.Laplace(TRAIN), cs.inference.Newton()],
    ids=lambda i: type(i).__name__,
)
@pytest.mark.parametrize("prior", [0.0, 2.0])
def test_at_the_switch_the_posterior_is_the_product_of_the_prior_and_the_sites(
    infer: cs.inference.Tilted, prior: float
) -> None:
    task, federation = linear()
    algorithm = cs.FedEP(infer, prior=prior)
    q = start_of(cs.Switch(FIRST, algorithm, at=AT)).q
    theta = fit(FIRST, task, federation, rounds=AT).posterior.mean
    numbers = (torch.tensor(value) for value in (0, len(SIZES), sum(SIZES)))
    sites = algorithm.client(task, cs.data.Info(theta, *numbers), federation.sizes.float().unsqueeze(1)).factor
    product = sites.product() * cs.Gaussian(torch.zeros(PARAMETERS), torch.tensor([prior]))
    torch.testing.assert_close(q.eta, product.eta)
    torch.testing.assert_close(q.lam, product.lam)


@pytest.mark.parametrize("server", [cs.server.Adam(lr=0.1), cs.server.AdaGrad(lr=0.1)], ids=repr)
def test_squares_that_an_adaptive_optimizer_has_seen_on_weights_are_those_of_the_mean(server: Any) -> None:
    task, federation = linear()
    first = cs.FedAvg(TRAIN, server=server)
    v = fit(first, task, federation, rounds=AT).server.memory.second.theta
    begun = start_of(cs.Switch(first, cs.FedEP(cs.inference.Identity(TRAIN, scale=SCALE), server=server), AT))
    assert bool((v != 0).any())
    assert torch.equal(begun.memory.second, v)
    assert torch.equal(begun.memory.first, torch.zeros(PARAMETERS)), "and velocity does not go over"


def test_the_mean_of_a_posterior_is_where_a_method_without_one_goes_on() -> None:
    task, federation = linear()
    begun = start_of(cs.Switch(FEDEP, cs.FedAvg(TRAIN), at=AT))
    assert_same(begun.model, cs.Point(fit(FEDEP, task, federation, rounds=AT).posterior.mean))


def test_methods_that_do_not_see_the_same_clients_cannot_be_switched(tmp_path: Path) -> None:
    task, federation = linear()
    with pytest.raises(ConfigError, match="FedAvg and Pooled do not learn the same weights from the same clients"):
        fit(cs.Switch(FIRST, cs.Pooled(TRAIN), at=AT), task, federation, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_switch_before_the_first_round_is_refused() -> None:
    with pytest.raises(ConfigError, match="Switch: at must be at least 1, got 0"):
        cs.Switch(FIRST, FEDEP, at=0)


# What a run of a switch is


def test_the_history_is_that_of_both_methods(left: cs.runs.Run, tmp_path: Path) -> None:
    task, federation = linear()
    run = fit(SWITCH, task, federation, rounds=ROUNDS, out=tmp_path / "run")
    assert timeless(run.history[:AT]) == timeless(left.history)
    assert [line["round"] for line in run.history] == list(range(1, ROUNDS + 1))
    up = [line["bytes_up"] // (4 * len(SIZES)) for line in run.history]
    assert up == [PARAMETERS + 1] * ROUNDS, "weights and a count, then η and one precision"
    assert run.algorithm == FEDEP
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["method"] == "FedEP(I)"
    assert (facts["algorithm"]["name"], facts["algorithm"]["at"]) == ("Switch", AT)
    assert [plan["chunk"] for plan in facts["plans"]] == [4, 4]


def test_the_state_of_the_switch_is_kept_whatever_the_checkpoints_are(tmp_path: Path) -> None:
    task, federation = linear()
    fit(SWITCH, task, federation, rounds=ROUNDS, checkpoint_every=100, out=tmp_path / "run")
    assert [path.stem for path in checkpoints(tmp_path / "run")] == ["round-0000007", "round-0000003"]


@pytest.mark.parametrize("rounds", [1, AT])
def test_before_the_switch_only_the_first_method_runs_and_more_rounds_go_across_it(tmp_path: Path, rounds: int) -> None:
    task, federation = linear()
    run = fit(SWITCH, task, federation, rounds=rounds, test=federation, out=tmp_path / "run")
    assert run.algorithm == FIRST
    assert isinstance(run.posterior, cs.Point)
    assert_same_run(fit(FIRST, task, federation, rounds=rounds, test=federation), run)
    evaluation = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert evaluation["marginal"] is None
    options = {"rounds": ROUNDS, "test": federation, "evaluate_every": ROUNDS}
    resumed = fit(SWITCH, task, federation, out=tmp_path / "run", resume=True, **options)
    whole = fit(SWITCH, task, federation, **options)
    assert_same(whole.server, resumed.server)
    assert resumed.history[-1]["marginal"] == whole.history[-1]["marginal"]


def test_debug_audits_every_round_by_its_own_method(tmp_path: Path) -> None:
    task, federation = linear()
    run = fit(SWITCH, task, federation, rounds=ROUNDS, cohort=3, out=tmp_path / "run", debug=True)
    assert [list(line["audit"]) for line in run.history] == [[]] * AT + [["q_apart_from_sites"]] * (ROUNDS - AT)
    assert all(line["audit"]["q_apart_from_sites"] < 1e-5 for line in run.history[AT:])
    assert read_lines(tmp_path / "run") == run.history
    assert all("audit" not in line for line in fit(SWITCH, task, federation, rounds=ROUNDS).history)


@cs.algorithm
class Forgetful(cs.FedEP):
    """FedEP whose clients do not remember what they have sent."""

    def local(self, task: cs.Task, message: Any, state: Any, cohort: cs.data.Cohort) -> Any:
        update, _ = super().local(task, message, state, cohort)
        return update, state


def test_debug_ends_a_run_whose_posterior_is_no_longer_the_product_of_its_sites() -> None:
    task, federation = linear()
    switch = cs.Switch(FIRST, Forgetful(FEDEP.infer), at=AT)
    with pytest.raises(cs.ConsilienceError, match="q is not the product of the sites"):
        fit(switch, task, federation, rounds=ROUNDS, debug=True)
    fit(switch, task, federation, rounds=ROUNDS)


# Resuming


SWITCHES = {
    "FedAvg to FedEP": (SWITCH, {"cohort": 3}),
    "with AdaGrad": (
        cs.Switch(
            cs.FedAvg(TRAIN, server=cs.server.AdaGrad(lr=0.1)),
            cs.FedEP(
                cs.inference.MCMC(cs.optim.SGLD(lr=0.01, epochs=3), rescale=False), server=cs.server.AdaGrad(lr=0.1)
            ),
            AT,
        ),
        {"cohort": 2},
    ),
    "sites in files": (SWITCH, {"cohort": 3, "state_memory": 0}),
    "states in files before and after": (
        cs.Switch(cs.LocalOnly(TRAIN), FEDEP, at=AT),
        {"cohort": 3, "state_memory": 0},
    ),
    "states before, none after": (cs.Switch(cs.LocalOnly(TRAIN), FIRST, at=AT), {"cohort": 3}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "every"), [("FedAvg to FedEP", 1), *((name, 2) for name in SWITCHES), ("sites in files", 100)]
)
def test_resumed_anywhere_is_uninterrupted_bit_for_bit(tmp_path: Path, name: str, every: int) -> None:
    task, federation = linear()
    switch, options = SWITCHES[name]
    options = {"rounds": ROUNDS, "test": federation, "checkpoint_every": every, **options}
    whole = fit(switch, task, federation, out=tmp_path / "whole", **options)
    for at in (AT - 1, AT, AT + 1, AT + 3):
        with pytest.raises(Power):
            fit(switch, task, federation, out=tmp_path / "parts", resume=True, callbacks=[cut(at)], **options)
    resumed = fit(switch, task, federation, out=tmp_path / "parts", resume=True, **options)
    assert_same_run(whole, resumed)
    assert read_lines(tmp_path / "parts") == resumed.history
    one, other = (cs.core.unpack(checkpoints(tmp_path / which)[0].read_bytes()) for which in ("whole", "parts"))
    assert_same(one, other)
    assert_same(cs.load_posterior(tmp_path / "parts"), whole.posterior)


@pytest.mark.parametrize(
    ("name", "rounds"), [*(("FedAvg to FedEP", AT + k) for k in range(3)), ("sites in files", AT + 1)]
)
def test_a_damaged_checkpoint_near_the_switch_is_no_hindrance(tmp_path: Path, name: str, rounds: int) -> None:
    task, federation = linear()
    switch, options = SWITCHES[name]
    options = {"test": federation, "evaluate_every": 1, "checkpoint_every": 2, **options}
    whole = fit(switch, task, federation, rounds=ROUNDS, **{**options, "state_memory": 1 << 20})
    fit(switch, task, federation, rounds=rounds, out=tmp_path / "run", **options)
    newest = checkpoints(tmp_path / "run")[0]
    newest.write_bytes(newest.read_bytes()[:-1])
    assert_same_run(whole, fit(switch, task, federation, rounds=ROUNDS, out=tmp_path / "run", resume=True, **options))


def test_a_run_across_its_switch_is_not_resumed_with_another_one(tmp_path: Path) -> None:
    task, federation = linear()
    fit(SWITCH, task, federation, rounds=ROUNDS, out=tmp_path / "run")
    for other, sentence in {
        cs.Switch(FIRST, FEDEP, at=AT + 1): r"algorithm\.at is 3 there and 4 here",
        cs.Switch(
            FIRST, cs.FedEP(cs.inference.Identity(TRAIN)), AT
        ): r"algorithm\.then\.infer\.scale is 0\.4 there and 0\.05",
        FEDEP: r"algorithm\.name is 'Switch' there and 'FedEP' here",
    }.items():
        with pytest.raises(CheckpointError, match=sentence):
            fit(other, task, federation, rounds=ROUNDS + 1, out=tmp_path / "run", resume=True)


# Warm starts


@pytest.fixture
def warm(tmp_path: Path) -> Path:
    """The directory of a finished run of the first method."""
    task, federation = linear()
    fit(FIRST, task, federation, rounds=AT, test=federation, evaluate_every=1, out=tmp_path / "warm")
    return tmp_path / "warm"


OPTIONS: dict[str, Any] = {"rounds": ROUNDS, "evaluate_every": 1}


@pytest.mark.parametrize("kept", [True, False], ids=["out", "no out"])
def test_from_a_warm_start_it_is_the_whole_run(tmp_path: Path, warm: Path, kept: bool) -> None:
    task, federation = linear()
    whole = fit(SWITCH, task, federation, test=federation, **OPTIONS)
    before = files(warm)
    out = tmp_path / "run" if kept else None
    run = fit(SWITCH, task, federation, test=federation, warm=warm, out=out, **OPTIONS)
    assert_same_run(whole, run)
    assert run.history[:AT] == read_lines(warm)
    assert files(warm) == before
    if out is not None:
        assert read_lines(out) == run.history
        assert_same(cs.load_posterior(out), whole.posterior)


@pytest.mark.parametrize("at", [AT + 1, AT + 2])
def test_a_run_from_a_warm_start_is_resumed_without_it(tmp_path: Path, warm: Path, at: int) -> None:
    task, federation = linear()
    options = {**OPTIONS, "test": federation, "checkpoint_every": 100, "out": tmp_path / "run", "warm": warm}
    with pytest.raises(Power):
        fit(SWITCH, task, federation, callbacks=[cut(at)], **options)
    (warm / "run.json").unlink()
    resumed = fit(SWITCH, task, federation, resume=True, **options)
    assert_same_run(fit(SWITCH, task, federation, test=federation, **OPTIONS), resumed)


def test_a_kill_while_a_warm_start_is_taken_over_leaves_nothing_twice(tmp_path: Path, warm: Path) -> None:
    task, federation = linear()
    options = {**OPTIONS, "test": federation, "out": tmp_path / "run", "warm": warm}
    fit(SWITCH, task, federation, **options)
    later = [tmp_path / "run" / name for name in ("posterior.safetensors", "evaluation.json")]
    for path in (*checkpoints(tmp_path / "run"), *later):
        path.unlink()  # as if the kill had come after the first lines of the metrics
    run = fit(SWITCH, task, federation, resume=True, **options)
    assert [line["round"] for line in read_lines(tmp_path / "run")] == list(range(1, ROUNDS + 1))
    assert_same_run(fit(SWITCH, task, federation, test=federation, **OPTIONS), run)


@pytest.mark.parametrize(("first", "then"), [(0, 1 << 20), (1 << 20, 0)])
def test_the_first_methods_states_stay_behind_wherever_they_are(tmp_path: Path, first: int, then: int) -> None:
    task, federation = linear()
    alone = cs.LocalOnly(TRAIN)
    fit(alone, task, federation, rounds=AT, out=tmp_path / "warm", state_memory=first)
    options = {"rounds": ROUNDS, "out": tmp_path / "run", "state_memory": then, "warm": tmp_path / "warm"}
    run = fit(cs.Switch(alone, FEDEP, at=AT), task, federation, **options)
    assert_same_run(fit(cs.Switch(alone, FEDEP, at=AT), task, federation, rounds=ROUNDS), run)


WRONG: dict[str, tuple[str, type[Exception], Any]] = {
    "no switch": ("warm is for a Switch: FedEP\\(I\\) has no first method", ConfigError, {"method": FEDEP}),
    "another first method": (
        r"warm holds another run: algorithm\.server\.lr is 0\.1 there and 0\.01 here",
        CheckpointError,
        {"method": cs.Switch(cs.FedAvg(TRAIN, server=cs.server.Adam()), FEDEP, AT)},
    ),
    "another seed": ("warm holds another run: seed is 0 there and 1 here", CheckpointError, {"seed": 1}),
    "another cohort": ("warm holds another run: cohort is 5 there and 2 here", CheckpointError, {"cohort": 2}),
    "another federation": (
        r"warm holds another run: .*federation\.clients is 5 there and 2 here",
        CheckpointError,
        {"federation": linear(sizes=(20, 8), names=None)[1], "cohort": None},
    ),
    "another round": (
        "warm ends at round 3, but the switch is after round 2",
        CheckpointError,
        {"method": cs.Switch(FIRST, FEDEP, at=2)},
    ),
    "nothing to do": ("rounds is 3, but the warm start has 3 already", ConfigError, {"rounds": AT}),
    "no directory": ("elsewhere is not a run directory", CheckpointError, {"warm": "elsewhere"}),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_warm_start_gets_a_sentence_and_nothing_is_written(tmp_path: Path, warm: Path, what: str) -> None:
    task, federation = linear()
    sentence, kind, change = WRONG[what]
    options = {"method": SWITCH, "federation": federation, "warm": "warm", **OPTIONS, **change}
    method, federation = options.pop("method"), options.pop("federation")
    options["warm"] = tmp_path / options["warm"]
    before = files(tmp_path)
    with pytest.raises(kind, match=sentence):
        fit(method, task, federation, out=tmp_path / "run", **options)
    assert files(tmp_path) == before
    assert not (tmp_path / "run").exists()


def test_a_warm_start_that_has_no_checkpoint_yet_is_refused(tmp_path: Path, warm: Path) -> None:
    task, federation = linear()
    for path in (*checkpoints(warm), *warm.glob("evaluation.json")):
        path.unlink()
    with pytest.raises(CheckpointError, match="warm ends at no round, but the switch is after round 3"):
        fit(SWITCH, task, federation, warm=warm, **OPTIONS)
