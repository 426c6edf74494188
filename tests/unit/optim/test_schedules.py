"""Schedules of the step size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import consilience as cs
from consilience.config import read_config
from consilience.core.errors import ConfigError
from support.training import EXACT, world


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_tapered_steps_are_powers_of_n():
    assert torch.allclose(cs.optim.Tapered(delta=0.8).factor(numbers(1, 2, 10)), numbers(1, 2**-0.8, 10**-0.8))


def test_a_cosine_falls_from_one_to_its_floor_and_stays_there():
    factor = cs.optim.Cosine(total=10, floor=0.1).factor(numbers(1, 6, 11, 50))
    assert torch.allclose(factor, numbers(1, 0.55, 0.1, 0.1))


@pytest.mark.parametrize("delta", [0.5, 0.75, 1.01])
def test_steps_that_break_a_condition_of_convergence_need_check_off(delta):
    with pytest.raises(ConfigError, match=r"\(3/4, 1\].*sum to infinity.*stay finite.*check=False"):
        cs.optim.Tapered(delta=delta)
    assert cs.optim.Tapered(delta=delta, check=False).delta == delta


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: cs.optim.Tapered(unit="hours"), "unit must be 'steps' or 'epochs' or 'rounds', got 'hours'"),
        (lambda: cs.optim.Tapered(delta=-1.0, check=False), "delta must be at least 0, got -1.0"),
        (lambda: cs.optim.Cosine(total=0), "total must be at least 1, got 0"),
        (lambda: cs.optim.Cosine(floor=1.5), "floor must be at most 1, got 1.5"),
        (lambda: cs.optim.PerClient(), "one number for each client"),
        (lambda: cs.optim.PerClient(factors=(1.0, -1.0)), "factors must be at least 0"),
        (lambda: cs.optim.PerClient(factors=(1.0,), of=cs.optim.Tapered(unit="rounds")), "they must be the same"),
    ],
)
def test_wrong_schedules_are_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize(("unit", "n"), [("rounds", [3, 3]), ("epochs", [6, 6]), ("steps", [5 * 4 + 2, 5 * 1 + 2])])
def test_n_counts_rounds_epochs_or_a_clients_own_steps_from_the_beginning(unit, n):
    """Round 3, second of two epochs, second step; clients with 4 batches and 1 batch an epoch."""
    assert cs.optim.Tapered(unit=unit).count(3, 1, 1, 2, torch.tensor([4.0, 1.0])).tolist() == n


@pytest.mark.parametrize("kind", [cs.SGD, cs.optim.Adam, cs.optim.AMSGrad, cs.optim.SGLD, cs.optim.SGHMC])
def test_a_schedule_of_ones_changes_nothing_for_any_chain(kind):
    task, group = world()
    chain = kind(lr=0.01, batch_size=8)
    plain = chain(task, task.initial(), group)
    for ones in (cs.optim.Tapered("steps", 0.0, check=False), cs.optim.PerClient(factors=(1.0,) * 4)):
        scheduled = replace(chain, schedule=ones)(task, task.initial(), group)
        torch.testing.assert_close(scheduled, plain, **EXACT)


def test_factors_must_be_given_for_every_client():
    task, group = world()
    short = cs.SGD(schedule=cs.optim.PerClient(factors=(1.0, 1.0)))
    with pytest.raises(ConfigError, match="has 2 values, but there is a client 3"):
        short(task, task.initial(), group)


def test_a_config_names_a_schedule(tmp_path):
    (tmp_path / "c.toml").write_text(
        '[data]\nname = "digits"\n[partition]\nname = "iid"\nclients = 4\n[model]\nname = "logistic"\n'
        '[algorithm]\nname = "SAFL"\nlr = 0.2\n[algorithm.train]\nname = "SGD"\n'
        'schedule = { name = "Tapered", delta = 0.8, unit = "rounds" }\n[run]\nrounds = 2\n'
    )
    method = read_config(tmp_path / "c.toml").algorithm()
    assert method == cs.SAFL(cs.SGD(lr=0.2, schedule=cs.optim.Tapered(delta=0.8, unit="rounds")))
    with pytest.raises(ConfigError, match="delta must lie in"):
        read_config(tmp_path / "c.toml", ["algorithm.train.schedule.delta=0.5"]).algorithm()
