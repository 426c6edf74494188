"""Which code is compiled, and which plan is followed, for given times."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import consilience as cs
from consilience.engines.autotune import candidates
from consilience.engines.choice import Choice
from consilience.engines.plan import Plan
from consilience.engines.remembered import Known, Remembered, Timed
from support.scenarios import linear

SEVERAL, SINGLE = Plan(5, 2, 1), Plan(1, 2, 1)
KNOWN = Known(Timed(SINGLE, 2.0), (SEVERAL, SINGLE))
LONG, SHORT = 100, 10  # rounds; of two seconds each, ten are not worth compiling
ids, examples = torch.arange(10), torch.full((10,), 6)


@pytest.fixture(autouse=True)
def _idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (0.1, 0.1, 0.1))


@dataclass
class Machine:
    """A machine on which compiling takes `seconds`, and a compiled round the time in `rounds`, by chunk."""

    plans: Path
    compile: bool | None = None
    known: Known = KNOWN
    seconds: float = 8.0
    rounds: dict[int, float] = field(default_factory=lambda: {5: 1.8, 1: 1.6})
    readied: list[int] = field(default_factory=list)
    chosen: int = 0

    def __post_init__(self) -> None:
        with cs.Simulator(device="cpu").open(cs.FedAvg(), *linear(), seed=0, cohort=5, rounds=1) as session:
            self.task = session.task
        self.wanted = SimpleNamespace(compile=self.compile)

    def choose(self, *given: Any) -> Known:
        self.chosen += 1
        return self.known

    def time(self, *given: Any) -> None:
        pass

    def try_out(self, found: Timed, *given: Any) -> Timed:
        return replace(found, round=self.rounds[found.plan.chunk])

    def ready(self, plan: Plan) -> float:
        assert plan.compile
        self.readied.append(plan.chunk)
        return self.seconds

    def __call__(self, rounds: int) -> tuple[int, bool]:
        self.readied.clear()
        remembered: Any = Remembered(self.plans)
        plan = Choice(remembered, "key", rounds, examples, lambda: self, self.ready)(None, None, ids)  # type: ignore
        return plan.chunk, plan.compile


@pytest.fixture
def plans(tmp_path: Path) -> Iterator[Path]:
    return tmp_path / "plans.json"


def test_plans_worth_compiling_are_the_fastest_at_once_and_the_fastest_one_by_one() -> None:
    slower = [replace(SEVERAL, workers=1), replace(SINGLE, workers=1)]
    found = [
        Timed(plan, seconds) for plan, seconds in zip((SINGLE, *slower, SEVERAL), (2.0, 2.6, 3.0, 2.3), strict=True)
    ]
    assert candidates(found) == (SEVERAL, SINGLE)
    assert candidates(found[:1]) == (SINGLE,)


@pytest.mark.parametrize("compile", [None, True])
@pytest.mark.parametrize("fastest", [5, 1])
def test_the_fastest_compiled_code_is_followed(plans: Path, fastest: int, compile: bool | None) -> None:
    machine = Machine(plans, compile, rounds={5: 1.8, 1: 1.8} | {fastest: 1.6})
    assert machine(LONG) == (fastest, True)
    assert machine.readied == [5, 1]


def test_compiled_code_that_is_slower_is_not_followed(plans: Path) -> None:
    assert Machine(plans, rounds={5: 2.2, 1: 2.1})(LONG) == (1, False)


def test_code_that_must_be_compiled_is_followed_though_it_is_slower(plans: Path) -> None:
    assert Machine(plans, True, rounds={5: 2.2, 1: 2.1})(LONG) == (1, True)


def test_a_few_rounds_are_not_worth_compiling(plans: Path) -> None:
    machine = Machine(plans)
    assert machine(SHORT) == (1, False)
    assert machine.readied == []


def test_code_that_must_be_compiled_in_a_few_rounds_is_compiled_once(plans: Path) -> None:
    machine = Machine(plans, True)
    assert machine(SHORT) == (5, True)
    assert machine.readied == []  # by whoever follows the plan


def test_a_second_plan_is_compiled_only_if_both_are_worth_it(plans: Path) -> None:
    machine = Machine(plans, seconds=45.0)
    assert machine(LONG) == (5, True)
    assert machine.readied == [5]


def test_where_one_plan_is_worth_compiling_it_is_not_compared(plans: Path) -> None:
    machine = Machine(plans, True, Known(Timed(SEVERAL, 2.0), (SEVERAL,)))
    assert machine(LONG) == (5, True)
    assert machine.readied == []


@pytest.mark.parametrize("compile", [None, True])
def test_the_fastest_compiled_code_is_remembered(plans: Path, compile: bool | None) -> None:
    machine = Machine(plans, compile)
    assert machine(LONG) == (1, True)
    assert machine(LONG) == (1, True)
    assert machine.chosen == 1
    assert machine.readied == [1]


def test_a_few_rounds_do_not_follow_remembered_compiled_code(plans: Path) -> None:
    machine = Machine(plans)
    assert machine(LONG) == (1, True)
    assert machine(SHORT) == (1, False)
    assert machine.readied == []


def test_what_must_not_be_compiled_is_not(plans: Path) -> None:
    machine = Machine(plans, False)
    assert machine(LONG) == (1, False)
    assert machine.readied == []
