"""Modules that can only be computed for one client at a time."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import consilience as cs
from consilience.engines.autotune import Stopwatch
from consilience.engines.states import InMemory
from support.runs import FORKED, HERE, TRAIN, fit
from support.scenarios import linear


class Branching(nn.Module):
    """Which way a batch goes depends on the weights, and vmap cannot go both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out if self.layer.weight.sum() > 0 else 2 * out


class Mixing(Branching):
    """Which way a batch goes depends on its examples."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out if out.sum() > 0 else 2 * out


def test_where_several_clients_cannot_be_computed_at_once_they_are_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    task, federation = cs.Regression(Branching()), linear()[1]
    run = fit(cs.FedAvg(TRAIN), task, federation, engine=cs.Simulator(device="cpu"))
    assert run.plan is not None
    assert run.plan.chunk == 1
    assert "several at once failed with RuntimeError: vmap" in run.plan.why
    assert "clients are computed one by one, which may be slower: several at once failed with" in caplog.text
    alone = fit(cs.FedAvg(TRAIN), task, federation, engine=cs.Simulator(device="cpu", chunk=1, workers=1))
    torch.testing.assert_close(run.posterior.mean, alone.posterior.mean)


def test_they_are_one_by_one_on_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would be asked, on a CPU."""
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    (task, federation), algorithm = (cs.Regression(Branching()), linear()[1]), cs.FedAvg(TRAIN)
    with cs.Simulator(device="cpu").open(algorithm, task, federation, seed=0, cohort=5, rounds=1) as session:
        numbers = (torch.tensor(n) for n in (0, 5, federation.examples))
        server = algorithm.start(session.task, cs.data.Info(task.initial(), *numbers))
        known = session.autotuner(1).choose_on_gpu(
            server, InMemory(lambda ids: None), federation.sizes.argsort(descending=True)
        )
    plan = known.plain.plan
    assert plan.chunk == 1
    assert plan.why.startswith("several at once failed with RuntimeError: vmap")


def test_the_length_of_a_round_is_that_of_all_steps_of_all_clients() -> None:
    (task, federation), algorithm = linear((8, 8, 8, 8), None), cs.FedAvg(replace(TRAIN, epochs=3, longest=1))
    with cs.Simulator(device="cpu").open(algorithm, task, federation, seed=0, cohort=4, rounds=1) as session:
        numbers = (torch.tensor(n) for n in (0, 4, federation.examples))
        server = algorithm.start(session.task, cs.data.Info(task.initial(), *numbers))
        tuner = session.autotuner(1)
        tuner.time(server, InMemory(lambda ids: None), torch.tensor([0, 1]), 1)
    assert (tuner.watch.steps, tuner.watch.batches) == (3, 3.0)  # one of two batches in each of three epochs


def test_what_takes_too_long_is_not_tried() -> None:
    watch = Stopwatch()
    assert watch.allows(4.0)
    assert not watch.allows(6.0)
    watch.round = 10.0
    assert watch.allows(19.0)
    assert not watch.allows(21.0)


@pytest.mark.parametrize("engine", [HERE, FORKED], ids=["here", "forked"])
def test_who_wanted_several_at_once_is_told_to_take_one(engine: cs.Simulator) -> None:
    with pytest.raises(cs.core.errors.ClientError, match=r"RuntimeError: vmap: .* at once: set chunk = 1$"):
        fit(cs.FedAvg(TRAIN), cs.Regression(Branching()), linear()[1], engine=engine)


def test_gradients_of_single_examples_cannot_be_taken_of_every_layer() -> None:
    with pytest.raises(
        cs.core.errors.ClientError, match="this method needs gradients of single examples, or second derivatives"
    ):
        fit(cs.algorithms.FedLA(TRAIN), cs.Regression(Mixing()), linear()[1], engine=cs.Simulator(device="cpu"))
